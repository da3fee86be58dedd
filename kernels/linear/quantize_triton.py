"""Triton kernel that quantises the input of FP8 linears, and first rotates attention's output back.

Channels are read in pairs, as words of twice the size: a rotation then needs no value of another thread, and all loads
and stores are 16 bytes wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8 import e4m3_pairs, group_scales, scaled
from deepseek_attn.kernels.common.row_ops import begin, rotated_back


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The two values of ``DTYPE`` in a word, float32."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        first, second = word.to(tl.int16).to(DTYPE, bitcast=True), (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _word(first, second, DTYPE: tl.constexpr):
    """Two values of ``DTYPE``, given as float32, in a word."""
    if DTYPE == tl.float32:  # noqa: SIM300
        low, high = first.to(tl.int32, bitcast=True).to(tl.int64), second.to(tl.int32, bitcast=True).to(tl.int64)
        return (low & 0xFFFFFFFF) | (high << 32)
    else:
        low, high = first.to(DTYPE).to(tl.int16, bitcast=True), second.to(DTYPE).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit(do_not_specialize=["M"])
def quantize_input_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    positions_ptr,
    cos_sin_ptr,
    M,
    x_stride,
    out_stride,
    out_group_stride,
    scale_stride,
    K: tl.constexpr,
    GROUP_K: tl.constexpr,
    QUANTIZE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x [M, K]``, rotated back if ``ROPE_DIM``, quantised to FP8 per 128 channels if ``QUANTIZE``.

    Channels go to ``out [K / GROUP_K, M, GROUP_K]`` and scales to ``[K / 128, scale_stride]``, a row per 128 channels.
    Positions below 0 are not rotated; ``cos_sin [positions, ROPE_DIM]`` is of the last channels of a head.
    """
    begin(PDL)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORD: tl.constexpr = tl.int64 if DTYPE == tl.float32 else tl.int32  # noqa: SIM300
    PAIRS: tl.constexpr = BLOCK_K // 2
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = (row < M)[:, None] & (pair < K // 2)[None, :]
    token = row.to(tl.int64)
    words = x_ptr.to(tl.pointer_type(WORD)) + token[:, None] * (x_stride // 2) + pair[None, :]
    first, second = _halves(tl.load(words, mask=inside, other=0), DTYPE)
    if ROPE_DIM > 0:
        position = tl.load(positions_ptr + token, mask=row < M, other=0)[:, None]
        rotary_pair = (pair % (HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2)[None, :]
        rotated = (position >= 0) & (rotary_pair >= 0)
        table = cos_sin_ptr + position * ROPE_DIM + rotary_pair
        cos = tl.load(table, mask=rotated, other=1.0)
        sin = tl.load(table + ROPE_DIM // 2, mask=rotated, other=0.0)
        first, second = rotated_back(first, second, cos, sin, DTYPE)
    block = (pair // (GROUP_K // 2)).to(tl.int64)[None, :] * (out_group_stride // 2)
    place = block + token[:, None] * (out_stride // 2) + (pair % (GROUP_K // 2))[None, :]
    if QUANTIZE:
        GROUPS: tl.constexpr = BLOCK_K // 128
        bits = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        scale, factor = group_scales(tl.max(tl.reshape(bits, (BLOCK_M, GROUPS, 64)), 2), POW2)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (BLOCK_M, GROUPS, 64)), (BLOCK_M, PAIRS))
        codes = e4m3_pairs(scaled(first, factor, POW2), scaled(second, factor, POW2), NATIVE_FP8)
        tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + place, codes, mask=inside)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        target = scale_ptr + group[None, :].to(tl.int64) * scale_stride + token[:, None]
        tl.store(target, scale, mask=(row < M)[:, None] & (group < K // 128)[None, :])
    else:
        tl.store(out_ptr.to(tl.pointer_type(WORD)) + place, _word(first, second, DTYPE), mask=inside)
