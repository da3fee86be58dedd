"""Device code shared by ops on rows: RMS norm, RoPE, Hadamard matrix, and writing an entry into a page.

Rows are tiles ``[R, BLOCK]`` of float32 values that are exact in the row's dtype; channels from ``D`` on are zero.
Arithmetic follows `kernels.common.norm_rope` and `kernels.common.quant` step by step: the bytes of a quantised row are
equal to the reference's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import (
    decode_e4m3,
    e4m3_scales,
    pow2_scales,
    quantize_e2m1,
    quantize_e4m3,
    quantize_groups,
)

RECORDS = ("plain", "fp8_v4", "index_fp8", "index_fp4", "fp8_v41", "fp4_v41")  # in device code by position
_PLAIN, _FP8_V4, _INDEX_FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FP8_V41, _FP4_V41 = tl.constexpr(4), tl.constexpr(5)

# the interpreter truncates where hardware rounds, so that there everything is rounded by integer arithmetic
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 ``x`` rounded to ``DTYPE`` (nearest, ties to even), still float32."""
    if DTYPE == tl.bfloat16 and _INTERPRETED:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, rounded, bits | 0x400000).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def row_weight(weight_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the weight of a norm, for `normed_rows`; before the rows are loaded, its latency is hidden."""
    channel = tl.arange(0, BLOCK)
    return tl.load(weight_ptr + channel, mask=channel < D, other=0)


@triton.jit
def normed_rows(x, weight, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """``x * rsqrt(mean(x^2) + eps) [* weight]``; ``weight`` is a `row_weight` or None."""
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if weight is not None:
        y = y * weight[None, :]
    return round_to(y, DTYPE)


@triton.jit
def row_cos_sin(position, cos_sin_ptr, max_positions, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines ``[R, BLOCK / 2]`` at ``position [R]``, for `rotated_rows`; identity outside the table."""
    pair = tl.arange(0, BLOCK // 2) - (D - ROPE) // 2
    known = ((pair >= 0) & (pair < ROPE // 2))[None, :] & ((position >= 0) & (position < max_positions))[:, None]
    row = cos_sin_ptr + position.to(tl.int64)[:, None] * ROPE + pair[None, :]
    return tl.load(row, mask=known, other=1), tl.load(row + ROPE // 2, mask=known, other=0)


@triton.jit
def rotated_rows(y, freqs_cis, D: tl.constexpr, ROPE: tl.constexpr, DTYPE: tl.constexpr):
    """Rotates the pairs of the last ``ROPE`` channels by `row_cos_sin`; both D and ROPE are even."""
    R: tl.constexpr = y.shape[0]
    BLOCK: tl.constexpr = y.shape[1]
    a, b = tl.split(tl.reshape(y, (R, BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2) - (D - ROPE) // 2
    rotated = ((pair >= 0) & (pair < ROPE // 2))[None, :]
    cos, sin = freqs_cis
    new_a, new_b = a * cos - b * sin, a * sin + b * cos
    y = tl.reshape(tl.join(tl.where(rotated, new_a, a), tl.where(rotated, new_b, b)), (R, BLOCK))
    return round_to(y, DTYPE)


@triton.jit
def rotated_back(first, second, cos, sin, DTYPE: tl.constexpr):
    """Pairs of channels rotated by the negative angle; unrotated ones have sine 0."""
    # a select, not a product with a zero sine: 0 * NaN would carry a NaN from one channel to its partner
    real = tl.where(sin == 0, first * cos, first * cos + second * sin)
    imaginary = tl.where(sin == 0, second * cos, second * cos - first * sin)
    return round_to(real, DTYPE), round_to(imaginary, DTYPE)


@triton.constexpr_function
def row_block(channels):
    """Tile of a row of so many channels: a power of two, at least 64."""
    return max(64, triton.next_power_of_2(channels))


@triton.constexpr_function
def _log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@triton.jit
def hadamard_rows(y, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """``y @ H * BLOCK**-0.5`` for a power of two of channels, summed as `kernels.common.quant.hadamard` does.

    A stage adds and subtracts neighbours and puts sums before differences: the lowest bit of the channel becomes the
    highest, so that after all stages every channel is back in its place.
    """
    R: tl.constexpr = y.shape[0]
    for _ in tl.static_range(_log2(BLOCK)):
        # join puts sum and difference side by side, permute the sums before the differences
        a, b = tl.split(tl.reshape(y, (R, BLOCK // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (R, BLOCK))
    return round_to(y * BLOCK**-0.5, DTYPE)


@dataclass(frozen=True)
class EntryFormat:
    """Constants of rows that are rotated and stored in a pool.

    Attributes:
        N: entries of a page; D: channels of an entry; NOPE: quantised channels of fp8_v4 and fp8_v41.
        RECORD: the record's place in `RECORDS`; PLAIN: dtype of plain records.
        ROPE: rotated channels; HADAMARD: rows are multiplied by a Hadamard matrix after the rotation.
    """

    N: int
    D: int
    NOPE: int
    RECORD: int
    PLAIN: Any
    ROPE: int
    HADAMARD: bool


@triton.jit
def store_rows(y, slot, pool_ptr, page_stride, ENTRY: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Writes row r of ``y [R, BLOCK]`` as the entry ``slot[r]`` (int64; nothing if negative) of a pool of bytes.

    ``ENTRY`` is the pool's `EntryFormat`.
    """
    N: tl.constexpr = ENTRY.N
    D: tl.constexpr = ENTRY.D
    NOPE: tl.constexpr = ENTRY.NOPE
    RECORD: tl.constexpr = ENTRY.RECORD
    PLAIN: tl.constexpr = ENTRY.PLAIN
    BLOCK: tl.constexpr = y.shape[1]
    R: tl.constexpr = y.shape[0]
    channel = tl.arange(0, BLOCK)
    used = (slot >= 0)[:, None]
    entry = slot % N
    page = pool_ptr + (slot // N) * page_stride
    if RECORD == _PLAIN:
        # a page: entries of D values
        row = page.to(tl.pointer_type(PLAIN)) + entry * D
        tl.store(row[:, None] + channel[None, :], round_to(y, PLAIN).to(PLAIN), mask=used & (channel < D)[None, :])
    elif RECORD == _FP8_V4 or RECORD == _FP8_V41:  # noqa: SIM109
        # a page: entries (NOPE quantised channels, then bfloat16 channels), then the scales of all entries
        y = round_to(y, tl.bfloat16)
        GROUP: tl.constexpr = 64 if RECORD == _FP8_V4 else 32
        WIDTH: tl.constexpr = NOPE + 2 * (D - NOPE)
        SCALES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8 if RECORD == _FP8_V4 else D // GROUP
        groups = tl.reshape(y, (R, BLOCK // GROUP, GROUP))
        byte, inverse = pow2_scales(groups, 1e-4, 448.0)
        code = quantize_e4m3(tl.reshape(groups * inverse[:, :, None], (R, BLOCK)), NATIVE_FP8)
        row = page + entry * WIDTH
        tl.store(row[:, None] + channel[None, :], code, mask=used & (channel < NOPE)[None, :])
        if NOPE < D:
            rope = (row + NOPE).to(tl.pointer_type(tl.bfloat16))
            inside = used & ((channel >= NOPE) & (channel < D))[None, :]
            tl.store(rope[:, None] + (channel - NOPE)[None, :], y.to(tl.bfloat16), mask=inside)
        scales = page + N * WIDTH + entry * SCALES
        group = tl.arange(0, BLOCK // GROUP)
        inside = used & (group < NOPE // GROUP)[None, :]
        tl.store(scales[:, None] + group[None, :], byte.to(tl.uint8), mask=inside)
        if RECORD == _FP8_V4:
            # scales are padded to a multiple of 8 bytes; the padding is 0, as in the reference
            rest = NOPE // 64 + tl.arange(0, 8)
            zero = tl.zeros((R, 8), tl.uint8)
            tl.store(scales[:, None] + rest[None, :], zero, mask=used & (rest < SCALES)[None, :])
    elif RECORD == _INDEX_FP8:
        # a page: entries of D quantised channels, then a float32 scale each
        y = round_to(y, tl.bfloat16)
        byte, inverse = pow2_scales(y, 1e-4, 448.0)
        code = quantize_e4m3(y * inverse[:, None], NATIVE_FP8)
        tl.store((page + entry * D)[:, None] + channel[None, :], code, mask=used & (channel < D)[None, :])
        # the scale's bits: infinity and NaN stay apart, as the reference's float32 scale shows them
        bits = tl.where(byte == 255, tl.where(inverse == 0, 0x7F800000, 0x7FC00000), byte << 23)
        tl.store((page + N * D).to(tl.pointer_type(tl.int32)) + entry, bits, mask=slot >= 0)
    else:
        # a page: entries of D / 2 bytes, two channels each, then their scales
        GROUP: tl.constexpr = 16 if RECORD == _FP4_V41 else 32
        groups = tl.reshape(round_to(y, tl.bfloat16), (R, BLOCK // GROUP, GROUP))
        if RECORD == _FP4_V41:
            byte = e4m3_scales(groups, 6.0, NATIVE_FP8)
            scale = decode_e4m3(byte, NATIVE_FP8, tl.float32)
            # by its scale as it is stored: e4m3 scales are rounded, and a reciprocal would round once more
            code = quantize_e2m1(tl.div_rn(groups, tl.broadcast_to(scale[:, :, None], groups.shape)))
        else:
            byte, inverse = pow2_scales(groups, 6.0 * 2.0**-126, 6.0)
            code = quantize_e2m1(groups * inverse[:, :, None])
        low, high = tl.split(tl.reshape(code, (R, BLOCK // 2, 2)))
        pair = tl.arange(0, BLOCK // 2)
        row = page + entry * (D // 2)
        inside = used & (pair < D // 2)[None, :]
        tl.store(row[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=inside)
        group = tl.arange(0, BLOCK // GROUP)
        scales = page + N * (D // 2) + entry * (D // GROUP)
        inside = used & (group < D // GROUP)[None, :]
        tl.store(scales[:, None] + group[None, :], byte.to(tl.uint8), mask=inside)


class Fp8Rows(NamedTuple):
    """Runtime arguments: rows that are stored as FP8 with a scale per group of channels, the input of an FP8 linear.

    Attributes:
        codes: ``[T, channels]`` FP8, or bytes where the GPU has no FP8; stride: between rows. (The name "values" is
            taken by Triton's tuples.)
        scale: float32 ``[T, channels / group]``, contiguous along the rows; scale_stride: between groups of channels.
    """

    codes: Tensor
    stride: int
    scale: Tensor
    scale_stride: int


@triton.jit
def store_fp8_groups(groups, codes, scales, inside, groups_inside, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Quantises float32 ``groups [G, n]`` with a scale per group, and stores codes and scales.

    ``codes [G, n]`` and ``scales [G]`` are pointers; ``inside [G, n]`` and ``groups_inside [G]`` are the masks of their
    stores.
    """
    code, scale = quantize_groups(groups, POW2, NATIVE_FP8, codes.dtype.element_ty)
    tl.store(codes, code, mask=inside)
    tl.store(scales, scale, mask=groups_inside)


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """Lets the next launch start (PDL) and waits for the one before; memory may be used only afterwards."""
    if PDL:
        gdc_launch_dependents()  # the next kernel may start: it waits below for the end of this one
        gdc_wait()  # until the previous kernel has ended, and what it wrote can be read
