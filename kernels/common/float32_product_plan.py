"""Plans of float32 products: tiles, and how many splits of the channels one program adds up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Choice, Row, Table, cdiv, condition, planner

GROUPS = 8  # of splits; the partial sums of a group are added first, then those of four groups
GROUPED_ROWS = 512  # rows from which a program computes whole groups, in a product with hundreds of columns
ENOUGH_TILES = 100  # of a bfloat16 weight, for programs that compute four groups


@dataclass(frozen=True)
class Float32ProductProblem:
    """``x [rows, channels]`` times a weight ``[columns, channels]``.

    Attributes:
        rows, columns, channels: sizes.
        dtype, weight_dtype: of ``x`` and of the weight.
        split: channels of a partial sum, a multiple of 64.
        grouped_rows: rows from which a program adds up groups of splits.
    """

    rows: int
    columns: int
    channels: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    split: int
    grouped_rows: int = GROUPED_ROWS
    batch_invariant: bool = False


@dataclass(frozen=True)
class Float32ProductTiles:
    """Launch configuration of `float32_product_kernel`: rows and columns of a program, its stages and warps."""

    rows: int
    columns: int
    stages: int = 3
    warps: int = 4


@dataclass(frozen=True)
class Float32ProductPlan:
    """Launches of a float32 product.

    Attributes:
        product: tiles of `float32_product_kernel`.
        presplit: a launch ahead writes the weight as three bfloat16 values (`split_float32_weight_kernel`).
        inner, groups: a program adds up ``groups`` groups of ``inner`` splits.
        partials: number of partial sums.
        added_first: number of consecutive partial sums that `summed` adds first.
        pdl: programs start before the previous kernel has ended.
    """

    product: Choice
    presplit: bool
    inner: int
    groups: int
    partials: int
    added_first: int
    pdl: bool


@condition
def _bfloat16(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.dtype == torch.bfloat16


@condition
def _one_term(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.weight_dtype == torch.bfloat16


@condition
def _batch_invariant(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.batch_invariant


@condition
def _grouped(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.rows >= p.grouped_rows and not p.batch_invariant


@condition
def _over_1024_rows(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.rows >= 2 * GROUPED_ROWS


@condition
def _up_to_16_rows(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.rows <= 16 and not p.batch_invariant


@condition
def _up_to_64_rows(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.rows <= 64 and not p.batch_invariant


@condition
def _up_to_32_columns(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.columns <= 32


@condition
def _over_64_columns(p: Float32ProductProblem, gpu: GPU) -> bool:
    return p.columns > 64


_KERNEL = "float32_product_kernel"
_DATA = "h200_narrow_products.json: rows"

# From 64 rows on Triton takes the instructions of a warpgroup: 128 rows times 16,384 channels of 25 columns take 5.7 us
# instead of 17. Tiles of 128 x 128 read less shared memory: 63 us instead of 76 at 4096 x 4096 x 256.
PRODUCTS = Table(
    "common.float32_product",
    {_KERNEL: ANY},
    [
        Row(~_bfloat16 & _up_to_16_rows, _KERNEL, Float32ProductTiles(16, 32)),
        Row(~_bfloat16, _KERNEL, Float32ProductTiles(32, 32)),
        Row(_grouped & _over_64_columns & _one_term & _over_1024_rows, _KERNEL, Float32ProductTiles(128, 64, 4)),
        Row(_grouped & _over_64_columns & _one_term, _KERNEL, Float32ProductTiles(64, 64, 4)),
        Row(_grouped & _over_64_columns, _KERNEL, Float32ProductTiles(128, 128, warps=8)),
        Row(_grouped & _up_to_32_columns, _KERNEL, Float32ProductTiles(128, 32), _DATA),
        Row(_grouped, _KERNEL, Float32ProductTiles(128, 64)),
        Row(_up_to_16_rows, _KERNEL, Float32ProductTiles(16, 32)),
        Row(_one_term & _up_to_64_rows, _KERNEL, Float32ProductTiles(32, 32)),
        Row(ANY, _KERNEL, Float32ProductTiles(64, 32), _DATA),
    ],
)


@planner("common.float32_product")
def plan(problem: Float32ProductProblem, gpu: GPU) -> Float32ProductPlan:
    """One launch, or two; partial sums are in an order that does not depend on the number of rows."""
    product = PRODUCTS.choose(problem, gpu)
    one_term, grouped = _one_term(problem, gpu), _grouped(problem, gpu)
    splits = cdiv(problem.channels, problem.split)
    inner = cdiv(splits, GROUPS)
    tiles = cdiv(problem.rows, product.config.rows) * cdiv(problem.columns, product.config.columns)
    groups = 4 if grouped and one_term and tiles >= ENOUGH_TILES else 1
    return Float32ProductPlan(
        product,
        presplit=grouped and _bfloat16(problem, gpu) and not one_term,
        inner=inner if grouped else 1,
        groups=groups,
        partials=cdiv(splits, groups * inner) if grouped else splits,
        added_first=1 if grouped else inner,
        pdl=gpu.pdl,
    )
