"""Plans of the mixture of experts: the router, a pass of `moe_experts`, and `swiglu`.

The only file of the family that knows compute capabilities, thresholds and batch invariance.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    DATACENTER,
    KernelRows,
    LaunchBlock,
    Row,
    RowsProblem,
    Table,
    at_least,
    cdiv,
    condition,
    equals,
    has,
    next_power_of_2,
    one_kernel,
    planner,
    up_to,
)
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP
from deepseek_attn.kernels.moe.problem import (
    QUAD,
    ExpertFactors,
    ExpertsPlan,
    ExpertsProblem,
    ExpertTiles,
    HopperExpertTiles,
    HopperExpertTiling,
    HopperProduct,
)

PASS_TOKENS = 8192  # tokens of a pass: intermediate results of 65536 tokens of V4-Flash would need 6 GB
LEFT_TO_COPIES = 8  # multiprocessors that products leave to launches that copy w2, or experts ahead, beside them


def expert_factors(problem: ExpertsProblem, gpu: GPU) -> ExpertFactors:
    """Bfloat16 or FP8 factors where they hold weights and inputs exactly, else float32."""
    weights, dtype, (fp8_input, pow2_scales, _) = problem.weights, problem.dtype, problem.input_format
    if weights == "plain":
        return ExpertFactors(weights, dtype, False, False)
    # sums of FP8 products keep about 14 bits on compute capability 9.0: too few for float32 results
    if weights == "fp8" and fp8_input and gpu.native_fp8 and dtype != torch.float32:
        return ExpertFactors(weights, torch.float8_e4m3fn, True, True)
    # e4m3 times a power of two is exact in bfloat16
    exact = dtype == torch.bfloat16 or (fp8_input and pow2_scales)
    return ExpertFactors(weights, torch.bfloat16 if exact else torch.float32, fp8_input, False)


# --- products ---


@condition
def _fits_hopper(problem: ExpertsProblem, gpu: GPU) -> bool:
    """FP8 products have inputs of 16 bits in groups of 128. Widths are quads of blocks; FP4's inner one is pairs."""
    quantized = problem.weights == "fp8" or (problem.weights == "fp4" and problem.row_exponents)
    inputs = problem.dtype != torch.float32 and problem.input_format.fp8
    inputs = inputs and problem.input_format.group == FP8_INPUT_GROUP
    inner = 64 * QUAD if problem.weights == "fp4" and problem.inner >= 128 * QUAD else 128 * QUAD
    widths = problem.hidden % (128 * QUAD) == 0 and problem.inner % inner == 0
    return gpu.hopper and quantized and inputs and widths and problem.aligned


@condition
def _float32_factors(problem: ExpertsProblem, gpu: GPU) -> bool:
    return expert_factors(problem, gpu).dtype == torch.float32


@condition
def _scaled_inputs(problem: ExpertsProblem, gpu: GPU) -> bool:
    return expert_factors(problem, gpu).scaled


FP4 = equals("weights", "fp4")
HOPPER, PORTABLE = "experts_hopper_kernel", "grouped_product_kernel"
_V41 = "h200_tune_v41_flash.json"
_FP8_LOADS = "h200_experts.json: rows"
_FEW_TOKENS, _TILES_CHANGE = "h100_experts.json: few_tokens", "h100_experts.json: where_tiles_change"

# Hopper, few rows: several programs per multiprocessor hide latency, and weight rows are read 128 bytes at a time. For
# a few tokens jobs of 64 rows leave multiprocessors less unequal shares. More rows: three warpgroups share the rows
# that they multiply, and have registers for 128 of them. Many: only two have registers for 192. An expert whose rows
# exceed the largest tile is read twice: a row ends where that becomes common. FP8 weights, twice the bytes, always take
# the largest tiles; where these would be mostly empty, FP8 takes `grouped_product_kernel`.
# Tiles follow from the routing of all rows: such sums are not batch invariant.
PRODUCTS = Table(
    "moe.products",
    {HOPPER: _fits_hopper & ~has("batch_invariant"), PORTABLE: ANY},
    [
        Row(FP4 & up_to("load", 0.3), HOPPER, HopperExpertTiles((8,), 8, 8, 3, 1, channels=256), _FEW_TOKENS),
        Row(FP4 & up_to("load", 2), HOPPER, HopperExpertTiles((8,), 8, 8, 2, channels=256), _TILES_CHANGE),
        Row(FP4 & up_to("load", 22), HOPPER, HopperExpertTiles((8, 16, 32), 32, 8, 2, channels=256), _TILES_CHANGE),
        Row(FP4 & up_to("load", 54), HOPPER, HopperExpertTiles((32, 64), 64, 8, 1, 3), _TILES_CHANGE),
        Row(FP4 & up_to("load", 122), HOPPER, HopperExpertTiles((32, 64, 96, 128), 64, 8, 1, 3, False), _TILES_CHANGE),
        Row(FP4, HOPPER, HopperExpertTiles((32, 64, 96, 128, 160, 192), 64, 6), _TILES_CHANGE),
        Row(at_least("load", 64), HOPPER, HopperExpertTiles((32, 64, 96, 128, 160, 192), 64, 6), _FP8_LOADS),
        Row(_float32_factors, PORTABLE, ExpertTiles(16, 64, 64, 4, 2)),
        Row(~DATACENTER & up_to("load", 12), PORTABLE, ExpertTiles(16, 64, 128, 4, 2)),
        Row(~DATACENTER & up_to("load", 24), PORTABLE, ExpertTiles(32, 64, 128, 4, 2)),
        Row(~DATACENTER, PORTABLE, ExpertTiles(64, 128, 64, 8, 2)),
        Row(FP4 & up_to("load", 6) & up_to("pairs", 8) & has("whole_quads"), PORTABLE, ExpertTiles(8, 64, 512, 4, 2)),
        Row(FP4 & up_to("load", 6), PORTABLE, ExpertTiles(8, 64, 256, 4, 4), f"{_V41}: moe.products"),
        Row(FP4 & up_to("load", 24), PORTABLE, ExpertTiles(16, 64, 256, 4, 3)),
        Row(FP4 & up_to("load", 48), PORTABLE, ExpertTiles(64, 64, 128, 4, 3)),
        Row(FP4, PORTABLE, ExpertTiles(128, 64, 128, 4, 3)),
        Row(up_to("load", 12), PORTABLE, ExpertTiles(16, 64, 128, 4, 4)),
        Row(up_to("load", 24), PORTABLE, ExpertTiles(32, 128, 128, 4, 3)),
        Row(_scaled_inputs, PORTABLE, ExpertTiles(64, 128, 128, 4, 4)),
        Row(ANY, PORTABLE, ExpertTiles(64, 128, 64, 4, 4)),
    ],
)  # fmt: skip


SHARED_KIB = (200, 101, 66)  # for stages, at 1, 2, 3 programs per multiprocessor; the remainder stages outputs


def hopper_product(
    problem: ExpertsProblem, tiles: HopperExpertTiles, gated: bool, wait: bool, gpu: GPU
) -> HopperProduct:
    """Number of stages that fit into shared memory, and registers of each warp; ``gated``: the first product."""
    fp4, groups = problem.weights == "fp4", tiles.warpgroups
    if not fp4:
        tiles = replace(tiles, channels=128)  # a stage has one block of an FP8 weight
    N, K = (problem.inner, problem.hidden) if gated else (problem.hidden, problem.inner)
    blocks, weight_bytes = tiles.channels // 128, tiles.channels // 2 if fp4 else 128
    parts, scales = cdiv(tiles.sizes[-1], tiles.part), max(tiles.part, 32)
    job_rows = 64 * groups
    stack_rows = job_rows // 2 if gated else job_rows
    stage = job_rows * weight_bytes + parts * blocks * (128 * tiles.part + 4 * scales)
    # a third warpgroup changes the layout of its outputs, too
    shared = SHARED_KIB[tiles.programs - 1] - (10 if groups == 3 else 0)
    half_quad = fp4 and K % (128 * QUAD) > 0
    held = 2 * job_rows * (6 if half_quad else 4) * QUAD if fp4 else 0  # scales of the weights
    room = ((shared << 10) - held) // stage
    # scales of two quads of blocks are held: a block's stage is free only once its quad's are read
    in_quads = (QUAD + (QUAD // 2 if half_quad else QUAD)) // blocks
    loaders = 40 if groups == 2 and blocks == 1 else 32
    registers = 65536 // tiles.programs // (128 * groups + 128) // 8 * 8
    tiling = HopperExpertTiling(
        N=N,
        K=K,
        FP4=fp4,
        HALF_QUAD=half_quad,
        GATED=gated,
        TILES=tiles,
        PARTS=parts,
        STAGES=min(tiles.stages, room, in_quads if fp4 else room),
        SCALES=scales,
        ROW_BLOCKS=cdiv(N, stack_rows),
        WAIT=wait,
        BOX=tiles.part if blocks == 1 else tiles.sizes[0],
        REGISTERS=min(240, (registers * (groups + 1) - loaders) // groups // 8 * 8),
        LOADERS=loaders,
    )
    weight_rows = stack_rows // groups if blocks == 1 else stack_rows
    programs = gpu.multiprocessors * tiles.programs
    # A program takes a whole multiprocessor, and its jobs are fixed at launch: one that finds none beside the copying
    # programs starts when the copies end. `COPIES` has more programs than are left free here: measured together.
    beside_copies = problem.first_beside_copies if gated else problem.second_beside_copies
    programs -= LEFT_TO_COPIES if beside_copies else 0
    return HopperProduct(tiling, weight_rows, weight_bytes, programs, registers)


# --- launches beside the products ---


def _pair_blocks(problem: KernelRows, gpu: GPU) -> LaunchBlock:
    block = min(next_power_of_2(problem.rows), 4096)
    return LaunchBlock(block, max(1, min(8, block // 256)))


FOR_HOPPER = equals("kernel", HOPPER)
FEW_PAIRS = up_to("rows", 64)
"""Each program compares every pair with every other one, which saves launches before it."""
COMPARABLE_PAIRS = up_to("rows", 256)
"""A program has room for a matrix of all pairs by all pairs."""

# `place_rows_kernel` and `place_pairs_kernel` read the counts of `count_chunks_kernel` and `count_pairs_kernel`.
GROUPINGS = Table(
    "moe.grouping",
    {
        "prepare_decode_rows_kernel": FOR_HOPPER & COMPARABLE_PAIRS,
        "place_rows_kernel": FOR_HOPPER,
        PORTABLE: ~FOR_HOPPER & COMPARABLE_PAIRS,
        "place_pairs_kernel": ~FOR_HOPPER,
    },
    [
        Row(FEW_PAIRS, "prepare_decode_rows_kernel", LaunchBlock(512, 4), "h200_tune_v4_pro.json: moe.grouping"),
        Row(ANY, "place_rows_kernel", LaunchBlock(128, 4), "h100_experts.json: placing_pairs"),
        Row(FEW_PAIRS, PORTABLE, source=f"{_V41}: moe.grouping"),
        Row(ANY, "place_pairs_kernel", _pair_blocks),
    ],
)
CHUNK = 512  # pairs that a program of `count_chunks_kernel` counts


def _whole_steps(problem: KernelRows, gpu: GPU) -> LaunchBlock:
    block = next(size for size in (2048, 1024, 512, 256) if problem.channels % size == 0)
    return LaunchBlock(block, max(1, block // 512))


def _up_to_channels(problem: KernelRows, gpu: GPU) -> LaunchBlock:
    block = min(next_power_of_2(problem.channels), 512 if problem.values < 1 << 18 else 1024)
    return LaunchBlock(block, max(1, block // 256))


PRODUCT_INPUTS = Table(
    "moe.inputs",
    {"prepare_rows_kernel": FOR_HOPPER, "prepare_inputs_kernel": ~FOR_HOPPER},
    [Row(ANY, "prepare_rows_kernel", _whole_steps), Row(ANY, "prepare_inputs_kernel", _up_to_channels)],
)


COMBINES = one_kernel(
    "moe.combine",
    "moe_combine_kernel",
    (up_to("values", 1 << 22), LaunchBlock(512), "h200_tune_v4_pro.json: moe.combine"),
    (ANY, LaunchBlock(1024)),
)
SWIGLUS = one_kernel("moe.swiglu", "swiglu_kernel", (ANY, LaunchBlock(1024), "h100_tune_v32.json: moe.swiglu"))


@planner("moe.experts")
def plan_experts(problem: ExpertsProblem, gpu: GPU) -> ExpertsPlan:
    """Chooses the product kernel, then the launches around it."""
    product, factors = PRODUCTS.choose(problem, gpu), expert_factors(problem, gpu)
    grouping = GROUPINGS.choose(KernelRows(problem.pairs, kernel=product.kernel), gpu)
    decode = grouping.kernel == "prepare_decode_rows_kernel"
    inputs = hidden = None
    if factors.quantize or factors.weights == "fp4":
        hidden = PRODUCT_INPUTS.choose(KernelRows(problem.pairs, problem.inner, kernel=product.kernel), gpu)
        tokens = KernelRows(problem.tokens, problem.hidden, kernel=product.kernel)
        inputs = None if decode else PRODUCT_INPUTS.choose(tokens, gpu)
    # a captured launch may start before an event of another stream that it follows: where weights are copied, it waits
    both = (True, decode or problem.in_rows), (False, problem.in_rows)
    hopper = tuple(hopper_product(problem, product.config, *each, gpu) for each in both if product.kernel == HOPPER)
    combine = COMBINES.choose(RowsProblem(problem.tokens, problem.hidden), gpu)
    return ExpertsPlan(grouping, inputs, product, hidden, combine, factors, hopper)


# block: channels of a split-K partial of the scores, which `float32_product` computes; a warp selects for one token
SELECTS = one_kernel("moe.select", "moe_select_kernel", (ANY, LaunchBlock(256, 1)))


# --- experts that the device fetches from host memory ---


def _one_program(problem: RowsProblem, gpu: GPU) -> LaunchBlock:
    """One program for all experts, the channels of a row; ``size``: pairs counted at once, at least one a thread."""
    return LaunchBlock(512, max(4, min(16, next_power_of_2(problem.channels) // 64)))


CACHE_ROWS = one_kernel("moe.cache_rows", "choose_rows_kernel", (ANY, _one_program))  # `choose_ahead_kernel` too
# A long copy needs bytes in flight, not multiprocessors: 8 programs are as fast as 264. Steps copy few experts at a
# time: with 32 programs they take 0.92 to 0.95 of the time. With copies ahead of the routing by 8 programs, steps took
# 1.14 to 1.17 of the time without, by 32 programs 0.85 to 0.92.
COPIES = one_kernel(  # programs
    "moe.copies", "copy_experts_kernel", (ANY, LaunchBlock(32), "h200_host_80gb.json: programs")
)
