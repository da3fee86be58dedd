"""Steps over persistent tensors, and CUDA graphs of them: decode steps of the backbone, drafts of the MTP layer.

A captured graph reads its inputs from the same addresses at every replay. So block tables live on the device, a row per
sequence, and a step uploads one small array: token ids, positions and the table rows of the sequences in the batch.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from deepseek_attn.attention.builder import LayerSpecs
from deepseek_attn.attention.decode_builder import DecodeBatch, RowOwners, build_decode_metadata
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.indices import DecodeRows, decode_rows
from deepseek_attn.kernels.sampling import accept_drafts, greedy_tokens
from deepseek_attn.layers.engram import EngramTables, RowBuffers
from deepseek_attn.models.block import Backbone, layer_specs
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.utils.tape import Tape


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


class StepTensors:
    """The inputs of a step of one size on the device, and the metadata made of them.

    Args:
        extra_inputs: lengths of further int64 inputs.

    Attributes:
        inputs: int64, one array of everything that `set_inputs` fills. The other attributes are int64 views of it.
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
        self._owners = {n: RowOwners.create(size.requests, n, self.device) for n in {1, size.rows_per_request}}
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
        host = torch.tensor(flat, dtype=torch.int64, pin_memory=self.device.type == "cuda", device="cpu")
        self.inputs.copy_(host, non_blocking=True)

    def rows(self) -> DecodeRows:
        """The rows of all requests."""
        return decode_rows(self.starts, self.ends, self.size.rows_per_request, self.size.max_len)

    def block_tables(self) -> dict[str, torch.Tensor]:
        """Tables of the batch, as wide as the longest request may need."""
        tables = {}
        for group, table in self.tables.tables.items():
            pages = -(-self.size.max_len // self.tables.spans[group]) if group in self.tables.spans else 1
            tables[group] = table[:, :pages].index_select(0, self.table_rows)
        return tables

    def metadata(self, layers: LayerSpecs, rows: DecodeRows, tables: Mapping[str, torch.Tensor]) -> StepMetadata:
        """Metadata of rows for some layers."""
        owners = self._owners[len(rows.positions) // self.size.requests]
        return build_decode_metadata(layers, self.layout, DecodeBatch(rows, owners, tables, self.size.max_len))


class CapturedStep(StepTensors, ABC):
    """A step that runs over persistent tensors, eagerly until it is captured.

    Attributes:
        layers, draft_layers: specs of the backbone's layers and of the MTP layers.
        engram: rows that Engram layers read, an input of the step; None for a model without any.
        graph: the captured or recorded step; None while it runs eagerly.
        records: the next run records the step as a tape. Then no token may be padding.
    """

    def __init__(
        self,
        model: Backbone,
        layout: CacheLayout,
        tables: DeviceTables,
        size: StepSize,
        extra_inputs: tuple[int, ...] = (),
        engram: EngramTables | None = None,
    ):
        super().__init__(layout, tables, size, extra_inputs)
        self.model = model
        self.engram = None if engram is None else RowBuffers(engram, size.rows)
        self.layers = tuple(spec for spec in layer_specs(model) if not spec.is_mtp)
        self.draft_layers = tuple(spec for spec in layer_specs(model) if spec.is_mtp)
        self.graph: torch.cuda.CUDAGraph | Tape | None = None
        self.records = False

    @abstractmethod
    def forward(self) -> None:
        """Computes the step, eagerly."""

    def draft(
        self,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        meta: StepMetadata,
        last_rows: torch.Tensor,
        next_starts: torch.Tensor,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The MTP layer over rows whose next token is known, then ``num_drafts`` tokens after each request's last row.

        Drafts after the first come from the MTP layer's own hidden states; each writes a row of its caches past the
        request's last row.

        Args:
            hidden_states: ``[rows, ...]`` of the backbone; next_ids: int64 ``[rows]``, the token after each row.
            meta: metadata of the rows for the MTP layer.
            last_rows: int64 ``[requests]``, the last row of each request that is not padding.
            next_starts: int64 ``[requests]``, the position after that row.

        Returns:
            ``num_drafts`` tokens of each request, int64 ``[requests]`` each, and the logits of the first ones, float32
            ``[requests, vocab]``.
        """
        states = self.model.draft_hidden_states(hidden_states, next_ids, meta.positions, meta)[last_rows]
        first_logits = self.model.draft_logits(states)
        drafts = [greedy_tokens(first_logits, invalid_token=0)]  # INVALID_TOKEN has no embedding
        for offset in range(self.size.num_drafts - 1):
            rows = decode_rows(next_starts, self.limits, 1, self.size.max_len, offset)
            meta = self.metadata(self.draft_layers, rows, meta.block_tables)
            states = self.model.draft_hidden_states(states, drafts[-1], meta.positions, meta)
            drafts.append(greedy_tokens(self.model.draft_logits(states), invalid_token=0))
        return drafts, first_logits

    def capture(self, pool: Any) -> int:
        """Captures the step as a CUDA graph in a memory pool; returns the bytes of device memory that this reserved.

        The warm-up run computes padding only, which writes nothing.
        """
        self.set_inputs([], [], [])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self.forward()  # compiles kernels and makes cached constants, neither of which a capture may do
        finally:  # an exception may free tensors that the stream still writes
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # as the capture does, so that only memory that the capture itself reserves is counted
        gc.collect()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread queries events, which would end a capture that watches all threads
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.forward()
        self.graph = graph
        return torch.cuda.memory_reserved() - reserved

    def run(self) -> None:
        """Computes the step: replays the graph or tape if there is one."""
        if self.graph is not None:
            self.graph.replay()
        elif self.records:
            self.graph = Tape(self.forward, [self.inputs, *self.tables.tables.values()])
        else:
            self.forward()


class DecodeStep(CapturedStep):
    """A decode step of the backbone, and the inputs of the step after it.

    With ``num_drafts``, a request's rows are its newest token and drafts of the tokens after it. A draft is accepted if
    it equals the greedy token of the row before it. The MTP layer then runs over the rows and drafts the tokens after
    the newest one; its cache entries of rejected drafts are overwritten before anything reads them.

    Attributes: results of the last run, overwritten by the next.
        hidden_states, logits, tokens: for every row, padding included; tokens: int64, `greedy_tokens` of the logits.
        next_ids: int64 ``[requests, 1 + num_drafts]``, the newest token of each request and its drafts; 0 replaces
            `INVALID_TOKEN`.
        next_starts: int64 ``[requests]``, the first position of ``next_ids``.
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
        size, layers = self.size, self.layers + self.draft_layers if self.size.num_drafts else self.layers
        meta = self.metadata(layers, self.rows(), self.block_tables())
        if self.engram is not None:
            meta.engram = self.engram.lookups()
        self.hidden_states = self.model(self.token_ids, meta.positions, meta)
        self.logits = self.model.logits(self.hidden_states)
        self.tokens = greedy_tokens(self.logits)
        newest = accept_drafts(self.token_ids, self.tokens, self.starts, self.ends, verify=size.num_drafts > 0)
        drafts: list[torch.Tensor] = []
        if size.num_drafts:
            next_ids = self.tokens.clamp(min=0)  # INVALID_TOKEN has no embedding
            drafts, _ = self.draft(self.hidden_states, next_ids, meta, newest.last_rows, newest.next_starts)
        columns = [newest.next_ids, *drafts, newest.next_starts]
        tokens = self.tokens.view(size.requests, size.rows_per_request)
        self.results = torch.cat([tokens, *(column[:, None] for column in columns)], dim=1)
        self.next_ids, self.next_starts = self.results[:, size.rows_per_request : -1], self.results[:, -1]


class DraftStep(CapturedStep):
    """Drafts after rows whose next tokens the host has chosen; see `CapturedStep.draft`.

    Attributes:
        drafts: int64 ``[requests, num_drafts]``.
        logits: ``[requests, vocab_size]``, logits of the first draft.
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
        """Fills the inputs; ``hidden_states`` holds the rows of all requests, concatenated by request."""
        per_request, sources, last_rows, row = self.size.rows_per_request, [], [], 0
        for request, ids in enumerate(next_ids):
            sources += [*range(row, row + len(ids)), *[row] * (per_request - len(ids))]
            row += len(ids)
            last_rows.append(request * per_request + len(ids) - 1)
        limits = [start + len(ids) + self.size.num_drafts - 1 for start, ids in zip(starts, next_ids, strict=True)]
        self.set_inputs(next_ids, starts, rows, limits=limits, extra=(sources, last_rows))
        torch.index_select(hidden_states, 0, self._source_rows, out=self.backbone_states)

    def forward(self) -> None:
        meta = self.metadata(self.draft_layers, self.rows(), self.block_tables())
        drafts, self.logits = self.draft(self.backbone_states, self.token_ids, meta, self._last_rows, self.ends)
        self.drafts = torch.stack(drafts, dim=1)
