"""DeepSeek-V4.1's n-gram memory (Engram): rows of a table that a hash of the last tokens selects, gated and added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.engram.types import TableRows

if TYPE_CHECKING:
    from deepseek_attn.kernels.engram import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def hash_rows(ngrams: Tensor, multipliers: Tensor, primes: Tensor) -> Tensor:
    """Rows of a table that the n-grams ending at each token select; on a host, as tables are.

    With the products ``p_k = ngrams[:, k] * multipliers[k]``, the hash of n tokens is ``p_0 ^ p_1 ^ ... ^ p_(n-1)``.
    Row (n, head) is the hash modulo ``primes[n - 2, head]``, after all rows of the heads before it.

    Args:
        ngrams: int64 ``[T, N]``: numbers of the token itself, of the one before it, and so on.
        multipliers: int64 ``[N]``; no product may exceed ``2**63 - 1``.
        primes: int64 ``[N - 1, heads]``: for 2 to N tokens, rows of each head.

    Returns:
        int64 ``[T, (N - 1) * heads]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: DeepSeek-V4.1 ``inference/engram.py``.
    """
    return torch_ops.hash_rows(ngrams, multipliers, primes)


def dequantize_rows(rows: TableRows, dtype: torch.dtype) -> Tensor:
    """Values of looked-up rows ``[T, n, columns]``, concatenated by token: ``[T, n * columns]`` in ``dtype``.

    Raises:
        ValueError: values that are not float8_e4m3fn, or scales that do not fit them.
    """
    return (triton_ops if runs_triton(rows.values) else torch_ops).dequantize_rows(rows, dtype)


def gate_streams(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Adds a token's looked-up value to each of its residual streams, by a gate of the stream and its key.

    With ``key_j`` and ``val`` of ``kv``: ``X_j + sigmoid(sign(d_j) sqrt(max(|d_j|, 1e-6))) val``, where ``d_j`` is the
    product of the RMS norms of ``X_j`` and ``key_j``, weighted, over ``sqrt(D)``. The sign of -0 is negative.

    Args:
        streams: ``[T, m, D]``.
        kv: ``[T, (m + 1) D]``, m keys and the value, in the dtype of the streams.
        q_weight, k_weight: float32 ``[m, D]``, weights of the norms of streams and keys.
        eps: of the norms.

    Returns:
        New streams, computed in float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: DeepSeek-V4.1 ``inference/engram.py``.
    """
    return (triton_ops if runs_triton(streams) else torch_ops).gate_streams(streams, kv, q_weight, k_weight, eps)
