"""Triton device code of `topk_indices`: finds the highest scores of a row by counting instead of sorting.

Scores become int32 keys of the same order. A search finds the k-th highest key by counting the keys that reach a value.
Counting is cheap for few keys, which stay in registers: up to ``CAPACITY``. A longer row is thinned out first: a sample
of the row gives a bound that about ``TARGET`` scores reach, one pass over the row marks these with a bit each, and then
they are listed as candidates. If there are too many, the best K of them give a new bound; if there are too few, the row
is read again without a bound. So the result is exact for every sample.

Several programs may split a row. The last of them to finish selects among the candidates of all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops_triton import pdl_begin

_LOWEST = tl.constexpr(-(2**31))  # lower than the key of any score: marks columns that are not candidates
_EVEN_ROUNDS = tl.constexpr(8)  # rounds that halve the range of high scores, before the search over keys


class TopkRows(NamedTuple):
    """Runtime arguments of `topk_kernel`.

    Attributes:
        scores: float32 ``[T, W]``; out: int32 ``[T, K]``, the selected columns; slots: like ``out``, if ``PAGE``.
        marks, candidates, counts: scratch for rows longer than ``CAPACITY``: int32 ``[T, 4 * ceil(W / 128)]``, int64
            ``[T, SPLITS, CAPACITY]`` and int32 ``[T, SPLITS]``.
        arrivals: int32 ``[T]``, programs of a row that have finished; 0 before and after.
        scores_stride, out_stride, slot_stride: between rows.
    """

    scores: Any
    out: Any
    slots: Any
    marks: Any
    candidates: Any
    counts: Any
    arrivals: Any
    scores_stride: Any
    out_stride: Any
    slot_stride: Any


@triton.jit
def _order(score):
    """int32 keys that compare as the float32 scores do; NaN as -inf, -0.0 as 0.0."""
    score = tl.where(score != score, float("-inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _range(key):
    """The lowest valid key, and the highest key plus one."""
    low = tl.min(tl.where(key == _LOWEST, 0x7FFFFFFF, key), None)
    # cannot wrap around: the key of +inf is not the largest int32
    return low, tl.max(key, None) + 1


@triton.jit
def _threshold(key, low, high, count, least, most):
    """A value that ``least`` to ``most`` keys reach (more if they are equal), and how many reach it.

    ``count`` keys reach ``low`` and none reaches ``high``. With ``least`` keys or fewer the value is ``low``.

    Notes:
        A round counts at two values: at thirds of the range of scores for ``_EVEN_ROUNDS`` rounds, then of keys.
        Scores are the quicker ones for the few highest of a row, because half of all keys are of scores near zero;
        thirds of the range of keys bound the number of rounds.
    """
    rounds = 0
    # invariant: `count` keys reach low, and fewer than `least` reach high
    while (low + 1 < high) & (count > most):
        step = tl.maximum(((high >> 1) - (low >> 1)) // 3 * 2, 1)
        first, last = low + step, high - step
        third = (_score_of(high) - _score_of(low)) * (1 / 3)
        if (rounds < _EVEN_ROUNDS) & (third < float("inf")):
            first, last = _order(_score_of(low) + third), _order(_score_of(high) - third)
        # both stay inside the range, so that every round makes it smaller
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        last = tl.minimum(tl.maximum(last, first), high - 1)
        # two counts of 16 bits in one sum
        reached = tl.sum(tl.where(key >= last, 0x10001, (key >= first).to(tl.int32)), None)
        at_first, at_last = reached & 0xFFFF, (reached >> 16) & 0xFFFF
        if at_last >= least:
            low, count = last, at_last
        elif at_first >= least:
            low, count, high = first, at_first, last
        else:
            high = first
        rounds += 1
    return low, count


@triton.jit
def _place(flag):
    """Number of flags ``[R, U, 4]`` that are set before each flag, column ``[:, u]`` after column, and in total.

    The sums of up to four columns are packed into one number, with fields of 16 bits.
    """
    U: tl.constexpr = flag.shape[1]
    P: tl.constexpr = min(U, 4)
    flag = flag.to(tl.int32)
    count = tl.sum(flag, 2)
    u = tl.arange(0, U)[None, :]
    shift = 16 * (u % P)
    place = count * 0
    total = 0
    for first in tl.static_range(0, U, P):
        packed_now = (u >= first) & (u < first + P)
        fields = tl.where(packed_now, count, 0)
        if P > 2:
            fields = fields.to(tl.int64)
        packed = tl.sum(fields << shift, 1)
        before = tl.cumsum(packed, 0) - packed
        sums = tl.sum(packed, 0)
        place += tl.where(packed_now, (before[:, None] >> shift).to(tl.int32) & 0xFFFF, 0)
        for p in tl.static_range(P):
            of_column = (sums >> (16 * p)).to(tl.int32) & 0xFFFF
            place += tl.where(u > first + p, of_column, 0)
            total += of_column
    return place[:, :, None] + tl.cumsum(flag, 2) - flag, total


@triton.jit
def _choose(key, count, K: tl.constexpr):
    """Mask of the K highest of ``count`` valid keys ``[R, U, 4]``, their places in the output, and the lowest of them.

    Ties: the first. All valid keys if there are K or fewer.
    """
    low, high = _range(key)
    low, count = _threshold(key, low, high, count, K, K)
    chosen = key >= low
    if count > K:
        # several keys are equal to the lowest chosen one: the first of them fill the places that are left
        above = tl.sum((key > low).to(tl.int32), None)
        tied = key == low
        ties_before, _count = _place(tied)
        chosen = (key > low) | (tied & (ties_before < K - above))
    place, _count = _place(chosen)
    return chosen, place, low


@triton.jit
def _store_results(chosen, place, column, index_ptr, block_table_ptr, slot_ptr, PAGE: tl.constexpr):
    tl.store(index_ptr + place, column, mask=chosen)
    if PAGE > 0:
        page = tl.load(block_table_ptr + column // PAGE, mask=chosen, other=0)
        tl.store(slot_ptr + place, page * PAGE + column % PAGE, mask=chosen)


@triton.jit
def _all_columns(n, K: tl.constexpr, index_ptr, block_table_ptr, slot_ptr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores all ``n <= K`` columns of a row, then -1."""
    for first in range(0, K, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(index_ptr + column, tl.where(column < n, column, -1), mask=column < K)
        if PAGE > 0:
            page = tl.load(block_table_ptr + column // PAGE, mask=column < n, other=0)
            slot = tl.where(column < n, page * PAGE + column % PAGE, -1)
            tl.store(slot_ptr + column, slot, mask=column < K)


@triton.jit
def _groups(SIZE: tl.constexpr, R: tl.constexpr):
    """``0 .. SIZE / 4 - 1`` as ``[R, SIZE / 4 / R]``: each thread holds a row, and neighbours are in one column."""
    return tl.arange(0, R)[:, None] + tl.arange(0, SIZE // 4 // R)[None, :] * R


@triton.jit
def _entries(group):
    return group[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _of_groups(mask):
    return tl.broadcast_to(mask[:, :, None], (mask.shape[0], mask.shape[1], 4))


@triton.jit
def _load_scores(scores_ptr, group, stop, ALIGNED: tl.constexpr):
    """Scores of groups of four columns; if rows are ``ALIGNED``, up to three from past ``stop``."""
    at = _entries(group)
    inside = at < stop
    if ALIGNED:
        inside = _of_groups(group * 4 < stop)
    return tl.load(scores_ptr + at, mask=inside, other=float("-inf"))


@triton.jit
def _sampled_bound(scores_ptr, n, SAMPLE: tl.constexpr, TARGET: tl.constexpr, R: tl.constexpr):
    """A key that about ``TARGET`` of ``n`` scores reach, estimated from a sample.

    The sample is a random run of four columns from each of equal ranges, so that a pattern in the row cannot bias it. A
    thread reads a run at once.
    """
    i = _groups(SAMPLE, R)[:, :, None]
    random = ((i * -1640531535) & 0x7FFFFFFF).to(tl.float32) * (2.0**-31)
    run = tl.minimum(((i + random) * (n.to(tl.float32) / SAMPLE)).to(tl.int32), n // 4 - 1)
    key = _order(tl.load(scores_ptr + run * 4 + tl.arange(0, 4)[None, None, :]))
    low, high = _range(key)
    rank = tl.cdiv(TARGET * SAMPLE, n)
    low, _count = _threshold(key, low, high, tl.full((), SAMPLE, tl.int32), rank, rank + rank // 8)
    return low


@triton.jit
def _packed(score, column):
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column.to(tl.int64)


@triton.jit
def _load_candidates(candidates_ptr, at, inside):
    """Keys and columns of candidates, stored as scores in the upper and columns in the lower half."""
    packed = tl.load(candidates_ptr + at, mask=inside, other=-1, cache_modifier=".cg")
    column = packed.to(tl.int32)
    score = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(column < 0, _LOWEST, _order(score)), column


@triton.jit
def _keep_best(candidates_ptr, count, K: tl.constexpr, CAPACITY: tl.constexpr, R: tl.constexpr):
    """Reduces the candidates to the best K, and returns the score that later candidates must reach."""
    tl.debug_barrier()  # all threads have stored their candidates
    i = _entries(_groups(CAPACITY, R))
    key, column = _load_candidates(candidates_ptr, i, i < count)
    chosen, place, low = _choose(key, count, K)
    tl.debug_barrier()  # all threads have read theirs, which are overwritten
    tl.store(candidates_ptr + place, _packed(_score_of(key), column), mask=chosen)
    return _score_of(low + 1)


@triton.jit
def _mark(scores_ptr, columns, bound, marks_ptr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes ``marks[ceil(columns / 32)]``: bit ``c % 32`` of word ``c // 32`` is set if score ``c`` reaches ``bound``.

    Nothing is counted here, so that no thread waits for other warps. The next tile is read ahead.
    """
    word = tl.arange(0, TILE // 32)
    # groups of a word in eight lanes, which is how a tensor [8, words, 4] is laid out: a warp reads 512 bytes in a row
    eighth = tl.arange(0, 8)[:, None]
    group = word[None, :] * 8 + eighth
    bit = eighth[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    score = _load_scores(scores_ptr, group, columns, ALIGNED)
    for first in range(0, columns, TILE):
        left = columns - first
        later = _load_scores(scores_ptr + tl.multiple_of(first + TILE, 4), group, left - TILE, ALIGNED)
        reached = tl.where(score < bound, 0, 1 << bit)  # a NaN counts as the lowest later
        marks = tl.xor_sum(tl.xor_sum(reached, 2), 0)
        valid = tl.minimum(tl.maximum(left - word * 32, 0), 32)
        marks = tl.where(valid < 32, marks & ((1 << (valid & 31)) - 1), marks)
        # contiguity is hidden from the compiler: it would move the words to other warps to store them
        at = tl.max_contiguous(first // 32 + word, 1)
        tl.store(marks_ptr + at[None, :] + eighth * 0, marks[None, :], mask=(eighth == 0) & (valid[None, :] > 0))
        score = later


@triton.jit
def _ones(word):
    """Number of bits that are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def _list_marked(
    scores_ptr, start, columns, marks_ptr, candidates_ptr, CAPACITY: tl.constexpr, WORDS: tl.constexpr, R: tl.constexpr
):
    """Stores the marked scores in the order of columns; returns their number, or a number over ``CAPACITY`` if more.

    A round for each bit of the fullest word: every thread stores the lowest mark of each of its ``WORDS``.
    """
    tl.debug_barrier()  # all marks are written
    words = tl.cdiv(columns, 32)
    count = 0
    first = 0
    while (first < words) & (count <= CAPACITY):
        i = first + tl.arange(0, R)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        marks = tl.load(marks_ptr + i, mask=i < words, other=0)
        ones = _ones(marks)
        of_thread = tl.sum(ones, 1)
        before = tl.cumsum(of_thread, 0) - of_thread
        more = tl.sum(of_thread, 0)
        if count + more <= CAPACITY:
            # position of a thread's word: behind the words of earlier threads and its own earlier words
            place = count + before[:, None] + tl.cumsum(ones, 1) - ones
            for _round in range(tl.max(tl.max(ones, 1), 0)):
                lowest = marks & -marks
                # the exponent of a power of two; the highest bit is also the sign
                bit = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
                column = start + i * 32 + bit
                score = tl.load(scores_ptr + column, mask=marks != 0, other=0.0)
                tl.store(candidates_ptr + place, _packed(score, column), mask=marks != 0)
                place += 1
                marks ^= lowest
        count += more
        first += R * WORDS
    tl.debug_barrier()  # all candidates are written
    return count


@triton.jit
def _collect_many(
    scores_ptr, start, stop, bound, candidates_ptr, K: tl.constexpr, CAPACITY: tl.constexpr, R: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Collects candidates among more than ``CAPACITY`` scores that reach ``bound``; returns their number.

    If there are too many, the best K candidates raise the bound. The buffer has room for a group of each thread
    besides.
    """
    group = _groups(4 * R, R)
    count = 0
    for first in range(start, stop, 4 * R):
        score = _load_scores(scores_ptr + tl.multiple_of(first, 4), group, stop - first, ALIGNED)
        column = first + _entries(group)
        keep = ~(score < bound) & (column < stop)
        place, more = _place(keep)
        if count + more > CAPACITY:
            bound = _keep_best(candidates_ptr, count, K, CAPACITY, R)
            count = K
            keep = keep & ~(score < bound)
            place, more = _place(keep)
        tl.store(candidates_ptr + count + place, _packed(score, column), mask=keep)
        count += more
    tl.debug_barrier()  # all candidates are written
    return count


@triton.jit
def _collect_candidates(
    scores_ptr, start, stop, least, marks_ptr, candidates_ptr, CONFIG: tl.constexpr, K: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Collects up to ``CAPACITY`` candidates, scores of columns ``start .. stop - 1`` whose keys reach ``least``.

    Returns their number. ``start`` is a multiple of 128.
    """
    CAPACITY: tl.constexpr = CONFIG.capacity
    R: tl.constexpr = 32 * CONFIG.num_warps
    bound = _score_of(least)
    marks_ptr += start // 32
    columns = tl.maximum(stop - start, 0)
    _mark(scores_ptr + tl.multiple_of(start, 4), columns, bound, marks_ptr, CONFIG.tile, ALIGNED)
    count = _list_marked(scores_ptr, start, columns, marks_ptr, candidates_ptr, CAPACITY, CONFIG.words, R)
    if count > CAPACITY:
        # the bound was too low: the row is read again, and the best K raise the bound whenever there are too many
        count = _collect_many(scores_ptr, start, stop, bound, candidates_ptr, K, CAPACITY, R, ALIGNED)
    return count


@triton.jit(do_not_specialize=["W", "table_stride", "lens_ptr", "block_table_ptr", "token_to_req_ptr"])
def topk_kernel(
    rows,
    lens_ptr,
    block_table_ptr,
    token_to_req_ptr,
    W,
    table_stride,
    CONFIG: tl.constexpr,
    K: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, s)``: split ``s`` of row ``t`` of `TopkRows`; ``CONFIG`` is a `TopkConfig`.

    ``ALIGNED``: groups of four scores start at multiples of 16 bytes. ``PAGE``: entries of a page, 0 without slots.
    """
    SPLITS: tl.constexpr = CONFIG.splits
    CAPACITY: tl.constexpr = CONFIG.capacity
    TARGET: tl.constexpr = CAPACITY // 2  # scores that should reach the bound
    R: tl.constexpr = 32 * CONFIG.num_warps  # threads
    pdl_begin(PDL)  # wait until the previous kernel has written the scores
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + row), 0), W).to(tl.int32)
    scores_ptr = rows.scores + row * rows.scores_stride
    out_ptr = rows.out + row * rows.out_stride
    marks_ptr = rows.marks + row * (tl.cdiv(W, 128) * 4)
    candidates_ptr = rows.candidates + row * (SPLITS * CAPACITY)
    slot_ptr = rows.slots
    if PAGE > 0:
        slot_ptr += row * rows.slot_stride
        block_table_ptr += tl.load(token_to_req_ptr + row).to(tl.int64) * table_stride
    if n <= K:
        # everything is selected: one program of the row suffices
        if split == 0:
            _all_columns(n, K, out_ptr, block_table_ptr, slot_ptr, PAGE, 256)
    elif n <= CAPACITY:
        # all keys fit the registers of one program
        if split == 0:
            group = _groups(CAPACITY, R)
            column = _entries(group)
            key = tl.where(column < n, _order(_load_scores(scores_ptr, group, n, ALIGNED)), _LOWEST)
            chosen, place, _low = _choose(key, n, K)
            _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
    else:
        # every program finds the same bound, and collects candidates of its split
        columns = tl.cdiv(tl.cdiv(n, SPLITS), 128) * 128
        start = split * columns
        stop = tl.minimum(start + columns, n)
        least = _sampled_bound(scores_ptr, n, CONFIG.sample, TARGET, R)
        is_split = SPLITS > 1
        todo = n > 0
        i = _entries(_groups(CAPACITY, R))
        while todo:
            split_candidates = candidates_ptr + split * CAPACITY
            count = _collect_candidates(scores_ptr, start, stop, least, marks_ptr, split_candidates, CONFIG, K, ALIGNED)
            at = i + split * CAPACITY
            stored = count
            if SPLITS > 1:  # noqa: SIM102  (a constant: without splits the body is not compiled)
                if is_split:
                    # the list is filled up to a multiple of four, so that groups of four are of one list
                    pad = count + tl.arange(0, 4)
                    pad_end = (count + 3) // 4 * 4
                    tl.store(split_candidates + pad, tl.full((4,), -1, tl.int64), mask=pad < pad_end)
                    tl.store(rows.counts + row * SPLITS + split, count)
                    tl.debug_barrier()  # all candidates are written before the arrival is counted
                    if tl.atomic_add(rows.arrivals + row, 1, sem="acq_rel") == SPLITS - 1:
                        # the last program of the row reads the candidates of all programs, list by list
                        tl.store(rows.arrivals + row, 0)
                        count = 0
                        stored = 0
                        skipped = _groups(CAPACITY, R) * 0
                        for p in tl.static_range(SPLITS):
                            kept = tl.load(rows.counts + row * SPLITS + p, cache_modifier=".cg")
                            count += kept
                            filled = (kept + 3) // 4 * 4
                            stored += filled
                            skipped += tl.where(_groups(CAPACITY, R) * 4 >= stored, CAPACITY - filled, 0)
                        at = i + skipped[:, :, None]
                    else:
                        todo = n < 0  # another program selects
            if todo:
                key, column = _load_candidates(candidates_ptr, at, i < stored)
                chosen, place, low = _choose(key, count, K)
                if (count >= K) & (stored <= CAPACITY) & (low >= least):
                    _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
                    todo = n < 0
                else:
                    # the bound was too high, or the splits kept too many candidates: the whole row is read again,
                    # with a bound that K of those candidates reach, or without one
                    start, stop = 0, n
                    least = tl.where(stored > CAPACITY, low, _LOWEST)
                    is_split = False
