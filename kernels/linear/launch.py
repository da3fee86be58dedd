"""Linear layers on a GPU, from compute capability 8.0 on: products in Triton, on Hopper in Gluon, and by cuBLAS.

With few tokens a launch reads the weights at memory speed and quantises its input itself. With more, the input is
quantised once for all; with many, large products are left to cuBLAS. A grouped projection is a product whose weight
has diagonal blocks and whose input is rotated back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import INTS, check, check_quantized, contiguous_rows
from deepseek_attn.kernels.common.device import FLOATS, fp8_view, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import Choice, RowsProblem, cdiv, launch_options
from deepseek_attn.kernels.common.quant import InputFormat, QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.rows import check_rotation
from deepseek_attn.kernels.linear.cublas import by_cublas
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP, Segment
from deepseek_attn.kernels.linear.launch_products import LAUNCHES, Operands
from deepseek_attn.kernels.linear.plan import QUANTIZERS, plan, quantizes_before
from deepseek_attn.kernels.linear.problem import LinearPlan, LinearProblem, LinearWeight
from deepseek_attn.kernels.linear.quantize_triton import QuantizeConstants, QuantizeInputs, quantize_input_kernel


class Rope(NamedTuple):
    """An inverse rotation of heads: ``positions [M]``, table ``cos_sin [positions, rope_dim]``, channels of a head."""

    positions: Tensor
    cos_sin: Tensor
    head_dim: int


def multi_linear(x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None = None) -> list[Tensor]:
    """See `deepseek_attn.kernels.linear.multi_linear`; no FP4 weights."""
    check("x", x, ("M", "K"), FLOATS)
    if quantized is not None:
        check_quantized("quantised x", quantized, x.shape)
    return _products(contiguous_rows(x), segments, quantized)[0]


def quantize_input(x: Tensor, pow2_scales: bool = True) -> QuantizedRows:
    """See `deepseek_attn.kernels.linear.quantize_input`; on a GPU with FP8 (from 8.9 on) or without."""
    check("x", x, ("M", "K"), FLOATS)
    if x.shape[1] % FP8_INPUT_GROUP:
        raise ValueError(f"x must have a multiple of {FP8_INPUT_GROUP} channels, got {tuple(x.shape)}")
    problem = RowsProblem(len(x), x.shape[1], batch_invariant())
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
    rope = None
    if positions is not None and cos_sin is not None:
        check_rotation(d, cos_sin)
        rope = Rope(positions, cos_sin, d)
    x = o.flatten(1) if o.stride(1) == d and o.stride(2) == 1 else o.contiguous().flatten(1)
    (out,), quantized = _products(x, [segment], None, groups, rope, quantize_output=True)
    return out, quantized


def grouped_linear_of_quantized(
    o: QuantizedRows, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, QuantizedRows | None]:
    """See `deepseek_attn.kernels.linear.grouped_linear_of_quantized`."""
    if o.values.dim() != 3:
        raise ValueError(f"values must be [groups, M, K], got {tuple(o.values.shape)}")
    groups, M, K = o.values.shape
    # stands for the input, of which only shape and dtype are read
    x = torch.empty(1, dtype=dtype, device=weight.device).expand(M, groups * K)
    segment = Segment(weight, scale, InputFormat(True, o.pow2_scales))
    (out,), quantized = _products(x, [segment], o, groups, quantize_output=True)
    return out, quantized


def _products(
    x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None, groups: int = 1, rope: Rope | None = None,
    quantize_output: bool = False,
) -> tuple[list[Tensor], QuantizedRows | None]:  # fmt: skip
    """Products of ``x [M, groups * K]``, or of its FP8 values; a single product also in FP8 if that is free."""
    for segment in segments:
        _check_weight(segment, x.shape[1] // groups, groups)
    if not len(x) or not segments:
        return [x.new_empty(len(x), len(one.weight), dtype=one.out_dtype or x.dtype) for one in segments], None
    problem = linear_problem(x, segments, quantized, groups, rope is not None, quantize_output)
    return launch(plan(problem, gpu(x.device)), x, segments, quantized, groups, rope)


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


def _check_weight(segment: Segment, K: int, groups: int) -> None:
    """Raises ValueError unless a segment has ``groups`` weights of ``K`` channels: plain, or FP8 with block scales."""
    weight, scale, group = segment.weight, segment.scale, segment.input_format.group
    if segment.out_dtype not in (None, *FLOATS):
        raise ValueError(f"outputs are float32, bfloat16 or float16, got {segment.out_dtype}")
    if len(weight) % groups:
        raise ValueError(f"a weight of {len(weight)} rows cannot be divided into {groups} groups")
    if scale is None:
        return check("a weight without a scale", weight, ("N", K), FLOATS, contiguous=True)
    check("a quantised weight", weight, ("N", K), torch.float8_e4m3fn, contiguous=True)
    grid = tuple(cdiv(size, group) for size in weight.shape)
    check(f"scale of weight {list(weight.shape)}", scale, grid, torch.float32, contiguous=True)
    if segment.input_format.fp8 and K % group:
        raise ValueError(f"FP8 inputs need a multiple of {group} channels, got {K}")


def launch(
    plan: LinearPlan,
    x: Tensor,
    segments: Sequence[Segment],
    quantized: QuantizedRows | None = None,
    groups: int = 1,
    rope: Rope | None = None,
) -> tuple[list[Tensor], QuantizedRows | None]:
    """Products of ``x [M, groups * K]`` with each segment; a single product also in FP8 if the plan has it."""
    group = max((one.input_format.group for one in segments if one.reads_fp8), default=0)
    pow2_scales, rounded, output = _pow2_scales(segments), None, None
    if plan.input is not None and plan.quantizes:
        quantized = quantize_rows(plan.input, x, pow2_scales, groups if groups > 1 else None, rope, group)
    elif plan.input is not None:
        written = torch.empty(x.shape, dtype=torch.bfloat16 if plan.rounds else x.dtype, device=x.device)
        _launch_quantize(plan.input, x, written, None, pow2_scales, rope, group if plan.rounds else 0)
        x, rounded = (x, written) if plan.rounds else (written, None)
    outs: dict[int, Tensor] = {}
    for product in plan.products:
        chosen = [segments[i] for i in product.weights]
        rows = quantized if product.quantized else None
        if product.choice.kernel == "cuBLAS":
            source = rounded if rounded is not None and chosen[0].reads_fp8 else x
            results = by_cublas(source, chosen, rows, groups, x.dtype)
        else:
            results = [x.new_empty(len(x), len(one.weight), dtype=one.out_dtype or x.dtype) for one in chosen]
            if product.quantizes_output:
                output = empty_quantized_rows(len(x), len(chosen[0].weight), x.device, pow2_scales)
            launch_product = LAUNCHES[product.choice.kernel]
            launch_product(product, Operands(x, rows, chosen, results, output, groups))
        outs |= zip(product.weights, results, strict=True)
    return [outs[i] for i in range(len(segments))], output


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
    rope_dim = 0 if cos_sin is None else cos_sin.shape[1]
    out_strides = out.stride(-2), out.stride(0) if out.dim() == 3 else 0
    strides = x.stride(0), *out_strides, 0 if scale is None else scale.stride(0)
    tiles, formats = plan.config, (channels, out.shape[-1], group, pow2_scales, rope_dim, head_dim)
    quantize_input_kernel[(cdiv(M, tiles.rows), cdiv(channels, tiles.channels))](
        QuantizeInputs(x, out if scale is None else fp8_view(out), scale, positions, cos_sin, *strides),
        M,
        CONSTANTS=QuantizeConstants(*formats, tiles, plan.native_fp8, plan.pdl),
        **launch_options(pdl=plan.pdl),
    )
