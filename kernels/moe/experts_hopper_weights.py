"""Gluon device code of `experts_hopper`: FP4 or FP8 weights as the left factor in registers, and scales of FP4 weights.

``TILING``, ``buffers`` and ``scales`` are `HopperExpertTiling`, `ExpertBuffers` and `ExpertScales`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.fp4_hopper import as_fp8, fp4_to_fp8
from deepseek_attn.kernels.common.gluon import reinterpret

TOP = gl.constexpr(6)  # exponent of an FP4 row's largest scale in FP8; the remaining factor multiplies the row's sum


@gluon.constexpr_function
def _weight_layout(gated, shape, columns):
    """Layout of a warpgroup's weight rows, that of a left factor; ``columns``: (register, lane) bases of columns.

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
    """Layout of int32 words ``[64, 4, words]``, or bytes ``[64, 4, words, 4]``: a thread holds one of four groups."""
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
    WORDS: gl.constexpr = 4 if TILING.FP4 else 8
    FORM: gl.constexpr = gl.NVMMASharedLayout(64 if TILING.FP4 else 128, 32, 2)
    LAST: gl.constexpr = [[0, 1], [0, 2]] if TILING.FP4 else [[0, 1], [0, 2], [0, 4]]
    LOAD: gl.constexpr = _weight_layout(GATED, [64, 4 * WORDS], (LAST, [[0, WORDS], [0, 2 * WORDS]]))
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    # as 32-bit words: a thread reads the WORDS consecutive words of one group of 32 channels
    stored = reinterpret(buffers.weight, gl.int32, [GROUPS * TILING.STAGES, 64, 4 * WORDS], FORM)
    w = stored.index(GROUPS * stage + WARPGROUP).load(LOAD).reshape([64, 4, WORDS])
    w = gl.convert_layout(w, _word_layout(GATED, WORDS, False), assert_trivial=True)
    if TILING.FP4:
        w = fp4_words(w, low, high, TILING)
    return w


@gluon.jit
def _gate_and_up(stored, stage, WARPGROUP: gl.constexpr, HALF: gl.constexpr, TILING: gl.constexpr):
    """A warpgroup's 32 rows of the gate and of the up weight ``[2, 32, words]``, read in the layout ``HALF``.

    A stage has the gate rows of all warpgroups, then the up rows.
    """
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    gate = stored.index(2 * GROUPS * stage + WARPGROUP).load(HALF)
    up = stored.index(2 * GROUPS * stage + GROUPS + WARPGROUP).load(HALF)
    return gl.join(gate, up).permute((2, 0, 1))


@gluon.jit
def stored_pair(buffers, stage, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """FP4 weight rows of both blocks of a stage as they are stored: int32 ``[64, 4, 4]`` each."""
    FORM: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    WORDS: gl.constexpr = _word_layout(TILING.GATED, 4, False)
    IN_THREAD: gl.constexpr = [[0, 1], [0, 2], [0, 16]]  # 16 words further: the second block
    LANES: gl.constexpr = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    if TILING.GATED:
        HALF: gl.constexpr = gl.DistributedLinearLayout(IN_THREAD, LANES, [[8, 0], [16, 0]], [], [32, 32])
        stored = reinterpret(buffers.weight, gl.int32, [2 * GROUPS * TILING.STAGES, 32, 32], FORM)
        w = _gate_and_up(stored, stage, WARPGROUP, HALF, TILING).reshape([64, 32])
    else:
        ROWS: gl.constexpr = [[16, 0], [32, 0]]
        ALL: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8, 0]], LANES, ROWS, [], [64, 32])
        stored = reinterpret(buffers.weight, gl.int32, [GROUPS * TILING.STAGES, 64, 32], FORM)
        w = stored.index(GROUPS * stage + WARPGROUP).load(ALL)
    # both blocks of a row are in the same thread: splitting moves no data
    first, second = w.reshape([64, 2, 16]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first.reshape([64, 4, 4]), WORDS, assert_trivial=True)
    return first, gl.convert_layout(second.reshape([64, 4, 4]), WORDS, assert_trivial=True)


@gluon.jit
def fp4_words(stored, low, high, TILING: gl.constexpr):
    """FP4 of a block, int32 ``[64, 4, 4]``, as e4m3; see `fp8_weight`."""
    return fp4_to_fp8(stored, low, high, _word_layout(TILING.GATED, 8, False))


@gluon.jit
def left_factor(words, TILING: gl.constexpr):
    """The left factor ``[64, 128]`` of the words of `fp8_weight`: another view of the same registers."""
    w = as_fp8(words, _word_layout(TILING.GATED, 8, True))
    # words become the channels that the tensor core takes them for; gate and up alternate by 8 rows
    if TILING.GATED:
        w = w.reshape([2, 4, 8, 4, 8, 4]).permute((1, 0, 2, 4, 3, 5))
    else:
        w = w.reshape([4, 2, 8, 4, 8, 4]).permute((0, 1, 2, 4, 3, 5))
    return w.reshape([64, 128])


# one byte of each of four words, selected by $5, in one word
_PICK = gl.constexpr("""
{
    .reg .b32 low, high;
    prmt.b32 low, $1, $2, $5;
    prmt.b32 high, $3, $4, $5;
    prmt.b32 $0, low, high, 0x5410;
}
""")


@gluon.constexpr_function
def scale_layout(gated):
    """Layout of one int32 ``[64, 4]`` for each row and group of 32 channels of a block."""
    return gl.SliceLayout(2, _word_layout(gated, 4, False))


@gluon.jit
def weight_powers(buffers, slot, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """e8m0 scales of a warpgroup's rows: int32 ``[64, 4]``, a byte for each of `QUAD` blocks, the first lowest.

    In shared memory a row has a word per block with the bytes of its four groups; a thread picks its own group's byte.
    """
    GATED: gl.constexpr = TILING.GATED
    GROUPS: gl.constexpr = TILING.TILES.warpgroups
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LAYOUT: gl.constexpr = scale_layout(GATED)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if GATED and TILING.TILES.channels == 256:
        # the threads of a row have all words of it
        LANES: gl.constexpr = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
        HALF: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2]], LANES, [[8, 0], [16, 0]], [], [32, 4])
        stored = reinterpret(buffers.weight_scales, gl.int32, [4 * GROUPS, 32, 4], FLAT)
        words = _gate_and_up(stored, slot, WARPGROUP, HALF, TILING).reshape([64, 4])
    elif TILING.HALF_QUAD:
        # every thread reads both rows of a pair, and keeps its own
        LANES: gl.constexpr = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
        PAIRS: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [4, 0, 0]], LANES, [[8, 0, 0], [16, 0, 0]], [], [32, 2, 4]
        )
        WORDS: gl.constexpr = gl.SliceLayout(1, PAIRS)
        stored = reinterpret(buffers.weight_scales, gl.int32, [6 * GROUPS, 32, 4], FLAT)
        first_tile = 3 * (GROUPS * slot + WARPGROUP)
        even = stored.index(first_tile).load(WORDS)[:, None, :]
        # of odd rows the last half of the first tile, then the first half of the second
        _, before = stored.index(first_tile + 1).load(WORDS).reshape([32, 2, 2]).permute((0, 2, 1)).split()
        behind, _ = stored.index(first_tile + 2).load(WORDS).reshape([32, 2, 2]).permute((0, 2, 1)).split()
        odd = gl.join(before, behind).permute((0, 2, 1)).reshape([32, 4])
        odd = gl.convert_layout(odd, WORDS, assert_trivial=True)[:, None, :]
        is_odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))[None, :, None] > 0
        same = gl.zeros([32, 2, 4], gl.int32, layout=PAIRS)
        words = gl.where(is_odd, odd + same, even + same).reshape([64, 4])
        words = gl.convert_layout(words, gl.SliceLayout(1, _word_layout(GATED, 4, False)), assert_trivial=True)
    else:
        stored = reinterpret(buffers.weight_scales, gl.int32, [2 * GROUPS, 64, 4], FLAT)
        words = stored.index(GROUPS * slot + WARPGROUP).load(gl.SliceLayout(1, _word_layout(GATED, 4, False)))
    # the words of blocks 0 to 3 apart, broadcast to the four groups of the row
    even, odd = words.reshape([64, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    same = gl.zeros([64, 4], gl.int32, layout=LAYOUT)
    first = gl.convert_layout(first, ROW, assert_trivial=True)[:, None] + same
    second = gl.convert_layout(second, ROW, assert_trivial=True)[:, None] + same
    third = gl.convert_layout(third, ROW, assert_trivial=True)[:, None] + same
    fourth = gl.convert_layout(fourth, ROW, assert_trivial=True)[:, None] + same
    # of each word, the byte of the thread's own group
    pick = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    pick = (pick | (pick + 4) << 4)[None, :] + same
    return gl.inline_asm_elementwise(
        _PICK, "=r,r,r,r,r,r", [first, second, third, fourth, pick], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def exponents(expert, row_block, scales, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """Exponents of the rows of a job's FP4 weight; an unused value for FP8."""
    if TILING.FP4:
        N: gl.constexpr = TILING.N
        ROWS: gl.constexpr = 32 if TILING.GATED else 64
        GROUPS: gl.constexpr = TILING.TILES.warpgroups
        lane = gl.arange(0, 64, layout=gl.SliceLayout(1, scale_layout(TILING.GATED)))
        exponent_ptr = gl.where(
            lane >= ROWS, scales.b_exponent if TILING.GATED else scales.a_exponent, scales.a_exponent
        )
        # the first 32 rows of a gated job are the gate's; rows behind N read the last one and are not stored
        channel = (row_block * GROUPS + WARPGROUP) * ROWS + lane % ROWS
        row = expert.to(gl.int64) * N + (channel if N % (GROUPS * ROWS) == 0 else gl.minimum(channel, N - 1))
        return gl.load(exponent_ptr + row)
    else:
        return expert
