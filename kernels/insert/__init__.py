"""Norm, RoPE and cache writes of a step's tokens, the compressor, and the norm and RoPE of queries.

V4 layers call ``insert_tokens``. V3.2 layers, which cache every token, call ``insert_latents``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.insert.types import (
    CacheRows,
    CompressBatch,
    CompressPart,
    IndexKeyRows,
    LatentAndKey,
    TokenRows,
)

if TYPE_CHECKING:
    from deepseek_attn.kernels.insert import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def insert_tokens(tokens: TokenRows, compressors: Sequence[CompressPart], batch: CompressBatch | None) -> LatentAndKey:
    """All cache writes of a layer: query latents and keys of the tokens, and the entries of all compressors.

    The latent is ``rms_norm(qr, q_weight)``; the key is ``rms_norm(kv, kv_weight)`` with its last ``rope_dim`` channels
    rotated at ``positions``. Arithmetic is float32, rounded to the dtype after the norm and again after the rotation;
    ``cache.record.encode`` of the rounded key is stored. ``qr_fp8`` is ``quantize_fp8`` of the rounded latent per token
    and group of channels. Rows do not depend on one another; no tokens are fine; a slot of -1 stores nothing. NaN and
    infinities stay visible: the entry of such a row decodes to NaN.

    A compressor pools windows of tokens into one entry each and stores it, and the rows that open windows need. Every
    token contributes a value and a score per channel. When a window of ``ratio`` tokens closes (``batch.slots`` is not
    -1), its values are pooled with a softmax of ``score + ape`` over its tokens, channel by channel. With overlap an
    entry pools two windows: the first half of a token's channels feeds the *next* window's entry, the second half its
    own; before the first token there is nothing to pool. The pooled row is normed, rotated at the position of its
    window's first token, with ``hadamard`` multiplied by a Hadamard matrix, and stored; each step rounds to ``dtype``.

    Each request has a ring of the ``rows`` last (value, score) rows, so that windows may span steps and up to
    ``rows - coff * ratio`` tokens may be rolled back. Entries are the same bits however tokens are split into steps.

    One Triton launch where no token of the step overwrites the ring row of a token that it pools (decode steps).

    Args:
        compressors: the layer's own and its indexer's, or none (layers with the window only).
        batch: of the compressors; None without any.

    Returns:
        Latent and key, in the dtypes of ``qr`` and ``kv``.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    return (triton_ops if runs_triton(tokens.qr) else torch_ops).insert_tokens(tokens, compressors, batch)


def insert_latents(tokens: TokenRows, index: IndexKeyRows | None = None) -> Tensor:
    """All cache writes of a V3.2 layer: norms and RoPE of latent, rotary key and index key, in one launch on a GPU.

    The query latent is ``rms_norm(qr, q_weight)``. The row written to ``cache`` is ``rms_norm(latent, kv_weight)`` and
    the rotary key, which is not normed but rotated at ``positions`` in pairs ``(2 i, 2 i + 1)``. An index key is
    layer-normed with weight and bias, rotated in pairs ``(i, i + rope_dim / 2)`` of its *first* ``rope_dim`` channels
    and, with ``hadamard``, multiplied by a Hadamard matrix. Arithmetic is float32, rounded to the dtype after each of
    these steps; ``record.encode`` of the rounded rows is stored, and nothing of rows whose slot is -1. ``qr_fp8`` is
    ``quantize_fp8`` of the rounded query latent per token and group of channels. Rows do not depend on one another; no
    tokens are fine. NaN and infinities stay visible: the entry of such a row decodes to NaN.

    Returns:
        The normed query latent ``[T, q_lora_rank]`` in the dtype of ``qr``.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    return (triton_ops if runs_triton(tokens.qr) else torch_ops).insert_latents(tokens, index)


def compress_latents(part: CompressPart, batch: CompressBatch) -> Tensor:
    """Entries of one compressor up to the norm, neither rotated nor stored; see `insert_tokens`.

    The ring rows that open windows need are stored.

    Returns:
        ``[T, d]`` in ``part.dtype``: the normed entry of each token that completes a window, zeros for other tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(part.kv) else torch_ops).compress_latents(part, batch)


def rope_insert(rows: Tensor, positions: Tensor, cos_sin: Tensor, cache: CacheRows) -> None:
    """Rotates the last ``rope_dim`` channels of ``rows [T, d]`` at ``positions [T]`` and stores the rows.

    Rows whose slot is -1 are not stored.

    Args:
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines.

    Raises:
        ValueError: rows or a pool that do not fit the record.
    """
    (triton_ops if runs_triton(rows) else torch_ops).rope_insert(rows, positions, cos_sin, cache)


def query_norm_rope(raw_q: RawQueries) -> Tensor:
    """RMS norm of each head without weight, or none, RoPE of its last ``rope_dim`` channels, heads of zeros as padding.

    Returns:
        ``[T, padded_heads, d]`` in the dtype of ``q``, rounded after the norm and again after the rotation.

    Raises:
        ValueError: ``num_heads`` does not divide the columns of ``q``, or exceeds ``padded_heads``; tensors that
            disagree or that the kernel does not support.
    """
    return (triton_ops if runs_triton(raw_q.q) else torch_ops).query_norm_rope(raw_q)
