"""Steps over persistent tensors, and CUDA graphs of them: decode steps of the backbone, guesses of the MTP layer.

A captured graph reads its inputs from the same addresses at every replay. So block tables live on the device, a row per
sequence, and a step uploads one small array: token ids, positions and the rows of the sequences in the batch.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

from deepseek_attn.attention.decode_builder import DecodeBatch, build_decode_metadata
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.runner.device_tables import DeviceTables


class DecodeStep:
    """One decode step of a model for ``requests`` requests of ``each`` rows, none longer than ``max_len`` tokens.

    Attributes:
        streams, logits, tokens: results of the last run, for every row, padding included; overwritten by the next.
            tokens: int64, the most likely one (the first of several), or `INVALID_TOKEN` where the largest logit is not
            finite.
        inputs: int64, all that `set` fills, in one array.
        graph: the captured step; None while it runs eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        tables: DeviceTables,
        requests: int,
        each: int,
        max_len: int,
    ):
        self.model, self.layers, self.layout, self.tables = model, layers, layout, tables
        self.requests, self.each, self.max_len = requests, each, max_len
        self.device = next(iter(tables.tables.values())).device
        # one array and one copy: token ids, positions, validity, rows of the block tables, and what a subclass adds
        sizes = [requests * each] * 3 + [requests] + self.more_inputs()
        self.inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=self.device)
        self.token_ids, self.positions, self._valid, self._rows, *self._more = self.inputs.split(sizes)
        self.streams = self.logits = self.tokens = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.set([], [], [])

    def more_inputs(self) -> list[int]:
        """Lengths of further int64 inputs."""
        return []

    def set(self, token_ids: list[list[int]], starts: list[int], rows: list[int], *more: list[int]) -> None:
        """Fills the inputs: tokens of each request (1 to ``each``), position of its first, its row of the tables.

        Does not wait for the device, so runs that are on their way keep their inputs.
        """
        each, missing, last = self.each, self.requests - len(token_ids), self.max_len - 1
        offsets = range(each)
        ids = [token for ids in token_ids for token in ids + [0] * (each - len(ids))] + [0] * (missing * each)
        # rows of padding stay where there are tables, and angles for them
        positions = [min(start + i, last) for start in starts + [0] * missing for i in offsets]
        valid = [i < len(ids) for ids in token_ids for i in offsets] + [False] * (missing * each)
        rows = rows + [self.tables.null_row] * missing
        flat = ids + positions + valid + rows
        for values, part in zip(more, self._more, strict=False):
            flat += values + [0] * (len(part) - len(values))
        flat += [0] * (len(self.inputs) - len(flat))
        host = torch.tensor(flat, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.inputs.copy_(host, non_blocking=True)

    def block_tables(self) -> dict[str, torch.Tensor]:
        """Tables of the batch, as wide as the longest request may need."""
        tables = {}
        for group, table in self.tables.tables.items():
            pages = -(-self.max_len // self.tables.spans[group]) if group in self.tables.spans else 1
            tables[group] = table[:, :pages].index_select(0, self._rows)
        return tables

    def metadata(self) -> StepMetadata:
        """Metadata from the inputs as they are on the device."""
        batch = DecodeBatch(self.positions, self._valid.bool(), self.block_tables(), self.max_len)
        return build_decode_metadata(self.layers, self.layout, batch)

    def forward(self) -> None:
        """Computes the step, eagerly."""
        self.streams = self.model(self.token_ids, self.positions, self.metadata())
        self.logits = self.model.logits(self.streams)
        self.tokens = greedy_tokens(self.logits)

    def capture(self, pool) -> int:
        """Records the step as a CUDA graph and returns the device memory that took.

        What runs to warm up is padding, which writes nothing.
        """
        self.set([], [], [])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()  # compiles kernels and makes cached constants, neither of which a capture may do
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # as the capture does, so that only what it reserves itself is counted
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread asks about events, which would end a capture that watches all threads
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.forward()
        self.graph = graph
        return torch.cuda.memory_reserved() - before

    def run(self) -> None:
        if self.graph is None:
            self.forward()
        else:
            self.graph.replay()


class DraftStep(DecodeStep):
    """The MTP layer over rows whose next token is known, and its guesses of ``drafts`` tokens after each request's.

    Guesses after the first come from the MTP layer's own streams; each writes a row of its caches behind the request.

    Args:
        layers: specs of the MTP layers.

    Attributes:
        logits: of the first guess, ``[requests, vocab_size]``.
        guesses: int64 ``[requests, drafts]``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        tables: DeviceTables,
        requests: int,
        each: int,
        max_len: int,
        drafts: int,
    ):
        self.drafts, self.guesses = drafts, None
        super().__init__(model, layers, layout, tables, requests, each, max_len)
        weight, config = model.embed.weight, model.config
        shape = (requests * each, config.hc_mult, config.hidden_size)
        self.streams_in = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self._sources, self._ends = self._more

    def more_inputs(self) -> list[int]:
        return [self.requests * self.each, self.requests]

    def set_rows(self, streams: torch.Tensor, next_ids: list[list[int]], starts: list[int], rows: list[int]) -> None:
        """Fills the inputs; ``streams`` has those of all requests' rows, one after the other."""
        sources, ends, row = [], [], 0
        for request, ids in enumerate(next_ids):
            sources += [*range(row, row + len(ids)), *[row] * (self.each - len(ids))]
            row += len(ids)
            ends.append(request * self.each + len(ids) - 1)
        self.set(next_ids, starts, rows, sources, ends)
        torch.index_select(streams, 0, self._sources, out=self.streams_in)

    def forward(self) -> None:
        """Computes the guesses, eagerly."""
        meta, found = self.metadata(), []
        states = self.model.draft_hidden_states(self.streams_in, self.token_ids, self.positions, meta)[self._ends]
        self.logits = logits = self.model.draft_logits(states)
        positions, valid, tables = self.positions[self._ends], self._valid[self._ends].bool(), self.block_tables()
        while True:
            found.append(greedy_tokens(logits).clamp_(min=0))  # of broken logits any token
            if len(found) == self.drafts:
                break
            positions = positions + 1
            meta = build_decode_metadata(self.layers, self.layout, DecodeBatch(positions, valid, tables, self.max_len))
            states = self.model.draft_hidden_states(states, found[-1], positions, meta)
            logits = self.model.draft_logits(states)
        self.guesses = torch.stack(found, dim=1)
