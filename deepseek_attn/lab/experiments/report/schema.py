"""The JSON of a report, ``report.json``: the input of tables, plots and the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NotRequired, TypedDict

from deepseek_attn.lab.experiments.define.results import (
    CheckpointResult,
    ContextSums,
    DepthRow,
    DistanceRow,
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
    """Means over the seeds at one sequence length, with the lowest and highest. ``chance``: of guessing; None: text."""

    loss_low: float
    loss_high: float
    accuracy_low: float
    accuracy_high: float


class TaskQuality(TypedDict):
    """A schedule trained on one task, over seeds; ``curve`` has [step, mean, low, high] of the training loss.

    ``kind``: the task; ``size``: of the models, None for the experiment's base. ``answers``: held-out tokens per seed
    that ``loss`` and ``accuracy`` are over. ``chance``: accuracy of guessing; None for text. ``lm_eval``: by task and
    metric of lm-evaluation-harness.
    """

    kind: str
    size: str | None
    answers: int
    chance: float | None
    seeds: list[int]
    parameters: int
    steps: list[int]
    tokens: int
    loss: Spread
    accuracy: Spread
    curve: list[list[float]]
    by_length: list[LengthSpread]
    by_distance: list[DistanceRow]
    by_depth: list[DepthRow]
    by_position: list[PositionRow]
    layers: list[RecallRow]
    lm_eval: NotRequired[dict[str, Spread]]


class VariantReport(TypedDict):
    """Everything known of one schedule, as far as it has been measured. ``number`` names it in plots.

    ``attention``, ``selection``: see `ModelVariant`. ``twin``: of a control, the variant that learns its selection;
    ``parent``: of a variant with one changed layer, the variant that it changes. ``other_depth``: costs are
    counted for a model of another depth than the trained one, and layers share entries, so bytes per layer differ: such
    costs are left out of comparisons.
    """

    number: int
    name: str
    schedule: str
    attention: str
    selection: str
    twin: str | None
    parent: str | None
    ratios: list[int]
    window: int
    long_range: bool
    other_depth: NotRequired[bool]
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


class PairedDifference(TypedDict):
    """``one`` less ``other`` in a quality, over the seeds that both have; see `report.comparisons`.

    ``low``, ``high``: 95 % interval of the mean, and ``p`` its value corrected within the ``family`` (Holm); None for a
    single seed. ``exceeds``: the difference is more than noise: p below 0.05, of three seeds or more.
    """

    quality: str
    family: str
    one: str
    other: str
    seeds: list[int]
    mean: float
    low: float | None
    high: float | None
    p: float | None
    exceeds: bool


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
    question: str | None
    command: str
    device: str
    seeds: list[int]
    base: Shape
    cost_model: CostModel | None
    units: UnitCounts
    variants: list[VariantReport]
    own: CheckpointResult | None
    fronts: list[Front]
    comparisons: list[PairedDifference]
    limits: list[str]
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
