"""A decode step's metadata from tensors that are already on the device: fixed shapes, no sync, fit for a CUDA graph.

`MetadataBuilder` makes the same from a scheduled batch on the CPU, for steps of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.attention.builder import compress_batch, index_width
from deepseek_attn.cache.layout import STATE, WINDOW, WINDOW_PAGE, CacheLayout, entries_per_page, ratio_group
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.impls.metadata import DeepseekSparseMLAMetadata, DeepseekSparseSWAMetadata, StepMetadata
from deepseek_attn.kernels.indices import EntryGroup, StepIndices, decode_step_indices


@dataclass
class DecodeBatch:
    """``B`` requests with ``n`` rows each. Padding comes last: rows of a request, and requests of padding alone.

    Attributes:
        positions: int64 ``[B * n]``, below ``max_len``; of a padded row: no smaller than those of its request.
        valid: bool ``[B * n]``.
        tables: int32 ``[B, pages]`` by group, wide enough for ``max_len`` tokens.
        max_len: no request is longer after the step.
    """

    positions: torch.Tensor
    valid: torch.Tensor
    tables: dict[str, torch.Tensor]
    max_len: int

    @property
    def requests(self) -> int:
        return len(self.tables[WINDOW])


def build_decode_metadata(layers: tuple[LayerSpec, ...], layout: CacheLayout, batch: DecodeBatch) -> StepMetadata:
    """Metadata of a decode step for a set of layers; equal to what `MetadataBuilder` makes of the same batch."""
    return _DecodeMetadata(layers, layout, batch).build()


class _DecodeMetadata:
    def __init__(self, layers: tuple[LayerSpec, ...], layout: CacheLayout, batch: DecodeBatch):
        self.layers, self.layout, self.batch = layers, layout, batch
        device, requests, tokens = batch.positions.device, batch.requests, len(batch.positions)
        self.each = tokens // requests
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * self.each
        self.token_to_req = torch.arange(tokens, dtype=torch.int32, device=device) // self.each
        rows = batch.positions.view(requests, self.each)
        self.prefix_lens, self.seq_lens = rows[:, 0], rows[:, -1] + 1
        # a graph has no CPU side; plain torch versions of the ops ask for it
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.seq_lens_cpu = None if captured else self.seq_lens.cpu()
        self.starts_cpu = None if captured else self.starts.cpu()

    def build(self) -> StepMetadata:
        kinds = {(spec.ratio, spec.overlap): spec for spec in self.layers if not spec.swa_only}
        groups = [self.group(ratio) for ratio in sorted({ratio for ratio, _ in kinds})]
        batch = self.batch
        indices = decode_step_indices(
            batch.positions,
            self.token_to_req,
            batch.valid,
            batch.tables[WINDOW],
            WINDOW_PAGE,
            self.layout.window,
            groups,
        )
        compressor = {
            kind: compress_batch(
                spec,
                self.layout,
                batch.positions,
                self.token_to_req,
                self.starts,
                self.prefix_lens.int(),
                batch.tables[STATE][:, 0],
                indices.compressed_slots[spec.ratio],
                batch.valid,
                self.each,
            )
            for kind, spec in kinds.items()
        }
        sparse = {group.ratio: self.compressed(group, indices) for group in groups}
        return StepMetadata(batch.positions, self.window(indices), sparse, compressor)

    def group(self, ratio: int) -> EntryGroup:
        reads_all = any(not spec.has_indexer for spec in self.layers if spec.ratio == ratio)
        width = index_width(self.batch.max_len, ratio, self.layout) if reads_all else 0
        return EntryGroup(ratio, self.batch.tables[ratio_group(ratio)], entries_per_page(ratio), width)

    def window(self, indices: StepIndices) -> DeepseekSparseSWAMetadata:
        batch = self.batch
        none = batch.positions.new_empty(0, dtype=torch.int32)
        return DeepseekSparseSWAMetadata(
            block_table=batch.tables[WINDOW],
            slot_mapping=indices.slot_mapping,
            block_size=WINDOW_PAGE,
            seq_lens=self.seq_lens.int(),
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            is_valid_token=batch.valid,
            token_to_req_indices=self.token_to_req,
            decode_swa_indices=indices.swa.indices.unsqueeze(1),
            decode_swa_lens=indices.swa.lens,
            num_decodes=batch.requests,
            num_prefills=0,
            num_decode_tokens=len(batch.positions),
            num_prefill_tokens=0,
            prefill_seq_lens=none,
            prefill_gather_lens=none,
            prefill_seq_lens_cpu=torch.empty(0, dtype=torch.int32),
            prefill_gather_lens_cpu=torch.empty(0, dtype=torch.int32),
        )

    def compressed(self, group: EntryGroup, indices: StepIndices) -> DeepseekSparseMLAMetadata:
        meta = DeepseekSparseMLAMetadata(
            group.ratio, group.block_table, group.block_size, indices.compressed_slots[group.ratio], self.seq_lens_cpu
        )
        if group.width:
            rows, lens = indices.entries[group.ratio]
            meta.c128a_global_decode_topk_indices, meta.c128a_decode_topk_lens = rows.unsqueeze(1), lens
        return meta
