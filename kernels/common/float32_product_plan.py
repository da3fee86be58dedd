"""Plans of float32 products: tiles, and how many splits of the channels one program adds up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    Choice,
    RowsProblem,
    at_least,
    cdiv,
    equals,
    has,
    one_kernel,
    planner,
    up_to,
)

GROUPS = 8  # of splits; partial sums are added within each group first, then over four groups
GROUPED_ROWS = 512  # rows from which a program computes whole groups, in a product with hundreds of columns
ENOUGH_TILES = 100  # of a bfloat16 weight, for programs that compute four groups


@dataclass(frozen=True, kw_only=True)
class Float32ProductProblem(RowsProblem):
    """``x [rows, channels]`` times a weight ``[columns, channels]``.

    Attributes:
        columns: of the product.
        dtype, weight_dtype: of ``x`` and of the weight.
        split: channels of a partial sum, a multiple of 64.
        grouped_rows: rows from which a program adds up groups of splits.
    """

    columns: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    split: int
    grouped_rows: int

    @property
    def grouped(self) -> bool:
        """A program adds up groups of splits: same order of additions, fewer partial sums."""
        return self.rows >= self.grouped_rows and not self.batch_invariant


@dataclass(frozen=True)
class Float32ProductTiles:
    """Launch configuration of `float32_product_kernel`: rows and columns of a program, and its stages."""

    rows: int
    columns: int
    stages: int = 3


@dataclass(frozen=True)
class Float32ProductPlan:
    """Launches of a float32 product.

    Attributes:
        product: tiles of `float32_product_kernel`.
        presplit: a launch ahead writes the weight as three bfloat16 values (`split_float32_weight_kernel`).
        inner, groups: a program adds up ``groups`` groups of ``inner`` splits.
        partials: number of partial sums.
        added_first: number of consecutive partial sums that `summed` adds first.
    """

    product: Choice
    presplit: bool
    inner: int
    groups: int
    partials: int
    added_first: int


BF16, ONE_TERM = equals("dtype", torch.bfloat16), equals("weight_dtype", torch.bfloat16)
GROUPED = has("grouped")
_DATA = "h200_narrow_products.json: rows"

# From 64 rows on Triton takes the instructions of a warpgroup: 128 rows times 16,384 channels of 25 columns take 5.7 us
# instead of 17.
PRODUCTS = one_kernel(
    "common.float32_product",
    "float32_product_kernel",
    (~BF16, Float32ProductTiles(32, 32)),
    (GROUPED & ~up_to("columns", 64) & ONE_TERM & at_least("rows", 2 * GROUPED_ROWS), Float32ProductTiles(128, 64, 4)),
    (GROUPED & ~up_to("columns", 64) & ONE_TERM, Float32ProductTiles(64, 64, 4)),
    (GROUPED & up_to("columns", 32), Float32ProductTiles(128, 32), _DATA),
    (up_to("planned_rows", 16), Float32ProductTiles(16, 32)),
    (ONE_TERM & up_to("planned_rows", 64), Float32ProductTiles(32, 32)),
    (ANY, Float32ProductTiles(64, 32), _DATA),
)


@planner("common.float32_product")
def plan(problem: Float32ProductProblem, gpu: GPU) -> Float32ProductPlan:
    """One launch, or two; partial sums are in an order that does not depend on the number of rows."""
    product = PRODUCTS.choose(problem, gpu)
    one_term, grouped = problem.weight_dtype == torch.bfloat16, problem.grouped
    splits = cdiv(problem.channels, problem.split)
    inner = cdiv(splits, GROUPS)
    tiles = cdiv(problem.rows, product.config.rows) * cdiv(problem.columns, product.config.columns)
    groups = 4 if grouped and one_term and tiles >= ENOUGH_TILES else 1
    return Float32ProductPlan(
        product,
        presplit=grouped and problem.dtype == torch.bfloat16 and not one_term,
        inner=inner if grouped else 1,
        groups=groups,
        partials=cdiv(splits, groups * inner) if grouped else splits,
        added_first=1 if grouped else inner,
    )
