"""Triton device code of `fetch_experts`: chooses experts to copy and their rows, and copies from host memory.

Only the device knows the number of copies: the copying programs read it and divide the copies among themselves.
They read pinned host memory by its address, over the bus, and write rows of stacks in the GPU's memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.moe.uses import DECAY, MAX_TOKENS, USE

_DECAY, _USE, _MAX_TOKENS = tl.constexpr(DECAY), tl.constexpr(USE), tl.constexpr(MAX_TOKENS)
_KEPT = tl.constexpr((2**31 - 1) << 32)  # key of rows that this call needs: behind all others


class CacheState(NamedTuple):
    """Tensors of `HostExperts` that `choose_rows_kernel` reads and writes."""

    row: Any
    owner: Any
    uses: Any
    found: Any
    moves: Any
    num_moves: Any
    totals: Any


@triton.jit(do_not_specialize=["pairs", "num_rows", "first", "staged"])
def choose_rows_kernel(
    experts_ptr,
    cache,
    pairs,
    num_rows,
    first,
    staged,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: counts uses, and lists the experts to copy in order of their ids, with their rows.

    Args:
        experts_ptr: ``[pairs]``, -1 for experts of other ranks.
        cache: `CacheState`; num_rows, first, staged: S, and rows, of `HostExperts`.
        BINS, ROWS: powers of two, more than E and at least E. FETCH: False: only uses are counted.
    """
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
    if FETCH:
        row = tl.load(cache.row + expert, mask=inside, other=0)
        needed = inside & (tokens > 0)
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


@triton.jit(do_not_specialize=["units"])
def copy_experts_kernel(
    parts_ptr,
    moves_ptr,
    num_moves_ptr,
    units,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Persistent kernel: copies all parts of the listed experts from host memory to their rows, ``BLOCK`` bytes a job.

    Args:
        parts_ptr: int64 ``[PARTS, 4]`` of `CopiedParts`; units: jobs of an expert.
        moves_ptr: int32 ``[2, E]``, experts and rows; num_moves_ptr: their number.
        ALIGNED: words of 16 bytes are copied, else bytes.
    """
    part = tl.arange(0, PARTS_PADDED)
    starts = tl.load(parts_ptr + 4 * part + 3, mask=part < PARTS, other=1 << 40)
    if PDL:
        gdc_wait()  # until the experts are listed
        gdc_launch_dependents()
    jobs = tl.load(num_moves_ptr) * units
    for job in tl.range(tl.program_id(0), jobs, tl.num_programs(0)):
        move = job // units
        unit = job % units
        entry = parts_ptr + 4 * (tl.sum((starts <= unit).to(tl.int32), 0) - 1)
        nbytes = tl.load(entry + 2)
        start = (unit - tl.load(entry + 3)) * BLOCK
        source = tl.load(entry) + tl.load(moves_ptr + move).to(tl.int64) * nbytes + start
        target = tl.load(entry + 1) + tl.load(moves_ptr + E + move).to(tl.int64) * nbytes + start
        rest = tl.minimum(nbytes - start, BLOCK).to(tl.int32)
        if ALIGNED:
            word = tl.arange(0, BLOCK // 4)
            words = tl.multiple_of(rest // 4, 4)
            from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
            # all loads of a job are in flight together
            values = tl.load(from_ptr + word, mask=word < words, cache_modifier=".cg")
            tl.store(to_ptr + word, values, mask=word < words)
        else:
            byte = tl.arange(0, BLOCK)
            values = tl.load(source.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < rest, cache_modifier=".cg")
            tl.store(target.to(tl.pointer_type(tl.uint8)) + byte, values, mask=byte < rest)
