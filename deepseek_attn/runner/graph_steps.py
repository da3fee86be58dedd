"""Steps over persistent tensors, and CUDA graphs of them: decode steps of the backbone, drafts of the MTP layer.

A captured graph reads its inputs from the same addresses at every replay. So block tables live on the device, a row per
sequence, and a step uploads one small array: token ids, positions and the table rows of the sequences in the batch.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from deepseek_attn.attention.decode_builder import DecodeBatch, build_decode_metadata
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.runner.device_tables import DeviceTables


class StepSize(NamedTuple):
    """Shape of a step: ``requests`` of ``rows_per_request`` token rows, none longer than ``max_len`` after it."""

    requests: int
    rows_per_request: int
    max_len: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


class StepTensors:
    """The inputs of a step of one size on the device, and the metadata made of them.

    Args:
        layers: specs of the layers that the metadata is for.
        extra_inputs: lengths of further int64 inputs.

    Attributes:
        inputs: int64, all that `set_inputs` fills, in one array.
        token_ids, positions, valid: int64 ``[rows]``, views of it; table_rows: ``[requests]``; extra: the others.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        tables: DeviceTables,
        size: StepSize,
        extra_inputs: tuple[int, ...] = (),
    ):
        self.layers, self.layout, self.tables, self.size = layers, layout, tables, size
        self.device = next(iter(tables.tables.values())).device
        lengths = [size.rows, size.rows, size.rows, size.requests, *extra_inputs]
        self.inputs = torch.zeros(sum(lengths), dtype=torch.int64, device=self.device)
        self.token_ids, self.positions, self.valid, self.table_rows, *self.extra = self.inputs.split(lengths)
        self.set_inputs([], [], [])

    def set_inputs(self, token_ids: list[list[int]], starts: list[int], rows: list[int], *extra: list[int]) -> None:
        """Fills the inputs in one asynchronous copy, ordered after the runs launched before.

        Args:
            token_ids: of each request, 1 to ``rows_per_request``; starts: position of its first token.
            rows: its row of the block tables.
            extra: values of the further inputs.
        """
        per_request, last = self.size.rows_per_request, self.size.max_len - 1
        missing, offsets = self.size.requests - len(token_ids), range(per_request)
        flat = [token for ids in token_ids for token in ids + [0] * (per_request - len(ids))]
        flat += [0] * (missing * per_request)
        # padded rows stay at positions for which there are tables and rotations
        flat += [min(start + i, last) for start in starts + [0] * missing for i in offsets]
        flat += [i < len(ids) for ids in token_ids for i in offsets] + [False] * (missing * per_request)
        flat += rows + [self.tables.null_row] * missing
        for values, tensor in zip(extra, self.extra, strict=False):
            flat += values + [0] * (len(tensor) - len(values))
        flat += [0] * (len(self.inputs) - len(flat))
        host = torch.tensor(flat, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.inputs.copy_(host, non_blocking=True)

    def block_tables(self) -> dict[str, torch.Tensor]:
        """Tables of the batch, as wide as the longest request may need."""
        tables = {}
        for group, table in self.tables.tables.items():
            pages = -(-self.size.max_len // self.tables.spans[group]) if group in self.tables.spans else 1
            tables[group] = table[:, :pages].index_select(0, self.table_rows)
        return tables

    def metadata(self) -> StepMetadata:
        """Metadata from the inputs as they are on the device."""
        batch = DecodeBatch(self.positions, self.valid.bool(), self.block_tables(), self.size.max_len)
        return build_decode_metadata(self.layers, self.layout, batch)


class DecodeStep(StepTensors):
    """A decode step of the backbone.

    Attributes:
        hidden_states, logits, tokens: results of the last run for every row, padding included; overwritten by the next.
            tokens: int64, `greedy_tokens` of the logits.
        graph: the captured step; None while it runs eagerly.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor

    def __init__(
        self,
        model: DeepseekV4,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        tables: DeviceTables,
        size: StepSize,
        extra_inputs: tuple[int, ...] = (),
    ):
        super().__init__(layers, layout, tables, size, extra_inputs)
        self.model = model
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self) -> None:
        """Computes the step, eagerly."""
        self.hidden_states = self.model(self.token_ids, self.positions, self.metadata())
        self.logits = self.model.logits(self.hidden_states)
        self.tokens = greedy_tokens(self.logits)

    def capture(self, pool: tuple[int, int] | None) -> int:
        """Captures the step as a CUDA graph in a memory pool; returns the bytes of device memory that this reserved.

        The warm-up run computes padding only, which writes nothing.
        """
        self.set_inputs([], [], [])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()  # compiles kernels and makes cached constants, neither of which a capture may do
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


class DraftStep(DecodeStep):
    """The MTP layer over rows whose next token is known, then ``num_drafts`` draft tokens after each request's last.

    Drafts after the first come from the MTP layer's own hidden states; each writes a row of its caches past the
    request's last token.

    Args:
        layers: specs of the MTP layers.

    Attributes:
        logits: those of the first draft, ``[requests, vocab_size]``.
        drafts: int64 ``[requests, num_drafts]``.
    """

    drafts: torch.Tensor

    def __init__(
        self,
        model: DeepseekV4,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        tables: DeviceTables,
        size: StepSize,
        num_drafts: int,
    ):
        super().__init__(model, layers, layout, tables, size, extra_inputs=(size.rows, size.requests))
        self.num_drafts = num_drafts
        self._source_rows, self._last_rows = self.extra
        weight, config = model.embed.weight, model.config
        shape = (size.rows, config.hc_mult, config.hidden_size)
        self.backbone_states = torch.zeros(shape, dtype=weight.dtype, device=self.device)

    def set_draft_inputs(
        self, hidden_states: torch.Tensor, next_ids: list[list[int]], starts: list[int], rows: list[int]
    ) -> None:
        """Fills the inputs; ``hidden_states`` holds the rows of all requests, one request after the other."""
        per_request, sources, last_rows, row = self.size.rows_per_request, [], [], 0
        for request, ids in enumerate(next_ids):
            sources += [*range(row, row + len(ids)), *[row] * (per_request - len(ids))]
            row += len(ids)
            last_rows.append(request * per_request + len(ids) - 1)
        self.set_inputs(next_ids, starts, rows, sources, last_rows)
        torch.index_select(hidden_states, 0, self._source_rows, out=self.backbone_states)

    def forward(self) -> None:
        """Computes the drafts, eagerly."""
        meta, found = self.metadata(), []
        states = self.model.draft_hidden_states(self.backbone_states, self.token_ids, self.positions, meta)[
            self._last_rows
        ]
        self.logits = logits = self.model.draft_logits(states)
        positions, valid = self.positions[self._last_rows], self.valid[self._last_rows].bool()
        tables = self.block_tables()
        while True:
            found.append(greedy_tokens(logits).clamp_(min=0))  # INVALID_TOKEN has no embedding
            if len(found) == self.num_drafts:
                break
            positions = positions + 1
            batch = DecodeBatch(positions, valid, tables, self.size.max_len)
            meta = build_decode_metadata(self.layers, self.layout, batch)
            states = self.model.draft_hidden_states(states, found[-1], positions, meta)
            logits = self.model.draft_logits(states)
        self.drafts = torch.stack(found, dim=1)
