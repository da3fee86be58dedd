"""Counters of split-K launches: programs count the finished partial sums of a tile, and the last one adds them."""

from __future__ import annotations

from functools import cache
from itertools import count

import torch
from torch import Tensor

COUNTERS, _STREAMS = 4096, 64
COUNTER_BYTES = 4 * COUNTERS * _STREAMS
"""Bytes of the counters of a device."""
_stream_rows: dict[tuple[torch.device, int], int] = {}
_next_row = count()  # two threads never get the same number


def counters_of(device: torch.device) -> Tensor:
    """``COUNTERS`` zeros, int32; each launch leaves them zero. One set per stream.

    Two graphs captured on one stream must not be replayed at the same time.
    """
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device="cpu")
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if (row := _stream_rows.get(key)) is None:
        row = _stream_rows.setdefault(key, next(_next_row) % _STREAMS)
    return _counter_rows(device)[row]


@cache
def _counter_rows(device: torch.device) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run the layers once before a CUDA graph is captured: their counters outlive the graph")
    return torch.zeros(_STREAMS, COUNTERS, dtype=torch.int32, device=device)
