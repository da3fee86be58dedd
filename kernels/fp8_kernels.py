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
def quantize_groups(x, POW2: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Rounds float32 ``x [..., n]`` to e4m3 with one scale per row of n: values as ``DTYPE``, float32 scales ``[...]``.

    The rule of ``reference.quant.quantize_fp8``. ``DTYPE`` is that of a factor of a product, or uint8 for the bytes
    where the GPU has no FP8. A group that holds a NaN or an infinity gets the scale NaN.
    """
    axis: tl.constexpr = len(x.shape) - 1
    # on the bits, a NaN is larger than every number
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    bits = tl.maximum(amax, _FLOOR_BITS)
    if POW2:
        bits = (bits.to(tl.float32, bitcast=True) * 0.002232142857142857).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & ~0x7FFFFF
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
        scale = bits.to(tl.float32, bitcast=True)
        value = x * tl.expand_dims(inverse, axis)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
        value = tl.div_rn(x, tl.broadcast_to(tl.expand_dims(scale, axis), x.shape))
    scale = tl.where(amax >= _INFINITY_BITS, float("nan"), scale)
    if NATIVE_FP8:
        value = value.to(tl.float8e4nv)
    else:
        value = round_e4m3(value)
        if DTYPE == tl.uint8:  # noqa: SIM300
            value = encode_e4m3(value)
    return value.to(DTYPE), scale


@triton.jit
def turns_of(position, channel, cos_sin_ptr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Cosines and sines ``[M, n / 2]`` of the pairs of ``channel [n]`` at ``position [M]``; 1 and 0 if not rotated.

    Args:
        channel: consecutive and starting at an even one; channels go head by head.
        cos_sin_ptr: float32 ``[positions, ROPE_DIM]``, cosines then sines of the last ``ROPE_DIM`` channels of a head.
    """
    first, _ = tl.split(tl.reshape(channel % HEAD_DIM, (channel.shape[0] // 2, 2)))
    start: tl.constexpr = HEAD_DIM - ROPE_DIM
    table = cos_sin_ptr + position[:, None] * ROPE_DIM + ((first - start) // 2)[None, :]
    rotated = (position[:, None] >= 0) & (first >= start)[None, :]
    cos = tl.load(table, mask=rotated, other=1.0)
    sin = tl.load(table + ROPE_DIM // 2, mask=rotated, other=0.0)
    return cos, sin


@triton.jit
def turn_back(x, cos, sin):
    """Rotates the pairs ``(2i, 2i + 1)`` of ``x [M, n]`` by the negative angle: float32, rounded once to x's dtype."""
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2)))
    # pairs that stay are selected: NaN must not reach its neighbour by a zero sine
    new_real = tl.where(sin == 0, real * cos, real * cos + imaginary * sin)
    new_imaginary = tl.where(sin == 0, imaginary * cos, imaginary * cos - real * sin)
    return tl.reshape(tl.join(new_real, new_imaginary), x.shape).to(x.dtype)
