"""Attention of queries over lists of keys, and gathering keys out of cache pages. A key is also its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.attention.types import PagedKeys, RequestEntries
from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.raw_queries import RawQueries

if TYPE_CHECKING:
    from deepseek_attn.kernels.attention import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None = None,
    lens: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the rows of ``kv`` that its row of ``indices`` names.

    With ``p = scale * q . k`` over the valid keys: ``lse = ln sum exp(p)`` and
    ``out = sum exp(p) v / (sum exp(p) + exp(sink))``, accumulated in float32.

    Args:
        q: ``[T, H, d]`` float32, bfloat16 or float16.
        kv: ``[N, d]`` keys with contiguous rows of a float dtype; the first ``d_v`` channels are the values.
        indices: integer ``[T, K]`` rows of ``kv``. Invalid: negative, ``>= N``, or in a column ``>= lens[t]``.
        scale: factor of the logits.
        sink: float ``[H]``, a logit per head that joins the denominator only. +inf gives 0, -inf changes nothing.
        lens: integer ``[T]`` leading columns that count, or None for all.
        d_v: value channels, or None for ``d``.
        out: ``[T, H, d_v]`` like ``q`` with contiguous channels, to write to.
        max_logits: contiguous float32 ``[T, H]``, to write the largest ``p`` to; -inf without a valid key.

    Returns:
        ``(out, lse)``: ``[T, H, d_v]`` in ``q.dtype`` and float32 ``[T, H]``, natural log, without the sink. A query
        without a valid key gets ``out = 0``, ``lse = +inf``.

    Raises:
        ValueError: shapes, dtypes or strides that disagree.

    Notes:
        A row named twice counts twice. A NaN in a valid key reaches the output; rows that no valid index names have no
        effect, NaN included.
    """
    ops = triton_ops if runs_triton(q) else torch_ops
    return ops.sparse_attention(q, kv, indices, scale, sink, lens, d_v, out, max_logits)


def sparse_attention_paged(
    q: Tensor,
    keys: Sequence[PagedKeys],
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` over entries of one or two pools, under one softmax.

    Args:
        keys: for V4 the window, then compressed entries: of one record, or ``fp8_v41`` and ``fp4_v41``.
        q, scale, sink, d_v, out: as in `sparse_attention`; ``d`` is ``record.dim``.

    Returns:
        ``(out, lse)`` as in `sparse_attention`.

    Raises:
        ValueError: shapes, dtypes, strides or records that disagree or are not supported.

    Notes:
        Invalid slots are never read. ``fp8_v32`` entries are rounded to bfloat16, as FlashMLA does. On a GPU ``fp8_v4``
        entries are decoded to float16 unless ``q`` is float32: keys and queries must lie within +-65504. (V4's are
        normalised: at most 23 times a norm weight.) The launch depends on shapes alone, so a captured CUDA graph
        serves any lengths.
    """
    return (triton_ops if runs_triton(q) else torch_ops).sparse_attention_paged(q, keys, scale, sink, d_v, out)


def attend_raw_q(
    raw_q: RawQueries, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None, groups: int, q: Tensor | None
) -> QuantizedRows:
    """Attention from projected heads to the quantised input of the grouped output projection, in one launch or two.

    The results of `query_norm_rope`, `sparse_attention_paged`, the inverse RoPE of its output at the same positions and
    `quantize_input` with scales that are powers of two, each rounded to the dtype of ``raw_q.q``;
    `grouped_linear_of_quantized` multiplies them.

    Args:
        raw_q: projected queries, ``padded_heads`` and ``num_heads`` the same; ``d`` is ``record.dim``, and the rotated
            channels are ``record.rope_dim``.
        keys: as in `sparse_attention_paged`; at least one pool has columns and entries.
        scale, sink: as in `sparse_attention`.
        groups: of the projection; head h belongs to group ``h // (num_heads / groups)``.
        q: ``query_norm_rope(raw_q)`` if the caller has it already, else None.

    Returns:
        Values ``[groups, T, num_heads / groups * d]`` and scales ``[T, num_heads * d / 128]`` with stride 1 along the
        tokens. On a GPU, tokens at positions outside the table of ``raw_q`` are not rotated.

    Raises:
        ValueError: as in `sparse_attention_paged`; heads that groups do not divide, or channels that are not a multiple
            of 128; on a GPU, also records other than ``fp8_v4``.

    Notes:
        On a GPU the sum of squares of a head is added up in another order than by `query_norm_rope`, so that a query
        may differ from it in its last bit.
    """
    ops = triton_ops if runs_triton(raw_q.q) else torch_ops
    return ops.attend_raw_q(raw_q, keys, scale, sink, groups, q)


def causal_attention(q: Tensor, kv: Tensor, scale: float, d_v: int | None = None) -> Tensor:
    """Causal attention of the last ``n`` tokens of one request over all of its keys, in float32; plain torch only.

    Args:
        q: ``[n, H, d]`` of positions ``N - n .. N - 1``.
        kv: ``[N, d]`` keys of positions ``0 .. N - 1``; the first ``d_v`` channels are the values.
        scale: factor of the logits.
        d_v: value channels, or None for ``d``.

    Returns:
        ``[n, H, d_v]`` in ``q.dtype``.

    Raises:
        ValueError: fewer keys than queries, or shapes that disagree.
    """
    return torch_ops.causal_attention(q, kv, scale, d_v)


def dequantize_and_gather_k_cache(out: Tensor, requests: RequestEntries, offset: int) -> None:
    """Copies the last ``gather_lens[r]`` entries of each request to ``out[r, offset:]``, in order, dequantised.

    Args:
        out: ``[b, M, dim]`` workspace with contiguous rows of a float dtype; rows that are not written keep their
            values.
        requests: ``b`` requests, and their entries to copy.
        offset: first row written in each request's part of the workspace.

    Raises:
        ValueError: shapes that disagree, or a record or pool that is not supported. The reference, which reads lengths
            on the host, also refuses lengths that exceed a request, the workspace or the block table; on a GPU, where
            nothing waits, rows that do not fit are not copied and entries beyond the block table become zeros.
    """
    (triton_ops if runs_triton(out) else torch_ops).dequantize_and_gather_k_cache(out, requests, offset)
