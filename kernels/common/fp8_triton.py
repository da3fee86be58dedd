"""Triton device functions for e4m3 and e2m1 values and their scales, as `kernels.common.quant` defines them.

Formats: e4m3 is FP8 with a largest value of 448, e2m1 FP4 with a largest value of 6, e8m0 a byte that is the exponent
of a power of two. GPUs without FP8 (``NATIVE_FP8`` false) convert by integer arithmetic, with equal results.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FLOOR_BITS = tl.constexpr(0x38D1B717)  # float32 bits of 1e-4, the smallest largest magnitude of a group
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def decode_e4m3(value, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """e4m3 values or their bytes (always bytes where the GPU has no FP8) as ``DTYPE``; exactly."""
    if NATIVE_FP8:
        if value.dtype == tl.uint8:
            value = value.to(tl.float8e4nv, bitcast=True)
        return value.to(DTYPE)
    else:
        # the same bits in float16's fields, whose exponent is biased by 8 more; NaN would become a number
        bits = ((value & 0x80).to(tl.int16) << 8) | ((value & 0x7F).to(tl.int16) << 7)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((value & 0x7F) == 0x7F, float("nan"), number).to(DTYPE)


@triton.jit
def decode_e8m0(byte):
    """Bytes of e8m0 as float32 powers of two: 0 is 2**-127, 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """float32 values of magnitude up to 448, rounded to the nearest e4m3 value, ties to even; still float32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits & -0x80000000
    bits ^= sign
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    # float32 numbers near 1.5 * 2**14 are 2**-9 apart, as e4m3's below 2**-6 are
    subnormal = ((bits.to(tl.float32, bitcast=True) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
    return (tl.where(bits < 0x3C800000, subnormal, normal) | sign).to(tl.float32, bitcast=True)


@triton.jit
def quantize_e4m3(x, NATIVE_FP8: tl.constexpr):
    """float32 rounded to bytes of e4m3: to nearest, ties to even, saturating at 448; NaN stays NaN."""
    if NATIVE_FP8:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # below 2**-6 codes are multiples of 2**-9, the last place of 2**14
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_e2m1(x):
    """float32 rounded to e2m1 codes ``sign << 3 | code``, int32: to nearest, ties to the even code, saturating at 6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def decode_e2m1(packed):
    """Float32 values ``[R, 2 n]`` of pairs of e2m1 codes ``[R, n]``, the even one in the low nibble."""
    # Not by `tl.join`: behind one Triton 3.6 gives a thread 8 neighbouring values of the reduced dimension of a
    # product, and products over fewer than 64 keys were wrong on an H200.
    bits = packed.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]
    code = tl.reshape(bits & 15, (packed.shape[0], 2 * packed.shape[1]))
    # the same bits in float32's fields, whose exponent is biased by 126 more
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def round_e2m1(x):
    """float32 rounded to the nearest e2m1 value, ties to the even code, saturating at 6; still float32."""
    a = tl.abs(x)
    value = tl.where(a > 0.25, 0.5, 0.0) + tl.where(a >= 0.75, 0.5, 0.0) + tl.where(a > 1.25, 0.5, 0.0)
    value += tl.where(a >= 1.75, 0.5, 0.0) + tl.where(a > 2.5, 1.0, 0.0) + tl.where(a >= 3.5, 1.0, 0.0)
    value += tl.where(a > 5.0, 2.0, 0.0)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def pow2_ceil(x):
    """The smallest power of two that is >= x, for x >= 2**-127."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_pow2(x):
    """1 / x of powers of two from 2**-126 to 2**126."""
    return ((254 << 23) - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def pow2_scales(x, FLOOR: tl.constexpr, MAX: tl.constexpr):
    """e8m0 bytes (int32) and inverse scales of groups ``x [..., n]``: the power of two at or above ``amax / MAX``."""
    # as integers, magnitudes are ordered and NaN is the largest: a group that holds one gets byte 255
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x.shape.__len__() - 1).to(tl.float32, bitcast=True)
    amax = tl.where(amax < FLOOR, FLOOR, amax)
    bits = (amax * (1.0 / MAX)).to(tl.int32, bitcast=True)
    byte = tl.where(bits > 0x7F800000, 255, (bits + 0x7FFFFF) >> 23)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(byte < 255, inverse, tl.where(bits > 0x7F800000, amax, 0.0))
    return byte, inverse


@triton.jit
def e4m3_scales(x, MAX: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Bytes of e4m3 scales of groups ``x [..., n]``: ``amax / MAX``, at least 2**-9; NaN if a value is not finite."""
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x.shape.__len__() - 1)
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), MAX)
    scale = tl.where(amax < _INFINITY_BITS, tl.maximum(scale, 2.0**-9), float("nan"))
    return quantize_e4m3(scale, NATIVE_FP8)


@triton.jit
def group_scales(amax, POW2: tl.constexpr, FLOOR_BITS: tl.constexpr = _FLOOR_BITS):
    """Float32 scales of groups, and the factors for `scaled`, by the rule of `kernels.common.quant.quantize_fp8`.

    ``amax`` holds the bits of the largest magnitudes as int32: as integers, a NaN is larger than every number. A group
    that holds a NaN or an infinity gets the scale NaN. ``FLOOR_BITS``: bits of the lower bound of the largest
    magnitude.
    """
    bits = tl.maximum(amax, FLOOR_BITS)
    if POW2:
        bits = (bits.to(tl.float32, bitcast=True) * 0.002232142857142857).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & ~0x7FFFFF
        scale = bits.to(tl.float32, bitcast=True)
        factor = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
        factor = scale
    return tl.where(amax >= _INFINITY_BITS, float("nan"), scale), factor


@triton.jit
def scaled(x, factor, POW2: tl.constexpr):
    """float32 ``x`` divided by its scales, ready to be rounded to e4m3; ``factor`` from `group_scales`, broadcast."""
    if POW2:
        return x * factor
    else:
        return tl.div_rn(x, factor)


@triton.jit
def e4m3_pairs(first, second, NATIVE_FP8: tl.constexpr):
    """float32 values of magnitude up to 448, rounded to e4m3; int16 with ``first`` in the low byte, ``second`` above.

    One instruction converts both. (Put together from bytes, 16 bits at a time, ptxas 12.8 makes garbage of them.)
    """
    if NATIVE_FP8:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [first, second], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        low, high = quantize_e4m3(first, False).to(tl.int16), quantize_e4m3(second, False).to(tl.int16)
        return low | (high << 8)


@triton.jit
def quantize_groups(x, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Rounds float32 ``x [..., n]`` to e4m3 with one scale per row of n: values as ``DTYPE``, float32 scales ``[...]``.

    ``DTYPE``: the dtype of a product's factor, or uint8 for the bytes if the GPU has no FP8. See `group_scales`.
    """
    axis: tl.constexpr = len(x.shape) - 1
    scale, factor = group_scales(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis), POW2)
    value = scaled(x, tl.broadcast_to(tl.expand_dims(factor, axis), x.shape), POW2)
    if NATIVE_FP8:
        value = value.to(tl.float8e4nv)
    elif DTYPE == tl.uint8:  # noqa: SIM300
        value = quantize_e4m3(value, False)
    else:
        value = round_e4m3(value)
    return value.to(DTYPE), scale


@triton.jit
def quantize_pairs(first, second, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, PAIRS: tl.constexpr = 64):
    """Rounds neighbouring channels ``first`` and ``second``, float32, to e4m3 with a scale per ``PAIRS`` pairs.

    Args:
        first, second: ``[pairs]`` or ``[rows, pairs]``.

    Returns:
        `e4m3_pairs` of the same shape, and float32 scales ``[pairs / PAIRS]`` or ``[rows, pairs / PAIRS]``.
    """
    # the largest magnitude by its bits, of which a NaN has more than any number
    bits = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if len(first.shape) == 1:
        GROUPS: tl.constexpr = first.shape[0] // PAIRS
        scale, factor = group_scales(tl.max(tl.reshape(bits, (GROUPS, PAIRS)), 1), POW2)
        factor = tl.reshape(tl.broadcast_to(factor[:, None], (GROUPS, PAIRS)), first.shape)
    else:
        ROWS: tl.constexpr = first.shape[0]
        GROUPS: tl.constexpr = first.shape[1] // PAIRS
        scale, factor = group_scales(tl.max(tl.reshape(bits, (ROWS, GROUPS, PAIRS)), 2), POW2)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, PAIRS)), first.shape)
    return e4m3_pairs(scaled(first, factor, POW2), scaled(second, factor, POW2), NATIVE_FP8), scale


@triton.jit
def round_pairs(first, second, GROUP: tl.constexpr, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Neighbouring channels, float32 ``[rows, pairs]``, rounded to e4m3 times a scale per ``GROUP`` channels."""
    PAIRS: tl.constexpr = GROUP // 2
    ROWS: tl.constexpr = first.shape[0]
    GROUPS: tl.constexpr = first.shape[1] // PAIRS
    # the largest magnitude by its bits, of which a NaN has more than any number
    bits = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, factor = group_scales(tl.max(tl.reshape(bits, (ROWS, GROUPS, PAIRS)), 2), POW2)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, PAIRS)), first.shape)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, PAIRS)), first.shape)
    first, second = scaled(first, factor, POW2), scaled(second, factor, POW2)
    if NATIVE_FP8:
        first, second = first.to(tl.float8e4nv).to(tl.float32), second.to(tl.float8e4nv).to(tl.float32)
    else:
        first, second = round_e4m3(first), round_e4m3(second)
    return first * scale, second * scale
