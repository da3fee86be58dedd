"""Products of linear layers by cuBLAS: plain weights, FP8 blocks of 128, and blocks of 32, expanded to bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.plans import cdiv, launch_options
from deepseek_attn.kernels.common.quant import ROW_MULTIPLE, QuantizedRows
from deepseek_attn.kernels.linear.expand_triton import expand_weight_kernel
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP, Segment
from deepseek_attn.kernels.linear.plan import EXPANDED_CHANNELS, EXPANDED_ROWS


def by_cublas(
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
