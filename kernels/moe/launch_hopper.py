"""Launches of `experts_hopper_kernel` and of the kernels around it, by the Hopper plans of `plan_experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.plans import cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.moe.experts_hopper import ExpertScales, experts_hopper_kernel
from deepseek_attn.kernels.moe.experts_hopper_output import ExpertOutput
from deepseek_attn.kernels.moe.plan import CHUNK
from deepseek_attn.kernels.moe.problem import QUAD, ExpertsPlan, HopperProduct
from deepseek_attn.kernels.moe.rows_triton import (
    PairRows,
    QuantizedTokens,
    RowRouting,
    count_chunks_kernel,
    place_rows_kernel,
    prepare_decode_rows_kernel,
    prepare_rows_kernel,
)
from deepseek_attn.kernels.moe.types import ExpertsCall, ExpertStack

_tiled = TensorDescriptor.from_tensor  # (tensor, tile, layout in shared memory): TMA loads the tiles
_INPUT = gl.NVMMASharedLayout(128, 8, 2)
_BYTES = gl.NVMMASharedLayout(0, 8, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)


def launch_hopper(plan: ExpertsPlan, call: ExpertsCall) -> Tensor:
    """Outputs of all pairs ``[T * k, D]`` in the dtype of x, without the weights of the pairs if ``weigh_output``."""
    x, w1, w3, w2 = call.x, call.w1, call.w3, call.w2
    first, second = plan.hopper
    rows, inputs = route_rows(plan, call)
    hidden = torch.empty(len(rows.pair), w1.weight.shape[1], dtype=x.dtype, device=x.device)
    outputs = torch.empty(call.experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    row_weights = None if call.weigh_output else rows.weight
    call.wait_for("gates_ready")
    _product(first, inputs, (w1, w3), rows, ExpertOutput(hidden, rows.pair, row_weights, call.limit or None))
    inputs = _prepared(plan.hidden, hidden, None, rows, call)
    call.wait_for("outputs_ready")
    _product(second, inputs, (w2,), rows, ExpertOutput(outputs, rows.pair, None, None))
    return outputs


def route_rows(plan: ExpertsPlan, call: ExpertsCall) -> tuple[PairRows, QuantizedRows]:
    """Rows of the pairs in order of expert, and the tokens of these rows; there is room for any routing."""
    x, experts, count = call.x, call.experts, call.num_experts
    sizes, (pairs, topk) = plan.product.config.sizes, (experts.numel(), experts.shape[1])
    used = min(pairs, count)
    num_rows = (pairs + 15 * used + 15) // 16 * 16  # an expert's rows start at a multiple of 16
    capacity = used + pairs // sizes[-1]
    pair, row, tiles, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (num_rows, pairs, 3 * capacity, 1)
    )
    weight = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rows = PairRows(pair, row, weight, tiles.view(3, capacity), num_tiles)
    routing = RowRouting(experts, call.weights, call.rows)
    block, warps = plan.grouping.config
    options = {"TILE": sizes[-1], "GRANULE": sizes[0]} | launch_options(warps, True)
    if plan.inputs is None:
        T, K = x.shape
        inputs = empty_quantized_rows(num_rows, K, x.device)
        tokens = QuantizedTokens(x, inputs.values, inputs.scale, x.stride(0), num_rows)
        prepare_decode_rows_kernel[(T, K // block)](
            tokens, routing, rows, pairs, capacity, K=K, TOPK=topk, BLOCK=block,
            POW2=call.input_format.pow2_scales, SLOTS=max(16, next_power_of_2(pairs)), **options,
        )  # fmt: skip
        return rows, inputs
    chunks, constants = cdiv(pairs, CHUNK), {"E": count, "CHUNK": CHUNK}
    counts = torch.empty(chunks, count, dtype=torch.int32, device=x.device)
    count_chunks_kernel[(chunks,)](experts, counts, pairs, **constants, **launch_options(warps, True))
    place_rows_kernel[(cdiv(pairs, block),)](
        routing, counts, rows, pairs, capacity, chunks, **constants, BLOCK=block, **options
    )
    return rows, _prepared(plan.inputs, x, experts, rows, call)


def _prepared(choice: Any, x: Tensor, experts: Tensor | None, rows: PairRows, call: ExpertsCall) -> QuantizedRows:
    """Routed rows of the tokens x, quantised; without ``experts``, x has the routed rows."""
    count, K = x.shape
    inputs = empty_quantized_rows(len(rows.pair), K, x.device)
    block, warps = choice.config
    prepare_rows_kernel[(count, K // block)](
        QuantizedTokens(x, inputs.values, inputs.scale, x.stride(0), len(rows.pair)),
        experts,
        rows.row,
        K=K,
        TOPK=0 if experts is None else experts.shape[1],
        BLOCK=block,
        POW2=call.input_format.pow2_scales,
        **launch_options(warps, True),
    )
    return inputs


def _product(
    product: HopperProduct, inputs: QuantizedRows, stacks: Sequence[ExpertStack], rows: PairRows, output: ExpertOutput
) -> None:
    """Launches ``out = w[expert] x`` by pair, or ``swiglu`` of the products with two stacks by row."""
    tiling, missing = product.tiling, [None] * (2 - len(stacks))
    layout, tile = gl.NVMMASharedLayout(product.weight_bytes, 8, 2), [product.weight_rows, product.weight_bytes]
    weights = [_tiled(stack.weight.flatten(0, 1), tile, layout) for stack in stacks]
    # rows of K / 32 scales are not multiples of 16 bytes where half of a quad ends them: two rows are
    tile_rows, width = (32, tiling.K // 16) if tiling.HALF_QUAD else (product.weight_rows, tiling.K // 32)
    scales = [
        _tiled(stack.scale.view(-1, width), [tile_rows, 4 * QUAD], _BYTES)
        if tiling.FP4 and stack.scale is not None
        else None
        for stack in stacks
    ]
    first, second = [stack.exponent if tiling.FP4 else stack.scale for stack in stacks] + missing
    experts_hopper_kernel[(product.programs,)](
        _tiled(inputs.values, [tiling.BOX, 128], _INPUT),
        _tiled(inputs.scale.t(), [tiling.TILES.channels // 128, tiling.SCALES], _SCALES),
        *(weights + missing),
        *(scales + missing),
        ExpertScales(None, None, first, second) if tiling.FP4 else ExpertScales(first, second, None, None),
        rows.tiles,
        rows.tiles.shape[1],
        rows.num_tiles,
        output,
        TILING=tiling,
        maxnreg=product.registers,
        **launch_options(4, True),
    )
