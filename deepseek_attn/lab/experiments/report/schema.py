"""The JSON of a report, ``report.json``: the input of tables, plots and the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NotRequired, TypedDict

from deepseek_attn.lab.experiments.define.results import (
    CheckpointResult,
    ContextSums,
    LayerCost,
    LengthRow,
    PositionRow,
    RecallRow,
    TimesResult,
)


class Spread(TypedDict):
    """One number over the seeds; ``std``: sample standard deviation, 0 for one value."""

    mean: float
    std: NotRequired[float]
    low: float
    high: float
    values: NotRequired[list[float]]


class ContextRow(ContextSums):
    """Costs of a schedule at one context length; times are sums over its attention layers, None where not measured."""

    bytes_per_token: float
    decode_ms: float | None
    prefill_ms: float | None


class LayerRow(LayerCost):
    """Costs of one layer; reads, FLOPs and times at the longest context."""

    read_bytes: int
    flops: int
    decode_ms: float | None
    prefill_ms: float | None


class CostSection(TypedDict):
    """Costs of a schedule: marginal bytes ``per_token``, ``fixed`` bytes per sequence."""

    per_token: float
    fixed: int
    contexts: list[ContextRow]
    layers: list[LayerRow]


class LengthSpread(LengthRow):
    """Means over the seeds at one sequence length, with the lowest and highest."""

    loss_low: float
    loss_high: float
    accuracy_low: float
    accuracy_high: float


class TaskQuality(TypedDict):
    """A schedule trained on one task, over seeds; ``curve`` has [step, mean, low, high] of the training loss.

    ``answers``: held-out tokens per seed that ``loss`` and ``accuracy`` are over. ``chance``: accuracy of guessing;
    None for text.
    """

    answers: int
    chance: float | None
    seeds: list[int]
    parameters: int
    steps: list[int]
    loss: Spread
    accuracy: Spread
    curve: list[list[float]]
    by_length: list[LengthSpread]
    by_position: list[PositionRow]
    layers: list[RecallRow]


class VariantReport(TypedDict):
    """Everything known of one schedule, as far as it has been measured. ``number`` names it in plots."""

    number: int
    name: str
    schedule: str
    ratios: list[int]
    window: int
    long_range: bool
    cost: NotRequired[CostSection]
    model_time: NotRequired[TimesResult]
    checkpoint: NotRequired[CheckpointResult]
    tasks: NotRequired[dict[str, TaskQuality]]


class Front(TypedDict):
    """A Pareto front of a quality against a cost at ``context`` tokens: names of ``variants``, cheapest first."""

    quality: str
    cost: str
    context: int
    higher: bool
    variants: list[str]


class Shape(TypedDict):
    """The sizes of a model that a report names."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    sliding_window: int
    index_topk: int
    vocab_size: int


class CostModel(Shape):
    """The model whose costs are counted at all ``contexts``, and how they are timed at those up to ``time_up_to``."""

    name: str
    numerics: str
    contexts: list[int]
    time_up_to: int
    batch: int
    prefill: int
    repeats: int


class BeyondWindow(TypedDict):
    """One task whose answers lie at least ``gap`` tokens back: the best schedules without and with compressed entries.

    Schedules that are equal to the best within their errors (`is_equal`) are named with it; accuracies are the highest.

    ``reach``: how far the former's layers pass information on, window x layers.
    """

    task: str
    gap: int
    window: int
    reach: int
    window_only: list[str]
    window_only_accuracy: Spread
    best: list[str]
    best_accuracy: Spread


class Difference(TypedDict):
    """A number of one variant in two reports; ``equal``: whether errors explain the difference of a quality."""

    number: int
    variant: str
    quantity: str
    here: float
    there: float
    difference: float
    equal: bool


class Comparison(TypedDict):
    """Comparison of this report with the report of another folder, ``name``, by variants of the same name."""

    name: str
    rows: list[Difference]


class UnitCounts(TypedDict):
    """Number of units, number of finished units, their seconds, and the names of unfinished units."""

    total: int
    done: int
    seconds: float
    missing: list[str]


class Report(TypedDict):
    """The whole document; ``own`` is the quality of the checkpoint's own schedule."""

    made_by: str
    name: str
    title: str
    device: str
    seeds: list[int]
    base: Shape
    cost_model: CostModel | None
    units: UnitCounts
    variants: list[VariantReport]
    own: CheckpointResult | None
    fronts: list[Front]
    beyond_window: list[BeyondWindow]
    against: NotRequired[Comparison]


def tasks(report: Report) -> list[str]:
    """Names of the tasks that any variant was trained on."""
    return list(dict.fromkeys(task for variant in report["variants"] for task in variant.get("tasks", {})))


class Trained(NamedTuple):
    """A variant that was trained on a task, and how well it does."""

    variant: VariantReport
    quality: TaskQuality


def with_task(report: Report, task: str) -> list[Trained]:
    """The variants that were trained on ``task``."""
    found = [(variant, variant.get("tasks", {}).get(task)) for variant in report["variants"]]
    return [Trained(variant, quality) for variant, quality in found if quality is not None]


def recall_rows(report: Report) -> Iterator[tuple[str, VariantReport, RecallRow]]:
    """Attention recall of layers: (task or ``checkpoint``, variant, one layer's row), source by source."""
    for source in [*tasks(report), "checkpoint"]:
        for variant in report["variants"]:
            found = variant.get("checkpoint") if source == "checkpoint" else variant.get("tasks", {}).get(source)
            for row in (found or {}).get("layers", []):
                yield source, variant, row
