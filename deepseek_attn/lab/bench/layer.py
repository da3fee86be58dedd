"""Timing one attention layer, from hidden states to the output projection, over caches of any length."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.estimates.floors import FloorWork, ModelWork, StepShape
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.lab.bench.timing import KernelTiming, captured, kernels_of, time_calls
from deepseek_attn.models.block import attention_layers, layer_specs
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import StepSize, StepTensors
from deepseek_attn.runner.step import step_input
from deepseek_attn.utils.clock import seconds_since
from deepseek_attn.v32.attention import DeepseekV32MLAAttention

Attention = DeepseekV4MLAAttention | DeepseekV32MLAAttention
INPUT_SETS = 4  # sets of hidden states, used in rotation: consecutive runs have different inputs
FILL_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LayerTiming(KernelTiming):
    """One step of an attention layer.

    Attributes:
        layer, kind: number and kind of the layer; backend: its attention impl.
        instances: number of layers that alternated.
        mode: ``decode`` (up to ``decode_query_len`` new tokens per sequence, which is 1 without drafts) or ``prefill``.
        graph: replayed as a CUDA graph; otherwise called from Python.
        batch: sequences; tokens: new tokens of each; context: length of each after the step.
        metadata_us: median host time to build the step's metadata, once for all layers of a kind; 0 for a graph of
            decode steps, which builds it on the device.
        work: least bytes and FLOPs of the call.
        floor_us: least time of ``work`` at the given peak rates; bound: ``bytes`` or ``flops``, whichever takes longer;
            over_floor: the median divided by ``floor_us``. All None without peak rates.
    """

    layer: str
    kind: str
    backend: str
    instances: int
    mode: str
    graph: bool
    batch: int
    tokens: int
    context: int
    metadata_us: float
    work: FloorWork
    floor_us: float | None = None
    bound: str | None = None
    over_floor: float | None = None


def fill_caches(runner: ModelRunner) -> None:
    """Fills every pool with random entries, instead of computing a long context."""
    generator = torch.Generator(runner.device).manual_seed(0)

    def normal(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, device=runner.device).to(runner.dtype)

    for pool in runner.pools:
        if pool.spec.record is None:
            pool.tensor.normal_(generator=generator)
            continue
        slots = pool.tensor.shape[0] * pool.entries
        for start in range(0, slots, FILL_ROWS):
            index = torch.arange(start, min(start + FILL_ROWS, slots), device=runner.device)
            pool.insert(index, normal(len(index), pool.record.dim))


def past(runner: ModelRunner, length: int) -> SequenceCache:
    """A sequence with allocated pages for ``length`` tokens, marked as computed."""
    cache = runner.manager.create()
    while left := length - cache.num_tokens:
        n = min(left, runner.layout.max_num_batched_tokens)
        runner.manager.reserve([(cache, n)])
        runner.manager.commit(cache, n)
    return cache


@contextmanager
def reserved_sequences(runner: ModelRunner, batch: int, tokens: int, context: int) -> Iterator[list[SequenceCache]]:
    """Sequences with pages for a step of ``tokens`` new tokens that ends at ``context``; they are freed afterwards."""
    caches = [past(runner, context - tokens) for _ in range(batch)]
    try:
        runner.manager.reserve([(cache, tokens) for cache in caches])
        yield caches
    finally:
        for cache in caches:
            runner.manager.free(cache)


def time_layer(
    runner: ModelRunner,
    layers: int | Sequence[int],
    batch: int,
    tokens: int,
    context: int,
    repeats: int = 20,
    warmup: int = 3,
    graph: bool = False,
    count_kernels: bool = False,
    rates: Mapping[str, float] | None = None,
) -> LayerTiming:
    """Times one call of an attention layer of a runner that holds attention layers.

    Args:
        layers: one layer, or several layers of one kind that alternate, each with its own weights and caches. If their
            weights together exceed the L2 cache, each call reads its weights from memory, as in a model.
        batch: sequences; tokens: new tokens of each; context: their length after the step, at least ``tokens``.
        graph: replay a CUDA graph of calls with several inputs, without host overhead. Prefill calls share one step's
            metadata, including the index rows that the first layer of each kind makes for all.
        count_kernels: also list the kernels, on a GPU.
        rates: peak rates of the machine (`bench.timing.ceilings`), for the floor.

    Raises:
        ValueError: the sizes exceed the runner's, the layers have several kinds or read different selections (V4.1), or
            the step cannot be a graph.

    Notes:
        V4.1: layers whose entries or selections the timed layers read compute the step once beforehand.
    """
    check_sizes(runner, batch, tokens, context)
    if count_kernels and runner.device.type != "cuda":
        raise ValueError("kernels are listed on a GPU")
    if graph and runner.graph_problem:
        raise ValueError(f"a layer's calls cannot be captured as a CUDA graph here: {runner.graph_problem}")
    timed, sources = _layers_to_time(runner, [layers] if isinstance(layers, int) else layers)
    first, decode = timed[0], tokens <= runner.decode_query_len
    with reserved_sequences(runner, batch, tokens, context) as caches:
        step, metadata_us = _step_metadata(runner, caches, tokens, repeats, static=graph and decode)
        count = len(timed) * math.ceil(INPUT_SETS / len(timed))
        inputs = torch.randn(count, batch * tokens, runner.config.hidden_size, device=runner.device).to(runner.dtype)
        calls = [lambda i=i: timed[i % len(timed)](inputs[i], step.positions, step) for i in range(count)]
        with torch.inference_mode(), runner.op_settings():
            for source in sources:
                source(inputs[0], step.positions, step)
            calls_per_run, run = 1, lambda index: calls[index % count]()
            if graph:
                replay = captured(calls).replay
                calls_per_run, run = count, lambda _: replay()
            times = [t / calls_per_run for t in time_calls(run, runner.device, repeats, warmup)]
            found = kernels_of(lambda: run(0)) if count_kernels else []
    kernels = tuple((name, n / calls_per_run, us / calls_per_run) for name, n, us in found)
    counted = ModelWork(runner.config, runner.numerics, runner.dtype)
    work = counted.attention(first.spec, runner.layout, StepShape(batch, tokens, context))
    return LayerTiming.of(
        times, layer=first.prefix, kind=first.spec.kind, backend=first.backend_name, instances=len(timed),
        mode="decode" if decode else "prefill", graph=graph, batch=batch, tokens=tokens, context=context,
        metadata_us=metadata_us, launches=sum(n for _, n, _ in kernels) if kernels else None, kernels=kernels,
        work=work, **over_floor(work, statistics.median(times), rates),
    )  # fmt: skip


def _layers_to_time(runner: ModelRunner, numbers: Sequence[int]) -> tuple[list[Attention], list[Attention]]:
    """The attention layers of these numbers, and the layers whose entries or selections they read."""
    loaded = {layer.spec.index: layer for layer in attention_layers(runner.model.layers)}
    timed = [loaded[number] for number in numbers]
    kinds = {layer.spec.kind for layer in timed}
    if len(kinds) != 1:
        raise ValueError(f"layers {numbers} are of the kinds {', '.join(sorted(kinds))}: one kind is timed at a time")
    selections: set[Any] = {getattr(layer.spec, "index_source", None) for layer in timed}  # none of V4's layers
    if len(selections) > 1 and not timed[0].spec.has_indexer:
        raise ValueError(
            f"layers {numbers} read the selections of layers {sorted(selections)}: one selection at a time"
        )
    sources = [loaded[number] for number in runner.config.with_sources(layer.spec.index for layer in timed)]
    return timed, [layer for layer in sources if layer not in timed]


def _step_metadata(
    runner: ModelRunner, caches: list[SequenceCache], tokens: int, repeats: int, static: bool
) -> tuple[StepMetadata, float]:
    """Metadata of a step of ``tokens`` new tokens of each sequence, and the host time to build it in microseconds.

    Args:
        static: build it on the device, in tensors that a graph can read; the host time is then 0.
    """

    def build() -> StepMetadata:  # no batch to check against: the layers may compute this step repeatedly
        new_tokens = [tokens] * len(caches)
        return runner.builder.build(step_input(runner.manager, caches, new_tokens, runner.decode_query_len))

    return (static_metadata(runner, caches, tokens), 0.0) if static else (build(), host_microseconds(build, repeats))


def over_floor(work: FloorWork, microseconds: float, rates: Mapping[str, float] | None) -> dict[str, float | str]:
    """The fields ``floor_us``, ``bound`` and ``over_floor`` of a timing; empty without peak rates."""
    if rates is None:
        return {}
    floor = work.floor(rates)
    return {"floor_us": floor.microseconds, "bound": floor.bound, "over_floor": microseconds / floor.microseconds}


def host_microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time until ``call`` returns; work queued on a GPU is not awaited."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(seconds_since(start) * 1e6)
    return statistics.median(times)


def static_metadata(runner: ModelRunner, caches: list[SequenceCache], tokens: int = 1) -> StepMetadata:
    """Metadata of a decode step of ``tokens`` new tokens of each sequence, in tensors that a graph can read.

    Their pages must be reserved.
    """
    longest = max(cache.num_tokens for cache in caches) + tokens
    tables = DeviceTables(runner.layout, runner.device)
    layers = layer_specs(runner.model.layers)
    step = StepTensors(runner.layout, tables, StepSize(len(caches), tokens, longest))
    step.set_inputs([[0] * tokens] * len(caches), [cache.num_tokens for cache in caches], tables.rows(caches))
    return step.metadata(layers, step.rows(), step.block_tables())


def check_sizes(runner: ModelRunner, batch: int, tokens: int, context: int) -> None:
    limits = runner.layout
    if not 1 <= tokens <= context <= limits.max_model_len or batch > limits.max_num_seqs:
        raise ValueError(
            f"batch {batch}, {tokens} new tokens, context {context}: this runner takes up to {limits.max_num_seqs} "
            f"sequences of up to {limits.max_model_len} tokens"
        )
    if batch * tokens > limits.max_num_batched_tokens:
        raise ValueError(f"{batch * tokens} new tokens exceed max_num_batched_tokens={limits.max_num_batched_tokens}")
