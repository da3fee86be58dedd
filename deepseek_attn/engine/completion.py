"""Output of a request, and its chat message in OpenAI's form, whole or as it grows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepseek_attn.runner.logprobs import TokenLogprobs
from deepseek_attn.runner.token_records import TokenRecords
from deepseek_attn.text.reply import ToolCall


class RequestFailed(RuntimeError):
    """A request ended with an error."""


@dataclass(frozen=True)
class Completion:
    """Output of a request.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated tokens, the stop token included.
        text: generated text without stop token or stop string; empty without a tokenizer.
        reasoning, answer: the text before and after the token ``</think>``; see `ReplyParser`. A prompt whose last
            ``<think>`` is not closed begins the reasoning; after any other all text is answer.
        tool_calls: the calls in the text; their markup is not part of the answer.
        finish_reason: ``"stop"`` (EOS, stop token, stop string), ``"length"`` (max_tokens or max_model_len),
            ``"abort"`` (cancelled, or not finished) or ``"error"``.
        error: the error message, with finish_reason ``"error"``.
        cached_tokens: prompt tokens that came from the prefix cache, or that the first of ``n`` completions computed.
        others: with ``SamplingParams(n=...)``, the completions of the prompt after this first one.
        logprobs: log-probabilities of ``token_ids``; None without `SamplingParams.logprobs`.
        prompt_logprobs: of ``prompt_token_ids[1:]``, fewer if the request ended before; None without
            `SamplingParams.prompt_logprobs`.
        records: records of all computed tokens (the last generated token is not computed); None unless requested.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
    cached_tokens: int = 0
    reasoning: str = ""
    answer: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    others: list[Completion] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    records: TokenRecords | None = None

    @property
    def outputs(self) -> list[Completion]:
        """All ``n`` completions of the prompt, this one first."""
        return [self, *self.others]

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a chat message, to go on with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                called(self, i) | {"function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(self.tool_calls)
            ]
        return message


def message_deltas(completion: Completion, parts: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """`Completion.message` piece by piece, as the deltas of OpenAI's streams.

    Args:
        completion: of the same request, at any time.
        parts: `TextStream.parts`.
    """
    yield {"role": "assistant", "content": ""}
    index = -1
    for part, piece in parts:
        if part == "tool_call":
            index += 1
            call = called(completion, index) | {"index": index, "function": {"name": piece, "arguments": ""}}
            yield {"tool_calls": [call]}
        elif part == "arguments":
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        else:
            yield {"reasoning_content" if part == "reasoning" else "content": piece}


def called(completion: Completion, index: int) -> dict[str, Any]:
    """Id and type of a tool call in a message. The id depends on the prompt, so it is unique in a chat."""
    digest = hashlib.blake2b(np.array(completion.prompt_token_ids, dtype=np.int64).tobytes(), digest_size=8)
    return {"id": f"call_{digest.hexdigest()}_{index}", "type": "function"}
