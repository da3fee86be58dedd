"""Triton kernel of `reference.norm_rope_insert`: the token side of an attention layer in one launch.

One program normalises one row: that of the query latent, or that of the key, which it also rotates and writes to its
page. How a row is summed does not depend on the other rows of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, fp8_view, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.fp8 import quantize_groups
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.row_ops import (
    begin,
    entry_constants,
    normed_rows,
    rotated_rows,
    row_block,
    row_cos_sin,
    row_weight,
    store_rows,
)
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

WARPS = 1
EARLY_ROWS = 256  # up to which the launch may begin early: with 4096 rows it takes 12.0 us then instead of 9.6


@triton.jit
def _row(row_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr + channel, mask=channel < D, other=0).to(tl.float32)


@triton.jit
def _store_row(row_ptr, y, D: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    channel = tl.arange(0, BLOCK)[None, :]
    tl.store(row_ptr + channel, y.to(DTYPE), mask=channel < D)


@triton.jit
def insert_key(t, rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm, rotation and cache of the key of token ``t``; arguments are those of `row_launch`."""
    D: tl.constexpr = SHAPE[0]
    NOPE: tl.constexpr = SHAPE[1]
    ROPE: tl.constexpr = SHAPE[2]
    BLOCK: tl.constexpr = SHAPE[3]
    N: tl.constexpr = SHAPE[4]
    RECORD: tl.constexpr = SHAPE[5]
    PLAIN: tl.constexpr = SHAPE[6]
    DTYPE: tl.constexpr = SHAPE[7]
    one = tl.arange(0, 1)
    # everything is asked for before anything is waited for
    position = tl.load(rows[10] + t + one)
    slot = tl.load(rows[13] + t + one).to(tl.int64)
    x = _row(rows[0] + t * rows[1], D, BLOCK)
    weight = row_weight(rows[2], D, BLOCK)
    freqs_cis = row_cos_sin(position, rows[11], rows[12], D, ROPE, BLOCK)
    y = rotated_rows(normed_rows(x, weight, rows[14], D, DTYPE), freqs_cis, D, ROPE, DTYPE)
    _store_row(rows[3] + t * rows[4], y, D, BLOCK, DTYPE)
    store_rows(y, slot, rows[15], rows[16], N, D, NOPE, BLOCK, RECORD, PLAIN, NATIVE_FP8)


@triton.jit
def norm_latent(t, rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm of the query latent of token ``t``, and where wanted the same rounded to FP8."""
    LORA: tl.constexpr = SHAPE[8]
    LORA_BLOCK: tl.constexpr = SHAPE[9]
    DTYPE: tl.constexpr = SHAPE[10]
    x = _row(rows[5] + t * rows[6], LORA, LORA_BLOCK)
    y = normed_rows(x, row_weight(rows[7], LORA, LORA_BLOCK), rows[14], LORA, DTYPE)
    _store_row(rows[8] + t * rows[9], y, LORA, LORA_BLOCK, DTYPE)
    if SHAPE[11]:
        _store_rounded(t, y.to(DTYPE), rows, LORA, LORA_BLOCK, NATIVE_FP8, SHAPE[12])


@triton.jit
def _store_rounded(t, y, rows, LORA: tl.constexpr, BLOCK: tl.constexpr, NATIVE_FP8: tl.constexpr, POW2: tl.constexpr):
    """Stores ``y [1, BLOCK]`` as the input of an FP8 linear, as `quantize_triton.quantize_input_kernel` does."""
    group = tl.arange(0, BLOCK // 128)
    groups = tl.reshape(y.to(tl.float32), (BLOCK // 128, 128))
    value, scale = quantize_groups(groups, POW2, NATIVE_FP8, rows[17].dtype.element_ty)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(rows[17] + t * rows[18] + channel, value, mask=channel < LORA)
    tl.store(rows[19] + t + group * rows[20], scale, mask=group < LORA // 128)


@triton.jit
def _norm_rope_insert_kernel(rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        insert_key(t, rows, SHAPE, NATIVE_FP8)
    else:
        norm_latent(t, rows, SHAPE, NATIVE_FP8)


def norm_rope_insert(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    slots: Tensor,
    qr_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    qr_fp8: QuantizedRows | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.norm_rope_insert`, for rows whose channels are contiguous and an even number.

    Args:
        warps: of a program, ``WARPS`` by default. Sums depend on it.
    """
    cache = (record, pool, page_entries, slots)
    rows, shape, outs = row_launch(qr, kv, q_weight, kv_weight, eps, cos_sin, positions, *cache, qr_out, kv_out, qr_fp8)
    if len(positions):
        early = len(positions) <= EARLY_ROWS and supports_pdl(kv.device)
        _norm_rope_insert_kernel[(len(positions), 2)](
            rows,
            SHAPE=shape,
            NATIVE_FP8=has_native_fp8(kv.device),
            PDL=early,
            num_warps=warps or WARPS,
            launch_pdl=early,
        )
    return outs


def row_launch(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    slots: Tensor,
    qr_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    qr_fp8: QuantizedRows | None = None,
) -> tuple[tuple, tuple, tuple[Tensor, Tensor]]:
    """Arguments ``rows`` and constant ``SHAPE`` of `insert_key` and `norm_latent`, and the outputs they write.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    (T, lora), dim = qr.shape, kv.shape[1]
    for name, x, weight in (("qr", qr, q_weight), ("kv", kv, kv_weight)):
        if x.shape[0] != T or x.dtype not in FLOATS or x.stride(1) != 1 or weight.shape != x.shape[1:]:
            raise ValueError(
                f"{name} must be [{T}, d] float32, bfloat16 or float16 with contiguous rows and a weight of [d], got "
                f"{tuple(x.shape)} {x.dtype}, strides {x.stride()}, and a weight of {tuple(weight.shape)}"
            )
    if positions.shape != (T,) or slots.shape != (T,) or record.dim != dim:
        raise ValueError(
            f"need {T} positions and slots and a record of {dim} values, got {tuple(positions.shape)}, "
            f"{tuple(slots.shape)} and {record.dim}"
        )
    entry = entry_constants(record, pool, page_entries)
    block = row_block(dim, cos_sin)
    qr_out = torch.empty_like(qr, memory_format=torch.contiguous_format) if qr_out is None else qr_out
    kv_out = torch.empty_like(kv, memory_format=torch.contiguous_format) if kv_out is None else kv_out
    for name, x, out in (("qr_out", qr, qr_out), ("kv_out", kv, kv_out)):
        if out.shape != x.shape or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(f"{name} must be {tuple(x.shape)} {x.dtype}, got {tuple(out.shape)} {out.dtype}")
    key = (kv, kv.stride(0), kv_weight, kv_out, kv_out.stride(0))
    latent = (qr, qr.stride(0), q_weight, qr_out, qr_out.stride(0))
    rows = (*key, *latent, positions, cos_sin, cos_sin.shape[0], slots, eps, pool, pool.stride(0))
    if qr_fp8 is not None:
        q, scale = qr_fp8.values, qr_fp8.scale
        if lora % 128 or q.shape != qr.shape or scale.shape != (T, lora // 128) or (T > 1 and scale.stride(0) != 1):
            raise ValueError(
                f"a rounded latent of {tuple(qr.shape)} needs a multiple of 128 channels and scales [{T}, "
                f"{lora // 128}] with stride 1 along the rows, got {tuple(q.shape)} and {tuple(scale.shape)} with "
                f"strides {scale.stride()}"
            )
        rows += (fp8_view(q), q.stride(0), scale, scale.stride(1))
    key_shape = (dim, entry["NOPE"], cos_sin.shape[1], block, entry["N"], entry["RECORD"], entry["PLAIN"])
    latent_shape = (lora, triton.next_power_of_2(lora), TRITON_DTYPES[qr.dtype])
    latent_shape += (qr_fp8 is not None, qr_fp8 is not None and qr_fp8.pow2_scales)
    return rows, (*key_shape, TRITON_DTYPES[kv.dtype], *latent_shape), (qr_out, kv_out)
