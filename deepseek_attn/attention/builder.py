"""Builds a step's metadata from a scheduled batch on the CPU.

`decode_builder` builds the same for decode steps from tensors on the device; both end in `assemble`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

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
    EntryGroup,
    StepIndices,
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
        token_valid: bool ``[T]`` or None for all valid; padding rows write nothing and see nothing.
        decode_threshold: requests of at most this many new tokens count as decodes.
    """

    query_lens: Tensor
    seq_lens: Tensor
    block_tables: dict[str, Tensor]
    token_valid: Tensor | None = None
    decode_threshold: int = 1


@dataclass
class StepTensors:
    """A step's tensors on the device, except fields ending in ``_cpu``. Names as in the metadata.

    Attributes:
        tables: int32 ``[B, pages]`` by group.
        positions: int64 ``[T]``; token_to_req: int32 ``[T]``; valid: bool ``[T]``.
        query_start_loc: int32 ``[B + 1]``; prefix_lens, seq_lens: int32 ``[B]``, lengths before and after the step.
        max_query_len: new tokens of a request at most.
        prefill_entry_lens: int32 ``[R]`` by ratio. Fields of prefills are empty in a decode step.
    """

    tables: Mapping[str, Tensor]
    positions: Tensor
    token_to_req: Tensor
    valid: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    prefill_seq_lens: Tensor
    prefill_seq_lens_cpu: Tensor
    prefill_gather_lens: Tensor
    prefill_gather_lens_cpu: Tensor
    prefill_entry_lens: dict[int, Tensor] = field(default_factory=dict)


class MetadataBuilder:
    """Builds a step's metadata for a set of layers."""

    def __init__(self, layers: tuple[LayerSpec, ...], layout: CacheLayout, device: torch.device | str = "cpu"):
        self.layers, self.layout, self.device = layers, layout, torch.device(device)

    def build(self, batch: StepInput) -> StepMetadata:
        """Metadata of one step: tensors per request are uploaded, tensors per token are built on the device.

        Raises:
            ValueError: a decode request after a prefill request.
        """
        step = self._upload(batch)
        groups = entry_groups(self.layers, self.layout, step.tables, int(batch.seq_lens.max()))
        slots = slot_mapping_from_positions(step.positions, step.token_to_req, step.tables[WINDOW], WINDOW_PAGE)
        if batch.token_valid is not None:
            slots.masked_fill_(~step.valid, -1)
        tokens = step.num_decode_tokens
        positions, token_to_req, valid = step.positions[:tokens], step.token_to_req[:tokens], step.valid[:tokens]
        swa = compute_swa_indices_and_lens(
            positions, token_to_req, step.tables[WINDOW], WINDOW_PAGE, self.layout.window, valid
        )
        compressed, entries, prefill_entries = {}, {}, {}
        for g in groups:
            compressed[g.ratio] = get_compressed_slot_mapping(
                step.positions, slots, step.token_to_req, g.block_table, g.block_size, g.ratio
            )
            if g.width:
                entries[g.ratio] = build_c128a_topk_indices(
                    positions, g.ratio, token_to_req, g.block_table, g.block_size, valid, g.width
                )
            if g.width and len(step.prefill_seq_lens):
                prefill_entries[g.ratio] = build_c128a_topk_indices(
                    step.positions[tokens:], g.ratio, None, None, g.block_size, step.valid[tokens:], g.width
                ).indices
        indices = StepIndices(slots, swa, compressed, entries)
        return assemble(self.layers, self.layout, step, indices, prefill_entries)

    def _upload(self, batch: StepInput) -> StepTensors:
        query_lens, seq_lens = batch.query_lens, batch.seq_lens
        decodes = count_decodes(query_lens, batch.decode_threshold)
        starts, prefix_lens = F.pad(query_lens.cumsum(0), (1, 0)), seq_lens - query_lens
        prefill_seq_lens = seq_lens[decodes:]
        gather_lens = query_lens[decodes:] + prefix_lens[decodes:].clamp(max=self.layout.window - 1)
        ratios = sorted({spec.ratio for spec in self.layers if not spec.swa_only}) if len(prefill_seq_lens) else []
        vectors = [starts, prefix_lens, seq_lens, prefill_seq_lens, gather_lens]
        vectors += [prefill_seq_lens // ratio for ratio in ratios]
        first_positions, sent = upload_vectors(prefix_lens - starts[:-1], vectors, self.device)
        query_start_loc, prefix_lens, seq_lens, prefill_seq_lens, prefill_gather_lens, *entry_lens = sent
        requests = torch.arange(len(query_lens), dtype=torch.int32, device=self.device)
        token_to_req = requests.repeat_interleave(query_start_loc.diff(), output_size=int(starts[-1]))
        positions = torch.arange(len(token_to_req), device=self.device) + first_positions[token_to_req]
        valid = batch.token_valid
        return StepTensors(
            tables={group: self._to(table) for group, table in batch.block_tables.items()},
            positions=positions,
            token_to_req=token_to_req,
            valid=torch.ones_like(positions, dtype=torch.bool) if valid is None else self._to(valid),
            query_start_loc=query_start_loc,
            query_start_loc_cpu=starts.int(),
            prefix_lens=prefix_lens,
            seq_lens=seq_lens,
            seq_lens_cpu=batch.seq_lens,
            num_decodes=decodes,
            num_decode_tokens=int(starts[decodes]),
            max_query_len=int(query_lens.max()),
            prefill_seq_lens=prefill_seq_lens,
            prefill_seq_lens_cpu=batch.seq_lens[decodes:],
            prefill_gather_lens=prefill_gather_lens,
            prefill_gather_lens_cpu=gather_lens,
            prefill_entry_lens=dict(zip(ratios, entry_lens, strict=True)),
        )

    def _to(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def upload_vectors(wide: Tensor, vectors: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Copies int64 CPU vectors to ``device`` in one transfer: ``wide`` as int64, the others as int32.

    Sent as one int32 matrix with a vector per row, ``wide`` as pairs of int32. Rows are padded to a multiple of 16
    bytes, because kernels may load 16 bytes at once.
    """
    rows = [vector.tolist() for vector in (wide.view(torch.int32), *vectors)]
    width = -(-max(map(len, rows)) // 4) * 4
    packed = torch.tensor([row + [0] * (width - len(row)) for row in rows]).int().to(device, non_blocking=True)
    first, *others = [place[: len(row)] for place, row in zip(packed.unbind(), rows, strict=True)]
    return first.view(torch.int64), others


def entry_groups(
    layers: tuple[LayerSpec, ...], layout: CacheLayout, tables: Mapping[str, Tensor], max_seq_len: int
) -> list[EntryGroup]:
    """Block table, page size and width of the index rows of each ratio, in a step of up to ``max_seq_len`` tokens."""
    groups = []
    for ratio in sorted({spec.ratio for spec in layers if not spec.swa_only}):
        reads_all = any(not spec.has_indexer for spec in layers if spec.ratio == ratio)
        width = active_width(max_seq_len // ratio, layout.max_model_len // ratio) if reads_all else 0
        groups.append(EntryGroup(ratio, tables[ratio_group(ratio)], entries_per_page(ratio), width))
    return groups


def assemble(
    layers: tuple[LayerSpec, ...],
    layout: CacheLayout,
    step: StepTensors,
    indices: StepIndices,
    prefill_entries: Mapping[int, Tensor],
) -> StepMetadata:
    """Metadata of a step from its tensors and indices.

    Args:
        indices: slots of all tokens; rows of window slots and of entries of decode tokens.
        prefill_entries: by ratio, int32 ``[Rt, K']`` entries of prefill tokens of layers that read every entry.
    """
    swa = DeepseekSparseSWAMetadata(
        block_table=step.tables[WINDOW],
        slot_mapping=indices.slot_mapping,
        block_size=WINDOW_PAGE,
        seq_lens=step.seq_lens,
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc_cpu,
        is_valid_token=step.valid,
        token_to_req_indices=step.token_to_req,
        decode_swa_indices=indices.swa.indices.unsqueeze(1),
        decode_swa_lens=indices.swa.lens,
        num_decodes=step.num_decodes,
        num_prefills=len(step.seq_lens) - step.num_decodes,
        num_decode_tokens=step.num_decode_tokens,
        num_prefill_tokens=len(step.positions) - step.num_decode_tokens,
        prefill_seq_lens=step.prefill_seq_lens,
        prefill_gather_lens=step.prefill_gather_lens,
        prefill_seq_lens_cpu=step.prefill_seq_lens_cpu,
        prefill_gather_lens_cpu=step.prefill_gather_lens_cpu,
    )
    sparse = {}
    for ratio, slots in indices.compressed_slots.items():
        entries = indices.entries.get(ratio)
        sparse[ratio] = DeepseekSparseMLAMetadata(
            ratio=ratio,
            block_table=step.tables[ratio_group(ratio)],
            block_size=entries_per_page(ratio),
            slot_mapping=slots,
            seq_lens_cpu=step.seq_lens_cpu,
            prefill_entry_lens=step.prefill_entry_lens.get(ratio),
            c128a_global_decode_topk_indices=None if entries is None else entries.indices.unsqueeze(1),
            c128a_decode_topk_lens=None if entries is None else entries.lens,
            c128a_prefill_topk_indices=prefill_entries.get(ratio),
        )
    compressor = {
        (spec.ratio, spec.overlap): CompressBatch(
            ratio=spec.ratio,
            overlap=spec.overlap,
            rows=state_rows(spec, layout.max_rollback),
            positions=step.positions,
            token_to_req=step.token_to_req,
            query_start_loc=step.query_start_loc,
            prefix_lens=step.prefix_lens,
            ring_pages=step.tables[STATE][:, 0],
            slots=indices.compressed_slots[spec.ratio],
            valid=step.valid,
            max_query_len=step.max_query_len,
        )
        for spec in {(s.ratio, s.overlap): s for s in layers if not s.swa_only}.values()
    }
    return StepMetadata(step.positions, swa, sparse, compressor)


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


def active_width(entries: int, limit: int) -> int:
    """Columns of an index row for up to ``entries`` entries: a power of two from 128, within the padded ``limit``."""
    width = max(INDEX_ALIGN, 1 << max(entries - 1, 0).bit_length())
    return min(width, -(-max(limit, 1) // INDEX_ALIGN) * INDEX_ALIGN)


INDEX_ALIGN = 128  # sparse prefill kernels need index rows of multiples of this
