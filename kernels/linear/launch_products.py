"""Launches of the product kernels of linear layers: the tensors of a call in the form that each kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.plans import launch_options
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.formats import Segment
from deepseek_attn.kernels.linear.linear_decode_hopper import DecodeInput, DecodeTiling, linear_decode_hopper_kernel
from deepseek_attn.kernels.linear.linear_hopper import linear_hopper_kernel
from deepseek_attn.kernels.linear.linear_hopper_products import HopperMemory, LinearHopperTiling
from deepseek_attn.kernels.linear.linear_triton import (
    LinearConstants,
    LinearInputs,
    SplitScratch,
    WeightFormat,
    multi_linear_kernel,
)
from deepseek_attn.kernels.linear.plan import (
    DECODE,
    HOPPER,
    HOPPER_FP8_WEIGHTS,
    HOPPER_PLAIN_WEIGHTS,
    PLAIN_CHANNELS,
    TRITON,
)
from deepseek_attn.kernels.linear.problem import ProductPlan

_tiled = TensorDescriptor.from_tensor  # (tensor, tile, layout in shared memory): TMA loads the tiles
_BYTES = gl.NVMMASharedLayout(128, 8, 2)
_PLAIN = gl.NVMMASharedLayout(128, 16, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)


class Operands(NamedTuple):
    """Tensors of one launch.

    Attributes:
        x: ``[M, groups * K]``; quantized: the same in FP8, if segments read it so.
        segments: weights, FP8 ones first; a single one if it has diagonal blocks, ``groups``.
        outs: ``[M, N]`` of each segment; output: the only one in FP8 as well, or None.
    """

    x: Tensor
    quantized: QuantizedRows | None
    segments: Sequence[Segment]
    outs: Sequence[Tensor]
    output: QuantizedRows | None
    groups: int


def launch_triton(product: ProductPlan, operands: Operands) -> None:
    """Launches `multi_linear_kernel`."""
    x, quantized, segments, outs, _, groups = operands
    config, K, count = product.choice.config, x.shape[1] // groups, len(product.fp8.SIZES)
    fp8, plain, input_format = segments[:count], segments[count:], segments[0].input_format
    q, q_scale, group_stride, mode = x, x, 0, "quantize" if fp8 and input_format.fp8 else "plain"
    if quantized is not None:
        q, q_scale, mode = fp8_view(quantized.values), quantized.scale, "quantized"
        group_stride = q.stride(0) if groups > 1 else 0
    group = input_format.group if fp8 else 128
    strides = x.stride(0), q.stride(-2), q_scale.stride(1)
    group_strides = K, group_stride, K // group * q_scale.stride(1)
    dot, plain_dot = ((TRITON_DTYPES[one.dtype], one.parts, one.precision) for one in product.dots)
    multi_linear_kernel[(product.jobs,)](
        LinearInputs(x, q, q_scale, *strides, *group_strides),
        tuple(fp8_view(one.weight) for one in fp8),
        tuple(one.scale for one in fp8),
        tuple(outs[:count]),
        tuple(one.weight for one in plain),
        tuple(outs[count:]),
        _scratch(product, x, x),
        len(x),
        CONSTANTS=LinearConstants(K, config, input_format.pow2_scales, product.choice.native_fp8, product.choice.pdl),
        FP8=WeightFormat(product.fp8, group, True, mode, *dot),
        PLAIN=WeightFormat(product.plain, PLAIN_CHANNELS, False, "plain", *plain_dot),
        num_stages=config.stages,
        **launch_options(config.warps, product.choice.pdl),
    )


def launch_hopper(product: ProductPlan, operands: Operands) -> None:
    """Launches `linear_hopper_kernel`."""
    x, quantized, segments, outs, output, groups = operands
    if quantized is None:
        raise ValueError(f"linear_hopper_kernel reads an input in FP8, and the plan has none: {product}")
    q, q_scale, _ = quantized
    config, (M, K), count = product.choice.config, q.shape[-2:], len(product.fp8.SIZES)
    fp8, plain = segments[:count], segments[count:]
    stride = q.stride(0) // q.stride(1) if groups > 1 else 0
    if q.dim() == 3:  # by group; a rank may have a single one
        q = q.as_strided((stride * (groups - 1) + M, K), (q.stride(1), 1))
    registers = min(248, 65536 // (1 + config.spare) // (128 * config.warpgroups + 128)) // 8 * 8
    later_registers = min(240, (registers * (config.warpgroups + 1) - 40) // config.warpgroups // 8 * 8)
    pow2_scales = output is None or output.pow2_scales
    tiling = LinearHopperTiling(
        *(K, config, 128 // fp8[0].input_format.group, product.fp8, product.plain),
        *(TRITON_DTYPES[x.dtype], pow2_scales, later_registers),
    )
    linear_hopper_kernel[(min(product.jobs, gpu(x.device).multiprocessors),)](
        _tiled(q, [config.tokens, 128], _BYTES),
        _tiled(q_scale.t(), [1, tiling.SCALES], _SCALES),
        _tiled(x, [config.tokens, 64], _PLAIN) if plain else None,
        *_tiled_weights(fp8, [config.rows, 128], _BYTES, HOPPER_FP8_WEIGHTS),
        *_tiled_weights(plain, [config.rows, 64], _PLAIN, HOPPER_PLAIN_WEIGHTS),
        tuple(one.scale for one in fp8),
        tuple(outs[:count]),
        tuple(outs[count:]),
        _memory(product, x, output, q_scale),
        M,
        product.jobs,
        stride,
        0 if output is None else output.scale.stride(1),
        TILING=tiling,
        maxnreg=registers,
        **launch_options(4, True),
    )


def launch_decode(product: ProductPlan, operands: Operands) -> None:
    """Launches `linear_decode_hopper_kernel`."""
    x, quantized, segments, outs, output, groups = operands
    source, config = DecodeInput(x, x.stride(0), 0, x, 0), product.choice.config
    if quantized is not None:
        q, q_scale, _ = quantized
        source = DecodeInput(q, q.stride(-2), q.stride(0) if groups > 1 else 0, q_scale, q_scale.stride(1))
    K, pow2_scales = segments[0].weight.shape[1], segments[0].input_format.pow2_scales
    linear_decode_hopper_kernel[(min(product.jobs, gpu(x.device).multiprocessors),)](
        source,
        *_tiled_weights(segments, [config.rows, 128], _BYTES, HOPPER_FP8_WEIGHTS),
        tuple(one.scale for one in segments),
        tuple(outs),
        _memory(product, x, output, segments[0].scale),
        len(x),
        product.jobs,
        0 if output is None else output.scale.stride(1),
        TILING=DecodeTiling(K, config, product.fp8, quantized is not None, pow2_scales),
        maxnreg=168,
        **launch_options(4, True),
    )


LAUNCHES = {TRITON: launch_triton, HOPPER: launch_hopper, DECODE: launch_decode}
"""By name of the kernel, as plans have it."""


def _tiled_weights(
    segments: Sequence[Segment], tile: list[int], layout: gl.NVMMASharedLayout, count: int
) -> list[TensorDescriptor | None]:
    """``count`` arguments of a kernel: descriptors of weights, then None."""
    used = [_tiled(segment.weight, tile, layout) for segment in segments]
    return used + [None] * (count - len(used))


def _scratch(product: ProductPlan, x: Tensor, unused: Tensor | None) -> SplitScratch:
    """Memory for the split-K partials of each tile; none, and ``unused`` as counters, where nothing is split."""
    tile = product.token_tiles * product.choice.config.rows * product.choice.config.tokens
    sizes = (tile * tiles.TILES * tiles.SPLITS if tiles.SPLITS > 1 else 0 for tiles in (product.fp8, product.plain))
    fp8, plain = (x.new_empty(size, dtype=torch.float32) if size else None for size in sizes)
    is_split = max(product.fp8.SPLITS, product.plain.SPLITS) > 1
    return SplitScratch(fp8, plain, counters_of(x.device) if is_split else unused)


def _memory(product: ProductPlan, x: Tensor, output: QuantizedRows | None, unused: Tensor | None) -> HopperMemory:
    quantized = (None, None) if output is None else (output.values, output.scale)
    return HopperMemory(*quantized, *_scratch(product, x, unused))
