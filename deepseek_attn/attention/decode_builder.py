"""Builds a decode step's metadata from tensors that are already on the device, for CUDA graphs.

Shapes are fixed and nothing waits for the device. `MetadataBuilder` builds the same from a scheduled batch on the CPU,
for steps of any shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.attention.builder import LayerSpecs, add_pages, entry_groups, index_tensors
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.indices import DecodeRows


@dataclass(frozen=True)
class RowOwners:
    """Map between rows and requests where each of ``B`` requests has ``n`` rows; equal in all steps of this size.

    Attributes:
        query_start_loc: int32 ``[B + 1]``, first row of each request; token_to_req_indices: int32 ``[B * n]``.
    """

    query_start_loc: Tensor
    token_to_req_indices: Tensor

    @classmethod
    def create(cls, requests: int, rows_per_request: int, device: torch.device) -> RowOwners:
        requests_and_end = torch.arange(requests + 1, dtype=torch.int32, device=device)
        owners = requests_and_end[:-1].repeat_interleave(rows_per_request)
        return cls(requests_and_end * rows_per_request, owners)


@dataclass
class DecodeBatch:
    """``B`` requests with ``n`` rows each. Padding comes last: rows of a request, and requests of padding alone.

    Attributes:
        rows: their positions, below ``max_len``; owners: the requests that they belong to.
        tables: int32 ``[B, pages]`` by group, wide enough for ``max_len`` tokens.
        max_len: no request is longer after the step.
    """

    rows: DecodeRows
    owners: RowOwners
    tables: Mapping[str, Tensor]
    max_len: int


def build_decode_metadata(layers: LayerSpecs, layout: CacheLayout, batch: DecodeBatch) -> StepMetadata:
    """Metadata of a decode step for a set of layers.

    Every field equals that of `MetadataBuilder` for the same batch, with two intended differences: index rows of
    layers that read every entry are as wide as ``max_len`` needs, and while a CUDA graph is captured the CPU copies
    ``query_start_loc_cpu`` and ``seq_lens_cpu`` are empty, because a capture cannot read from the device. Only plain
    torch versions of the ops read them in a decode step.
    """
    rows, owners, tables, positions = batch.rows, batch.owners, batch.tables, batch.rows.positions
    requests, tokens = len(rows.seq_lens), len(positions)
    rows_per_request = tokens // requests
    captured = positions.is_meta or (positions.is_cuda and torch.cuda.is_current_stream_capturing())
    none, none_cpu = rows.seq_lens.new_empty(0), torch.empty(0, dtype=torch.int64, device="cpu")
    step = StepMetadata(
        positions=positions,
        token_to_req_indices=owners.token_to_req_indices,
        is_valid_token=rows.is_valid,
        query_start_loc=owners.query_start_loc,
        query_start_loc_cpu=none_cpu.int() if captured else owners.query_start_loc.cpu(),
        prefix_lens=rows.prefix_lens,
        seq_lens=rows.seq_lens,
        seq_lens_cpu=none_cpu if captured else rows.seq_lens.cpu().long(),
        num_decodes=requests,
        num_decode_tokens=tokens,
        max_query_len=rows_per_request,
        decode_query_len=rows_per_request,
        prefill_seq_lens=none,
        prefill_seq_lens_cpu=none_cpu,
        prefill_gather_lens=none,
        prefill_gather_lens_cpu=none_cpu,
        prefill_entry_lens={},
        block_tables=tables,
    )
    groups = entry_groups(layers, layout, tables, batch.max_len)
    return add_pages(step, layers, layout, groups, index_tensors(step, layout, groups))
