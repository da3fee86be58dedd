"""Triton device code of `topk_indices`: finds the highest scores of a row by counting instead of sorting.

Scores become int32 keys of the same order. A search finds the k-th highest key by counting the keys that reach a value.
Counting is cheap for few keys, so a row is thinned out first: a sample of the row gives a bound that about ``TARGET``
scores reach, and one pass over the row keeps these candidates. If there are too many, the best K of them give a new
bound; if there are too few, the row is read again without a bound. So the result is exact for every sample.

Several programs may split a row. The last of them to finish selects among the candidates of all of them.

There are two kernels. `topk_kernel` lists groups of columns first and reads their scores again, a block at a time.
`topk_few_rows_kernel` lists scores at once: without these round trips to memory a few long rows take less time, but it
needs so many registers that a processor runs one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import begin

_LOWEST = tl.constexpr(-(2**31))  # lower than the key of any score: marks what is no candidate
_EVEN_ROUNDS = tl.constexpr(8)  # of a search among scores that are spread evenly


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
def _threshold(key, low, high, count, least, most, EVEN_ROUNDS: tl.constexpr = 0):
    """A value that ``least`` to ``most`` keys reach (more if they are equal), and how many reach it.

    ``count`` keys reach ``low`` and none reaches ``high``. With ``least`` keys or fewer the value is ``low``.

    Notes:
        A round counts at two values: at thirds of the range of scores for ``EVEN_ROUNDS`` rounds, then of keys.
        Scores are the quicker ones for the few highest of a row, because half of all keys are of scores near zero;
        thirds of the range of keys bound the number of rounds.
    """
    rounds = 0
    while (low + 1 < high) & (count > most):
        step = tl.maximum(((high >> 1) - (low >> 1)) // 3 * 2, 1)
        first, last = low + step, high - step
        if EVEN_ROUNDS > 0:
            third = (_score_of(high) - _score_of(low)) * (1 / 3)
            if (rounds < EVEN_ROUNDS) & (third < float("inf")):
                first, last = _order(_score_of(low) + third), _order(_score_of(high) - third)
            first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        last = tl.maximum(last, first)
        if EVEN_ROUNDS > 0:
            last = tl.minimum(last, high - 1)
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
def _before(count):
    """Exclusive prefix sums of ``count [R, U]`` in column order, and the total; sums of a column must fit 16 bits.

    The sums of all columns are packed into one number, with fields of 16 bits, or of 8 for 8 columns.
    """
    U: tl.constexpr = count.shape[1]
    BITS: tl.constexpr = 16 if U <= 4 else 8
    MASK: tl.constexpr = (1 << BITS) - 1
    shift = BITS * tl.arange(0, U)[None, :]
    if U * BITS <= 32:
        packed = tl.sum(count << shift, 1)
    else:
        packed = tl.sum(count.to(tl.int64) << shift, 1)
    before = tl.cumsum(packed, 0) - packed
    sums = tl.sum(packed, 0)
    place = (before[:, None] >> shift).to(tl.int32) & MASK
    total = 0
    for u in tl.static_range(U):
        of_column = (sums >> (BITS * u)).to(tl.int32) & MASK
        place += tl.where(shift > BITS * u, of_column, 0)
        total += of_column
    return place, total


@triton.jit
def _place(flag):
    """Number of flags ``[R, U, 4]`` that are set before each flag, and in total."""
    flag = flag.to(tl.int32)
    before, total = _before(tl.sum(flag, 2))
    return before[:, :, None] + tl.cumsum(flag, 2) - flag, total


@triton.jit
def _choose(key, count, K: tl.constexpr, EVEN_ROUNDS: tl.constexpr = 0):
    """Mask of the K highest of ``count`` valid keys ``[R, U, 4]``, their places in the output, and the lowest of them.

    Ties: the first. All valid keys if there are K or fewer.
    """
    low, high = _range(key)
    low, count = _threshold(key, low, high, count, K, K, EVEN_ROUNDS)
    chosen = key >= low
    if count > K:
        above = tl.sum((key > low).to(tl.int32), None)
        tied = key == low
        before, _count = _place(tied)
        chosen = (key > low) | (tied & (before < K - above))
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

    The sample is one random column from each of ``SAMPLE`` equal ranges, so that a pattern in the row cannot bias it.
    """
    i = _entries(_groups(SAMPLE, R))
    random = ((i * -1640531535) & 0x7FFFFFFF).to(tl.float32) * (2.0**-31)
    column = ((i + random) * (n.to(tl.float32) / SAMPLE)).to(tl.int32)
    key = _order(tl.load(scores_ptr + tl.minimum(column, n - 1)))
    low, high = _range(key)
    rank = tl.cdiv(TARGET * SAMPLE, n)
    low, _count = _threshold(key, low, high, tl.full((), SAMPLE, tl.int32), rank, rank + rank // 8)
    return low


@triton.jit
def _load_candidates(candidates_ptr, count, CAPACITY: tl.constexpr, R: tl.constexpr):
    """The first ``count`` keys and columns of a list of candidates that this program wrote."""
    group = _groups(CAPACITY, R)
    inside = _of_groups(group * 4 < count)
    key = tl.load(candidates_ptr + _entries(group), mask=inside, other=_LOWEST)
    column = tl.load(candidates_ptr + CAPACITY + _entries(group), mask=inside, other=0)
    return tl.where(_entries(group) < count, key, _LOWEST), column


@triton.jit
def _keep_best(candidates_ptr, count, K: tl.constexpr, CAPACITY: tl.constexpr, R: tl.constexpr):
    """Reduces the candidates to the best K, and returns the score that later candidates must reach."""
    tl.debug_barrier()
    key, column = _load_candidates(candidates_ptr, count, CAPACITY, R)
    chosen, place, low = _choose(key, count, K)
    tl.debug_barrier()
    tl.store(candidates_ptr + place, key, mask=chosen)
    tl.store(candidates_ptr + CAPACITY + place, column, mask=chosen)
    return _score_of(low + 1)


@triton.jit
def _add_candidates(
    scores_ptr, stop, bound, groups_ptr, groups, candidates_ptr, count, K: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds the scores of listed groups that reach ``bound`` to the candidates; returns the new bound and count."""
    tl.debug_barrier()
    first = 0
    while first < groups:
        i = first + _groups(BLOCK, R)
        group = tl.load(groups_ptr + i, mask=i < groups, other=stop)
        score = _load_scores(scores_ptr, group, stop, ALIGNED)
        column = _entries(group)
        keep = ~(score < bound) & (column < stop)  # a NaN counts as the lowest later
        place, more = _place(keep)
        if count + more > CAPACITY:
            bound = _keep_best(candidates_ptr, count, K, CAPACITY, R)
            count = K
            keep = ~(score < bound) & (column < stop)
            place, more = _place(keep)
        tl.store(candidates_ptr + count + place, _order(score), mask=keep)
        tl.store(candidates_ptr + CAPACITY + count + place, column, mask=keep)
        count += more
        first += BLOCK // 4
    tl.debug_barrier()
    return bound, count


@triton.jit
def _collect_candidates(
    scores_ptr, start, stop, bound, groups_ptr, candidates_ptr, K: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Collects up to ``CAPACITY`` candidates: scores of columns ``start .. stop - 1`` that reach ``bound``.

    Groups of four columns with such a score are listed first, which is a quarter of the work. Returns their number.
    """
    count = 0
    groups = 0
    first = start
    lane = _groups(TILE, R)
    while (first < stop) | (groups > 0):
        if (first < stop) & (groups <= CAPACITY):
            if first + TILE <= stop:
                score = tl.load(scores_ptr + tl.multiple_of(first, 4) + _entries(lane))
            else:
                score = _load_scores(scores_ptr + tl.multiple_of(first, 4), lane, stop - first, ALIGNED)
            hit = ~(tl.max(score, 2) < bound) & (lane * 4 < stop - first)
            place, more = _before(hit.to(tl.int32))
            tl.store(groups_ptr + groups + place, first // 4 + lane, mask=hit)
            groups += more
            first += TILE
        else:
            bound, count = _add_candidates(
                scores_ptr, stop, bound, groups_ptr, groups, candidates_ptr, count, K, BLOCK, CAPACITY, R, ALIGNED
            )
            groups = 0
    return count


@triton.jit(do_not_specialize=["W", "table_stride", "lens_ptr", "block_table_ptr", "token_to_req_ptr"])
def topk_kernel(
    scores_ptr,
    lens_ptr,
    out_ptr,
    block_table_ptr,
    token_to_req_ptr,
    slot_ptr,
    groups_ptr,
    candidates_ptr,
    counts_ptr,
    arrivals_ptr,
    W,
    scores_stride,
    out_stride,
    slot_stride,
    table_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    CAPACITY: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, s)``: split ``s`` of row ``t``."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + row), 0), W).to(tl.int32)
    scores_ptr += row * scores_stride
    out_ptr += row * out_stride
    groups_ptr += (row * SPLITS + split) * (CAPACITY + TILE // 4)
    candidates_ptr += row * (SPLITS * 2 * CAPACITY)
    if PAGE > 0:
        slot_ptr += row * slot_stride
        block_table_ptr += tl.load(token_to_req_ptr + row).to(tl.int64) * table_stride
    if n <= K:
        if split == 0:
            _all_columns(n, K, out_ptr, block_table_ptr, slot_ptr, PAGE, 256)
    elif n <= CAPACITY:
        if split == 0:
            group = _groups(CAPACITY, R)
            column = _entries(group)
            key = tl.where(column < n, _order(_load_scores(scores_ptr, group, n, ALIGNED)), _LOWEST)
            chosen, place, _low = _choose(key, n, K)
            _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
    else:
        columns = tl.cdiv(tl.cdiv(n, SPLITS), 128) * 128
        start = split * columns
        stop = tl.minimum(start + columns, n)
        least = _sampled_bound(scores_ptr, n, SAMPLE, TARGET, R)
        is_split = SPLITS > 1
        todo = n > 0
        while todo:
            own = candidates_ptr if (SPLITS == 1) else candidates_ptr + split * (2 * CAPACITY)
            bound = _score_of(least)
            count = _collect_candidates(
                scores_ptr, start, stop, bound, groups_ptr, own, K, TILE, BLOCK, CAPACITY, R, ALIGNED
            )
            key, column = _load_candidates(own, count, CAPACITY, R)
            if SPLITS > 1:  # noqa: SIM102  (a constant: without splits the body is not compiled)
                if is_split:
                    tl.store(counts_ptr + row * SPLITS + split, count)
                    tl.debug_barrier()  # all candidates are written before the arrival is counted
                    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == SPLITS - 1:
                        tl.store(arrivals_ptr + row, 0)
                        i = _entries(_groups(CAPACITY, R))
                        at = i
                        count = 0
                        for p in tl.static_range(SPLITS):
                            kept = tl.load(counts_ptr + row * SPLITS + p, cache_modifier=".cg")
                            count += kept
                            at += tl.where(i >= count, 2 * CAPACITY - kept, 0)
                        key = tl.load(candidates_ptr + at, mask=i < count, other=_LOWEST, cache_modifier=".cg")
                        column = tl.load(candidates_ptr + CAPACITY + at, mask=i < count, other=0, cache_modifier=".cg")
                    else:
                        todo = n < 0
            if todo:
                chosen, place, low = _choose(key, tl.minimum(count, CAPACITY), K)
                if (count >= K) & (count <= CAPACITY) & (low >= least):
                    _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
                    todo = n < 0
                else:
                    # the bound was too high, or the splits kept too many candidates: read the whole row without a bound
                    start, stop = 0, n
                    least = n * 0 + _LOWEST
                    is_split = False


@triton.jit
def _bound_of_runs(scores_ptr, n, SAMPLE: tl.constexpr, TARGET: tl.constexpr, R: tl.constexpr):
    """As `_sampled_bound`, of a random run of four columns from each of ``SAMPLE / 4`` equal ranges."""
    i = _groups(SAMPLE, R)[:, :, None]
    random = ((i * -1640531535) & 0x7FFFFFFF).to(tl.float32) * (2.0**-31)
    run = tl.minimum(((i + random) * (n.to(tl.float32) / SAMPLE)).to(tl.int32), n // 4 - 1)
    key = _order(tl.load(scores_ptr + run * 4 + tl.arange(0, 4)[None, None, :]))
    low, high = _range(key)
    rank = tl.cdiv(TARGET * SAMPLE, n)
    count = tl.full((), SAMPLE, tl.int32)
    low, _count = _threshold(key, low, high, count, rank, rank + rank // 8, _EVEN_ROUNDS)
    return low


@triton.jit
def _packed(score, column):
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column.to(tl.int64)


@triton.jit
def _load_listed(candidates_ptr, at, inside):
    """Keys and columns of candidates, stored as scores in the upper and columns in the lower half."""
    packed = tl.load(candidates_ptr + at, mask=inside, other=-1, cache_modifier=".cg")
    column = packed.to(tl.int32)
    score = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(column < 0, _LOWEST, _order(score)), column


@triton.jit
def _keep_best_listed(candidates_ptr, count, K: tl.constexpr, CAPACITY: tl.constexpr, R: tl.constexpr):
    """Reduces the candidates to the best K, and returns the score that later candidates must reach."""
    tl.debug_barrier()
    i = _entries(_groups(CAPACITY, R))
    key, column = _load_listed(candidates_ptr, i, i < count)
    chosen, place, low = _choose(key, count, K, _EVEN_ROUNDS)
    tl.debug_barrier()
    tl.store(candidates_ptr + place, _packed(_score_of(key), column), mask=chosen)
    return _score_of(low + 1)


@triton.jit
def _list_candidates(
    scores_ptr, start, stop, least, candidates_ptr, K: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
    R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Collects up to ``CAPACITY`` candidates, scores of columns ``start .. stop - 1`` whose keys reach ``least``.

    Returns their number.
    """
    U: tl.constexpr = TILE // 4 // R
    group = _groups(TILE, R)
    u = tl.arange(0, U)[None, :, None]
    bound = _score_of(least)
    count = 0
    score = _load_scores(scores_ptr + tl.multiple_of(start, 4), group, stop - start, ALIGNED)
    for first in range(start, stop, TILE):
        following = first + TILE
        later = _load_scores(scores_ptr + tl.multiple_of(following, 4), group, stop - following, ALIGNED)
        column = first + _entries(group)
        done = 0
        more_columns = U
        while done < U:
            keep = ~(score < bound) & (column < stop)  # a NaN counts as the lowest later
            keep = keep & (u >= done) & (u < done + more_columns)
            place, more = _place(keep)
            if count + more <= CAPACITY:
                tl.store(candidates_ptr + count + place, _packed(score, column), mask=keep)
                count += more
                done += more_columns
            elif count > K:
                bound = _keep_best_listed(candidates_ptr, count, K, CAPACITY, R)
                count = K
            else:
                more_columns = more_columns // 2
        score = later
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=["W", "table_stride", "lens_ptr", "block_table_ptr", "token_to_req_ptr"])
def topk_few_rows_kernel(
    scores_ptr,
    lens_ptr,
    out_ptr,
    block_table_ptr,
    token_to_req_ptr,
    slot_ptr,
    candidates_ptr,
    counts_ptr,
    arrivals_ptr,
    W,
    scores_stride,
    out_stride,
    slot_stride,
    table_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    CAPACITY: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, s)``: split ``s`` of row ``t``."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + row), 0), W).to(tl.int32)
    scores_ptr += row * scores_stride
    out_ptr += row * out_stride
    candidates_ptr += row * (SPLITS * CAPACITY)
    if PAGE > 0:
        slot_ptr += row * slot_stride
        block_table_ptr += tl.load(token_to_req_ptr + row).to(tl.int64) * table_stride
    if n <= K:
        if split == 0:
            _all_columns(n, K, out_ptr, block_table_ptr, slot_ptr, PAGE, 256)
    elif n <= CAPACITY:
        if split == 0:
            group = _groups(CAPACITY, R)
            column = _entries(group)
            key = tl.where(column < n, _order(_load_scores(scores_ptr, group, n, ALIGNED)), _LOWEST)
            chosen, place, _low = _choose(key, n, K, _EVEN_ROUNDS)
            _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
    else:
        columns = tl.cdiv(tl.cdiv(n, SPLITS), 128) * 128
        start = split * columns
        stop = tl.minimum(start + columns, n)
        least = _bound_of_runs(scores_ptr, n, SAMPLE, TARGET, R)
        is_split = n > 0
        todo = n > 0
        i = _entries(_groups(CAPACITY, R))
        while todo:
            own = candidates_ptr + split * CAPACITY
            count = _list_candidates(scores_ptr, start, stop, least, own, K, TILE, CAPACITY, R, ALIGNED)
            at = i + split * CAPACITY
            stored = count
            if is_split:
                # the list is filled up to a multiple of four, so that groups of four are of one list
                pad = count + tl.arange(0, 4)
                tl.store(own + pad, tl.full((4,), -1, tl.int64), mask=pad < (count + 3) // 4 * 4)
                tl.store(counts_ptr + row * SPLITS + split, count)
                tl.debug_barrier()  # all candidates are written before the arrival is counted
                if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == SPLITS - 1:
                    tl.store(arrivals_ptr + row, 0)
                    count = 0
                    stored = 0
                    skipped = _groups(CAPACITY, R) * 0
                    for p in tl.static_range(SPLITS):
                        kept = tl.load(counts_ptr + row * SPLITS + p, cache_modifier=".cg")
                        count += kept
                        filled = (kept + 3) // 4 * 4
                        stored += filled
                        skipped += tl.where(_groups(CAPACITY, R) * 4 >= stored, CAPACITY - filled, 0)
                    at = i + skipped[:, :, None]
                else:
                    todo = n < 0
            if todo:
                key, column = _load_listed(candidates_ptr, at, i < stored)
                chosen, place, low = _choose(key, count, K, _EVEN_ROUNDS)
                if (count >= K) & (stored <= CAPACITY) & (low >= least):
                    _store_results(chosen, place, column, out_ptr, block_table_ptr, slot_ptr, PAGE)
                    todo = n < 0
                else:
                    # the bound was too high, or the splits kept too many candidates: the whole row is read again,
                    # with a bound that K of those candidates reach, or without one
                    start, stop = 0, n
                    least = tl.where(stored > CAPACITY, low, _LOWEST)
                    is_split = False
