"""Timing the rows of launch tables side by side, in the stages of a model's steps: the data behind the tables.

Each row is timed in a replay of the stage that launches it: weights are not in the L2 cache, and neighbouring launches
run before and after it. A kernel that is faster alone but delays the next launch loses.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from deepseek_attn.estimates.floors import StepShape
from deepseek_attn.kernels.common.device import GPU, gpu
from deepseek_attn.kernels.common.plans import Choice, Consulted, Row, Table, forced_row, recorded_choices, tables_in
from deepseek_attn.lab.bench.layer import check_sizes, reserved_sequences
from deepseek_attn.lab.bench.model import step_metadata
from deepseek_attn.lab.bench.stages import stage_calls
from deepseek_attn.lab.bench.timing import captured
from deepseek_attn.runner.ahead.compilation import default_workers
from deepseek_attn.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from deepseek_attn.runner.ahead.recording import Variant

logger = logging.getLogger(__name__)
Calls = Sequence[Callable[[], object]]
RecordedRows = dict[Any, tuple[list[Consulted], list[tuple[Row, list["Variant"]]]]]
"""By (table name, problem): the lookups of a stage, and the rival rows with the kernels that the stage launches."""
FAMILIES = (
    "attention", "common", "engram", "hyper_connection", "indexer", "insert", "latent", "linear", "moe", "norm",
)  # fmt: skip
"""Families of kernels that the stages of a step launch."""
LOSS = 1.02
"""A row loses if another row makes one call of the stage faster by this factor."""
FLUSHED_BYTES = 1 << 28
"""Written before each replay, more than an L2 cache holds: norms and routers of a few layers would stay in it."""
COMPILE_SECONDS = 30
"""Rows are left out if a kernel of theirs takes longer: tiles far from the problem's size can take minutes."""


@dataclass(frozen=True)
class RowTiming:
    """One row of a table in a stage: ``microseconds`` is the median of the stage's replays with it."""

    kernel: str
    config: str
    when: str
    source: str
    microseconds: float

    @classmethod
    def of(cls, choice: Choice, times: Sequence[float]) -> RowTiming:
        return cls(choice.kernel, repr(choice.config), choice.when, choice.source, statistics.median(times))


@dataclass(frozen=True)
class TableTiming:
    """The rows of a table that can serve one problem of a step.

    Attributes:
        table: ``family.op``; problem: its fields by name.
        stage: the timed part of a step.
        launches: how often the stage consults the table for this problem.
        calls: of the stage, one sublayer each.
        batch, tokens, context: sequences of the step, new tokens and length of each.
        taken: the row that the table takes.
        others: other rows that were timed.
    """

    table: str
    problem: dict[str, Any]
    stage: str
    launches: int
    calls: int
    batch: int
    tokens: int
    context: int
    taken: RowTiming
    others: tuple[RowTiming, ...]

    @property
    def best(self) -> RowTiming:
        """The fastest row."""
        return min((self.taken, *self.others), key=lambda timing: timing.microseconds)

    @property
    def loses(self) -> bool:
        """Another row makes one call of the stage faster by more than `LOSS`."""
        return self.ratio(self.best) < 1 / LOSS

    def ratio(self, timing: RowTiming) -> float:
        """Time of a call that launches the kernel once, with a row over the taken row.

        Only some of the stage's calls may launch it: the ratio of the stage's times would hide a loss.
        """
        change = (timing.microseconds - self.taken.microseconds) / self.launches
        return 1 + change * self.calls / self.taken.microseconds

    def row(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def tables_of(name: str) -> list[Table]:
    """The tables of a family's ``plan.py``, or the table of this name, for instance ``moe.combine``.

    Raises:
        ValueError: a family without tables, or no such table.
    """
    family, _, table = name.partition(".")
    if family not in FAMILIES:
        raise ValueError(f"no family of kernels {family!r}: choose from {', '.join(FAMILIES)}")
    module = "float32_product_plan" if family == "common" else "plan"
    tables = tables_in(import_module(f"deepseek_attn.kernels.{family}.{module}"))
    chosen = [one for one in tables if not table or one.name == name]
    if not chosen:
        raise ValueError(f"no table {name!r}: choose from {', '.join(one.name for one in tables)}")
    return chosen


def rivals(consulted: Consulted, gpu: GPU, nearest: int | None = None) -> list[Row]:
    """Rows that could replace the taken row for a problem.

    Args:
        nearest: maximal number of rows on either side of the taken row in the table; None for all.
    """
    table, problem, choice = consulted
    rows = table.candidates(problem, gpu)
    chosen = [table.chosen(row, problem, gpu) for row in rows]
    at = [(one.kernel, one.config) for one in chosen].index((choice.kernel, choice.config))
    return [row for n, row in enumerate(rows) if n != at and (nearest is None or abs(n - at) <= nearest)]


@torch.inference_mode()
def time_tables(
    runner: ModelRunner,
    tables: Sequence[Table],
    sizes: Iterable[tuple[int, int, int]],
    repeats: int = 20,
    nearest: int | None = None,
) -> Iterator[TableTiming]:
    """Times the rows of ``tables`` that can serve the problems of steps, each problem in the first step that has it.

    The launches of all stages of a step are recorded before the first is timed, so that their kernels compile in
    parallel.

    Args:
        sizes: of the steps: sequences, new tokens of each sequence, and its length after the step.
        nearest: as in `rivals`.

    Raises:
        ValueError: sizes that the runner was not made for.
    """
    here, seen, given_up = gpu(runner.device), set(), set()
    for size in dict.fromkeys(sizes):
        with _stages(runner, *size) as stages:
            found = [(stage, calls, recorded_rows(calls, tables, here, nearest, seen)) for stage, calls in stages]
            launched = [variants for *_, stage in found for _, rows in stage.values() for _, variants in rows]
            compile_missing(launched, given_up)
            for stage, calls, recorded in found:
                for (name, problem), (lookups, rows) in sorted(recorded.items(), key=lambda item: item[0][0]):
                    compiled = [row for row, variants in rows if all(variant.is_cached() for variant in variants)]
                    if compiled:
                        taken, *others = _time_rows(calls, lookups[0], compiled, repeats)
                        counts = len(lookups), len(calls) - 1  # the first call only drops shared results
                        yield TableTiming(name, _fields(problem), stage, *counts, *size, taken, tuple(others))


@contextmanager
def _stages(runner: ModelRunner, batch: int, tokens: int, context: int) -> Iterator[list[tuple[str, Calls]]]:
    """The stages of a step of ``batch`` sequences, with the calls of each."""
    check_sizes(runner, batch, tokens, context)
    with reserved_sequences(runner, batch, tokens, context) as caches, runner.op_settings():
        metadata, last_rows = step_metadata(runner, caches, StepShape(batch, tokens, context))
        stages = stage_calls(runner, metadata, last_rows).items()
        # results that calls share are computed anew: those of recorded launches were never written
        yield [(stage, [metadata.forget_results, *calls]) for stage, calls in stages]


def recorded_rows(
    calls: Calls, tables: Sequence[Table], here: GPU, nearest: int | None, seen: set[Any]
) -> RecordedRows:
    """Records the lookups of ``calls`` in ``tables``, and the launches with each rival of each new problem.

    Args:
        seen: problems to skip, by (table name, problem); new problems are added.
    """
    from deepseek_attn.runner.ahead.recording import recorded_launches  # imports triton

    found: RecordedRows = {}
    with recorded_launches(here) as launches:
        with recorded_choices() as choices:
            for call in calls:
                call()
        for one in choices:
            key = one.table.name, one.problem
            if one.table in tables and key not in seen:
                found.setdefault(key, ([], []))[0].append(one)
        taken = list(launches.latest)
        for (table, problem), (lookups, rows) in found.items():
            seen.add((table, problem))
            for row in rivals(lookups[0], here, nearest):
                launches.latest.clear()
                with forced_row(lookups[0].table, row, problem):
                    for call in calls:
                        call()
                rows.append((row, taken + list(launches.latest)))
    return found


def compile_missing(launched: Iterable[Sequence[Variant]], given_up: set[str]) -> None:
    """Compiles the kernels that Triton's cache lacks, in parallel.

    Args:
        given_up: keys of kernels to skip, since they failed before; kernels that fail now are added.
    """
    from deepseek_attn.runner.ahead.pool import compile_all

    def report(**event: Any) -> None:
        for problem in event.get("failed", ()):
            logger.warning("rows are left out: %s", problem)
            given_up.update(event["done"])

    variants = {variant.key: variant for variants in launched for variant in variants}
    missing = [variant for key, variant in variants.items() if key not in given_up and not variant.is_cached()]
    compile_all(missing, default_workers(), report, seconds=COMPILE_SECONDS)


def _time_rows(calls: Calls, consulted: Consulted, rows: Sequence[Row], repeats: int) -> Iterator[RowTiming]:
    """Timings of the taken row, then of ``rows``. Replays alternate between rows: clock changes affect all alike."""
    table, problem, taken = consulted
    device = torch.device("cuda", torch.cuda.current_device())
    choices, graphs = [taken], [captured(calls)]
    for row in rows:
        with forced_row(table, row, problem):
            graphs.append(captured(calls))
        choices.append(table.chosen(row, problem, gpu(device)))
    times: list[list[float]] = [[] for _ in graphs]
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            found += _replay_times(graph, 3, flushed)
    for choice, found in zip(choices, times, strict=True):
        yield RowTiming.of(choice, found)


def _replay_times(graph: torch.cuda.CUDAGraph, count: int, flushed: torch.Tensor) -> list[float]:
    """Microseconds of replays that find no weight in the L2 cache; a first one is not counted."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(1 + count)]
    for before, after in marks:
        flushed.zero_()
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize(flushed.device)
    return [before.elapsed_time(after) * 1e3 for before, after in marks[1:]]


def json_lines(data: dict[str, Any]) -> str:
    """JSON with a line for each item of ``data``, and for each row of a table."""

    def text(value: Any) -> str:
        rows = ",".join(f"\n  {json.dumps(row)}" for row in value) if isinstance(value, list) else ""
        return f"[{rows}\n ]" if rows else json.dumps(value)

    return "{" + ",".join(f"\n {json.dumps(name)}: {text(value)}" for name, value in data.items()) + "\n}\n"


def _fields(problem: Any) -> dict[str, Any]:
    """A problem's fields as JSON has them."""
    if not is_dataclass(problem):
        return {"problem": repr(problem)}
    return {
        name: value if isinstance(value, int | str | bool) else repr(value) for name, value in vars(problem).items()
    }
