"""Metadata of one step: lengths, block tables and index tensors, built once and shared by all layers.

``T`` tokens of ``B`` requests: ``D`` decode requests with ``Dt`` tokens come before ``R`` prefill requests with ``Rt``
tokens. Tensors are on the device, except fields ending in ``_cpu``. Field names are vLLM's. One `StepMetadata` serves
every model family: DeepSeek-V4 has a window and compressed entries, DeepSeek-V3.2 one entry per token and no window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.impls.step_batch import StepBatch
from deepseek_attn.kernels.indices import EntryCounts, entry_counts
from deepseek_attn.kernels.insert.types import CompressBatch
from deepseek_attn.layers.engram import LayerRows


@dataclass
class DeepseekSparseSWAMetadata:
    """Sliding-window part of a step, for all layers with a window.

    Attributes:
        block_table: int32 ``[B, pages]`` of the window caches; block_size: tokens per page.
        slot_mapping: int64 ``[T]``, the slot of each token's key; -1 for padding.
        decode_swa_indices, decode_swa_lens: int32 ``[Dt, 1, window]`` slots and ``[Dt]`` counts of the window's keys.
    """

    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    decode_swa_indices: Tensor
    decode_swa_lens: Tensor


@dataclass
class FlashMLASparseMetadata:
    """Pages of entries in a step, for all layers of one ratio: one entry per ``ratio`` tokens, in V3.2 one per token.

    Attributes:
        block_table: int32 ``[B, pages]``; block_size: entries per page.
        slot_mapping: int64 ``[T]``, the slot of the entry that a token completes; -1 for other tokens.
        c128a_global_decode_topk_indices: int32 ``[Dt, 1, K']`` slots of every visible entry (layers without indexer).
        c128a_decode_topk_lens: int32 ``[Dt]``.
        c128a_prefill_topk_indices: int32 ``[Rt, K']`` entries 0..n-1, local to the request; None in a decode step. All
            three are None if every layer has an indexer.
    """

    ratio: int
    block_table: Tensor
    block_size: int
    slot_mapping: Tensor
    c128a_global_decode_topk_indices: Tensor | None = None
    c128a_decode_topk_lens: Tensor | None = None
    c128a_prefill_topk_indices: Tensor | None = None

    @property
    def decode_entries(self) -> tuple[Tensor, Tensor]:
        """Slots ``[Dt, K']`` and counts ``[Dt]`` of every visible entry, for layers without an indexer."""
        slots, lens = self.c128a_global_decode_topk_indices, self.c128a_decode_topk_lens
        if slots is None or lens is None:
            raise RuntimeError(f"the step's metadata lists no entries of ratio {self.ratio} for its decode tokens")
        return slots.squeeze(1), lens

    @property
    def prefill_entries(self) -> Tensor:
        """Entries ``[Rt, K']``, local to the request, of prefill tokens in layers without an indexer."""
        if self.c128a_prefill_topk_indices is None:
            raise RuntimeError(f"the step's metadata lists no entries of ratio {self.ratio} for its prefill tokens")
        return self.c128a_prefill_topk_indices


Key = TypeVar("Key")
Result = TypeVar("Result")


class Once(dict[Key, Result]):
    """Results that layers of a step share, by key; the first layer that needs a result computes it."""

    def once(self, key: Key, compute: Callable[[], Result]) -> Result:
        """The result for ``key``."""
        if key not in self:
            self[key] = compute()
        return self[key]


@dataclass
class LayerResults:
    """Results that layers of a step pass to later layers. Empty when the step begins.

    Attributes:
        entry_counts: see `StepMetadata.entry_counts`; by (ratio, top-k).
        prefill_rows: workspace rows that prefill tokens read in layers without an indexer, and their number, by
            (ratio, `PrefillChunk`).
        schedules: of FlashMLA's decode kernel, by layer kind (ratio, has_indexer): ``(0, False)`` window only,
            ``(4, True)`` C4A, ``(128, False)`` C128A, ``(1, True)`` V3.2.
        computed: V4.1: numbers of the layers that have computed the step.
        selected_by: V4.1: the layer that last filled the buffer of selected entries.
        decode_topk_slots: V4.1: int32 ``[Dt, index_topk]``, cache slots of its decode tokens' selected entries.
        candidate_blocks: V4.1: int32 ``[T, n]`` blocks of entries to which later selections are limited; None: no
            limit.
    """

    entry_counts: Once[tuple[int, int], EntryCounts] = field(default_factory=Once)
    prefill_rows: Once[tuple[int, object], tuple[Tensor, Tensor]] = field(default_factory=Once)
    schedules: Once[tuple[int, bool], Any] = field(default_factory=Once)
    computed: set[int] = field(default_factory=set)
    selected_by: int | None = None
    decode_topk_slots: Tensor | None = None
    candidate_blocks: Tensor | None = None


OnSelection = Callable[[int, Tensor, Tensor | None], Tensor | None]
"""Called by each layer whose indexer has selected, with its number, the entries int32 ``[T, index_topk]`` in the buffer
that attention reads, which it may replace, and ``decode_topk_slots``. Returns the latter, or None if it replaced rows.
"""


@dataclass
class TrailingStep:
    """The trailing rows of a step that ``layer`` and all later layers compute; V4.1 (`config.trailing`).

    Attributes:
        layer: number of the first such layer.
        queries_only: this layer still makes keys and entries of all rows.
        rows: int64 ``[T']``, indices of these rows in the outer step; None for all rows.
        step: metadata of these rows, whose own ``trailing`` may reduce them further; None without rows.
    """

    layer: int
    queries_only: bool
    rows: Tensor | None
    step: StepMetadata | None

    def take(self, tensor: Tensor) -> Tensor:
        """The trailing rows ``[T', ...]`` of a tensor ``[T, ...]`` of the outer step."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def begin(self, outer: LayerResults) -> StepMetadata:
        """Copies the outer step's results for later layers into ``step``, and returns it."""
        if self.step is None:
            raise RuntimeError("no row of this step is computed by the layers from this one on")
        results = self.step.results
        results.computed = outer.computed
        if outer.candidate_blocks is not None:
            results.candidate_blocks = self.take(outer.candidate_blocks)
        if self.rows is None:
            results.selected_by, results.decode_topk_slots = outer.selected_by, outer.decode_topk_slots
        return self.step


@dataclass
class StepMetadata:
    """Everything the layers of one step share.

    Attributes:
        positions: int64 ``[T]``; token_to_req_indices: int32 ``[T]``, the request of each token.
        is_valid_token: bool ``[T]``, false for padding.
        query_start_loc: int32 ``[B + 1]``, also on the CPU (empty while a graph is captured).
        prefix_lens, seq_lens: int32 ``[B]``, lengths before and after the step; seq_lens_cpu: int64 (empty likewise).
        num_decodes, num_decode_tokens: ``D`` and ``Dt``; max_query_len: maximum of new tokens of a request.
        decode_query_len: new tokens of every decode request; 0 if they differ.
        prefill_seq_lens: int32 ``[R]``; prefill_gather_lens: int32 ``[R]`` window keys to gather,
            ``query_len + min(prefix_len, window - 1)``; with copies on the CPU: sizing a workspace needs no sync.
        prefill_entry_lens: int32 ``[R]`` entries of each prefill request after the step, by ratio.
        block_tables: int32 ``[B, pages]`` by group of pages.
        swa: the window; None for a model without one.
        sparse: pages of entries, by ratio; compressor: batch of the compressors, by (ratio, overlap).
        engram: looked-up rows of Engram tables, by layer; empty for models without Engram.
        batch: the batch that layers validate a call against; None in a runner's own steps, which need no validation.
        observer: called by each layer after its attention; usually None.
        on_selection: see `OnSelection`; usually None.
        window_starts: int64 ``[B]``, the first token of each request whose window key was computed; None: the window of
            every query is complete.
        trailing: the trailing rows that later layers compute; None: all layers compute all rows.
        results: filled by the layers; all other fields are inputs.
    """

    positions: Tensor
    token_to_req_indices: Tensor
    is_valid_token: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    decode_query_len: int
    prefill_seq_lens: Tensor
    prefill_seq_lens_cpu: Tensor
    prefill_gather_lens: Tensor
    prefill_gather_lens_cpu: Tensor
    prefill_entry_lens: Mapping[int, Tensor]
    block_tables: Mapping[str, Tensor]
    swa: DeepseekSparseSWAMetadata | None = None
    sparse: dict[int, FlashMLASparseMetadata] = field(default_factory=dict)
    compressor: dict[tuple[int, bool], CompressBatch] = field(default_factory=dict)
    engram: Mapping[int, LayerRows] = field(default_factory=dict)
    batch: StepBatch | None = None
    observer: Callable[[AttentionCall], None] | None = None
    on_selection: OnSelection | None = None
    window_starts: Tensor | None = None
    trailing: TrailingStep | None = None
    results: LayerResults = field(default_factory=LayerResults)

    @property
    def window(self) -> DeepseekSparseSWAMetadata:
        """The window part of the step. RuntimeError for the metadata of a model without a window."""
        if self.swa is None:
            raise RuntimeError("the step's metadata has no window: it was built for another model")
        return self.swa

    @property
    def num_prefills(self) -> int:
        return len(self.seq_lens) - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        return len(self.positions) - self.num_decode_tokens

    def trailing_at(self, layer: int) -> TrailingStep | None:
        """The trailing rows if ``layer`` is the first layer that computes only these; else None."""
        return self.trailing if self.trailing is not None and self.trailing.layer == layer else None

    def parts(self) -> Iterator[StepMetadata]:
        """This metadata, then the metadata of each smaller set of trailing rows."""
        step: StepMetadata | None = self
        while step is not None:
            yield step
            step = None if step.trailing is None else step.trailing.step

    def forget_results(self) -> None:
        """Empties `results`, of trailing rows too: what layers then compute is as in the first run of the step."""
        for step in list(self.parts()):
            step.results = LayerResults()

    def forget_watchers(self) -> None:
        """Drops observers once the step is computed: layers keep its metadata, and observers may refer to the model."""
        for step in self.parts():
            step.observer = step.on_selection = None

    def missing_keys(self, window: int) -> Tensor:
        """Number of keys missing at the start of each token's window because they were not computed, int64 ``[T]``."""
        if self.window_starts is None:
            return torch.zeros_like(self.positions)
        oldest = (self.positions - window + 1).clamp(min=0)
        return (self.window_starts[self.token_to_req_indices.long()] - oldest).clamp(min=0)

    def entry_counts(self, ratio: int, topk: int) -> EntryCounts:
        """Number of entries visible to each token, and number that it reads if the best ``topk`` are selected."""
        positions, valid = self.positions, self.is_valid_token
        return self.results.entry_counts.once((ratio, topk), lambda: entry_counts(positions, valid, ratio, topk))


def without_columns(indices: Tensor, first: Tensor | int, count: Tensor) -> Tensor:
    """Index rows ``[T, K]`` with ``count [T]`` columns from ``first`` (a number, or ``[T]``) on set to -1 (no key)."""
    column = torch.arange(indices.shape[1], dtype=torch.int64, device=indices.device)
    begin = first.unsqueeze(1) if isinstance(first, Tensor) else first
    return indices.masked_fill((column >= begin) & (column < begin + count.unsqueeze(1)), -1)
