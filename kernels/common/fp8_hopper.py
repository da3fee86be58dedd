"""Gluon device functions that quantise to FP8, by the rule of `kernels.common.quant.quantize_fp8`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_FLOOR_BITS = gl.constexpr(0x38D1B717)  # float32 bits of 1e-4, the smallest largest magnitude of a group
_INFINITY_BITS = gl.constexpr(0x7F800000)


@gluon.jit
def fp8_scales(amax, POW2: gl.constexpr):
    """Scales of FP8 groups as in `fp8_triton.group_scales`: to divide by, inverse if ``POW2``, and to store.

    ``amax`` holds the bits of the largest magnitudes: on these, a NaN is larger than every number. The scale to store
    is NaN where a group holds a NaN or an infinity.
    """
    bits = gl.maximum(amax, _FLOOR_BITS)
    if POW2:
        # the next power of two: any bit of the mantissa carries into the exponent
        bits = (bits.to(gl.float32, bitcast=True) * 0.002232142857142857).to(gl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & ~0x7FFFFF
    else:
        bits = gl.div_rn(bits.to(gl.float32, bitcast=True), 448.0).to(gl.int32, bitcast=True)
    scale = bits.to(gl.float32, bitcast=True)
    # of a power of two: its exponent, negated
    inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
    return scale, inverse, gl.where(amax >= _INFINITY_BITS, float("nan"), scale)


@gluon.jit
def to_fp8(value, scale, inverse, POW2: gl.constexpr):
    """float32 values as FP8 under `fp8_scales`, which broadcast to them."""
    if POW2:
        value = value * inverse
    else:
        value = gl.div_rn(value, scale + gl.zeros_like(value))
    return value.to(gl.float8e4nv)
