"""Counted allocations."""

from __future__ import annotations

import torch

from deepseek_attn.utils.allocations import AllocationTrace, Event, held


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


def test_what_is_held():
    events = [Event(1, 512), Event(7, 0), Event(2, 1024), Event(1, 0), Event(3, 2048), Event(2, 0)]
    assert held(events) == (2048, 3072)
    assert held([]) == (0, 0)
