"""Attention of each query over its own list of keys in Triton, for any GPU from compute capability 8.0 on.

Keys are read where they are: rows of a workspace, or entries of one or two paged pools. The device code is in
`sparse_attention_kernels`; this file checks arguments and decides how a launch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.attention.attend_hopper import attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows import attend_rows_hopper, fits_hopper
from deepseek_attn.kernels.attention.attend_triton import attend_kernel, combine_kernel
from deepseek_attn.kernels.attention.tiles import Tiles, choose_tiles, dot_dtype, pieces
from deepseek_attn.kernels.common.device import FLOATS, LOG2E, gpu
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


@dataclass(frozen=True)
class _Keys:
    """Where keys are: entries of pages of ``n``, ``stride`` elements of ``pool`` apart."""

    pool: Tensor
    n: int
    stride: int
    limit: int
    indices: Tensor
    lens: Tensor | None


@dataclass(frozen=True)
class _Format:
    """How the channels of an entry lie.

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
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.sparse_attention`, for ``kv`` with contiguous rows of a float dtype.

    Args:
        out: like the result, to write to.
        tiles: how to cut the launch; by default chosen from shapes alone.
    """
    _check_query(q, sink, indices, lens)
    if kv.dim() != 2 or kv.shape[1] != q.shape[2] or kv.stride(1) != 1 or kv.dtype not in FLOATS:
        raise ValueError(
            f"kv must be [N, {q.shape[2]}] float32, bfloat16 or float16 with contiguous rows for q {tuple(q.shape)}, "
            f"got {tuple(kv.shape)} {kv.dtype}, strides {kv.stride()}"
        )
    d_v = q.shape[2] if d_v is None else d_v
    if not 0 < d_v <= q.shape[2]:
        raise ValueError(f"d_v must be in 1 .. {q.shape[2]}, got {d_v}")
    indices = _rows_contiguous(indices)
    if tiles is None and fits_hopper(q, kv, indices, d_v, *gpu(q.device)):
        out = _checked_out(q, d_v, out)
        return out, attend_rows_hopper(q, kv, indices, scale, sink, lens, out, gpu(q.device).multiprocessors)
    keys = _Keys(kv, 1, kv.stride(0), kv.shape[0], indices, lens)
    return _attend(q, [keys], _Format(q.shape[2], q.shape[2]), scale, sink, d_v, out, tiles)


def sparse_attention_paged(
    q: Tensor,
    pools: Sequence[tuple[Any, Tensor, int, Tensor, Tensor | None]],
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.sparse_attention_paged`, for one or two pools of one record.

    Records are plain rows, ``fp8_v4`` (V4) and ``fp8_v32`` (V3.2).

    Args:
        out: like the result, to write to.
        tiles: how to cut the launch; by default chosen from shapes alone.

    Notes:
        ``fp8_v4`` is decoded to float16 unless q is float32: keys and queries must lie within +-65504. (V4's are
        normalised: at most 23 times a norm weight.) ``fp8_v32`` is decoded to bfloat16, as FlashMLA does.
    """
    if not 1 <= len(pools) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(pools)}")
    record = pools[0][0]
    if any(other != record for other, *_ in pools):
        raise ValueError(f"all pools must hold the same record, got {[other for other, *_ in pools]}")
    form = _format(record)
    keys = []
    for _, pool, n, indices, lens in pools:
        _check_query(q, sink, indices, lens)
        keys.append(_paged_keys(record, pool, n, _rows_contiguous(indices), lens))
    if record.dim != q.shape[2]:
        raise ValueError(f"the record holds {record.dim} channels and q {tuple(q.shape)} has {q.shape[2]}")
    d_v = record.dim if d_v is None else d_v
    if not 0 < d_v <= record.dim:
        raise ValueError(f"d_v must be in 1 .. {record.dim}, got {d_v}")
    return _attend(q, keys, form, scale, sink, d_v, out, tiles)


def _format(record: Any) -> _Format:
    if record.name == "fp8_v4":
        nope, rope, most = record.nope_dim, record.rope_dim, 512  # 8 scale bytes are read at once
        made = _Format(nope, nope + 2 * rope, nope, 64)
    elif record.name == "fp8_v32":
        nope, rope, most = record.latent_dim, record.rope_dim, 1 << 16
        made = _Format(nope, record.entry_bytes, nope + nope // 32, 128)
    elif record.name == "plain":
        return _Format(record.dim, record.dim)
    else:
        raise ValueError(f"records that are read are plain, fp8_v4 and fp8_v32, got {record.name!r}")
    if nope > most or rope % 16:
        raise ValueError(
            f"{record.name} is read with up to {most} quantised and a multiple of 16 rotated channels, got {record}"
        )
    return made


def _paged_keys(record: Any, pool: Tensor, n: int, indices: Tensor, lens: Tensor | None) -> _Keys:
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or pool.shape[1] < n * record.entry_bytes:
        raise ValueError(
            f"a pool of {n} entries per page must be uint8 [pages, at least {n * record.entry_bytes}] with contiguous "
            f"pages, got {tuple(pool.shape)} {pool.dtype}, strides {pool.stride()}"
        )
    unit = record.dtype.itemsize if record.name == "plain" else 8 if record.name == "fp8_v4" else 4
    if pool.stride(0) % unit or pool.data_ptr() % unit:
        raise ValueError(
            f"pages of {record.name} must start at multiples of {unit} bytes, got a page stride of {pool.stride(0)} "
            f"and an address of {pool.data_ptr()}"
        )
    typed = pool
    if record.name == "plain":
        typed = pool[:, : pool.shape[1] // unit * unit].view(record.dtype)
    return _Keys(typed, n, typed.stride(0), pool.shape[0] * n, indices, lens)


def _attend(
    q: Tensor,
    keys: list[_Keys],
    form: _Format,
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor | None,
    tiles: Tiles | None,
) -> tuple[Tensor, Tensor]:
    T, H, dim = q.shape
    out = _checked_out(q, d_v, out)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    keys = [source for source in keys if source.indices.shape[1] and source.limit]
    if not keys or out.numel() == 0:
        return out.zero_(), lse.fill_(float("inf"))
    q = q if q.stride(2) == 1 else q.contiguous()
    capability, processors = gpu(q.device)
    dtype = dot_dtype(q.dtype, keys[0].pool.dtype, form.group)
    if tiles is None:
        width = sum(source.indices.shape[1] for source in keys)
        hopper = form.group == 64 and dtype == torch.float16 and dim - form.nope == 64 and dim in (128, 256, 512)
        tiles = choose_tiles(T, H, dim, width, dtype, hopper, capability, processors)
    if tiles.splits == 1:
        _launch(q, keys, form, dtype, scale, sink, d_v, out, out, lse, tiles, capability)
        return out, lse
    part_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    part = torch.empty(T, tiles.splits, H, d_v, dtype=part_dtype, device=q.device)
    part_lse = torch.empty(T, tiles.splits, H, dtype=torch.float32, device=q.device)
    _launch(q, keys, form, dtype, scale, sink, d_v, out, part, part_lse, tiles, capability)
    _combine(part, part_lse, sink, out, lse, capability)
    return out, lse


def _combine(
    part: Tensor, part_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, capability: tuple[int, int]
) -> None:
    """Combines shares ``part [T, splits, H, d_v]`` in a fixed order.

    A warp holds whole columns of shares: with more warps, which sum across, 8 queries of 64 heads in 10 shares took
    17.9 us (4 warps) and 26.9 us (8 warps), attention included, instead of 13.4 us.
    """
    T, splits, H, d_v = part.shape
    warps = 1 if 16 < splits <= 65 else 2
    block_s = triton.next_power_of_2(splits)
    block_d = min(triton.next_power_of_2(d_v), 256 * warps, max(64, 4096 * warps // block_s))
    early = capability[0] >= 9  # programs are launched before the shares are there, and wait for them
    combine_kernel[(T, H, triton.cdiv(d_v, block_d))](
        part,
        part_lse,
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
        PDL=early,
        num_warps=warps,
        launch_pdl=early,
    )


def _launch(
    q: Tensor,
    keys: list[_Keys],
    form: _Format,
    dtype: torch.dtype,
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor,
    part: Tensor,
    part_lse: Tensor,
    tiles: Tiles,
    capability: tuple[int, int],
) -> None:
    """Launches the attention of each share of the keys, into ``part`` (which is ``out`` if there is one share)."""
    T, H, dim = q.shape
    first, second = keys[0], keys[-1]
    split = tiles.splits > 1
    grid = (T, tiles.splits, triton.cdiv(H, tiles.heads))
    arguments = (
        q,
        first.pool,
        second.pool,
        first.indices,
        second.indices,
        first.indices if first.lens is None else first.lens,
        second.indices if second.lens is None else second.lens,
        part_lse if sink is None else sink,
        part,
        part_lse,
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
        "NOPE": form.nope,
        "N0": first.n,
        "N1": second.n,
        "POOLS": len(keys),
        "HAS_LENS0": first.lens is not None,
        "HAS_LENS1": second.lens is not None,
        "HAS_SINK": sink is not None,
        "SPLIT": split,
    }
    if tiles.hopper:
        grid = (T * triton.cdiv(H, tiles.heads), tiles.splits)
        attend_hopper_kernel[grid](*arguments, **flags, num_warps=8, launch_pdl=True)
        return
    starts, widths = pieces(form.nope, dim, tiles.piece)
    attend_kernel[grid](
        *arguments,
        **flags,
        DIM=dim,
        D_V=d_v,
        STARTS=starts,
        WIDTHS=widths,
        V_PIECES=sum(start < d_v for start in starts),
        ROW=form.row,
        ROPE=form.rope,
        FP8=form.group > 0,
        GROUP=form.group,
        NATIVE_FP8=capability >= (8, 9),
        DTYPE=TRITON_DTYPES[dtype],
        PRECISION="tf32x3" if dtype == torch.float32 else None,
        BLOCK_H=tiles.heads,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        PDL=capability[0] >= 9,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=capability[0] >= 9,
    )


def _rows_contiguous(indices: Tensor) -> Tensor:
    return indices if indices.stride(1) == 1 else indices.contiguous()


def _checked_out(q: Tensor, d_v: int, out: Tensor | None) -> Tensor:
    shape = (*q.shape[:2], d_v)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be {shape} {q.dtype} with contiguous channels, got {tuple(out.shape)} {out.dtype}")
    return out


def _check_query(q: Tensor, sink: Tensor | None, indices: Tensor, lens: Tensor | None) -> None:
    if q.dim() != 3 or q.dtype not in FLOATS or q.device.type != "cuda":
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
