"""Gluon device code of `attend_hopper`: the slots of a program's keys, and their bytes decoded to float16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepseek_attn.kernels.common.gluon import barrier, reinterpret


@gluon.jit
def lengths(t, where, POOLS: gl.constexpr, HAS_LENS0: gl.constexpr, HAS_LENS1: gl.constexpr):
    """Columns that count in each pool, tiles of the first pool, and all tiles.

    Of two pools the first has as many tiles as its rows are wide, so that where tiles lie does not depend on lengths.
    """
    lens0_ptr, lens1_ptr, width0, width1 = where
    len0 = width0
    if HAS_LENS0:
        len0 = gl.minimum(gl.load(lens0_ptr + t), width0).to(gl.int32)
    len1 = len0
    if POOLS == 2:
        len1 = width1
        if HAS_LENS1:
            len1 = gl.minimum(gl.load(lens1_ptr + t), width1).to(gl.int32)
        tiles0 = (width0 + 63) // 64
        tiles = tiles0 + (gl.maximum(len1, 0) + 63) // 64
    else:
        tiles = (gl.maximum(len0, 0) + 63) // 64
        tiles0 = tiles
    return len0, len1, tiles0, tiles


@gluon.jit
def _load_slots(tile, rows, POOLS: gl.constexpr, layout: gl.constexpr):
    """Loads the slots of a tile, whatever the lengths; -1 past the width of the index rows."""
    indices0, indices1, width0, width1, _len0, _len1, _limit0, _limit1, tiles0 = rows
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    row = indices0
    width = width0
    if POOLS == 2:
        in_first = tile < tiles0
        column = gl.where(in_first, column, column - tiles0 * 64)
        row = gl.where(in_first, indices0, indices1)
        width = gl.where(in_first, width0, width1)
    return gl.load(row + column, mask=column < width, other=-1)


@gluon.jit
def _valid(slot, tile, rows, POOLS: gl.constexpr, layout: gl.constexpr):
    """Slots of the keys of a tile, -1 where there is none."""
    _indices0, _indices1, _width0, _width1, len0, len1, limit0, limit1, tiles0 = rows
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    count = len0
    limit = limit0
    if POOLS == 2:
        in_first = tile < tiles0
        count = gl.where(in_first, len0, len1 + tiles0 * 64)
        limit = gl.where(in_first, limit0, limit1)
    return gl.where((column < count) & (slot >= 0) & (slot < limit), slot.to(gl.int32), -1)


@gluon.jit
def _address(slot, tile, tiles0, pools, N0: gl.constexpr, N1: gl.constexpr, NOPE: gl.constexpr, POOLS: gl.constexpr):
    """Pointers to the bytes of entries, and to their scales."""
    ROW: gl.constexpr = NOPE + 128
    pool0, pool1, page_stride0, page_stride1 = pools
    page = (slot // N0).to(gl.int64)
    entry = slot % N0
    pool = pool0
    page_stride = page_stride0
    scale_start = N0 * ROW
    if POOLS == 2:
        in_first = tile < tiles0
        pool = gl.where(in_first, pool0, pool1)
        page_stride = gl.where(in_first, page_stride0, page_stride1)
        if N0 != N1:
            page = gl.where(in_first, page, (slot // N1).to(gl.int64))
            entry = gl.where(in_first, entry, slot % N1)
            scale_start = gl.where(in_first, N0 * ROW, N1 * ROW)
    start = pool + page * page_stride
    return start + entry * ROW, (start + scale_start).to(gl.pointer_type(gl.int64)) + entry


@gluon.jit
def _fetch(
    slot,
    tile,
    tiles0,
    pools,
    N0: gl.constexpr,
    N1: gl.constexpr,
    NOPE: gl.constexpr,
    POOLS: gl.constexpr,
    layout: gl.constexpr,
):
    """The bytes of keys as 32-bit words, pieces of 64 channels, and the scale bytes as one int64."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    valid = slot >= 0
    row, scale = _address(gl.maximum(slot, 0), tile, tiles0, pools, N0, N1, NOPE, POOLS)
    scales = gl.load(scale, mask=valid, other=0)
    row = row.to(gl.pointer_type(gl.int32))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    pieces = ()
    for i in gl.static_range(NOPE // 64):
        pieces += (gl.load(row[:, None] + (16 * i + word)[None, :], mask=valid[:, None], other=0),)
    rope = gl.convert_layout(row + NOPE // 4, gl.SliceLayout(1, PAIRS))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, PAIRS))
    pieces += (gl.load(rope[:, None] + pair[None, :], mask=valid[:, None], other=0),)
    return pieces, scales


@gluon.jit
def _prefetch(slot, tile, tiles0, pools, N0: gl.constexpr, N1: gl.constexpr, NOPE: gl.constexpr, POOLS: gl.constexpr):
    """Prefetches keys into the L2, a tile before they are loaded."""
    row, _ = _address(gl.maximum(slot, 0), tile, tiles0, pools, N0, N1, NOPE, POOLS)
    QUAD: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    row = gl.convert_layout(row.to(gl.int64, bitcast=True), gl.SliceLayout(1, QUAD))
    address = row[:, None] + 144 * gl.arange(0, 4, layout=gl.SliceLayout(0, QUAD))[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _store(pieces, scales, keys, NOPE: gl.constexpr):
    """Writes keys as float16 pairs into the shared memory ``keys [64, NOPE / 2 + 32]``."""
    values = ()
    for i in gl.static_range(NOPE // 64):  # float16 holds e4m3 times a power of two
        scale = ((((scales >> (8 * i)).to(gl.int32) & 0xFF) << 23).to(gl.float32, bitcast=True)).to(gl.float16)
        scale = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        scale = scale | (scale << 16)
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high;
            mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r",
            [pieces[i], scale[:, None]],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        values += (interleave(low, high),)
    values += (_halves(pieces[NOPE // 64]),)
    keys.store(side_by_side(values, 0, NOPE // 64 + 1))


@gluon.jit
def interleave(low, high):
    """``[low0, high0, low1, ...]``: the words of a thread stay with it."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    return gl.convert_layout(gl.reshape(gl.join(low, high), (low.shape[0], 2 * low.shape[1])), PAIRS)


@gluon.jit
def _halves(pair):
    """Pairs of bfloat16 as pairs of float16."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000;
        cvt.rn.f16x2.f32 $0, high, low; }""",
        "=r,r",
        [pair],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def side_by_side(values, START: gl.constexpr, COUNT: gl.constexpr):
    """``COUNT`` (a power of two) tensors ``[n, w]`` as one ``[n, COUNT * w]``, without moving data."""
    if COUNT == 1:
        return values[START]
    else:
        left = side_by_side(values, START, COUNT // 2)
        right = side_by_side(values, START + COUNT // 2, COUNT // 2)
        return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@gluon.jit
def decode(
    work, where, pools, limits, keys, bias, barriers,
    NOPE: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, POOLS: gl.constexpr,
    HAS_LENS0: gl.constexpr, HAS_LENS1: gl.constexpr,
):  # fmt: skip
    """Decodes the keys of tile after tile; ``bias`` is -inf where there is no key."""
    t, split, splits, _first_head, _H = work
    _lens0_ptr, _lens1_ptr, width0, width1 = where
    indices0, indices1, limit0, limit1 = limits
    full, _ready, empty, _queried, _final = barriers
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, RAW)
    len0, len1, tiles0, tiles = lengths(t, where, POOLS, HAS_LENS0, HAS_LENS1)
    rows = (indices0, indices1, width0, width1, len0, len1, limit0, limit1, tiles0)
    slot = _valid(_load_slots(split, rows, POOLS, ROWS), split, rows, POOLS, ROWS)
    next_slots = _load_slots(split + splits, rows, POOLS, ROWS)
    pieces, scales = _fetch(slot, split, tiles0, pools, N0, N1, NOPE, POOLS, RAW)
    pairs = reinterpret(keys, gl.int32, [2, 64, NOPE // 2 + 32], gl.NVMMASharedLayout(128, 32, 2))
    iteration = gl.to_tensor(0)
    for tile in range(split, tiles, splits):
        stage = iteration & 1
        following = _valid(next_slots, tile + splits, rows, POOLS, ROWS)
        _prefetch(following, tile + splits, tiles0, pools, N0, N1, NOPE, POOLS)
        mbarrier.wait(empty.index(stage), ((iteration >> 1) & 1) ^ 1)
        bias.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
        _store(pieces, scales, pairs.index(stage), NOPE)
        barrier()
        mbarrier.arrive(full.index(stage))
        next_slots = _load_slots(tile + 2 * splits, rows, POOLS, ROWS)  # before the keys, since loads return in order
        pieces, scales = _fetch(following, tile + splits, tiles0, pools, N0, N1, NOPE, POOLS, RAW)
        slot = following
        iteration += 1
