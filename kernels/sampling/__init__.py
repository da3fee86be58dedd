"""Greedy tokens from logits, and drafts that are equal to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.sampling.reference import INVALID_TOKEN
from deepseek_attn.kernels.sampling.types import AcceptedDrafts

if TYPE_CHECKING:
    from deepseek_attn.kernels.sampling import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def accept_drafts(token_ids: Tensor, chosen: Tensor, starts: Tensor, ends: Tensor, verify: bool) -> AcceptedDrafts:
    """The newest token of each request, which comes after its last row, or after its last right draft.

    A request's first row is its newest token so far, later rows are drafts. A draft is accepted if it is the token
    chosen after the previous row, and all drafts before it are accepted.

    Args:
        token_ids, chosen: int64 ``[B * n]``, ``n`` rows of each request: its tokens, and those chosen after them.
        starts, ends: int64 ``[B]``, positions of a request's rows; rows at or beyond ``ends`` are padding.
        verify: False: every row counts as right, padding left out.
    """
    return (triton_ops if runs_triton(token_ids) else torch_ops).accept_drafts(token_ids, chosen, starts, ends, verify)


def greedy_tokens(logits: Tensor, invalid_token: int = INVALID_TOKEN) -> Tensor:
    """Argmax of each row of ``logits``.

    Args:
        logits: float32 ``[T, vocab]``.

    Returns:
        int64 ``[T]``: the smallest index of the row's maximum; ``invalid_token`` where a row holds NaN or +inf, or only
        -inf.

    Raises:
        ValueError: on a GPU, logits of another dtype or rank, or an empty vocabulary.
    """
    return (triton_ops if runs_triton(logits) else torch_ops).greedy_tokens(logits, invalid_token)
