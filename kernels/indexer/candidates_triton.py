"""Triton device code of `index_select` with candidate blocks (DeepSeek-V4.1).

A layer that keeps candidates reduces its scores to one per block. A layer that is limited to them scores the entries of
a query's blocks only: column ``c`` of its scores is entry ``c % SIZE`` of block ``kept[c // SIZE]``. Blocks ascend, so
columns do too, and ties are resolved as among entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import begin
from deepseek_attn.kernels.indexer.scores_triton import key_operands, query_operands, score_keys


@triton.jit(
    do_not_specialize=["columns", "skip", "table_stride", "block_table_ptr", "token_to_req_ptr", "num_visible_ptr"]
)
def candidate_scores_kernel(
    q_ptr,
    weights_ptr,
    pool_ptr,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    kept_ptr,
    out_ptr,
    columns,
    skip,
    page_stride,
    table_stride,
    kept_stride,
    out_stride,
    H: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_DTYPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, s)``: split ``s`` of the first ``num_visible[t]`` columns of query ``t``; -inf for no entry."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    visible = tl.load(num_visible_ptr + token).to(tl.int32)
    end = tl.minimum(visible, columns)
    end = tl.where(visible > skip, end, 0)
    tiles = tl.cdiv(tl.cdiv(end, BLOCK_N), tl.num_programs(1))
    request = tl.load(token_to_req_ptr + token).to(tl.int64)
    kept_ptr += token * kept_stride
    head = tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    weights = tl.load(weights_ptr + token * H + head, mask=head < H, other=0.0)
    query = q_ptr + (token * H + head)[:, None] * DIM
    q, q_odd = query_operands(query, head < H, channel, DIM, KEY_FORMAT, NATIVE_FP8, DTYPE)
    for tile in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(end, BLOCK_N)), num_stages=STAGES):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        block = tl.load(kept_ptr + column // SIZE, mask=column < end, other=-1)
        entry = block * SIZE + column % SIZE
        known = (block >= 0) & (entry < visible)
        page = tl.load(block_table_ptr + request * table_stride + entry // PAGE, mask=known, other=0)
        start = pool_ptr + page.to(tl.int64) * page_stride
        key, odd, scale = key_operands(start, entry % PAGE, known, channel, DIM, PAGE, KEY_FORMAT, NATIVE_FP8, DTYPE)
        score = score_keys(key, odd, scale, q, q_odd, weights, KEY_FORMAT, PRECISION, SCORE_DTYPE)
        score = tl.where(known, score, float("-inf"))
        tl.store(out_ptr + token * out_stride + column, score, mask=column < end)


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
    SIZE_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Highest score of each block of entries, +inf for the block of the newest visible one; and the number of blocks.

    Program ``(t, s)``: ``BLOCKS`` blocks of query ``t``. Queries of up to ``skip`` visible entries have no scores, and
    every block counts the same.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.maximum(tl.load(num_visible_ptr + token), 0), width).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(counts_ptr + token, tl.cdiv(n, SIZE))
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.arange(0, SIZE_PADDED)
    entry = block[:, None] * SIZE + offset[None, :]
    inside = (offset < SIZE)[None, :] & (entry < n)
    scored = inside & (entry < tl.where(n > skip, n, 0))
    score = tl.load(scores_ptr + token * scores_stride + entry, mask=scored, other=0.0)
    best = tl.max(tl.where(inside, score, float("-inf")), 1)
    unordered = tl.max((inside & (score != score)).to(tl.int32), 1)  # a maximum ignores NaN
    best = tl.where(unordered > 0, float("nan"), best)
    best = tl.where(block == (n - 1) // SIZE, float("inf"), best)
    tl.store(out_ptr + token * out_stride + block, best, mask=block * SIZE < n)


@triton.jit(do_not_specialize=["table_stride", "block_table_ptr", "token_to_req_ptr", "num_visible_ptr"])
def candidate_entries_kernel(
    out_ptr,
    num_visible_ptr,
    kept_ptr,
    block_table_ptr,
    token_to_req_ptr,
    slot_ptr,
    out_stride,
    kept_stride,
    table_stride,
    slot_stride,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replaces selected columns by the entries that they are, and stores their slots if ``PAGE`` is not 0."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    visible = tl.load(num_visible_ptr + token).to(tl.int32)
    column = tl.load(out_ptr + token * out_stride + i, mask=i < K, other=-1)
    block = tl.load(kept_ptr + token * kept_stride + column // SIZE, mask=column >= 0, other=-1)
    entry = block * SIZE + column % SIZE
    known = (block >= 0) & (entry < visible)
    tl.store(out_ptr + token * out_stride + i, tl.where(known, entry, -1), mask=i < K)
    if PAGE > 0:
        request = tl.load(token_to_req_ptr + token).to(tl.int64)
        page = tl.load(block_table_ptr + request * table_stride + entry // PAGE, mask=known, other=0)
        slot = tl.where(known, page * PAGE + entry % PAGE, -1)
        tl.store(slot_ptr + token * slot_stride + i, slot, mask=i < K)
