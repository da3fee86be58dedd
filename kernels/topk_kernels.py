"""Triton device code of `topk_indices`: the best columns of a slice of a row, found by counting instead of sorting.

Scores become int32 keys of the same order. The k-th highest key is found by search: how many keys reach a value? To
make that cheap, keys are thinned out first: the k-th highest of the maxima of small groups is at most as high as the
k-th highest key, and not many keys reach it. Groups are strided, because scores of neighbours are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.row_ops import begin

_LOWEST = tl.constexpr(-(2**31))  # lower than the key of any score: no candidate


@triton.jit
def _order(score):
    """int32 keys that compare as the float32 scores do; NaN as -inf, -0.0 as 0.0."""
    score = tl.where(score != score, float("-inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _range(key):
    """The lowest of the valid keys, one more than the highest key, and how many are valid."""
    low = tl.min(tl.where(key == _LOWEST, 0x7FFFFFFF, key), None)
    # cannot wrap around: the key of +inf is not the largest int32
    return low, tl.max(key, None) + 1, tl.sum((key != _LOWEST).to(tl.int32), None)


@triton.jit
def _threshold(key, low, high, count, K: tl.constexpr, LIMIT: tl.constexpr):
    """A value that at least K keys reach, and ``LIMIT`` at most unless more are equal; and how many do.

    ``count`` keys reach ``low``, none reaches ``high``. With K keys or fewer it is ``low``.
    """
    while (low + 1 < high) & (count > LIMIT):
        step = tl.maximum(((high >> 1) - (low >> 1)) // 3 * 2, 1)
        first = low + step
        last = tl.maximum(high - step, first)
        # two counts of 16 bits in one sum
        reached = tl.sum(tl.where(key >= last, 0x10001, (key >= first).to(tl.int32)), None)
        at_first, at_last = reached & 0xFFFF, (reached >> 16) & 0xFFFF
        if at_last >= K:
            low, count = last, at_last
        elif at_first >= K:
            low, count, high = first, at_first, last
        else:
            high = first
    return low, count


@triton.jit
def _place(flag):
    """How many flags of ``[R, G]`` are set before each, row after row."""
    flag = flag.to(tl.int32)
    of_row = tl.sum(flag, 1)
    before = tl.cumsum(of_row, 0) - of_row
    return before[:, None] + tl.cumsum(flag, 1) - flag


@triton.jit
def _choose(key, low, high, count, K: tl.constexpr):
    """The K highest keys of ``[R, G]``, of equal ones the first; all valid ones if they are fewer. And their places."""
    low, count = _threshold(key, low, high, count, K, K)
    chosen = key >= low
    if count > K:
        above = tl.sum((key > low).to(tl.int32), None)
        tied = key == low
        chosen = (key > low) | (tied & (_place(tied) < K - above))
    return chosen, _place(chosen)


@triton.jit
def _store_results(chosen, place, column, index_ptr, table_ptr, slot_ptr, PAGE: tl.constexpr):
    tl.store(index_ptr + place, column, mask=chosen)
    if PAGE > 0:
        page = tl.load(table_ptr + column // PAGE, mask=chosen, other=0)
        tl.store(slot_ptr + place, page * PAGE + column % PAGE, mask=chosen)


@triton.jit
def _select(
    key,
    column,
    last,
    out_ptr,
    table_ptr,
    slot_ptr,
    keys_out_ptr,
    columns_out_ptr,
    count_ptr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SLACK: tl.constexpr,
    ROOM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Writes the results if this is the last slice of a row, otherwise up to ``ROOM`` candidates for the next level."""
    low, high, count = _range(key)
    if GROUPS > 0:
        maxima = tl.max(tl.reshape(key, (key.numel // GROUPS, GROUPS)), 0)
        groups = tl.sum((maxima != _LOWEST).to(tl.int32), None)
        low, _groups = _threshold(maxima, low, high, groups, K, K + SLACK)
        count = tl.sum((key >= low).to(tl.int32), None)
    if (GROUPS > 0) & (count <= ROOM):
        left = key >= low
        place = _place(left)
        tl.store(keys_out_ptr + place, key, mask=left)
        tl.store(columns_out_ptr + place, column, mask=left)
        if last:
            tl.debug_barrier()
            at = tl.arange(0, ROOM // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            left_key = tl.load(keys_out_ptr + at, mask=at < count, other=_LOWEST)
            left_column = tl.load(columns_out_ptr + at, mask=at < count, other=0)
            chosen, spot = _choose(left_key, low, high, count, K)
            _store_results(chosen, spot, left_column, out_ptr, table_ptr, slot_ptr, PAGE)
        else:
            tl.store(count_ptr, count)
    else:
        chosen, spot = _choose(key, low, high, count, K)
        if last:
            _store_results(chosen, spot, column, out_ptr, table_ptr, slot_ptr, PAGE)
        else:
            tl.store(keys_out_ptr + spot, key, mask=chosen)
            tl.store(columns_out_ptr + spot, column, mask=chosen)
            tl.store(count_ptr, tl.minimum(count, K))


@triton.jit
def _everything(n, K: tl.constexpr, index_ptr, table_ptr, slot_ptr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """A row of K columns or fewer: all of them, then -1."""
    for first in range(0, K, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(index_ptr + column, tl.where(column < n, column, -1), mask=column < K)
        if PAGE > 0:
            page = tl.load(table_ptr + column // PAGE, mask=column < n, other=0)
            slot = tl.where(column < n, page * PAGE + column % PAGE, -1)
            tl.store(slot_ptr + column, slot, mask=column < K)


@triton.jit(do_not_specialize=["W", "parts_before"])
def select_kernel(
    scores_ptr,
    keys_ptr,
    columns_ptr,
    counts_ptr,
    lens_ptr,
    out_ptr,
    keys_out_ptr,
    columns_out_ptr,
    counts_out_ptr,
    table_ptr,
    request_ptr,
    slot_ptr,
    W,
    parts_before,
    scores_stride,
    out_stride,
    slot_stride,
    table_stride,
    K: tl.constexpr,
    LEVEL: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
    SLACK: tl.constexpr,
    ROOM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Selects from one slice of a row: of its scores at level 0, of what the level before left over after it.

    The program of a row's only slice writes the results. Each slice of the level before left up to ``ROOM`` candidates.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    program = row * tl.num_programs(1) + part
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + row), 0), W).to(tl.int32)
    live = n
    done = n < 0
    for _level in tl.static_range(LEVEL):
        done = done | (live <= SLICE)
        live = tl.cdiv(live, SLICE) * ROOM
    out_ptr += row * out_stride
    if PAGE > 0:
        slot_ptr += row * slot_stride
        table_ptr += tl.load(request_ptr + row).to(tl.int64) * table_stride
    if n <= K:
        if (LEVEL == 0) & (part == 0):
            _everything(n, K, out_ptr, table_ptr, slot_ptr, PAGE, 256)
    elif (part * SLICE < live) & (done == 0):
        line = tl.arange(0, SLICE // 4)
        at = part * SLICE + line[:, None] * 4 + tl.arange(0, 4)[None, :]
        if LEVEL == 0:
            score = tl.load(scores_ptr + row * scores_stride + at, mask=at < live, other=0.0)
            key = tl.where(at < live, _order(score), _LOWEST)
            column = at
        else:
            line = part * (SLICE // 4) + line
            inside = line * 4 < live
            room = tl.load(counts_ptr + row * parts_before + line // (ROOM // 4), mask=inside, other=0)
            valid = at % ROOM < room[:, None]
            source = row * parts_before * ROOM + at
            key = tl.load(keys_ptr + source, mask=valid, other=_LOWEST)
            column = tl.load(columns_ptr + source, mask=valid, other=0)
        _select(
            key,
            column,
            live <= SLICE,
            out_ptr,
            table_ptr,
            slot_ptr,
            keys_out_ptr + program * ROOM,
            columns_out_ptr + program * ROOM,
            counts_out_ptr + program,
            K,
            GROUPS,
            SLACK,
            ROOM,
            PAGE,
        )
