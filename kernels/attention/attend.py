"""Attention of each query over its own list of keys in Triton, for any GPU from compute capability 8.0 on.

Keys are read in place: rows of a workspace, or entries of one or two paged pools. This file checks arguments and
launches; `launch_config` chooses among `attend_triton` (any GPU), `attend_hopper` (``fp8_v4`` pages),
`attend_v32_hopper` (``fp8_v32`` pages) and `attend_rows_hopper` (rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.attention.attend_hopper import attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.attention.attend_triton import attend_kernel, combine_kernel
from deepseek_attn.kernels.attention.attend_v32_hopper import attend_v32_hopper_kernel
from deepseek_attn.kernels.attention.launch_config import (
    LaunchConfig,
    choose_config,
    dot_dtype,
    pieces,
    rows_hopper_jobs,
    supports_rows_hopper,
)
from deepseek_attn.kernels.attention.types import PagedKeys, check_max_logits
from deepseek_attn.kernels.common.device import FLOATS, LOG2E, gpu, has_native_fp8, on_gpu, supports_pdl
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.records import CacheRecord, check_pool
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

V41_PAIR = {"fp8_v41", "fp4_v41"}  # the only records that one launch reads together


@dataclass(frozen=True)
class _Keys:
    """Checked keys as the kernels read them.

    Attributes:
        pool: elements of the keys' dtype, or bytes; stride: from one page of ``entries`` to the next, in elements.
        layout: of an entry.
        limit: entries in the pool; indices, lens: as in `PagedKeys`, rows and lengths contiguous.
    """

    layout: _EntryLayout
    pool: Tensor
    entries: int
    stride: int
    limit: int
    indices: Tensor
    lens: Tensor | None


@dataclass(frozen=True)
class _EntryLayout:
    """Where the channels of an entry are.

    Attributes:
        nope: channels before the rotated ones, or all of them.
        row: from one entry to the next, in elements of the pool; rope: where the rotated channels begin.
        group: quantised channels that share a scale, 0 if none is quantised.
    """

    nope: int
    row: int
    rope: int = 0
    group: int = 0


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
        return _launch_rows_hopper(q, kv, indices, scale, sink, lens, _checked_out(q, d_v, out), max_logits)
    keys = _Keys(_EntryLayout(q.shape[2], q.shape[2]), kv, 1, kv.stride(0), kv.shape[0], indices, lens)
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
    if not 1 <= len(keys) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(keys)}")
    records = [pool_keys.record for pool_keys in keys]
    if any(record != records[0] for record in records) and {record.name for record in records} != V41_PAIR:
        raise ValueError(f"two pools must hold the same record, or those of DeepSeek-V4.1, got {records}")
    for pool_keys in keys:
        _check_query(q, sink, pool_keys.indices, pool_keys.lens)
    checked_keys = [_checked_keys(pool_keys) for pool_keys in keys]
    dim = q.shape[2]
    if any(record.dim != dim for record in records):
        raise ValueError(f"the records hold {[r.dim for r in records]} channels and q {tuple(q.shape)} has {dim}")
    d_v = dim if d_v is None else d_v
    if not 0 < d_v <= dim:
        raise ValueError(f"d_v must be in 1 .. {dim}, got {d_v}")
    return _attend(q, checked_keys, scale, _contiguous(sink), d_v, out, config)


def _entry_layout(record: CacheRecord) -> _EntryLayout:
    nope, rope = record.nope_dim, record.rope_dim
    if record.name == "plain":
        return _EntryLayout(record.dim, record.dim)
    if record.name == "fp8_v4":
        layout, most = _EntryLayout(nope, nope + 2 * rope, nope, 64), 512  # 8 scale bytes are read at once
    elif record.name == "fp8_v32":
        layout, most = _EntryLayout(nope, record.entry_bytes, nope + nope // 32, 128), 1 << 16
    elif record.name in V41_PAIR:
        return _EntryLayout(record.dim, record.row_bytes[0], group=32 if record.name == "fp8_v41" else 16)
    else:
        raise ValueError(f"records that are read are plain, fp8_v4, fp8_v32, fp8_v41 and fp4_v41, got {record.name!r}")
    if nope > most or rope % 16:
        raise ValueError(
            f"{record.name} is read with up to {most} quantised and a multiple of 16 rotated channels, got {record}"
        )
    return layout


def _checked_keys(keys: PagedKeys) -> _Keys:
    record, pool, n = keys.record, keys.pool, keys.entries
    unit = record.dtype.itemsize if record.name == "plain" else {"fp8_v4": 8, "fp8_v32": 4}.get(record.name, 1)
    check_pool(record, pool, n, unit)
    if record.name == "plain":
        pool = pool[:, : pool.shape[1] // unit * unit].view(record.dtype)
    indices, lens = _rows_contiguous(keys.indices), _contiguous(keys.lens)
    return _Keys(_entry_layout(record), pool, n, pool.stride(0), pool.shape[0] * n, indices, lens)


def _attend(
    q: Tensor,
    keys: list[_Keys],
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor | None,
    config: LaunchConfig | None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, dim = q.shape
    out = _checked_out(q, d_v, out)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    keys = [pool_keys for pool_keys in keys if pool_keys.indices.shape[1] and pool_keys.limit]
    if not keys or out.numel() == 0:
        if max_logits is not None:
            max_logits.fill_(float("-inf"))
        return out.zero_(), lse.fill_(float("inf"))
    q = q if q.stride(2) == 1 else q.contiguous()
    dtype = dot_dtype(q.dtype, keys[0].pool.dtype, keys[0].layout.group)
    if config is None:
        width = sum(pool_keys.indices.shape[1] for pool_keys in keys)
        hopper = _fits_hopper(keys, dtype, sink, dim, d_v)
        config = choose_config(planned_rows(T), H, dim, width, dtype, hopper, gpu(q.device))
    if config.splits == 1:
        _launch(q, keys, dtype, scale, sink, d_v, out, out, lse, max_logits, config)
        return out, lse
    partial_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    partials = torch.empty(T, config.splits, H, d_v, dtype=partial_dtype, device=q.device)
    partial_lse = torch.empty(T, config.splits, H, dtype=torch.float32, device=q.device)
    partial_max = None if max_logits is None else torch.empty_like(partial_lse)
    _launch(q, keys, dtype, scale, sink, d_v, out, partials, partial_lse, partial_max, config)
    _combine(partials, partial_lse, sink, out, lse)
    if max_logits is not None:
        torch.amax(partial_max, 1, out=max_logits)
    return out, lse


def _fits_hopper(keys: list[_Keys], dtype: torch.dtype, sink: Tensor | None, dim: int, d_v: int) -> bool:
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


def _combine(partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Combines split-K partials ``[T, splits, H, d_v]`` in a fixed order.

    A warp holds whole columns of partials: with more warps, which sum across, 8 queries of 64 heads in 10 splits took
    17.9 us (4 warps) and 26.9 us (8 warps), attention included, instead of 13.4 us.
    """
    T, splits, H, d_v = partials.shape
    warps = 1 if 16 < splits <= 65 else 2
    block_s = triton.next_power_of_2(splits)
    block_d = min(triton.next_power_of_2(d_v), 256 * warps, max(64, 4096 * warps // block_s))
    pdl = supports_pdl(out.device)  # programs are launched before the partials are written, and wait for them
    combine_kernel[(T, H, triton.cdiv(d_v, block_d))](
        partials,
        partial_lse,
        lse if sink is None else sink,
        out,
        lse,
        H,
        out.stride(0),
        out.stride(1),
        splits,
        D_V=d_v,
        HAS_SINK=sink is not None,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=warps,
        launch_pdl=pdl,
    )


def _launch(
    q: Tensor,
    keys: list[_Keys],
    dtype: torch.dtype,
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor,
    partials: Tensor,
    partial_lse: Tensor,
    partial_max: Tensor | None,
    config: LaunchConfig,
) -> None:
    """Attends each split of the keys, into ``partials`` (which is ``out`` if there is one split).

    ``partial_max``: as ``partial_lse``, for the largest logits; only without ``config.hopper``.
    """
    T, H, dim = q.shape
    first, second, layout = keys[0], keys[-1], keys[0].layout
    pdl = supports_pdl(q.device)
    grid = (T, config.splits, triton.cdiv(H, config.heads))
    arguments = (
        q,
        first.pool,
        second.pool,
        first.indices,
        second.indices,
        first.indices if first.lens is None else first.lens,
        second.indices if second.lens is None else second.lens,
        partial_lse if sink is None else sink,
        partials,
        partial_lse,
        H,
        scale * LOG2E,
        first.indices.shape[1],
        second.indices.shape[1],
        first.limit,
        second.limit,
        first.stride,
        second.stride,
        first.indices.stride(0),
        second.indices.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
    )
    flags = {
        "NOPE": layout.nope,
        "N0": first.entries,
        "N1": second.entries,
        "POOLS": len(keys),
        "HAS_LENS0": first.lens is not None,
        "HAS_LENS1": second.lens is not None,
        "HAS_SINK": sink is not None,
        "SPLIT": config.splits > 1,
    }
    if config.hopper:
        grid = (T * triton.cdiv(H, config.heads), config.splits)
    if config.hopper and layout.group == 128:
        attend_v32_hopper_kernel[grid](
            q,
            first.pool,
            first.indices,
            first.indices if first.lens is None else first.lens,
            partials,
            partial_lse,
            H,
            scale * LOG2E,
            first.indices.shape[1],
            first.limit,
            first.stride,
            first.indices.stride(0),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            NOPE=layout.nope,
            N=first.entries,
            HAS_LENS=first.lens is not None,
            SPLIT=config.splits > 1,
            enable_fp_fusion=True,
            num_warps=8,
            launch_pdl=True,
        )
        return
    if config.hopper:
        attend_hopper_kernel[grid](*arguments, **flags, enable_fp_fusion=True, num_warps=8, launch_pdl=True)
        return
    starts, widths = pieces(layout.nope, dim, config.piece)
    attend_kernel[grid](
        *arguments,
        partial_max,
        **flags,
        DIM=dim,
        D_V=d_v,
        STARTS=starts,
        WIDTHS=widths,
        V_PIECES=sum(start < d_v for start in starts),
        ROW=layout.row,
        ROPE=layout.rope,
        FP8=layout.group > 0,
        GROUP=layout.group,
        ROW1=second.layout.row,
        GROUP1=second.layout.group,
        NATIVE_FP8=has_native_fp8(q.device),
        DTYPE=TRITON_DTYPES[dtype],
        PRECISION="tf32x3" if dtype == torch.float32 else None,
        BLOCK_H=config.heads,
        BLOCK_N=config.keys,
        STAGES=config.stages,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


def _launch_rows_hopper(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None,
    lens: Tensor | None,
    out: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    T, H, dim = q.shape
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    jobs = rows_hopper_jobs(T, H)
    attend_rows_hopper_kernel[(min(jobs, gpu(q.device).multiprocessors),)](
        q,
        kv,
        indices,
        indices if lens is None else lens,
        lse if sink is None else sink,
        out,
        lse,
        H,
        jobs,
        scale * LOG2E,
        indices.shape[1],
        kv.shape[0],
        kv.stride(0),
        indices.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        max_logits,
        DIM=dim,
        HAS_LENS=lens is not None,
        HAS_SINK=sink is not None,
        enable_fp_fusion=True,
        num_warps=8,
    )
    return out, lse


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
