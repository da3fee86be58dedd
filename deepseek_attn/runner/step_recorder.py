"""Records and replays in one step: layers' choices are copied to the host, or replaced, while the step is computed.

Routers and blocks are watched by torch's forward hooks, which exist for this step only; indexers call
`StepMetadata.on_selection`. So other steps do not pay for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.models.block import Backbone
from deepseek_attn.models.moe import Gate
from deepseek_attn.runner.replay import Replay
from deepseek_attn.runner.step import Batch
from deepseek_attn.runner.token_records import RecordedLayers, RecordOptions, TokenRecords


class ReplayedRows(NamedTuple):
    """Rows of a step, from ``first`` on, that are computed with tokens ``start`` to ``end`` of a replay."""

    first: int
    replay: Replay
    start: int
    end: int


class StepRecorder:
    """Records the rows of some sequences of a step, and replays the choices of some.

    Args:
        rows: (sequence, new tokens), in the order of the step's tokens.
        record, replay: of each sequence, the records wanted, and the experts and entries to use.
    """

    def __init__(
        self,
        model: Backbone,
        found: RecordedLayers,
        parallel: Parallel,
        rows: Batch,
        record: list[RecordOptions | None],
        replay: list[Replay | None],
    ):
        self.model, self.found, self.parallel = model, found, parallel
        self._wanted, self._lengths, self._tokens = record, [n for _, n in rows], list[list[int]]()
        self._replayed = list[ReplayedRows]()
        kept, first = [], 0
        for (sequence, n), wanted, played in zip(rows, record, replay, strict=True):
            start = sequence.num_computed
            self._tokens.append(sequence.token_ids[start : start + n])
            kept += range(first, first + n) if wanted else ()
            if played is not None:
                end = played.same_tokens(sequence.token_ids, start, start + n)
                self._replayed.append(ReplayedRows(first, played, start, end))
            first += n
        self._kept: list[int] = kept
        every = RecordOptions()
        for wanted in self._wanted:
            every = every if wanted is None else every.union(wanted)
        self._template = every.template(found)
        self._host = {
            name: torch.empty(len(kept), *like.shape[1:], dtype=like.dtype, device="cpu")
            for name, like in self._template.arrays.items()
            if name != "token_ids"
        }
        self._begun: StepMetadata | None = None
        self._first, self._places, self._rows = 0, slice(0, 0), None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the model computes the step; `begin` sets the range of tokens."""
        routed = self.found.routers if self._replayed or self._template.experts is not None else ()
        hooks = [
            self.model.layers[str(layer)].ffn.gate.register_forward_hook(partial(self._on_route, layer))
            for layer in routed
        ]
        try:
            for column, layer in enumerate(self._template.hidden_layers):
                block = self.model.layers[str(layer)]
                hooks.append(block.register_forward_hook(partial(self._on_states, column)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def _step(self) -> StepMetadata:
        if self._begun is None:
            raise RuntimeError("a layer ran before `begin`")
        return self._begun

    def begin(self, step: StepMetadata, first: int = 0) -> None:
        """Sets the tokens computed next: the tokens of ``step``, starting at token ``first`` of the whole step."""
        count = len(step.positions)
        self._begun, self._first = step, first
        self._places = slice(bisect_left(self._kept, first), bisect_left(self._kept, first + count))
        kept = [row - first for row in self._kept[self._places]]
        self._rows = None if len(kept) == count else torch.tensor(kept, dtype=torch.int64, device=step.positions.device)
        if self._replayed or self._template.selections is not None:
            for part in step.parts():
                part.on_selection = self._on_selection

    def records(self) -> list[TokenRecords | None]:
        """Of each sequence, the records of its new tokens; None if not requested."""
        found, first = list[TokenRecords | None](), 0
        for wanted, n, tokens in zip(self._wanted, self._lengths, self._tokens, strict=True):
            found.append(None if wanted is None else self._records_of(wanted, slice(first, first + n), tokens))
            first += 0 if wanted is None else n
        return found

    def _records_of(self, wanted: RecordOptions, places: slice, tokens: list[int]) -> TokenRecords:
        arrays: dict[str, Any] = {"token_ids": torch.tensor(tokens, dtype=torch.int32, device="cpu")}
        like = wanted.template(self.found)
        for name in like.arrays.keys() & self._host.keys():
            arrays[name] = self._host[name][places]
        if like.hidden_layers != self._template.hidden_layers and "hidden_states" in arrays:
            columns = [self._template.hidden_layers.index(layer) for layer in like.hidden_layers]
            arrays["hidden_states"] = arrays["hidden_states"][:, columns]
        return replace(like, **arrays)

    def _store(self, name: str, column: int, values: Tensor) -> None:
        """Copies a layer's values ``[T, ...]`` of the recorded rows to the host."""
        values = values if self._rows is None else values[self._rows]
        host = self._host[name]
        host[self._places, column] = values.to(host.dtype).cpu()

    def _given(self, rows_of: Callable[[Replay, int, int], Tensor | None], width: int) -> Tensor | None:
        """Replayed ids of the tokens that are computed now, int64 ``[T, width]``, -1 in rows that are not replayed."""
        given, count = None, len(self._step.positions)
        for first, played, start, end in self._replayed:
            first -= self._first
            start, first = start - min(first, 0), max(first, 0)
            end = min(end, start + count - first)
            rows = rows_of(played, start, end) if start < end else None
            if rows is None or not len(rows):
                continue
            if given is None:
                given = torch.full((count, width), -1, dtype=torch.int64, device="cpu")
            given[first : first + len(rows), : rows.shape[1]] = rows[:, :width]
        return None if given is None else given.to(self._step.positions.device)

    def _on_route(
        self, layer: int, gate: Gate, args: tuple[Tensor, Tensor], routed: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Forward hook of a router: its experts and their weights, or the replayed ones."""
        replaced, experts = None, routed[0] if gate.local_experts is None else gate.all_experts(*args)
        given = self._given(lambda played, start, end: played.experts_of(layer, start, end), gate.topk)
        if given is not None:
            experts = torch.where(given >= 0, given, experts)
            replaced = routed = gate.weigh(args[0], experts)
        if self._template.experts is not None:
            column, own = self._template.route_layers.index(layer), slice(0, len(self._step.positions))
            if self.parallel.dp_attention:  # the router sees the tokens of all ranks
                first = self.parallel.rank * self.parallel.step_rows
                own = slice(first, first + own.stop)
            self._store("experts", column, experts[own])
            self._store("expert_weights", column, routed[1][own])
        return replaced

    def _on_selection(self, layer: int, selected: Tensor, slots: Tensor | None) -> Tensor | None:
        """See `OnSelection`."""
        given = self._given(lambda played, start, end: played.selection_of(layer, start, end), selected.shape[1])
        if given is not None:
            chosen = (given >= 0).any(1, keepdim=True)
            selected.copy_(torch.where(chosen, given, selected))
            slots = None
        if self._template.selections is not None:
            self._store("selections", self._template.selection_layers.index(layer), selected)
            if layer in self._template.candidate_layers:
                self._store("candidates", self._template.candidate_layers.index(layer), self._candidates(layer))
        return slots

    def _candidates(self, layer: int) -> Tensor:
        """Blocks that the layer keeps, int32 ``[T, n]``: all that there are where it did not have to choose."""
        step, (count, size) = self._step, self.found.candidates[layer]
        for part in step.parts():
            if part.results.candidate_blocks is not None:
                return part.results.candidate_blocks
        block = torch.arange(count, dtype=torch.int32, device=step.positions.device)
        entries = (step.positions + 1) // self.found.selectors[layer]
        return torch.where(block * size < entries.unsqueeze(1), block, -1)

    def _on_states(self, column: int, block: torch.nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of a block."""
        self._store("hidden_states", column, self.model.layer_states(output))
