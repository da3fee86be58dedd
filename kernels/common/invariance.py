"""Batch invariance (``deterministic=True``): a row's result does not depend on which rows share its call.

The sums of a row must have the same order in every batch. So every launch is configured for `MANY_ROWS` rows, matrix
products are neither split by the number of programs nor computed by cuBLAS, and library functions (a norm in plain
torch, a float32 product) are called on tiles of one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from deepseek_attn.utils.context import holding

MANY_ROWS = 1 << 20  # rows that launches are configured for; no table of configurations distinguishes more
ROW_TILE = 64  # rows of a tile that a library computes

_batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


def batch_invariant_ops(enabled: bool = True) -> AbstractContextManager[bool]:
    """Ops called in this context are batch invariant, or not (``enabled``), also when a CUDA graph is captured.

    Scoped to the thread or task that enters it, like `dispatch.reference_ops`: other runners keep their setting. It
    applies to ops in Triton and to `in_row_tiles`; other references still round by the number of rows.
    """
    return holding(_batch_invariant, enabled)


def batch_invariant() -> bool:
    """Whether ops have to be batch invariant here."""
    return _batch_invariant.get()


def in_row_tiles(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``op(x)`` of rows that do not depend on each other, ``[T, ...]`` to ``[T, ...]``.

    Where ops have to be batch invariant, ``op`` is called with `ROW_TILE` rows at a time, the last ones padded with
    zeros, because libraries choose kernels by the number of rows.
    """
    if not batch_invariant() or not len(x):
        return op(x)
    padded = x.new_zeros(-(-len(x) // ROW_TILE) * ROW_TILE, *x.shape[1:])
    padded[: len(x)] = x
    return torch.cat([op(tile) for tile in padded.split(ROW_TILE)])[: len(x)]
