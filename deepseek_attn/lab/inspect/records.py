"""Records of an inspection. Its JSON has the same fields, and ``text``; numbers there have six significant digits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MADE_BY = "deepseek-attn inspect"  # begins the JSON: such a file may be replaced
RECENT = 128
"""Tokens up to the query's own that `Shares.recent` counts."""
DIGITS = 6  # significant ones, in JSON


@dataclass(frozen=True)
class Shares:
    """Parts of the attention of one head, in [0, 1]: ``sink + window + entries`` is 1.

    Attributes:
        sink: share on the attention sink, which has no value (V3.2: 0).
        window: share on tokens of the sliding window (V3.2, which has no window: 0).
        entries: share on entries: V4's compressed entries, or V3.2's tokens.
        recent: part of ``entries`` on the last `RECENT` tokens, for models without a window; else None.
    """

    sink: float
    window: float
    entries: float
    recent: float | None


@dataclass(frozen=True)
class HeadRead:
    """Reads of one query in one head, or in the mean of the heads.

    Attributes:
        shares: attention by kind of key.
        tokens, token_weights: positions of window tokens and their weights: the largest, at most `Inspection.top`.
        entries, entry_weights: numbers of entries and their weights: the largest, at most `Inspection.top`.
    """

    shares: Shares
    tokens: list[int]
    token_weights: list[float]
    entries: list[int]
    entry_weights: list[float]


@dataclass(frozen=True)
class IndexRead:
    """Selection of the indexer for one query that sees more entries than it may read.

    Attributes:
        visible: entries that the query sees.
        lowest_selected: the lowest score of a selected entry.
        recall: part of the ``topk`` entries with the largest dense weights that were selected; kept: part of the dense
            attention to entries that falls on the selected ones. Dense: with the same queries and keys, all visible
            entries read.
        entries: numbers of the entries with the highest scores or the largest dense weights, each with its score, its
            dense weight (the mean of the heads) and whether it was selected; highest score first.
    """

    visible: int
    lowest_selected: float
    recall: float
    kept: float
    entries: list[int]
    scores: list[float]
    dense_weights: list[float]
    selected: list[bool]


@dataclass(frozen=True)
class LayerRead:
    """Reads of one query in one layer: by head, and in the mean of the heads; ``index`` if the indexer selected."""

    layer: int
    heads: list[HeadRead]
    mean: HeadRead
    index: IndexRead | None


@dataclass(frozen=True)
class QueryRead:
    """Reads of the token at ``position``, by layer."""

    position: int
    layers: list[LayerRead]


@dataclass(frozen=True)
class IndexSummary:
    """Means of the fields of `IndexRead` over the ``queries`` that see more entries than they may read."""

    queries: int
    recall: float
    recall_of_chance: float
    kept: float


@dataclass(frozen=True)
class LayerSummary:
    """One layer over all queries.

    Attributes:
        layer: its number; kind: ``SWA``, ``C4A``, ``C128A``, ...; V3.2: ``DSA``, and ``MLA`` without an indexer.
        ratio: tokens of an entry; entry e is made of tokens ``e * ratio`` to ``(e + 1) * ratio - 1``, and with
            ``overlap`` also of the ``ratio`` tokens before them. 0: no entries.
        index_topk: entries that the indexer selects; None without one.
        heads: means of the shares over all queries, by head.
        index: None without an indexer, or if every query read all visible entries.
        error: largest difference between the attention output of the layer and the output of these weights, relative to
            the largest output.
    """

    layer: int
    kind: str
    ratio: int
    overlap: bool
    index_topk: int | None
    heads: list[Shares]
    index: IndexSummary | None
    error: float


@dataclass(frozen=True)
class Inspection:
    """Reads of the tokens of one sequence.

    Attributes:
        model_type: of the config; window: tokens of the sliding window, 0 without one.
        backend: impl that attended; numerics: name of the runner's.
        top: weights of a kind that are kept per query, layer and head.
        token_ids: the sequence.
        layers: of the inspected layers; queries: of the chosen tokens, in order.
    """

    model_type: str
    window: int
    backend: str
    numerics: str
    top: int
    token_ids: list[int]
    layers: list[LayerSummary]
    queries: list[QueryRead]

    def to_json(self, text: list[str] | None = None) -> dict[str, Any]:
        """Values that `json.dumps` takes; ``text``: text of each token, None without a tokenizer."""
        return {"made_by": MADE_BY, "text": text, **_rounded(asdict(self))}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
