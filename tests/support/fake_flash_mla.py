"""Stand-ins for the ``flash_mla`` package: each flavour's signatures and contracts, computed with the torch references.

A stand-in is stricter than the kernels where the kernels would read wild memory, return NaN or silently use a stale
plan: there it raises AssertionError.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.kernels.attention.reference import sparse_attention

FLAVOURS = ("sgl", "vllm", "upstream")


@dataclass
class SchedMeta:
    config: tuple | None = None
    lengths: list | None = None


@dataclass
class Calls:
    """What the stand-in was asked for."""

    decode: list[dict] = field(default_factory=list)
    prefill: list[dict] = field(default_factory=list)
    schedules: int = 0


def install(monkeypatch, flavour: str = "sgl") -> None:
    """Puts a stand-in where ``import flash_mla`` finds it."""
    monkeypatch.setitem(sys.modules, "flash_mla", make(flavour))


def make(flavour: str) -> types.ModuleType:
    """A module like ``flavour``; its ``calls`` attribute records what was launched."""
    module = types.ModuleType("flash_mla")
    module.__version__, module.calls = "1.2.3", Calls()

    def get_mla_metadata(*args, **kwargs):
        module.calls.schedules += 1
        return SchedMeta(), None

    def decode(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    ):  # fmt: skip
        assert head_dim_v == 512
        assert num_splits is None
        assert softmax_scale is not None
        assert not causal
        assert is_fp8_kvcache
        caches = [(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            caches.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        module.calls.decode.append({"q": tuple(q.shape), "widths": [c[1].shape[-1] for c in caches]})
        check_schedule(tile_scheduler_metadata, q, caches)
        return run_decode(q, caches, softmax_scale, attn_sink)

    def prefill(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        assert d_v == 512
        module.calls.prefill.append({"q": tuple(q.shape), "width": indices.shape[-1]})
        return run_prefill(q, kv, indices, sm_scale, attn_sink, topk_length)

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
        return prefill(*args, **kwargs)

    return flash_mla_with_kvcache, flash_mla_sparse_fwd


def _vllm(decode, prefill):
    def flash_mla_with_kvcache(*args, extra_k_cache=None, out=None, enable_batch_invariant=False, **kwargs):
        result, lse = decode(*args, extra_k_cache=extra_k_cache, **kwargs)
        return write_out(out, result), lse

    def flash_mla_sparse_fwd(*args, out=None, **kwargs):
        result, peak, lse = prefill(*args, **kwargs)
        return write_out(out, result), peak, lse

    return flash_mla_with_kvcache, flash_mla_sparse_fwd


WRAPPERS = {"sgl": _sgl, "vllm": _vllm, "upstream": lambda decode, prefill: (decode, prefill)}


def write_out(out, result):
    if out is None:
        return result
    assert (out.shape, out.dtype) == (result.shape, result.dtype)
    assert out.is_contiguous()
    return out.copy_(result)


def check_schedule(schedule, q, caches):
    assert isinstance(schedule, SchedMeta)
    config = (q.shape[:3], *((cache.shape[1], indices.shape[-1]) for cache, indices, _ in caches))
    lengths = [None if lens is None else lens.tolist() for _, _, lens in caches]
    if schedule.config is None:
        schedule.config, schedule.lengths = config, lengths
    assert schedule.config == config, "the plan was made for other shapes"
    assert schedule.lengths == lengths, "stale plan: lengths have changed"


def check_query(q, heads, sink):
    assert q.dtype == torch.bfloat16
    assert q.stride(-1) == 1
    assert q.shape[-1] in (512, 576)
    assert heads in (64, 128)
    assert q.numel() > 0, "launched on zero rows"
    assert sink is None or (sink.shape == (heads,) and sink.dtype == torch.float32 and sink.is_contiguous())


def run_decode(q, caches, scale, sink):
    batch, queries, heads, dim = q.shape
    check_query(q, heads, sink)
    keys, rows, base = [], [], 0
    assert len(caches) == 1 or dim == 512, "V3.2 has no second cache"
    for cache, indices, lens in caches:
        flat, row = decode_keys(q, cache, indices, lens, base)
        base += flat.shape[0]
        keys.append(flat)
        rows.append(row)
    keys, rows = torch.cat(keys), torch.cat(rows, -1).flatten(0, 1)
    out, lse = sparse_attention(q.flatten(0, 1), keys, rows, scale, sink, None, 512)
    out, lse = out.view(batch, queries, heads, 512), lse.view(batch, queries, heads)
    return out, lse.transpose(1, 2)


def decode_keys(q, cache, indices, lens, base):
    """The named keys of one cache, float32, and index rows into them that start at ``base``."""
    batch, queries, _, dim = q.shape
    width = {512: 584, 576: 656}[dim]
    pages, n, one, row = cache.shape
    assert (one, row, cache.stride(1), cache.stride(3), cache.dtype) == (1, width, width, 1, torch.uint8)
    assert indices.dtype == torch.int32
    assert indices.shape[:2] == (batch, queries)
    assert indices.stride(-1) == 1
    assert indices.shape[2] > 0
    assert indices.shape[2] % 64 == 0
    slots = indices.long()
    if lens is not None:
        assert dim == 512, "V3.2 takes no lengths"
        assert lens.dtype == torch.int32
        assert lens.shape == (batch,)
        assert lens.is_contiguous()
        column = torch.arange(slots.shape[2], device=slots.device)
        slots = slots.masked_fill(column >= lens[:, None, None], -1)
    assert int(slots.min()) >= -1, "only -1 is none"
    assert int(slots.max()) < pages * n, "illegal read"
    used = slots[slots >= 0].unique()
    flat = read_entries(cache, used, dim)
    place = torch.searchsorted(used, slots.clamp(min=0)) + base
    return flat, torch.where(slots >= 0, place, -1)


def read_entries(cache, slots, dim):
    pages, n = cache.shape[:2]
    if dim == 512:
        record = Fp8DsMlaRecord(448, 64)
        pool = cache.as_strided((pages, record.page_bytes(n)), (cache.stride(0), 1))
        return record.gather(pool, n, slots, torch.float32)
    raw = cache[slots // n, slots % n, 0]
    values = raw[:, :512].contiguous().view(torch.float8_e4m3fn).bfloat16()
    scales = raw[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    # the kernels multiply in bf16: a scale that is no power of two is rounded
    return torch.cat([values * scales.bfloat16(), raw[:, 528:].contiguous().view(torch.bfloat16)], 1).float()


def run_prefill(q, kv, indices, scale, sink, lens):
    tokens, heads, dim = q.shape
    check_query(q, heads, sink)
    assert kv.dtype == torch.bfloat16
    assert kv.shape[1:] == (1, dim)
    assert kv.shape[0] > 0
    assert indices.dtype == torch.int32
    assert indices.shape[:2] == (tokens, 1)
    assert indices.shape[2] > 0
    assert indices.shape[2] % 128 == 0
    rows = indices.squeeze(1)
    if lens is not None:
        assert lens.dtype == torch.int32
        assert lens.shape == (tokens,)
        past = torch.arange(rows.shape[1], device=rows.device) >= lens[:, None]
        assert bool((rows[past] < 0).all()), "a valid index past the length can make the output NaN"
    out, lse = sparse_attention(q, kv.squeeze(1), rows, scale, sink, lens, 512)
    return out, torch.zeros_like(lse), lse
