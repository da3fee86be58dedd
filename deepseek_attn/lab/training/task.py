"""Training tasks: a source of token batches with the positions that count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

BOS = 0


class Batch(NamedTuple):
    """One batch on the CPU.

    Attributes:
        tokens: int64 ``[B, S + 1]``; a model reads the first ``S`` and predicts the last ``S``.
        mask: bool ``[B, S + 1]``: tokens that count as predictions. The first one never does.
    """

    tokens: torch.Tensor
    mask: torch.Tensor


class Task(ABC):
    """A source of batches. Loss and accuracy (how often the likeliest token is the right one) are over the mask.

    Attributes:
        name: for reports.
        vocab_size: ids of its tokens are below this.
        values: ids that can be the answer; empty for a text.
    """

    name: str
    vocab_size: int
    values: range = range(0)

    @abstractmethod
    def batch(self, size: int, seq_len: int, generator: torch.Generator, split: str = "train") -> Batch:
        """``size`` sequences of ``seq_len`` predictions, drawn with a CPU generator.

        Args:
            split: ``"train"`` or ``"test"``: text that is held out. Synthetic tasks draw both from one distribution.

        Raises:
            ValueError: ``seq_len`` is too short for the task.
        """
