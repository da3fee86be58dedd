"""Products by cuBLAS where that is faster than our kernels: plain ones, and block-scaled FP8 ones on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.quant import ROW_MULTIPLE, QuantizedRows
from deepseek_attn.kernels.linear.formats import Segment
from deepseek_attn.kernels.linear.launch_config import cublas_is_faster

JOIN_FROM = 256  # tokens; with 128, the five plain projections of a C4A layer take 1.6 us longer as one product


def products_by_cublas(x: Tensor, segments: Sequence[Segment], quantized: QuantizedRows | None) -> list[Tensor | None]:
    """Outputs of ``segments`` by cuBLAS; None where it has no such product or would be slower.

    Plain weights that are adjacent in memory are one product, whose columns are the outputs.
    """
    outs = []
    runs = adjacent_weights(segments) if len(x) >= JOIN_FROM else [WeightRun(s, [len(s.weight)]) for s in segments]
    for run in runs:
        out = _product(x, run.joined(), quantized)
        outs += [None] * len(run.out_features) if out is None else out.split(run.out_features, dim=1)
    return outs


@dataclass(frozen=True)
class WeightRun:
    """Consecutive segments whose plain weights are adjacent in memory; any other segment is a run by itself.

    Attributes:
        first: the first of them.
        out_features: rows of each weight.
    """

    first: Segment
    out_features: list[int]

    def joined(self) -> Segment:
        """One segment with the rows of all of them."""
        if len(self.out_features) == 1:
            return self.first
        weight = self.first.weight
        shape = (sum(self.out_features), weight.shape[1])
        return replace(self.first, weight=weight.as_strided(shape, weight.stride()))


def adjacent_weights(segments: Sequence[Segment]) -> list[WeightRun]:
    """Runs of plain weights of one dtype and output dtype, each of which ends in memory where the next begins."""
    runs, end = [], None
    for segment in segments:
        weight = segment.weight
        begin = weight.untyped_storage().data_ptr(), weight.data_ptr(), weight.dtype, segment.out_dtype
        if segment.scale is None and begin == end:
            runs[-1].out_features.append(len(weight))
        else:
            runs.append(WeightRun(segment, [len(weight)]))
        storage, start, *dtypes = begin
        end = (storage, start + weight.nbytes, *dtypes) if segment.scale is None else None
    return runs


def _product(x: Tensor, segment: Segment, quantized: QuantizedRows | None) -> Tensor | None:
    """The output of a segment by cuBLAS, or None where it has no such product or would be slower."""
    weight, out_dtype = segment.weight, segment.out_dtype or x.dtype
    hopper = gpu(x.device).capability == (9, 0) and out_dtype != torch.float32
    if not cublas_is_faster(len(x), *weight.shape, fp8=segment.scale is not None, hopper=hopper):
        return None
    if segment.scale is not None:
        if not segment.reads_fp8_once or not scaled_mm_fits(weight, out_dtype):
            return None
        rows = padded_rows(quantized)
        out = torch.empty(len(rows.values), len(weight), dtype=out_dtype, device=x.device)
        scaled_mm(rows, weight, segment.scale, out)
        return out[: len(x)]
    if weight.dtype != x.dtype:
        return None
    if out_dtype == x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32) if out_dtype == torch.float32 else None


def scaled_mm_fits(weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether cuBLAS's block-scaled FP8 product supports this FP8 weight, for some number of rows."""
    return (
        out_dtype == torch.bfloat16
        and gpu(weight.device).capability == (9, 0)
        and weight.shape[0] % 128 == 0
        and weight.shape[1] % 512 == 0  # a row of scales is a multiple of 16 bytes
    )


def scaled_mm(rows: QuantizedRows, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """Product of `padded_rows` and an FP8 weight with block scales, into bfloat16 ``out [M, N]``."""
    if not out.is_meta:  # has no such product
        torch._scaled_mm(rows.values, weight.t(), rows.scale, scale.t(), out_dtype=torch.bfloat16, out=out)


def padded_rows(rows: QuantizedRows) -> QuantizedRows:
    """``rows`` with up to three more rows of any content: cuBLAS needs multiples of ``ROW_MULTIPLE``.

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
