"""Attention of each query over its own list of keys in Triton, for any GPU from compute capability 8.0 on.

Keys are read where they are: rows of a workspace, or entries of one or two paged pools. The device code is in
`sparse_attention_kernels`; this file checks arguments and decides how a launch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.sparse_attention_hopper import attend_hopper_kernel
from deepseek_attn.kernels.sparse_attention_kernels import attend_kernel, combine_kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Attributes:
        heads, keys: of one program's tiles; warps, stages: of a program; piece: channels of a piece.
        splits: programs that share a query's keys.
        hopper: use ``attend_hopper_kernel``, whose tiles are 64 heads and 64 keys.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    piece: int = 64
    splits: int = 1
    hopper: bool = False


@dataclass(frozen=True)
class _Keys:
    """Where keys are: entries of pages of ``n``, ``stride`` elements of ``pool`` apart."""

    pool: Tensor
    n: int
    stride: int
    limit: int
    indices: Tensor
    lens: Tensor | None


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
    if kv.dim() != 2 or kv.shape[1] != q.shape[2] or kv.stride(1) != 1 or kv.dtype not in _FLOATS:
        raise ValueError(
            f"kv must be [N, {q.shape[2]}] float32, bfloat16 or float16 with contiguous rows for q {tuple(q.shape)}, "
            f"got {tuple(kv.shape)} {kv.dtype}, strides {kv.stride()}"
        )
    d_v = q.shape[2] if d_v is None else d_v
    if not 0 < d_v <= q.shape[2]:
        raise ValueError(f"d_v must be in 1 .. {q.shape[2]}, got {d_v}")
    keys = _Keys(kv, 1, kv.stride(0), kv.shape[0], _rows_contiguous(indices), lens)
    return _attend(q, [keys], q.shape[2], False, scale, sink, d_v, out, tiles)


def sparse_attention_paged(
    q: Tensor,
    pools: Sequence[tuple[Any, Tensor, int, Tensor, Tensor | None]],
    scale: float,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `reference.sparse_attention_paged`, for one or two pools of one record: plain rows or ``fp8_ds_mla``.

    Args:
        out: like the result, to write to.
        tiles: how to cut the launch; by default chosen from shapes alone.

    Notes:
        ``fp8_ds_mla`` is decoded to float16 unless q is float32: keys and queries must lie within +-65504. (V4's are
        normalised: at most 23 times a norm weight.)
    """
    if not 1 <= len(pools) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(pools)}")
    record = pools[0][0]
    if any(other != record for other, *_ in pools):
        raise ValueError(f"all pools must hold the same record, got {[other for other, *_ in pools]}")
    keys = []
    for _, pool, n, indices, lens in pools:
        _check_query(q, sink, indices, lens)
        keys.append(_paged_keys(record, pool, n, _rows_contiguous(indices), lens))
    if record.dim != q.shape[2]:
        raise ValueError(f"the record holds {record.dim} channels and q {tuple(q.shape)} has {q.shape[2]}")
    fp8 = record.name == "fp8_ds_mla"
    return _attend(q, keys, record.nope_dim if fp8 else record.dim, fp8, scale, sink, record.dim, out, tiles)


def _paged_keys(record: Any, pool: Tensor, n: int, indices: Tensor, lens: Tensor | None) -> _Keys:
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or pool.shape[1] < n * record.entry_bytes:
        raise ValueError(
            f"a pool of {n} entries per page must be uint8 [pages, at least {n * record.entry_bytes}] with contiguous "
            f"pages, got {tuple(pool.shape)} {pool.dtype}, strides {pool.stride()}"
        )
    if record.name == "fp8_ds_mla":
        if record.nope_dim > 512 or record.rope_dim % 16:
            raise ValueError(
                f"fp8_ds_mla is read with up to 512 quantised channels and a multiple of 16 rotated ones, got {record}"
            )
        unit, typed = 8, pool
    elif record.name == "plain":
        unit = record.dtype.itemsize
        typed = pool[:, : pool.shape[1] // unit * unit]
    else:
        raise ValueError(f"records that are read are plain and fp8_ds_mla, got {record.name!r}")
    if pool.stride(0) % unit or pool.data_ptr() % unit:
        raise ValueError(
            f"pages of {record.name} must start at multiples of {unit} bytes, got a page stride of {pool.stride(0)} "
            f"and an address of {pool.data_ptr()}"
        )
    if record.name == "plain":
        typed = typed.view(record.dtype)
    return _Keys(typed, n, typed.stride(0), pool.shape[0] * n, indices, lens)


def pieces(nope: int, dim: int, piece: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and widths of the pieces that cover channels ``[0, nope)`` and ``[nope, dim)``.

    Widths are powers of two from 16 to ``piece``; the last piece of either part may be wider than what is left.
    """
    starts, widths = [], []
    for start, end in ((0, nope), (nope, dim)):
        while start < end:
            left, width = end - start, piece
            while width > left and width > 16:
                width //= 2
            starts.append(start)
            widths.append(width)
            start += width
    return tuple(starts), tuple(widths)


def dot_dtype(q: torch.dtype, keys: torch.dtype, fp8: bool) -> torch.dtype:
    """What the products are computed in. float16 holds e4m3 times a power of two, and bf16 near 1, exactly."""
    if fp8:
        return torch.float32 if q == torch.float32 else torch.float16
    return q if q == keys else torch.float32


def choose_tiles(
    T: int, H: int, dim: int, width: int, dtype: torch.dtype, hopper: bool, capability: tuple[int, int], processors: int
) -> Tiles:
    """The fastest cut measured on an H200 for ``T`` queries of ``H`` heads over up to ``width`` keys.

    Depends on shapes alone, so that a captured graph serves any lengths. ``hopper``: the Gluon kernel takes it.
    """
    small = H > 16 and T * triton.cdiv(H, 16) * triton.cdiv(width, 64) <= 80
    if dtype == torch.float32:
        tiles = Tiles(16, 16, 4, 1)
    elif capability[0] != 9:
        tiles = Tiles(16, 32, 4, 2) if H <= 16 or dim > 512 else Tiles(32, 32, 8, 2)
    elif hopper and not small:
        tiles = Tiles(64, 64, 8, 1, hopper=True)
    elif dim > 512:
        tiles = Tiles(16, 32, 8, 1) if H <= 16 else Tiles(64, 64, 8, 1, 128)
    elif T == 1 and width <= 128:
        tiles = Tiles(16, 32, 4, 2)
    elif small:
        tiles = Tiles(16, 64, 8, 2, 128)
    else:
        tiles = Tiles(16, 64, 4, 2) if H <= 16 else Tiles(64, 64, 8, 2, 128)
    blocks = triton.cdiv(width, tiles.keys)
    room = (2 if tiles.heads < 64 else 1) * processors // (T * triton.cdiv(H, tiles.heads))
    splits = max(1, min(blocks, room, 130))
    return replace(tiles, splits=triton.cdiv(blocks, triton.cdiv(blocks, splits)))


def _attend(
    q: Tensor,
    keys: list[_Keys],
    nope: int,
    fp8: bool,
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
    capability, processors = _gpu(q.device)
    dtype = dot_dtype(q.dtype, keys[0].pool.dtype, fp8)
    if tiles is None:
        width = sum(source.indices.shape[1] for source in keys)
        hopper = fp8 and dtype == torch.float16 and dim - nope == 64 and dim in (128, 256, 512)
        tiles = choose_tiles(T, H, dim, width, dtype, hopper, capability, processors)
    if tiles.splits == 1:
        _launch(q, keys, nope, fp8, dtype, scale, sink, d_v, out, out, lse, tiles, capability)
        return out, lse
    part_dtype = torch.float16 if dtype == torch.float16 else torch.float32
    part = torch.empty(T, tiles.splits, H, d_v, dtype=part_dtype, device=q.device)
    part_lse = torch.empty(T, tiles.splits, H, dtype=torch.float32, device=q.device)
    _launch(q, keys, nope, fp8, dtype, scale, sink, d_v, out, part, part_lse, tiles, capability)
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
    nope: int,
    fp8: bool,
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
        scale * _LOG2E,
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
        "NOPE": nope,
        "N0": first.n,
        "N1": second.n,
        "POOLS": len(keys),
        "HAS_LENS0": first.lens is not None,
        "HAS_LENS1": second.lens is not None,
        "HAS_SINK": sink is not None,
        "SPLIT": split,
    }
    if tiles.hopper:
        attend_hopper_kernel[grid](*arguments, **flags, num_warps=8)
        return
    starts, widths = pieces(nope, dim, tiles.piece)
    attend_kernel[grid](
        *arguments,
        **flags,
        DIM=dim,
        D_V=d_v,
        STARTS=starts,
        WIDTHS=widths,
        V_PIECES=sum(start < d_v for start in starts),
        ROW=nope + 2 * (dim - nope) if fp8 else dim,
        FP8=fp8,
        NATIVE_FP8=capability >= (8, 9),
        DTYPE=_TRITON_DTYPES[dtype],
        PRECISION="tf32x3" if dtype == torch.float32 else None,
        BLOCK_H=tiles.heads,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        PDL=split and capability[0] >= 9,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@cache
def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


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
    if q.dim() != 3 or q.dtype not in _FLOATS or q.device.type != "cuda":
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
