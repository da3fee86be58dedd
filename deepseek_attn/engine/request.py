"""One request: its sequence, its sampling parameters, and the text generated so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepseek_attn.cache.prefix import BlockKeys
from deepseek_attn.engine.sampling import CounterGenerator, SamplingParams, make_generator
from deepseek_attn.engine.stopping import StopChecker
from deepseek_attn.runner import ModelRunner, Sequence
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Completion:
    """Output of a request.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated tokens, the stop token included.
        text: generated text without stop token or stop string; empty without a tokenizer.
        finish_reason: ``"stop"`` (EOS, stop token, stop string), ``"length"`` (max_tokens or max_model_len),
            ``"abort"`` (cancelled, or not finished) or ``"error"``.
        error: what went wrong, with finish_reason ``"error"``.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
    cached_tokens: int = 0


class RequestFailed(RuntimeError):
    """A request ended with an error."""


@dataclass(eq=False)
class Request:
    """A request, from its prompt to its end.

    Attributes:
        prompt_token_ids: as given when it was refused, so that its completion can show them.
        keys: names of its prefixes in the prefix cache.
        shared: tokens at its beginning that other requests had too; a step stops there once to leave a snapshot.
        kept_blocks: blocks of tokens that have been offered to the prefix cache.
        cached_tokens: tokens that came from the prefix cache when it first started.
        preemptions: number of times it was preempted.
    """

    _sequence: Sequence | None
    prompt_token_ids: list[int]
    params: SamplingParams
    generator: CounterGenerator
    _stop: StopChecker | None
    keys: BlockKeys | None = None
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    shared: int = 0
    kept_blocks: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

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
        return cls(sequence, list(sequence.token_ids), params, make_generator(params, index), stop)

    @classmethod
    def refused(cls, prompt: Iterable[int], params: SamplingParams, error: str) -> Request:
        """A request that ended before it began."""
        prompt = list(prompt) if isinstance(prompt, Iterable) else []
        return cls(None, prompt, params, make_generator(params), None, finish_reason="error", error=error)

    @property
    def sequence(self) -> Sequence:
        """Tokens and caches; tokens stay when a preemption frees the caches. RuntimeError for a refused request."""
        if self._sequence is None:
            raise RuntimeError("a request that was refused has no sequence")
        return self._sequence

    @property
    def stop(self) -> StopChecker:
        """When it ends, and its number of tokens. RuntimeError for a refused request."""
        if self._stop is None:
            raise RuntimeError("a request that was refused generates nothing")
        return self._stop

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def confirmed_length(self) -> int:
        """Tokens of the prompt and those that were sampled: beyond them, ``token_ids`` holds drafts."""
        return self.prompt_length + self.stop.count

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        within_limit = self.sequence.limits.max_model_len - self.confirmed_length
        return min(self.params.max_tokens - self.stop.count, within_limit)

    @property
    def max_computed(self) -> int:
        """Tokens that can ever be computed: the last one that it generates is not."""
        return self.confirmed_length + self.tokens_left - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, token_id: int) -> str:
        """Takes one sampled token; returns the text that is now certain. Frees the caches at the end."""
        text, reason = self.stop.push(token_id)
        if reason is None and len(self.sequence.token_ids) + 1 >= self.sequence.limits.max_model_len:
            text, reason = text + self.stop.abort(), "length"
        self.sequence.token_ids.append(token_id)
        self.text.append(text)
        if reason is not None:
            self.finish_reason = reason
            self.sequence.free()
        return text

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends it from outside: emits text that was held back for a stop string, and frees the caches."""
        self.text.append(self.stop.abort())
        self.finish_reason, self.error = reason, error
        self.release()

    def release(self) -> None:
        """Frees the caches and removes drafts; the other tokens stay."""
        self.sequence.free()
        self.drop_drafts()

    def drop_drafts(self) -> None:
        """Removes drafts that no step has verified."""
        del self.sequence.token_ids[self.confirmed_length :]

    def completion(self) -> Completion:
        generated = self.sequence.token_ids[self.prompt_length : self.confirmed_length] if self._sequence else []
        return Completion(
            self.prompt_token_ids,
            generated,
            "".join(self.text),
            self.finish_reason or "abort",
            self.error,
            self.cached_tokens,
        )
