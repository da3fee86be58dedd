"""Timing: calls by the clock or by CUDA events, kernels by replays of a CUDA graph; a GPU's peak rates."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import torch

from deepseek_attn.utils.clock import seconds_since

COPY_BYTES = 1 << 31
MATRIX = 8192
PROFILED_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One timing, in microseconds; subclasses add the facts of the run.

    Attributes:
        microseconds: median of the runs; low, high: the 10th and 90th percentile.
    """

    microseconds: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float], **facts: Any) -> Self:
        """The record of runs that took ``times`` microseconds each; ``facts``: the fields of the subclass."""
        median, low, high = times * 3 if len(times) == 1 else _percentiles(times)
        return cls(microseconds=median, low=low, high=high, **facts)

    def row(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class KernelTiming(Timing):
    """A measurement whose kernels may have been counted.

    Attributes:
        launches: kernels of one run; None if they were not counted.
        kernels: (name, launches, microseconds) of each kernel; empty if they were not counted.
    """

    launches: float | None = None
    kernels: tuple[tuple[str, float, float], ...] = ()


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), tenths[0], tenths[-1]


def time_calls(run: Callable[[int], object], device: torch.device, repeats: int, warmup: int = 3) -> list[float]:
    """Microseconds of each of ``repeats`` calls ``run(index)``: by events on a GPU, by the clock on a CPU."""
    for index in range(warmup):
        run(index)
    if device.type != "cuda":
        return [time_until_done(lambda index=index: run(index), device) for index in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for index in range(repeats):
        run(index)
        marks[index + 1].record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(marks)]


def time_until_done(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds by the clock from the start of ``call`` until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds_since(start) * 1e6


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` in order. Each call runs once before, to compile and to make its constants."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 20) -> list[float]:
    """Microseconds per call, one figure per replay of a CUDA graph of all ``calls``."""
    graph = captured(calls)
    device = torch.device("cuda", torch.cuda.current_device())
    return [t / len(calls) for t in time_calls(lambda _: graph.replay(), device, repeats)]


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, launches, microseconds) of each kernel of a call, or of a graph's ``replay``, in the order of their time.

    Kernels that overlap count in full, so the sum can exceed the call's time.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED_RUNS):
            call()
        torch.cuda.synchronize()
    launches, times = Counter(), Counter()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.name] += 1
            times[event.name] += event.device_time
    return [(name, launches[name] / PROFILED_RUNS, total / PROFILED_RUNS) for name, total in times.most_common()]


class GraphReplays:
    """Records the CUDA graphs replayed in its context, so that they can be timed without host overhead.

    Attributes:
        graphs: one entry per replay, in order.
    """

    def __init__(self):
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def __enter__(self) -> Self:
        self._replay = replay = torch.cuda.CUDAGraph.replay

        def recorded(graph: torch.cuda.CUDAGraph) -> None:
            self.graphs.append(graph)
            replay(graph)

        graphs: Any = torch.cuda.CUDAGraph
        graphs.replay = recorded
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.CUDAGraph.replay = self._replay

    def device_seconds(self, first: int, last: int) -> float:
        """Seconds of replays ``first`` to ``last`` - 1, back to back, on their last inputs.

        The replays overwrite cache entries: no sequence may still need them.
        """
        marks = []
        for graph in self.graphs[first:last]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            marks.append((before, after))
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in marks) * 1e-3


def ceilings(device: torch.device) -> dict[str, float] | None:
    """Measured peak rates: bytes/s of a copy (read and written), FLOP/s of bf16 and FP8 products of 8192^3.

    None on a CPU.
    """
    if device.type != "cuda":
        return None
    rates = {"copy": _copy_rate(device)}
    a, b = (torch.randn(MATRIX, MATRIX, device=device).bfloat16() for _ in range(2))
    rates["bf16"] = 2 * MATRIX**3 / _best(lambda: a @ b)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        rates["fp8"] = (
            2 * MATRIX**3 / _best(lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        )
    return rates


def _copy_rate(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best(lambda: target.copy_(source))


def _best(call: Callable[[], object]) -> float:
    """Median seconds of ten calls."""
    return statistics.median(time_calls(lambda _: call(), torch.device("cuda"), 10)) * 1e-6
