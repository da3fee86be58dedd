"""Training tasks: a source of token batches with the positions that count."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

BOS = 0
CHANCE_SEQUENCES = 1024  # of each half that `Task.chance` draws
CHANCE_SEED = 30_000


class Batch(NamedTuple):
    """One batch on the CPU.

    Attributes:
        tokens: int64 ``[B, S + 1]``; a model reads the first ``S`` and predicts the last ``S``.
        mask: bool ``[B, S + 1]``: tokens that count as predictions. The first one never does.
        targets: int64 ``[B, S + 1]``: tokens to predict: ``tokens``, but for answers that are not written.
        sources: int64 ``[B, S + 1]``: where a token that counts can be read, the place of the fact; -1 where there is
            no such place.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor


def generator_of(seed: int, step: int) -> torch.Generator:
    """The CPU generator of one batch: batches follow from (seed, step), so that a training resumes at any step."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class Task(ABC):
    """A source of batches. Loss and accuracy (how often the likeliest token is the right one) are over the mask.

    Attributes:
        name: for reports.
        vocab_size: ids of its tokens are below this.
    """

    name: str
    vocab_size: int

    @abstractmethod
    def batch(
        self, size: int, seq_len: int, generator: torch.Generator, split: str = "train", difficulty: float = 1.0
    ) -> Batch:
        """``size`` sequences of ``seq_len`` predictions, drawn with a CPU generator.

        Args:
            split: ``"train"`` or ``"test"``: text that is held out. Synthetic tasks draw both from one distribution.
            difficulty: in (0, 1]; below 1 a synthetic task has fewer or nearer facts, for a curriculum.

        Raises:
            ValueError: ``seq_len`` is too short for the task.
        """

    def chance(self, seq_len: int) -> float | None:
        """Accuracy of the best answers that read nothing of the sequence; None for a text.

        Answers are constants by their number in the sequence: the most frequent ones of 1,024 sequences, tried on as
        many others.
        """
        rng = torch.Generator().manual_seed(CHANCE_SEED)
        (known, numbers), (asked, places) = (_answers(self.batch(CHANCE_SEQUENCES, seq_len, rng)) for _ in range(2))
        counts = torch.zeros(seq_len, self.vocab_size, dtype=torch.int64, device="cpu")
        counts.index_put_((numbers, known), torch.ones_like(known), accumulate=True)
        return float((counts.argmax(1)[places] == asked).double().mean())


def _answers(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """All answers of a batch, and the number of each in its sequence (from 0)."""
    return batch.targets[batch.mask], (batch.mask.cumsum(1) - 1)[batch.mask]
