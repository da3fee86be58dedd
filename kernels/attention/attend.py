"""Attention of each query over its own list of keys in Triton, for any GPU from compute capability 8.0 on.

Keys are read in place: rows of a workspace, or entries of one or two paged pools. This file checks arguments;
`launch_config` chooses among `attend_triton` (any GPU), `attend_hopper` (``fp8_v4`` pages), `attend_v32_hopper`
(``fp8_v32`` pages) and `attend_rows_hopper` (rows), and `launch` launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.attention.launch import (
    EntryLayout,
    Keys,
    combine_partials,
    launch_attention,
    launch_rows_hopper,
)
from deepseek_attn.kernels.attention.launch_config import (
    LaunchConfig,
    choose_config,
    dot_dtype,
    supports_rows_hopper,
)
from deepseek_attn.kernels.attention.projected import Projected, ProjectedLaunch, ProjectedShape
from deepseek_attn.kernels.attention.types import PagedKeys, check_max_logits
from deepseek_attn.kernels.common.device import FLOATS, fp8_view, gpu, has_native_fp8, on_gpu
from deepseek_attn.kernels.common.heads import QueryHeads, check_projected
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.records import CacheRecord, check_pool
from deepseek_attn.kernels.common.row_ops import row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

V41_PAIR = {"fp8_v41", "fp4_v41"}  # the only records that one launch reads together


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None = None,
    lens: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`kernels.attention.sparse_attention`; ``config`` overrides the choice of a launch configuration."""
    _check_query(q, sink, indices, lens)
    if kv.dim() != 2 or kv.shape[1] != q.shape[2] or kv.stride(1) != 1 or kv.dtype not in FLOATS:
        raise ValueError(
            f"kv must be [N, {q.shape[2]}] float32, bfloat16 or float16 with contiguous rows for q {tuple(q.shape)}, "
            f"got {tuple(kv.shape)} {kv.dtype}, strides {kv.stride()}"
        )
    check_max_logits(q, max_logits)
    d_v = q.shape[2] if d_v is None else d_v
    if not 0 < d_v <= q.shape[2]:
        raise ValueError(f"d_v must be in 1 .. {q.shape[2]}, got {d_v}")
    indices, lens, sink = _rows_contiguous(indices), _contiguous(lens), _contiguous(sink)
    if config is None and supports_rows_hopper(q, kv, indices, d_v, gpu(q.device)):
        return launch_rows_hopper(q, kv, indices, scale, sink, lens, _checked_out(q, d_v, out), max_logits)
    keys = Keys(EntryLayout(q.shape[2], q.shape[2]), kv, 1, kv.stride(0), kv.shape[0], indices, lens)
    return _attend(q, [keys], scale, sink, d_v, out, config, max_logits)


def sparse_attention_paged(
    q: Tensor,
    keys: Sequence[PagedKeys],
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`kernels.attention.sparse_attention_paged`; ``config`` as in `sparse_attention`."""
    checked_keys, dim = _checked_pools(q, keys, sink), q.shape[2]
    d_v = dim if d_v is None else d_v
    if not 0 < d_v <= dim:
        raise ValueError(f"d_v must be in 1 .. {dim}, got {d_v}")
    return _attend(q, checked_keys, scale, _contiguous(sink), d_v, out, config)


def attend_heads(
    heads: QueryHeads,
    keys: Sequence[PagedKeys],
    scale: float,
    sink: Tensor | None,
    groups: int,
    pow2_scales: bool = True,
    q: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> QuantizedRows:
    """`kernels.attention.attend_heads`; ``config`` as in `sparse_attention`."""
    check_projected(heads)
    (T, width), H, sink = heads.q.shape, heads.num_heads, _contiguous(sink)
    projected = heads.q.view(T, H, width // H)
    if q is not None and (q.shape != projected.shape or q.dtype != projected.dtype or q.stride(2) != 1):
        raise ValueError(f"q must be {tuple(projected.shape)} {projected.dtype}, got {tuple(q.shape)} {q.dtype}")
    rotated, q = q is not None, projected if q is None else q
    pools = _with_entries(_checked_pools(q, keys, sink))
    _check_heads(heads, keys[0].record, groups)
    if not pools:
        raise ValueError("queries need keys: all pools or lists of indices are empty")
    rows = empty_quantized_rows(T, width, q.device, pow2_scales, groups)
    if not T:
        return rows
    dtype, dim = dot_dtype(q.dtype, pools[0].pool.dtype, pools[0].layout.group), q.shape[2]
    config = _chosen_config(q, pools, dtype, sink, dim, from_heads=True) if config is None else config
    launch = _projected_launch(heads, rows, rotated)
    lse = torch.empty(T, config.splits, H, dtype=torch.float32, device=q.device)
    final = config.splits == 1 and config.hopper and dim == 512  # which `attend_hopper_kernel` stores as FP8
    partials = None if final else torch.empty(T, config.splits, H, dim, dtype=_partial_dtype(dtype), device=q.device)
    launch_attention(q, pools, dtype, scale, sink, dim, None, partials, lse, None, config, launch)
    if partials is not None:
        combine_partials(partials, lse, sink, None, None, launch)
    return rows


def _check_heads(heads: QueryHeads, record: CacheRecord, groups: int) -> None:
    H, dim, rope = heads.num_heads, record.dim, heads.cos_sin.shape[1]
    row_block(dim, heads.cos_sin)
    if record.name != "fp8_v4" or rope != record.rope_dim or dim % 128 or H % groups or heads.padded_heads != H:
        raise ValueError(
            f"{H} projected heads of {dim} channels, {rope} of them rotated, padded to {heads.padded_heads}, in "
            f"{groups} groups over {record.name} records with {record.rope_dim} rotated channels: supported are "
            "fp8_v4 records that rotate as many, heads of multiples of 128 channels, no padding, and groups of equal "
            "size; call query_norm_rope, sparse_attention_paged and grouped_linear for others"
        )


def _projected_launch(heads: QueryHeads, rows: QuantizedRows, rotated: bool) -> ProjectedLaunch:
    """What the kernels need to read ``heads``, or queries that are ``rotated`` already, and to write ``rows``."""
    values, scale, pow2_scales = rows
    arguments = Projected(
        positions=heads.positions,
        cos_sin=heads.cos_sin,
        max_positions=len(heads.cos_sin),
        eps=heads.eps,
        fp8=fp8_view(values),
        group_stride=values.stride(0),
        row_stride=values.stride(1),
        group_heads=heads.num_heads // len(values),
        fp8_scale=scale,
        fp8_scale_stride=scale.stride(1),
    )
    shape = ProjectedShape(
        DTYPE=TRITON_DTYPES[heads.q.dtype],
        ROPE=heads.cos_sin.shape[1],
        ROTATED=rotated,
        NORM=heads.norm,
        POW2=pow2_scales,
        NATIVE_FP8=has_native_fp8(heads.q.device),
    )
    return ProjectedLaunch(arguments, shape)


def _checked_pools(q: Tensor, keys: Sequence[PagedKeys], sink: Tensor | None) -> list[Keys]:
    """Keys as the kernels read them; ValueError if they do not go with each other or with ``q``."""
    if not 1 <= len(keys) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(keys)}")
    records = [pool_keys.record for pool_keys in keys]
    if any(record != records[0] for record in records) and {record.name for record in records} != V41_PAIR:
        raise ValueError(f"two pools must hold the same record, or those of DeepSeek-V4.1, got {records}")
    for pool_keys in keys:
        _check_query(q, sink, pool_keys.indices, pool_keys.lens)
    checked_keys = [_checked_keys(pool_keys) for pool_keys in keys]
    if any(record.dim != q.shape[2] for record in records):
        raise ValueError(f"the records hold {[r.dim for r in records]} channels, q {tuple(q.shape)}")
    return checked_keys


def _with_entries(keys: list[Keys]) -> list[Keys]:
    """Those with columns of indices and entries to read."""
    return [pool_keys for pool_keys in keys if pool_keys.indices.shape[1] and pool_keys.limit]


def _entry_layout(record: CacheRecord) -> EntryLayout:
    nope, rope = record.nope_dim, record.rope_dim
    if record.name == "plain":
        return EntryLayout(record.dim, record.dim)
    if record.name == "fp8_v4":
        layout, most = EntryLayout(nope, nope + 2 * rope, nope, 64), 512  # 8 scale bytes are read at once
    elif record.name == "fp8_v32":
        layout, most = EntryLayout(nope, record.entry_bytes, nope + nope // 32, 128), 1 << 16
    elif record.name in V41_PAIR:
        return EntryLayout(record.dim, record.row_bytes[0], group=32 if record.name == "fp8_v41" else 16)
    else:
        raise ValueError(f"records that are read are plain, fp8_v4, fp8_v32, fp8_v41 and fp4_v41, got {record.name!r}")
    if nope > most or rope % 16:
        raise ValueError(
            f"{record.name} is read with up to {most} quantised and a multiple of 16 rotated channels, got {record}"
        )
    return layout


def _checked_keys(keys: PagedKeys) -> Keys:
    record, pool, n = keys.record, keys.pool, keys.entries
    unit = record.dtype.itemsize if record.name == "plain" else {"fp8_v4": 8, "fp8_v32": 4}.get(record.name, 1)
    check_pool(record, pool, n, unit)
    if record.name == "plain":
        pool = pool[:, : pool.shape[1] // unit * unit].view(record.dtype)
    indices, lens = _rows_contiguous(keys.indices), _contiguous(keys.lens)
    return Keys(_entry_layout(record), pool, n, pool.stride(0), pool.shape[0] * n, indices, lens)


def _attend(
    q: Tensor,
    keys: list[Keys],
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor | None,
    config: LaunchConfig | None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    out = _checked_out(q, d_v, out)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    keys = _with_entries(keys)
    if not keys or out.numel() == 0:
        if max_logits is not None:
            max_logits.fill_(float("-inf"))
        return out.zero_(), lse.fill_(float("inf"))
    q = q if q.stride(2) == 1 else q.contiguous()
    dtype = dot_dtype(q.dtype, keys[0].pool.dtype, keys[0].layout.group)
    if config is None:
        config = _chosen_config(q, keys, dtype, sink, d_v)
    if config.splits == 1:
        launch_attention(q, keys, dtype, scale, sink, d_v, out, out, lse, max_logits, config)
        return out, lse
    partials = torch.empty(T, config.splits, H, d_v, dtype=_partial_dtype(dtype), device=q.device)
    partial_lse = torch.empty(T, config.splits, H, dtype=torch.float32, device=q.device)
    partial_max = None if max_logits is None else torch.empty_like(partial_lse)
    launch_attention(q, keys, dtype, scale, sink, d_v, out, partials, partial_lse, partial_max, config)
    combine_partials(partials, partial_lse, sink, out, lse)
    if max_logits is not None:
        torch.amax(partial_max, 1, out=max_logits)
    return out, lse


def _partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of split-K partials for products of ``dtype``."""
    return torch.float16 if dtype == torch.float16 else torch.float32


def _chosen_config(
    q: Tensor, keys: list[Keys], dtype: torch.dtype, sink: Tensor | None, d_v: int, from_heads: bool = False
) -> LaunchConfig:
    T, H, dim = q.shape
    width = sum(pool_keys.indices.shape[1] for pool_keys in keys)
    hopper = _fits_hopper(keys, dtype, sink, dim, d_v)
    return choose_config(planned_rows(T), H, dim, width, dtype, hopper, gpu(q.device), from_heads)


def _fits_hopper(keys: list[Keys], dtype: torch.dtype, sink: Tensor | None, dim: int, d_v: int) -> bool:
    """Whether `attend_hopper_kernel` or `attend_v32_hopper_kernel` supports these arguments.

    The latter reads entries 16 bytes at a time, which are aligned where pages are.
    """
    first, layout = keys[0], keys[0].layout
    if dim - layout.nope != 64:
        return False
    if layout.group == 64:
        return dtype == torch.float16 and dim in (128, 256, 512)
    if layout.group != 128 or dtype != torch.bfloat16 or layout.nope not in (256, 512) or d_v != layout.nope:
        return False
    return len(keys) == 1 and sink is None and first.pool.data_ptr() % 16 == 0 and first.stride % 16 == 0


def _rows_contiguous(indices: Tensor) -> Tensor:
    return indices if indices.stride(1) == 1 else indices.contiguous()


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _checked_out(q: Tensor, d_v: int, out: Tensor | None) -> Tensor:
    shape = (*q.shape[:2], d_v)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be {shape} {q.dtype} with contiguous channels, got {tuple(out.shape)} {out.dtype}")
    return out


def _check_query(q: Tensor, sink: Tensor | None, indices: Tensor, lens: Tensor | None) -> None:
    on_device = on_gpu(q) or triton.knobs.runtime.interpret
    if q.dim() != 3 or q.dtype not in FLOATS or not on_device:
        raise ValueError(
            f"q must be [T, H, d] float32, bfloat16 or float16 on a GPU, got {tuple(q.shape)} {q.dtype} on {q.device}"
        )
    T, H, _ = q.shape
    if sink is not None and (sink.shape != (H,) or not sink.is_floating_point()):
        raise ValueError(f"sink must be [{H}], one logit per head, got {tuple(sink.shape)} {sink.dtype}")
    if indices.dim() != 2 or indices.shape[0] != T or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices must be int32 or int64 [{T}, K] for q {tuple(q.shape)}, got {tuple(indices.shape)} "
            f"{indices.dtype}"
        )
    if lens is not None and (lens.shape != (T,) or lens.is_floating_point()):
        raise ValueError(f"lens must be integers [{T}] for q {tuple(q.shape)}, got {tuple(lens.shape)} {lens.dtype}")
