"""Plans of V3.2's projections into and out of the latent space: one launch that reads the weight, or cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    DATACENTER,
    NOT_MEASURED,
    Choice,
    LaunchBlock,
    Row,
    RowsProblem,
    Table,
    equals,
    has,
    next_power_of_2,
    planner,
    up_to,
)
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP

MAX_NOPE = 256
"""Channels without rotation that a program of `absorb_queries_kernel` multiplies at once."""


@dataclass(frozen=True, kw_only=True)
class LatentProblem(RowsProblem):
    """Products of heads with a half of ``kv_b_proj``, into the latent space or out of it.

    ``rows`` are tokens, ``channels`` those of a head outside the latent space: ``nope`` of a query, or ``v_head_dim``.

    Attributes:
        dtype: of the input and of a plain weight; fp8_weight: the weight is FP8 with block scales.
        quantize: the values are also wanted as FP8, if that needs no further launch.
    """

    dtype: torch.dtype
    fp8_weight: bool
    quantize: bool


class AbsorbTiles(NamedTuple):
    """Launch configuration of `absorb_queries_kernel` and `rotate_queries_kernel`.

    Attributes:
        rank: latent channels that a program computes, or fills with zeros, at once.
        heads, warps: of a program.
    """

    rank: int
    heads: int
    warps: int


class ValueTiles(NamedTuple):
    """Launch configuration of `project_values_kernel`.

    Attributes:
        values, rank: value channels and latent channels of a program's tiles.
        early_blocks: blocks of latent channels whose weights are loaded before the previous kernel has ended.
        warps, stages: of a program.
    """

    values: int
    rank: int
    early_blocks: int
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class LatentPlan:
    """Launches of `absorb_queries` or `project_values`.

    Attributes:
        product: a kernel that computes everything, or cuBLAS, which multiplies.
        tokens: of a program, 8 to 64; of ``rotation``'s programs if there is a rotation.
        dequantize: makes a plain weight for cuBLAS; None where the weight is read as it is.
        rotation: rotates queries and fills padding heads beside cuBLAS; None where the product's kernel does, or for
            values.
        quantized: the product's launch also writes the values as FP8.
        row_tiles: cuBLAS multiplies tiles of one shape, so that results do not depend on the number of tokens.
    """

    product: Choice
    tokens: int
    dequantize: Choice | None
    rotation: Choice | None
    quantized: bool
    row_tiles: bool


HALF_PRECISION = equals("dtype", torch.bfloat16) | equals("dtype", torch.float16)
"""Tensor cores multiply the input exactly; float32 they would round to TF32."""
ONE_LAUNCH = up_to("rows", 64) | (has("fp8_weight") & up_to("rows", 128)) | has("batch_invariant")
"""So few tokens that a launch that reads the weight once per 64 tokens is faster than cuBLAS.

On an H200 with 128 heads, blocks of 64 tokens took 17.7 us at 128 tokens and cuBLAS 16.0 us, with a weight of 17 MB in
bf16; to write that from FP8 for cuBLAS moves 25 MB more.
"""
QUANTIZE = has("quantize") & equals("channels", FP8_INPUT_GROUP)
"""The values are wanted as FP8, and a head is one group of channels."""
MEASURED_QUERIES = "h100_tune_v32.json: latent.absorb_queries"
MEASURED_VALUES = "h100_tune_v32.json: latent.project_values"

# a tile of an FP8 weight has one scale; the launch with the indexer's heads needs four warps
ABSORB = Table(
    "latent.absorb_queries",
    {"absorb_queries_kernel": HALF_PRECISION & up_to("channels", MAX_NOPE), "cuBLAS": ANY},
    [
        Row(ONE_LAUNCH, "absorb_queries_kernel", AbsorbTiles(WEIGHT_BLOCK, 1, 4), MEASURED_QUERIES),
        Row(ANY, "cuBLAS", source=MEASURED_QUERIES),
    ],
)
VALUES = Table(
    "latent.project_values",
    {"project_values_kernel": HALF_PRECISION, "cuBLAS": ANY},
    # The registers limit the weights in flight; one tile of 512 latent channels takes as long as four of 128. On other
    # GPUs no earlier launch can be overlapped (8.x), or a head's weights do not fit (12.0).
    [
        Row(ONE_LAUNCH & QUANTIZE & ~DATACENTER, "project_values_kernel", ValueTiles(128, 128, 0, 8, 2)),
        Row(ONE_LAUNCH & QUANTIZE, "project_values_kernel", ValueTiles(128, 128, 4, 8), MEASURED_VALUES),
        Row(ONE_LAUNCH, "project_values_kernel", ValueTiles(64, 128, 4, 4), MEASURED_VALUES),
        Row(ANY, "cuBLAS", source=MEASURED_VALUES),
    ],
)
ROTATION = Choice("rotate_queries_kernel", AbsorbTiles(WEIGHT_BLOCK, 8, 4), "any", NOT_MEASURED)
DEQUANTIZATION = Choice("latent_dequantize_kernel", LaunchBlock(WEIGHT_BLOCK, 8), "any", NOT_MEASURED)


@planner("latent.absorb_queries")
def plan_absorb(problem: LatentProblem, gpu: GPU) -> LatentPlan:
    """One launch for few tokens; for many, cuBLAS and a launch that rotates."""
    return _plan(ABSORB.choose(problem, gpu), ROTATION, problem, gpu)


@planner("latent.project_values")
def plan_values(problem: LatentProblem, gpu: GPU) -> LatentPlan:
    """One launch for few tokens, which may also quantise; cuBLAS for many."""
    return _plan(VALUES.choose(problem, gpu), None, problem, gpu)


def _plan(product: Choice, rotation: Choice | None, problem: LatentProblem, gpu: GPU) -> LatentPlan:
    if product.kernel != "cuBLAS":
        tokens = min(64, max(8, next_power_of_2(problem.planned_rows)))
        return LatentPlan(product, tokens, None, None, QUANTIZE(problem, gpu), False)
    dequantize = DEQUANTIZATION if problem.fp8_weight else None
    return LatentPlan(product, 1, dequantize, rotation, False, problem.batch_invariant)
