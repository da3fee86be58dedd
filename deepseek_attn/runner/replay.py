"""Replays: recorded experts and entries instead of the choices of a model's routers and indexers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from deepseek_attn.config.options import is_integer
from deepseek_attn.runner.token_records import ChoosingLayers, RouterSize, TokenRecords

CHECKED_ROWS = 4096  # that are looked at together
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Replayed = TokenRecords | str | Path
"""Records to replay, or the file of such."""


@dataclass(frozen=True, eq=False)
class Replay:
    """Experts and entries that a sequence is computed with, checked for a model and a prompt.

    A row of -1 is left to the model. So is each token behind the last row and, where the records have token ids, from
    the first token on that is another one.

    Attributes:
        token_ids: of the rows; None: rows count for any tokens.
        experts: integers ``[n, layers, k]``; selections: integers ``[n, layers, any width]``, in any order; or None.
        route_columns, selection_columns: the column of each layer.
    """

    token_ids: list[int] | None
    experts: Tensor | None
    selections: Tensor | None
    route_columns: dict[int, int]
    selection_columns: dict[int, int]

    @classmethod
    def create(cls, given: Replayed, found: ChoosingLayers, prompt: Sequence[int]) -> Self:
        """Checks records for a model's layers and a prompt.

        Arrays may be NumPy's. A list of layers may be left out where the records have a column for each layer.

        Raises:
            ValueError: records of other tokens, or of fewer than the prompt has; shapes, layers or dtypes that are not
                this model's; an expert that does not exist or occurs twice; an entry that is not complete at its token,
                occurs twice, or is missing.
        """
        if isinstance(given, (str, Path)):
            given = TokenRecords.load(given)
        if not isinstance(given, TokenRecords):
            raise ValueError(f"replay is a {type(given).__name__}: pass TokenRecords or the path of their file")
        if given.experts is None and given.selections is None:
            raise ValueError(f"replay: {given} has neither experts nor selections")
        experts, routes = _checked_array("experts", given.experts, given.route_layers, list(found.routers))
        selections, selectors = _checked_array(
            "selections", given.selections, given.selection_layers, list(found.selectors)
        )
        for name, array in (("experts", experts), ("selections", selections)):
            if array is not None and len(array) < len(prompt):
                raise ValueError(
                    f"replay: {name} of {len(array)} tokens, and the prompt has {len(prompt)}: pass as many tokens, or "
                    "add rows of -1, which the model chooses itself (the last generated token of a request has no row)"
                )
        token_ids = None if given.token_ids is None else np.asarray(given.token_ids).tolist()
        replay = cls(token_ids, experts, selections, routes, selectors)
        for position, (token, recorded) in enumerate(zip(prompt, token_ids or (), strict=False)):
            if token != recorded:
                raise ValueError(
                    f"replay: token {position} of the prompt is {token}, and that of the records {recorded}"
                )
        replay._check_experts(found.routers)
        replay._check_selections(found)
        return replay

    def same_tokens(self, tokens: Sequence[int], start: int, end: int) -> int:
        """End of the part of tokens ``start`` to ``end`` of a sequence that the rows are of."""
        if self.token_ids is None:
            return end
        mine = self.token_ids[:end]
        if mine == tokens[:end]:
            return end
        return next((i for i, (a, b) in enumerate(zip(mine, tokens, strict=False)) if a != b), len(mine))

    def experts_of(self, layer: int, start: int, end: int) -> Tensor | None:
        """Expert ids int64 ``[<= end - start, k]`` of tokens, or None for a layer whose router chooses."""
        return None if self.experts is None else _rows(self.experts, self.route_columns.get(layer), start, end)

    def selection_of(self, layer: int, start: int, end: int) -> Tensor | None:
        """Entries int64 ``[<= end - start, any width]`` of tokens, ascending, then -1; None: the indexer selects."""
        if self.selections is None:
            return None
        rows = _rows(self.selections, self.selection_columns.get(layer), start, end)
        if rows is None:
            return None
        last = torch.iinfo(torch.int64).max
        rows = torch.where(rows < 0, last, rows).sort(dim=1).values
        return torch.where(rows == last, -1, rows)

    def _check_experts(self, routers: Any) -> None:
        for layer, column in self.route_columns.items():
            size: RouterSize = routers[layer]
            if self.experts is not None and self.experts.shape[2] != size.topk:
                raise ValueError(
                    f"replay: experts have {self.experts.shape[2]} columns per layer, and a token of layer {layer} has "
                    f"{size.topk} experts"
                )
            for start, rows in _blocks(self.experts, column):
                outside = (rows < -1) | (rows >= size.experts)
                _refuse(
                    outside.any(1),
                    start,
                    f"experts of layer {layer}",
                    f"an id outside of 0 to {size.experts - 1}",
                    rows,
                )
                part = (rows < 0).any(1) & (rows >= 0).any(1)
                _refuse(part, start, f"experts of layer {layer}", "ids and -1: a row has all experts or none", rows)
                if not size.hashed:
                    twice = (rows.sort(dim=1).values.diff(dim=1) == 0).any(1) & (rows >= 0).all(1)
                    _refuse(twice, start, f"experts of layer {layer}", "an expert twice", rows)

    def _check_selections(self, found: ChoosingLayers) -> None:
        for layer, column in self.selection_columns.items():
            ratio, where = found.selectors[layer], f"selection of layer {layer}"
            for start, rows in _blocks(self.selections, column):
                position = torch.arange(start, start + len(rows), dtype=torch.int64, device="cpu")
                complete = (position + 1) // ratio
                future = ((rows < -1) | (rows >= complete.unsqueeze(1))).any(1)
                unit = "a token after it" if ratio == 1 else f"an entry of {ratio} tokens that is not complete at it"
                _refuse(future, start, where, f"{unit}, or an id below -1", rows)
                given = (rows >= 0).sum(1)
                ordered = rows.sort(dim=1).values
                twice = ((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any(1)
                _refuse(twice, start, where, "an entry twice", rows)
                wrong = (given > 0) & (given != complete.clamp(max=found.topk))
                _refuse(wrong, start, where, f"not as many entries as the model reads: all, or {found.topk}", rows)


def _checked_array(
    name: str, given: Any, layers: Sequence[int], known: list[int]
) -> tuple[Tensor | None, dict[int, int]]:
    """An array ``[n, layers, k]`` of integers, and the column of each layer."""
    if given is None:
        return None, {}
    try:
        array = given if isinstance(given, Tensor) else torch.from_numpy(np.asarray(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"replay: {name} is a {type(given).__name__}, not an array: {error}") from error
    if array.dim() != 3 or array.dtype not in INTEGERS or array.device.type != "cpu":
        raise ValueError(
            f"replay: {name} is {array.dtype} {list(array.shape)} on {array.device}: must be integers [tokens, layers, "
            "ids] on the CPU"
        )
    numbers = list(layers) if layers else known
    list_name = "route_layers" if name == "experts" else "selection_layers"
    if array.shape[1] != len(numbers):
        raise ValueError(
            f"replay: {name} has columns for {array.shape[1]} layers, and {list_name} "
            f"{'has' if layers else 'was not given; the model has'} {numbers}"
        )
    wrong = [number for number in numbers if not is_integer(number) or number not in known]
    if wrong or len(set(numbers)) < len(numbers):
        raise ValueError(f"replay: {list_name}={numbers}: the layers of this model that choose are {known}; each once")
    return array, {int(number): column for column, number in enumerate(numbers)}


def _rows(array: Tensor, column: int | None, start: int, end: int) -> Tensor | None:
    return None if column is None else array[start:end, column].to(torch.int64)


def _blocks(array: Tensor | None, column: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows int64) of one layer."""
    if array is None:
        return
    for start in range(0, len(array), CHECKED_ROWS):
        rows = _rows(array, column, start, start + CHECKED_ROWS)
        if rows is not None:
            yield start, rows


def _refuse(wrong: Tensor, start: int, where: str, what: str, rows: Tensor) -> None:
    """ValueError that names the first token for which ``wrong`` is set."""
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(f"replay: {where} has, for token {start + place}, {what}: {rows[place].tolist()!s:.120}")
