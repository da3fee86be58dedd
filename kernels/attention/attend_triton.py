"""Portable device code of `sparse_attention`: one kernel attends, a second one combines split-K partials.

A program of the first kernel attends one tile of heads of one query to one split of its keys. A key is also its value,
so a tile of keys is loaded, decoded and put into shared memory once, for both products. The channels of a key are
divided into pieces whose widths are powers of two, which Triton needs: 448 + 64 channels are eight pieces of 64, or
128 + 128 + 128 + 64 + 64. Queries and accumulators are divided likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8 import decode_e2m1, decode_e4m3, decode_e8m0, e4m3_pairs, group_scales, scaled
from deepseek_attn.kernels.common.row_ops import begin, rotated_back, round_to
from deepseek_attn.kernels.common.triton_types import LOG2E


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
        # a scale that is no power of two: the product is rounded to bfloat16, as FlashMLA rounds it
        at = (row + LIMIT).to(tl.pointer_type(tl.float32)) + START // 128
        scale = tl.load(at, mask=valid, other=0)
        value = (decode_e4m3(value, NATIVE_FP8, tl.float16).to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    elif FP8:
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
    pieces, t, projected, STARTS: tl.constexpr, WIDTHS: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Pieces of projected heads, normed and rotated; as `query_norm_rope` rounds them."""
    ROWS: tl.constexpr = pieces[0].shape[0]
    position = tl.load(projected.positions + t + tl.arange(0, 1))
    known = (position >= 0) & (position < projected.max_positions)
    squares = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        x = pieces[i].to(tl.float32)
        squares += tl.sum(x * x, 1)
    factor = tl.rsqrt(squares / DIM + projected.eps)
    rotated = ()
    for i in tl.static_range(len(WIDTHS)):
        y = pieces[i].to(tl.float32)
        if SHAPE.NORM:
            y = round_to(y * factor[:, None], SHAPE.DTYPE)
        if STARTS[i] >= NOPE:
            PAIRS: tl.constexpr = WIDTHS[i] // 2
            pair = (STARTS[i] - NOPE) // 2 + tl.arange(0, PAIRS)
            row = projected.cos_sin + position.to(tl.int64) * SHAPE.ROPE + pair
            inside = known & (pair < SHAPE.ROPE // 2)
            cos = tl.load(row, mask=inside, other=1)[None, :]
            sin = tl.load(row + SHAPE.ROPE // 2, mask=inside, other=0)[None, :]
            a, b = tl.split(tl.reshape(y, (ROWS, PAIRS, 2)))
            y = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, 2 * PAIRS))
            y = round_to(y, SHAPE.DTYPE)
        rotated += (y,)
    return rotated


@triton.jit(do_not_specialize=["H", "width0", "width1", "limit0", "limit1"])
def attend_kernel(
    q_ptr,
    pool0_ptr,
    pool1_ptr,
    indices0_ptr,
    indices1_ptr,
    lens0_ptr,
    lens1_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    H,
    scale_log2,
    width0,
    width1,
    limit0,
    limit1,
    page_stride0,
    page_stride1,
    indices_stride0,
    indices_stride1,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    max_ptr,
    projected,
    DIM: tl.constexpr,
    D_V: tl.constexpr,
    NOPE: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    V_PIECES: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    ROW: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    ROW1: tl.constexpr,
    GROUP1: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    POOLS: tl.constexpr,
    HAS_LENS0: tl.constexpr,
    HAS_LENS1: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PROJECTED: tl.constexpr,
):
    """Attends heads of query ``program 0`` to split ``program 1`` of its keys; without SPLIT the result is final.

    The second pool's entries may be another record's, of ``ROW1`` elements and groups of ``GROUP1``, both below 64.
    ``max_ptr`` is None or where the largest logits go, which lie as ``lse_ptr``'s do. Queries are rotated, or with
    ``projected`` as they were projected.
    """
    END: tl.constexpr = NOPE if FP8 else DIM
    TWO_RECORDS: tl.constexpr = POOLS == 2 and GROUP1 != GROUP
    t = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin(PDL)
    len0 = width0
    if HAS_LENS0:
        len0 = tl.minimum(tl.load(lens0_ptr + t), width0).to(tl.int32)
    tiles0 = tl.cdiv(tl.maximum(len0, 0), BLOCK_N)
    tiles = tiles0
    len1 = len0
    if POOLS == 2:
        len1 = width1
        if HAS_LENS1:
            len1 = tl.minimum(tl.load(lens1_ptr + t), width1).to(tl.int32)
        tiles += tl.cdiv(tl.maximum(len1, 0), BLOCK_N)
    splits = tl.num_programs(1)
    tiles_per_split = tl.cdiv(tiles, splits)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tiles)

    q_row = q_ptr + t * q_stride_t + head * q_stride_h
    loaded = ()
    q_tile = ()
    acc = ()
    for i in tl.static_range(len(WIDTHS)):
        channel = STARTS[i] + tl.arange(0, WIDTHS[i])
        inside = (head < H)[:, None] & (channel < DIM)[None, :]
        loaded += (tl.load(q_row[:, None] + channel[None, :], mask=inside, other=0),)
    if PROJECTED is not None and not PROJECTED.ROTATED:
        loaded = _rotated_pieces(loaded, t, projected, STARTS, WIDTHS, NOPE, DIM, PROJECTED)
    for i in tl.static_range(len(WIDTHS)):
        q_tile += (loaded[i].to(DTYPE),)
    for i in tl.static_range(V_PIECES):
        acc += (_zeros(BLOCK_H, WIDTHS[i]),)
    peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)

    for tile in tl.range(first, last, num_stages=STAGES):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if POOLS == 2:
            in_first = tile < tiles0
            column = tl.where(in_first, column, column - tiles0 * BLOCK_N)
            index_row = tl.where(in_first, indices0_ptr + t * indices_stride0, indices1_ptr + t * indices_stride1)
            slot = tl.load(index_row + column, mask=column < tl.where(in_first, len0, len1), other=-1)
            valid = (slot >= 0) & (slot < tl.where(in_first, limit0, limit1))
            pool = tl.where(in_first, pool0_ptr, pool1_ptr)
            page_stride = tl.where(in_first, page_stride0, page_stride1)
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
            slot = tl.load(indices0_ptr + t * indices_stride0 + column, mask=column < len0, other=-1)
            valid = (slot >= 0) & (slot < limit0)
            pool = pool0_ptr
            page_stride = page_stride0
            page = (slot // N0).to(tl.int64)
            entry = slot % N0
            scale_start = N0 * ROW
        start = pool + page * page_stride
        row = start + entry * ROW
        scales = valid
        if FP8 and GROUP == 64:
            scales = tl.load((start + scale_start).to(tl.pointer_type(tl.int64)) + entry, mask=valid, other=0)
        elif FP8 and GROUP < 64:
            scales = start + scale_start + entry * (DIM // GROUP)
        of_first, of_second = valid, valid
        if TWO_RECORDS:
            row = tl.where(in_first, row, start + entry * ROW1)
            scales = tl.where(in_first, scales, start + scale_start + entry * (DIM // GROUP1))
            place = tl.zeros_like(slot) + tile
            of_first, of_second = valid & (place < tiles0), valid & (place >= tiles0)

        keys = ()
        logits = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        for i in tl.static_range(len(WIDTHS)):
            if FP8 and STARTS[i] >= NOPE:
                rope = (row + ROPE).to(tl.pointer_type(tl.bfloat16)) - NOPE
                key = _load_piece(rope, scales, valid, STARTS[i], WIDTHS[i], DIM, False, GROUP, NATIVE_FP8, DTYPE)
            else:
                key = _load_piece(row, scales, of_first, STARTS[i], WIDTHS[i], END, FP8, GROUP, NATIVE_FP8, DTYPE)
            if TWO_RECORDS:
                other = _load_piece(row, scales, of_second, STARTS[i], WIDTHS[i], END, FP8, GROUP1, NATIVE_FP8, DTYPE)
                key = tl.where(in_first, key, other)
            logits = tl.dot(q_tile[i], tl.trans(key), logits, input_precision=PRECISION)
            keys += (key,)

        logits = tl.where(valid[None, :], logits * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        weights = tl.exp2(logits - shift[:, None])
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(DTYPE)
        new_acc = ()
        for i in tl.static_range(V_PIECES):
            new_acc += (tl.dot(weights, keys[i], acc[i] * decay[:, None], input_precision=PRECISION),)
        acc = new_acc
        peak = new_peak

    lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
    lse = tl.where(lonely, float("-inf"), peak + tl.log2(total))
    denominator = total
    if max_ptr is not None:
        row_max = max_ptr + ((t * splits + split) if SPLIT else t) * H + head
        tl.store(row_max, peak * 0.6931471805599453, mask=head < H)
    if SPLIT:
        row_out = out_ptr + ((t * splits + split) * H + head) * D_V
        tl.store(lse_ptr + (t * splits + split) * H + head, lse, mask=head < H)
    else:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=head < H, other=float("-inf")).to(tl.float32) * LOG2E
            denominator += tl.exp2(sink - tl.where(lonely, 0.0, peak))
        lse = tl.where(lonely, float("inf"), lse * 0.6931471805599453)
        row_out = out_ptr + t * out_stride_t + head * out_stride_h
        tl.store(lse_ptr + t * H + head, lse, mask=head < H)
    factor = tl.where(lonely, 0.0, 1 / denominator)
    for i in tl.static_range(V_PIECES):
        channel = STARTS[i] + tl.arange(0, WIDTHS[i])
        mask = (head < H)[:, None] & (channel < D_V)[None, :]
        value = acc[i] * factor[:, None]
        tl.store(row_out[:, None] + channel[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_quantized(value, t, head, start, projected, DIM: tl.constexpr, SHAPE: tl.constexpr):
    """Stores channels of a head from ``start`` on, float32, rotated back and as FP8 per 128 channels."""
    PAIRS: tl.constexpr = value.shape[0] // 2
    GROUPS: tl.constexpr = value.shape[0] // 128
    first, second = tl.split(tl.reshape(round_to(value, SHAPE.DTYPE), (PAIRS, 2)))
    pair = start // 2 + tl.arange(0, PAIRS)
    position = tl.load(projected.positions + t + tl.arange(0, 1))
    rotary_pair = pair - (DIM - SHAPE.ROPE) // 2
    rotated = (rotary_pair >= 0) & (pair < DIM // 2) & (position >= 0) & (position < projected.max_positions)
    row = projected.cos_sin + position.to(tl.int64) * SHAPE.ROPE + rotary_pair
    cos = tl.load(row, mask=rotated, other=1)
    sin = tl.load(row + SHAPE.ROPE // 2, mask=rotated, other=0)
    first, second = rotated_back(first, second, cos, sin, SHAPE.DTYPE)
    bits = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, factor = group_scales(tl.max(tl.reshape(bits, (GROUPS, 64)), 1), SHAPE.POW2)
    factor = tl.reshape(tl.broadcast_to(factor[:, None], (GROUPS, 64)), (PAIRS,))
    codes = e4m3_pairs(scaled(first, factor, SHAPE.POW2), scaled(second, factor, SHAPE.POW2), SHAPE.NATIVE_FP8)
    values = projected.fp8 + (head // projected.group_heads).to(tl.int64) * projected.group_stride
    values += t * projected.row_stride + (head % projected.group_heads) * DIM
    tl.store(values.to(tl.pointer_type(tl.int16)) + pair, codes, mask=pair < DIM // 2)
    group = start // 128 + tl.arange(0, GROUPS)
    target = projected.fp8_scale + (head * (DIM // 128) + group).to(tl.int64) * projected.fp8_scale_stride + t
    tl.store(target, scale, mask=group < DIM // 128)


@triton.jit(do_not_specialize=["H", "splits"])
def combine_kernel(
    partials_ptr,
    partial_lse_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    H,
    out_stride_t,
    out_stride_h,
    splits,
    projected,
    D_V: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    PROJECTED: tl.constexpr,
):
    """Combines the partials of a query's head, weighted by their log-sum-exps (base 2), in a fixed order.

    The result goes to ``out_ptr`` and ``lse_ptr``; or with ``projected``, rotated back and quantised, to its tensors.
    """
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    channel = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = (t * splits + split) * H + head
    begin(PDL)
    partial_lse = tl.load(partial_lse_ptr + row, mask=split < splits, other=float("-inf"))
    inside = (split < splits)[:, None] & (channel < D_V)[None, :]
    partials = tl.load(partials_ptr + row[:, None] * D_V + channel[None, :], mask=inside, other=0).to(tl.float32)
    peak = tl.max(partial_lse, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(partial_lse - shift)
    total = tl.sum(weights, 0)
    lonely = total == 0  # false for NaN, which `tl.max` ignores
    denominator = total
    if HAS_SINK:
        denominator += tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * LOG2E - shift)
    value = tl.sum(partials * weights[:, None], 0)
    value = tl.where(lonely, 0.0, value / denominator)
    if PROJECTED is not None:
        _store_quantized(value, t, head, tl.program_id(2) * BLOCK_D, projected, D_V, PROJECTED)
    else:
        out = out_ptr + t * out_stride_t + head * out_stride_h + channel
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=channel < D_V)
        lse = tl.where(lonely, float("inf"), (peak + tl.log2(total)) * 0.6931471805599453)
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + t * H + head, lse)
