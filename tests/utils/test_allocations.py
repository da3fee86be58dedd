"""Counted allocations, and the segments of the caching allocator."""

from __future__ import annotations

import random

import pytest
import torch

from deepseek_attn.utils.allocations import MIB, AllocationTrace, CachingAllocator, Event


def test_storages_are_counted_while_they_live():
    device = torch.device("meta")
    with AllocationTrace(device) as trace:
        first = torch.empty(1000, device=device)  # 4000 bytes
        view = first[3:].view(torch.uint8)
        torch.empty(5)  # elsewhere
        assert trace.nbytes == trace.peak == 4096
        assert trace.key(view) == trace.key(first)
        del first
        assert trace.nbytes == 4096
        second = view.float()
        assert trace.nbytes == 4096 + 16384
        del view
        second += 1
        assert (trace.nbytes, trace.peak) == (16384, 4096 + 16384)
        trace.reset_peak()
        assert trace.peak == 16384
    assert [event.nbytes for event in trace.events] == [4096, 16384, 0]
    assert trace.living == {trace.key(second): 16384}


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (11 * MIB, 12 * MIB)],
)  # fmt: skip
def test_segments(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.allocate("a", nbytes)
    assert allocator.reserved == reserved


def test_blocks_are_split_and_merged():
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 6 * MIB)  # three in a segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    allocator.free("a")
    allocator.allocate("large", 12 * MIB)  # no 12 MiB are free in one piece
    assert allocator.reserved == 32 * MIB
    allocator.free("b")
    allocator.allocate("d", 12 * MIB)
    assert allocator.reserved == 32 * MIB
    allocator.allocate("small", 1)
    assert allocator.reserved == 34 * MIB


def test_what_was_freed_is_used_again():
    rng, allocator, living, events, key = random.Random(3), CachingAllocator(), [], [], 0
    for _ in range(400):
        if living and rng.random() < 0.5:
            events.append(Event(living.pop(rng.randrange(len(living))), 0))
        else:
            key += 1
            living.append(key)
            events.append(Event(key, round(2 ** rng.uniform(1, 25))))
    events += [Event(key, 0) for key in living]
    allocator.replay(events, "first")
    reserved = allocator.reserved
    allocator.replay(events, "second")
    assert allocator.reserved == reserved
    sizes, peak = {}, 0
    for event in events:
        sizes[event.key] = event.nbytes
        peak = max(peak, sum(sizes.values()))
    assert reserved > peak
