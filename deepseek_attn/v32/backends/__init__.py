"""DeepSeek-V3.2's sparse MLA backends: FlashMLA sparse and FlashInfer sparse, their metadata and their impls.

A backend is four classes. ``Backend`` declares what is supported and names the others. ``MetadataBuilder.build`` turns
a `StepInput` into ``Metadata``, once per step for all layers. ``Impl``, one per layer, attends.

An attention layer makes these calls (``T`` token rows, ``H`` heads, 512 latent + 64 rotated values per key)::

    # once
    config  = SparseMLAConfig(num_heads=H, topk_tokens=K, max_model_len=..., kv_cache_dtype="fp8_ds_mla", ...)
    backend = FlashMLASparseBackend                                # or get_backend("FLASHINFER_MLA_SPARSE")
    impl    = backend.get_impl_cls()(
        H, 576, scale, 1, kv_cache_dtype=config.kv_cache_dtype, indexer=indexer, config=config, kv_b_proj=kv_b_proj,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, workspace=workspace)
    impl.process_weights_after_loading(dtype)                      # after the checkpoint is in: W_UK, W_UV
    builder = backend.get_builder_cls()(KVCacheSpec(64, 576), layer_names, config, device)

    # each step
    meta = builder.build(0, StepInput.from_lens(query_lens, seq_lens, block_table))

    # each layer
    indexer.topk_indices_buffer[:T] = ...                          # before the attention of the same layer
    impl.forward(layer, q, ckv, k_pe, kv_cache, meta, output)      # or its four steps:

    concat_and_cache_mla(ckv, k_pe, kv_cache, meta.slot_mapping, config.kv_cache_dtype)
    latent, _ = impl.forward_mqa((impl._k_up_proj(q_nope), q_pe), kv_cache, meta, layer)
    output    = impl._v_up_proj(latent).flatten(1)

The layer provides:

* ``indexer.topk_indices_buffer``: int32 ``[max_num_batched_tokens, K]``, any ``K``. Row ``t`` belongs to token row
  ``t`` of the batch and holds positions within the token's request, -1 for none, anywhere in the row; no position
  twice and none after the token. Dense attention is the row ``0 .. t``.
* ``kv_cache``: ``[pages, n, 576]`` of the model's dtype (``"auto"``) or bf16, or uint8 ``[pages, n, 656]``; for a pool
  of the cache package, ``records_v32.kv_cache_view(record, pool.tensor, pool.entries)``. Every position that an index
  names must have been written; the rest of the cache never affects a result.
* ``scale``: ``qk_head_dim ** -0.5`` times YaRN's ``mscale ** 2``.
* batches with the decodes (up to ``config.reorder_batch_threshold`` new tokens) first. Other orders are correct too,
  but all requests after the first longer one are then treated as prefills.
* Of ``layer`` itself only FlashInfer's impl reads anything: ``_q_scale_float``, ``_k_scale_float``, ``_v_scale_float``,
  each 1 if absent.

Metadata and the workspace are valid for one step: the next one reuses their buffers. One ``Workspace`` is shared by the
layers of a model; its size is reserved when the first impl is made.
"""

from deepseek_attn.v32.backends.absorb import dynamic_per_batched_tensor_quant
from deepseek_attn.v32.backends.backend import SparseMLABackend
from deepseek_attn.v32.backends.builder import FlashMLASparseMetadataBuilder, split_prefill_chunks
from deepseek_attn.v32.backends.config import (
    MIN_HEADS_FOR_BF16_PREFILL,
    AttentionCGSupport,
    DeviceCapability,
    KVCacheSpec,
    SparseMLAConfig,
    get_prefill_workspace_size,
)
from deepseek_attn.v32.backends.flashinfer_sparse import (
    FlashInferMLASparseBackend,
    FlashInferMLASparseImpl,
    FlashInferMLASparseMetadataBuilder,
)
from deepseek_attn.v32.backends.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl
from deepseek_attn.v32.backends.gather import concat_and_cache_mla, cp_gather_and_upconvert_fp8_kv_cache
from deepseek_attn.v32.backends.indices import triton_convert_req_index_to_global_index
from deepseek_attn.v32.backends.metadata import FlashInferMLASparseMetadata, FlashMLASparseMetadata
from deepseek_attn.v32.backends.step import (
    StepInput,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    split_decodes_and_prefills,
)

BACKENDS: dict[str, type[SparseMLABackend]] = {
    backend.get_name(): backend for backend in (FlashMLASparseBackend, FlashInferMLASparseBackend)
}


def get_backend(name: str) -> type[SparseMLABackend]:
    """The backend called ``name``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown sparse MLA backend {name!r}: supported are {', '.join(BACKENDS)}")
    return BACKENDS[name]


__all__ = [
    "BACKENDS",
    "MIN_HEADS_FOR_BF16_PREFILL",
    "AttentionCGSupport",
    "DeviceCapability",
    "FlashInferMLASparseBackend",
    "FlashInferMLASparseImpl",
    "FlashInferMLASparseMetadata",
    "FlashInferMLASparseMetadataBuilder",
    "FlashMLASparseBackend",
    "FlashMLASparseImpl",
    "FlashMLASparseMetadata",
    "FlashMLASparseMetadataBuilder",
    "KVCacheSpec",
    "SparseMLAConfig",
    "StepInput",
    "concat_and_cache_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "dynamic_per_batched_tensor_quant",
    "get_backend",
    "get_prefill_workspace_size",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "triton_convert_req_index_to_global_index",
]
