"""Results of units: the JSON of a record's ``result`` by kind of unit, and the record around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from deepseek_attn.utils.typed_json import find_problem


class UnitRecord(TypedDict):
    """One JSON file per unit. ``fingerprint`` is `Unit.fingerprint`: a record of other inputs does not count.

    ``files``: `Unit.files`, where there are any.
    """

    kind: str
    name: str
    fingerprint: str
    seconds: float
    inputs: dict[str, Any]
    files: NotRequired[dict[str, str | None]]
    result: Mapping[str, Any]  # one of the classes below, by ``kind``


class LayerCost(TypedDict):
    """Bytes of one layer's caches: ``per_token`` (marginal), of which index keys, and ``fixed`` per sequence."""

    layer: int
    kind: str
    overlap: bool
    indexer: bool
    per_token: float
    index_per_token: float
    fixed: int


class LayerQuery(TypedDict):
    """Bytes that the last token of a context reads in one layer, and its FLOPs (a multiply-add is two)."""

    keys: int
    read_bytes: int
    projection_flops: int
    attention_flops: int
    index_flops: int
    flops: int


class QueryCost(LayerQuery):
    """The same, and the bytes of the layer's cache for the whole sequence."""

    sequence_bytes: int


class ContextSums(TypedDict):
    """Sums over the layers at one context length; ``sequence_bytes`` are exact, in whole pages."""

    context: int
    sequence_bytes: int
    read_bytes: int
    flops: int


class ContextCost(ContextSums):
    """The same, and the terms of the sums."""

    by_layer: list[QueryCost]


class CostResult(TypedDict):
    """Kind ``cost``."""

    per_token: float
    fixed: int
    layers: list[LayerCost]
    contexts: list[ContextCost]


class StepTimes(TypedDict):
    """Median milliseconds, and the 10th and 90th percentile; None at a context that is not timed, with a ``reason``."""

    context: int
    decode_ms: float | None
    decode_low: float | None
    decode_high: float | None
    prefill_ms: float | None
    prefill_low: NotRequired[float | None]
    prefill_high: NotRequired[float | None]
    reason: NotRequired[str]


class TimesResult(TypedDict):
    """Kinds ``layer_time``, with the layer's ``backend``, and ``model_time``; ``device``: the GPU's name or ``cpu``.

    ``graph``: whether the decodes of ``model_time`` are replays of a CUDA graph.
    """

    times: list[StepTimes]
    backend: NotRequired[str | None]
    graph: NotRequired[bool]
    device: str


class PositionRow(TypedDict):
    """Means over the ``tokens`` at positions in [start, end)."""

    start: int
    end: int
    tokens: float
    loss: float
    kl: NotRequired[float]
    top1: NotRequired[float]


class RecallRow(TypedDict):
    """Attention recall of one layer, see `LayerRecall`; None where no query has a choice."""

    layer: int
    kind: str
    token_mass: float | None
    entry_mass: float | None
    index_recall: float | None
    index_recall_of_chance: float | None


class CheckpointResult(TypedDict, total=False):
    """Kinds ``reference`` and ``checkpoint``: all but ``reason``, or only a ``reason`` why it cannot be measured.

    ``loss`` and ``kl`` in nats, ``top1`` agreement in [0, 1].
    """

    reason: str
    schedule: list[int]
    tokens: int
    loss: float
    kl: float
    top1: float
    by_position: list[PositionRow]
    layers: list[RecallRow]


class TokensResult(TypedDict):
    """Kind ``tokens``."""

    tokens: int
    vocab_size: int


class LengthRow(TypedDict):
    """Quality at one sequence length. ``trailing``: loss of the last eighth of the positions, None if none counts."""

    seq_len: int
    loss: float
    accuracy: float
    trailing: float | None
    chance: float | None


class DistanceRow(TypedDict):
    """Accuracy of the ``answers`` at one sequence length whose fact is [start, end) tokens back."""

    seq_len: int
    start: int
    end: int
    answers: float
    accuracy: float


class DepthRow(TypedDict):
    """Accuracy of the ``answers`` at one sequence length whose fact is at [depth, depth + 0.1) of the sequence."""

    seq_len: int
    depth: float
    answers: float
    accuracy: float


class Metrics(TypedDict):
    """On held-out data; with more of an MTP layer."""

    loss: float
    accuracy: float


class TrainedResult(TypedDict):
    """Kind ``train``: ``losses`` of the training as [step, loss], ``metrics`` on held-out data.

    ``together``: the seeds that were trained as one model, where there are several.
    """

    metrics: Metrics
    steps: int
    losses: list[tuple[float, float]]
    parameters: int
    answers: int
    by_length: list[LengthRow]
    by_distance: list[DistanceRow]
    by_depth: list[DepthRow]
    by_position: list[PositionRow]
    layers: list[RecallRow]
    train_seconds: float
    tokens_per_second: float
    together: NotRequired[list[int]]
    lm_eval: NotRequired[dict[str, float]]


RESULTS: dict[str, Any] = {
    "cost": CostResult,
    "layer_time": TimesResult,
    "model_time": TimesResult,
    "reference": CheckpointResult,
    "checkpoint": CheckpointResult,
    "tokens": TokensResult,
    "train": TrainedResult,
}


def find_mistake(kind: str, result: Mapping[str, Any], sizes: Mapping[str, Any]) -> str | None:
    """Reason why a report cannot use a result: a field has another type, or a list that is joined another length.

    Args:
        sizes: required lengths of the result's lists, by field: `Unit.sizes`.
    """
    if problem := find_problem(result, RESULTS[kind], "result"):
        return problem
    found = {name: [row.get(key) for row in result.get(name, ())] for name, key in ROW_KEYS.items()}
    for name, wanted in sizes.items():
        if found[name] != wanted:
            return f"result.{name} has the rows {found[name]!r:.80}: expected {wanted!r:.80}"
    for row in result["contexts"] if kind == "cost" else ():
        if len(row["by_layer"]) != len(result["layers"]):
            return f"result.contexts: by_layer has {len(row['by_layer'])} rows for {len(result['layers'])} layers"
    return None


ROW_KEYS = {"contexts": "context", "times": "context", "layers": "layer", "by_length": "seq_len"}
