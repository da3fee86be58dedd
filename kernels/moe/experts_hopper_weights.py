"""Gluon device code of `experts_hopper`: FP4 or FP8 weights as the left factor in registers, and scales of FP4 weights.

``TILING``, ``buffers`` and ``stacks`` are the `Tiling`, `Buffers` and `Stacks` of `experts_hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.fp4_hopper import as_fp8, fp4_to_fp8
from deepseek_attn.kernels.common.gluon import reinterpret


@gluon.constexpr_function
def _weight_layout(gated, shape, columns):
    """Rows of a warpgroup's weight by thread, as in the left factor; ``columns``: bases (register, lane) of the others.

    A thread has two rows that are 8 apart in the product: there, rows of gate and up alternate by 8. In shared memory
    all 32 of the gate come first.
    """
    row, in_thread, in_quad = [0] * (len(shape) - 1), *columns
    other, warp = (32, 8) if gated else (8, 16)
    return gl.DistributedLinearLayout(
        [*in_thread, [other, *row]],
        [*in_quad, [1, *row], [2, *row], [4, *row]],
        [[warp, *row], [2 * warp, *row]],
        [],
        shape,
    )


@gluon.constexpr_function
def _word_layout(gated, words, with_bytes):
    """Layout of int32 words ``[64, 4, words]`` (or bytes, ``[64, 4, words, 4]``) of which a thread has one quarter."""
    in_thread = [[0, 0, 1 << i, 0] for i in range(words.bit_length() - 1)]
    columns = [[0, 0, 0, 1], [0, 0, 0, 2], *in_thread], [[0, 1, 0, 0], [0, 2, 0, 0]]
    whole = _weight_layout(gated, [64, 4, words, 4], columns)
    return whole if with_bytes else gl.SliceLayout(3, whole)


@gluon.jit
def fp8_weight(buffers, stage, low, high, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """Weight rows of a block in registers, e4m3 in words: int32 ``[64, 4, 8]``.

    ``low``, ``high``: int32 ``[64, 4]``, the bytes of the power of two of each row and group, for FP4.
    """
    GATED: gl.constexpr = TILING.GATED
    STAGES: gl.constexpr = TILING.STAGES
    WORDS: gl.constexpr = 4 if TILING.FP4 else 8
    FORM: gl.constexpr = gl.NVMMASharedLayout(64 if TILING.FP4 else 128, 32, 2)
    LAST: gl.constexpr = [[0, 1], [0, 2]] if TILING.FP4 else [[0, 1], [0, 2], [0, 4]]
    LOAD: gl.constexpr = _weight_layout(GATED, [64, 4 * WORDS], (LAST, [[0, WORDS], [0, 2 * WORDS]]))
    GROUPS: gl.constexpr = TILING.WARPGROUPS
    stored = reinterpret(buffers.weight, gl.int32, [GROUPS * STAGES, 64, 4 * WORDS], FORM)
    w = stored.index(GROUPS * stage + WARPGROUP).load(LOAD).reshape([64, 4, WORDS])
    w = gl.convert_layout(w, _word_layout(GATED, WORDS, False), assert_trivial=True)
    if TILING.FP4:
        w = fp4_to_fp8(w, low, high, _word_layout(GATED, 8, False))
    return w


@gluon.jit
def left_factor(words, TILING: gl.constexpr):
    """The left factor ``[64, 128]`` of the words of `fp8_weight`: another view of the same registers."""
    w = as_fp8(words, _word_layout(TILING.GATED, 8, True))
    if TILING.GATED:
        w = w.reshape([2, 4, 8, 4, 8, 4]).permute((1, 0, 2, 4, 3, 5))
    else:
        w = w.reshape([4, 2, 8, 4, 8, 4]).permute((0, 1, 2, 4, 3, 5))
    return w.reshape([64, 128])


@gluon.jit
def scale_bytes(scale_row, block):
    """e8m0 bytes of each row and group, of four blocks from ``block`` on; not combined here, which would wait."""
    return (
        gl.load(scale_row + 4 * block),
        gl.load(scale_row + 4 * block + 4),
        gl.load(scale_row + 4 * block + 8),
        gl.load(scale_row + 4 * block + 12),
    )


@gluon.jit
def packed_scales(scales):
    """The four bytes of `scale_bytes` in one word, the first lowest."""
    first, second, third, fourth = scales
    low = first.to(gl.int32) | second.to(gl.int32) << 8
    return low | third.to(gl.int32) << 16 | fourth.to(gl.int32) << 24


@gluon.jit
def scale_rows(expert, row_block, stacks, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """(pointers to the first scale of each row and group, pointers to exponents of rows) of a job's FP4 weight."""
    N: gl.constexpr = TILING.N
    ROWS: gl.constexpr = 32 if TILING.GATED else 64
    GROUPS: gl.constexpr = gl.SliceLayout(2, _word_layout(TILING.GATED, 4, False))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, GROUPS))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    second = lane >= ROWS
    scale_ptr = gl.where(second, stacks.b_scale if TILING.GATED else stacks.a_scale, stacks.a_scale)
    exponent_ptr = gl.where(second, stacks.b_exponent if TILING.GATED else stacks.a_exponent, stacks.a_exponent)
    channel = (row_block * TILING.WARPGROUPS + WARPGROUP) * ROWS + lane % ROWS
    row = expert.to(gl.int64) * N + (channel if N % (TILING.WARPGROUPS * ROWS) == 0 else gl.minimum(channel, N - 1))
    return (scale_ptr + row * (TILING.K // 32))[:, None] + group[None, :], exponent_ptr + row


@gluon.jit
def first_scales(expert, row_block, stacks, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """What `_multiply_tile` needs of a job before its first block: of FP4 exponents of rows and the first scales."""
    if TILING.FP4:
        scale_row, exponent = scale_rows(expert, row_block, stacks, WARPGROUP, TILING)
        exponents = (gl.load(exponent),)
        return exponents + scale_bytes(scale_row, 0)
    else:
        return (expert, expert, expert, expert, expert)
