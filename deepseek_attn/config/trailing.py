"""Rows of a prompt that each layer has to compute: all rows, or only trailing rows.

In each layer, a row reads the keys of the rows in its window. So each layer above the last layer that makes entries
computes ``window - 1`` more rows than the layer after it, and no earlier rows. All other layers compute every row,
because later rows may read any entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_attn.config.model import AnySpec
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.config.v41 import V41LayerSpec


def layer_reach(specs: Sequence[AnySpec], window: int) -> tuple[int | None, ...]:
    """By layer, the number of earlier rows whose input is needed for one row of results; None: all rows.

    Args:
        specs: of the backbone layers, in order.
        window: tokens that a query sees, including itself.
    """
    reach, found = 0, list[int | None]()
    for spec in reversed(specs):
        if isinstance(spec, V32LayerSpec) or spec.owns_entries:
            break
        reach += window - 1
        found.append(reach)
    return (None,) * (len(specs) - len(found)) + tuple(reversed(found))


@dataclass(frozen=True)
class TrailingPart:
    """Consecutive layers that compute the same trailing rows of a prompt.

    Attributes:
        layer: number of the first layer.
        reach: number of computed rows before the first row of results.
        queries_only: the part is one layer, which makes keys and entries of all rows but queries of the trailing rows.
    """

    layer: int
    reach: int
    queries_only: bool = False


def trailing_parts(
    specs: Sequence[AnySpec], window: int, drafts: bool = False, approximate: bool = False
) -> tuple[TrailingPart, ...]:
    """Parts of a V4.1 model in order, with ever fewer computed rows; empty for other families.

    The first part is the last layer that makes entries. Every layer with its own selection begins a new part, because
    layers that share a selection compute the same rows.

    Args:
        specs: of the loaded backbone layers, in order.
        drafts: a drafter makes window keys from the streams of these layers: every part computes at least one window.
        approximate: every part computes at most one window of rows; results are then not exact.
    """
    if not specs or not all(isinstance(spec, V41LayerSpec) for spec in specs):
        return ()
    reach = layer_reach(specs, window)
    first = next((place for place, rows in enumerate(reach) if rows is not None), len(specs))
    parts = [TrailingPart(specs[first - 1].index, reach[first] or 0 if first < len(specs) else 0, True)] * (first > 0)
    for place in range(first, len(specs)):
        if place == first or specs[place].has_indexer:
            parts.append(TrailingPart(specs[place].index, reach[place] or 0))
    least, most = window - 1 if drafts else 0, window - 1 if approximate else parts[0].reach
    return tuple(TrailingPart(p.layer, max(min(p.reach, most), least), p.queries_only) for p in parts)
