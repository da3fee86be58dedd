"""Launches of sparse attention and of gathers by their plans, on arguments that `attend` and `gather` have checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.attend_hopper import HopperShape, attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.attention.attend_triton import (
    AttendOutputs,
    AttendPool,
    AttendQueries,
    AttendShape,
    CombineShape,
    RawQArguments,
    RawQShape,
    attend_kernel,
    attention_combine_kernel,
)
from deepseek_attn.kernels.attention.attend_v32_hopper import attend_v32_hopper_kernel
from deepseek_attn.kernels.attention.plan import AttendPlan
from deepseek_attn.kernels.attention.types import AttendedKeys
from deepseek_attn.kernels.common.device import LOG2E, fp8_view
from deepseek_attn.kernels.common.plans import cdiv
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


class RawQ(NamedTuple):
    """Raw queries and their quantised result, as kernels take them: runtime arguments and constants."""

    arguments: RawQArguments
    shape: RawQShape

    @classmethod
    def of(cls, raw_q: RawQueries, rows: QuantizedRows, rotated: bool, plan: AttendPlan) -> RawQ:
        """``rotated``: queries that are normed and rotated already are read in the place of ``raw_q.q``."""
        values, scale, pow2_scales = rows
        arguments = RawQArguments(
            raw_q.positions, raw_q.cos_sin, len(raw_q.cos_sin), raw_q.eps, fp8_view(values), values.stride(0),
            values.stride(1), raw_q.num_heads // len(values), scale, scale.stride(1),
        )  # fmt: skip
        dtype, rope = TRITON_DTYPES[raw_q.q.dtype], raw_q.cos_sin.shape[1]
        return cls(arguments, RawQShape(dtype, rope, rotated, raw_q.norm, pow2_scales, plan.native_fp8))


def launch(
    plan: AttendPlan,
    q: Tensor,
    keys: Sequence[AttendedKeys],
    scale: float,
    outputs: AttendOutputs,
    d_v: int,
    raw: RawQ | None = None,
) -> None:
    """Attends to ``keys`` of one or two pools, into ``outputs``, or of raw queries into the tensors of ``raw``."""
    T, H, _ = q.shape
    if plan.combine is None:
        _attend(plan, q, keys, scale, outputs, d_v, raw)
        return
    shape = (T, plan.splits, H)
    partials = torch.empty(*shape, d_v, dtype=plan.partial_dtype, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    largest = None if outputs.largest is None else torch.empty_like(lse)
    # with one split the kernel would add the sink itself, and the launch that combines adds it again
    parts = AttendOutputs(partials, 0, 0, lse, largest, None)
    _attend(plan, q, keys, scale, parts, d_v, raw)
    tiles, (arguments, constants) = plan.combine.config, raw or (None, None)
    attention_combine_kernel[(T, H, cdiv(d_v, tiles.channels))](  # in a fixed order
        parts, outputs, arguments, H, plan.splits,
        SHAPE=CombineShape(d_v, tiles.splits, tiles.channels, plan.pdl, constants),
        enable_fp_fusion=True, num_warps=tiles.warps, launch_pdl=plan.pdl,
    )  # fmt: skip
    if largest is not None:
        torch.amax(largest, 1, out=outputs.largest)


def _attend(
    plan: AttendPlan,
    q: Tensor,
    keys: Sequence[AttendedKeys],
    scale: float,
    outputs: AttendOutputs,
    d_v: int,
    raw: RawQ | None,
) -> None:
    """The launch that attends, into the result or its split-K partials."""
    (T, H, dim), kernel, tiles, split = q.shape, plan.attend.kernel, plan.attend.config, plan.combine is not None
    queries = AttendQueries(q, q.stride(0), q.stride(1), scale * LOG2E)
    first, second = keys[0], keys[1] if len(keys) > 1 else None
    layouts = first.layout, keys[-1].layout
    pool, width = _pool(first), first.indices.shape[1]
    if kernel == "attend_rows_hopper_kernel":
        jobs = T * cdiv(H, tiles.heads)
        attend_rows_hopper_kernel[(plan.programs,)](
            queries, pool, outputs, H, jobs, width, first.limit, DIM=dim, enable_fp_fusion=True, num_warps=tiles.warps
        )
        return
    if kernel == "attend_v32_hopper_kernel":
        attend_v32_hopper_kernel[(T * cdiv(H, tiles.heads), plan.splits)](
            queries, pool, outputs, H, width, first.limit,
            SHAPE=HopperShape(layouts[0].nope, layouts[0].entries, 0, split),
            enable_fp_fusion=True, num_warps=tiles.warps, launch_pdl=True,
        )  # fmt: skip
        return
    arguments = (
        queries, pool, None if second is None else _pool(second), outputs, None if raw is None else raw.arguments, H,
        width, 0 if second is None else second.indices.shape[1], first.limit, 0 if second is None else second.limit,
    )  # fmt: skip
    raw_shape = None if raw is None else raw.shape
    if kernel == "attend_hopper_kernel":
        entries = 0 if second is None else layouts[1].entries
        shape = HopperShape(layouts[0].nope, layouts[0].entries, entries, split, raw_shape)
        attend_hopper_kernel[(T * cdiv(H, tiles.heads), plan.splits)](
            *arguments, SHAPE=shape, enable_fp_fusion=True, num_warps=tiles.warps, launch_pdl=True
        )
        return
    starts, widths = pieces(layouts[0].nope, dim, tiles.piece)
    shape = AttendShape(
        DIM=dim,
        D_V=d_v,
        POOLS=len(keys),
        FIRST=layouts[0],
        SECOND=layouts[1],
        STARTS=starts,
        WIDTHS=widths,
        V_PIECES=sum(start < d_v for start in starts),
        DTYPE=TRITON_DTYPES[plan.dtype],
        PRECISION="tf32x3" if plan.dtype == torch.float32 else None,
        NATIVE_FP8=plan.native_fp8,
        SPLIT=split,
        RAW_Q=raw_shape,
        BLOCK_H=tiles.heads,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        PDL=plan.pdl,
    )
    attend_kernel[(T, plan.splits, cdiv(H, tiles.heads))](
        *arguments,
        SHAPE=shape,
        enable_fp_fusion=True,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=plan.pdl,
    )


def _pool(keys: AttendedKeys) -> AttendPool:
    return AttendPool(keys.pool, keys.page_stride, keys.indices, keys.indices.stride(0), keys.lens)


def pieces(nope: int, dim: int, piece: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and widths of the pieces that cover channels ``[0, nope)`` and ``[nope, dim)``.

    Widths are powers of two from 16 to ``piece``; the last piece of a part may be wider than the remaining channels.
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
