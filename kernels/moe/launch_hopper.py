"""Launches of `experts_hopper`: which routed experts it supports, and how. `experts` checks arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.tiles import tiled
from deepseek_attn.kernels.linear import FP8_INPUT_GROUP
from deepseek_attn.kernels.moe.experts_hopper import Tiling, experts_hopper_kernel
from deepseek_attn.kernels.moe.experts_hopper_weights import QUAD
from deepseek_attn.kernels.moe.launch_config import HopperLaunchConfig
from deepseek_attn.kernels.moe.rows_triton import (
    count_chunks_kernel,
    place_rows_kernel,
    prepare_few_rows_kernel,
    prepare_rows_kernel,
)
from deepseek_attn.kernels.moe.types import ExpertStack

_WEIGHT = gl.NVMMASharedLayout(128, 8, 2)
_BYTES = gl.NVMMASharedLayout(0, 8, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)
CHUNK = 512  # pairs that are counted together
MAX_FEW = 64  # pairs up to which one launch does everything before the products
SHARED = (200, 101, 66)  # KiB for stages where a multiprocessor has 1, 2, 3 programs; outputs change layout in the rest
_STEP = 512  # both widths must be multiples of it: scales of FP4 are read for four blocks of channels


class RoutedRows(NamedTuple):
    """Pairs as rows in order of expert; an expert's rows start at a multiple of 16.

    Attributes:
        count: number of rows with gaps, at most.
        pair: int32 ``[count]``, the pair of each row; row: int32 ``[pairs]``, the row of each pair.
        weight: float32 ``[count]``, the weight of each row's pair.
        tiles: int32 ``[3, capacity]``, expert, first row and rows of each tile; num_tiles: int32 ``[1]``.
        few: the launch that quantised x wrote all of this.
    """

    count: int
    pair: Tensor
    row: Tensor
    weight: Tensor
    tiles: Tensor
    num_tiles: Tensor
    few: bool


class QuantizedRows(NamedTuple):
    """FP8 ``[rows, K]`` and their float32 scales ``[K / 128, rows]``."""

    values: Tensor
    scale: Tensor


def fits_hopper(x: Tensor, w1: ExpertStack, w3: ExpertStack, w2: ExpertStack, fp8_input: bool) -> bool:
    """Whether `experts_hopper` supports these arguments.

    It needs compute capability 9.0, inputs of 16 bits that are quantised to FP8 (FP8 products have no more) in groups
    of 128, FP8 weights, or FP4 ones with exponents of rows, and widths of multiples of 512.
    """
    stacks = (w1, w3, w2)
    if gpu(x.device).capability != (9, 0) or x.dtype not in (torch.bfloat16, torch.float16) or not fp8_input:
        return False
    if w1.fp8_group != FP8_INPUT_GROUP:
        return False
    if any(stack.scale is None or (stack.is_fp4 and stack.exponent is None) for stack in stacks):
        return False
    # what is loaded as tiles; FP8's scales are not
    loaded = [part for stack in stacks for part in ((stack.weight, stack.scale) if stack.is_fp4 else (stack.weight,))]
    aligned = all(part.data_ptr() % 16 == 0 for part in loaded)
    return aligned and x.shape[1] % _STEP == 0 and w1.weight.shape[1] % _STEP == 0


def route_rows(
    x: Tensor, experts: Tensor, weights: Tensor, count: int, config: HopperLaunchConfig, pow2_scales: bool
) -> tuple[RoutedRows, QuantizedRows]:
    """Rows of the pairs of ``experts [T, k]``, of ``count`` experts, and those of x; there is room for any routing."""
    pairs = experts.numel()
    used = min(pairs, count)
    num_rows = (pairs + 15 * used + 15) // 16 * 16
    capacity = used + pairs // config.sizes[-1]
    pair, row, tiles, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (num_rows, pairs, 3 * capacity, 1)
    )
    weight = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    few = pairs <= MAX_FEW
    rows = RoutedRows(num_rows, pair, row, weight, tiles.view(3, capacity), num_tiles, few)
    if few:
        T, K = x.shape
        quantized = _empty_rows(num_rows, K, x.device)
        block = 512
        prepare_few_rows_kernel[(T, K // block)](
            x,
            experts,
            weights,
            pair,
            row,
            weight,
            tiles,
            num_tiles,
            *quantized,
            x.stride(0),
            num_rows,
            pairs,
            capacity,
            K=K,
            TOPK=experts.shape[1],
            BLOCK=block,
            POW2=pow2_scales,
            SLOTS=max(16, triton.next_power_of_2(pairs)),
            TILE=config.sizes[-1],
            GRANULE=config.sizes[0],
            enable_fp_fusion=True,
            num_warps=4,
            launch_pdl=True,
        )
        return rows, quantized
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, count, dtype=torch.int32, device=x.device)
    sizes = {"E": count, "E_PADDED": triton.next_power_of_2(count), "CHUNK": CHUNK}
    options = {"num_warps": 4, "launch_pdl": True}
    count_chunks_kernel[(chunks,)](experts, counts, pairs, enable_fp_fusion=True, **sizes, **options)
    place_rows_kernel[(triton.cdiv(pairs, 128),)](
        experts,
        weights,
        counts,
        pair,
        row,
        weight,
        tiles,
        num_tiles,
        pairs,
        capacity,
        chunks,
        BLOCK=128,
        TILE=config.sizes[-1],
        GRANULE=config.sizes[0],
        enable_fp_fusion=True,
        **sizes,
        **options,
    )
    return rows, _prepared(x, experts, rows, pow2_scales)


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
    rows, inputs = route_rows(x, experts, weights, len(w1.weight), config, pow2_scales)
    hidden = torch.empty(rows.count, inner, dtype=x.dtype, device=x.device)
    pair_outputs = torch.empty(experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    row_weights = None if weigh_output else rows.weight
    _product(inputs, w1, w3, hidden, rows, row_weights, limit or None, config, rows.few)
    inputs = _prepared(hidden, None, rows, pow2_scales)
    _product(inputs, w2, None, pair_outputs, rows, None, None, config, False)
    return pair_outputs


def _prepared(x: Tensor, experts: Tensor | None, rows: RoutedRows, pow2_scales: bool) -> QuantizedRows:
    """Routed rows of x quantised; see `prepare_rows_kernel`.

    Without ``experts``, x has the routed rows.
    """
    source, K = x.shape
    quantized = _empty_rows(rows.count, K, x.device)
    block = next(size for size in (2048, 1024, 512) if K % size == 0)
    prepare_rows_kernel[(source, K // block)](
        x,
        rows.row if experts is None else experts,
        rows.row,
        *quantized,
        x.stride(0),
        rows.count,
        K=K,
        TOPK=0 if experts is None else experts.shape[1],
        BLOCK=block,
        POW2=pow2_scales,
        enable_fp_fusion=True,
        num_warps=block // 512,
        launch_pdl=True,
    )
    return quantized


def _empty_rows(count: int, K: int, device: torch.device) -> QuantizedRows:
    return QuantizedRows(
        torch.empty(count, K, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(K // 128, count, dtype=torch.float32, device=device),
    )


def _product(
    inputs: QuantizedRows,
    a: ExpertStack,
    b: ExpertStack | None,
    out: Tensor,
    rows: RoutedRows,
    weights: Tensor | None,
    limit: float | None,
    config: HopperLaunchConfig,
    wait: bool,
) -> None:
    """Launches ``out = a[expert] x`` by pair, or ``swiglu`` of the products with a and b by row.

    ``wait``: the launch before wrote ``rows``; else it wrote only the inputs.
    """
    x, x_scale = inputs
    N, K, fp4 = a.weight.shape[1], x.shape[1], a.is_fp4
    groups, channels = config.warpgroups, config.channels if fp4 else 128
    blocks = channels // 128
    parts, scales = triton.cdiv(config.sizes[-1], config.part), max(config.part, 32)
    box = config.part if blocks == 1 else config.sizes[0]
    step = channels // 2 if fp4 else 128
    layout = gl.NVMMASharedLayout(step, 8, 2)
    height = 64 * groups  # weight rows of a job
    weights_of = height if b is None else height // 2
    at_once = weights_of // groups if blocks == 1 else weights_of
    stage = height * step + parts * blocks * (128 * config.part + 4 * scales)
    held = 2 * height * 4 * QUAD if fp4 else 0  # scales of the weights
    # a third warpgroup changes the layout of its outputs, too
    shared = SHARED[config.programs - 1] - (10 if groups == 3 else 0)
    room = ((shared << 10) - held) // stage
    loaders = 40 if groups == 2 and blocks == 1 else 32
    registers = 65536 // config.programs // (128 * groups + 128) // 8 * 8
    multiprocessors = gpu(x.device).multiprocessors

    def weight_and_scale(stack: ExpertStack | None) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
        if stack is None:
            return None, None
        weight = tiled(stack.weight.flatten(0, 1), at_once, step, layout)
        return weight, tiled(stack.scale.flatten(0, 1), at_once, 4 * QUAD, _BYTES) if fp4 else None

    a_weight, a_scale = weight_and_scale(a)
    b_weight, b_scale = weight_and_scale(b)
    experts_hopper_kernel[(multiprocessors * config.programs,)](
        tiled(x, box, 128, _WEIGHT),
        tiled(x_scale, blocks, scales, _SCALES),
        a_weight,
        b_weight,
        a_scale,
        b_scale,
        None if fp4 else a.scale,
        None if fp4 or b is None else b.scale,
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
            # scales of two quads of blocks are held: a block's stage is free only once its quad's are read
            STAGES=min(config.stages, room, 2 * QUAD // blocks if fp4 else room),
            OVERLAP=config.overlap,
            SCALES=scales,
            ROW_BLOCKS=triton.cdiv(N, weights_of),
            WARPGROUPS=groups,
            WAIT=wait,
            CHANNELS=channels,
            BOX=box,
        ),
        REGISTERS=min(240, (registers * (groups + 1) - loaders) // groups // 8 * 8),
        LOADERS=loaders,
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )
