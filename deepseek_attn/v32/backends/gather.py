"""Writes entries of the V3.2 cache, and gathers a chunk of requests to the BF16 workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.cache.records_v32 import KV_CACHE_DTYPES, pool_view, record_of
from deepseek_attn.kernels.attention import gather_packed


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor | None = None,
    scale_rule: str = "raw",
) -> None:
    """Writes ``[kv_c | k_pe]`` of new tokens into the cache.

    Args:
        kv_c: ``[T, latent]``, normed; k_pe: ``[T, rope]``, rotated.
        kv_cache: ``[pages, n, latent + rope]`` of a float dtype, or uint8 ``[pages, n, entry bytes]``.
        slot_mapping: int64 ``[T']``, ``T' <= T``: slots (page * n + offset) of the first ``T'`` tokens; negative ones
            are skipped.
        kv_cache_dtype: ``"auto"``, ``"bfloat16"`` or ``"fp8_ds_mla"``: the format of the cache.
        scale: not used; per-tensor FP8 caches of other implementations have it, and none of the caches here.
        scale_rule: of FP8 entries, see `Fp8DsMlaV32Record`.

    Raises:
        ValueError: shapes that do not fit, or a cache of another dtype.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {kv_cache_dtype!r}: supported are {', '.join(KV_CACHE_DTYPES)}")
    if (kv_cache_dtype == "fp8_ds_mla") != (kv_cache.dtype == torch.uint8):
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} does not fit a {kv_cache.dtype} cache")
    if kv_c.dim() != 2 or k_pe.dim() != 2 or len(kv_c) != len(k_pe) or len(slot_mapping) > len(kv_c):
        raise ValueError(
            "need kv_c [T, latent], k_pe [T, rope] and up to T slots: "
            f"got {list(kv_c.shape)}, {list(k_pe.shape)}, {list(slot_mapping.shape)}"
        )
    record = record_of(kv_cache, kv_c.shape[1], k_pe.shape[1], scale_rule)
    tokens = len(slot_mapping)
    rows = torch.cat([kv_c[:tokens], k_pe[:tokens]], dim=1)
    record.insert(pool_view(kv_cache), kv_cache.shape[1], slot_mapping, rows)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    rope_dim: int = 64,
) -> None:
    """Gathers whole requests from an FP8 cache: ``dst[workspace_starts[r] + i]`` becomes entry ``i`` of request ``r``.

    Args:
        src_cache: uint8 ``[pages, n, entry bytes]``.
        dst: ``[N, latent + rope]``, bf16; values are rounded to its dtype. Rows of no request keep their values.
        block_table: int32 ``[batch_size, pages]``.
        seq_lens: int32 ``[batch_size]``; workspace_starts: int32 ``[batch_size]``, ascending, without overlap.

    Raises:
        ValueError: shapes that do not fit.

    Notes:
        Does not wait for the device. Scratch stays within a few times ``blocks.SCRATCH_BYTES``. Some published
        versions take no ``seq_lens`` and derive it from the starts and the rows of ``dst``; this one does not.
    """
    shapes = (block_table.shape[:1], seq_lens.shape, workspace_starts.shape)
    if any(shape != (batch_size,) for shape in shapes) or dst.dim() != 2:
        raise ValueError(
            f"need dst [N, dim] and {batch_size} requests: got dst {list(dst.shape)}, block_table "
            f"{list(block_table.shape)}, seq_lens {list(seq_lens.shape)}, workspace_starts "
            f"{list(workspace_starts.shape)}"
        )
    record = record_of(src_cache, dst.shape[1] - rope_dim, rope_dim)
    if src_cache.dtype != torch.uint8:
        raise ValueError(f"src_cache must hold FP8 entries (uint8), got {src_cache.dtype}")
    pool, n = pool_view(src_cache), src_cache.shape[1]
    gather_packed(dst, record, pool, n, block_table, seq_lens, workspace_starts)
