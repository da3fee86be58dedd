"""Builds a backend's metadata once per step, without waiting for the device."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.utils.device import to_device
from deepseek_attn.v32.backends.config import AttentionCGSupport, KVCacheSpec, SparseMLAConfig
from deepseek_attn.v32.backends.kernels import (
    SparseMLAKernels,
    compute_fp8_decode_padded_heads,
    get_kernels,
    max_num_sm_parts,
)
from deepseek_attn.v32.backends.metadata import FlashMLASparseMetadata, SparseMLAMetadata
from deepseek_attn.v32.backends.step import StepInput, split_decodes_and_prefills

Metadata = TypeVar("Metadata", bound=SparseMLAMetadata)
FP8KernelMetadata = FlashMLASparseMetadata.FP8KernelMetadata
FP8SeparatePrefillDecode = FlashMLASparseMetadata.FP8SeparatePrefillDecode


class SparseMLAMetadataBuilder:
    """Base of both backends' builders: sizes and the buffer of request ids.

    Attributes:
        reorder_batch_threshold: requests of up to this many new tokens are decodes and must come first.
        req_id_per_token_buffer: int32 ``[max_num_batched_tokens]`` at a fixed address, for captured graphs.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        config: SparseMLAConfig,
        device: torch.device | str,
    ):
        self.kv_cache_spec, self.layer_names, self.config = kv_cache_spec, layer_names, config
        self.device = torch.device(device)
        self.topk_tokens, self.num_heads = config.topk_tokens, config.num_heads
        self.reorder_batch_threshold = config.reorder_batch_threshold
        self.req_id_per_token_buffer = torch.zeros(config.max_num_batched_tokens, dtype=torch.int32, device=self.device)

    def _fill_req_ids(self, step: StepInput) -> Tensor:
        """int32 ``[rows]`` request of each row, a view of the buffer; padding rows belong to request 0."""
        rows = step.num_padded_tokens
        if rows > self.req_id_per_token_buffer.shape[0]:
            raise ValueError(
                f"the step has {rows} rows and max_num_batched_tokens is {self.req_id_per_token_buffer.shape[0]}"
            )
        requests = torch.arange(step.num_reqs, dtype=torch.int32)
        ids = torch.repeat_interleave(requests, step.query_lens_cpu.long())
        self.req_id_per_token_buffer.zero_()
        self.req_id_per_token_buffer[: len(ids)].copy_(to_device(ids, self.device), non_blocking=True)
        return self.req_id_per_token_buffer[:rows]

    def _metadata(self, step: StepInput, cls: type[Metadata], **fields: Any) -> Metadata:
        """Metadata of the class ``cls`` with the fields that all backends have, and with ``fields``."""
        return cls(
            num_reqs=step.num_reqs,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            num_actual_tokens=step.num_actual_tokens,
            query_start_loc=step.query_start_loc,
            slot_mapping=step.slot_mapping,
            block_table=step.block_table,
            req_id_per_token=self._fill_req_ids(step),
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
            **fields,
        )


class FlashMLASparseMetadataBuilder(SparseMLAMetadataBuilder):
    """Metadata of `FlashMLASparseImpl`.

    Args:
        kv_cache_spec: page size and width of the cache.
        layer_names: layers that share the metadata.
        config: limits of the run and the choice between mixed and separate FP8 batches.
        device: of the metadata.
        kernels: the kernels whose schedules are made; None for those that `get_kernels` chooses for the device.

    Attributes:
        topk_tokens_tensor, max_model_len_tensor: int32 ``[max_num_seqs]`` constants; dummy_block_table: int32
            ``[max_num_seqs, 1]``. Arguments of the FP8 kernel that it does not read in sparse mode.
        tile_scheduler_metadata_buffer: int32 ``[max_num_sm_parts, 8]``; num_splits_buffer: int32
            ``[max_num_seqs + 1]``. Not read by the supported kernels, which allocate their own schedule.
    """

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        config: SparseMLAConfig,
        device: torch.device | str,
        kernels: SparseMLAKernels | None = None,
    ):
        super().__init__(kv_cache_spec, layer_names, config, device)
        self.use_fp8_kv_cache = config.use_fp8_kv_cache
        self.fp8_use_mixed_batch = config.fp8_use_mixed_batch
        self.fp8_decode_padded_heads = compute_fp8_decode_padded_heads(self.num_heads)
        if kernels is None:
            kernels = get_kernels(
                config.kernels, self.device, config.attention_spec(kv_cache_spec.head_size, kv_cache_spec.rope_dim)
            )
        self.kernels = kernels
        self.prefill_workspace_rows = config.workspace_rows
        cuda = self.device.type == "cuda"
        self.sm_count = gpu(self.device).multiprocessors if cuda else 1
        parts = max_num_sm_parts(self.sm_count, self.fp8_decode_padded_heads, gpu(self.device).capability[0])
        seqs = config.max_num_seqs

        def constant(shape: tuple[int, ...], value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self.device)

        self.topk_tokens_tensor = constant((seqs,), self.topk_tokens)
        self.max_model_len_tensor = constant((seqs,), config.max_model_len)
        self.dummy_block_table = constant((seqs, 1), 0)
        self.tile_scheduler_metadata_buffer = constant((parts, 8), 0)
        self.num_splits_buffer = constant((seqs + 1,), 0)

    def build(
        self, common_prefix_len: int, common_attn_metadata: StepInput, fast_build: bool = False
    ) -> FlashMLASparseMetadata:
        """Metadata of one step.

        Args:
            common_prefix_len: tokens that all requests share; not used, since the cache is read through indices.
            fast_build: not used, since there is only one way to build.

        Raises:
            ValueError: more requests or rows than the run was sized for, or a prefill longer than the workspace.
        """
        step = common_attn_metadata
        if step.num_reqs > self.config.max_num_seqs:
            raise ValueError(f"the step has {step.num_reqs} requests and max_num_seqs is {self.config.max_num_seqs}")
        meta = self._metadata(step, FlashMLASparseMetadata)
        if self.use_fp8_kv_cache:
            meta.fp8_use_mixed_batch = self.fp8_use_mixed_batch
            if self.fp8_use_mixed_batch:
                meta.fp8_extra_metadata = self._build_fp8_mixed_decode_prefill(step)
            else:
                meta.fp8_extra_metadata = self._build_fp8_separate_prefill_decode(step)
        return meta

    def _build_fp8_mixed_decode_prefill(self, common_attn_metadata: StepInput) -> FP8KernelMetadata:
        """All rows are the queries of one batch row of the kernel."""
        return self._kernel_metadata(1, common_attn_metadata.num_padded_tokens)

    def _build_fp8_separate_prefill_decode(self, common_attn_metadata: StepInput) -> FP8SeparatePrefillDecode:
        """Splits the batch: decodes of one query length first, the rest as chunks of the workspace."""
        step = common_attn_metadata
        counts = split_decodes_and_prefills(step, self.reorder_batch_threshold, require_uniform=True)
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = counts
        return FP8SeparatePrefillDecode(
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            decode=self._decode(step, num_decode_tokens, num_prefills) if num_decode_tokens else None,
            prefill=self._prefill(step, num_decodes) if num_prefills else None,
        )

    def _decode(self, step: StepInput, num_decode_tokens: int, num_prefills: int) -> FP8SeparatePrefillDecode.Decode:
        """Without prefills, the rows that pad a graph's batch are decoded too (they see nothing)."""
        query_len = int(step.query_start_loc_cpu[1])
        rows = num_decode_tokens if num_prefills else step.num_padded_tokens
        if rows % query_len:
            raise ValueError(
                f"{rows} rows for decodes of {query_len} new tokens each: pad the batch to a multiple of {query_len}"
            )
        return FP8SeparatePrefillDecode.Decode(self._kernel_metadata(rows // query_len, query_len), query_len)

    def _prefill(self, step: StepInput, num_decodes: int) -> FP8SeparatePrefillDecode.Prefill:
        seq_lens = step.seq_lens_cpu[num_decodes:]
        ranges = split_prefill_chunks(seq_lens, self.prefill_workspace_rows)
        starts = to_device(chunk_workspace_starts(seq_lens, ranges), self.device)
        query_lens = step.query_lens_cpu[num_decodes:].long()
        request_ids = torch.full((step.num_padded_tokens,), -1, dtype=torch.int32)
        first_row = int(step.query_start_loc_cpu[num_decodes])
        request_ids[first_row : step.num_actual_tokens] = torch.repeat_interleave(
            torch.arange(len(seq_lens), dtype=torch.int32), query_lens
        )
        rows = step.query_start_loc_cpu[num_decodes:].tolist()
        chunks = [
            FP8SeparatePrefillDecode.Prefill.Chunk(
                seq_lens=step.seq_lens[num_decodes + first : num_decodes + last],
                tokens_slice=slice(rows[first], rows[last]),
                block_table=step.block_table[num_decodes + first : num_decodes + last],
                req_start_idx=first,
                workspace_starts=starts[first:last],
                chunk_tot_seqlen=int(seq_lens[first:last].sum()),
            )
            for first, last in ranges
        ]
        return FP8SeparatePrefillDecode.Prefill(
            seq_lens=step.seq_lens[num_decodes:],
            request_ids=to_device(request_ids, self.device),
            workspace_starts=starts,
            chunks=chunks,
        )

    def _kernel_metadata(self, batch: int, query_len: int) -> FP8KernelMetadata:
        """Metadata of ``batch`` rows with ``query_len`` queries each. The schedule is fresh: the kernel fills it."""
        schedule, _ = self.kernels.get_mla_metadata(
            cache_seqlens=self.topk_tokens_tensor[:batch],
            num_q_tokens_per_head_k=query_len * self.fp8_decode_padded_heads,
            topk=self.topk_tokens,
            num_heads_q=self.fp8_decode_padded_heads,
            num_heads_k=1,
            is_fp8_kvcache=True,
        )
        return FP8KernelMetadata(schedule, self.dummy_block_table[:batch], self.max_model_len_tensor[:batch])


def split_prefill_chunks(seq_lens: Tensor, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Groups consecutive requests into chunks whose tokens together fit in the workspace, as many as fit in each.

    Args:
        seq_lens: integer ``[R]`` on the CPU, context and new tokens of each request.
        workspace_size: rows of the workspace.
        request_offset: added to both ends of every range.

    Returns:
        ``(first, last)`` ranges, ``last`` exclusive. ``[10, 15, 20, 5]`` in 30 rows gives ``[(0, 2), (2, 4)]``.

    Raises:
        ValueError: a request alone is longer than the workspace.
    """
    chunks: list[tuple[int, int]] = []
    first, used = 0, 0
    lengths = seq_lens.tolist()
    for index, length in enumerate(lengths):
        if length > workspace_size:
            raise ValueError(
                f"request {index} has {length} tokens and the prefill workspace {workspace_size} rows: "
                "raise prefill_workspace_rows or max_model_len"
            )
        if used + length > workspace_size:
            chunks.append((first + request_offset, index + request_offset))
            first, used = index, 0
        used += length
    if lengths:
        chunks.append((first + request_offset, len(lengths) + request_offset))
    return chunks


def chunk_workspace_starts(seq_lens: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
    """First workspace row of each request, counted from its chunk's start: int32 ``[R]``.

    ``[10, 15, 20, 5]`` in the chunks above starts at ``[0, 10, 0, 20]``.
    """
    lengths = seq_lens.long()
    starts = lengths.cumsum(0) - lengths
    for first, last in chunks:
        starts[first:last] -= starts[first].clone()
    return starts.int()
