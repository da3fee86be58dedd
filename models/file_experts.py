"""Routed experts in the checkpoint's files: the rows on a GPU that hold some of them, filled as the routing is known.

All layers whose experts have the same tensors share stacks on the device. Each layer keeps S of its E experts in rows
of its own; one area of E - S rows behind them holds what a call needs beyond these, until the next call. The host waits
for the routing of each layer, threads read what the device lacks, and copies go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.moe import ExpertStack
from deepseek_attn.kernels.moe.types import expert_parts
from deepseek_attn.layers.expert_files import ExpertReaders, StoredPair, count_uses
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.utils.device import to_device
from deepseek_attn.utils.sizes import largest

Projections = tuple[ExpertLinear, ExpertLinear, ExpertLinear]
"""w1, w3 and w2, as `moe_experts` takes them."""
AHEAD = 8  # experts whose reads are begun before the first of them is copied


class FileExperts:
    """The experts of one layer, for its `moe_experts`.

    Attributes:
        stacks: on the device; shared with other layers.
        first, cached: the layer's own rows; staged: the first row of the common area.
        row: row of each expert that the layer keeps, by number.
    """

    def __init__(
        self,
        projections: Projections,
        stacks: tuple[ExpertStack, ExpertStack, ExpertStack],
        first: int,
        cached: int,
        staged: int,
        readers: ExpertReaders,
    ):
        self.stacks, self.first, self.cached, self.staged = stacks, first, cached, staged
        self.row: dict[int, int] = {}
        self._projections, self._readers = projections, readers
        self._uses = dict.fromkeys(projections[0].unread, 0)
        self._device = stacks[0].weight.device

    def find(self, experts: Tensor) -> Tensor:
        """The row of each expert of a routing ``[T, k]``, int32 ``[E]``, once they are read and their copies launched.

        Of the experts that the call does not need, those with the smallest count of use make room, of equal ones the
        lowest number; rows without an expert are taken first. What has no room goes to the common area.
        """
        count = self._projections[0].experts
        if experts.is_meta:
            return torch.empty(count, dtype=torch.int32, device=experts.device)
        found = experts.unique(return_counts=True)
        tokens = {e: n for e, n in zip(*(part.tolist() for part in found), strict=True) if e >= 0}
        count_uses(self._uses, tokens)
        missing = [expert for expert in tokens if expert not in self.row]
        self._readers.stats.count(len(tokens) - len(missing), len(tokens))
        taken = set(self.row.values())
        free = [row for row in range(self.first, self.first + self.cached) if row not in taken]
        victims = sorted((e for e in self.row if e not in tokens), key=lambda e: (self._uses[e], e))
        passing: dict[int, int] = {}
        for expert, parts in zip(missing, self._read(missing), strict=True):
            if free or victims:
                row = free.pop(0) if free else self.row.pop(victims.pop(0))
                self._fill(row, parts)
                self.row[expert] = row
            else:
                passing[expert] = row = self.staged + len(passing)
                self._fill(row, parts)
        rows = self.row | passing
        return to_device([rows.get(expert, 0) for expert in range(count)], self._device, torch.int32)

    def _read(self, experts: list[int]) -> Iterator[list[StoredPair]]:
        """Weights and scales of each expert's projections; the next experts are being read."""
        futures: list[list[Future[StoredPair]]] = []
        try:
            for place in range(len(experts)):
                for expert in experts[len(futures) : place + AHEAD]:
                    futures.append([self._readers.read(linear.unread[expert]) for linear in self._projections])
                yield [future.result() for future in futures[place]]
                futures[place] = []
        finally:
            for future in (future for of_expert in futures for future in of_expert):
                future.cancel()

    def _fill(self, row: int, parts: list[StoredPair]) -> None:
        """Launches copies of an expert to a row."""
        for linear, stack, pair in zip(self._projections, self.stacks, parts, strict=True):
            weight, scale = pair
            weight = _sent(weight, self._device)
            weight, scale = linear.convert(weight, None if scale is None else _sent(scale, self._device))
            exponent = None
            if stack.exponent is not None and scale is not None:
                exponent, scale = linear.exponents(weight, scale)
            for target, part in zip(stack, (weight, scale, exponent), strict=True):
                if target is not None and part is not None:
                    target[row].copy_(part, non_blocking=True)


def _sent(part: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part


def keep_on_device(
    layers: Sequence[Projections], device: torch.device, budget: int, readers: ExpertReaders
) -> tuple[list[FileExperts], int, int]:
    """Allocates rows for layers whose experts are in files.

    Args:
        budget: bytes on the device.

    Returns:
        the experts of each layer; how many each layer keeps, or all that it has; bytes of all rows.

    Raises:
        ValueError: the budget does not suffice for one expert of each layer, and the common area.
    """
    kinds: dict[Any, list[int]] = {}
    templates = [(_template(w1), _template(w3), _template(w2)) for w1, w3, w2 in layers]
    for number, stacks in enumerate(templates):
        parts = tuple(None if part is None else (part.dtype, part.shape) for stack in stacks for part in stack)
        kinds.setdefault((layers[number][0].experts, parts), []).append(number)

    def rows_of(kind: Any, cached: int) -> tuple[int, int]:
        """Rows that each layer keeps, and all rows of its kind."""
        own = min(cached, kind[0])
        return own, len(kinds[kind]) * own + kind[0] - own

    def held(cached: int) -> int:
        stacks = {kind: templates[found[0]] for kind, found in kinds.items()}
        return sum(rows_of(kind, cached)[1] * sum(p.nbytes for p in expert_parts(stacks[kind])) for kind in kinds)

    most = max(kind[0] for kind in kinds)
    cached = largest(lambda count: held(max(count, 1)) <= budget, 0, most)
    if not cached:
        raise ValueError(
            f"{budget:,} bytes of GPU memory for routed experts: the least is {held(1):,}, for one expert of each of "
            f"{len(layers)} layers, and the other experts of a layer, which prompts are computed from. Raise "
            "expert_cache_bytes, free GPU memory, or use more ranks"
        )
    made: dict[int, FileExperts] = {}
    for kind, found in kinds.items():
        own, rows = rows_of(kind, cached)
        w1, w3, w2 = (_empty_stack(rows, template, device) for template in templates[found[0]])
        stacks = w1, w3, w2
        for place, number in enumerate(found):
            made[number] = FileExperts(layers[number], stacks, place * own, own, len(found) * own, readers)
    return [made[number] for number in range(len(layers))], cached, held(cached)


def _empty_stack(rows: int, template: ExpertStack, device: torch.device) -> ExpertStack:
    def empty(part: Tensor | None) -> Tensor | None:
        return None if part is None else torch.empty((rows, *part.shape), dtype=part.dtype, device=device)

    return ExpertStack(*(empty(part) for part in template))  # pyright: ignore[reportArgumentType]  # a weight is there


def _template(linear: ExpertLinear) -> ExpertStack:
    """One expert's tensors without values; with exponents of rows if all experts of the layer have them."""
    if linear.template is None:
        raise RuntimeError("the experts of a layer have no tensors yet: load the model first")
    weight, scale = linear.template
    has_exponents = scale is not None and weight.dtype == torch.uint8 and linear.all_have_exponents()
    return ExpertStack(weight, scale, scale[:, 0] if has_exponents and scale is not None else None)
