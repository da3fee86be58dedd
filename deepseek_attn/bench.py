"""Timing one attention layer, from hidden states to the output projection, over caches of any length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.runner import ModelRunner

INPUT_SETS = 4  # hidden states in turn, so that no run meets the very inputs of the one before
FILL_ROWS = 1 << 16


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        layer, kind: which layer; backend: what it ran on.
        mode: ``decode`` (one new token per sequence) or ``prefill``.
        batch: sequences; tokens: new tokens of each; context: length of each after the step.
        milliseconds: median of the runs; low, high: the 10th and 90th percentile.
        metadata_ms: host time to build the step's metadata, once for all layers of a kind.
    """

    layer: str
    kind: str
    backend: str
    mode: str
    batch: int
    tokens: int
    context: int
    milliseconds: float
    low: float
    high: float
    metadata_ms: float

    def row(self) -> dict:
        return asdict(self)


def fill_caches(runner: ModelRunner, seed: int = 0) -> None:
    """Random entries in every pool: what a layer reads at a long context, without computing it."""
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
    runner: ModelRunner, layer: int, batch: int, tokens: int, context: int, repeats: int = 20, warmup: int = 3
) -> Timing:
    """Times layer ``layer`` of a runner that holds attention layers.

    Args:
        batch: sequences; tokens: new tokens of each; context: their length after the step, at least ``tokens``.

    Raises:
        ValueError: sizes that the runner was not made for.
    """
    limits = runner.layout
    if not 1 <= tokens <= context <= limits.max_model_len or batch > limits.max_num_seqs:
        raise ValueError(
            f"batch {batch}, {tokens} new tokens, context {context}: this runner takes up to {limits.max_num_seqs} "
            f"sequences of up to {limits.max_model_len} tokens"
        )
    if batch * tokens > limits.max_num_batched_tokens:
        raise ValueError(f"{batch * tokens} new tokens exceed max_num_batched_tokens={limits.max_num_batched_tokens}")
    block = runner.model.layers[str(layer)]
    caches = [past(runner, context - tokens) for _ in range(batch)]
    try:
        runner.manager.reserve([(cache, tokens) for cache in caches])
        start = time.perf_counter()
        step = runner.step_metadata(caches, [tokens] * batch)
        metadata_ms = (time.perf_counter() - start) * 1e3
        shape = (INPUT_SETS, batch * tokens, runner.config.hidden_size)
        inputs = torch.randn(shape, device=runner.device).to(runner.dtype)

        @torch.no_grad()
        def run(index: int) -> None:
            block.attend(inputs[index % INPUT_SETS], step)

        times = time_calls(run, runner.device, repeats, warmup)
    finally:
        for cache in caches:
            runner.manager.free(cache)
    low, high = (statistics.quantiles(times, n=10)[i] for i in (0, -1)) if len(times) > 1 else (times[0], times[0])
    return Timing(
        block.attn.prefix, block.attn.spec.kind, block.attn.backend_name, "decode" if tokens == 1 else "prefill",
        batch, tokens, context, statistics.median(times), low, high, metadata_ms,
    )  # fmt: skip


def time_calls(run: Callable[[int], None], device: torch.device, repeats: int, warmup: int) -> list[float]:
    """Milliseconds of each of ``repeats`` calls: by events on a GPU, by the clock on a CPU."""
    for index in range(warmup):
        run(index)
    if device.type != "cuda":
        times = []
        for index in range(repeats):
            start = time.perf_counter()
            run(index)
            times.append((time.perf_counter() - start) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for index in range(repeats):
        run(index)
        marks[index + 1].record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(marks)]
