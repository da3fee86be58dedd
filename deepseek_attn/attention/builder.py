"""Builds a step's metadata from a scheduled batch on the CPU.

`decode_builder` builds the same for decode steps from tensors on the device; both end in `add_pages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.cache.layout import (
    PAGE_TOKENS,
    STATE,
    TOKENS,
    WINDOW,
    WINDOW_PAGE,
    CacheLayout,
    entry_pages,
    state_rows,
)
from deepseek_attn.config.model import AnySpec, LayerSpec
from deepseek_attn.impls.metadata import (
    DeepseekSparseSWAMetadata,
    FlashMLASparseMetadata,
    StepMetadata,
    without_columns,
)
from deepseek_attn.kernels.indices import EntryGroup, StepIndices, step_indices
from deepseek_attn.kernels.insert import CompressBatch

LayerSpecs = tuple[AnySpec, ...]


@dataclass
class StepInput:
    """A scheduled batch, on the CPU. Requests with ``decode_threshold`` or fewer new tokens come first.

    Attributes:
        query_lens: new tokens of each request, int64 ``[B]``.
        seq_lens: length of each request after the step, int64 ``[B]``.
        block_tables: int32 ``[B, pages]`` by group of pages (`cache.layout`).
        token_valid: bool ``[T]`` or None for all valid; padding rows write nothing and see nothing.
        decode_threshold: requests of at most this many new tokens count as decodes: 1 + drafts.
        num_decodes: number of decodes, where ``query_lens`` are a part of the new tokens; None: by the threshold.
        window_starts: first token of each request whose key is in the window, int64 ``[B]``; None: as far as a query
            sees.
    """

    query_lens: Tensor
    seq_lens: Tensor
    block_tables: dict[str, Tensor]
    token_valid: Tensor | None = None
    decode_threshold: int = 1
    num_decodes: int | None = None
    window_starts: Tensor | None = None


class MetadataBuilder:
    """Builds a step's metadata for a set of layers.

    Args:
        mixed: prefill queries read cache pages in place, as decode queries do: every request counts as a decode.
            Otherwise their keys are gathered to a workspace first.
    """

    def __init__(
        self, layers: LayerSpecs, layout: CacheLayout, device: torch.device | str = "cpu", mixed: bool = False
    ):
        self.layers, self.layout, self.device, self.mixed = layers, layout, torch.device(device), mixed

    def build(self, batch: StepInput, layers: LayerSpecs | None = None) -> StepMetadata:
        """Metadata of one step: tensors per request are uploaded, tensors per token are built on the device.

        Args:
            layers: the layers that will read it; None: all of the builder's.

        Raises:
            ValueError: a decode request after a prefill request; sequences longer than ``max_model_len``.
        """
        longest = int(batch.seq_lens.max())
        if longest > self.layout.max_model_len:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds max_model_len={self.layout.max_model_len}, for which caches "
                "and rotary tables were made: raise max_model_len"
            )
        layers = self.layers if layers is None else layers
        step = self._rows(batch, layers)
        groups = entry_groups(layers, self.layout, step.block_tables, longest)
        step = add_pages(step, layers, self.layout, groups, index_tensors(step, self.layout, groups))
        if step.window_starts is not None and step.num_decode_tokens:
            swa, missing = step.window, step.missing_keys(self.layout.window)[: step.num_decode_tokens]
            swa.decode_swa_indices = without_columns(swa.decode_swa_indices.squeeze(1), 0, missing).unsqueeze(1)
        return step

    def _rows(self, batch: StepInput, layers: LayerSpecs) -> StepMetadata:
        """The step's rows, lengths and block tables; `add_pages` adds the page-dependent fields."""
        query_lens, seq_lens = batch.query_lens, batch.seq_lens
        decodes = len(query_lens) if self.mixed else batch.num_decodes
        if decodes is None:
            decodes = count_decodes(query_lens, batch.decode_threshold)
        starts, prefix_lens = F.pad(query_lens.cumsum(0), (1, 0)), seq_lens - query_lens
        prefill_seq_lens = seq_lens[decodes:]
        in_window = prefix_lens if batch.window_starts is None else prefix_lens - batch.window_starts
        gather_lens = query_lens[decodes:] + in_window[decodes:].clamp(0, max(self.layout.window - 1, 0))
        ratios = sorted({spec.ratio for spec in layers if spec.ratio}) if len(prefill_seq_lens) else []
        vectors = [starts, prefix_lens, seq_lens, prefill_seq_lens, gather_lens]
        vectors += [prefill_seq_lens // ratio for ratio in ratios]
        first_positions, sent = upload_vectors(prefix_lens - starts[:-1], vectors, self.device)
        query_start_loc, prefix_lens, sent_seq_lens, sent_prefill_seq_lens, prefill_gather_lens, *entry_lens = sent
        requests = torch.arange(len(query_lens), dtype=torch.int32, device=self.device)
        token_to_req = requests.repeat_interleave(query_start_loc.diff(), output_size=int(starts[-1]))
        positions = torch.arange(len(token_to_req), device=self.device) + first_positions[token_to_req]
        valid, decode_lens = batch.token_valid, query_lens[:decodes]
        return StepMetadata(
            positions=positions,
            token_to_req_indices=token_to_req,
            is_valid_token=torch.ones_like(positions, dtype=torch.bool) if valid is None else self._to(valid),
            query_start_loc=query_start_loc,
            query_start_loc_cpu=starts.int(),
            prefix_lens=prefix_lens,
            seq_lens=sent_seq_lens,
            seq_lens_cpu=seq_lens,
            num_decodes=decodes,
            num_decode_tokens=int(starts[decodes]),
            max_query_len=int(query_lens.max()),
            decode_query_len=int(decode_lens[0]) if decodes and bool((decode_lens == decode_lens[0]).all()) else 0,
            prefill_seq_lens=sent_prefill_seq_lens,
            prefill_seq_lens_cpu=prefill_seq_lens,
            prefill_gather_lens=prefill_gather_lens,
            prefill_gather_lens_cpu=gather_lens,
            prefill_entry_lens=dict(zip(ratios, entry_lens, strict=True)),
            block_tables={group: self._to(table) for group, table in batch.block_tables.items()},
            window_starts=None if batch.window_starts is None else self._to(batch.window_starts),
        )

    def _to(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def upload_vectors(wide: Tensor, vectors: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Copies int64 CPU vectors to ``device`` in one transfer: ``wide`` as int64, all others as int32.

    Sent as one int32 matrix with a vector per row, ``wide`` as pairs of int32. Rows are padded to a multiple of 16
    bytes, because kernels may load 16 bytes at once.
    """
    rows = [vector.tolist() for vector in (wide.view(torch.int32), *vectors)]
    width = -(-max(map(len, rows)) // 4) * 4
    packed = (
        torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device="cpu")
        .int()
        .to(device, non_blocking=True)
    )
    first, *others = [vector[: len(row)] for vector, row in zip(packed.unbind(), rows, strict=True)]
    return first.view(torch.int64), others


def index_tensors(step: StepMetadata, layout: CacheLayout, groups: list[EntryGroup]) -> StepIndices:
    """Index tensors of a step: of its tokens in the pages that hold all of them, and of each ratio's entries."""
    pages = WINDOW if WINDOW in step.block_tables else TOKENS
    return step_indices(
        step.positions,
        step.token_to_req_indices,
        step.is_valid_token,
        step.block_tables[pages],
        PAGE_TOKENS[pages],
        layout.window if pages == WINDOW else 0,
        groups,
        step.num_decode_tokens,
    )


def entry_groups(
    layers: LayerSpecs, layout: CacheLayout, tables: Mapping[str, Tensor], max_seq_len: int
) -> list[EntryGroup]:
    """Block table, page size and width of the index rows of each ratio, in a step of up to ``max_seq_len`` tokens."""
    groups = []
    for ratio in sorted({spec.ratio for spec in layers if spec.ratio}):
        specs = [spec for spec in layers if spec.ratio == ratio]
        pages = entry_pages(specs[0])
        listed = any(spec.lists_entries for spec in specs)
        width = active_width(max_seq_len // ratio, layout.max_model_len // ratio) if listed else 0
        groups.append(EntryGroup(ratio, tables[pages.group], pages.entries, width))
    return groups


def add_pages(
    step: StepMetadata,
    layers: LayerSpecs,
    layout: CacheLayout,
    groups: list[EntryGroup],
    indices: StepIndices,
) -> StepMetadata:
    """Adds the window, pages of entries and compressor batches to a step's rows."""
    if indices.swa is not None:
        step.swa = DeepseekSparseSWAMetadata(
            block_table=step.block_tables[WINDOW],
            slot_mapping=indices.slot_mapping,
            block_size=WINDOW_PAGE,
            decode_swa_indices=indices.swa.indices.unsqueeze(1),
            decode_swa_lens=indices.swa.lens,
        )
    for g in groups:
        entries = indices.entries.get(g.ratio)
        step.sparse[g.ratio] = FlashMLASparseMetadata(
            ratio=g.ratio,
            block_table=g.block_table,
            block_size=g.block_size,
            slot_mapping=indices.compressed_slots[g.ratio],
            c128a_global_decode_topk_indices=None if entries is None else entries.indices.unsqueeze(1),
            c128a_decode_topk_lens=None if entries is None else entries.lens,
            c128a_prefill_topk_indices=indices.prefill_entries.get(g.ratio),
        )
    for spec in {(s.ratio, s.overlap): s for s in layers if isinstance(s, LayerSpec) and s.compresses}.values():
        step.compressor[spec.ratio, spec.overlap] = CompressBatch(
            ratio=spec.ratio,
            overlap=spec.overlap,
            rows=state_rows(spec, layout.max_rollback),
            positions=step.positions,
            token_to_req=step.token_to_req_indices,
            query_start_loc=step.query_start_loc,
            prefix_lens=step.prefix_lens,
            ring_pages=step.block_tables[STATE][:, 0],
            slots=indices.compressed_slots[spec.ratio],
            valid=step.is_valid_token,
            max_query_len=step.max_query_len,
        )
    return step


def count_decodes(query_lens: Tensor, threshold: int) -> int:
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
