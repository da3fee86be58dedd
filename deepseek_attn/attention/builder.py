"""Builds a step's metadata from a scheduled batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    WINDOW_PAGE,
    CacheLayout,
    entries_per_page,
    ratio_group,
    state_rows,
)
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.impls.metadata import (
    DeepseekSparseMLAMetadata,
    DeepseekSparseSWAMetadata,
    StepMetadata,
)
from deepseek_attn.kernels.indices import (
    build_c128a_topk_indices,
    compute_swa_indices_and_lens,
    get_compressed_slot_mapping,
    slot_mapping_from_positions,
)
from deepseek_attn.kernels.insert import CompressBatch


@dataclass
class StepInput:
    """A scheduled batch, on the CPU. Requests with ``decode_threshold`` or fewer new tokens come first.

    Attributes:
        query_lens: new tokens of each request, int64 ``[B]``.
        seq_lens: length of each request after the step, int64 ``[B]``.
        block_tables: int32 ``[B, pages]`` by group (window, state, ratioR).
        token_valid: bool ``[T]`` or None: rows that are padding write nothing and see nothing.
        decode_threshold: requests of at most this many new tokens count as decodes.
    """

    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: dict[str, torch.Tensor]
    token_valid: torch.Tensor | None = None
    decode_threshold: int = 1


class MetadataBuilder:
    """Builds a step's metadata for a set of layers."""

    def __init__(self, layers: tuple[LayerSpec, ...], layout: CacheLayout, device: torch.device | str = "cpu"):
        self.layers, self.layout, self.device = layers, layout, torch.device(device)

    def build(self, step: StepInput) -> StepMetadata:
        """Metadata of one step, on the device: what is per request is uploaded, what is per token is made there.

        Raises:
            ValueError: a decode request after a prefill request.
        """
        batch = self._batch(step)
        positions, owners, table = batch.positions, batch.token_to_req, batch.tables[WINDOW]
        slots = slot_mapping_from_positions(positions, owners, table, WINDOW_PAGE)
        if step.token_valid is not None:
            slots.masked_fill_(~batch.valid, -1)
        swa = self._window(batch, slots)
        sparse = {ratio: self._compressed(batch, slots, ratio) for ratio in batch.entry_lens}
        compressor = {
            (spec.ratio, spec.overlap): self._compressor(batch, spec, swa, sparse[spec.ratio].slot_mapping)
            for spec in {(s.ratio, s.overlap): s for s in self.layers if not s.swa_only}.values()
        }
        return StepMetadata(positions, swa, sparse, compressor)

    def _batch(self, step: StepInput) -> _Batch:
        """The step's tensors on the device."""
        query_lens, seq_lens, decodes = (
            step.query_lens,
            step.seq_lens,
            count_decodes(step.query_lens, step.decode_threshold),
        )
        starts = F.pad(query_lens.cumsum(0), (1, 0))
        prefix_lens = seq_lens - query_lens
        gather_lens = (query_lens + prefix_lens.clamp(max=self.layout.window - 1))[decodes:]
        ratios = sorted({spec.ratio for spec in self.layers if not spec.swa_only})
        entry_lens = [seq_lens[decodes:] // ratio for ratio in ratios]
        firsts = (prefix_lens - starts[:-1]).view(torch.int32)  # int64, of the position of row 0
        firsts, *lens = self._uploaded(
            [firsts, starts, seq_lens, prefix_lens, seq_lens[decodes:], gather_lens, *entry_lens]
        )
        requests = torch.arange(len(query_lens), dtype=torch.int32, device=self.device)
        token_to_req = requests.repeat_interleave(lens[0].diff(), output_size=int(starts[-1]))
        positions = torch.arange(len(token_to_req), device=self.device) + firsts.view(torch.int64)[token_to_req]
        valid = step.token_valid
        return _Batch(
            step,
            decodes,
            int(starts[decodes]),
            starts.int(),
            gather_lens,
            *lens[:5],
            dict(zip(ratios, lens[5:], strict=True)),
            {group: self._to(table) for group, table in step.block_tables.items()},
            token_to_req,
            positions,
            torch.ones_like(positions, dtype=torch.bool) if valid is None else self._to(valid),
        )

    def _window(self, batch: _Batch, slots: torch.Tensor) -> DeepseekSparseSWAMetadata:
        tokens, decodes = batch.decode_tokens, batch.num_decodes
        indices, lens = compute_swa_indices_and_lens(
            batch.positions[:tokens],
            batch.token_to_req[:tokens],
            batch.tables[WINDOW],
            WINDOW_PAGE,
            self.layout.window,
            batch.valid[:tokens],
        )
        return DeepseekSparseSWAMetadata(
            block_table=batch.tables[WINDOW],
            slot_mapping=slots,
            block_size=WINDOW_PAGE,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.starts,
            query_start_loc_cpu=batch.starts_cpu,
            is_valid_token=batch.valid,
            token_to_req_indices=batch.token_to_req,
            decode_swa_indices=indices.unsqueeze(1),
            decode_swa_lens=lens,
            num_decodes=decodes,
            num_prefills=len(batch.step.query_lens) - decodes,
            num_decode_tokens=tokens,
            num_prefill_tokens=len(slots) - tokens,
            prefill_seq_lens=batch.prefill_seq_lens,
            prefill_gather_lens=batch.prefill_gather_lens,
            prefill_seq_lens_cpu=batch.step.seq_lens[decodes:],
            prefill_gather_lens_cpu=batch.prefill_gather_lens_cpu,
        )

    def _compressed(self, batch: _Batch, window_slots: torch.Tensor, ratio: int) -> DeepseekSparseMLAMetadata:
        positions, requests, valid = batch.positions, batch.token_to_req, batch.valid
        table, entries = batch.tables[ratio_group(ratio)], entries_per_page(ratio)
        slots = get_compressed_slot_mapping(positions, window_slots, requests, table, entries, ratio)
        lens = batch.entry_lens[ratio]
        meta = DeepseekSparseMLAMetadata(ratio, table, entries, slots, batch.step.seq_lens, lens)
        if all(spec.has_indexer for spec in self.layers if spec.ratio == ratio):
            return meta
        tokens, width = batch.decode_tokens, index_width(int(batch.step.seq_lens.max()), ratio, self.layout)
        indices, lens = build_c128a_topk_indices(
            positions[:tokens], ratio, requests[:tokens], table, entries, valid[:tokens], width
        )
        meta.c128a_global_decode_topk_indices, meta.c128a_decode_topk_lens = indices.unsqueeze(1), lens
        meta.c128a_prefill_topk_indices, _ = build_c128a_topk_indices(
            positions[tokens:], ratio, None, None, entries, valid[tokens:], width
        )
        return meta

    def _compressor(
        self, batch: _Batch, spec: LayerSpec, swa: DeepseekSparseSWAMetadata, slots: torch.Tensor
    ) -> CompressBatch:
        return compress_batch(
            spec,
            self.layout,
            batch.positions,
            swa.token_to_req_indices,
            swa.query_start_loc,
            batch.prefix_lens,
            batch.tables[STATE][:, 0],
            slots,
            swa.is_valid_token,
            int(batch.step.query_lens.max()),
        )

    def _to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _uploaded(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Vectors as int32 on the device: one upload, and each starts where a kernel may read 16 bytes at once."""
        rows = [part.tolist() for part in parts]
        width = -(-max(map(len, rows)) // 4) * 4
        packed = torch.tensor([row + [0] * (width - len(row)) for row in rows]).int()
        return [place[: len(row)] for place, row in zip(self._to(packed).unbind(), rows, strict=True)]


@dataclass
class _Batch:
    """A step on the device, but for what ends in ``_cpu``; the fields are those of the metadata."""

    step: StepInput
    num_decodes: int
    decode_tokens: int
    starts_cpu: torch.Tensor
    prefill_gather_lens_cpu: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    prefill_seq_lens: torch.Tensor
    prefill_gather_lens: torch.Tensor
    entry_lens: dict[int, torch.Tensor]
    tables: dict[str, torch.Tensor]
    token_to_req: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor


def compress_batch(
    spec: LayerSpec,
    layout: CacheLayout,
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    ring_pages: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
    max_query_len: int,
) -> CompressBatch:
    """A step's batch for the compressors of layers like ``spec``; the tensors are those of `CompressBatch`."""
    return CompressBatch(
        spec.ratio,
        spec.overlap,
        state_rows(spec, layout.max_rollback),
        positions,
        token_to_req,
        query_start_loc,
        prefix_lens,
        ring_pages,
        slots,
        valid,
        max_query_len,
    )


def count_decodes(query_lens: torch.Tensor, threshold: int) -> int:
    """Number of leading requests with at most ``threshold`` new tokens.

    Raises:
        ValueError: such a request comes after a longer one.
    """
    decode = query_lens <= threshold
    count = int(decode.long().cumprod(0).sum())
    if bool(decode[count:].any()):
        raise ValueError(
            f"requests of up to {threshold} new tokens must come first; the query lengths are {query_lens.tolist()}"
        )
    return count


def index_width(length: int, ratio: int, layout: CacheLayout) -> int:
    """Columns of the index rows of layers that read every entry, in a step of sequences up to ``length`` tokens."""
    return active_width(length // ratio, layout.max_model_len // ratio)


def active_width(entries: int, limit: int) -> int:
    """Columns of an index row for up to ``entries`` entries: a power of two from 128, within the padded ``limit``."""
    width = max(INDEX_ALIGN, 1 << max(entries - 1, 0).bit_length())
    return min(width, -(-max(limit, 1) // INDEX_ALIGN) * INDEX_ALIGN)


INDEX_ALIGN = 128  # sparse prefill kernels take index rows in multiples of this
