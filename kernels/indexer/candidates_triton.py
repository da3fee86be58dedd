"""Triton device code of `index_select` with candidate blocks (DeepSeek-V4.1).

A layer that keeps candidates reduces its scores to one per block. A layer that is limited to them scores the entries of
a query's blocks only: column ``c`` of its scores is entry ``c % SIZE`` of block ``kept[c // SIZE]``. Blocks ascend, so
columns do too, and ties are resolved as among entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops_triton import pdl_begin
from deepseek_attn.kernels.indexer.scores_triton import key_operands, query_operands, score_keys


class CandidateRows(NamedTuple):
    """Rows of `candidate_entries_kernel`: int32 with strides between them.

    Attributes:
        out: ``[T, K]`` selected columns, replaced by entries; kept: ``[T, n]`` blocks; slots: ``[T, K]``, or unused.
    """

    out: Any
    kept: Any
    slots: Any
    out_stride: Any
    kept_stride: Any
    slot_stride: Any


@triton.jit(
    do_not_specialize=["block_table_ptr", "token_to_req_ptr", "num_visible_ptr", "columns", "skip", "table_stride"]
)
def candidate_scores_kernel(
    rows,
    kept_ptr,
    kept_stride,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    columns,
    skip,
    table_stride,
    SHAPE: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, s)``: split ``s`` of the first ``num_visible[t]`` columns of query ``t``; -inf for no entry."""
    H: tl.constexpr = SHAPE.H
    PAGE: tl.constexpr = SHAPE.PAGE
    BLOCK_N: tl.constexpr = SHAPE.KEYS
    STAGES: tl.constexpr = SHAPE.STAGES
    pdl_begin(PDL)  # wait until the previous kernel has written the queries
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    visible = tl.load(num_visible_ptr + token).to(tl.int32)
    end = tl.minimum(visible, columns)
    end = tl.where(visible > skip, end, 0)  # where everything is selected, nothing is scored
    tiles = tl.cdiv(tl.cdiv(end, BLOCK_N), tl.num_programs(1))
    request = tl.load(token_to_req_ptr + token).to(tl.int64)
    kept_ptr += token * kept_stride
    # products have at least 16 columns, and FP8 at least 32 terms
    head = tl.arange(0, max(16, triton.next_power_of_2(H)))
    channel = tl.arange(0, max(32, triton.next_power_of_2(SHAPE.DIM)))
    weights = tl.load(rows.weights + token * H + head, mask=head < H, other=0.0)
    query = rows.q + (token * H + head)[:, None] * SHAPE.DIM
    q, q_odd = query_operands(query, head < H, channel, SHAPE)
    # keys of the next STAGES - 1 tiles are copied to shared memory meanwhile
    for tile in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(end, BLOCK_N)), num_stages=STAGES):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        block = tl.load(kept_ptr + column // SIZE, mask=column < end, other=-1)
        entry = block * SIZE + column % SIZE
        # the newest block may have entries that the query does not see
        known = (block >= 0) & (entry < visible)
        page = tl.load(block_table_ptr + request * table_stride + entry // PAGE, mask=known, other=0)
        start = rows.pool + page.to(tl.int64) * rows.page_stride
        key, odd, scale = key_operands(start, entry % PAGE, known, channel, SHAPE)
        score = score_keys(key, odd, scale, q, q_odd, weights, SHAPE)
        score = tl.where(known, score, float("-inf"))
        tl.store(rows.out + token * rows.out_stride + column, score, mask=column < end)


@triton.jit(do_not_specialize=["width", "skip", "num_visible_ptr"])
def block_scores_kernel(
    scores_ptr,
    num_visible_ptr,
    out_ptr,
    counts_ptr,
    width,
    skip,
    scores_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Highest score of each block of entries, +inf for the block of the newest visible one; and the number of blocks.

    Program ``(t, s)``: ``BLOCKS`` blocks of query ``t``. Queries of up to ``skip`` visible entries have no scores, and
    every block counts the same.
    """
    pdl_begin(PDL)  # wait until the scores are written
    token = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.maximum(tl.load(num_visible_ptr + token), 0), width).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(counts_ptr + token, tl.cdiv(n, SIZE))
    # a block is a row of the tile, and its entries are columns
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.arange(0, triton.next_power_of_2(SIZE))
    entry = block[:, None] * SIZE + offset[None, :]
    inside = (offset < SIZE)[None, :] & (entry < n)
    scored = inside & (entry < tl.where(n > skip, n, 0))
    score = tl.load(scores_ptr + token * scores_stride + entry, mask=scored, other=0.0)
    best = tl.max(tl.where(inside, score, float("-inf")), 1)
    unordered = tl.max((inside & (score != score)).to(tl.int32), 1)  # a maximum ignores NaN
    best = tl.where(unordered > 0, float("nan"), best)
    # the block of the newest entry is always kept
    best = tl.where(block == (n - 1) // SIZE, float("inf"), best)
    tl.store(out_ptr + token * out_stride + block, best, mask=block * SIZE < n)


@triton.jit(do_not_specialize=["block_table_ptr", "token_to_req_ptr", "num_visible_ptr", "table_stride"])
def candidate_entries_kernel(
    rows,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    table_stride,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replaces selected columns by their entries, and stores the entries' slots if ``PAGE`` is not 0."""
    pdl_begin(PDL)  # wait until the columns are selected
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    visible = tl.load(num_visible_ptr + token).to(tl.int32)
    column = tl.load(rows.out + token * rows.out_stride + i, mask=i < K, other=-1)
    block = tl.load(rows.kept + token * rows.kept_stride + column // SIZE, mask=column >= 0, other=-1)
    entry = block * SIZE + column % SIZE
    # columns of a row that is selected whole may be past its blocks, or past the newest entry
    known = (block >= 0) & (entry < visible)
    tl.store(rows.out + token * rows.out_stride + i, tl.where(known, entry, -1), mask=i < K)
    if PAGE > 0:
        request = tl.load(token_to_req_ptr + token).to(tl.int64)
        page = tl.load(block_table_ptr + request * table_stride + entry // PAGE, mask=known, other=0)
        slot = tl.where(known, page * PAGE + entry % PAGE, -1)
        tl.store(rows.slots + token * rows.slot_stride + i, slot, mask=i < K)
