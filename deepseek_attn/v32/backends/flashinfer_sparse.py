"""The FlashInfer backend of sparse MLA (TRT-LLM kernels, Blackwell): backend, builder and impl, over a BF16 cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.v32.backends import flashinfer_adapter
from deepseek_attn.v32.backends.backend import SparseMLABackend
from deepseek_attn.v32.backends.builder import SparseMLAMetadataBuilder
from deepseek_attn.v32.backends.config import DeviceCapability
from deepseek_attn.v32.backends.impl import SparseMLAImpl
from deepseek_attn.v32.backends.indices import triton_convert_req_index_to_global_index
from deepseek_attn.v32.backends.metadata import FlashInferMLASparseMetadata
from deepseek_attn.v32.backends.step import StepInput


class FlashInferMLASparseBackend(SparseMLABackend):
    """Names the classes of the FlashInfer backend and declares what FlashInfer's own kernel supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[FlashInferMLASparseImpl]:
        return FlashInferMLASparseImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashInferMLASparseMetadata]:
        return FlashInferMLASparseMetadata

    @staticmethod
    def get_builder_cls() -> type[FlashInferMLASparseMetadataBuilder]:
        return FlashInferMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [32, 64]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major == 10

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability,
        hf_text_config: Any = None,
    ) -> str | None:
        """Why a model cannot use the backend, or None if it can.

        Args:
            hf_text_config: the model's config; None (unknown) is accepted.
            The others are checked elsewhere and not used here.
        """
        if hf_text_config is None:
            return None
        qk_nope_head_dim = getattr(hf_text_config, "qk_nope_head_dim", 1)
        if qk_nope_head_dim != 128:
            return f"FlashInfer's sparse MLA needs qk_nope_head_dim 128, the model has {qk_nope_head_dim}"
        if getattr(hf_text_config, "index_topk", None) is None:
            return "FlashInfer's sparse MLA needs a model with an indexer (index_topk in its config)"
        return None

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's cache, ``[blocks, block_size, head_size]``; the kernel's view adds a head dim ("HND")."""
        return num_blocks, block_size, head_size

    @staticmethod
    def supported(device: torch.device | str) -> tuple[bool, str]:
        """Whether FlashInfer's kernel runs on ``device``, and the reason. The impl serves either way."""
        return flashinfer_adapter.supported(device)


class FlashInferMLASparseMetadataBuilder(SparseMLAMetadataBuilder):
    """Builds the metadata of `FlashInferMLASparseImpl`: the batch and its request ids."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: StepInput, fast_build: bool = False
    ) -> FlashInferMLASparseMetadata:
        """Metadata of one step; the first and the last argument are not used.

        Raises:
            ValueError: more rows than the run was sized for.
        """
        step = common_attn_metadata
        return self._metadata(step, FlashInferMLASparseMetadata, seq_lens=step.seq_lens)


class FlashInferMLASparseImpl(SparseMLAImpl):
    """Sparse MLA where every token, of a prefill or a decode, is one query over its list of slots.

    Calls FlashInfer's function where `flashinfer_adapter.supported`, else the same function in Triton or plain torch.

    Args:
        run: a function to call instead of these, with FlashInfer's arguments.
        Others: see `SparseMLAImpl`; the cache must not be FP8.
    """

    backend_cls = FlashInferMLASparseBackend

    def __init__(self, *args, run: flashinfer_adapter.TrtllmDecode | None = None, **mla_args):
        super().__init__(*args, **mla_args)
        if self.config.use_fp8_kv_cache:
            raise NotImplementedError(
                "FlashInfer's sparse MLA reads BF16 caches: use kv_cache_dtype 'auto' or 'bfloat16', or FLASHMLA_SPARSE"
            )
        if run is None:
            spec = self.config.attention_spec(self.head_size, self.qk_rope_head_dim)
            run = flashinfer_adapter.pick(self.topk_indices_buffer.device, spec)
        self.run = run
        self._workspace_buffer: Tensor | None = None
        self.bmm1_scale: float | None = None
        self.bmm2_scale: float | None = None

    @property
    def kernel_name(self) -> str:
        return "flashinfer"

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FlashInferMLASparseMetadata,
        layer: Any = None,
    ) -> tuple[Tensor, None]:
        """Attention of latent queries over the cache, which holds the new tokens already.

        Args:
            q: ``[T, heads, 576]``, or its parts ``[T, heads, 512]`` and ``[T, heads, 64]``.
            kv_c_and_k_pe_cache: ``[pages, n, 576]``.
            layer: ``_q_scale_float``, ``_k_scale_float`` and ``_v_scale_float`` are read off it, 1 where it has none.

        Returns:
            ``(out, None)``: ``[T, heads, 512]``. Rows of padding and rows that see nothing are 0.

        Notes:
            The kernel's result for a row without slots is not documented, so such a row reads slot 0 and its result is
            replaced by zeros.
        """
        q = self._concat_query(q)
        if q.shape[0] == 0:
            return q.new_empty(0, self.num_heads, self.kv_lora_rank), None
        topk = self._topk_indices(q.shape[0], attn_metadata)
        slots, counts = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[: len(q)],
            attn_metadata.block_table,
            topk,
            BLOCK_SIZE=attn_metadata.block_size,
            NUM_TOPK_TOKENS=topk.shape[1],
            return_valid_counts=True,
            slot_mapping=attn_metadata.slot_mapping[: len(q)],
        )
        slots = F.pad(slots, (0, -slots.shape[1] % flashinfer_adapter.TOPK_MULTIPLE), value=-1)
        empty = counts == 0
        slots[:, :1].masked_fill_(empty[:, None], 0)
        self._prepare(layer, q.device)
        out = self.run(
            query=q.unsqueeze(1),
            kv_cache=kv_c_and_k_pe_cache.unsqueeze(1),
            workspace_buffer=self._workspace_buffer,
            qk_nope_head_dim=self.qk_nope_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            block_tables=slots.unsqueeze(1),
            seq_lens=counts.clamp_min(1),
            max_seq_len=slots.shape[1],
            bmm1_scale=self.bmm1_scale,
            bmm2_scale=self.bmm2_scale,
            sparse_mla_top_k=slots.shape[1],
        )
        out = out.view(-1, self.num_heads, self.kv_lora_rank)
        return out.masked_fill(empty[:, None, None], 0), None

    def _prepare(self, layer: Any, device: torch.device) -> None:
        """Sets, at the first call, the scales from the layer and the workspace, which all layers share."""
        if self._workspace_buffer is not None:
            return
        self._workspace_buffer = flashinfer_adapter.workspace_buffer(device)

        def factor(name: str) -> float:
            return float(getattr(layer, name, 1.0))

        self.bmm1_scale = factor("_q_scale_float") * factor("_k_scale_float") * self.scale
        self.bmm2_scale = factor("_v_scale_float")
