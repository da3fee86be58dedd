"""Triton device code of `topk_indices`: the best columns of a row, found by counting instead of sorting.

Scores become int32 keys of the same order. The k-th highest key is found by search: how many keys reach a value? That
is cheap for few keys, so a row is thinned out first: a sample of it tells a bound that about ``TARGET`` scores reach,
and one pass over the row keeps these. If they turn out too many, the best K of them replace the bound; if they are too
few, the row is read again without one. So the result is exact whatever the sample said.

Several programs may share a row. The last of them to finish selects among what all of them kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.row_ops import begin

_LOWEST = tl.constexpr(-(2**31))  # lower than the key of any score: no candidate


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
    """The lowest of the valid keys, one more than the highest key."""
    low = tl.min(tl.where(key == _LOWEST, 0x7FFFFFFF, key), None)
    # cannot wrap around: the key of +inf is not the largest int32
    return low, tl.max(key, None) + 1


@triton.jit
def _threshold(key, low, high, count, least, most):
    """A value that at least ``least`` keys reach, and ``most`` at most unless more are equal; and how many do.

    ``count`` keys reach ``low``, none reaches ``high``. With ``least`` keys or fewer it is ``low``.
    """
    while (low + 1 < high) & (count > most):
        step = tl.maximum(((high >> 1) - (low >> 1)) // 3 * 2, 1)
        first = low + step
        last = tl.maximum(high - step, first)
        # two counts of 16 bits in one sum
        reached = tl.sum(tl.where(key >= last, 0x10001, (key >= first).to(tl.int32)), None)
        at_first, at_last = reached & 0xFFFF, (reached >> 16) & 0xFFFF
        if at_last >= least:
            low, count = last, at_last
        elif at_first >= least:
            low, count, high = first, at_first, last
        else:
            high = first
    return low, count


@triton.jit
def _before(count):
    """Sums of ``count [R, U]`` before each, column after column, and of all. No sum of a column may exceed 16 bits.

    8 bits for 8 columns: the sums of all columns are one number, of as many fields.
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
    """How many flags of ``[R, U, 4]`` are set before each; and how many in all."""
    flag = flag.to(tl.int32)
    before, total = _before(tl.sum(flag, 2))
    return before[:, :, None] + tl.cumsum(flag, 2) - flag, total


@triton.jit
def _choose(key, count, K: tl.constexpr):
    """The K highest of ``count`` valid keys ``[R, U, 4]``, of equal ones the first; their places, and the lowest.

    All valid ones if they are fewer.
    """
    low, high = _range(key)
    low, count = _threshold(key, low, high, count, K, K)
    chosen = key >= low
    if count > K:
        above = tl.sum((key > low).to(tl.int32), None)
        tied = key == low
        before, _count = _place(tied)
        chosen = (key > low) | (tied & (before < K - above))
    place, _count = _place(chosen)
    return chosen, place, low


@triton.jit
def _store_results(chosen, place, column, index_ptr, table_ptr, slot_ptr, PAGE: tl.constexpr):
    tl.store(index_ptr + place, column, mask=chosen)
    if PAGE > 0:
        page = tl.load(table_ptr + column // PAGE, mask=chosen, other=0)
        tl.store(slot_ptr + place, page * PAGE + column % PAGE, mask=chosen)


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


@triton.jit
def _groups(SIZE: tl.constexpr, R: tl.constexpr):
    """0 to ``SIZE / 4`` as ``[R, SIZE / 4 / R]``: a thread has a row, neighbours are in one column."""
    return tl.arange(0, R)[:, None] + tl.arange(0, SIZE // 4 // R)[None, :] * R


@triton.jit
def _entries(group):
    return group[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _of_groups(mask):
    return tl.broadcast_to(mask[:, :, None], (mask.shape[0], mask.shape[1], 4))


@triton.jit
def _scores_of(scores_ptr, group, stop, ALIGNED: tl.constexpr):
    """Scores of groups of four columns. If rows are ``ALIGNED``, some may be from past ``stop``."""
    at = _entries(group)
    inside = at < stop
    if ALIGNED:
        inside = _of_groups(group * 4 < stop)
    return tl.load(scores_ptr + at, mask=inside, other=float("-inf"))


@triton.jit
def _sampled(scores_ptr, n, SAMPLE: tl.constexpr, TARGET: tl.constexpr, R: tl.constexpr):
    """A key that about ``TARGET`` of ``n`` scores reach, by a sample of them.

    A column at random from each of as many equal ranges, so that no pattern in a row is taken for the whole.
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
def _load_own(kept_ptr, count, ROOM: tl.constexpr, R: tl.constexpr):
    """The ``count`` first keys and columns of a list that this program wrote."""
    group = _groups(ROOM, R)
    inside = _of_groups(group * 4 < count)
    key = tl.load(kept_ptr + _entries(group), mask=inside, other=_LOWEST)
    column = tl.load(kept_ptr + ROOM + _entries(group), mask=inside, other=0)
    return tl.where(_entries(group) < count, key, _LOWEST), column


@triton.jit
def _compress(kept_ptr, count, K: tl.constexpr, ROOM: tl.constexpr, R: tl.constexpr):
    """Leaves the best K of what was kept, and returns the score that later ones must reach."""
    tl.debug_barrier()
    key, column = _load_own(kept_ptr, count, ROOM, R)
    chosen, place, low = _choose(key, count, K)
    tl.debug_barrier()
    tl.store(kept_ptr + place, key, mask=chosen)
    tl.store(kept_ptr + ROOM + place, column, mask=chosen)
    return _score_of(low + 1)


@triton.jit
def _keep(
    scores_ptr, stop, bound, groups_ptr, groups, kept_ptr, count, K: tl.constexpr, BLOCK: tl.constexpr,
    ROOM: tl.constexpr, R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Keeps the scores of listed groups that reach ``bound``. Returns the new bound and how many are kept."""
    tl.debug_barrier()
    first = 0
    while first < groups:
        i = first + _groups(BLOCK, R)
        group = tl.load(groups_ptr + i, mask=i < groups, other=stop)
        score = _scores_of(scores_ptr, group, stop, ALIGNED)
        column = _entries(group)
        keep = ~(score < bound) & (column < stop)  # a NaN counts as the lowest later
        place, more = _place(keep)
        if count + more > ROOM:
            bound = _compress(kept_ptr, count, K, ROOM, R)
            count = K
            keep = ~(score < bound) & (column < stop)
            place, more = _place(keep)
        tl.store(kept_ptr + count + place, _order(score), mask=keep)
        tl.store(kept_ptr + ROOM + count + place, column, mask=keep)
        count += more
        first += BLOCK // 4
    tl.debug_barrier()
    return bound, count


@triton.jit
def _collect(
    scores_ptr, start, stop, bound, groups_ptr, kept_ptr, K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ROOM: tl.constexpr, R: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Keeps the scores of columns ``start`` to ``stop`` that reach ``bound``, up to ``ROOM``. Returns how many.

    Groups of four that have such a score are listed first: that is a fourth of the work.
    """
    count = 0
    groups = 0
    first = start
    lane = _groups(TILE, R)
    while (first < stop) | (groups > 0):
        if (first < stop) & (groups <= ROOM):
            if first + TILE <= stop:
                score = tl.load(scores_ptr + tl.multiple_of(first, 4) + _entries(lane))
            else:
                score = _scores_of(scores_ptr + tl.multiple_of(first, 4), lane, stop - first, ALIGNED)
            hit = ~(tl.max(score, 2) < bound) & (lane * 4 < stop - first)
            place, more = _before(hit.to(tl.int32))
            tl.store(groups_ptr + groups + place, first // 4 + lane, mask=hit)
            groups += more
            first += TILE
        else:
            bound, count = _keep(
                scores_ptr, stop, bound, groups_ptr, groups, kept_ptr, count, K, BLOCK, ROOM, R, ALIGNED
            )
            groups = 0
    return count


@triton.jit(do_not_specialize=["W"])
def select_kernel(
    scores_ptr,
    lens_ptr,
    out_ptr,
    table_ptr,
    request_ptr,
    slot_ptr,
    groups_ptr,
    kept_ptr,
    counts_ptr,
    arrived_ptr,
    W,
    scores_stride,
    out_stride,
    slot_stride,
    table_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    ROOM: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(t, p)``: share p of row t."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + row), 0), W).to(tl.int32)
    scores_ptr += row * scores_stride
    out_ptr += row * out_stride
    groups_ptr += (row * PARTS + part) * (ROOM + TILE // 4)
    kept_ptr += row * (PARTS * 2 * ROOM)
    if PAGE > 0:
        slot_ptr += row * slot_stride
        table_ptr += tl.load(request_ptr + row).to(tl.int64) * table_stride
    if n <= K:
        if part == 0:
            _everything(n, K, out_ptr, table_ptr, slot_ptr, PAGE, 256)
    elif n <= ROOM:
        if part == 0:
            group = _groups(ROOM, R)
            column = _entries(group)
            key = tl.where(column < n, _order(_scores_of(scores_ptr, group, n, ALIGNED)), _LOWEST)
            chosen, place, _low = _choose(key, n, K)
            _store_results(chosen, place, column, out_ptr, table_ptr, slot_ptr, PAGE)
    else:
        share = tl.cdiv(tl.cdiv(n, PARTS), 128) * 128
        start = part * share
        stop = tl.minimum(start + share, n)
        least = _sampled(scores_ptr, n, SAMPLE, TARGET, R)
        shared = PARTS > 1
        todo = n > 0
        while todo:
            mine = kept_ptr if (PARTS == 1) else kept_ptr + part * (2 * ROOM)
            bound = _score_of(least)
            count = _collect(scores_ptr, start, stop, bound, groups_ptr, mine, K, TILE, BLOCK, ROOM, R, ALIGNED)
            key, column = _load_own(mine, count, ROOM, R)
            if PARTS > 1:  # noqa: SIM102  (a constant: what follows is not compiled)
                if shared:
                    tl.store(counts_ptr + row * PARTS + part, count)
                    tl.debug_barrier()  # all of it is written before the arrival is counted
                    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == PARTS - 1:
                        tl.store(arrived_ptr + row, 0)
                        i = _entries(_groups(ROOM, R))
                        at = i
                        count = 0
                        for p in tl.static_range(PARTS):
                            kept = tl.load(counts_ptr + row * PARTS + p, cache_modifier=".cg")
                            count += kept
                            at += tl.where(i >= count, 2 * ROOM - kept, 0)
                        key = tl.load(kept_ptr + at, mask=i < count, other=_LOWEST, cache_modifier=".cg")
                        column = tl.load(kept_ptr + ROOM + at, mask=i < count, other=0, cache_modifier=".cg")
                    else:
                        todo = n < 0
            if todo:
                chosen, place, low = _choose(key, tl.minimum(count, ROOM), K)
                if (count >= K) & (count <= ROOM) & (low >= least):
                    _store_results(chosen, place, column, out_ptr, table_ptr, slot_ptr, PAGE)
                    todo = n < 0
                else:
                    # the bound was too high, or the shares left over too much: all of the row, without a bound
                    start, stop = 0, n
                    least = n * 0 + _LOWEST
                    shared = False
