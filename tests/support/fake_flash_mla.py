"""Stand-ins for the ``flash_mla`` package: each flavour's signatures and limits around `deepseek_attn.flash_mla_api`.

A stand-in is stricter than the kernels where the kernels would read wild memory, return NaN or silently use a stale
plan: there it raises AssertionError.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from deepseek_attn import flash_mla_api

FLAVOURS = ("sgl", "vllm", "upstream")


@dataclass
class Calls:
    """Launches of the stand-in."""

    decode: list[dict] = field(default_factory=list)
    prefill: list[dict] = field(default_factory=list)
    schedules: int = 0


def install(monkeypatch, flavour: str = "sgl") -> None:
    """Puts a stand-in where ``import flash_mla`` finds it."""
    monkeypatch.setitem(sys.modules, "flash_mla", make(flavour))


def make(flavour: str) -> types.ModuleType:
    """A module like ``flavour``; its ``calls`` attribute records the launches."""
    module: Any = types.ModuleType("flash_mla")
    module.__version__, module.calls = "1.2.3", Calls()

    def get_mla_metadata(*args, **kwargs):
        module.calls.schedules += 1
        return SchedMeta(), None

    def decode(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, **options,
    ):  # fmt: skip
        assert is_fp8_kvcache
        caches: list[tuple] = [(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            assert q.shape[3] == 512, "V3.2 has no second cache"
            caches.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        module.calls.decode.append({"q": tuple(q.shape), "widths": [c[1].shape[-1] for c in caches]})
        check_query(q, attn_sink)
        for cache in caches:
            check_slots(q, *cache)
        tile_scheduler_metadata.check_lengths([lens for _, _, lens in caches])
        keys = with_bf16_scales(k_cache) if q.shape[3] == 576 else k_cache
        return flash_mla_api.flash_mla_with_kvcache(
            q, keys, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
            is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
            **options,
        )  # fmt: skip

    def prefill(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, **options):
        module.calls.prefill.append({"q": tuple(q.shape), "width": indices.shape[-1]})
        check_query(q, attn_sink)
        check_rows(kv, indices, topk_length)
        return flash_mla_api.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, **options)

    module.get_mla_metadata = get_mla_metadata
    module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd = WRAPPERS[flavour](decode, prefill)
    module.has_legacy = lambda: True
    return module


def _sgl(decode, prefill):
    def flash_mla_with_kvcache(*args, extra_k_cache=None, enable_batch_invariant=False, use_legacy=False, **kwargs):
        assert use_legacy, "SM90 and the V3.2 / V4 caches are on the legacy side"
        return decode(*args, extra_k_cache=extra_k_cache, **kwargs)

    def flash_mla_sparse_fwd(*args, use_legacy=False, return_log2_lse=None, **kwargs):
        assert use_legacy, "SM90 is on the legacy side"
        return prefill(*args, return_log2_lse=return_log2_lse, **kwargs)

    return flash_mla_with_kvcache, flash_mla_sparse_fwd


def _vllm(decode, prefill):
    def flash_mla_with_kvcache(*args, extra_k_cache=None, out=None, enable_batch_invariant=False, **kwargs):
        return decode(*args, extra_k_cache=extra_k_cache, out=out, **kwargs)

    def flash_mla_sparse_fwd(*args, out=None, **kwargs):
        return prefill(*args, out=out, **kwargs)

    return flash_mla_with_kvcache, flash_mla_sparse_fwd


def _upstream(decode, prefill):
    def flash_mla_with_kvcache(*args, extra_k_cache=None, **kwargs):
        return decode(*args, extra_k_cache=extra_k_cache, **kwargs)

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        return prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    return flash_mla_with_kvcache, flash_mla_sparse_fwd


WRAPPERS = {"sgl": _sgl, "vllm": _vllm, "upstream": _upstream}


@dataclass
class SchedMeta(flash_mla_api.FlashMLASchedMeta):
    """Also keeps the values of the lengths, which a plan is made for."""

    lengths: list | None = None

    def check_lengths(self, lens):
        lengths = [None if part is None else part.tolist() for part in lens]
        assert self.lengths in (None, lengths), "stale plan: lengths have changed"
        self.lengths = lengths


def check_query(q, sink):
    heads = q.shape[-2]
    assert q.stride(-1) == 1
    assert heads in (64, 128)
    assert q.numel() > 0, "launched on zero rows"
    assert sink is None or sink.is_contiguous()


def check_slots(q, cache, indices, lens):
    assert cache.dtype == torch.uint8
    assert indices.stride(-1) == 1
    assert indices.shape[2] > 0
    assert indices.shape[2] % 64 == 0
    slots = indices
    if lens is not None:
        assert q.shape[3] == 512, "V3.2 takes no lengths"
        assert lens.is_contiguous()
        column = torch.arange(slots.shape[2], device=slots.device)
        slots = slots.masked_fill(column >= lens[:, None, None], -1)
    assert int(slots.min()) >= -1, "only -1 is none"
    assert int(slots.max()) < cache.shape[0] * cache.shape[1], "illegal read"


def with_bf16_scales(cache):
    """V3.2's entries as the kernels of SM90 read them, which round scales that are no powers of two."""
    scales = cache[..., 512:528].contiguous().view(torch.float32).bfloat16().float()
    return torch.cat([cache[..., :512], scales.view(torch.uint8), cache[..., 528:]], -1)


def check_rows(kv, indices, lens):
    assert kv.shape[0] > 0
    assert indices.shape[2] > 0
    assert indices.shape[2] % 128 == 0
    if lens is not None:
        past = torch.arange(indices.shape[2], device=indices.device) >= lens[:, None, None]
        assert bool((indices[past] < 0).all()), "a valid index past the length can make the output NaN"
