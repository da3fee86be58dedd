"""Engram, the n-gram memory of DeepSeek-V4.1: its weights, and the rows of its tables that a step looks up.

Tables are far larger than the other weights and stay in the checkpoint's files. Rows depend on token ids alone, so a
thread reads them while the device computes earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch

from deepseek_attn.config.engram import EngramConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.engram import TableRows, dequantize_rows, gate_streams, hash_rows
from deepseek_attn.kernels.engram.types import SCALE_GROUP
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.weights import CheckpointModule, WeightSlot
from deepseek_attn.utils.tracing import traced


class Engram(CheckpointModule):
    """Looked-up values of each token, gated and added to its residual streams (checkpoint: ``layers.N.engram.*``).

    Args:
        engram: keys of the config.
        layer: an element of its ``engram_layer_ids``.
        hc_mult: number of residual streams.
        eps: of the norms before the gate.

    Attributes:
        read_rows: reads rows of the table by number, int64 ``[n]``; RuntimeError until the checkpoint is loaded.
        rows_per_token: rows that the n-grams ending at a token select.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor

    def __init__(
        self,
        engram: EngramConfig,
        layer: int,
        hidden_size: int,
        hc_mult: int,
        eps: float,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device)
        self.layer, self.eps = layer, eps
        self.table_shape = engram.hash_of(layer).num_rows, engram.engram_head_dim
        self.rows_per_token = engram.width // engram.engram_head_dim
        self.read_rows: Callable[[torch.Tensor], TableRows] = _not_loaded
        self.wkv = Linear(engram.width, (hc_mult + 1) * hidden_size, numerics, dtype, device)
        self.declare("q_weight", (hc_mult, hidden_size), torch.float32)
        self.declare("k_weight", (hc_mult, hidden_size), torch.float32)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from super().slots()
        yield "embed.weight", WeightSlot.by_row(self.table_shape, self._attach)

    def _attach(self, read_rows: Callable[[torch.Tensor], TableRows]) -> None:
        self.read_rows = read_rows

    @traced("engram")
    def forward(self, streams: torch.Tensor, rows: TableRows) -> torch.Tensor:
        """``streams [T, hc_mult, hidden_size]`` and the tokens' ``rows [T, n, columns]`` -> new streams."""
        kv = self.wkv(dequantize_rows(rows, streams.dtype))
        return gate_streams(streams, kv, self.q_weight, self.k_weight, self.eps)


def _not_loaded(rows: torch.Tensor) -> TableRows:
    raise RuntimeError("the tables of the n-gram memory stay in the checkpoint: load the model first")


class Chunk(NamedTuple):
    """Consecutive tokens of a sequence whose rows are looked up.

    Attributes:
        token_ids: of the whole sequence; the tokens before the chunk are part of its first n-grams.
        start: position of the chunk's first token; count: number of its tokens.
    """

    token_ids: Sequence[int]
    start: int
    count: int


class LayerRows(Protocol):
    """Rows of one layer for the tokens of a step."""

    def wait(self) -> TableRows:
        """The rows on the device: values ``[T, n, columns]`` and scales."""
        ...


class Lookup(NamedTuple):
    """Rows of one layer that a thread reads."""

    future: Future[TableRows]
    device: torch.device

    def wait(self) -> TableRows:
        """See `LayerRows.wait`. An exception of the reading thread is raised here."""
        return TableRows(*(part.to(self.device, non_blocking=part.is_pinned()) for part in self.future.result()))


class ReadRows(NamedTuple):
    """Rows of one layer that are on the device."""

    rows: TableRows

    def wait(self) -> TableRows:
        return self.rows


class SomeRows(NamedTuple):
    """Rows of one layer for some tokens of a step: numbers int64 ``[n]`` among the step's tokens."""

    all_rows: LayerRows
    tokens: torch.Tensor

    def wait(self) -> TableRows:
        """See `LayerRows.wait`."""
        return TableRows(*(part.view(torch.uint8)[self.tokens].view(part.dtype) for part in self.all_rows.wait()))


class BlankRows(NamedTuple):
    """Zeros instead of the rows of one layer, for ``tokens`` tokens."""

    layer: Engram
    tokens: int
    device: torch.device

    def wait(self) -> TableRows:
        columns = self.layer.table_shape[1]
        shape = (self.tokens, self.layer.rows_per_token, columns)
        values = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return TableRows(values, torch.zeros(*shape[:2], columns // SCALE_GROUP, dtype=torch.uint8, device=self.device))


class RowBuffers:
    """Rows of the Engram layers at fixed addresses, for steps over persistent tensors: filled before each run.

    Attributes:
        rows: by layer, values ``[tokens, n, columns]`` and scales, zeros at first.
    """

    def __init__(self, tables: EngramTables, tokens: int):
        self.rows = {number: rows.wait() for number, rows in tables.blank(tokens).items()}

    def fill(self, lookups: Mapping[int, Lookup]) -> None:
        """Waits for the rows of a step's first tokens, and copies them; ordered after the runs launched before."""
        for layer, lookup in lookups.items():
            for buffer, part in zip(self.rows[layer], lookup.future.result(), strict=True):
                source = part.view(torch.uint8)
                buffer.view(torch.uint8)[: len(source)].copy_(source, non_blocking=source.is_pinned())

    def lookups(self) -> dict[int, ReadRows]:
        """The rows as the layers of a step get them."""
        return {layer: ReadRows(rows) for layer, rows in self.rows.items()}


class EngramTables:
    """Looks rows up for all Engram layers of a model.

    Rows follow from the sequences' token ids in every step, so no state has to be forked, truncated or saved.

    Args:
        layers: by number, with their tables attached.
        numbers: of all token ids, as `text.token_numbers.number_tokens` gives them.
        device: of the model.
    """

    def __init__(
        self, engram: EngramConfig, layers: Mapping[int, Engram], numbers: Sequence[int], device: torch.device
    ):
        self.layers, self.device = dict(layers), device
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.length, self.pad = engram.engram_max_ngram_size, self.numbers[engram.engram_pad_token_id]
        self._hashes = {
            layer: tuple(
                torch.tensor(part, dtype=torch.int64, device="cpu") for part in (found.multipliers, found.primes)
            )
            for layer, found in ((layer, engram.hash_of(layer)) for layer in layers)
        }
        self._thread = ThreadPoolExecutor(1, "engram")

    def look_up(self, chunks: Sequence[Chunk], tokens_per_chunk: int = 0) -> dict[int, Lookup]:
        """Starts to read the rows of a step's tokens, chunk by chunk, and in each chunk layer by layer.

        Args:
            tokens_per_chunk: shorter chunks are padded to this number of tokens, with rows of any tokens.
        """
        ngrams = [self._ngrams(chunk) for chunk in chunks]
        missing = [(0, max(0, tokens_per_chunk - chunk.count)) for chunk in chunks]
        padded = [np.pad(part, (more, (0, 0)), mode="edge") for part, more in zip(ngrams, missing, strict=True)]
        ngrams = torch.from_numpy(np.concatenate(padded))
        return {
            layer: Lookup(self._thread.submit(self._read, layer, ngrams), self.device) for layer in sorted(self.layers)
        }

    def blank(self, tokens: int) -> dict[int, BlankRows]:
        """Zeros instead of the rows of ``tokens`` tokens, by layer."""
        return {number: BlankRows(layer, tokens, self.device) for number, layer in self.layers.items()}

    def _ngrams(self, chunk: Chunk) -> np.ndarray:
        """int64 ``[count, length]``: numbers of each token, of the one before it, and so on."""
        first = chunk.start - self.length + 1
        ids = chunk.token_ids[max(0, first) : chunk.start + chunk.count]
        before = np.full(max(0, -first), self.pad)
        numbers = np.concatenate([before, self.numbers[np.asarray(ids, dtype=np.int64)]])
        return np.lib.stride_tricks.sliding_window_view(numbers, self.length)[:, ::-1]

    def _read(self, layer: int, ngrams: torch.Tensor) -> TableRows:
        rows = hash_rows(ngrams, *self._hashes[layer])
        unique, place = rows.flatten().unique(return_inverse=True)  # in order: neighbours share pages of the file
        found = self.layers[layer].read_rows(unique)
        parts = (part.view(torch.uint8)[place].view(part.dtype).unflatten(0, rows.shape) for part in found)
        return TableRows(*(part.pin_memory() if self.device.type == "cuda" else part for part in parts))
