"""Timing a decode step of a whole model, over caches of any length."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from deepseek_attn.bench.layer import check_sizes, past
from deepseek_attn.bench.timing import KernelTiming, kernels_of, time_calls
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class ModelTiming(KernelTiming):
    """A decode step, from token ids to logits; sampling is not part of it.

    Attributes:
        graph: replayed as a CUDA graph; otherwise called from Python.
        batch: sequences, one new token each; context: length of each after the step.
        tokens_per_second: of all sequences together.
    """

    graph: bool
    batch: int
    context: int
    tokens_per_second: float


@torch.inference_mode()
def time_model(
    runner: ModelRunner,
    batch: int,
    context: int,
    repeats: int = 20,
    warmup: int = 3,
    graph: bool = False,
    count_kernels: bool = False,
) -> ModelTiming:
    """Times decode steps of ``batch`` sequences that end at ``context`` tokens.

    Raises:
        ValueError: sizes that the runner was not made for, a graph without a GPU, or a runner whose steps compute one
            token at a time.
    """
    check_sizes(runner, batch, 1, context)
    if graph and runner.graph_problem:
        raise ValueError(f"no CUDA graph of this model's steps: {runner.graph_problem}")
    if runner.one_by_one:
        raise ValueError(
            f"deterministic=True computes one token at a time here ({runner.graph_problem}): time the engine"
        )
    caches = [past(runner, context - 1) for _ in range(batch)]
    launches, kernels = None, ()
    try:
        runner.manager.reserve([(cache, 1) for cache in caches])
        steps = DecodeGraphs(runner.model, runner.layout, runner.device, batches=[batch], capture=graph)
        with runner.op_settings():  # in which a graph is captured
            step = steps.step(steps.size_for([1] * batch, context))
        tokens = [[(7 * i) % runner.config.vocab_size] for i in range(batch)]
        step.set_inputs(tokens, [cache.num_tokens for cache in caches], steps.tables.rows(caches))
        with runner.op_settings():
            times = time_calls(lambda _: step.run(), runner.device, repeats, warmup)
        if graph and count_kernels:
            kernels = tuple(kernels_of(step.graph.replay))
            launches = sum(n for _, n, _ in kernels)
    finally:
        for cache in caches:
            runner.manager.free(cache)
    rate = batch / (statistics.median(times) * 1e-6)
    return ModelTiming.of(
        times, graph=graph, batch=batch, context=context, tokens_per_second=rate, launches=launches, kernels=kernels
    )
