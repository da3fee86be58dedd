"""Steps over persistent tensors, and CUDA graphs of them: decode steps of the backbone, drafts of the MTP layer.

A captured graph reads its inputs from the same addresses at every replay. So block tables live on the device, a row per
sequence, and a step uploads one small array: token ids, positions and the table rows of the sequences in the batch.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from deepseek_attn.attention.decode_builder import DecodeBatch, build_decode_metadata
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.models.block import Backbone, layer_specs
from deepseek_attn.runner.device_tables import DeviceTables


class StepSize(NamedTuple):
    """Shape of a step: ``requests`` of ``rows_per_request`` token rows, none longer than ``max_len`` after it.

    Attributes:
        num_drafts: tokens that the MTP layer drafts for each request, within the step.
    """

    requests: int
    rows_per_request: int
    max_len: int
    num_drafts: int = 0

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


class Rows(NamedTuple):
    """Rows of a step, equally many of each request: positions int64 ``[T]``; valid bool ``[T]``, false for padding."""

    positions: torch.Tensor
    valid: torch.Tensor


class StepTensors:
    """The inputs of a step of one size on the device, and the metadata made of them.

    Args:
        extra_inputs: lengths of further int64 inputs.

    Attributes:
        inputs: int64, all that `set_inputs` fills, in one array. The others are views of it, int64 too.
        token_ids: ``[rows]``.
        starts, ends: ``[requests]``, position of the first row, and where a request's rows end: rows from there on are
            padding.
        limits: ``[requests]``, drafts are written up to there.
        table_rows: ``[requests]``, rows of the block tables; extra: the further inputs.
    """

    def __init__(self, layout: CacheLayout, tables: DeviceTables, size: StepSize, extra_inputs: tuple[int, ...] = ()):
        self.layout, self.tables, self.size = layout, tables, size
        self.device = next(iter(tables.tables.values())).device
        lengths = [size.rows, *[size.requests] * 4, *extra_inputs]
        self.inputs = torch.zeros(sum(lengths), dtype=torch.int64, device=self.device)
        self.token_ids, self.starts, self.ends, self.limits, self.table_rows, *self.extra = self.inputs.split(lengths)
        self.set_inputs([], [], [])

    def set_inputs(
        self,
        token_ids: list[list[int]],
        starts: list[int],
        rows: list[int],
        ends: list[int] | None = None,
        limits: list[int] | None = None,
        extra: tuple[list[int], ...] = (),
    ) -> None:
        """Fills the inputs in one asynchronous copy, ordered after the runs launched before.

        Args:
            token_ids: of each request, up to ``rows_per_request``; rows: its row of the block tables.
            ends: default: as many rows as token ids; limits: default: ``ends``.
            extra: values of the further inputs.
        """
        per_request, missing = self.size.rows_per_request, self.size.requests - len(token_ids)
        ends = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)] if ends is None else ends
        flat = [token for ids in token_ids for token in ids + [0] * (per_request - len(ids))]
        flat += [0] * (missing * per_request)
        for values in (starts, ends, ends if limits is None else limits):
            flat += values + [0] * missing
        flat += rows + [self.tables.null_row] * missing
        for values, tensor in zip(extra, self.extra, strict=False):
            flat += values + [0] * (len(tensor) - len(values))
        flat += [0] * (len(self.inputs) - len(flat))
        host = torch.tensor(flat, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.inputs.copy_(host, non_blocking=True)

    def rows(self) -> Rows:
        """The rows of all requests."""
        offsets = torch.arange(self.size.rows_per_request, device=self.device)
        positions = self.starts[:, None] + offsets
        return Rows(positions.flatten(), (positions < self.ends[:, None]).flatten())

    def block_tables(self) -> dict[str, torch.Tensor]:
        """Tables of the batch, as wide as the longest request may need."""
        tables = {}
        for group, table in self.tables.tables.items():
            pages = -(-self.size.max_len // self.tables.spans[group]) if group in self.tables.spans else 1
            tables[group] = table[:, :pages].index_select(0, self.table_rows)
        return tables

    def metadata(self, layers: tuple[LayerSpec, ...], rows: Rows, tables: dict[str, torch.Tensor]) -> StepMetadata:
        """Metadata of rows for some layers."""
        # padded rows stay at positions for which there are tables and rotations
        positions = rows.positions.clamp(max=self.size.max_len - 1)
        return build_decode_metadata(layers, self.layout, DecodeBatch(positions, rows.valid, tables, self.size.max_len))


class CapturedStep(StepTensors, ABC):
    """A step that runs over persistent tensors, eagerly until it is captured.

    Attributes:
        layers, draft_layers: specs of the backbone's layers and of the MTP layers.
        graph: the captured step; None while it runs eagerly.
    """

    def __init__(
        self,
        model: Backbone,
        layout: CacheLayout,
        tables: DeviceTables,
        size: StepSize,
        extra_inputs: tuple[int, ...] = (),
    ):
        super().__init__(layout, tables, size, extra_inputs)
        self.model = model
        self.layers = tuple(spec for spec in layer_specs(model) if not spec.is_mtp)
        self.draft_layers = tuple(spec for spec in layer_specs(model) if spec.is_mtp)
        self.graph: torch.cuda.CUDAGraph | None = None

    @abstractmethod
    def forward(self) -> None:
        """Computes the step, eagerly."""

    def draft(
        self,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        rows: Rows,
        last_rows: torch.Tensor,
        tables: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MTP layer over rows whose next token is known, then ``num_drafts`` tokens after each request's last row.

        Drafts after the first come from the MTP layer's own hidden states; each writes a row of its caches past the
        request's last row.

        Args:
            hidden_states: ``[rows, ...]`` of the backbone; next_ids: int64 ``[rows]``, the token after each row.
            last_rows: int64 ``[requests]``, the last row of each request that is no padding.
            tables: `block_tables` of the batch.

        Returns:
            int64 ``[requests, num_drafts]``, and the logits of the first drafts, float32 ``[requests, vocab]``.
        """
        found: list[torch.Tensor] = []
        while len(found) < self.size.num_drafts:
            meta = self.metadata(self.draft_layers, rows, tables)
            states = self.model.draft_hidden_states(hidden_states, next_ids, meta.positions, meta)
            if not found:
                states, rows = states[last_rows], Rows(rows.positions[last_rows], rows.valid[last_rows])
                first_logits = logits = self.model.draft_logits(states)
            else:
                logits = self.model.draft_logits(states)
            next_ids = greedy_tokens(logits).clamp_(min=0)  # INVALID_TOKEN has no embedding
            found.append(next_ids)
            hidden_states, positions = states, rows.positions + 1
            rows = Rows(positions, rows.valid & (positions < self.limits))
        return torch.stack(found, dim=1), first_logits

    def capture(self, pool: tuple[int, int] | None) -> int:
        """Captures the step as a CUDA graph in a memory pool; returns the bytes of device memory that this reserved.

        The warm-up run computes padding only, which writes nothing.
        """
        self.set_inputs([], [], [])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self.forward()  # compiles kernels and makes cached constants, neither of which a capture may do
        finally:  # what breaks it off may free tensors that the stream still writes
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # as the capture does, so that only memory that the capture itself reserves is counted
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread queries events, which would end a capture that watches all threads
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.forward()
        self.graph = graph
        return torch.cuda.memory_reserved() - before

    def run(self) -> None:
        """Computes the step: replays the graph if there is one."""
        if self.graph is None:
            self.forward()
        else:
            self.graph.replay()


class DecodeStep(CapturedStep):
    """A decode step of the backbone, and the inputs of the step after it.

    With ``num_drafts``, a request's rows are its newest token and drafts of the tokens after it. Those that are equal
    to the greedy tokens before them are right. The MTP layer then runs over the rows and drafts the tokens after the
    newest one; what it writes for wrong drafts is written again before it is read.

    Attributes: results of the last run, overwritten by the next.
        hidden_states, logits, tokens: for every row, padding included; tokens: int64, `greedy_tokens` of the logits.
        next_ids: int64 ``[requests, 1 + num_drafts]``, the newest token of each request, and its drafts; 0 in place of
            `INVALID_TOKEN`. next_starts: int64 ``[requests]``, their first position.
        results: int64 ``[requests, ...]``, tokens, next_ids and next_starts, for one copy to the host.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    next_ids: torch.Tensor
    next_starts: torch.Tensor
    results: torch.Tensor

    def forward(self) -> None:
        """Computes the step, eagerly."""
        size, rows, tables = self.size, self.rows(), self.block_tables()
        shape = (size.requests, size.rows_per_request)
        meta = self.metadata(self.layers, rows, tables)
        self.hidden_states = self.model(self.token_ids, meta.positions, meta)
        self.logits = self.model.logits(self.hidden_states)
        self.tokens = greedy_tokens(self.logits)
        last = (self.ends - self.starts - 1).clamp(0, size.rows_per_request - 1)  # the newest token comes after it
        if size.num_drafts:
            last = right_drafts(self.token_ids.view(shape), self.tokens.view(shape), last)
        next_ids = self.tokens.clamp(min=0)  # INVALID_TOKEN has no embedding
        self.next_ids = next_ids.view(shape).gather(1, last[:, None])
        self.next_starts = self.starts + last + 1
        if size.num_drafts:
            last_rows = torch.arange(0, size.rows, size.rows_per_request, device=self.device) + last
            drafts, _ = self.draft(self.hidden_states, next_ids, rows, last_rows, tables)
            self.next_ids = torch.cat([self.next_ids, drafts], dim=1)
        self.results = torch.cat([self.tokens.view(shape), self.next_ids, self.next_starts[:, None]], dim=1)


def right_drafts(token_ids: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Number of leading drafts that are the tokens chosen before them: int64 ``[B]``.

    Args:
        token_ids, chosen: int64 ``[B, 1 + drafts]``, a row's token and the one chosen after it.
        count: int64 ``[B]``, drafts of each request.
    """
    offsets = torch.arange(token_ids.shape[1] - 1, device=token_ids.device)
    right = (token_ids[:, 1:] == chosen[:, :-1]) & (offsets < count[:, None])
    return right.long().cumprod(1).sum(1)


class DraftStep(CapturedStep):
    """Drafts after rows whose next tokens the host has chosen; see `CapturedStep.draft`.

    Attributes:
        drafts: int64 ``[requests, num_drafts]``; logits: those of the first draft, ``[requests, vocab_size]``.
    """

    drafts: torch.Tensor
    logits: torch.Tensor

    def __init__(self, model: Backbone, layout: CacheLayout, tables: DeviceTables, size: StepSize):
        super().__init__(model, layout, tables, size, extra_inputs=(size.rows, size.requests))
        self._source_rows, self._last_rows = self.extra
        shape, dtype = (size.rows, *model.state_shape), model.embed.weight.dtype
        self.backbone_states = torch.zeros(shape, dtype=dtype, device=self.device)

    def set_draft_inputs(
        self, hidden_states: torch.Tensor, next_ids: list[list[int]], starts: list[int], rows: list[int]
    ) -> None:
        """Fills the inputs; ``hidden_states`` holds the rows of all requests, one request after the other."""
        per_request, sources, last_rows, row = self.size.rows_per_request, [], [], 0
        for request, ids in enumerate(next_ids):
            sources += [*range(row, row + len(ids)), *[row] * (per_request - len(ids))]
            row += len(ids)
            last_rows.append(request * per_request + len(ids) - 1)
        limits = [start + len(ids) + self.size.num_drafts - 1 for start, ids in zip(starts, next_ids, strict=True)]
        self.set_inputs(next_ids, starts, rows, limits=limits, extra=(sources, last_rows))
        torch.index_select(hidden_states, 0, self._source_rows, out=self.backbone_states)

    def forward(self) -> None:
        tables = self.block_tables()
        self.drafts, self.logits = self.draft(
            self.backbone_states, self.token_ids, self.rows(), self._last_rows, tables
        )
