"""DeepSeek-V3.2's sparse MLA backends: FlashMLA sparse and FlashInfer sparse, and the impls that serve them.

A V3.2 layer is driven as a V4 layer is (`impls`): its step metadata is a `StepMetadata` without a window and with one
entry per token, ``step.sparse[1]``; its impls follow the shared flow. A cache holds ``kv_lora_rank`` latent and
``qk_rope_head_dim`` rotated values per token, as plain rows or as 656-byte FP8 records (``fp8_v32``).
"""

from deepseek_attn.impls.metadata import FlashMLASparseMetadata
from deepseek_attn.v32.backends.flashinfer_sparse import FlashInferMLASparseBackend, FlashInferMLASparseImpl
from deepseek_attn.v32.backends.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    MixedMLASparseImpl,
    ReferenceMLASparseImpl,
    TritonMLASparseImpl,
)
from deepseek_attn.v32.backends.sparse_mla import FlashMLASparseMetadataBuilder, LatentBackend, SparseMLAImpl

SPARSE_MLA_IMPLS: tuple[type[SparseMLAImpl], ...] = (
    MixedMLASparseImpl,
    FlashMLASparseBackend.get_impl_cls(),
    TritonMLASparseImpl,
    ReferenceMLASparseImpl,
    FlashInferMLASparseBackend.get_impl_cls(),
)
"""In order of preference for ``backend="auto"``: the reference runs everywhere, so FlashInfer's is chosen by name."""

__all__ = [
    "SPARSE_MLA_IMPLS",
    "FlashInferMLASparseBackend",
    "FlashInferMLASparseImpl",
    "FlashMLASparseBackend",
    "FlashMLASparseImpl",
    "FlashMLASparseMetadata",
    "FlashMLASparseMetadataBuilder",
    "LatentBackend",
    "MixedMLASparseImpl",
    "ReferenceMLASparseImpl",
    "SparseMLAImpl",
    "TritonMLASparseImpl",
]
