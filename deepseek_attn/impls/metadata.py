"""Metadata of one step: lengths, block tables and index tensors, built once and shared by all layers of a kind.

``T`` tokens of ``B`` requests: ``D`` decode requests with ``Dt`` tokens come before ``R`` prefill requests with ``Rt``
tokens. Per-step tensors are on the device, except fields ending in ``_cpu``. Field names are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.kernels.insert.types import CompressBatch


@dataclass
class DeepseekSparseSWAMetadata:
    """Batch layout of a step and its sliding-window part, for all layers.

    Attributes:
        block_table: int32 ``[B, pages]`` of the window caches; block_size: tokens per page.
        slot_mapping: int64 ``[T]``, the slot of each token's key; -1 for padding.
        seq_lens: int32 ``[B]``; query_start_loc: int32 ``[B + 1]``, also on the CPU (empty while a graph is captured).
        is_valid_token: bool ``[T]``, false for padding; token_to_req_indices: int32 ``[T]``, the request of each token.
        decode_swa_indices, decode_swa_lens: int32 ``[Dt, 1, window]`` slots and ``[Dt]`` counts of the window's keys.
        prefill_seq_lens: int32 ``[R]``; prefill_gather_lens: int32 ``[R]`` window keys to gather,
            ``query_len + min(prefix_len, window - 1)``; with CPU copies, so that sizing a workspace needs no sync.
        tile_scheds: schedules of FlashMLA's decode kernel by layer kind ``(ratio, has_indexer)``: ``(0, False)`` window
            only, ``(4, True)`` C4A, ``(128, False)`` C128A; filled by the impl at the first layer of each kind.
        prefill_indices: workspace rows that prefill tokens read in layers without an indexer, by (ratio, chunk of
            requests); filled by the impl likewise.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    is_valid_token: torch.Tensor
    token_to_req_indices: torch.Tensor
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    prefill_seq_lens: torch.Tensor
    prefill_gather_lens: torch.Tensor
    prefill_seq_lens_cpu: torch.Tensor
    prefill_gather_lens_cpu: torch.Tensor
    tile_scheds: dict[tuple[int, bool], object] = field(default_factory=dict)
    prefill_indices: dict[tuple[int, object], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class DeepseekSparseMLAMetadata:
    """Compressed part of a step, for all layers of one ratio.

    Attributes:
        block_table: int32 ``[B, pages]``; block_size: entries per page.
        slot_mapping: int64 ``[T]``, the slot of the entry that a token completes; -1 if it completes none.
        seq_lens_cpu: int64 ``[B]``; empty while a CUDA graph is captured.
        prefill_entry_lens: int32 ``[R]`` entries of each prefill request after the step; None in a decode step.
        c128a_global_decode_topk_indices: int32 ``[Dt, 1, K']`` slots of every visible entry (layers without indexer).
        c128a_decode_topk_lens: int32 ``[Dt]``.
        c128a_prefill_topk_indices: int32 ``[Rt, K']`` entries 0..n-1, local to the request; None in a decode step.
    """

    ratio: int
    block_table: torch.Tensor
    block_size: int
    slot_mapping: torch.Tensor
    seq_lens_cpu: torch.Tensor
    prefill_entry_lens: torch.Tensor | None = None
    c128a_global_decode_topk_indices: torch.Tensor | None = None
    c128a_decode_topk_lens: torch.Tensor | None = None
    c128a_prefill_topk_indices: torch.Tensor | None = None


@dataclass
class StepMetadata:
    """Everything the layers of one step share.

    Attributes:
        positions: int64 ``[T]``.
        sparse: compressed part, by ratio; compressor: batch of the compressors, by (ratio, overlap).
        visible: number of entries that each token sees, by ratio; selected: that it reads, by (ratio, top-k). Filled
            by the first layer that needs them.
    """

    positions: torch.Tensor
    swa: DeepseekSparseSWAMetadata
    sparse: dict[int, DeepseekSparseMLAMetadata]
    compressor: dict[tuple[int, bool], CompressBatch]
    visible: dict[int, torch.Tensor] = field(default_factory=dict)
    selected: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def visible_of(self, ratio: int) -> torch.Tensor:
        """Number of compressed entries that each token sees: int64 ``[T]``, 0 for padding."""
        if ratio not in self.visible:
            self.visible[ratio] = ((self.positions + 1) // ratio).masked_fill_(~self.swa.is_valid_token, 0)
        return self.visible[ratio]

    def selected_of(self, ratio: int, topk: int) -> torch.Tensor:
        """Number of entries that each token reads when the best ``topk`` are selected: int32 ``[T]``."""
        if (ratio, topk) not in self.selected:
            self.selected[ratio, topk] = self.visible_of(ratio).clamp(max=topk).int()
        return self.selected[ratio, topk]
