"""Statistics of a step, and their sums over all steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Counts:
    """Counts that add up over steps.

    Attributes:
        seconds: wall time, sampling and scheduling included.
        prefill_tokens, decode_tokens: new tokens of prompts, and of decoding requests.
        generated: tokens that were sampled.
        preempted: requests that lost their caches to others.
        queried_tokens: tokens of the admitted requests.
        cached_tokens: tokens of them that the prefix cache had.
        evicted: snapshots that were evicted from the prefix cache.
        verifications: how many requests had these (drafts, accepted drafts), those without drafts left out.
    """

    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated: int = 0
    preempted: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    evicted: int = 0
    verifications: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Tokens that went through the model."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def verified(self) -> int:
        """Requests whose drafts were verified."""
        return self.verifications.total()

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(drafts * count for (drafts, _), count in self.verifications.items())

    @property
    def accepted(self) -> int:
        """Drafts that were right."""
        return sum(right * count for (_, right), count in self.verifications.items())


COUNTS = tuple(count.name for count in fields(Counts))


@dataclass
class StepStats(Counts):
    """One step.

    Attributes:
        prefills, decodes: requests that took part.
        running, waiting: requests after the step.
        admitted, finished: requests that started, or ended.
        pages: (held, all) pages by group, after the step; snapshots hold pages too.
    """

    prefills: int = 0
    decodes: int = 0
    running: int = 0
    waiting: int = 0
    admitted: int = 0
    finished: int = 0
    pages: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count(self, lengths: list[int], decode_tokens: int) -> None:
        """Counts the new tokens of each request; at most ``decode_tokens`` are a decode."""
        for n in lengths:
            if n <= decode_tokens:
                self.decodes, self.decode_tokens = self.decodes + 1, self.decode_tokens + n
            else:
                self.prefills, self.prefill_tokens = self.prefills + 1, self.prefill_tokens + n

    @property
    def pool_use(self) -> float:
        """Fraction of the pages of the fullest pool that are in use."""
        return max((held / pages for held, pages in self.pages.values() if pages), default=0.0)


@dataclass
class EngineStats(Counts):
    """Sums over the steps of an engine.

    Attributes:
        finished: requests by finish reason.
    """

    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def add(self, step: Counts) -> None:
        self.steps += 1
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(step, name))

    @property
    def hit_rate(self) -> float:
        """Fraction of the tokens of admitted requests that were in the prefix cache."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the verified drafts that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Fraction of the first, second, ... drafts after a confirmed token that were accepted."""
        longest = max((drafts for drafts, _ in self.verifications), default=0)
        rates = []
        for position in range(longest):
            drafted = sum(count for (drafts, _), count in self.verifications.items() if drafts > position)
            accepted = sum(count for (_, right), count in self.verifications.items() if right > position)
            rates.append(accepted / drafted)
        return rates

    @property
    def tokens_per_step(self) -> float:
        """New tokens per request and step that verified drafts: the accepted drafts, and the model's own token."""
        return 1 + self.accepted / self.verified if self.verified else 1.0
