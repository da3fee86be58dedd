"""Timing single ops: each row of ``bench/cases``, every implementation of it on the same data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.lab.bench.cases import attention, cache_ops, hyper_connection, indexer, latent, linears, moe
from deepseek_attn.lab.bench.cases.case import OpCase
from deepseek_attn.lab.bench.timing import Timing, time_calls, time_graph

L2_BYTES = 64 << 20
MAX_SETS = 64


@dataclass(frozen=True, kw_only=True)
class OpTiming(Timing):
    """One implementation of an op on data of one shape.

    Attributes:
        op, label: names of the row; implementation: name of the implementation.
        bytes_per_second, flops_per_second: the row's bytes and operations, divided by the median.
        share: fraction of the GPU's peak rates: bytes relative to a copy or operations relative to a matrix product,
            whichever is larger; None without peak rates.
    """

    op: str
    label: str
    implementation: str
    bytes_per_second: float
    flops_per_second: float
    share: float | None


def op_cases(device: torch.device) -> list[OpCase]:
    """All rows, family by family, on a GPU that the Triton kernels support; none elsewhere."""
    if not runs_triton(torch.empty(0, device=device)):
        return []
    families = (attention, cache_ops, hyper_connection, indexer, latent, linears, moe)
    return [case for family in families for case in family.cases(device)]


def time_case(
    case: OpCase, device: torch.device, repeats: int, ceilings: dict[str, float] | None
) -> Iterator[OpTiming]:
    """Times every implementation of a row: replays of a CUDA graph with one call per input set, or calls on a CPU.

    The input sets together exceed the L2 cache, so that every call reads its data from memory (`num_sets`).
    """
    first = case.make(device, 0)
    count = 1 if device.type == "cpu" else num_sets(case, first)
    sets = [first] + [case.make(device, seed) for seed in range(1, count)]
    for name, run in case.run.items():
        if device.type == "cuda":
            times = time_graph([lambda s=s, run=run: run(*s) for s in sets], repeats)
        else:
            times = time_calls(lambda _, run=run: run(*sets[0]), device, repeats)
        seconds = statistics.median(times) * 1e-6
        bytes_per_second, flops_per_second = case.bytes / seconds, case.flops / seconds
        share = None
        if ceilings:
            compute = flops_per_second / ceilings.get(case.unit, ceilings["bf16"])
            share = max(bytes_per_second / ceilings["copy"], compute)
        yield OpTiming.of(
            times, op=case.op, label=case.label, implementation=name, bytes_per_second=bytes_per_second,
            flops_per_second=flops_per_second, share=share,
        )  # fmt: skip


def num_sets(case: OpCase, arguments: tuple) -> int:
    """Input sets that together exceed the L2 cache, at most `MAX_SETS`.

    The size of a set is the bytes that a call must move, not its tensors' sizes: sets may share a large tensor of which
    a call reads a part, such as a pool of cached entries.
    """
    size = min(case.bytes, sum(t.nbytes for t in tensors(arguments)))
    return min(MAX_SETS, 1 + L2_BYTES // max(1, size))


def tensors(arguments: tuple) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments."""
    for item in arguments:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors(tuple(item))
