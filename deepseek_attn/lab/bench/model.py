"""Timing a step of a whole model, over caches of any length, and each of its stages alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.estimates.floors import FloorWork, StepShape
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.lab.bench.layer import check_sizes, reserved_sequences, static_metadata
from deepseek_attn.lab.bench.stages import stage_calls, stage_works
from deepseek_attn.lab.bench.timing import KernelTiming, captured, kernels_of, time_calls
from deepseek_attn.layers.engram import Chunk, LayerRows, RowBuffers
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import step_input


@dataclass(frozen=True, kw_only=True)
class StageTiming(KernelTiming):
    """One stage of a step, in all blocks, timed alone. Stages add up to more than a step, in which launches overlap.

    Attributes:
        stage: name of the stage.
        work: bytes and FLOPs of the stage in all blocks.
        floor_us: sum over its blocks of the least time of their work; None without peak rates.
        over_floor: the median divided by ``floor_us``.
    """

    stage: str
    work: FloorWork
    floor_us: float | None = None
    over_floor: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelTiming(KernelTiming):
    """A step, from token ids to logits of each sequence's last token; sampling is not part of it.

    Attributes:
        graph: replayed as a CUDA graph; otherwise called from Python.
        batch: sequences; tokens: new tokens of each; context: length of each after the step.
        tokens_per_second: new tokens of all sequences together.
        work: bytes and FLOPs of the step, all stages together.
        floor_us: sum of the stages' floors, since stages run in sequence; None without peak rates.
        over_floor: the median divided by ``floor_us``.
        stages: each stage alone, rows of Engram tables on the device.
    """

    graph: bool
    batch: int
    tokens: int
    context: int
    tokens_per_second: float
    work: FloorWork
    floor_us: float | None = None
    over_floor: float | None = None
    stages: tuple[StageTiming, ...] = ()


@torch.inference_mode()
def time_model(
    runner: ModelRunner,
    batch: int,
    context: int,
    repeats: int = 20,
    warmup: int = 3,
    graph: bool = False,
    count_kernels: bool = False,
    tokens: int = 1,
    rates: Mapping[str, float] | None = None,
) -> ModelTiming:
    """Times steps of ``batch`` sequences that end at ``context`` tokens, and their stages.

    Args:
        graph: replay CUDA graphs, without host overhead. A prefill's graph does not contain its metadata; prefills
            that read Engram rows are eager in any case.
        count_kernels: list the kernels of the step; with ``graph``, on a GPU. Launches are counted in any case there.
        tokens: new tokens of each sequence: 1 for a decode step.
        rates: peak rates of the machine (`bench.timing.ceilings`), for the floors.

    Raises:
        ValueError: sizes that the runner was not made for, a graph without a GPU, a runner whose steps compute one
            token at a time.
    """
    check_sizes(runner, batch, tokens, context)
    if graph and runner.graph_problem:
        raise ValueError(f"no CUDA graph of this model's steps: {runner.graph_problem}")
    if runner.one_by_one:
        raise ValueError(
            f"deterministic=True computes one token at a time here ({runner.graph_problem}): time the engine"
        )
    with reserved_sequences(runner, batch, tokens, context) as caches, runner.op_settings():
        shape = StepShape(batch, tokens, context)
        works = stage_works(runner, shape)
        metadata, last_rows = step_metadata(runner, caches, shape)
        if tokens == 1:
            run = decode_step(runner, caches, context, graph)
        elif runner.tables is None:
            run = _replay([lambda: _forward(runner, metadata, last_rows)], graph)
        else:
            run, graph = partial(_step_with_lookup, runner, caches, shape), False
        times = time_calls(lambda _: run(), runner.device, repeats, warmup)
        kernels = tuple(kernels_of(run)) if graph else ()
        stages = _time_stages(runner, works, metadata, last_rows, repeats, graph, rates)
    median = statistics.median(times)
    parts = [work for stage in works.values() for work in stage]
    floor = None if rates is None else math.fsum(work.floor(rates).microseconds for work in parts)
    return ModelTiming.of(
        times, graph=graph, batch=batch, tokens=tokens, context=context,
        tokens_per_second=batch * tokens / (median * 1e-6), launches=_launches(kernels),
        kernels=kernels if count_kernels else (), stages=stages, floor_us=floor, over_floor=floor and median / floor,
        work=sum(parts, FloorWork({})),
    )  # fmt: skip


def step_metadata(
    runner: ModelRunner, caches: list[SequenceCache], shape: StepShape
) -> tuple[StepMetadata, torch.Tensor]:
    """Metadata of a step whose pages are reserved; of decode steps in tensors that a graph can read.

    Also returns the last row of each request, as indices into the rows of the last layer.
    """
    engram = {}
    if runner.tables is not None:
        rows = RowBuffers(runner.tables, shape.rows)
        rows.fill(runner.tables.look_up(_chunks(runner, shape)))
        engram = rows.lookups()
    if shape.tokens > 1:
        return _prefill_metadata(runner, caches, shape, engram)
    metadata = static_metadata(runner, caches)
    metadata.engram = engram
    return metadata, torch.arange(shape.batch, device=runner.device)


def _prefill_metadata(
    runner: ModelRunner, caches: list[SequenceCache], shape: StepShape, engram: Mapping[int, LayerRows]
) -> tuple[StepMetadata, torch.Tensor]:
    batch = step_input(runner.manager, caches, [shape.tokens] * shape.batch, runner.decode_query_len)
    metadata, lengths = runner.builder.build(batch), batch.query_lens.tolist()
    metadata.engram = engram
    if runner.trailing is not None:
        lengths = runner.trailing.attach_ends(metadata, batch, caches)
    return metadata, torch.tensor(lengths, dtype=torch.int64, device=runner.device).cumsum(0) - 1


def decode_step(runner: ModelRunner, caches: list[SequenceCache], context: int, graph: bool) -> Callable[[], object]:
    """A decode step as the runner computes it: builds the metadata and reads the Engram rows in each run."""
    batch, tables = len(caches), runner.tables
    steps = DecodeGraphs(
        runner.whole_model(), runner.layout, runner.device, batches=[batch], capture=graph, engram=tables
    )
    step = steps.step(steps.size_for([1] * batch, context))
    tokens = [[(7 * i) % runner.config.vocab_size] for i in range(batch)]
    step.set_inputs(tokens, [cache.num_tokens for cache in caches], steps.tables.rows(caches))
    buffers = step.engram
    if tables is None or buffers is None:
        return step.run

    def run() -> object:
        buffers.fill(tables.look_up(_chunks(runner, StepShape(batch, 1, context))))
        return step.run()

    return run


def _chunks(runner: ModelRunner, shape: StepShape) -> list[Chunk]:
    token_ids = [7 * i % runner.config.vocab_size for i in range(shape.context)]
    return [Chunk(token_ids, shape.before, shape.tokens)] * shape.batch


def _forward(runner: ModelRunner, metadata: StepMetadata, last_rows: torch.Tensor) -> torch.Tensor:
    token_ids = 7 * metadata.positions % runner.config.vocab_size
    model = runner.whole_model()
    return model.logits(model(token_ids, metadata.positions, metadata)[last_rows])


def _step_with_lookup(runner: ModelRunner, caches: list[SequenceCache], shape: StepShape) -> torch.Tensor:
    """An eager step: looks up the Engram rows, builds the metadata and runs the model."""
    engram = {} if runner.tables is None else runner.tables.look_up(_chunks(runner, shape))
    return _forward(runner, *_prefill_metadata(runner, caches, shape, engram))


def _replay(calls: Sequence[Callable[[], object]], graph: bool) -> Callable[[], object]:
    """A call that runs all ``calls``, as a CUDA graph if ``graph``."""
    if graph:
        return captured(calls).replay
    return lambda: [call() for call in calls]


def _time_stages(
    runner: ModelRunner,
    works: Mapping[str, Sequence[FloorWork]],
    metadata: StepMetadata,
    last_rows: torch.Tensor,
    repeats: int,
    graph: bool,
    rates: Mapping[str, float] | None,
) -> tuple[StageTiming, ...]:
    timings = []
    for stage, calls in stage_calls(runner, metadata, last_rows).items():
        run = _replay(calls, graph)
        times = time_calls(lambda _, run=run: run(), runner.device, repeats)
        launches = _launches(kernels_of(run)) if graph else None
        floor = None if rates is None else math.fsum(work.floor(rates).microseconds for work in works[stage])
        over = statistics.median(times) / floor if floor else None
        work = sum(works[stage], FloorWork({}))
        timings.append(
            StageTiming.of(times, stage=stage, work=work, floor_us=floor, over_floor=over, launches=launches)
        )
    return tuple(timings)


def _launches(kernels: Sequence[tuple[str, float, float]]) -> float | None:
    return sum(count for _, count, _ in kernels) if kernels else None
