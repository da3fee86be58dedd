"""One request on its way: its sequence, its sampling, and the text that has come out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepseek_attn.engine.sampling import CounterGenerator, SamplingParams, make_generator
from deepseek_attn.engine.stopping import StopChecker
from deepseek_attn.runner import ModelRunner, Sequence
from deepseek_attn.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Completion:
    """What a request produced.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated tokens, the stop token included.
        text: generated text without stop token or stop string; empty without a tokenizer.
        finish_reason: ``"stop"`` (EOS, stop token, stop string) or ``"length"`` (max_tokens or max_model_len).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(eq=False)
class Request:
    """A running request."""

    sequence: Sequence
    params: SamplingParams
    generator: CounterGenerator
    stop: StopChecker
    prompt_length: int
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def create(
        cls,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        prompt: Iterable[int],
        params: SamplingParams,
        index: int = 0,
    ) -> Request:
        """Checks the prompt and starts a sequence; nothing is computed yet.

        Raises:
            ValueError: the prompt cannot be run, or stop strings without a tokenizer.
        """
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True) if tokenizer else None
        stop = StopChecker(params, runner.config.eos_token_ids, decoder)
        sequence = runner.sequence(prompt)
        return cls(sequence, params, make_generator(params, index), stop, len(sequence.token_ids))

    def push(self, token_id: int) -> str:
        """Takes one sampled token; returns the text that is now certain. Frees the caches at the end."""
        text, reason = self.stop.push(token_id)
        if reason is None and len(self.sequence.token_ids) + 1 >= self.sequence.runner.layout.max_model_len:
            text, reason = text + self.stop.abort(), "length"
        self.sequence.token_ids.append(token_id)
        self.text.append(text)
        if reason is not None:
            self.finish_reason = reason
            self.sequence.free()
        return text

    def completion(self) -> Completion:
        ids = self.sequence.token_ids
        return Completion(
            ids[: self.prompt_length], ids[self.prompt_length :], "".join(self.text), self.finish_reason or "abort"
        )
