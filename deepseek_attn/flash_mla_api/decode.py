"""`flash_mla_with_kvcache`: attention over pages, sparse over FP8 entries or dense over plain ones."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.flash_mla_api.arguments import (
    VALUE_DIM,
    check_out,
    check_query,
    check_row_lengths,
    check_scalar,
    check_sink,
    check_tensor,
)
from deepseek_attn.flash_mla_api.schedule import FlashMLASchedMeta, schedule_of
from deepseek_attn.kernels.attention import PagedKeys, sparse_attention, sparse_attention_paged
from deepseek_attn.utils.torch_state import in_own_torch_state

RECORDS = {512: Fp8DsMlaRecord(448, 64), 576: Fp8DsMlaV32Record(512, 64)}
"""Entries of FP8 caches, by channels of a key."""

BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
"""As which an FP8 cache may come; they mean the same."""


@in_own_torch_state
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a paged cache: with ``indices`` sparse over FP8 entries, without dense over plain ones.

    Args:
        q: ``[b, s_q, h_q, d_qk]``, ``d_qk`` 512 (V4) or 576 (V3.2); bfloat16, if dense also float16.
        k_cache: sparse: bytes (uint8, int8 or float8_e4m3fn) ``[pages, n, 1, 584]`` for V4 and ``[pages, n, 1, 656]``
            for V3.2, pages any distance apart. Dense: ``[pages, n, h_k, d_qk]`` of q's dtype with any strides; ``h_k``
            divides ``h_q``. The first 512 channels of a key are its values.
        block_table, cache_seqlens: dense: int32 ``[b, blocks]`` pages and ``[b]`` tokens of each request; pages behind
            the last token may be any number. Sparse: not used.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: result of `get_mla_metadata`; the two tensors of FlashMLA before 2026 are
            accepted and ignored.
        softmax_scale: factor of the logits, or None for ``d_qk ** -0.5``.
        causal: dense: query ``j`` of ``s_q`` sees all but the last ``s_q - 1 - j`` tokens.
        is_fp8_kvcache: must agree with ``indices``: FP8 caches are read sparsely, plain ones densely. None: it does.
        indices: int32 ``[b, s_q, topk]`` slots, ``page * n + offset``; -1 for none.
        attn_sink: float32 ``[h_q]``, a logit per head that joins the denominator only. +inf gives 0.
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same entries under the same softmax, with any
            page size, and int32 ``[b, s_q, extra_topk]`` slots in it.
        topk_length, extra_topk_length: int32 ``[b]`` leading indices of a request's rows that count, or None for all.
        out: contiguous ``[b, s_q, h_q, 512]`` like q to write to, as in vLLM's fork.
        enable_batch_invariant: must be False.
        use_legacy, kv_format: ignored: the size of an entry determines its format.
        descale_q, descale_k: must be None; they belong to dense decoding over FP8 caches.

    Returns:
        ``(out, lse)``: ``[b, s_q, h_q, 512]`` like q and float32 ``[b, h_q, s_q]``, the natural log-sum-exp of the
        scaled logits, without the sink. A query without a valid key gets 0 and +inf.

    Raises:
        ValueError: arguments that disagree or are not supported.

    Notes:
        Slots and pages outside the cache name no key; FlashMLA would read wild memory. Dense decoding expands the block
        table into a list of slots as long as the table, whatever the lengths are: pass only the blocks in use.
    """
    schedule = schedule_of(tile_scheduler_metadata, num_splits)
    _check_modes(indices is not None, causal, is_fp8_kvcache, enable_batch_invariant, descale_q, descale_k)
    dtypes = (torch.bfloat16, torch.float16) if indices is None else (torch.bfloat16,)
    check_query(q, dtypes, ("b", "s_q", "h_q"), head_dim_v)
    check_out(out, q)
    if out is not None and not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}: pass out=None and copy the result")
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    check_scalar("softmax_scale", scale, Real)
    keys: _DenseKeys | _SparseKeys
    if indices is None:
        sparse_only = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        if given := [name for name, value in sparse_only.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: only with indices, which make attention sparse")
        keys = _dense_keys(q, k_cache, block_table, cache_seqlens, causal)
    else:
        pools = [_paged_keys(q, k_cache, indices, topk_length, "k_cache", "indices", "topk_length")]
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
            pools.append(_paged_keys(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, *names))
        elif extra_k_cache is not None or extra_indices_in_kvcache is not None or extra_topk_length is not None:
            raise ValueError("extra_k_cache and extra_indices_in_kvcache go together, extra_topk_length only with both")
        check_sink(attn_sink, q.shape[2], q.device)
        keys = _SparseKeys(pools, attn_sink)
    config = FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=indices is not None,
        topk=None if indices is None else indices.shape[2],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2],
    )
    schedule.check(config)
    result, lse = keys.attend(q, scale, out)
    schedule.note(config)
    return result.view(*q.shape[:3], VALUE_DIM) if out is None else out, lse.view(q.shape[:3]).transpose(1, 2)


def _check_modes(
    sparse: bool,
    causal: bool,
    is_fp8_kvcache: bool | None,
    enable_batch_invariant: bool,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
) -> None:
    """Checks that the modes of a call go together.

    Raises:
        ValueError: they do not, or are not supported.
    """
    check_scalar("causal", causal, bool)
    if is_fp8_kvcache is not None:
        check_scalar("is_fp8_kvcache", is_fp8_kvcache, bool)
    if sparse and causal:
        raise ValueError(
            "causal=True is for dense decoding; with indices, leave out the keys that a query must not see"
        )
    if sparse and is_fp8_kvcache is False:
        raise ValueError(
            "indices select entries of an FP8 cache, got is_fp8_kvcache=False: for a bfloat16 cache call "
            "flash_mla_sparse_fwd with its rows, k_cache.view(-1, 1, d_qk)"
        )
    if (is_fp8_kvcache and not sparse) or descale_q is not None or descale_k is not None:
        raise ValueError(
            "dense decoding over FP8 caches (is_fp8_kvcache=True without indices, descale_q, descale_k) is not "
            "supported: read entries of 584 or 656 bytes with indices that name every token"
        )
    if enable_batch_invariant:
        raise ValueError(
            "enable_batch_invariant=True is not supported, launches follow the shapes of the batch: where results must "
            "not depend on the batch, call with one request at a time"
        )


class _SparseKeys(NamedTuple):
    """Keys of one or two FP8 caches, for ``b * s_q`` queries, and the sinks that join them."""

    pools: list[PagedKeys]
    sink: Tensor | None

    def attend(self, q: Tensor, scale: float, out: Tensor | None) -> tuple[Tensor, Tensor]:
        flat_out = None if out is None else out.flatten(0, 1)
        return sparse_attention_paged(q.flatten(0, 1), self.pools, scale, self.sink, VALUE_DIM, flat_out)


def _paged_keys(
    q: Tensor, cache: Tensor, indices: Tensor, lens: Tensor | None, cache_name: str, indices_name: str, lens_name: str
) -> PagedKeys:
    """A checked FP8 cache as a pool of bytes, with slots ``[b * s_q, topk]`` and their numbers."""
    b, s_q, _, d_qk = q.shape
    record = RECORDS[d_qk]
    size = record.entry_bytes
    hint = (
        f": queries of 512 channels read V4's entries of 584 bytes, queries of 576 channels V3.2's of 656; q has {d_qk}"
    )
    check_tensor(cache_name, cache, BYTES, ("pages", "page_block_size", 1, size), q.device, hint)
    check_tensor(indices_name, indices, (torch.int32,), (b, s_q, "topk"), q.device)
    check_row_lengths(lens_name, lens, b, q.device)
    pages, n = cache.shape[:2]
    if cache.stride(3) != 1 or (n > 1 and cache.stride(1) != size):
        raise ValueError(
            f"the {n} entries of a page of {cache_name} must lie together, {size} bytes apart, got strides "
            f"{cache.stride()}; only the distance of pages is free"
        )
    stride = cache.stride(0) if pages > 1 else n * size
    pool = cache.view(torch.uint8).as_strided((pages, n * size), (stride, 1))
    if lens is not None:
        lens = lens[:, None].expand(b, s_q).flatten()
    return PagedKeys(record, pool, n, indices.flatten(0, 1), lens)


class _DenseKeys(NamedTuple):
    """Rows ``[N, d_qk]`` with every key of a cache, and the visible rows of ``b * s_q * h_k`` groups of heads.

    Attributes:
        indices: ``[b * s_q * h_k, K]``, row indices.
        lens: ``[b * s_q * h_k]``, number of leading indices that are valid.
        h_k: key heads, each shared by ``h_q / h_k`` query heads.
    """

    rows: Tensor
    indices: Tensor
    lens: Tensor
    h_k: int

    def attend(self, q: Tensor, scale: float, out: Tensor | None) -> tuple[Tensor, Tensor]:
        groups = q.unflatten(2, (self.h_k, q.shape[2] // self.h_k)).flatten(0, 2)
        flat_out = None if out is None else out.view(*groups.shape[:2], VALUE_DIM)
        return sparse_attention(groups, self.rows, self.indices, scale, None, self.lens, VALUE_DIM, flat_out)


def _dense_keys(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, causal: bool
) -> _DenseKeys:
    """A checked plain cache as rows, with the visible rows of each group of heads."""
    b, s_q, h_q, d_qk = q.shape
    check_tensor("k_cache", k_cache, (q.dtype,), ("pages", "page_block_size", "h_k", d_qk), q.device)
    if block_table is None or cache_seqlens is None:
        raise ValueError("dense decoding needs block_table and cache_seqlens; sparse decoding needs indices")
    check_tensor("block_table", block_table, (torch.int32,), (b, "blocks"), q.device)
    check_row_lengths("cache_seqlens", cache_seqlens, b, q.device)
    pages, n, h_k, _ = k_cache.shape
    if k_cache.stride(3) != 1:
        raise ValueError(f"channels of k_cache must be contiguous, got strides {k_cache.stride()}")
    if h_k == 0 or h_q % h_k:
        raise ValueError(f"key heads must divide query heads, got {h_k} and {h_q}")
    matrix = _as_matrix(k_cache)
    dtype = torch.int32 if len(matrix.rows) < 2**31 else torch.int64
    page = block_table[:, None, :, None]
    head = torch.arange(h_k, dtype=dtype, device=q.device)[:, None, None]
    entry = torch.arange(n, dtype=dtype, device=q.device)
    row = page.to(dtype) * matrix.page_step + entry * matrix.entry_step + head * matrix.head_step
    indices = torch.where((page >= 0) & (page < pages), row, -1).flatten(2)
    visible = cache_seqlens[:, None].expand(b, s_q)
    if causal:
        visible = visible - torch.arange(s_q - 1, -1, -1, dtype=torch.int32, device=q.device)
    return _DenseKeys(
        matrix.rows,
        indices[:, None].expand(b, s_q, -1, -1).flatten(0, 2),
        visible[:, :, None].expand(b, s_q, h_k).flatten(),
        h_k,
    )


class _Matrix(NamedTuple):
    """Rows ``[N, d]`` of a cache. A key's is ``page * page_step + entry * entry_step + head * head_step``."""

    rows: Tensor
    page_step: int
    entry_step: int
    head_step: int


def _as_matrix(cache: Tensor) -> _Matrix:
    """A view of ``cache [pages, n, h_k, d]``; its rows overlap where strides are not multiples of ``d``."""
    sizes, d = cache.shape[:3], cache.shape[3]
    if cache.numel() == 0:
        return _Matrix(cache.new_empty(0, d), 0, 0, 0)
    strides = [stride if size > 1 else 0 for size, stride in zip(sizes, cache.stride()[:3], strict=True)]
    unit = math.gcd(*strides) or d
    steps = [stride // unit for stride in strides]
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    return _Matrix(cache.as_strided((last + 1, d), (unit, 1)), *steps)
