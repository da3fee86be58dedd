"""Memory of a runner on a GPU at the peak of its steps: predicted, and as the allocator and the driver count it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.estimates.machines import H200
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.runner.memory import RunnerMemory
from deepseek_attn.runner.model_runner import ModelRunner

TOKENS = 8  # new tokens per request


class Limits(NamedTuple):
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class MemoryComparison:
    """Bytes of a run within these limits, at its peak.

    Attributes:
        predicted, measured: bytes by part, as in `RunnerMemory`, with cuBLAS's workspace in ``allocator``; ``context``
            is all memory outside of PyTorch's allocator. The sum of the measured parts is the driver's count.
    """

    limits: Limits
    predicted: dict[str, int]
    measured: dict[str, int]

    def row(self) -> dict[str, Any]:
        totals = {"predicted_driver": sum(self.predicted.values()), "driver": sum(self.measured.values())}
        return {**self.limits._asdict(), "predicted": self.predicted, "measured": self.measured, **totals}


def measure_memory(config: AnyConfig, source: CheckpointSource, limits: Limits, **options: Any) -> MemoryComparison:
    """Builds a runner, captures all its decode steps, and runs the longest prompts and the largest batch.

    Args:
        options: further options of the runner, on a GPU.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with ModelRunner.from_source(config, source, progress=False, **limits._asdict(), **options) as runner:
        predicted = RunnerMemory.of(
            config,
            runner.layout,
            numerics=runner.numerics,
            dtype=runner.dtype,
            attention=AttentionOptions(),
            gpu=gpu(runner.device),
        )
        loaded = torch.cuda.memory_allocated()
        caches = runner.pools.nbytes()
        weights = storage_bytes([*runner.model.parameters(), *runner.model.buffers()])
        tables = 0 if runner.graphs is None else runner.graphs.tables.nbytes()
        runner.warm_up()
        graphs = 0 if runner.graphs is None else runner.graphs.nbytes
        warm = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        used = max(driver_bytes() for _ in peak_workload(runner))
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    parts = predicted.parts()
    parts["allocator"] += parts.pop("cublas")
    measured = {
        "weights": weights, "caches": caches, "buffers": loaded - weights - caches - tables, "graphs": graphs,
        "step": allocated - warm,
    }  # fmt: skip
    measured |= {"allocator": reserved - sum(measured.values()), "context": used - reserved}
    return MemoryComparison(limits, parts | {"context": H200.context + H200.modules}, measured)


def peak_workload(runner: ModelRunner) -> Iterator[None]:
    """Runs two prompts of the maximal length, then the maximal number of requests; yields after each engine step."""
    engine, longest = Engine(runner), runner.layout.max_model_len - TOKENS
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = runner.layout.max_num_seqs
    for lengths in ([longest] * min(requests, 2), [max(1, longest // 8)] * requests):
        for number, length in enumerate(lengths):
            engine.add_request([(number + place) % runner.config.vocab_size for place in range(length)], params)
        while engine.has_unfinished:
            engine.step()
            yield


def driver_bytes() -> int:
    """Bytes of the GPU in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of tensors."""
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())
