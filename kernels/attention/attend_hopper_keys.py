"""Gluon device code of `attend_hopper`: the slots of a program's keys, and their bytes decoded to float16."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepseek_attn.kernels.common.gluon import barrier, reinterpret


class KeyLists(NamedTuple):
    """Slots of a query's keys in two pools; with one pool, both fields hold that pool's.

    Attributes:
        lens0, lens1: ``[T]`` leading columns that count; None: all ``width0`` or ``width1`` columns.
        indices0, indices1: this query's row of slots; limit0, limit1: entries in the pools.
    """

    lens0: Any
    lens1: Any
    width0: Any
    width1: Any
    indices0: Any
    indices1: Any
    limit0: Any
    limit1: Any


class KeyPools(NamedTuple):
    """Bytes of the pools, and bytes from one page to the next."""

    pool0: Any
    pool1: Any
    page_stride0: Any
    page_stride1: Any


class KeyCounts(NamedTuple):
    """Numbers of a query: columns that count in each pool, tiles of the first pool, tiles of both."""

    len0: Any
    len1: Any
    tiles0: Any
    tiles: Any


@gluon.jit
def key_counts(t, lists, POOLS: gl.constexpr):
    """`KeyCounts` of query ``t``.

    With two pools, the number of the first pool's tiles follows from the width of its rows: tile positions do not
    depend on lengths.
    """
    len0 = lists.width0
    if lists.lens0 is not None:
        len0 = gl.minimum(gl.load(lists.lens0 + t), lists.width0).to(gl.int32)
    len1 = len0
    if POOLS == 2:
        len1 = lists.width1
        if lists.lens1 is not None:
            len1 = gl.minimum(gl.load(lists.lens1 + t), lists.width1).to(gl.int32)
        tiles0 = (lists.width0 + 63) // 64
        tiles = tiles0 + (gl.maximum(len1, 0) + 63) // 64
    else:
        tiles = (gl.maximum(len0, 0) + 63) // 64
        tiles0 = tiles
    return KeyCounts(len0, len1, tiles0, tiles)


@gluon.jit
def _load_slots(tile, lists, tiles0, POOLS: gl.constexpr, layout: gl.constexpr):
    """Loads the slots of a tile, whatever the lengths; -1 past the width of the index rows."""
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    row = lists.indices0
    width = lists.width0
    if POOLS == 2:
        in_first = tile < tiles0
        column = gl.where(in_first, column, column - tiles0 * 64)
        row = gl.where(in_first, lists.indices0, lists.indices1)
        width = gl.where(in_first, lists.width0, lists.width1)
    return gl.load(row + column, mask=column < width, other=-1)


@gluon.jit
def _valid(slot, tile, lists, counts, POOLS: gl.constexpr, layout: gl.constexpr):
    """Slots of the keys of a tile, -1 for missing keys."""
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    count = counts.len0
    limit = lists.limit0
    if POOLS == 2:
        in_first = tile < counts.tiles0
        count = gl.where(in_first, counts.len0, counts.len1 + counts.tiles0 * 64)
        limit = gl.where(in_first, lists.limit0, lists.limit1)
    return gl.where((column < count) & (slot >= 0) & (slot < limit), slot.to(gl.int32), -1)


@gluon.jit
def _address(slot, tile, tiles0, pools, SHAPE: gl.constexpr, POOLS: gl.constexpr):
    """Pointers to the bytes of entries, and to their scales."""
    N0: gl.constexpr = SHAPE.FIRST.entries
    N1: gl.constexpr = SHAPE.SECOND.entries
    ROW: gl.constexpr = SHAPE.FIRST.nope + 128  # one byte for each quantised channel, two for each of 64 others
    page = (slot // N0).to(gl.int64)
    entry = slot % N0
    pool = pools.pool0
    page_stride = pools.page_stride0
    scale_start = N0 * ROW
    if POOLS == 2:
        in_first = tile < tiles0  # a tile has keys of one pool
        pool = gl.where(in_first, pools.pool0, pools.pool1)
        page_stride = gl.where(in_first, pools.page_stride0, pools.page_stride1)
        if N0 != N1:
            page = gl.where(in_first, page, (slot // N1).to(gl.int64))
            entry = gl.where(in_first, entry, slot % N1)
            scale_start = gl.where(in_first, N0 * ROW, N1 * ROW)
    start = pool + page * page_stride
    return start + entry * ROW, (start + scale_start).to(gl.pointer_type(gl.int64)) + entry


@gluon.jit
def _fetch(slot, tile, tiles0, pools, SHAPE: gl.constexpr, POOLS: gl.constexpr, layout: gl.constexpr):
    """The bytes of keys as 32-bit words, pieces of 64 channels, and the scale bytes as one int64."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    NOPE: gl.constexpr = SHAPE.FIRST.nope
    valid = slot >= 0
    row, scale = _address(gl.maximum(slot, 0), tile, tiles0, pools, SHAPE, POOLS)
    scales = gl.load(scale, mask=valid, other=0)
    row = row.to(gl.pointer_type(gl.int32))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    pieces = ()
    for i in gl.static_range(NOPE // 64):
        pieces += (gl.load(row[:, None] + (16 * i + word)[None, :], mask=valid[:, None], other=0),)
    # the unquantised channels, in the layout that `interleave` gives the quantised channels
    rope = gl.convert_layout(row + NOPE // 4, gl.SliceLayout(1, PAIRS))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, PAIRS))
    pieces += (gl.load(rope[:, None] + pair[None, :], mask=valid[:, None], other=0),)
    return pieces, scales


@gluon.jit
def _prefetch(slot, tile, tiles0, pools, SHAPE: gl.constexpr, POOLS: gl.constexpr):
    """Prefetches keys into the L2, a tile before they are loaded."""
    row, _ = _address(gl.maximum(slot, 0), tile, tiles0, pools, SHAPE, POOLS)
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
        # byte i is the exponent of a power of two; put twice into a word, for pairs of float16
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
def decode(work, lists, pools, tiles, SHAPE: gl.constexpr, POOLS: gl.constexpr):
    """Decodes the keys tile by tile; ``bias`` is -inf for missing keys.

    While it decodes tile i, the bytes of tile i + 1 and the slots of tile i + 2 are being loaded.
    """
    NOPE: gl.constexpr = SHAPE.FIRST.nope
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, RAW)
    splits = work.splits
    # the first tile is fetched before the loop, and the slots of the second
    counts = key_counts(work.t, lists, POOLS)
    tiles0 = counts.tiles0
    slot = _valid(_load_slots(work.split, lists, tiles0, POOLS, ROWS), work.split, lists, counts, POOLS, ROWS)
    next_slots = _load_slots(work.split + splits, lists, tiles0, POOLS, ROWS)
    pieces, scales = _fetch(slot, work.split, tiles0, pools, SHAPE, POOLS, RAW)
    pairs = reinterpret(tiles.keys, gl.int32, [2, 64, NOPE // 2 + 32], gl.NVMMASharedLayout(128, 32, 2))
    iteration = gl.to_tensor(0)
    for tile in range(work.split, counts.tiles, splits):
        stage = iteration & 1
        # the next tile's slots have arrived: its bytes start towards the L2 while this tile is decoded
        following = _valid(next_slots, tile + splits, lists, counts, POOLS, ROWS)
        _prefetch(following, tile + splits, tiles0, pools, SHAPE, POOLS)
        # wait until the tile before the last one, in the same memory, was read by both products
        mbarrier.wait(tiles.empty.index(stage), ((iteration >> 1) & 1) ^ 1)
        tiles.bias.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
        _store(pieces, scales, pairs.index(stage), NOPE)
        barrier()  # all threads have stored their keys: the warps that weigh may read the tile
        mbarrier.arrive(tiles.full.index(stage))
        next_slots = _load_slots(
            tile + 2 * splits, lists, tiles0, POOLS, ROWS
        )  # before the keys: loads return in order
        pieces, scales = _fetch(following, tile + splits, tiles0, pools, SHAPE, POOLS, RAW)
        slot = following
        iteration += 1
