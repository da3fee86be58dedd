"""Rows on a device for routed experts that are kept elsewhere, divided over the layers of a model.

All layers whose experts have the same tensors share stacks. Each layer keeps S of its E experts in rows of its own.
Behind these rows are areas of E - S rows, which layers use in turn, for experts that one call alone needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.moe.types import ExpertStack, expert_parts
from deepseek_attn.utils.sizes import largest

HOST_AREAS = 2  # for the layer that computes, and for the next one's copies
FILE_AREAS = 1

Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]
"""w1, w3 and w2."""


class ExpertFormat(NamedTuple):
    """Layers whose experts have the same tensors.

    Attributes:
        experts: E; nbytes: of one expert; layers, areas: their number.
    """

    experts: int
    nbytes: int
    layers: int
    areas: int

    def rows(self, cached: int) -> int:
        """All rows if each layer keeps this number of experts, or all that it has."""
        cached = min(cached, self.experts)
        return self.layers * cached + self.areas * (self.experts - cached)

    def held(self, cached: int) -> int:
        """Bytes of `rows`."""
        return self.nbytes * self.rows(cached)


class RowRange(NamedTuple):
    """Rows of one layer.

    Attributes:
        stacks: on the device; shared with other layers.
        first, cached: the layer's own rows; staged, area: the first row of the area that it uses, and its number.
    """

    stacks: Stacks
    first: int
    cached: int
    staged: int
    area: int


class DividedRows(NamedTuple):
    """Rows of all layers.

    Attributes:
        layers: in the order in which they were given.
        nbytes: of all rows; cached: experts that each layer keeps, or all that it has.
    """

    layers: list[RowRange]
    nbytes: int
    cached: int


def expert_formats(experts: Sequence[Stacks], areas: int) -> list[tuple[ExpertFormat, list[int]]]:
    """The formats of layers with these stacks ``[E, ...]``, each with the numbers of its layers."""
    kinds: dict[Any, list[int]] = {}
    for number, layer in enumerate(experts):
        parts = tuple(None if part is None else (part.dtype, part.shape[1:]) for stack in layer for part in stack)
        kinds.setdefault((len(layer[0].weight), parts), []).append(number)

    def nbytes(layer: Stacks) -> int:
        return sum(part[0].nbytes for part in expert_parts(layer))

    return [
        (ExpertFormat(E, nbytes(experts[found[0]]), len(found), min(areas, len(found))), found)
        for (E, _), found in kinds.items()
    ]


def cached_experts(formats: Sequence[ExpertFormat], budget: int) -> int:
    """The largest number of experts that each layer may keep within ``budget`` bytes on the device.

    Raises:
        ValueError: the budget is below one expert of each layer.
    """

    def held(cached: int) -> int:
        return sum(form.held(cached) for form in formats)

    cached = largest(lambda count: held(max(count, 1)) <= budget, 0, max(form.experts for form in formats))
    if not cached:
        layers, areas = sum(form.layers for form in formats), max(form.areas for form in formats)
        raise ValueError(
            f"{budget:,} bytes of GPU memory for routed experts: the least is {held(1):,}, for one expert of each of "
            f"{layers} layers, and {'' if areas == 1 else 'twice '}the other experts of a layer, which prompts are "
            "computed from. Raise expert_cache_bytes, free GPU memory, or use more ranks"
        )
    return cached


def divide_rows(experts: Sequence[Stacks], device: torch.device, budget: int | None, areas: int) -> DividedRows:
    """Allocates rows for layers with stacks like ``experts [E, ...]``, whose values are not read.

    Args:
        budget: bytes on the device; None: each layer keeps one expert (for a model without memory).

    Raises:
        ValueError: see `cached_experts`.
    """
    kinds = expert_formats(experts, areas)
    cached = 1 if budget is None else cached_experts([form for form, _ in kinds], budget)
    layers: dict[int, RowRange] = {}
    for form, found in kinds:
        own = min(cached, form.experts)
        stacks = _empty_rows(experts[found[0]], form.rows(cached), device)
        for place, number in enumerate(found):
            area = place % form.areas
            staged = len(found) * own + area * (form.experts - own)
            layers[number] = RowRange(stacks, place * own, own, staged, area)
    nbytes = sum(form.held(cached) for form, _ in kinds)
    return DividedRows([layers[number] for number in range(len(experts))], nbytes, cached)


def _empty_rows(stacks: Stacks, rows: int, device: torch.device) -> Stacks:
    """Empty stacks of ``rows`` experts, formats as in ``stacks``."""

    def empty(part: Tensor) -> Tensor:
        return torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=device)

    w1, w3, w2 = (
        ExpertStack(empty(weight), *(None if part is None else empty(part) for part in others))
        for weight, *others in stacks
    )
    return w1, w3, w2
