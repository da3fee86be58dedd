"""Products of rows with a weight in true float32, on bfloat16 tensor cores; other ops call it.

Split-K: the kernel that uses the product adds the partial sums (`float32_product_triton.summed`), in an order that does
not depend on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.float32_product_plan import GROUPED_ROWS, Float32ProductProblem, plan
from deepseek_attn.kernels.common.float32_product_triton import (
    ProductArguments,
    ProductConfig,
    float32_product_kernel,
    split_float32_weight_kernel,
)
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import cdiv, pdl_options


class PartialSums(NamedTuple):
    """A product as partial sums over splits of the channels.

    Attributes:
        sums: float32 ``[splits, T, columns]``.
        inner: number of consecutive splits that are added first.
    """

    sums: Tensor
    inner: int


def float32_product(
    x: Tensor, weight: Tensor, split: int, squares: bool = False, grouped_rows: int = GROUPED_ROWS
) -> PartialSums:
    """``x weight^T`` of ``x [T, K]`` with contiguous rows and a contiguous ``weight [N, K]``, float32 or bfloat16.

    Args:
        split: channels per partial sum, a multiple of 64.
        squares: add a column, the sum of squares of x.
        grouped_rows: number of rows from which on a program adds up one or more groups of splits.
    """
    (T, K), N = x.shape, len(weight)
    problem = Float32ProductProblem(
        T, K, batch_invariant(), columns=N, dtype=x.dtype, weight_dtype=weight.dtype, split=split,
        grouped_rows=grouped_rows,
    )  # fmt: skip
    made = plan(problem, gpu(x.device))
    sums = torch.empty(made.partials, T, N + squares, dtype=torch.float32, device=x.device)
    results = PartialSums(sums, made.added_first)
    if not T:
        return results
    tiles, options = made.product.config, pdl_options(4, made.product.pdl)
    if made.presplit:  # three bfloat16 values, the largest first, add up to a float32 one
        weight, whole = weight.new_empty(3, N, K, dtype=torch.bfloat16), weight
        split_float32_weight_kernel[(cdiv(N * K, 1024),)](whole, weight, N * K, BLOCK=1024, **options)
    float32_product_kernel[(cdiv(N, tiles.columns), cdiv(T, tiles.rows), made.partials)](
        ProductArguments(x, weight, sums, x.stride(0)),
        T,
        CONFIG=ProductConfig(N, K, sums.shape[2], split, made.inner, made.groups, made.presplit, tiles),
        num_stages=tiles.stages,
        **options,
    )
    return results
