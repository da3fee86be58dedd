"""Launches of `attend_triton` and of the kernels for Hopper, on arguments that `attend` has checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.attention.attend_hopper import attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.attention.attend_triton import attend_kernel, combine_kernel
from deepseek_attn.kernels.attention.attend_v32_hopper import attend_v32_hopper_kernel
from deepseek_attn.kernels.attention.launch_config import LaunchConfig, pieces, rows_hopper_jobs
from deepseek_attn.kernels.attention.projected import ProjectedLaunch
from deepseek_attn.kernels.common.device import LOG2E, gpu, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


@dataclass(frozen=True)
class EntryLayout:
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


@dataclass(frozen=True)
class Keys:
    """Checked keys as the kernels read them.

    Attributes:
        pool: elements of the keys' dtype, or bytes; stride: from one page of ``entries`` to the next, in elements.
        layout: of an entry.
        limit: entries in the pool; indices, lens: as in `PagedKeys`, rows and lengths contiguous.
    """

    layout: EntryLayout
    pool: Tensor
    entries: int
    stride: int
    limit: int
    indices: Tensor
    lens: Tensor | None


def launch_attention(
    q: Tensor,
    keys: list[Keys],
    dtype: torch.dtype,
    scale: float,
    sink: Tensor | None,
    d_v: int,
    out: Tensor | None,
    partials: Tensor,
    partial_lse: Tensor,
    partial_max: Tensor | None,
    config: LaunchConfig,
    projected: ProjectedLaunch | None = None,
) -> None:
    """Attends each split of the keys, into ``partials`` (which is ``out`` if the result is final).

    Args:
        out: ``[T, H, d_v]``; None if it goes to the tensors of ``projected``.
        partial_max: as ``partial_lse``, for the largest logits; only without ``config.hopper``.
        projected: if ``q`` holds heads as they were projected, else None.
    """
    T, H, dim = q.shape
    first, second, layout = keys[0], keys[-1], keys[0].layout
    split = partials is not out
    projected_arguments, projected_shape = projected or (None, None)
    out_strides = (0, 0) if out is None else out.stride()[:2]
    if config.hopper and layout.group == 128:
        _launch_v32_hopper(q, first, scale, out_strides, partials, partial_lse, config)
        return
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
        *out_strides,
    )
    flags = {
        "NOPE": layout.nope,
        "N0": first.entries,
        "N1": second.entries,
        "POOLS": len(keys),
        "HAS_LENS0": first.lens is not None,
        "HAS_LENS1": second.lens is not None,
        "HAS_SINK": sink is not None,
        "SPLIT": split,
        "PROJECTED": projected_shape,
    }
    if config.hopper:
        attend_hopper_kernel[(T * triton.cdiv(H, config.heads), config.splits)](
            *arguments, projected_arguments, **flags, enable_fp_fusion=True, num_warps=8, launch_pdl=True
        )
        return
    starts, widths = pieces(layout.nope, dim, config.piece)
    pdl = supports_pdl(q.device)
    attend_kernel[(T, config.splits, triton.cdiv(H, config.heads))](
        *arguments,
        partial_max,
        projected_arguments,
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


def _launch_v32_hopper(
    q: Tensor,
    keys: Keys,
    scale: float,
    out_strides: tuple[int, ...],
    partials: Tensor,
    partial_lse: Tensor,
    config: LaunchConfig,
) -> None:
    """`launch_attention` for ``fp8_v32`` pages on Hopper."""
    T, H, _ = q.shape
    attend_v32_hopper_kernel[(T * triton.cdiv(H, config.heads), config.splits)](
        q,
        keys.pool,
        keys.indices,
        keys.indices if keys.lens is None else keys.lens,
        partials,
        partial_lse,
        H,
        scale * LOG2E,
        keys.indices.shape[1],
        keys.limit,
        keys.stride,
        keys.indices.stride(0),
        q.stride(0),
        q.stride(1),
        *out_strides,
        NOPE=keys.layout.nope,
        N=keys.entries,
        HAS_LENS=keys.lens is not None,
        SPLIT=config.splits > 1,
        enable_fp_fusion=True,
        num_warps=8,
        launch_pdl=True,
    )


def launch_rows_hopper(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None,
    lens: Tensor | None,
    out: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attends to rows of ``kv`` on Hopper; ``(out, lse)`` as `sparse_attention` returns them."""
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


def combine_partials(
    partials: Tensor,
    partial_lse: Tensor,
    sink: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    projected: ProjectedLaunch | None = None,
) -> None:
    """Combines split-K partials ``[T, splits, H, d_v]`` in a fixed order, into ``out`` and ``lse`` or ``projected``.

    A warp holds whole columns of partials: with more warps, which sum across, 8 queries of 64 heads in 10 splits took
    17.9 us (4 warps) and 26.9 us (8 warps), attention included, instead of 13.4 us.
    """
    T, splits, H, d_v = partials.shape
    warps = 1 if 16 < splits <= 65 else 2
    block_s = triton.next_power_of_2(splits)
    block_d = min(triton.next_power_of_2(d_v), 256 * warps, max(64, 4096 * warps // block_s))
    arguments, shape = projected or (None, None)
    if projected is not None and block_d < 128:  # channels that share a scale
        warps, block_d = 2 * warps, 128
    pdl = supports_pdl(partials.device)  # programs are launched before the partials are written, and wait for them
    combine_kernel[(T, H, triton.cdiv(d_v, block_d))](
        partials,
        partial_lse,
        partial_lse if sink is None else sink,
        out,
        lse,
        H,
        0 if out is None else out.stride(0),
        0 if out is None else out.stride(1),
        splits,
        arguments,
        D_V=d_v,
        HAS_SINK=sink is not None,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        PDL=pdl,
        PROJECTED=shape,
        enable_fp_fusion=True,
        num_warps=warps,
        launch_pdl=pdl,
    )
