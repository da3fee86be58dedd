"""Triton device code of `fetch_experts` and `prefetch_experts`: chooses experts and rows, copies from host memory.

Only the device knows the number of copies: the copying programs read it and divide the copies among themselves.
They read pinned host memory by its address, over the bus, and write rows of stacks in the GPU's memory.

    main stream:  ... router n -- choose_rows n -- products n, attention n + 1, router n + 1 -- choose_rows n + 1 ...
    side stream:  predicted n + 1 -- choose_ahead n + 1                                    | drops
    copies:                           +-- fetched n ----- +-- ahead n + 1 ................-+- fetched n + 1

If layer n + 1 lacks no predicted expert, the bus would rest until its routing is known. One expert of layer n + 2 is
then copied early, on a stream of its own. The early copy pauses if the routing of layer n + 1 lists experts to copy.
The copies ahead for layer n + 2 begin with the rest of that expert.

    side stream:  choose_ahead n + 1 -- predicted n + 2 -- choose_ahead n + 2 (early) ...... choose_ahead n + 2
    copies:       +-- ahead n + 1 (none) .................................... fetched n + 1 -- ahead n + 2
    early copies:                                          +-- early n + 2 ...| pauses
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.moe.types import COPY_BYTES, COPY_PROGRAMS
from deepseek_attn.kernels.moe.uses import DECAY, MAX_TOKENS, USE

_DECAY, _USE, _MAX_TOKENS = tl.constexpr(DECAY), tl.constexpr(USE), tl.constexpr(MAX_TOKENS)
_COPY_BYTES, _PROGRAMS = tl.constexpr(COPY_BYTES), tl.constexpr(COPY_PROGRAMS)
_KEPT = tl.constexpr((2**31 - 1) << 32)  # key of rows that this call needs: behind all others


class CacheState(NamedTuple):
    """Tensors of `HostExperts` that `choose_rows_kernel` and `choose_ahead_kernel` read and write.

    ``before``: ``ahead`` of the previous layer in an early call, else None.
    """

    row: Any
    owner: Any
    uses: Any
    found: Any
    moves: Any
    num_moves: Any
    ahead: Any
    resume: Any
    totals: Any
    before: Any


@triton.jit(do_not_specialize=["pairs", "num_rows", "first", "staged"])
def choose_rows_kernel(
    experts_ptr,
    cache,
    pairs,
    num_rows,
    first,
    staged,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: counts uses, and lists the experts to copy in order of their ids, with their rows.

    Args:
        experts_ptr: ``[pairs]``, -1 for experts of other ranks.
        cache: `CacheState`; num_rows, first, staged: S, and rows, of `HostExperts`.
        AHEAD: entries of ``cache.ahead`` that `choose_ahead_kernel` wrote for this call, 0 if it was not launched.
            None: only uses are counted.
    """
    BINS: tl.constexpr = triton.next_power_of_2(E + 1)
    ROWS: tl.constexpr = triton.next_power_of_2(E)
    expert = tl.arange(0, BINS)
    inside = expert < E
    if PDL:
        gdc_wait()  # until the router has written the experts, and earlier products have read the rows
        gdc_launch_dependents()
    tokens = tl.zeros((BINS,), tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        # experts of other ranks are counted in a bin behind all experts
        tokens += tl.histogram(tl.where(chosen < 0, E, chosen), BINS)
    uses = tl.load(cache.uses + expert, mask=inside, other=0)
    uses = uses - (uses >> _DECAY) + tl.minimum(tokens, _MAX_TOKENS) * _USE
    tl.debug_barrier()  # until every warp has loaded the counts: several may hold the same ones
    tl.store(cache.uses + expert, uses, mask=inside)
    if AHEAD is not None:
        needed = inside & (tokens > 0)
        for i in tl.static_range(AHEAD):
            guess = tl.load(cache.ahead + i)
            is_right = tl.sum((needed & (expert == guess)).to(tl.int32), 0) > 0
            is_wrong = (guess >= 0) & ~is_right
            tl.debug_barrier()  # until every warp has loaded the guess
            # the copying programs leave out what they have not copied yet
            tl.store(cache.ahead + i, -1, mask=is_wrong)
            tl.store(cache.row + guess, -1, mask=is_wrong)
            tl.store(cache.owner + tl.load(cache.ahead + AHEAD + i) - first, -1, mask=is_wrong)
            tl.store(cache.totals + 2, tl.load(cache.totals + 2) + is_right.to(tl.int64))
            tl.store(cache.totals + 3, tl.load(cache.totals + 3) + is_wrong.to(tl.int64))
            tl.debug_barrier()  # until the rows are free: all warps load them below
        row = tl.load(cache.row + expert, mask=inside, other=0)
        missing = needed & (row < 0)
        tl.store(cache.totals, tl.load(cache.totals) + tl.sum(needed.to(tl.int32), 0))
        tl.store(cache.totals + 1, tl.load(cache.totals + 1) + tl.sum(missing.to(tl.int32), 0))
        place = tl.cumsum(missing.to(tl.int32), 0) - 1
        found = row
        if tl.sum(missing.to(tl.int32), 0) > 0:
            slot = tl.arange(0, ROWS)
            owner = tl.load(cache.owner + slot, mask=slot < num_rows, other=-1)
            has_owner = owner >= 0
            owner_place = tl.where(has_owner, owner, 0)
            is_kept = has_owner & (tl.gather(needed.to(tl.int32), owner_place, 0) > 0)
            may_replace = (slot < num_rows) & ~is_kept
            # rows without an expert come first, then the least used experts, of equal ones the lower id
            count = tl.where(has_owner, tl.gather(uses, owner_place, 0) + 1, 0).to(tl.int64)
            key = (count << 32) | (tl.where(has_owner, owner, slot).to(tl.int64) << 16)
            key = tl.where(may_replace, key, _KEPT) | slot.to(tl.int64)
            replaced = (tl.sort(key) & 0xFFFF).to(tl.int32)
            available = tl.sum(may_replace.to(tl.int32), 0)
            taken = tl.minimum(tl.sum(missing.to(tl.int32), 0), available)
            is_cached = missing & (place < available)
            target = tl.gather(replaced, tl.minimum(tl.maximum(place, 0), ROWS - 1), 0)
            found = tl.where(is_cached, first + target, found)
            found = tl.where(missing & (place >= available), staged + place - available, found)
            old = tl.gather(owner, replaced, 0)
            tl.debug_barrier()  # until every warp has loaded rows and owners
            tl.store(cache.row + old, -1, mask=(slot < taken) & (old >= 0))
            tl.store(cache.row + expert, found, mask=is_cached)
            tl.store(cache.owner + target, expert, mask=is_cached)
        tl.store(cache.found + expert, found, mask=inside)
        tl.store(cache.moves + place, expert, mask=missing)
        tl.store(cache.moves + E + place, found, mask=missing)
        tl.store(cache.num_moves, tl.sum(missing.to(tl.int32), 0))


@triton.jit(do_not_specialize=["pairs", "num_rows", "first"])
def choose_ahead_kernel(
    experts_ptr,
    cache,
    pairs,
    num_rows,
    first,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    TOPK: tl.constexpr,
    COPIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: gives rows to the first predicted experts without one, and lists them in ``cache.ahead``.

    Args:
        experts_ptr: ``[pairs / TOPK, TOPK]``, -1 for experts of other ranks; PAIRS: a power of two, at least ``pairs``.
        cache: `CacheState`. ``before`` marks an early call, which chooses one expert if ``before`` lists none. Other
            calls keep the expert of an early call if it is predicted again. Otherwise they free its row, and copying
            programs that still run skip the rest of it.
        COPIES: entries of ``cache.ahead``. Other arguments: see `choose_rows_kernel`.
    """
    pair = tl.arange(0, PAIRS)
    slot = tl.arange(0, triton.next_power_of_2(E))
    inside = slot < num_rows
    if PDL:
        gdc_wait()  # until the router has written the experts
        gdc_launch_dependents()
    chosen = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    if cache.before is None:
        early, number = tl.load(cache.ahead), tl.load(cache.num_moves)  # the number is -1 behind an early call
        is_predicted = tl.sum((chosen == early).to(tl.int32), 0)
        is_wrong = (number < 0) & (early >= 0) & (is_predicted == 0)
        program = tl.arange(0, _PROGRAMS)
        tl.debug_barrier()  # until every warp has loaded the entry
        tl.store(cache.ahead, tl.where((number < 0) & (is_predicted > 0), early, -1))
        tl.store(cache.resume + program, program, mask=program < tl.where(number < 0, 0, _PROGRAMS))
        tl.store(cache.row + early, -1, mask=is_wrong)
        tl.store(cache.owner + tl.load(cache.ahead + COPIES) - first, -1, mask=is_wrong)
        tl.store(cache.totals + 3, tl.load(cache.totals + 3) + is_wrong.to(tl.int64))
        tl.debug_barrier()  # until the row is free: all warps load rows and owners below
    tokens = tl.histogram(tl.where(chosen < 0, E, chosen), triton.next_power_of_2(E + 1))
    row = tl.load(cache.row + chosen, mask=chosen >= 0, other=0)
    # every token's first expert, then every token's second one
    turn = pair % TOPK * PAIRS + pair // TOPK
    turn = tl.where(row < 0, turn, 1 << 30)
    owner = tl.load(cache.owner + slot, mask=inside, other=-1)
    has_owner = owner >= 0
    uses = tl.load(cache.uses + owner, mask=has_owner, other=-1)
    is_kept = has_owner & (tl.gather(tokens, tl.where(has_owner, owner, 0), 0) > 0)
    # the order of `choose_rows_kernel`
    key = ((uses + 1).to(tl.int64) << 32) | (tl.where(has_owner, owner, slot).to(tl.int64) << 16)
    key = tl.where(inside & ~is_kept, key, _KEPT) | slot.to(tl.int64)
    num_before = 0
    if cache.before is not None:
        for i in tl.static_range(COPIES):
            num_before += (tl.load(cache.before + i) >= 0).to(tl.int32)
    tl.debug_barrier()  # until every warp has loaded rows and owners
    # the next layer's early copy goes on while this is 0
    tl.store(cache.num_moves, 0 if cache.before is None else -1)
    # early calls fill the first entry, other calls the entries behind it
    FIRST: tl.constexpr = 1 if cache.before is None else 0
    END: tl.constexpr = COPIES if cache.before is None else 1
    for i in tl.static_range(FIRST, END):
        next_turn, victim = tl.min(turn, 0), tl.min(key, 0)
        guess = tl.min(tl.where(turn == next_turn, chosen, E), 0)
        target = (victim & 0xFFFF).to(tl.int32)
        old = tl.sum(tl.where(slot == target, owner, 0), 0)
        found = (next_turn < 1 << 30) & (victim < _KEPT) & (num_before == 0)
        tl.store(cache.row + old, -1, mask=found & (old >= 0))
        tl.store(cache.row + guess, first + target, mask=found)
        tl.store(cache.owner + target, guess, mask=found)
        tl.store(cache.ahead + i, tl.where(found, guess, -1))
        tl.store(cache.ahead + COPIES + i, first + target)
        turn = tl.where(chosen == guess, 1 << 30, turn)
        key = tl.where(slot == target, _KEPT, key)
    if cache.before is not None:
        for i in tl.static_range(1, COPIES):
            tl.store(cache.ahead + i, -1)


@triton.jit
def _copy_job(
    parts_ptr,
    starts,
    moves_ptr,
    move,
    unit,
    MOVES: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Copies one job of an expert; returns whether the expert is still wanted. Arguments: see `copy_experts_kernel`."""
    BLOCK: tl.constexpr = _COPY_BYTES
    entry = parts_ptr + 4 * (tl.sum((starts <= unit).to(tl.int32), 0) - 1)
    nbytes = tl.load(entry + 2)
    start = (unit - tl.load(entry + 3)) * BLOCK
    expert = tl.load(moves_ptr + move)
    source = tl.load(entry) + expert.to(tl.int64) * nbytes + start
    target = tl.load(entry + 1) + tl.load(moves_ptr + MOVES + move).to(tl.int64) * nbytes + start
    rest = tl.minimum(nbytes - start, BLOCK).to(tl.int32)
    if DROPS:
        rest = tl.where(expert < 0, 0, rest)
    wanted = expert >= 0
    if ALIGNED:
        word = tl.arange(0, BLOCK // 4)
        words = tl.multiple_of(rest // 4, 4)
        from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        # all loads of a job are in flight together
        values = tl.load(from_ptr + word, mask=word < words, cache_modifier=".cg")
        if DROPS:
            # meanwhile one thread reads for all whether the expert was dropped, so that they agree; without an order,
            # which would wait for the stores of the last job
            wanted = tl.atomic_add(moves_ptr + move, 0, sem="relaxed") >= 0
        tl.store(to_ptr + word, values, mask=word < words)
    else:
        byte = tl.arange(0, BLOCK)
        values = tl.load(source.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < rest, cache_modifier=".cg")
        if DROPS:
            wanted = tl.atomic_add(moves_ptr + move, 0, sem="relaxed") >= 0
        tl.store(target.to(tl.pointer_type(tl.uint8)) + byte, values, mask=byte < rest)
    return wanted


@triton.jit(do_not_specialize=["units"])
def copy_experts_kernel(
    parts_ptr,
    moves_ptr,
    num_moves_ptr,
    resume_ptr,
    units,
    MOVES: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Persistent kernel: copies all parts of the listed experts from host memory to their rows, `COPY_BYTES` a job.

    Args:
        parts_ptr: int64 ``[PARTS, 4]`` of `CopiedParts`; units: jobs of an expert.
        moves_ptr: int32 ``[2, MOVES]``, experts and rows.
        num_moves_ptr: their number. With DROPS, None, or for early copies the number of the previous layer: the first
            expert alone is copied, until that number is not 0.
        resume_ptr: int32 ``[programs]``, read with DROPS: the first job of each program. Early copies do not read it;
            they write the first job that is left.
        ALIGNED: words of 16 bytes are copied, else bytes.
        DROPS: there are MOVES experts, -1 for none; one that becomes -1 while the kernel runs is copied no further.
    """
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    starts = tl.load(parts_ptr + 4 * part + 3, mask=part < PARTS, other=1 << 40)
    if PDL:
        gdc_wait()  # until the experts are listed
        gdc_launch_dependents()
    if DROPS:
        program = tl.program_id(0)
        job = program
        end = MOVES * units
        if num_moves_ptr is not None:
            end = units
        else:
            job = tl.load(resume_ptr + program)
        while job < end:
            move = job // units
            wanted = _copy_job(parts_ptr, starts, moves_ptr, move, job - move * units, MOVES, ALIGNED, DROPS)
            # the program's next job, of the next expert if this one was dropped
            following = tl.where(wanted, job + 1, (move + 1) * units)
            job += tl.cdiv(following - job, tl.num_programs(0)) * tl.num_programs(0)
            if num_moves_ptr is not None:
                end = tl.where(wanted & (tl.atomic_add(num_moves_ptr, 0, sem="relaxed") == 0), end, 0)
        if num_moves_ptr is not None:
            tl.store(resume_ptr + program, job)
    else:
        for job in tl.range(tl.program_id(0), tl.load(num_moves_ptr) * units, tl.num_programs(0)):
            move = job // units
            _copy_job(parts_ptr, starts, moves_ptr, move, job - move * units, MOVES, ALIGNED, DROPS)
