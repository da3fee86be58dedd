"""Timing single ops: each row of ``opbench``, every implementation of it on the same data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from deepseek_attn.bench.cases.case import OpCase
from deepseek_attn.bench.timing import Spread, time_calls, time_graph

L2_BYTES = 64 << 20
MAX_SETS = 64


@dataclass(frozen=True)
class OpTiming:
    """One measurement.

    Attributes:
        op, label: which row; implementation: what ran.
        microseconds: median of the runs; low, high: the 10th and 90th percentile.
        bytes_per_second, flops_per_second: what the row counts, divided by the median.
        share: of the GPU's ceiling: the larger of bytes against a copy and operations against a matrix product; None
            without ceilings.
    """

    op: str
    label: str
    implementation: str
    microseconds: float
    low: float
    high: float
    bytes_per_second: float
    flops_per_second: float
    share: float | None

    def row(self) -> dict:
        return asdict(self)


def time_case(
    case: OpCase, device: torch.device, repeats: int, ceilings: dict[str, float] | None
) -> Iterator[OpTiming]:
    """Times every implementation of a row: replays of a CUDA graph with one call per input set, or calls on a CPU.

    Input sets together exceed the L2 cache, so that no call finds its data there.
    """
    first = case.make(device, 0)
    size = max(1, sum(t.nbytes for t in tensors(first)))
    count = 1 if device.type == "cpu" else min(MAX_SETS, 1 + L2_BYTES // size)
    sets = [first] + [case.make(device, seed) for seed in range(1, count)]
    for name, run in case.run.items():
        if device.type == "cuda":
            times = time_graph([lambda s=s, run=run: run(*s) for s in sets], repeats)
        else:
            times = time_calls(lambda _, run=run: run(*sets[0]), device, repeats)
        spread = Spread.of(times)
        seconds = spread.median * 1e-6
        rates = case.bytes / seconds, case.flops / seconds
        share = None
        if ceilings:
            share = max(rates[0] / ceilings["copy"], rates[1] / ceilings.get(case.unit, ceilings["bf16"]))
        yield OpTiming(case.op, case.label, name, spread.median, spread.low, spread.high, *rates, share)


def tensors(arguments: tuple) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments."""
    for item in arguments:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors(tuple(item))
