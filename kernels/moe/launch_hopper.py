"""Launches of `experts_hopper`: which routed experts it supports, and how. `experts` checks arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.moe.arguments import ExpertStack
from deepseek_attn.kernels.moe.experts_hopper import Tiling, experts_hopper_kernel
from deepseek_attn.kernels.moe.experts_triton import count_kernel, place_rows_kernel, prepare_rows_kernel
from deepseek_attn.kernels.moe.launch_config import HopperLaunchConfig

_WEIGHT = gl.NVMMASharedLayout(128, 8, 2)
_HALF_WEIGHT = gl.NVMMASharedLayout(64, 8, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)
_STEP = 512  # both widths must be multiples of it: scales of FP4 are read for four blocks of channels


class RoutedRows(NamedTuple):
    """Pairs as rows in order of expert; an expert's rows start at a multiple of 16.

    Attributes:
        count: number of rows with gaps, at most.
        pair: int32 ``[count]``, the pair of each row; row: int32 ``[pairs]``, the row of each pair.
        tiles: int32 ``[3, capacity]``, expert, first row and rows of each tile; num_tiles: int32 ``[1]``.
    """

    count: int
    pair: Tensor
    row: Tensor
    tiles: Tensor
    num_tiles: Tensor


def fits_hopper(x: Tensor, w1: ExpertStack, w3: ExpertStack, w2: ExpertStack, fp8_input: bool) -> bool:
    """Whether `experts_hopper` supports these arguments.

    It needs compute capability 9.0, inputs of 16 bits that are quantised to FP8 (FP8 products have no more), FP8
    weights, or FP4 ones with exponents of rows, and widths of multiples of 512.
    """
    stacks = (w1, w3, w2)
    if gpu(x.device).capability != (9, 0) or x.dtype not in (torch.bfloat16, torch.float16) or not fp8_input:
        return False
    if any(stack.scale is None or (stack.is_fp4 and stack.exponent is None) for stack in stacks):
        return False
    aligned = all(stack.weight.data_ptr() % 16 == 0 for stack in stacks)
    return aligned and x.shape[1] % _STEP == 0 and w1.weight.shape[1] % _STEP == 0


def route_rows(experts: Tensor, count: int, config: HopperLaunchConfig) -> RoutedRows:
    """Rows of the pairs of ``experts [T, k]``, of ``count`` experts; there is room for any routing."""
    pairs = experts.numel()
    used = min(pairs, count)
    num_rows = (pairs + 15 * used + 15) // 16 * 16
    capacity = used + pairs // config.sizes[-1]
    block = min(triton.next_power_of_2(pairs), 4096)
    chunks = triton.cdiv(pairs, block)
    counts, pair, row, tiles, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=experts.device)
        for size in (chunks * count, num_rows, pairs, 3 * capacity, 1)
    )
    options = {"BLOCK": block, "PDL": True, "num_warps": max(1, min(8, block // 256)), "launch_pdl": True}
    count_kernel[(count, chunks)](experts, counts, pairs, enable_fp_fusion=True, **options)
    place_rows_kernel[(count, chunks)](
        experts,
        counts,
        pair,
        row,
        tiles,
        num_tiles,
        pairs,
        capacity,
        E=count,
        E_PADDED=triton.next_power_of_2(count),
        CHUNKS=triton.next_power_of_2(chunks),
        TILE=config.sizes[-1],
        GRANULE=config.sizes[0],
        enable_fp_fusion=True,
        **options,
    )
    return RoutedRows(num_rows, pair, row, tiles.view(3, capacity), num_tiles)


def launch_hopper(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    limit: float,
    weigh_output: bool,
    pow2_scales: bool,
    config: HopperLaunchConfig,
) -> Tensor:
    """Outputs of all pairs ``[T * k, D]`` in the dtype of x, without the weights of the pairs if ``weigh_output``."""
    inner = w1.weight.shape[1]
    rows = route_rows(experts, len(w1.weight), config)
    hidden = torch.empty(rows.count, inner, dtype=x.dtype, device=x.device)
    pair_outputs = torch.empty(experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    pair_weights = None if weigh_output else weights
    _product(_prepared(x, experts, rows, pow2_scales), w1, w3, hidden, rows, pair_weights, limit or None, config)
    _product(_prepared(hidden, None, rows, pow2_scales), w2, None, pair_outputs, rows, None, None, config)
    return pair_outputs


def _prepared(x: Tensor, experts: Tensor | None, rows: RoutedRows, pow2_scales: bool) -> tuple[Tensor, Tensor]:
    """Routed rows of x quantised to FP8 ``[rows, K]``, and their scales ``[K / 128, rows]``; see `prepare_rows_kernel`.

    Without ``experts``, x has the routed rows.
    """
    source, K = x.shape
    values = torch.empty(rows.count, K, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(K // 128, rows.count, dtype=torch.float32, device=x.device)
    block = next(size for size in (2048, 1024, 512) if K % size == 0)
    prepare_rows_kernel[(source, K // block)](
        x,
        rows.row if experts is None else experts,
        rows.row,
        values,
        scale,
        x.stride(0),
        rows.count,
        K=K,
        TOPK=0 if experts is None else experts.shape[1],
        BLOCK=block,
        POW2=pow2_scales,
        PDL=True,
        enable_fp_fusion=True,
        num_warps=block // 512,
        launch_pdl=True,
    )
    return values, scale


def _product(
    inputs: tuple[Tensor, Tensor],
    a: ExpertStack,
    b: ExpertStack | None,
    out: Tensor,
    rows: RoutedRows,
    weights: Tensor | None,
    limit: float | None,
    config: HopperLaunchConfig,
) -> None:
    """Launches ``out = a[expert] x`` by pair, or ``swiglu`` of the products with a and b by row."""
    x, x_scale = inputs
    N, K, fp4 = a.weight.shape[1], x.shape[1], a.is_fp4
    parts, scales = triton.cdiv(config.sizes[-1], config.part), max(config.part, 32)
    step, layout = (64, _HALF_WEIGHT) if fp4 else (128, _WEIGHT)
    height = 128 if b is None else 32
    stage = 128 * step + parts * (128 * config.part + 4 * scales)
    registers = 65536 // config.programs // 384 // 8 * 8
    multiprocessors = gpu(x.device).multiprocessors
    experts_hopper_kernel[(multiprocessors * config.programs,)](
        _tiled(x, config.part, 128, _WEIGHT),
        _tiled(x_scale, 1, scales, _SCALES),
        _tiled(a.weight.flatten(0, 1), height, step, layout),
        None if b is None else _tiled(b.weight.flatten(0, 1), height, step, layout),
        a.scale,
        None if b is None else b.scale,
        a.exponent if fp4 else None,
        b.exponent if fp4 and b is not None else None,
        rows.tiles,
        rows.tiles.shape[1],
        rows.num_tiles,
        out,
        rows.pair,
        weights,
        None if limit is None else float(limit),
        TILING=Tiling(
            N=N,
            K=K,
            FP4=fp4,
            GATED=b is not None,
            SIZES=config.sizes,
            PART=config.part,
            PARTS=parts,
            STAGES=min(config.stages, (200 << 10) // config.programs // stage),
            AHEAD=config.ahead,
            SCALES=scales,
            ROW_BLOCKS=triton.cdiv(N, 128 if b is None else 64),
        ),
        REGISTERS=min(240, (registers * 3 - 40) // 2 // 8 * 8),
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )


def _tiled(tensor: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
