"""Gluon device code of `paged_index_scores` for Hopper's decode steps: FP8 or FP4 keys, 64 heads.

A program scores one split of a request's keys for one, two or four tokens. Reading the keys takes the time, so programs
are small, several run on a multiprocessor, and each has a few tiles of keys on their way to shared memory. More tiles
of fewer programs were slower: FP8 keys of 128 requests take 148 us with two stages and six programs, 177 with eight
stages and two.

FP8 keys are multiplied from shared memory. FP4 keys are the left factor of a product and come from registers: a thread
converts 32 channels, one group, of two keys to FP8. They still pass through shared memory: ptxas moves prefetches
into registers to right before their use. In a tensor core's left factor a thread holds runs of 4 channels that are 16
apart; the channels of the queries are reordered so that these runs are the 32 channels of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp4_hopper import HIGH, HIGH_STEP, LOW, LOW_STEP, as_fp8, fp4_to_fp8
from deepseek_attn.kernels.common.gluon import barrier, copy_to_shared
from deepseek_attn.kernels.indexer.scores_hopper import BLOCK, DIM, HEADS, split_of_keys

FP8_STAGES = gl.constexpr(2)  # tiles in shared memory, a power of two; all but the one in use are on their way
FP4_STAGES = gl.constexpr(4)


class SplitKeys(NamedTuple):
    """The pool of keys, the pages of one request, and where the program's split of its keys ends."""

    pool: Any
    page_stride: Any
    table: Any
    n: Any


class DecodeTileStages(NamedTuple):
    """Tiles of keys in shared memory, e4m3 or int32 words of FP4, and their scales: a float32 or four e8m0 bytes."""

    keys: Any
    scales: Any


@gluon.constexpr_function
def _load_layout():
    """Layout of the words ``[64, 16]`` of a tile, matching `_key_layout`."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )


@gluon.constexpr_function
def _key_layout(words, with_bytes):
    """Layout of int32 words ``[64, 4, words]`` of four groups (or bytes, ``[64, 4, words, 4]``).

    A thread has all words of one group, of two keys that are 8 apart.
    """
    in_thread = [[0, 0, 0, 1], [0, 0, 0, 2], *([0, 0, 1 << i, 0] for i in range(words.bit_length() - 1)), [8, 0, 0, 0]]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    whole = gl.DistributedLinearLayout(in_thread, lanes, [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, 4, words, 4])
    return whole if with_bytes else gl.SliceLayout(3, whole)


@gluon.jit
def _page_of(keys, tile, row, PAGE: gl.constexpr):
    """Pages of a tile's keys: a single page if it holds all of them, otherwise one per key."""
    if PAGE % BLOCK == 0:
        return gl.load(keys.table + tile * BLOCK // PAGE, mask=tile * BLOCK < keys.n, other=0)
    else:
        entry = tile * BLOCK + row
        return gl.load(keys.table + entry // PAGE, mask=entry < keys.n, other=0)


@gluon.constexpr_function
def _copy_layout(columns):
    """Layout in which the keys of a tile, rows of 128 e4m3 or 16 words, are copied 16 bytes at a time."""
    per_thread = 16 if columns == 128 else 4
    lanes = columns // per_thread
    return gl.BlockedLayout([1, per_thread], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _copy_tile(keys, page, line_page, tile, row, line, stages, i, PAGE: gl.constexpr):
    """Starts to copy tile ``i`` of this program, number ``tile`` of its request, and its scales to shared memory."""
    STAGES: gl.constexpr = stages.keys.shape[0]
    COLUMNS: gl.constexpr = stages.keys.shape[2]
    KEY_BYTES: gl.constexpr = COLUMNS * (stages.keys.dtype.primitive_bitwidth // 8)
    # rows copy keys, 16 bytes a thread; lines copy scales, one a thread
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _copy_layout(COLUMNS)))
    entry = tile * BLOCK + row
    line_entry = tile * BLOCK + line
    if PAGE % BLOCK == 0:
        offset = tile * BLOCK % PAGE + row
        line_offset = tile * BLOCK % PAGE + line
    else:
        offset = entry % PAGE
        line_offset = line_entry % PAGE
    key = keys.pool + page.to(gl.int64) * keys.page_stride + offset * KEY_BYTES
    key = key.to(gl.pointer_type(stages.keys.dtype))
    scale = keys.pool + line_page.to(gl.int64) * keys.page_stride + PAGE * KEY_BYTES
    scale = scale.to(gl.pointer_type(stages.scales.dtype)) + line_offset
    copy_to_shared(stages.keys.index(i & (STAGES - 1)), key[:, None] + column[None, :], mask=(entry < keys.n)[:, None])
    copy_to_shared(stages.scales.index(i & (STAGES - 1)), scale, mask=line_entry < keys.n)
    async_copy.commit_group()  # keys and scales of a tile are waited for together


@gluon.jit
def _left_factor(words, scales):
    """The keys as e4m3 ``[64, 128]``, relative to the largest scale of their key, times 64; and the factor of each key.

    As in Triton, values are exact where scales differ by up to 2**11, and zero where they differ by more.
    """
    WORDS: gl.constexpr = _key_layout(4, False)
    first, second = scales & 0xFF00FF, (scales >> 8) & 0xFF00FF
    # the four e8m0 bytes of a key, two in each number
    largest = gl.maximum(gl.maximum(first & 255, first >> 16), gl.maximum(second & 255, second >> 16))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    power = ((scales[:, None] >> (8 * group)[None, :]) & 255) - largest[:, None] + 6
    known = power > -6
    low = gl.where(known, LOW + power * LOW_STEP, 0)
    high = gl.where(known, HIGH + power * HIGH_STEP, 0)
    fp8 = fp4_to_fp8(words, low, high, _key_layout(8, False))
    left = as_fp8(fp8, _key_layout(8, True))
    # runs of 4 channels that are 16 apart become the 32 of a group: queries are stored in the same order
    left = left.reshape([4, 2, 8, 4, 8, 4]).permute((0, 1, 2, 4, 3, 5)).reshape([64, 128])
    bits = gl.where(largest == 255, 0x7FC00000, gl.where(largest == 0, 0x00400000, largest << 23))
    return left, bits.to(gl.float32, bitcast=True) * 0.015625


@gluon.jit
def _fp4_factors(stages, i):
    """Tile ``i`` of this program from FP4 keys: the left factor of its products, in registers, and factors of keys."""
    STAGES: gl.constexpr = stages.keys.shape[0]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    WORDS: gl.constexpr = _key_layout(4, False)
    words = stages.keys.index(i & (STAGES - 1)).load(_load_layout()).reshape([64, 4, 4])
    words = gl.convert_layout(words, WORDS, assert_trivial=True)
    scales = stages.scales.index(i & (STAGES - 1)).load(gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    left, scale = _left_factor(words, scales)
    left = gl.convert_layout(left, gl.DotOperandLayout(0, PRODUCT, 4), assert_trivial=True)
    return left, gl.convert_layout(scale, gl.SliceLayout(1, PRODUCT), assert_trivial=True)


@gluon.jit
def _score_tile(tile, left, scale, queries, weights, out_ptr, out_stride, ends):
    """Scores of a tile for each token; ``ends``: keys of each token that are scored."""
    TOKENS: gl.constexpr = queries.shape[0]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    zeros = gl.zeros([BLOCK, HEADS], gl.float32, layout=PRODUCT)
    entry = tile * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, PRODUCT))
    for t in gl.static_range(TOKENS):
        product = warpgroup_mma(left, queries.index(t).permute((1, 0)), zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        # twice a ReLU, at twice the rate of a maximum
        score = gl.sum((product + gl.abs(product)) * weights[t][None, :], 1) * scale
        gl.store(out_ptr + t * out_stride + entry, score, mask=entry < ends[t])


@gluon.jit(
    do_not_specialize=["block_table_ptr", "token_to_req_ptr", "num_visible_ptr", "T", "width", "skip", "table_stride"]
)
def index_scores_decode_hopper_kernel(
    rows,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    T,
    width,
    skip,
    table_stride,
    PAGE: gl.constexpr,
    TOKENS: gl.constexpr,
    FP4: gl.constexpr,
):
    """Program ``(i, j)``: split ``j`` of the keys, for tokens ``i * TOKENS`` on; ``rows`` are `ScoreRows`."""
    gdc_launch_dependents()
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    queries = gl.allocate_shared_memory(gl.float8e4nv, [TOKENS, HEADS, DIM], gl.NVMMASharedLayout(128, 8, 2))
    first = gl.program_id(0).to(gl.int64) * TOKENS
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    if FP4:
        channel = channel // 4 % 4 * 32 + channel // 16 * 4 + channel % 4
        # queries hold the even channels, then the odd ones
        channel = channel // 2 + channel % 2 * (DIM // 2)
    column = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
    weights = ()
    gdc_wait()  # until the previous kernel has written the queries
    for t in gl.static_range(TOKENS):
        row = (first + t) * HEADS + head
        q = gl.load(rows.q + row[:, None] * DIM + channel[None, :], mask=(row < T * HEADS)[:, None], other=0.0)
        queries.index(t).store(q)
        row = (first + t) * HEADS + column
        weights += (gl.load(rows.weights + row, mask=row < T * HEADS, other=0.0) * 0.5,)
    fence_async_shared()  # the tensor cores see what this thread has stored
    barrier()  # the heads of all tokens are in shared memory, for the tensor cores

    out_ptr = rows.out + first * rows.out_stride
    STAGES: gl.constexpr = FP4_STAGES if FP4 else FP8_STAGES
    AHEAD: gl.constexpr = STAGES - 1
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if FP4:
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        tile_keys = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, DIM // 8], SHARED)
        tile_scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT)
    else:
        tile_keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, DIM], gl.NVMMASharedLayout(128, 8, 2))
        tile_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
    stages = DecodeTileStages(tile_keys, tile_scales)
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, _copy_layout(tile_keys.shape[2])))
    line = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    lead = gl.to_tensor(0)
    while lead < TOKENS:
        # one request after another: the tokens that share it are scored together; mostly there is one
        request = gl.load(token_to_req_ptr + first + lead, mask=first + lead < T, other=0)
        n = gl.to_tensor(0)
        ends = ()
        for t in gl.static_range(TOKENS):
            other = gl.load(token_to_req_ptr + first + t, mask=first + t < T, other=0)
            length = gl.load(num_visible_ptr + first + t, mask=first + t < T, other=0)
            length = gl.minimum(length, width).to(gl.int32)
            same = (t == lead) & (other == request)
            length = gl.where(same & (length > skip), length, 0)
            n = gl.maximum(n, length)
            ends += (length,)
            lead = gl.where(same, t + 1, lead)
        tile, end = split_of_keys(n)
        if tile < end:
            keys = SplitKeys(
                rows.pool,
                rows.page_stride,
                block_table_ptr + request.to(gl.int64) * table_stride,
                gl.minimum(n, end * BLOCK),
            )
            # the first STAGES - 1 tiles; page ids are loaded one tile ahead
            for i in gl.static_range(AHEAD):
                page = _page_of(keys, tile + i, row, PAGE)
                line_page = _page_of(keys, tile + i, line, PAGE)
                _copy_tile(keys, page, line_page, tile + i, row, line, stages, i, PAGE)
            page = _page_of(keys, tile + AHEAD, row, PAGE)
            line_page = _page_of(keys, tile + AHEAD, line, PAGE)
            i = gl.to_tensor(0)
            while tile < end:
                async_copy.wait_group(AHEAD - 1)  # this thread's copies of tile i have ended
                if FP4:
                    left, scale = _fp4_factors(stages, i)
                else:
                    fence_async_shared()  # the tensor cores read the keys where the copy put them
                    left = stages.keys.index(i & (STAGES - 1))
                barrier()  # all have this tile, and are done with the one before, whose stage the next copy takes
                _copy_tile(keys, page, line_page, tile + AHEAD, row, line, stages, i + AHEAD, PAGE)
                page = _page_of(keys, tile + AHEAD + 1, row, PAGE)
                line_page = _page_of(keys, tile + AHEAD + 1, line, PAGE)
                if not FP4:
                    scale = stages.scales.index(i & (STAGES - 1)).load(gl.SliceLayout(1, PRODUCT))
                _score_tile(tile, left, scale, queries, weights, out_ptr, rows.out_stride, ends)
                tile += 1
                i += 1
            async_copy.wait_group(0)  # copies past the end, which masks have emptied
            barrier()  # all are done: the next request starts with empty stages
