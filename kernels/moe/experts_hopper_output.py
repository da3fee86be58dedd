"""Gluon device code of `experts_hopper`: sums times the powers of two of FP4 rows, ``swiglu``, and their stores.

``TILING`` is the `HopperExpertTiling` of `plan`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.moe.experts_hopper_weights import TOP

# float32 rounded to bfloat16, two at once: ptxas makes a slow instruction of single conversions
_ROUND_BF16 = gl.constexpr("""
{
    .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xFFFF0000;
}
""")


class ExpertOutput(NamedTuple):
    """Memory that receives the products.

    Attributes:
        out: ``[R, N]`` in order of the routed rows if gated, else ``[pairs, N]``.
        pairs: int32 ``[R]``, the pair of each row.
        weights: float32 ``[R]``, which multiply a gated product, or None.
        limit: clamp of ``swiglu``, or None.
    """

    out: Any
    pairs: Any
    weights: Any
    limit: Any


@gluon.jit
def store_part(acc, tile, first, channel, exponent, output, TILING: gl.constexpr):
    """Stores a part of a `RowTile` ``[64, rows]`` from its row ``first`` on: of ``swiglu``, or of the product."""
    N: gl.constexpr = TILING.N
    GATED: gl.constexpr = TILING.GATED
    MMA: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = output.out.dtype.element_ty
    CHANNELS: gl.constexpr = 32 if GATED else 64
    # a row's channels follow one another
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [CHANNELS // 8, 256 // CHANNELS], [1, 4], [0, 1])
    token = first + gl.arange(0, SIZE, layout=gl.SliceLayout(0, OUT))
    row = channel + gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, OUT))
    known = token < tile.rows
    if GATED:
        to = tile.start + token
        if output.weights is not None:
            weight = gl.load(output.weights + to, mask=known, other=0)
    else:
        to = gl.load(output.pairs + tile.start + token, mask=known, other=0)
    if TILING.FP4:
        # rows of gate and up alternate by 8 in the product; the registers are the same
        if GATED:
            exponent = exponent.reshape([2, 4, 8]).permute((1, 0, 2)).reshape([64])
        power = ((exponent.to(gl.int32) - TOP) << 23).to(gl.float32, bitcast=True)
        acc *= gl.convert_layout(power, gl.SliceLayout(1, MMA), assert_trivial=True)[:, None]
    if GATED:
        # gate and up are rounded as a product by itself would be
        if dtype == gl.bfloat16:
            rounded = gl.inline_asm_elementwise(_ROUND_BF16, "=r,=r,r,r", [acc], dtype=gl.float32, is_pure=True, pack=2)
        else:
            rounded = acc.to(dtype).to(gl.float32)
        gate, up = rounded.reshape([4, 2, 8, SIZE]).permute((0, 2, 3, 1)).split()
        gate = gate.reshape([32, SIZE])
        up = up.reshape([32, SIZE])
        if output.limit is not None:
            # as comparisons, which leave a NaN
            gate = gl.where(gate > output.limit, output.limit, gate)
            up = gl.where(up > output.limit, output.limit, gl.where(up < -output.limit, -output.limit, up))
        value = gate / (1 + gl.exp(-gate)) * up
        # through shared memory: threads then store 16 bytes of a row each
        value = gl.convert_layout(value, OUT)
        if output.weights is not None:
            value *= weight[None, :]
        value = value.to(dtype)
    else:
        value = gl.convert_layout(acc.to(dtype), OUT)
    if N % (CHANNELS * TILING.TILES.warpgroups) == 0:
        inside = known[None, :]
    else:
        inside = known[None, :] & (row < N)[:, None]
    gl.store(gl.multiple_of(output.out, 16) + to.to(gl.int64)[None, :] * N + row[:, None], value, mask=inside)
