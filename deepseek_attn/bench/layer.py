"""Timing one attention layer, from hidden states to the output projection, over caches of any length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_attn.bench.timing import KernelTiming, captured, kernels_of, time_calls
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import StepSize, StepTensors

INPUT_SETS = 4  # sets of hidden states, in rotation: no run repeats the inputs of the previous one
FILL_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LayerTiming(KernelTiming):
    """One step of an attention layer.

    Attributes:
        layer, kind: which layer; backend: its attention impl.
        mode: ``decode`` (one new token per sequence) or ``prefill``.
        graph: replayed as a CUDA graph; otherwise called from Python.
        batch: sequences; tokens: new tokens of each; context: length of each after the step.
        metadata_us: host time to build the step's metadata, once for all layers of a kind, median; 0 for a graph of
            decode steps, which builds it on the device.
    """

    layer: str
    kind: str
    backend: str
    mode: str
    graph: bool
    batch: int
    tokens: int
    context: int
    metadata_us: float


def fill_caches(runner: ModelRunner, seed: int = 0) -> None:
    """Fills every pool with random entries, in place of computing a long context."""
    generator = torch.Generator(runner.device).manual_seed(seed)

    def normal(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, device=runner.device).to(runner.dtype)

    for pool in runner.pools:
        if pool.record is None:
            pool.tensor.normal_(generator=generator)
            continue
        slots = pool.tensor.shape[0] * pool.entries
        for start in range(0, slots, FILL_ROWS):
            index = torch.arange(start, min(start + FILL_ROWS, slots), device=runner.device)
            pool.insert(index, normal(len(index), pool.record.dim))


def past(runner: ModelRunner, length: int) -> SequenceCache:
    """A sequence that holds pages for ``length`` tokens, as if they had been computed."""
    cache = runner.manager.create()
    while left := length - cache.num_tokens:
        n = min(left, runner.layout.max_num_batched_tokens)
        runner.manager.reserve([(cache, n)])
        runner.manager.commit(cache, n)
    return cache


def time_layer(
    runner: ModelRunner,
    layer: int,
    batch: int,
    tokens: int,
    context: int,
    repeats: int = 20,
    warmup: int = 3,
    graph: bool = False,
    count_kernels: bool = False,
) -> LayerTiming:
    """Times layer ``layer`` of a runner that holds attention layers.

    Args:
        batch: sequences; tokens: new tokens of each; context: their length after the step, at least ``tokens``.
        graph: replay a CUDA graph of calls with several inputs, without host overhead. Prefill calls share a step's
            metadata, with the index rows that the first layer of a kind makes for all.
        count_kernels: also list the kernels, on a GPU.

    Raises:
        ValueError: sizes that the runner was not made for, or a graph of something that has none.
    """
    check_sizes(runner, batch, tokens, context)
    if count_kernels and runner.device.type != "cuda":
        raise ValueError("kernels are listed on a GPU")
    if graph and runner.graph_problem:
        raise ValueError(f"a layer's calls cannot be captured as a CUDA graph here: {runner.graph_problem}")
    block = runner.model.layers[str(layer)]
    caches = [past(runner, context - tokens) for _ in range(batch)]
    kernels = ()
    try:
        runner.manager.reserve([(cache, tokens) for cache in caches])
        static = graph and tokens == 1
        step = static_metadata(runner, caches) if static else runner.step_metadata(caches, [tokens] * batch)
        metadata_us = 0.0
        if not static:
            metadata_us = host_microseconds(lambda: runner.step_metadata(caches, [tokens] * batch), repeats)
        shape = (INPUT_SETS, batch * tokens, runner.config.hidden_size)
        inputs = torch.randn(shape, device=runner.device).to(runner.dtype)
        with torch.inference_mode(), reference_ops(runner.reference_only):
            if graph:
                replay = captured([lambda x=x: block.attend(x, step) for x in inputs])
                times = [t / INPUT_SETS for t in time_calls(lambda _: replay.replay(), runner.device, repeats, warmup)]
                found = kernels_of(replay.replay) if count_kernels else []
                kernels = tuple((name, n / INPUT_SETS, us / INPUT_SETS) for name, n, us in found)
            else:
                times = time_calls(
                    lambda index: block.attend(inputs[index % INPUT_SETS], step), runner.device, repeats, warmup
                )
                if count_kernels:
                    kernels = tuple(kernels_of(lambda: block.attend(inputs[0], step)))
    finally:
        for cache in caches:
            runner.manager.free(cache)
    return LayerTiming.of(
        times, layer=block.attn.prefix, kind=block.attn.spec.kind, backend=block.attn.backend_name,
        mode="decode" if tokens == 1 else "prefill", graph=graph, batch=batch, tokens=tokens, context=context,
        metadata_us=metadata_us, launches=sum(n for _, n, _ in kernels) if kernels else None, kernels=kernels,
    )  # fmt: skip


def host_microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time until ``call`` returns, whatever a GPU still has to do."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def static_metadata(runner: ModelRunner, caches: list[SequenceCache]) -> StepMetadata:
    """Metadata of a decode step of sequences whose pages are reserved, in tensors that a graph can read."""
    longest = max(cache.num_tokens for cache in caches) + 1
    tables = DeviceTables(runner.layout, runner.device)
    layers = tuple(block.attn.spec for block in runner.model.layers.values())
    step = StepTensors(layers, runner.layout, tables, StepSize(len(caches), 1, longest))
    step.set_inputs([[0]] * len(caches), [cache.num_tokens for cache in caches], tables.rows(caches))
    return step.metadata()


def check_sizes(runner: ModelRunner, batch: int, tokens: int, context: int) -> None:
    limits = runner.layout
    if not 1 <= tokens <= context <= limits.max_model_len or batch > limits.max_num_seqs:
        raise ValueError(
            f"batch {batch}, {tokens} new tokens, context {context}: this runner takes up to {limits.max_num_seqs} "
            f"sequences of up to {limits.max_model_len} tokens"
        )
    if batch * tokens > limits.max_num_batched_tokens:
        raise ValueError(f"{batch * tokens} new tokens exceed max_num_batched_tokens={limits.max_num_batched_tokens}")
