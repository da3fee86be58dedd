"""The FlashMLA backend of sparse MLA: backend and impl, over a BF16 cache or a cache of 656-byte FP8 entries."""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.cache.records_v32 import fp8_entry_bytes
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends.backend import SparseMLABackend
from deepseek_attn.v32.backends.builder import FlashMLASparseMetadataBuilder
from deepseek_attn.v32.backends.config import DeviceCapability
from deepseek_attn.v32.backends.gather import cp_gather_and_upconvert_fp8_kv_cache
from deepseek_attn.v32.backends.impl import SparseMLAImpl
from deepseek_attn.v32.backends.indices import triton_convert_req_index_to_global_index
from deepseek_attn.v32.backends.kernels import (
    SparseMLAKernels,
    compute_fp8_decode_padded_heads,
    compute_prefill_padded_heads,
    get_kernels,
)
from deepseek_attn.v32.backends.metadata import FlashMLASparseMetadata
from deepseek_attn.v32.backends.step import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode

logger = logging.getLogger(__name__)

FP8KernelMetadata = FlashMLASparseMetadata.FP8KernelMetadata
FP8SeparatePrefillDecode = FlashMLASparseMetadata.FP8SeparatePrefillDecode


class FlashMLASparseBackend(SparseMLABackend):
    """Names the classes of the FlashMLA backend and declares what FlashMLA's own kernels support.

    Notes:
        The plain-torch kernels support any device, head size and float dtype as well.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[FlashMLASparseImpl]:
        return FlashMLASparseImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashMLASparseMetadata]:
        return FlashMLASparseMetadata

    @staticmethod
    def get_builder_cls() -> type[FlashMLASparseMetadataBuilder]:
        return FlashMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [64]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major in (9, 10)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        rope_dim: int = 64,
    ) -> tuple[int, ...]:
        """Shape of a layer's cache: uint8 ``[blocks, block_size, 656]`` for FP8, else ``[blocks, block_size, 576]``.

        Args:
            num_kv_heads: not used, the latent is one head.
            rope_dim: rotated values among ``head_size``; 656 bytes are for 512 + 64.
        """
        if cache_dtype_str == "fp8_ds_mla":
            return num_blocks, block_size, fp8_entry_bytes(head_size - rope_dim, rope_dim)
        return num_blocks, block_size, head_size


class FlashMLASparseImpl(SparseMLAImpl):
    """Sparse MLA of one layer over its cache, absorbed: each query reads the tokens that the indexer selected for it.

    Three modes. A BF16 cache: the prefill kernel reads the cache itself, for every token. An FP8 cache, mixed batch:
    the FP8 kernel for every token. An FP8 cache, separate: the FP8 kernel for decodes; prefills gather their requests
    to a BF16 workspace, chunk by chunk. The config chooses between the last two.

    Args:
        workspace: holds gathered chunks, shared by the layers; None: the impl makes one.
        kernels: the kernels to call; None for those that the config names.
        Others: see `SparseMLAImpl`.

    Attributes:
        prefill_padding: smallest head count of the BF16 kernel, 64 or (SM100) 128.
    """

    backend_cls = FlashMLASparseBackend

    def __init__(self, *args, workspace: Workspace | None = None, kernels: SparseMLAKernels | None = None, **mla_args):
        super().__init__(*args, **mla_args)
        device = self.topk_indices_buffer.device
        if kernels is None:
            spec = self.config.attention_spec(self.head_size, self.qk_rope_head_dim)
            kernels = get_kernels(self.config.kernels, device, spec)
        self.kernels = kernels
        self.prefill_padding = 128 if gpu(device).capability[0] == 10 else 64
        if self.kernels.pads_heads:
            _warn_of_padding(self.num_heads, compute_prefill_padded_heads(self.num_heads, self.prefill_padding))
        self.workspace = Workspace(device) if workspace is None else workspace
        if self.config.use_fp8_kv_cache:
            self._prefill_workspace()

    @property
    def kernel_name(self) -> str:
        return self.kernels.name

    @staticmethod
    def _compute_fp8_decode_padded_heads(num_heads: int) -> int:
        return compute_fp8_decode_padded_heads(num_heads)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FlashMLASparseMetadata,
        layer: Any = None,
    ) -> tuple[Tensor, None]:
        """Attention of latent queries over the cache, which holds the new tokens already.

        Args:
            q: ``[T, heads, 576]``, or its parts ``[T, heads, 512]`` and ``[T, heads, 64]``. ``T`` rows as in the
                metadata, with or without the padding rows at the end.
            kv_c_and_k_pe_cache: ``[pages, n, 576]``, or uint8 ``[pages, n, 656]``.
            layer: not used.

        Returns:
            ``(out, None)``: ``[T, heads, 512]``; rows of padding and rows that see nothing are 0. Published versions
            disagree on the second value; the log-sum-exp is never needed here, so it is always None.
        """
        q = self._concat_query(q)
        if q.shape[0] == 0:
            return q.new_empty(0, self.num_heads, self.kv_lora_rank), None
        topk_indices = self._topk_indices(q.shape[0], attn_metadata)
        if attn_metadata.fp8_extra_metadata is None:
            return self._forward_bf16_kv(q, kv_c_and_k_pe_cache, topk_indices, attn_metadata), None
        return self._forward_fp8_kv(q, kv_c_and_k_pe_cache, topk_indices, attn_metadata), None

    def _forward_bf16_kv(
        self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, attn_metadata: FlashMLASparseMetadata
    ) -> Tensor:
        """The BF16 kernel over the cache viewed as rows: a slot is a row."""
        indices = self._convert(topk_indices, attn_metadata)
        return self._bf16_flash_mla_kernel(q, self._flat_cache(kv_cache), indices)

    def _forward_fp8_kv(
        self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, attn_metadata: FlashMLASparseMetadata
    ) -> Tensor:
        """Mixed or separate, as in the metadata."""
        if attn_metadata.fp8_use_mixed_batch:
            return self._forward_fp8_kv_mixed_batch(q, kv_cache, topk_indices, attn_metadata)
        return self._forward_fp8_kv_separate_prefill_decode(q, kv_cache, topk_indices, attn_metadata)

    def _forward_fp8_kv_mixed_batch(
        self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, attn_metadata: FlashMLASparseMetadata
    ) -> Tensor:
        """All tokens are the queries of one batch row: ``[1, T, heads, 576]``."""
        indices = self._convert(topk_indices, attn_metadata)
        out, _ = self._fp8_flash_mla_kernel(
            q.unsqueeze(0), kv_cache, indices.unsqueeze(0), attn_metadata.fp8_extra_metadata
        )
        return out.squeeze(0)

    def _forward_fp8_kv_separate_prefill_decode(
        self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, attn_metadata: FlashMLASparseMetadata
    ) -> Tensor:
        """One index conversion for all tokens, then the FP8 kernel for decodes and a BF16 call per prefill chunk."""
        fp8 = attn_metadata.fp8_extra_metadata
        indices = self._convert(topk_indices, attn_metadata, fp8.prefill)
        if fp8.prefill is None:
            return self._decode(q, kv_cache, indices, fp8.decode)
        decodes, chunks = fp8.num_decode_tokens, fp8.prefill.chunks
        if not decodes and len(chunks) == 1 and chunks[0].tokens_slice == slice(0, q.shape[0]):
            return self._prefill_chunk(q, kv_cache, indices, chunks[0])  # the kernel's result is the output
        out = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank)
        if fp8.decode is not None:
            out[:decodes] = self._decode(q[:decodes], kv_cache, indices[:decodes], fp8.decode)
        for chunk in chunks:
            rows = chunk.tokens_slice
            if rows.start < rows.stop:
                out[rows] = self._prefill_chunk(q[rows], kv_cache, indices[rows], chunk)
        out[attn_metadata.num_actual_tokens :] = 0
        return out

    def _prefill_chunk(
        self, q: Tensor, kv_cache: Tensor, indices: Tensor, chunk: FP8SeparatePrefillDecode.Prefill.Chunk
    ) -> Tensor:
        return self._bf16_flash_mla_kernel(q, self._gather_chunk(kv_cache, chunk), indices)

    def _gather_chunk(self, kv_cache: Tensor, chunk: FP8SeparatePrefillDecode.Prefill.Chunk) -> Tensor:
        """Gathers the chunk's requests to the workspace: bf16 ``[rows, 1, 576]``."""
        rows = self._prefill_workspace()[: chunk.chunk_tot_seqlen]
        cp_gather_and_upconvert_fp8_kv_cache(
            kv_cache,
            rows,
            chunk.block_table,
            chunk.seq_lens,
            chunk.workspace_starts,
            len(chunk.seq_lens),
            self.head_size - self.kv_lora_rank,
        )
        return rows.unsqueeze(1)

    def _decode(
        self, q: Tensor, kv_cache: Tensor, indices: Tensor, decode: FP8SeparatePrefillDecode.Decode | None
    ) -> Tensor:
        """The FP8 kernel for the rows of decodes, as ``[requests, query length, heads, 576]``."""
        if decode is None:  # padding rows only
            return q.new_zeros(q.shape[0], self.num_heads, self.kv_lora_rank)
        requests = q.shape[0] // decode.decode_query_len
        queries = reshape_query_for_spec_decode(q, requests)
        out, _ = self._fp8_flash_mla_kernel(
            queries, kv_cache, indices.view(*queries.shape[:2], -1), decode.kernel_metadata
        )
        return reshape_attn_output_for_spec_decode(out)

    def _fp8_flash_mla_kernel(
        self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor, kernel_metadata: FP8KernelMetadata
    ) -> tuple[Tensor, Tensor]:
        """The FP8 kernel on ``q [b, s, heads, 576]`` and slots ``[b, s, K]``.

        Returns:
            ``(out [b, s, heads, 512], lse [b, heads, s])``, both without the padding heads.
        """
        if self.kernels.pads_heads:
            q = _pad_heads(q, self._compute_fp8_decode_padded_heads(self.num_heads))
        out, lse = self.kernels.flash_mla_with_kvcache(
            q,
            kv_cache.view(torch.uint8).unsqueeze(-2),
            topk_indices,
            self.kv_lora_rank,
            self.softmax_scale,
            kernel_metadata,
        )
        return out[:, :, : self.num_heads], lse[:, : self.num_heads]

    def _bf16_flash_mla_kernel(self, q: Tensor, kv_cache: Tensor, topk_indices: Tensor) -> Tensor:
        """The BF16 kernel on ``q [T, heads, 576]``, keys ``[N, 1, 576]`` and rows ``[T, K]``.

        Notes:
            Padding heads are zeros, which is not needed for the result: heads are independent.
        """
        if self.kernels.pads_heads:
            q = _pad_heads(q, compute_prefill_padded_heads(self.num_heads, self.prefill_padding))
        out, _ = self.kernels.flash_mla_sparse_fwd(
            q, kv_cache, topk_indices.unsqueeze(1), self.softmax_scale, self.kv_lora_rank
        )
        return out[:, : self.num_heads]

    def _convert(
        self,
        topk_indices: Tensor,
        attn_metadata: FlashMLASparseMetadata,
        prefill: FP8SeparatePrefillDecode.Prefill | None = None,
    ) -> Tensor:
        """Converts positions to slots, and those of prefill tokens to rows of their chunk's workspace."""
        rows = topk_indices.shape[0]
        return triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:rows],
            attn_metadata.block_table,
            topk_indices,
            BLOCK_SIZE=attn_metadata.block_size,
            NUM_TOPK_TOKENS=topk_indices.shape[1],
            HAS_PREFILL_WORKSPACE=prefill is not None,
            prefill_workspace_request_ids=None if prefill is None else prefill.request_ids[:rows],
            prefill_workspace_starts=None if prefill is None else prefill.workspace_starts,
            slot_mapping=attn_metadata.slot_mapping[:rows],
        )

    def _prefill_workspace(self) -> Tensor:
        """bf16 ``[workspace_rows, 576]``, reserved when the impl is made. Its contents do not outlive a call."""
        return self.workspace.get(((self.config.workspace_rows, self.head_size), torch.bfloat16))[0]


@functools.cache
def _warn_of_padding(num_heads: int, padded_heads: int) -> None:
    """Warns, once per head count, that the kernels compute more heads than the model has."""
    if num_heads < padded_heads:
        logger.warning(
            "FlashMLA runs %d heads for the %d of this rank: the others are padding", padded_heads, num_heads
        )


def _pad_heads(q: Tensor, heads: int) -> Tensor:
    return F.pad(q, (0, 0, 0, heads - q.shape[-2])) if heads > q.shape[-2] else q
