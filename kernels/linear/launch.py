"""Launches of linear layers: products in Triton, on Hopper in Gluon, and by cuBLAS; `linear` checks arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import KernelPlan
from deepseek_attn.kernels.common.quant import ROW_MULTIPLE, QuantizedRows, empty_quantized_rows
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
from deepseek_attn.kernels.linear.plan import (
    HOPPER_FP8_WEIGHTS,
    HOPPER_PLAIN_WEIGHTS,
    PLAIN_CHANNELS,
    LinearPlan,
    ProductPlan,
    QuantizeProblem,
    WeightTiles,
    plan_quantize,
)
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
        x: ``[M, groups * K]``; of the values nothing is read if only ``quantized`` ones are.
        quantized: x in FP8, ``[M, K]`` or ``[groups, M, K]``, or None.
        fp8, plain: segments of either kind; outs, plain_outs: their outputs ``[M, N]``.
        output: receives the output of the only weight in FP8 as well, or None.
    """

    x: Tensor
    quantized: QuantizedRows | None
    fp8: Sequence[Segment]
    outs: tuple[Tensor, ...]
    plain: Sequence[Segment]
    plain_outs: tuple[Tensor, ...]
    output: QuantizedRows | None


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
            count = sum(one.scale is not None for one in chosen)
            operands = Operands(
                x, quantized if product.quantized else None, chosen[:count], tuple(results[:count]), chosen[count:],
                tuple(results[count:]), output,
            )  # fmt: skip
            launch_products = _LAUNCHES[product.choice.kernel]
            launch_products(plan, product, operands, groups, pow2_scales)
        outs |= zip(product.weights, results, strict=True)
    return [outs[i] for i in range(len(segments))], output


def _launch_triton(plan: LinearPlan, product: ProductPlan, operands: Operands, groups: int, pow2_scales: bool) -> None:
    x, quantized, fp8, outs, plain, plain_outs, _ = operands
    config, tiles, plain_tiles = product.choice.config, product.fp8, product.plain
    M, K = len(x), x.shape[1] // groups
    q, q_scale = (x, x) if quantized is None else (fp8_view(quantized.values), quantized.scale)
    strides = x.stride(0), q.stride(-2), q_scale.stride(1)
    group_strides = K, q.stride(0) if groups > 1 else 0, K // 128 * q_scale.stride(1)
    dot, plain_dot = ((_DOT_DTYPES[one.dtype], one.parts, one.precision) for one in product.dots)
    mode = "quantized" if quantized is not None else "quantize" if fp8 and fp8[0].reads_fp8 else "plain"
    group = fp8[0].input_format.group if fp8 else 128
    jobs = tiles.TILES * tiles.SPLITS + plain_tiles.TILES * plain_tiles.SPLITS
    multi_linear_kernel[(product.token_tiles * jobs,)](
        LinearInputs(x, q, q_scale, *strides, *group_strides),
        tuple(fp8_view(segment.weight) for segment in fp8),
        tuple(segment.scale for segment in fp8),
        outs,
        tuple(segment.weight for segment in plain),
        plain_outs,
        _scratch(product, x, x),
        M,
        CONSTANTS=LinearConstants(
            K, config.tokens, config.stages, config.prefetched_blocks, pow2_scales, plan.gpu.native_fp8, plan.gpu.pdl
        ),
        FP8=WeightFormat(tiles, config.rows, group, True, mode, *dot),
        PLAIN=WeightFormat(plain_tiles, config.rows, PLAIN_CHANNELS, False, "plain", *plain_dot),
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=plan.gpu.pdl,
    )


def _launch_hopper(plan: LinearPlan, product: ProductPlan, operands: Operands, groups: int, pow2_scales: bool) -> None:
    x, quantized, fp8, outs, plain, plain_outs, output = operands
    if quantized is None:
        raise ValueError(f"linear_hopper_kernel reads an input in FP8, and the plan has none: {product}")
    q, q_scale, _ = quantized
    config, tiles, plain_tiles = product.choice.config, product.fp8, product.plain
    M, K = q.shape[-2:]
    stride = q.stride(0) // q.stride(1) if groups > 1 else 0
    if groups > 1:
        q = q.as_strided((stride * (groups - 1) + M, K), (q.stride(1), 1))
    elif q.dim() == 3:  # a rank with a single group
        q = q[0]
    jobs = product.token_tiles * (tiles.TILES * tiles.SPLITS + plain_tiles.TILES * plain_tiles.SPLITS)
    registers = min(248, 65536 // (1 + config.spare) // (128 * config.warpgroups + 128)) // 8 * 8
    descs = [tiled(segment.weight, config.rows, 128, _BYTES) for segment in fp8]
    plain_descs = [tiled(segment.weight, config.rows, 64, _PLAIN) for segment in plain]
    linear_hopper_kernel[(min(jobs, plan.gpu.multiprocessors),)](
        tiled(q, config.tokens, 128, _BYTES),
        tiled(q_scale.t(), 1, max(config.tokens, 32), _SCALES),
        tiled(x, config.tokens, 64, _PLAIN) if plain else None,
        *descs,
        *[None] * (HOPPER_FP8_WEIGHTS - len(descs)),
        *plain_descs,
        *[None] * (HOPPER_PLAIN_WEIGHTS - len(plain_descs)),
        tuple(segment.scale for segment in fp8),
        outs,
        plain_outs,
        _memory(product, operands, q_scale),
        M,
        jobs,
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
            FP8=tiles,
            PLAIN=plain_tiles,
            DTYPE=TRITON_DTYPES[x.dtype],
            POW2=output is None or output.pow2_scales,
            REGISTERS=min(240, (registers * (config.warpgroups + 1) - 40) // config.warpgroups // 8 * 8),
        ),
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )


def _launch_decode(plan: LinearPlan, product: ProductPlan, operands: Operands, groups: int, pow2_scales: bool) -> None:
    x, quantized, fp8, outs, _, _, output = operands
    config, tiles, (M, K) = product.choice.config, product.fp8, (len(x), fp8[0].weight.shape[1])
    if quantized is None:
        source = DecodeInput(x, x.stride(0), 0, x, 0)
    else:
        q, q_scale, _ = quantized
        source = DecodeInput(q, q.stride(-2), q.stride(0) if groups > 1 else 0, q_scale, q_scale.stride(1))
    jobs, split_blocks = tiles.TILES * tiles.SPLITS, triton.cdiv(K // 128, tiles.SPLITS)
    descs = [tiled(segment.weight, config.rows, 128, _BYTES) for segment in fp8]
    linear_decode_hopper_kernel[(min(jobs, plan.gpu.multiprocessors),)](
        source,
        *descs,
        *[None] * (HOPPER_FP8_WEIGHTS - len(descs)),
        tuple(segment.scale for segment in fp8),
        outs,
        _memory(product, operands, fp8[0].scale),
        M,
        jobs,
        0 if output is None else output.scale.stride(1),
        TILING=DecodeTiling(
            K=K,
            TOKENS=config.tokens,
            ROWS=config.rows,
            SPLIT_BLOCKS=split_blocks,
            INPUT_BLOCKS=triton.next_power_of_2(split_blocks),
            STAGES=config.stages,
            STAGE_BLOCKS=config.stage_blocks,
            STAGES_AT_ONCE=config.stages_at_once,
            QUANTIZED=quantized is not None,
            TILES=tiles,
            POW2=pow2_scales,
        ),
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=168,
        launch_pdl=True,
    )


_LAUNCHES = {
    "multi_linear_kernel": _launch_triton,
    "linear_hopper_kernel": _launch_hopper,
    "linear_decode_hopper_kernel": _launch_decode,
}


def _scratch(product: ProductPlan, x: Tensor, unused: Tensor | None) -> SplitScratch:
    """Memory for the split-K partials of each tile; none, and ``unused`` as counters, where nothing is split."""
    config = product.choice.config

    def partials(tiles: WeightTiles) -> Tensor | None:
        size = tiles.TILES * product.token_tiles * tiles.SPLITS * config.rows * config.tokens if tiles.SPLITS > 1 else 0
        return torch.empty(size, dtype=torch.float32, device=x.device) if size else None

    is_split = max(product.fp8.SPLITS, product.plain.SPLITS) > 1
    counters = counters_of(x.device) if is_split else unused
    return SplitScratch(partials(product.fp8), partials(product.plain), counters)


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
    values, scale, _ = rows
    extra = -len(values) % ROW_MULTIPLE
    if not extra:
        return rows
    total, K, groups = len(values) + extra, values.shape[1], scale.shape[1]
    in_place = scale.stride(1) == total and values.is_contiguous()
    if in_place and _fits_in_storage(values, total * K) and _fits_in_storage(scale, total * groups):
        padded, padded_scale = values.as_strided((total, K), (K, 1)), scale.as_strided((total, groups), (1, total))
    else:
        padded = torch.zeros(total, K, dtype=torch.uint8, device=values.device).view(values.dtype)
        padded[: len(values)] = values
        padded_scale = torch.nn.functional.pad(scale.t(), (0, extra)).t()
    return rows._replace(values=padded, scale=padded_scale)


def _fits_in_storage(tensor: Tensor, size: int) -> bool:
    """Whether ``size`` elements from the first of ``tensor`` on are within its storage."""
    return tensor.storage_offset() + size <= tensor.untyped_storage().nbytes() // tensor.itemsize


# --- the input ---


def quantize_rows(x: Tensor, pow2_scales: bool, groups: int | None = None, rope: Rope | None = None) -> QuantizedRows:
    """``x [M, channels]``, rotated back by ``rope``, as FP8 in the memory of `empty_quantized_rows`."""
    problem = QuantizeProblem(len(x), x.shape[1], batch_invariant(), rope is not None)
    return _quantized_rows(plan_quantize(problem, gpu(x.device)), x, pow2_scales, groups, rope)


def _quantized_rows(
    plan: KernelPlan, x: Tensor, pow2_scales: bool, groups: int | None, rope: Rope | None
) -> QuantizedRows:
    rows, channels = x.shape
    quantized = empty_quantized_rows(rows, channels, x.device, pow2_scales, groups)
    _launch_quantize(plan, x, quantized.values, quantized.scale.t(), pow2_scales, rope)
    return quantized


def _launch_quantize(
    plan: KernelPlan, x: Tensor, out: Tensor, scale: Tensor | None, pow2_scales: bool, rope: Rope | None
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
    config = plan.choice.config
    out_strides = out.stride(-2), out.stride(0) if out.dim() == 3 else 0, 0 if scale is None else scale.stride(0)
    quantize_input_kernel[(triton.cdiv(M, config.rows), triton.cdiv(channels, config.channels))](
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
        enable_fp_fusion=True,
        num_warps=config.warps,
        launch_pdl=plan.pdl,
    )
