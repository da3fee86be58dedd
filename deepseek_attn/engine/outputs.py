"""Outputs of an engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_attn.engine.request import Request
from deepseek_attn.runner.logprobs import TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """Tokens and text of one request since the last step that returned.

    Attributes:
        computed: its tokens that went through the model, rejected drafts left out.
        token_ids, text: new tokens, and the text that is now certain.
        finished: it has ended; this is the last output of the request.
        logprobs: log-probabilities of the new tokens; None without `SamplingParams.logprobs`.
    """

    request: Request
    computed: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finished: bool = False
    logprobs: TokenLogprobs | None = None
