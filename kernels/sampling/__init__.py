"""Greedy tokens from logits."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.sampling.reference import INVALID_TOKEN

__all__ = ["INVALID_TOKEN", "greedy_tokens"]


def greedy_tokens(logits: Tensor) -> Tensor:
    """Argmax of each row of ``logits``.

    Args:
        logits: float32 ``[T, vocab]``.

    Returns:
        int64 ``[T]``: the smallest index of the row's maximum; `INVALID_TOKEN` where a row holds NaN or +inf, or only
        -inf.

    Raises:
        ValueError: on a GPU, logits of another dtype or rank, or an empty vocabulary.
    """
    if runs_triton(logits):
        from deepseek_attn.kernels.sampling.argmax import greedy_tokens as op
    else:
        from deepseek_attn.kernels.sampling.reference import greedy_tokens as op
    return op(logits)
