"""Impls and builders for a case of the oracle."""

from types import SimpleNamespace

import torch

from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends import KVCacheSpec, SparseMLAConfig

SCALE = 0.07


def indexer_of(case):
    return SimpleNamespace(topk_indices_buffer=case.topk)


def build_impl(backend, case, kv_cache_dtype, *, config=None, impl=None, **changes):
    """``(impl, metadata)`` of a case."""
    heads = case.q.shape[1]
    sizes = {"max_model_len": max(512, case.step.max_seq_len), "max_num_batched_tokens": 512, "max_num_seqs": 64}
    dtype = torch.float32 if case.q.dtype == torch.float32 else torch.bfloat16
    settings = {"topk_tokens": case.topk.shape[1], "kv_cache_dtype": kv_cache_dtype, "dtype": dtype}
    config = SparseMLAConfig(heads, **(sizes | settings | (config or {})))
    spec = KVCacheSpec(case.cache.shape[1], case.q.shape[2])
    builder = backend.get_builder_cls()(spec, ["layers.0"], config, "cpu", **changes)
    arguments = {
        "indexer": indexer_of(case), "config": config, "kv_lora_rank": case.latent, "kv_cache_dtype": kv_cache_dtype,
        **(impl or {}), **changes,
    }  # fmt: skip
    if kv_cache_dtype == "fp8_ds_mla":
        arguments.setdefault("workspace", Workspace())
    made = backend.get_impl_cls()(heads, case.q.shape[2], SCALE, 1, **arguments)
    return made, builder.build(0, case.step)
