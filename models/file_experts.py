"""Routed experts in the checkpoint's files: the rows on a GPU that hold some of them, filled as the routing is known.

A common area of rows holds experts that do not fit in their layer's own rows, until the next call. The host waits
for the routing of each layer, threads read the missing experts, and copies go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from deepseek_attn.kernels.moe.types import ExpertSlots, ExpertStack
from deepseek_attn.layers.expert_files import ExpertReaders, StoredPair, count_uses
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.models.expert_rows import FILE_AREAS, DividedRows, RowRange, Stacks, divide_rows
from deepseek_attn.utils.device import to_device

Projections = tuple[ExpertLinear, ExpertLinear, ExpertLinear]
"""w1, w3 and w2, as `moe_experts` takes them."""
AHEAD = 8  # experts whose reads are begun before the first of them is copied


class FileExperts:
    """The experts of one layer, for its `moe_experts`.

    Attributes:
        rows: of the layer; the area behind them is common to all layers.
        row: row of each expert that the layer keeps, by number.
    """

    def __init__(self, projections: Projections, rows: RowRange, readers: ExpertReaders):
        self.rows = rows
        self.row: dict[int, int] = {}
        self._projections, self._readers = projections, readers
        self._uses = dict.fromkeys(projections[0].unread, 0)
        self._device = rows.stacks[0].weight.device

    @property
    def stacks(self) -> Stacks:
        """Stacks on the device, which `find` names the rows of."""
        return self.rows.stacks

    def find(self, experts: Tensor) -> ExpertSlots:
        """The row of each expert of a routing ``[T, k]``; the experts have been read and their copies launched.

        Missing experts take rows without an expert first, then the rows of experts that the call does not need: the
        smallest count of uses first, at equal counts the lowest number. Experts without a row go to the common area.
        """
        count = self._projections[0].experts
        if experts.is_meta:
            return ExpertSlots(torch.empty(count, dtype=torch.int32, device=experts.device))
        found = experts.unique(return_counts=True)
        tokens = {e: n for e, n in zip(*(part.tolist() for part in found), strict=True) if e >= 0}
        count_uses(self._uses, tokens)
        missing = [expert for expert in tokens if expert not in self.row]
        self._readers.stats.count(len(tokens) - len(missing), len(tokens))
        taken = set(self.row.values())
        first, end = self.rows.first, self.rows.first + self.rows.cached
        free = [row for row in range(first, end) if row not in taken]
        victims = sorted((e for e in self.row if e not in tokens), key=lambda e: (self._uses[e], e))
        passing: dict[int, int] = {}
        for expert, parts in zip(missing, self._read(missing), strict=True):
            if free or victims:
                row = free.pop(0) if free else self.row.pop(victims.pop(0))
                self._fill(row, parts)
                self.row[expert] = row
            else:
                passing[expert] = row = self.rows.staged + len(passing)
                self._fill(row, parts)
        rows = self.row | passing
        return ExpertSlots(to_device([rows.get(expert, 0) for expert in range(count)], self._device, torch.int32))

    def release(self) -> None:
        """The layer's products are launched; copies of the next layer wait for them in order."""

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
) -> tuple[list[FileExperts], DividedRows]:
    """Allocates rows for layers whose experts are in files.

    Args:
        budget: bytes on the device.

    Raises:
        ValueError: see `cached_experts`.
    """
    templates = [(_template(w1), _template(w3), _template(w2)) for w1, w3, w2 in layers]
    divided = divide_rows(templates, device, budget, FILE_AREAS)
    pairs = zip(layers, divided.layers, strict=True)
    return [FileExperts(projections, rows, readers) for projections, rows in pairs], divided


def _template(linear: ExpertLinear) -> ExpertStack:
    """Tensors of a projection, ``[E, ...]``, without values; with exponents of rows if all its experts have them."""
    if linear.template is None:
        raise RuntimeError("the experts of a layer have no tensors yet: load the model first")
    weight, scale = (None if part is None else part.expand(linear.experts, *part.shape) for part in linear.template)
    assert weight is not None
    has_exponents = scale is not None and weight.dtype == torch.uint8 and linear.all_have_exponents()
    return ExpertStack(weight, scale, scale[..., 0] if has_exponents and scale is not None else None)
