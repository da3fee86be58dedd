"""The log-probabilities that a request has so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepseek_attn.runner.logprobs import ScoredRows, TokenLogprobs


@dataclass(eq=False)
class RequestLogprobs:
    """The log-probabilities that one request has so far.

    Attributes:
        top, prompt_top: alternatives per generated token, and per token of the prompt; None: no log-probabilities.
        num_known: number of prompt tokens that have a token before them.
        prompt: log-probabilities of these, as far as computed.
        generated: log-probabilities of each generated token; after an interruption possibly of one more, which `record`
            replaces.
    """

    top: int | None
    prompt_top: int | None
    num_known: int
    prompt: list[TokenLogprobs] = field(default_factory=list)
    generated: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt whose log-probabilities are there."""
        return sum(map(len, self.prompt))

    @property
    def missing(self) -> ScoredRows | None:
        """The prompt tokens whose log-probabilities are still to be computed; None if all are."""
        if self.prompt_top is None or (first := self.num_scored) == self.num_known:
            return None
        return ScoredRows(first, self.num_known, self.prompt_top)

    def record(self, number: int, row: TokenLogprobs) -> None:
        """Keeps the log-probability of the generated token of this number, counted from 0."""
        self.generated[number:] = [row]

    def of_generated(self, start: int, end: int) -> TokenLogprobs | None:
        """Of the generated tokens from number ``start`` to ``end - 1``; None if they are not wanted."""
        return None if self.top is None else TokenLogprobs.join(self.generated[start:end], self.top)

    def of_prompt(self) -> TokenLogprobs | None:
        """Of the tokens of the prompt after the first, as far as they are computed; None if they are not wanted."""
        return None if self.prompt_top is None else TokenLogprobs.join(self.prompt, self.prompt_top)
