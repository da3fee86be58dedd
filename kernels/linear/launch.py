"""Launches of linear layers: products in Triton, on Hopper in Gluon, and by cuBLAS; `linear` checks arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import GPU, fp8_view
from deepseek_attn.kernels.common.device import gpu as gpu_of
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import Choice, cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.common.quant import ROW_MULTIPLE, InputFormat, QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.tiles import tiled
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
from deepseek_attn.kernels.linear.plan import HOPPER_FP8_WEIGHTS, HOPPER_PLAIN_WEIGHTS, PLAIN_CHANNELS, QUANTIZERS
from deepseek_attn.kernels.linear.problem import LinearPlan, ProductPlan, QuantizeProblem
from deepseek_attn.kernels.linear.quantize_triton import QuantizeConstants, QuantizeInputs, quantize_input_kernel

_BYTES = gl.NVMMASharedLayout(128, 8, 2)
_PLAIN = gl.NVMMASharedLayout(128, 16, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)
_DOT_DTYPES = {**TRITON_DTYPES, torch.float8_e4m3fn: tl.float8e4nv}


class Rope(NamedTuple):
    """An inverse rotation of heads: ``positions [M]``, table ``cos_sin [positions, rope_dim]``, channels of a head."""

    positions: Tensor
    cos_sin: Tensor
    head_dim: int


class Operands(NamedTuple):
    """Inputs and outputs of one launch of products.

    Attributes:
        x: ``[M, groups * K]``; its values are not read if all weights read ``quantized``.
        quantized: x in FP8, ``[M, K]`` or ``[groups, M, K]``, or None.
        fp8, scales, outs: FP8 weights with their scales and outputs ``[M, N]``.
        plain, plain_outs: unquantised weights with their outputs ``[M, N]``.
        input_format: of the FP8 weights.
        output: buffers for an FP8 copy of the output, if there is one weight; or None.
        pow2_scales: scales of FP8 inputs and outputs are powers of two.
        groups: diagonal blocks of the weight, if there is one.
    """

    x: Tensor
    quantized: QuantizedRows | None
    fp8: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]
    outs: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]
    plain_outs: tuple[Tensor, ...]
    input_format: InputFormat
    output: QuantizedRows | None
    pow2_scales: bool
    groups: int


def launch(
    plan: LinearPlan,
    x: Tensor,
    segments: Sequence[Segment],
    pow2_scales: bool,
    quantized: QuantizedRows | None = None,
    groups: int = 1,
    rope: Rope | None = None,
) -> tuple[list[Tensor], QuantizedRows | None]:
    """Products of ``x [M, groups * K]`` with each segment; a single product also in FP8 if the plan has it."""
    if plan.quantizes and plan.input is not None:
        quantized = _quantized_rows(plan.input, x, pow2_scales, groups if groups > 1 else None, rope)
    elif plan.input is not None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch_quantize(plan.input, x, out, None, pow2_scales, rope)
        x = out
    outs: dict[int, Tensor] = {}
    output = None
    for product in plan.products:
        chosen = [segments[i] for i in product.weights]
        if product.choice.kernel == "cuBLAS":
            results = _by_cublas(x, chosen, quantized if chosen[0].reads_fp8_once else None, groups)
        else:
            results = [x.new_empty(len(x), len(one.weight), dtype=one.out_dtype or x.dtype) for one in chosen]
            if product.quantizes_output:
                output = empty_quantized_rows(len(x), len(chosen[0].weight), x.device, pow2_scales)
            count, weights = len(product.fp8.SIZES), tuple(one.weight for one in chosen)
            operands = Operands(
                x, quantized if product.quantized else None, weights[:count],
                tuple(one.scale for one in chosen[:count]), tuple(results[:count]), weights[count:],
                tuple(results[count:]), chosen[0].input_format, output, pow2_scales, groups,
            )  # fmt: skip
            launch_products = _LAUNCHES[product.choice.kernel]
            launch_products(plan.gpu, product, operands)
        outs |= zip(product.weights, results, strict=True)
    return [outs[i] for i in range(len(segments))], output


def _launch_triton(gpu: GPU, product: ProductPlan, operands: Operands) -> None:
    x, quantized, fp8, scales, outs, plain, plain_outs, input_format, *_, groups = operands
    config, tiles, plain_tiles, K = product.choice.config, product.fp8, product.plain, x.shape[1] // groups
    q, q_scale = (x, x) if quantized is None else (fp8_view(quantized.values), quantized.scale)
    strides = x.stride(0), q.stride(-2), q_scale.stride(1)
    group_strides = K, q.stride(0) if groups > 1 else 0, K // 128 * q_scale.stride(1)
    dot, plain_dot = ((_DOT_DTYPES[one.dtype], one.parts, one.precision) for one in product.dots)
    mode = "quantized" if quantized is not None else "quantize" if fp8 and input_format.fp8 else "plain"
    multi_linear_kernel[(product.jobs,)](
        LinearInputs(x, q, q_scale, *strides, *group_strides),
        tuple(fp8_view(weight) for weight in fp8),
        scales,
        outs,
        plain,
        plain_outs,
        _scratch(product, x, x),
        len(x),
        CONSTANTS=LinearConstants(
            K, config.tokens, config.stages, config.prefetched_blocks, operands.pow2_scales, gpu.native_fp8, gpu.pdl
        ),
        FP8=WeightFormat(tiles, config.rows, input_format.group if fp8 else 128, True, mode, *dot),
        PLAIN=WeightFormat(plain_tiles, config.rows, PLAIN_CHANNELS, False, "plain", *plain_dot),
        num_stages=config.stages,
        **launch_options(config.warps, gpu.pdl),
    )


def _launch_hopper(gpu: GPU, product: ProductPlan, operands: Operands) -> None:
    x, quantized, fp8, scales, outs, plain, plain_outs, _, output, *_, groups = operands
    if quantized is None:
        raise ValueError(f"linear_hopper_kernel reads an input in FP8, and the plan has none: {product}")
    q, q_scale, _ = quantized
    config, (M, K) = product.choice.config, q.shape[-2:]
    stride = q.stride(0) // q.stride(1) if groups > 1 else 0
    if groups > 1:
        q = q.as_strided((stride * (groups - 1) + M, K), (q.stride(1), 1))
    elif q.dim() == 3:  # a rank with a single group
        q = q[0]
    registers = min(248, 65536 // (1 + config.spare) // (128 * config.warpgroups + 128)) // 8 * 8
    linear_hopper_kernel[(min(product.jobs, gpu.multiprocessors),)](
        tiled(q, config.tokens, 128, _BYTES),
        tiled(q_scale.t(), 1, max(config.tokens, 32), _SCALES),
        tiled(x, config.tokens, 64, _PLAIN) if plain else None,
        *_tiled_weights(fp8, config.rows, 128, _BYTES, HOPPER_FP8_WEIGHTS),
        *_tiled_weights(plain, config.rows, 64, _PLAIN, HOPPER_PLAIN_WEIGHTS),
        scales,
        outs,
        plain_outs,
        _memory(product, operands, q_scale),
        M,
        product.jobs,
        stride,
        0 if output is None else output.scale.stride(1),
        TILING=LinearHopperTiling(
            K=K,
            ROWS=config.rows,
            TOKENS=config.tokens,
            PART_ROWS=config.warpgroup_rows,
            PART_TOKENS=config.warpgroup_tokens,
            ROW_STEP=config.warpgroup_rows % config.rows,
            TOKEN_STEP=config.warpgroup_tokens % config.tokens,
            WARPGROUPS=config.warpgroups,
            STAGES=config.stages,
            SCALES=max(config.tokens, 32),
            FP8=product.fp8,
            PLAIN=product.plain,
            DTYPE=TRITON_DTYPES[x.dtype],
            POW2=output is None or output.pow2_scales,
            REGISTERS=min(240, (registers * (config.warpgroups + 1) - 40) // config.warpgroups // 8 * 8),
        ),
        maxnreg=registers,
        **launch_options(4, True),
    )


def _launch_decode(gpu: GPU, product: ProductPlan, operands: Operands) -> None:
    x, quantized, fp8, scales, outs, _, _, _, output, pow2_scales, groups = operands
    config, (M, K) = product.choice.config, (len(x), fp8[0].shape[1])
    source = DecodeInput(x, x.stride(0), 0, x, 0)
    if quantized is not None:
        q, q_scale, _ = quantized
        source = DecodeInput(q, q.stride(-2), q.stride(0) if groups > 1 else 0, q_scale, q_scale.stride(1))
    split_blocks = cdiv(K // 128, product.fp8.SPLITS)
    linear_decode_hopper_kernel[(min(product.jobs, gpu.multiprocessors),)](
        source,
        *_tiled_weights(fp8, config.rows, 128, _BYTES, HOPPER_FP8_WEIGHTS),
        scales,
        outs,
        _memory(product, operands, scales[0]),
        M,
        product.jobs,
        0 if output is None else output.scale.stride(1),
        TILING=DecodeTiling(
            K=K,
            TOKENS=config.tokens,
            ROWS=config.rows,
            SPLIT_BLOCKS=split_blocks,
            INPUT_BLOCKS=next_power_of_2(split_blocks),
            STAGES=config.stages,
            STAGE_BLOCKS=config.stage_blocks,
            STAGES_AT_ONCE=config.stages_at_once,
            QUANTIZED=quantized is not None,
            TILES=product.fp8,
            POW2=pow2_scales,
        ),
        maxnreg=168,
        **launch_options(4, True),
    )


_LAUNCHES = {
    "multi_linear_kernel": _launch_triton,
    "linear_hopper_kernel": _launch_hopper,
    "linear_decode_hopper_kernel": _launch_decode,
}


def _tiled_weights(
    weights: Sequence[Tensor], rows: int, columns: int, layout: gl.NVMMASharedLayout, count: int
) -> list[TensorDescriptor | None]:
    """``count`` arguments of a kernel: descriptors of weights, then None."""
    return [*(tiled(weight, rows, columns, layout) for weight in weights), *[None] * (count - len(weights))]


def _scratch(product: ProductPlan, x: Tensor, unused: Tensor | None) -> SplitScratch:
    """Memory for the split-K partials of each tile; none, and ``unused`` as counters, where nothing is split."""
    tile = product.token_tiles * product.choice.config.rows * product.choice.config.tokens
    sizes = (tile * tiles.TILES * tiles.SPLITS if tiles.SPLITS > 1 else 0 for tiles in (product.fp8, product.plain))
    fp8, plain = (x.new_empty(size, dtype=torch.float32) if size else None for size in sizes)
    is_split = max(product.fp8.SPLITS, product.plain.SPLITS) > 1
    return SplitScratch(fp8, plain, counters_of(x.device) if is_split else unused)


def _memory(product: ProductPlan, operands: Operands, unused: Tensor | None) -> HopperMemory:
    output = operands.output
    quantized = (None, None) if output is None else (output.values, output.scale)
    return HopperMemory(*quantized, *_scratch(product, operands.x, unused))


# --- cuBLAS ---


def _by_cublas(
    x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None, groups: int
) -> Sequence[Tensor]:
    """The product with an FP8 weight, by group; or one product with adjacent plain weights, in columns."""
    weight, scale, out_dtype = segments[0].weight, segments[0].scale, segments[0].out_dtype or x.dtype
    if scale is None or quantized is None:
        sizes = [len(segment.weight) for segment in segments]
        weight = weight.as_strided((sum(sizes), weight.shape[1]), weight.stride())
        out = torch.mm(x, weight.t()) if out_dtype == x.dtype else torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out.split(sizes, dim=1)
    values = quantized.values if quantized.values.dim() == 3 else quantized.values[None]
    scales = quantized.scale.chunk(groups, dim=1)
    rows = [padded_rows(QuantizedRows(*group)) for group in zip(values, scales, strict=True)]
    out = torch.empty(len(rows[0].values), len(weight), dtype=torch.bfloat16, device=weight.device)
    blocks = zip(rows, weight.chunk(groups), scale.chunk(groups), out.chunk(groups, dim=1), strict=True)
    for (q, q_scale, _), block, block_scale, columns in blocks:
        if not out.is_meta:  # has no such product
            torch._scaled_mm(q, block.t(), q_scale, block_scale.t(), out_dtype=torch.bfloat16, out=columns)
    return [out[: values.shape[1]]]


def padded_rows(rows: QuantizedRows) -> QuantizedRows:
    """``rows`` with up to 15 more rows of any content: cuBLAS needs multiples of ``ROW_MULTIPLE``.

    Copies nothing where the storage of the tensors is long enough, as in `empty_quantized_rows`.
    """
    (values, scale, _), (M, K) = rows, rows.values.shape
    total, groups = cdiv(M, ROW_MULTIPLE) * ROW_MULTIPLE, scale.shape[1]
    if total == M:
        return rows
    in_place = scale.stride(1) == total and values.is_contiguous()
    if in_place and _fits_in_storage(values, total * K) and _fits_in_storage(scale, total * groups):
        values, scale = values.as_strided((total, K), (K, 1)), scale.as_strided((total, groups), (1, total))
        return rows._replace(values=values, scale=scale)
    return padded_rows(rows.take(torch.arange(M, device=values.device)))


def _fits_in_storage(tensor: Tensor, size: int) -> bool:
    """Whether ``size`` elements from the first of ``tensor`` on are within its storage."""
    return tensor.storage_offset() + size <= tensor.untyped_storage().nbytes() // tensor.itemsize


# --- the input ---


def quantize_rows(x: Tensor, pow2_scales: bool, groups: int | None = None, rope: Rope | None = None) -> QuantizedRows:
    """``x [M, channels]``, rotated back by ``rope``, as FP8 in the memory of `empty_quantized_rows`."""
    problem = QuantizeProblem(len(x), x.shape[1], batch_invariant(), rope is not None)
    return _quantized_rows(QUANTIZERS.plan(problem, gpu_of(x.device)), x, pow2_scales, groups, rope)


def _quantized_rows(plan: Choice, x: Tensor, pow2_scales: bool, groups: int | None, rope: Rope | None) -> QuantizedRows:
    rows, channels = x.shape
    quantized = empty_quantized_rows(rows, channels, x.device, pow2_scales, groups)
    _launch_quantize(plan, x, quantized.values, quantized.scale.t(), pow2_scales, rope)
    return quantized


def _launch_quantize(
    plan: Choice, x: Tensor, out: Tensor, scale: Tensor | None, pow2_scales: bool, rope: Rope | None
) -> None:
    """Writes ``x [M, channels]`` to ``out [M, channels]`` or ``[groups, M, channels / groups]``.

    In its dtype; or as FP8, with ``scale [channels / 128, M]``.
    """
    if not len(x):
        return
    M, channels = x.shape
    if x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize):
        x = x.clone(memory_format=torch.contiguous_format)  # pairs of channels are read as one word
    positions, cos_sin, head_dim = rope or (None, None, 1)
    config = plan.config
    out_strides = out.stride(-2), out.stride(0) if out.dim() == 3 else 0, 0 if scale is None else scale.stride(0)
    quantize_input_kernel[(cdiv(M, config.rows), cdiv(channels, config.channels))](
        QuantizeInputs(
            x, out if scale is None else fp8_view(out), scale, positions, cos_sin, x.stride(0), *out_strides
        ),
        M,
        CONSTANTS=QuantizeConstants(
            K=channels,
            GROUP_K=out.shape[-1],
            QUANTIZE=scale is not None,
            POW2=pow2_scales,
            ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1],
            HEAD_DIM=head_dim,
            ROWS=config.rows,
            CHANNELS=config.channels,
            NATIVE_FP8=plan.native_fp8,
            PDL=plan.pdl,
        ),
        **launch_options(config.warps, plan.pdl),
    )
