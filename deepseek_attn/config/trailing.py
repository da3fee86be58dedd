"""Rows of a prompt that each layer has to compute: all of them, or the trailing ones alone.

The result of a row needs, in each layer, the keys of the rows in its window. So a layer above all layers that make
entries is needed at ``window - 1`` rows more than the layer after it, and at no earlier row. Layers up to the last one
that makes entries are needed at every row: later rows may read any entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_attn.config.model import AnySpec
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.config.v41 import V41LayerSpec


def layer_reach(specs: Sequence[AnySpec], window: int) -> tuple[int | None, ...]:
    """How many rows before a row of results each layer's input is needed at; None: at all rows.

    Args:
        specs: of the backbone layers, in order.
        window: tokens that a query sees, itself included.
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
        layer: number of the first one.
        reach: they compute the rows from ``reach`` before the first row of results on.
        queries_only: the layer alone, which makes keys and entries of all rows, and queries of the trailing rows.
    """

    layer: int
    reach: int
    queries_only: bool = False


def trailing_parts(
    specs: Sequence[AnySpec], window: int, drafts: bool = False, approximate: bool = False
) -> tuple[TrailingPart, ...]:
    """Parts of a V4.1 model in which fewer and fewer rows are computed, in order; none for models of other families.

    The first part is the last layer that makes entries. A part begins wherever a layer selects anew: what a layer
    selected is read by layers with the same rows.

    Args:
        specs: of the loaded backbone layers, in order.
        drafts: a drafter makes window keys of streams of these layers, so that each part has one window of rows.
        approximate: all parts compute one window of rows, so that results are not exact.
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
