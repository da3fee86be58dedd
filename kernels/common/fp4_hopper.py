"""Gluon device code that makes the left factor of an FP8 product on Hopper from FP4 values, in registers.

The magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of e2m1 times a power of two from 2**-5 to 2**6 are exact in e4m3. The
eight bytes of a power of two are words of four: ``LOW`` and ``HIGH`` for 1; each doubling adds ``LOW_STEP`` and
``HIGH_STEP``: 8 to each byte except the byte of zero. Three bits of a value select a byte, the fourth is the sign.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOW, LOW_STEP = gl.constexpr(0x3C383000), gl.constexpr(0x08080800)
HIGH, HIGH_STEP = gl.constexpr(0x4C484440), gl.constexpr(0x08080808)

# the first four of a word's eight values, then the last four; prmt picks bytes by the low four nibbles of its last
# operand
_TO_FP8 = gl.constexpr("""
{
    .reg .b32 pick, shifted, signs;
    and.b32 pick, $2, 0x77777777;
    shl.b32 shifted, $2, 4;
    prmt.b32 $0, $3, $4, pick;
    prmt.b32 signs, shifted, $2, 0x5140;
    lop3.b32 $0, $0, signs, 0x80808080, 0xF8;
    shr.u32 pick, pick, 16;
    prmt.b32 $1, $3, $4, pick;
    prmt.b32 signs, shifted, $2, 0x7362;
    lop3.b32 $1, $1, signs, 0x80808080, 0xF8;
}
""")


@gluon.jit
def fp4_to_fp8(words, low, high, LAYOUT: gl.constexpr):
    """e4m3 in int32 words ``[64, 4, 8]`` of FP4 values in int32 words ``[64, 4, 4]``; a thread keeps its own.

    Args:
        low, high: int32 ``[64, 4]``, the bytes of the power of two of each row and group.
        LAYOUT: of the result: of a thread's words, one after another.
    """
    # a word of eight FP4 values becomes two words of four bytes, side by side in the result
    first, second = gl.inline_asm_elementwise(
        _TO_FP8, "=&r,=&r,r,r,r", [words, low[:, :, None], high[:, :, None]], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.join(first, second).reshape([64, 4, 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def as_fp8(words, LAYOUT: gl.constexpr):
    """int32 words ``[64, 4, 8]`` as float8e4nv ``[64, 4, 8, 4]`` in ``LAYOUT``: another view of the same registers."""
    same = words[:, :, :, None] + gl.zeros([64, 4, 8, 4], gl.int32, layout=LAYOUT)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [same], dtype=gl.float8e4nv, is_pure=True, pack=4)
