"""Triton device functions for e4m3 values under float32 scales, as `reference.quant` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

_FLOOR_BITS = tl.constexpr(0x38D1B717)  # float32 bits of 1e-4, the smallest largest magnitude of a group
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def decode_e4m3(value, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """e4m3 values, or their bytes where the GPU has no FP8, as ``DTYPE``; exactly."""
    if NATIVE_FP8:
        return value.to(DTYPE)
    else:
        # the same bits in float16's fields, whose exponent is biased by 8 more; NaN would become a number
        bits = ((value & 0x80).to(tl.int16) << 8) | ((value & 0x7F).to(tl.int16) << 7)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((value & 0x7F) == 0x7F, float("nan"), number).to(DTYPE)


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
def encode_e4m3(x):
    """Bytes of float32 values that are e4m3 values."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 20) - (120 << 3)
    subnormal = (magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def group_scales(amax, POW2: tl.constexpr):
    """Scales of groups, float32, and the factors that `scaled` takes; by the rule of ``reference.quant``.

    ``amax`` holds the bits of the largest magnitudes as int32: on these, a NaN is larger than every number. A group
    that holds a NaN or an infinity gets the scale NaN.
    """
    bits = tl.maximum(amax, _FLOOR_BITS)
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
    """float32 ``x`` under the factors of its groups, broadcast to it: what is rounded to e4m3."""
    if POW2:
        return x * factor
    else:
        return tl.div_rn(x, factor)


@triton.jit
def e4m3_pairs(first, second, NATIVE_FP8: tl.constexpr):
    """float32 values of magnitude up to 448, rounded to e4m3: bytes of ``first`` below those of ``second``, as int16.

    One instruction converts both. (Put together from bytes, 16 bits at a time, ptxas 12.8 makes garbage of them.)
    """
    if NATIVE_FP8:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [first, second], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        low, high = encode_e4m3(round_e4m3(first)).to(tl.int16), encode_e4m3(round_e4m3(second)).to(tl.int16)
        return low | (high << 8)


@triton.jit
def quantize_groups(x, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Rounds float32 ``x [..., n]`` to e4m3 with one scale per row of n: values as ``DTYPE``, float32 scales ``[...]``.

    ``DTYPE`` is that of a factor of a product, or uint8 for the bytes where the GPU has no FP8. See `group_scales`.
    """
    axis: tl.constexpr = len(x.shape) - 1
    scale, factor = group_scales(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis), POW2)
    value = scaled(x, tl.broadcast_to(tl.expand_dims(factor, axis), x.shape), POW2)
    if NATIVE_FP8:
        value = value.to(tl.float8e4nv)
    else:
        value = round_e4m3(value)
        if DTYPE == tl.uint8:  # noqa: SIM300
            value = encode_e4m3(value)
    return value.to(DTYPE), scale
