"""Decode steps over persistent tensors, and CUDA graphs of them.

A captured graph reads its inputs from the same addresses at every replay. So block tables live on the device, a row per
sequence, and a step uploads one small array: token ids, positions and the rows of the sequences in the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import nn

from deepseek_attn.cache.layout import STATE, CacheLayout
from deepseek_attn.cache.manager import NULL_PAGE, SequenceCache
from deepseek_attn.config import LayerSpec
from deepseek_attn.metadata import StepMetadata
from deepseek_attn.metadata_decode import DecodeBatch, build_decode_metadata

FIRST_LENGTH = 8192  # graphs serve lengths up to a power of four times this: index rows are as wide as the longest


class DeviceTables:
    """Block tables of sequences on the device, a row each; the last row is all null pages, for padding.

    Attributes:
        tables: int32 ``[max_num_seqs + 1, pages]`` by group, pages of the longest sequence.
    """

    def __init__(self, layout: CacheLayout, device: torch.device):
        self.null_row = layout.max_num_seqs
        widths = {group: -(-layout.max_model_len // span) for group, (span, _) in layout.spans.items()}
        if STATE in layout.pages:
            widths[STATE] = 1
        self.spans = {group: span for group, (span, _) in layout.spans.items()}
        self.tables = {
            group: torch.full((self.null_row + 1, width), NULL_PAGE, dtype=torch.int32, device=device)
            for group, width in widths.items()
        }
        self._rows: OrderedDict[int, _Row] = OrderedDict()

    def rows(self, caches: list[SequenceCache]) -> list[int]:
        """The rows of these sequences, brought up to date. The least recently used give theirs to new ones."""
        for cache in caches:
            if id(cache) in self._rows:
                self._rows.move_to_end(id(cache))
        return [self._row(cache) for cache in caches]

    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())

    def _row(self, cache: SequenceCache) -> int:
        row = self._rows.get(id(cache))
        if row is None:
            if len(self._rows) < self.null_row:
                number = len(self._rows)
            else:
                number = self._rows.popitem(last=False)[1].number
            row = self._rows[id(cache)] = _Row(number, cache)
        if row.version != cache.version:
            for group, pages in cache.tables.items():
                self._upload(group, row, pages)
            row.version = cache.version
        return row.number

    def _upload(self, group: str, row: _Row, pages: list[int]) -> None:
        """Copies what changed: everything from the first page that differs."""
        known = row.pages.get(group, [])
        if known == pages[: len(known)] and len(known) == len(pages):
            return
        first = next((i for i, (a, b) in enumerate(zip(known, pages, strict=False)) if a != b), len(known))
        if first < len(pages):
            self.tables[group][row.number, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)
        row.pages[group] = list(pages)


@dataclass
class _Row:
    """What of a sequence's tables is on the device. Holding the sequence keeps its id from being given to another."""

    number: int
    cache: SequenceCache
    version: int = -1
    pages: dict[str, list[int]] = field(default_factory=dict)


class DecodeStep:
    """One decode step of a model for ``requests`` requests of ``each`` rows, none longer than ``max_len`` tokens.

    Attributes:
        streams, logits: results of the last run, for every row, padding included; overwritten by the next.
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
        tokens, device = requests * each, next(iter(tables.tables.values())).device
        # one array and one copy: token ids, positions, validity, rows of the block tables
        self._packed = torch.zeros(3 * tokens + requests, dtype=torch.int64, device=device)
        self._staging = torch.zeros_like(self._packed, device="cpu", pin_memory=device.type == "cuda")
        self.token_ids, self.positions, self._valid, self._rows = self._packed.split([tokens] * 3 + [requests])
        self.streams = self.logits = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.set([], [], [])

    def set(self, token_ids: list[list[int]], starts: list[int], rows: list[int]) -> None:
        """Fills the inputs: tokens of each request (1 to ``each``), position of its first, its row of the tables."""
        each, tokens = self.each, self.requests * self.each
        ids, positions, valid, places = self._staging.split([tokens] * 3 + [self.requests])
        missing = self.requests - len(token_ids)
        packed = [ids + [0] * (each - len(ids)) for ids in token_ids] + [[0] * each] * missing
        ids.view(-1, each).copy_(torch.tensor(packed))
        offsets = torch.arange(each)
        positions.view(-1, each).copy_(torch.tensor(starts + [0] * missing)[:, None] + offsets)
        counts = torch.tensor([len(ids) for ids in token_ids] + [0] * missing)
        valid.view(-1, each).copy_(offsets < counts[:, None])
        places.copy_(torch.tensor(rows + [self.tables.null_row] * missing))
        self._packed.copy_(self._staging, non_blocking=True)

    def metadata(self) -> StepMetadata:
        """Metadata from the inputs as they are on the device."""
        tables = {}
        for group, table in self.tables.tables.items():
            pages = -(-self.max_len // self.tables.spans[group]) if group in self.tables.spans else 1
            tables[group] = table[:, :pages].index_select(0, self._rows)
        batch = DecodeBatch(self.positions, self._valid.bool(), tables, self.max_len)
        return build_decode_metadata(self.layers, self.layout, batch)

    def forward(self) -> None:
        """Computes the step, eagerly."""
        self.streams = self.model(self.token_ids, self.positions, self.metadata())
        self.logits = self.model.logits(self.streams)

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
        torch.cuda.empty_cache()  # as the capture would, so that what it reserves can be counted
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


class DecodeGraphs:
    """Decode steps of a runner's backbone by size, captured when a size is first met.

    Args:
        batches: numbers of requests that have a graph; a step takes the smallest that holds it.
        capture: False runs the same steps eagerly, on any device.

    Attributes:
        nbytes: device memory that the graphs and their tables took so far.
        most_tokens: new tokens of a sequence in one step at most: 1, and the guesses where there is speculation.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        device: torch.device,
        batches: list[int] | None = None,
        capture: bool = True,
    ):
        self.model, self.layers, self.layout, self.device = model, layers, layout, device
        self.batches = sorted(batches or batch_sizes(layout.max_num_seqs))
        self.most_tokens = 1
        self.tables = DeviceTables(layout, device)
        self.nbytes = self.tables.nbytes()
        self._capture = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None
        self._steps: dict[tuple[int, int, int], DecodeStep] = {}

    def takes(self, counts: list[int]) -> bool:
        """Whether a step with these numbers of new tokens runs here: small enough, and nobody has a prompt to read."""
        return len(counts) <= self.batches[-1] and max(counts) <= self.most_tokens

    def run(
        self, caches: list[SequenceCache], token_ids: list[list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step of the next tokens of each sequence, whose pages are reserved.

        Returns:
            streams and logits of all rows, and int64 ``[T]``: the rows that are no padding, request by request. The
            first two are overwritten by the next step of the same size.
        """
        counts = [len(ids) for ids in token_ids]
        longest = max(cache.num_tokens + n for cache, n in zip(caches, counts, strict=True))
        step = self.step(len(caches), 1 if max(counts) == 1 else max(self.most_tokens, *counts), longest)
        step.set(token_ids, [cache.num_tokens for cache in caches], self.tables.rows(caches))
        step.run()
        rows = [request * step.each + i for request, n in enumerate(counts) for i in range(n)]
        return step.streams, step.logits, torch.tensor(rows)

    def step(self, requests: int, each: int, longest: int) -> DecodeStep:
        """The smallest step that holds this, made and captured if it is new."""
        size = next(size for size in self.batches if size >= requests)
        key = (size, each, length_bucket(longest, self.layout.max_model_len))
        if key not in self._steps:
            step = DecodeStep(self.model, self.layers, self.layout, self.tables, *key)
            if self._capture:
                self.nbytes += step.capture(self._pool)
            self._steps[key] = step
        return self._steps[key]


def batch_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 to 32, of 16 to 64, of 32 to 256, of 64 beyond; the last is ``limit``."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32), *range(256, limit + 64, 64)]
    return [size for size in sizes if size < limit] + [limit]


def length_bucket(length: int, limit: int) -> int:
    """The least of 8192, 32768, 131072, ... that is no smaller than ``length``, at most ``limit``."""
    bucket = FIRST_LENGTH
    while bucket < length:
        bucket *= 4
    return min(bucket, limit)
