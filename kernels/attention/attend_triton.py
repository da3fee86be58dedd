"""Portable device code of `sparse_attention`: one kernel attends, a second one combines split-K partials.

A program of the first kernel attends one tile of heads of one query to one split of its keys. A key is also its value,
so a tile of keys is loaded, decoded and put into shared memory once, for both products. The channels of a key are
divided into pieces whose widths are powers of two, which Triton needs: 448 + 64 channels are eight pieces of 64, or
128 + 128 + 128 + 64 + 64. Queries and accumulators are divided likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.attention.plan import AttendTiles, CombineTiles
from deepseek_attn.kernels.attention.types import EntryLayout
from deepseek_attn.kernels.common.fp8_triton import decode_e2m1, decode_e4m3, decode_e8m0, quantize_pairs
from deepseek_attn.kernels.common.row_ops_triton import pdl_begin, rotated_back, rotated_rows, round_to
from deepseek_attn.kernels.common.triton_types import LOG2E

LN2 = tl.constexpr(0.6931471805599453)


class AttendQueries(NamedTuple):
    """Queries as kernels read them: ``q [T, H, d]``, strides in elements, and the factor of logits to base 2."""

    q: Any
    stride_t: Any
    stride_h: Any
    scale_log2: Any


class AttendPool(NamedTuple):
    """Keys of one pool, as kernels read them.

    Attributes:
        pool: first page; page_stride: from one page to the next, in elements.
        indices: ``[T, width]`` slots with ``indices_stride`` between rows; lens: ``[T]``, or None for all columns.
    """

    pool: Any
    page_stride: Any
    indices: Any
    indices_stride: Any
    lens: Any


class AttendOutputs(NamedTuple):
    """Where kernels write the result, or split-K partials.

    Attributes:
        out: ``[T, H, d_v]`` with these strides; of partials contiguous ``[T, splits, H, d_v]``. None if the result is
            quantised.
        lse: float32 ``[T, H]`` natural log; of partials ``[T, splits, H]`` to base 2. None if the result is quantised.
        largest: largest logits, with the shape of ``lse`` and always natural; or None.
        sink: float ``[H]`` logits that join the denominator; None without sinks and for partials.
    """

    out: Any
    stride_t: Any
    stride_h: Any
    lse: Any
    largest: Any
    sink: Any


class RawQArguments(NamedTuple):
    """Arguments of kernels that norm and rotate raw queries, and store heads as the output projection reads them.

    Attributes:
        positions: ``[T]``; cos_sin: ``[max_positions, rope channels]``; eps: of the norm of queries.
        fp8: the output, heads of a group after one another: from one group to the next ``group_stride`` elements, from
            one token to the next ``row_stride``; group_heads: heads of a group.
        fp8_scale: its scales, a row of ``fp8_scale_stride`` elements for each 128 channels of each head.
    """

    positions: Any
    cos_sin: Any
    max_positions: Any
    eps: Any
    fp8: Any
    group_stride: Any
    row_stride: Any
    group_heads: Any
    fp8_scale: Any
    fp8_scale_stride: Any


@dataclass(frozen=True)
class RawQShape:
    """Constants of kernels that read raw queries.

    Attributes:
        DTYPE: of the queries; ROPE: rotated channels; ROTATED: the queries are normed and rotated already; NORM: if
            not, norm them before the rotation; POW2: scales are powers of two; NATIVE_FP8: the GPU converts to FP8.
    """

    DTYPE: Any
    ROPE: int
    ROTATED: bool
    NORM: bool
    POW2: bool
    NATIVE_FP8: bool


@dataclass(frozen=True)
class AttendShape:
    """Constants of `attend_kernel`, `attend_hopper_kernel` and `attend_v32_hopper_kernel`.

    Attributes:
        DIM, D_V: channels of a key and of a value.
        POOLS: 1 or 2. FIRST, SECOND: layouts of the pools' entries, equal if there is one pool.
        DTYPE: of products; NATIVE_FP8: the GPU converts e4m3; TILES: the plan's.
        SPLIT: results are split-K partials; RAW_Q: the `RawQShape` of raw queries, else None.
    """

    DIM: int
    D_V: int
    POOLS: int
    FIRST: EntryLayout
    SECOND: EntryLayout
    DTYPE: Any
    NATIVE_FP8: bool
    TILES: AttendTiles
    SPLIT: bool
    RAW_Q: RawQShape | None


@dataclass(frozen=True)
class CombineShape:
    """Constants of `attention_combine_kernel`.

    Attributes:
        D_V: channels of a value; TILES: the plan's.
        RAW_Q: the `RawQShape` if the result is quantised, else None.
    """

    D_V: int
    TILES: CombineTiles
    RAW_Q: RawQShape | None


@triton.constexpr_function
def pieces(nope, dim, piece):
    """Starts and widths of the pieces that cover channels ``[0, nope)`` and ``[nope, dim)``.

    Widths are powers of two from 16 to ``piece``; the last piece of a part may be wider than the remaining channels.
    """
    starts, widths = [], []
    for start, end in ((0, nope), (nope, dim)):
        while start < end:
            left, width = end - start, piece
            while width > left and width > 16:
                width //= 2
            starts.append(start)
            widths.append(width)
            start += width
    return tuple(starts), tuple(widths)


@triton.constexpr_function
def pieces_of_values(starts, d_v):
    """The number of leading pieces that hold a value of ``d_v`` channels."""
    return sum(start < d_v for start in starts)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _load_piece(
    row,
    scales,
    valid,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys ``[BLOCK_N, WIDTH]`` of channels from ``START`` on; zeros where not ``valid`` and from ``LIMIT`` on.

    ``row`` points at the keys. ``GROUP`` channels share a scale: e8m0 bytes in one int64 ``scales`` for groups of 64,
    float32 behind the ``LIMIT`` values of the key for groups of 128. For smaller groups ``scales`` points at bytes:
    e8m0 of groups of 32, e4m3 of groups of 16, whose values are pairs of e2m1.
    """
    column = tl.arange(0, WIDTH)
    mask = valid[:, None]
    if START + WIDTH > LIMIT:
        mask = mask & (START + column < LIMIT)[None, :]
    if FP8 and GROUP == 16:
        pair = START // 2 + tl.arange(0, WIDTH // 2)
        value = decode_e2m1(tl.load(row[:, None] + pair[None, :], mask=valid[:, None], other=0))
    else:
        value = tl.load(row[:, None] + (START + column)[None, :], mask=mask, other=0)
    if FP8 and GROUP < 64:
        group = START // GROUP + tl.arange(0, WIDTH // GROUP)
        byte = tl.load(scales[:, None] + group[None, :], mask=valid[:, None], other=0)
        if GROUP == 16:
            scale = decode_e4m3(byte, NATIVE_FP8, tl.float32)
        else:
            value = decode_e4m3(value, NATIVE_FP8, tl.float16).to(tl.float32)
            scale = decode_e8m0(byte)
        value = tl.reshape(value, (row.shape[0], WIDTH // GROUP, GROUP)) * scale[:, :, None]
        value = tl.reshape(value, (row.shape[0], WIDTH))
    elif FP8 and GROUP == 128:
        # the scale is not a power of two: the product is rounded to bfloat16, as in FlashMLA
        at = (row + LIMIT).to(tl.pointer_type(tl.float32)) + START // 128
        scale = tl.load(at, mask=valid, other=0)
        value = (decode_e4m3(value, NATIVE_FP8, tl.float16).to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    elif FP8:
        # byte ``group`` of the int64 is a power of two's exponent: float16 holds the product exactly
        value = decode_e4m3(value, NATIVE_FP8, tl.float16)
        group = START // 64 + tl.arange(0, WIDTH // 64)
        byte = (scales[:, None] >> (8 * group)[None, :]).to(tl.int32) & 0xFF
        scale = (byte << 23).to(tl.float32, bitcast=True)
        if DTYPE == tl.float16:  # noqa: SIM300
            scale = scale.to(tl.float16)
        else:
            value = value.to(tl.float32)
        value = tl.reshape(value, (row.shape[0], WIDTH // 64, 64)) * scale[:, :, None]
        value = tl.reshape(value, (row.shape[0], WIDTH))
    return value.to(DTYPE)


@triton.jit
def _rotated_pieces(
    pieces, t, raw_q, STARTS: tl.constexpr, WIDTHS: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Pieces of raw queries, normed and rotated, with the rounding of `query_norm_rope`."""
    ROWS: tl.constexpr = pieces[0].shape[0]
    position = tl.load(raw_q.positions + t + tl.arange(0, 1))
    known = (position >= 0) & (position < raw_q.max_positions)
    # mean square over all pieces of a head
    squares = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        x = pieces[i].to(tl.float32)
        squares += tl.sum(x * x, 1)
    factor = tl.rsqrt(squares / DIM + raw_q.eps)
    rotated = ()
    for i in tl.static_range(len(WIDTHS)):
        y = pieces[i].to(tl.float32)
        if SHAPE.NORM:
            y = round_to(y * factor[:, None], SHAPE.DTYPE)
        if STARTS[i] >= NOPE:  # the rotated channels are pieces of their own
            PAIRS: tl.constexpr = WIDTHS[i] // 2
            pair = (STARTS[i] - NOPE) // 2 + tl.arange(0, PAIRS)
            row = raw_q.cos_sin + position.to(tl.int64) * SHAPE.ROPE + pair
            inside = known & (pair < SHAPE.ROPE // 2)
            cos = tl.load(row, mask=inside, other=1)[None, :]
            sin = tl.load(row + SHAPE.ROPE // 2, mask=inside, other=0)[None, :]
            y = rotated_rows(y, (cos, sin), WIDTHS[i], WIDTHS[i], SHAPE.DTYPE)
        rotated += (y,)
    return rotated


@triton.jit(do_not_specialize=["H", "width0", "width1", "limit0", "limit1"])
def attend_kernel(
    q, first, second, outputs, raw_q, H, width0, width1, limit0, limit1, SHAPE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Attends heads of query ``program 0`` to split ``program 1`` of its keys; without SPLIT the result is final.

    Args:
        q: `AttendQueries`; raw_q: `RawQArguments` of raw queries, else None.
        first, second: `AttendPool`; ``second`` is None with one pool. The pools' records may differ if the groups of
            both have less than 64 channels.
        outputs: `AttendOutputs`.
        H: heads; width0, width1: columns of the pools' indices; limit0, limit1: entries in the pools.
        SHAPE: `AttendShape`.
    """
    DIM: tl.constexpr = SHAPE.DIM
    NOPE: tl.constexpr = SHAPE.FIRST.nope
    N0: tl.constexpr = SHAPE.FIRST.entries
    N1: tl.constexpr = SHAPE.SECOND.entries
    ROW: tl.constexpr = SHAPE.FIRST.row
    ROW1: tl.constexpr = SHAPE.SECOND.row
    GROUP: tl.constexpr = SHAPE.FIRST.group
    GROUP1: tl.constexpr = SHAPE.SECOND.group
    FP8: tl.constexpr = GROUP > 0
    PIECES: tl.constexpr = pieces(NOPE, DIM, SHAPE.TILES.piece)
    STARTS: tl.constexpr = PIECES[0]
    WIDTHS: tl.constexpr = PIECES[1]
    V_PIECES: tl.constexpr = pieces_of_values(STARTS, SHAPE.D_V)
    DTYPE: tl.constexpr = SHAPE.DTYPE
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else None
    NATIVE_FP8: tl.constexpr = SHAPE.NATIVE_FP8
    BLOCK_H: tl.constexpr = SHAPE.TILES.heads
    BLOCK_N: tl.constexpr = SHAPE.TILES.keys
    END: tl.constexpr = NOPE if FP8 else DIM
    TWO_POOLS: tl.constexpr = SHAPE.POOLS == 2  # a tuple cannot be compared with None on Triton 3.6
    TWO_RECORDS: tl.constexpr = TWO_POOLS and GROUP1 != GROUP
    t = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    pdl_begin(PDL)  # wait until the previous kernel has written queries, keys and indices

    # tiles of the first pool, then of the second one; a split has an equal share of them, in order
    len0 = width0
    if first.lens is not None:
        len0 = tl.minimum(tl.load(first.lens + t), width0).to(tl.int32)
    tiles0 = tl.cdiv(tl.maximum(len0, 0), BLOCK_N)
    tiles = tiles0
    len1 = len0
    if TWO_POOLS:
        len1 = width1
        if second.lens is not None:
            len1 = tl.minimum(tl.load(second.lens + t), width1).to(tl.int32)
        tiles += tl.cdiv(tl.maximum(len1, 0), BLOCK_N)
    splits = tl.num_programs(1)
    tiles_per_split = tl.cdiv(tiles, splits)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tiles)

    # queries stay in registers, piece by piece, in the dtype of products
    q_row = q.q + t * q.stride_t + head * q.stride_h
    loaded = ()
    q_tile = ()
    acc = ()
    for i in tl.static_range(len(WIDTHS)):
        channel = STARTS[i] + tl.arange(0, WIDTHS[i])
        inside = (head < H)[:, None] & (channel < DIM)[None, :]
        loaded += (tl.load(q_row[:, None] + channel[None, :], mask=inside, other=0),)
    RAW_Q: tl.constexpr = SHAPE.RAW_Q  # Triton 3.6 passes no field of a constant
    if RAW_Q is not None and not RAW_Q.ROTATED:
        loaded = _rotated_pieces(loaded, t, raw_q, STARTS, WIDTHS, NOPE, DIM, RAW_Q)
    for i in tl.static_range(len(WIDTHS)):
        q_tile += (loaded[i].to(DTYPE),)
    for i in tl.static_range(V_PIECES):
        acc += (_zeros(BLOCK_H, WIDTHS[i]),)
    peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)

    for tile in tl.range(first_tile, last_tile, num_stages=SHAPE.TILES.stages):
        # slots of the tile's keys, and where their pages and scales begin
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if TWO_POOLS:
            in_first = tile < tiles0
            column = tl.where(in_first, column, column - tiles0 * BLOCK_N)
            index_row = tl.where(
                in_first, first.indices + t * first.indices_stride, second.indices + t * second.indices_stride
            )
            slot = tl.load(index_row + column, mask=column < tl.where(in_first, len0, len1), other=-1)
            valid = (slot >= 0) & (slot < tl.where(in_first, limit0, limit1))
            pool = tl.where(in_first, first.pool, second.pool)
            page_stride = tl.where(in_first, first.page_stride, second.page_stride)
            page = (slot // N0).to(tl.int64)
            entry = slot % N0
            scale_start = N0 * ROW
            if N0 != N1:
                page = tl.where(in_first, page, (slot // N1).to(tl.int64))
                entry = tl.where(in_first, entry, slot % N1)
                scale_start = tl.where(in_first, N0 * ROW, N1 * ROW)
            if TWO_RECORDS:
                scale_start = tl.where(in_first, N0 * ROW, N1 * ROW1)
        else:
            slot = tl.load(first.indices + t * first.indices_stride + column, mask=column < len0, other=-1)
            valid = (slot >= 0) & (slot < limit0)
            pool = first.pool
            page_stride = first.page_stride
            page = (slot // N0).to(tl.int64)
            entry = slot % N0
            scale_start = N0 * ROW
        start = pool + page * page_stride
        row = start + entry * ROW
        # scales of groups of 64: all of a key's in one int64; of smaller groups: their address
        scales = valid
        if FP8 and GROUP == 64:
            scales = tl.load((start + scale_start).to(tl.pointer_type(tl.int64)) + entry, mask=valid, other=0)
        elif FP8 and GROUP < 64:
            scales = start + scale_start + entry * (DIM // GROUP)
        of_first, of_second = valid, valid
        if TWO_RECORDS:
            # each key is loaded in both formats, with the loads of the wrong format masked; the right values are kept
            row = tl.where(in_first, row, start + entry * ROW1)
            scales = tl.where(in_first, scales, start + scale_start + entry * (DIM // GROUP1))
            tile_of_key = tl.zeros_like(slot) + tile
            of_first, of_second = valid & (tile_of_key < tiles0), valid & (tile_of_key >= tiles0)

        # decode the keys piece by piece; a piece is multiplied with the queries at once, and kept for the values
        keys = ()
        logits = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        for i in tl.static_range(len(WIDTHS)):
            if FP8 and STARTS[i] >= NOPE:
                rope = (row + SHAPE.FIRST.rope).to(tl.pointer_type(tl.bfloat16)) - NOPE
                key = _load_piece(rope, scales, valid, STARTS[i], WIDTHS[i], DIM, False, GROUP, NATIVE_FP8, DTYPE)
            else:
                key = _load_piece(row, scales, of_first, STARTS[i], WIDTHS[i], END, FP8, GROUP, NATIVE_FP8, DTYPE)
            if TWO_RECORDS:
                other = _load_piece(row, scales, of_second, STARTS[i], WIDTHS[i], END, FP8, GROUP1, NATIVE_FP8, DTYPE)
                key = tl.where(in_first, key, other)
            logits = tl.dot(q_tile[i], tl.trans(key), logits, input_precision=PRECISION)
            keys += (key,)

        # online softmax to base 2: selected, not added, so that NaN of a query without keys is not seen
        logits = tl.where(valid[None, :], logits * q.scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        weights = tl.exp2(logits - shift[:, None])
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(DTYPE)
        # rescale the sum of the earlier tiles, and add this tile's values
        new_acc = ()
        for i in tl.static_range(V_PIECES):
            new_acc += (tl.dot(weights, keys[i], acc[i] * decay[:, None], input_precision=PRECISION),)
        acc = new_acc
        peak = new_peak

    lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
    lse = tl.where(lonely, float("-inf"), peak + tl.log2(total))
    denominator = total
    if outputs.largest is not None:
        row_max = outputs.largest + ((t * splits + split) if SHAPE.SPLIT else t) * H + head
        tl.store(row_max, peak * LN2, mask=head < H)
    # a partial keeps its log-sum-exp to base 2; the sink joins where the result is final
    if SHAPE.SPLIT:
        row_out = outputs.out + ((t * splits + split) * H + head) * SHAPE.D_V
        tl.store(outputs.lse + (t * splits + split) * H + head, lse, mask=head < H)
    else:
        if outputs.sink is not None:
            sink = tl.load(outputs.sink + head, mask=head < H, other=float("-inf")).to(tl.float32) * LOG2E
            denominator += tl.exp2(sink - tl.where(lonely, 0.0, peak))
        lse = tl.where(lonely, float("inf"), lse * LN2)
        row_out = outputs.out + t * outputs.stride_t + head * outputs.stride_h
        tl.store(outputs.lse + t * H + head, lse, mask=head < H)
    factor = tl.where(lonely, 0.0, 1 / denominator)
    for i in tl.static_range(V_PIECES):
        channel = STARTS[i] + tl.arange(0, WIDTHS[i])
        mask = (head < H)[:, None] & (channel < SHAPE.D_V)[None, :]
        value = acc[i] * factor[:, None]
        tl.store(row_out[:, None] + channel[None, :], value.to(outputs.out.dtype.element_ty), mask=mask)


@triton.jit
def _store_quantized(value, t, head, start, raw_q, DIM: tl.constexpr, SHAPE: tl.constexpr):
    """Rotates back float32 channels of a head from ``start`` on; stores them in FP8 with a scale per 128 channels."""
    PAIRS: tl.constexpr = value.shape[0] // 2
    GROUPS: tl.constexpr = value.shape[0] // 128
    # rounded to the queries' dtype, as attention would store it, before it is rotated back
    first, second = tl.split(tl.reshape(round_to(value, SHAPE.DTYPE), (PAIRS, 2)))
    pair = start // 2 + tl.arange(0, PAIRS)
    position = tl.load(raw_q.positions + t + tl.arange(0, 1))
    rotary_pair = pair - (DIM - SHAPE.ROPE) // 2
    # pairs before the rotated ones, and positions outside the table, read cosine 1 and sine 0
    rotated = (rotary_pair >= 0) & (pair < DIM // 2) & (position >= 0) & (position < raw_q.max_positions)
    row = raw_q.cos_sin + position.to(tl.int64) * SHAPE.ROPE + rotary_pair
    cos = tl.load(row, mask=rotated, other=1)
    sin = tl.load(row + SHAPE.ROPE // 2, mask=rotated, other=0)
    first, second = rotated_back(first, second, cos, sin, SHAPE.DTYPE)
    codes, scale = quantize_pairs(first, second, SHAPE.POW2, SHAPE.NATIVE_FP8)
    # two codes are stored as one int16; groups of heads lie one after another
    values = raw_q.fp8 + (head // raw_q.group_heads).to(tl.int64) * raw_q.group_stride
    values += t * raw_q.row_stride + (head % raw_q.group_heads) * DIM
    tl.store(values.to(tl.pointer_type(tl.int16)) + pair, codes, mask=pair < DIM // 2)
    group = start // 128 + tl.arange(0, GROUPS)
    target = raw_q.fp8_scale + (head * (DIM // 128) + group).to(tl.int64) * raw_q.fp8_scale_stride + t
    tl.store(target, scale, mask=group < DIM // 128)


@triton.jit(do_not_specialize=["H", "splits"])
def attention_combine_kernel(partials, outputs, raw_q, H, splits, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Combines the partials of a query's head, weighted by their log-sum-exps (base 2), in a fixed order.

    Args:
        partials: `AttendOutputs` that `attend_kernel` or a kernel for Hopper has written.
        outputs: `AttendOutputs` of the result; with ``raw_q`` the result is rotated back, quantised and written to the
            tensors of ``raw_q``.
        raw_q: `RawQArguments`, or None; H: heads; SHAPE: `CombineShape`.
    """
    D_V: tl.constexpr = SHAPE.D_V
    BLOCK_S: tl.constexpr = SHAPE.TILES.splits
    BLOCK_D: tl.constexpr = SHAPE.TILES.channels
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    channel = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = (t * splits + split) * H + head
    pdl_begin(PDL)  # wait until all partials are written
    partial_lse = tl.load(partials.lse + row, mask=split < splits, other=float("-inf"))
    inside = (split < splits)[:, None] & (channel < D_V)[None, :]
    values = tl.load(partials.out + row[:, None] * D_V + channel[None, :], mask=inside, other=0).to(tl.float32)
    # a split's weight is its share of the softmax's denominator; splits without keys have -inf
    peak = tl.max(partial_lse, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(partial_lse - shift)
    total = tl.sum(weights, 0)
    lonely = total == 0  # false for NaN, which `tl.max` ignores
    denominator = total
    if outputs.sink is not None:
        denominator += tl.exp2(tl.load(outputs.sink + head).to(tl.float32) * LOG2E - shift)
    value = tl.sum(values * weights[:, None], 0)
    value = tl.where(lonely, 0.0, value / denominator)
    RAW_Q: tl.constexpr = SHAPE.RAW_Q  # Triton 3.6 passes no field of a constant
    if RAW_Q is not None:
        _store_quantized(value, t, head, tl.program_id(2) * BLOCK_D, raw_q, D_V, RAW_Q)
    else:
        out = outputs.out + t * outputs.stride_t + head * outputs.stride_h + channel
        tl.store(out, value.to(outputs.out.dtype.element_ty), mask=channel < D_V)
        lse = tl.where(lonely, float("inf"), (peak + tl.log2(total)) * LN2)
        if tl.program_id(2) == 0:
            tl.store(outputs.lse + t * H + head, lse)
