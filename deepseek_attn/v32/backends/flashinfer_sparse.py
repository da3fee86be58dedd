"""The FlashInfer backend of sparse MLA (TRT-LLM kernels, Blackwell), over a BF16 cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer, AttentionSpec
from deepseek_attn.kernels.attention import PagedKeys, sparse_attention
from deepseek_attn.v32.backends import flashinfer_adapter
from deepseek_attn.v32.backends.sparse_mla import LatentBackend, SparseMLAImpl

NOPE_HEAD_DIM = 128  # the kernel is compiled for heads of 128 + 64 channels before absorption


class FlashInferMLASparseBackend(LatentBackend):
    """FlashInfer's formats and shapes."""

    supported_kv_records = ("plain",)

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE"

    @classmethod
    def get_impl_cls(cls) -> type[SparseMLAImpl]:
        return FlashInferMLASparseImpl

    @classmethod
    def problem(cls, spec: AttentionSpec) -> str:
        if spec.kv_record == "fp8_v32":
            return "it reads plain latents, and numerics 'serving' and 'official' store FP8 ones: use numerics='exact'"
        if spec.qk_nope_head_dim not in (None, NOPE_HEAD_DIM):
            return f"it needs qk_nope_head_dim {NOPE_HEAD_DIM}, the model has {spec.qk_nope_head_dim}"
        return super().problem(spec)


class FlashInferMLASparseImpl(SparseMLAImpl):
    """Sparse MLA where every query, of a prefill or a decode, is one request with a list of slots.

    Calls FlashInfer's function where it runs, else the same function by this library's kernels.

    Notes:
        The kernel's result for a query without slots is not documented, so such a query reads slot 0 and its result is
        replaced by zeros.
    """

    name = "flashinfer"
    batch_dependence = "FlashInfer plans a launch depending on the batch"
    backend_cls = FlashInferMLASparseBackend

    @classmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        usable, reason = flashinfer_adapter.supported(device, spec)
        return True, reason if usable else f"without its own kernel, the same function by this library's ({reason})"

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        (pages,) = keys
        counts = pages.lens if pages.lens is not None else (pages.indices >= 0).sum(1, dtype=torch.int32)
        slots = F.pad(pages.indices, (0, -pages.indices.shape[1] % flashinfer_adapter.TOPK_MULTIPLE), value=-1)
        empty = counts == 0
        slots = torch.cat([slots[:, :1].masked_fill(empty[:, None], 0), slots[:, 1:]], dim=1)
        rows = pages.pool.view(q.dtype).view(len(pages.pool), 1, pages.entries, layer.head_dim)
        out = flashinfer_adapter.pick(q.device, q.dtype)(
            query=q.unsqueeze(1),
            kv_cache=rows,
            workspace_buffer=flashinfer_adapter.workspace_buffer(q.device),
            qk_nope_head_dim=NOPE_HEAD_DIM,
            kv_lora_rank=layer.value_dim,
            qk_rope_head_dim=layer.head_dim - layer.value_dim,
            block_tables=slots.unsqueeze(1),
            seq_lens=counts.clamp_min(1),
            max_seq_len=slots.shape[1],
            bmm1_scale=layer.scale,
            bmm2_scale=1.0,
            sparse_mla_top_k=slots.shape[1],
        )
        out = out.view(len(q), -1, layer.value_dim).masked_fill(empty[:, None, None], 0)
        return out if output is None else output.copy_(out)

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        scale, sink = layer.scale, layer.attn_sink
        return sparse_attention(q, kv, indices, scale, sink, lens, layer.value_dim, output)[0]
