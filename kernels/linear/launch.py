"""Linear layers on a GPU, from compute capability 8.0 on: products in Triton, on Hopper in Gluon, and by cuBLAS.

With few tokens a launch reads the weights at memory speed and quantises its input itself. With more, the input is
quantised once for all; with many, large products are left to cuBLAS. A grouped projection is a product whose weight
has diagonal blocks and whose input is rotated back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.checks import INTS, check, check_quantized, contiguous_rows
from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import FLOATS, GPU, fp8_view, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import Choice, cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.common.quant import ROW_MULTIPLE, InputFormat, QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.tiles import tiled
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.expand_triton import expand_weight_kernel
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP, Segment
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
    EXPANDED_CHANNELS,
    EXPANDED_ROWS,
    HOPPER_FP8_WEIGHTS,
    HOPPER_PLAIN_WEIGHTS,
    PLAIN_CHANNELS,
    QUANTIZERS,
    plan,
    quantizes_before,
)
from deepseek_attn.kernels.linear.problem import (
    LinearPlan,
    LinearProblem,
    LinearWeight,
    ProductPlan,
    QuantizeProblem,
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


def multi_linear(x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None = None) -> list[Tensor]:
    """See `deepseek_attn.kernels.linear.multi_linear`; no FP4 weights."""
    check("x", x, ("M", "K"), FLOATS)
    for segment in segments:
        _check_weight(segment, x.shape[1])
        if segment.out_dtype not in (None, *FLOATS):
            raise ValueError(f"outputs are float32, bfloat16 or float16, got {segment.out_dtype}")
    if quantized is not None:
        check_quantized("quantised x", quantized, x.shape)
    if not len(x) or not segments:
        return [x.new_empty(len(x), len(one.weight), dtype=one.out_dtype or x.dtype) for one in segments]
    x = contiguous_rows(x)
    problem = linear_problem(x, segments, quantized)
    return launch(plan(problem, gpu(x.device)), x, segments, quantized)[0]


def quantize_input(x: Tensor, pow2_scales: bool = True) -> QuantizedRows:
    """See `deepseek_attn.kernels.linear.quantize_input`; on a GPU with FP8 (from 8.9 on) or without."""
    check("x", x, ("M", "K"), FLOATS)
    if x.shape[1] % FP8_INPUT_GROUP:
        raise ValueError(f"x must have a multiple of {FP8_INPUT_GROUP} channels, got {tuple(x.shape)}")
    problem = QuantizeProblem(len(x), x.shape[1], batch_invariant())
    return quantize_rows(QUANTIZERS.plan(problem, gpu(x.device)), contiguous_rows(x), pow2_scales)


def empty_quantized(x: Tensor, segments: Sequence[Segment]) -> QuantizedRows | None:
    """See `deepseek_attn.kernels.linear.empty_quantized`; for segments that read FP8 in groups of one size."""
    problem = linear_problem(x, segments, None)
    if not quantizes_before(problem, gpu(x.device)):
        return None
    return empty_quantized_rows(len(x), x.shape[1], x.device, _pow2_scales(segments), group=problem.group)


def grouped_linear(
    o: Tensor, segment: Segment, groups: int, positions: Tensor | None = None, cos_sin: Tensor | None = None
) -> tuple[Tensor, QuantizedRows | None]:
    """See `deepseek_attn.kernels.linear.grouped_linear`; no FP4 weights."""
    check("o", o, ("M", "H", "d"), FLOATS)
    M, H, d = o.shape
    if H % groups:
        raise ValueError(f"o must have a multiple of {groups} heads, got {H}")
    if (positions is None) != (cos_sin is None):
        raise ValueError("positions and cos_sin go together: give both, or neither to leave the heads unrotated")
    check("positions", positions, (M,), INTS)
    check("cos_sin", cos_sin, ("positions", "rope_dim"), torch.float32, contiguous=True)
    if cos_sin is not None and (d % 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > d):
        raise ValueError(f"pairs of channels are rotated: d and rope_dim must be even, got {d} and {cos_sin.shape[1]}")
    x = o.flatten(1) if o.stride(1) == d and o.stride(2) == 1 else o.contiguous().flatten(1)
    rope = None if positions is None or cos_sin is None else Rope(positions, cos_sin, d)
    return _diagonal_blocks(x, segment, groups, None, rope)


def grouped_linear_of_quantized(
    o: QuantizedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, QuantizedRows | None]:
    """See `deepseek_attn.kernels.linear.grouped_linear_of_quantized`."""
    if o.values.dim() != 3:
        raise ValueError(f"values must be [groups, M, K], got {tuple(o.values.shape)}")
    groups, M, K = o.values.shape
    # stands for the input, of which only shape and dtype are read
    x = torch.empty(1, dtype=dtype, device=weight.device).expand(M, groups * K)
    return _diagonal_blocks(x, Segment(weight, scale, InputFormat(True, o.pow2_scales)), groups, o, None)


def _diagonal_blocks(
    x: Tensor, segment: Segment, groups: int, quantized: QuantizedRows | None, rope: Rope | None
) -> tuple[Tensor, QuantizedRows | None]:
    """The product of ``x [M, groups * K]``, or of its FP8 values, with the blocks of a weight."""
    K, N = x.shape[1] // groups, len(segment.weight)
    _check_weight(segment, K)
    if N % groups:
        raise ValueError(f"a weight of {N} rows cannot be divided into {groups} groups")
    if not len(x):
        return x.new_empty(0, N), None
    problem = linear_problem(x, [segment], quantized, groups, rope is not None, True)
    outs, output = launch(plan(problem, gpu(x.device)), x, [segment], quantized, groups, rope)
    return outs[0], output


def linear_problem(
    x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None, groups: int = 1, rotated: bool = False,
    quantize_output: bool = False,
) -> LinearProblem:  # fmt: skip
    """The problem of these arguments."""
    weights, end = [], None
    for segment in segments:
        weight, out, read, kind = segment.weight, segment.out_dtype or x.dtype, segment.input_format, None
        start = weight.data_ptr()
        if segment.scale is None:  # plain weights may be adjacent in memory
            read, kind = None, (weight.untyped_storage().data_ptr(), weight.dtype, out)
        follows = kind is not None and end == (start, kind)
        end = start + weight.nbytes, kind
        weights.append(LinearWeight(len(weight), weight.dtype, out, read, start % 16 == 0, follows))
    fp8_groups = [weight.fp8_group for weight in weights if weight.fp8_group]
    return LinearProblem(
        *(len(x), x.shape[1] // groups, x.dtype, tuple(weights), groups, rotated, quantized is not None),
        quantized.group if quantized is not None else max(fp8_groups, default=FP8_INPUT_GROUP),
        aligned=_is_aligned(x),
        quantized_aligned=quantized is None or (_is_aligned(quantized.values) and _is_aligned(quantized.scale.t())),
        quantize_output=quantize_output,
        batch_invariant=batch_invariant(),
    )


def _is_aligned(tensor: Tensor) -> bool:
    """Address and rows are multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(-2) * tensor.itemsize % 16 == 0


def _pow2_scales(segments: Sequence[Segment]) -> bool:
    """Of the FP8 inputs of all segments."""
    rules = {segment.input_format.pow2_scales for segment in segments if segment.reads_fp8}
    if len(rules) > 1:
        raise ValueError("segments of one call must agree whether scales of FP8 inputs are powers of two")
    return rules != {False}


def _check_weight(segment: Segment, K: int) -> None:
    """Raises ValueError unless a segment has a weight of ``K`` channels: plain, or FP8 with block scales."""
    weight, scale, group = segment.weight, segment.scale, segment.input_format.group
    if scale is None:
        return check("a weight without a scale", weight, ("N", K), FLOATS, contiguous=True)
    check("a quantised weight", weight, ("N", K), torch.float8_e4m3fn, contiguous=True)
    grid = tuple(cdiv(size, group) for size in weight.shape)
    check(f"scale of weight {list(weight.shape)}", scale, grid, torch.float32, contiguous=True)
    if segment.input_format.fp8 and K % group:
        raise ValueError(f"FP8 inputs need a multiple of {group} channels, got {K}")


# --- launches of the products ---


def launch(
    plan: LinearPlan,
    x: Tensor,
    segments: Sequence[Segment],
    quantized: QuantizedRows | None = None,
    groups: int = 1,
    rope: Rope | None = None,
) -> tuple[list[Tensor], QuantizedRows | None]:
    """Products of ``x [M, groups * K]`` with each segment; a single product also in FP8 if the plan has it."""
    pow2_scales, rounded = _pow2_scales(segments), None
    group = max((one.input_format.group for one in segments if one.reads_fp8), default=0)
    if plan.quantizes and plan.input is not None:
        quantized = quantize_rows(plan.input, x, pow2_scales, groups if groups > 1 else None, rope, group)
    elif plan.rounds and plan.input is not None:
        rounded = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        _launch_quantize(plan.input, x, rounded, None, pow2_scales, rope, group)
    elif plan.input is not None:
        rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch_quantize(plan.input, x, rotated, None, pow2_scales, rope)
        x = rotated
    outs: dict[int, Tensor] = {}
    output = None
    for product in plan.products:
        chosen = [segments[i] for i in product.weights]
        if product.choice.kernel == "cuBLAS":
            source = rounded if rounded is not None and chosen[0].reads_fp8 else x
            results = _by_cublas(source, chosen, quantized if chosen[0].reads_fp8 else None, groups, x.dtype)
        else:
            results = [x.new_empty(len(x), len(one.weight), dtype=one.out_dtype or x.dtype) for one in chosen]
            if product.quantizes_output:
                output = empty_quantized_rows(len(x), len(chosen[0].weight), x.device, pow2_scales)
            launch_products = _LAUNCHES[product.choice.kernel]
            rows = quantized if product.quantized else None
            launch_products(plan.gpu, product, x, rows, chosen, results, output, groups)
        outs |= zip(product.weights, results, strict=True)
    return [outs[i] for i in range(len(segments))], output


def _launch_triton(
    gpu: GPU, product: ProductPlan, x: Tensor, quantized: QuantizedRows | None, segments: Sequence[Segment],
    outs: Sequence[Tensor], output: None, groups: int,
) -> None:  # fmt: skip
    config, K, count = product.choice.config, x.shape[1] // groups, len(product.fp8.SIZES)
    fp8, plain, input_format = segments[:count], segments[count:], segments[0].input_format
    q, q_scale, group_stride, mode = x, x, 0, "quantize" if fp8 and input_format.fp8 else "plain"
    if quantized is not None:
        q, q_scale, mode = fp8_view(quantized.values), quantized.scale, "quantized"
        group_stride = q.stride(0) if groups > 1 else 0
    group = input_format.group if fp8 else 128
    strides = x.stride(0), q.stride(-2), q_scale.stride(1)
    group_strides = K, group_stride, K // group * q_scale.stride(1)
    dot, plain_dot = ((_DOT_DTYPES[one.dtype], one.parts, one.precision) for one in product.dots)
    constants = config.stages, config.prefetched_blocks, input_format.pow2_scales, gpu.native_fp8, gpu.pdl
    multi_linear_kernel[(product.jobs,)](
        LinearInputs(x, q, q_scale, *strides, *group_strides),
        tuple(fp8_view(one.weight) for one in fp8),
        tuple(one.scale for one in fp8),
        tuple(outs[:count]),
        tuple(one.weight for one in plain),
        tuple(outs[count:]),
        _scratch(product, x, x),
        len(x),
        CONSTANTS=LinearConstants(K, config.tokens, *constants),
        FP8=WeightFormat(product.fp8, config.rows, group, True, mode, *dot),
        PLAIN=WeightFormat(product.plain, config.rows, PLAIN_CHANNELS, False, "plain", *plain_dot),
        num_stages=config.stages,
        **launch_options(config.warps, gpu.pdl),
    )


def _launch_hopper(
    gpu: GPU, product: ProductPlan, x: Tensor, quantized: QuantizedRows | None, segments: Sequence[Segment],
    outs: Sequence[Tensor], output: QuantizedRows | None, groups: int,
) -> None:  # fmt: skip
    if quantized is None:
        raise ValueError(f"linear_hopper_kernel reads an input in FP8, and the plan has none: {product}")
    q, q_scale, _ = quantized
    config, (M, K), count = product.choice.config, q.shape[-2:], len(product.fp8.SIZES)
    fp8, plain = segments[:count], segments[count:]
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
        tuple(one.scale for one in fp8),
        tuple(outs[:count]),
        tuple(outs[count:]),
        _memory(product, x, output, q_scale),
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
            GROUPS=128 // fp8[0].input_format.group,
            FP8=product.fp8,
            PLAIN=product.plain,
            DTYPE=TRITON_DTYPES[x.dtype],
            POW2=output is None or output.pow2_scales,
            REGISTERS=min(240, (registers * (config.warpgroups + 1) - 40) // config.warpgroups // 8 * 8),
        ),
        maxnreg=registers,
        **launch_options(4, True),
    )


def _launch_decode(
    gpu: GPU, product: ProductPlan, x: Tensor, quantized: QuantizedRows | None, segments: Sequence[Segment],
    outs: Sequence[Tensor], output: QuantizedRows | None, groups: int,
) -> None:  # fmt: skip
    config, (M, K) = product.choice.config, (len(x), segments[0].weight.shape[1])
    source = DecodeInput(x, x.stride(0), 0, x, 0)
    if quantized is not None:
        q, q_scale, _ = quantized
        source = DecodeInput(q, q.stride(-2), q.stride(0) if groups > 1 else 0, q_scale, q_scale.stride(1))
    split_blocks = cdiv(K // 128, product.fp8.SPLITS)
    linear_decode_hopper_kernel[(min(product.jobs, gpu.multiprocessors),)](
        source,
        *_tiled_weights(segments, config.rows, 128, _BYTES, HOPPER_FP8_WEIGHTS),
        tuple(one.scale for one in segments),
        tuple(outs),
        _memory(product, x, output, segments[0].scale),
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
            POW2=segments[0].input_format.pow2_scales,
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
    segments: Sequence[Segment], rows: int, columns: int, layout: gl.NVMMASharedLayout, count: int
) -> list[TensorDescriptor | None]:
    """``count`` arguments of a kernel: descriptors of weights, then None."""
    used = [tiled(segment.weight, rows, columns, layout) for segment in segments]
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


# --- cuBLAS ---


def _by_cublas(
    x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None, groups: int, dtype: torch.dtype
) -> Sequence[Tensor]:
    """The product with an FP8 weight, by group; or one product with adjacent plain weights, in columns."""
    weight, scale, out_dtype = segments[0].weight, segments[0].scale, segments[0].out_dtype or dtype
    if scale is not None and segments[0].input_format.group != FP8_INPUT_GROUP:
        weight, scale = _expanded(weight, scale), None
    if groups > 1 and scale is None:
        out = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
        rows, blocks = x.unflatten(1, (groups, -1)).transpose(0, 1), weight.unflatten(0, (groups, -1))
        torch.bmm(rows, blocks.transpose(1, 2), out=out.unflatten(1, (groups, -1)).transpose(0, 1))
        return [out]
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


def _expanded(weight: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 values of an FP8 weight in blocks of 32."""
    N, K = weight.shape
    out = torch.empty(N, K, dtype=torch.bfloat16, device=weight.device)
    expand_weight_kernel[(N // EXPANDED_ROWS, cdiv(K, EXPANDED_CHANNELS))](
        fp8_view(weight), scale, out, K=K, ROWS=EXPANDED_ROWS, CHANNELS=EXPANDED_CHANNELS,
        NATIVE_FP8=gpu(weight.device).native_fp8, **launch_options(),
    )  # fmt: skip
    return out


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


def quantize_rows(
    plan: Choice, x: Tensor, pow2_scales: bool, groups: int | None = None, rope: Rope | None = None,
    group: int = FP8_INPUT_GROUP,
) -> QuantizedRows:  # fmt: skip
    """``x [M, channels]``, rotated back by ``rope``, as FP8 in the memory of `empty_quantized_rows`."""
    rows, channels = x.shape
    quantized = empty_quantized_rows(rows, channels, x.device, pow2_scales, groups, group)
    _launch_quantize(plan, x, quantized.values, quantized.scale.t(), pow2_scales, rope, group)
    return quantized


def _launch_quantize(
    plan: Choice, x: Tensor, out: Tensor, scale: Tensor | None, pow2_scales: bool, rope: Rope | None, group: int = 0
) -> None:
    """Writes ``x [M, channels]`` to ``out [M, channels]`` or ``[groups, M, channels / groups]``.

    As FP8, with ``scale [channels / group, M]``; or in the dtype of ``out``, rounded to FP8 if there is a ``group``.
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
            ROUND=scale is None and group > 0,
            GROUP=group,
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
