"""Plans of linear layers: which kernels compute the projections of one input, and in which tiles.

An op first quantises its input, unless its programs quantise as they read. cuBLAS multiplies the weights for which it
is faster; the remaining weights share launches. A block-diagonal weight (`LinearProblem.groups`) has a separate launch.

Sources of rows name timings of whole layers where there are any: a kernel that is faster alone can delay the next
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest

import torch

from deepseek_attn.kernels.common.counters import COUNTERS
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
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
from deepseek_attn.kernels.linear.problem import (
    DotFormat,
    LinearDecodeTiles,
    LinearHopperTiles,
    LinearPlan,
    LinearProblem,
    LinearTiles,
    LinearWeight,
    ProductPlan,
    QuantizeTiles,
    WeightTiles,
)

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
HALVES = (torch.bfloat16, torch.float16)
QUANTIZE_ABOVE = 8  # tokens up to which each Triton program quantises the part of the input that it reads
JOIN_FROM = 256  # tokens; with 128, the five plain projections of a C4A layer take 1.6 us longer as one product
DECODE_TOKENS = 16  # at most, of `linear_decode_hopper`
HOPPER_FP8_WEIGHTS, HOPPER_PLAIN_WEIGHTS = 3, 5  # FP8 and plain weights of a launch on Hopper, at most
OWN_BLOCKS = 16  # of a job whose input `linear_decode_hopper` quantises, at most: a register holds one value
EXPANDED_ROWS, EXPANDED_CHANNELS = 32, 512  # of a program that expands a weight in blocks of 32
EXPAND_FROM, EXPAND_FROM_ON_HOPPER = 65, 257  # tokens; fewer take less time than expanding a weight
PLAIN_CHANNELS = 64  # of a plain weight that a program of `linear_triton` reads at once; of an FP8 weight a group


# --- support of the kernels ---


@condition
def one_product_of_cublas(problem: LinearProblem, gpu: GPU) -> bool:
    """A plain product, or a block-scaled FP8 one: on Hopper in FP8 for blocks of 128, in bfloat16 for blocks of 32.

    cuBLAS chooses its sums by the number of tokens.
    """
    if len(problem.weights) != 1 or problem.batch_invariant:
        return False
    (weight,) = problem.weights
    if weight.input_format is None:
        return weight.dtype == problem.dtype and weight.out in (problem.dtype, F32 if problem.groups == 1 else None)
    if weight.input_format.group != FP8_INPUT_GROUP:  # exact in bfloat16, as a rounded input is
        pow2, fp8 = weight.input_format.pow2_scales, weight.input_format.fp8
        exact = (problem.rounded and pow2) or (problem.dtype == BF16 and not fp8)
        outs = (BF16,) if problem.groups > 1 else (BF16, F32)
        return exact and weight.out in outs and weight.rows % EXPANDED_ROWS == 0 and problem.channels % 32 == 0
    if not (gpu.hopper and problem.quantized and problem.read_once and weight.out == BF16):
        return False
    return weight.rows // problem.groups % 128 == 0 and problem.channels % 512 == 0  # 16-byte rows of scales


@condition
def fp8_on_hopper(problem: LinearProblem, gpu: GPU) -> bool:
    """FP8 weights whose inputs are quantised once, in tiles of 64 rows, or of 128 in groups and for an FP8 output.

    Sums of FP8 products have 14 bits, too few for float32 outputs. TMA reads steps of 16 bytes.
    """
    rows = 128 * problem.groups if problem.groups > 1 or problem.quantize_output else 64
    return (
        gpu.hopper
        and problem.dtype in HALVES
        and problem.channels % 128 == 0
        and 0 < len(problem.fp8) <= HOPPER_FP8_WEIGHTS
        and all(weight.fp8_group == problem.group and weight.out in HALVES for weight in problem.fp8)
        and all(weight.rows % rows == 0 and weight.aligned for weight in problem.weights)
    )


@condition
def quantized_beside_plain(problem: LinearProblem, gpu: GPU) -> bool:
    """The input is quantised before, and plain weights have its dtype."""
    plain, readable = problem.plain, problem.aligned and problem.channels % 8 == 0
    return (
        problem.quantized
        and problem.quantized_aligned
        and len(plain) <= HOPPER_PLAIN_WEIGHTS
        and all(readable and weight.dtype == problem.dtype for weight in plain)
    )


@condition
def decodes_fp8(problem: LinearProblem, gpu: GPU) -> bool:
    """FP8 weights in blocks of 128 and up to 16 tokens, which are quantised before or in jobs of few channels."""
    if problem.group != FP8_INPUT_GROUP:
        return False
    own = problem.groups == 1 and cdiv(problem.blocks, _job_splits(problem, gpu)) <= OWN_BLOCKS
    return problem.planned_tokens <= DECODE_TOKENS and not problem.plain and (problem.quantized or own)


# --- where they are the fastest ---


@condition
def streams_weights(problem: LinearProblem, gpu: GPU) -> bool:
    """Weights of 32 MiB or more: a ring is set up before smaller ones are read. Inputs of more than 64 KiB lose.

    Of 16 MiB or more for up to 8 tokens of 1024 or 4096 channels, as two ranks have of V4-Flash: h200_ranks.json.
    """
    halves = problem.channels <= 1024 or (problem.channels == 4096 and len(problem.fp8) == 1)
    least = 1 << 24 if halves and problem.planned_tokens <= 8 else 1 << 25
    return problem.weight_values >= least and problem.blocks * _token_tile(problem, 8, 16) <= 512


@condition
def fills_gpu(problem: LinearProblem, gpu: GPU) -> bool:
    """Nine of ten multiprocessors get a tile of 128 rows, or more."""
    return _almost_fill(cdiv(problem.rows, 128), gpu)


@condition
def fills_gpu_with_halves(problem: LinearProblem, gpu: GPU) -> bool:
    """Nine of ten multiprocessors get a tile of 64 rows, or more, whose blocks of channels are read in pairs."""
    return _almost_fill(2 * cdiv(problem.rows, 128), gpu) and problem.blocks % 2 == 0


@condition
def large_for_cublas(problem: LinearProblem, gpu: GPU) -> bool:
    """cuBLAS takes less time, in microseconds, than the product would add to a launch of our kernels.

    cuBLAS does not split K: its time is at least proportional to K.
    """
    M, N, K = problem.tokens, problem.weights[0].rows // problem.groups, problem.channels
    read, large = problem.weights[0].input_format, problem.groups * N * K >= 1 << 20
    if read is None and problem.groups > 1:  # all groups are one product
        return M > QUANTIZE_ABOVE and large
    if read is not None and read.group != FP8_INPUT_GROUP:
        on_hopper = hopper_products(replace(problem, quantized=True), gpu)
        return (EXPAND_FROM_ON_HOPPER if on_hopper else EXPAND_FROM) <= M and large
    fp8, on_hopper = bool(problem.fp8), hopper_products(problem, gpu)
    if M <= 32 or (on_hopper and M <= 128):
        return False
    work = 2 * M * N * K
    latency, rate, ours = (K / 370, 1.2e9, 0.6e9 if on_hopper else 0.3e9) if fp8 else (K / 700, 0.75e9, 0.25e9)
    return 4 + max(latency, N * K / 4.2e6, work / rate) < max(N * K / 3e6, work / ours)


hopper_products = fp8_on_hopper & quantized_beside_plain
decode_products = fp8_on_hopper & decodes_fp8
UP_TO_8, UP_TO_32 = up_to("planned_tokens", 8), up_to("planned_tokens", 32)
"""The time is that of reading the weights."""
BLOCKS_OF_32 = equals("group", 32)
"""FP8 inputs, and weights, with a scale for 32 channels."""
QUANTIZES_OUTPUT = has("quantize_output") & ~UP_TO_32 & ~BLOCKS_OF_32
"""Also writes FP8, for which a warpgroup needs 128 rows; up to 32 tokens, tiles of 64 rows gain more."""
LONG_JOBS = at_least("weight_values", 1 << 26)
"""FP8 weights of 64 MiB or more."""
FEW_CHANNELS = up_to("channels", 1024)
"""V3.2's queries, of 1536, take 1.02 of a layer's time with `linear_triton`."""
WIDE = at_least("rows", 1 << 15)
"""Rows enough for programs of all channels."""
WIDE_PLAIN = up_to("rows", 0) & at_least("plain_rows", 1 << 15)
"""The same of plain weights alone, such as a head."""


# --- configurations ---


def _almost_fill(tiles: int, gpu: GPU) -> bool:
    return 10 * tiles >= 9 * gpu.multiprocessors


def _token_tile(problem: LinearProblem, least: int, most: int) -> int:
    """Tokens of a tile: a power of two between the bounds, large enough for all tokens if possible."""
    return max(least, min(most, next_power_of_2(problem.planned_tokens)))


def _job_splits(problem: LinearProblem, gpu: GPU) -> int:
    """Split-K of `linear_decode_hopper`: none if tiles give every multiprocessor a job."""
    if fills_gpu(problem, gpu) or fills_gpu_with_halves(problem, gpu):
        return 1
    return max(1, min(gpu.multiprocessors // cdiv(problem.rows, 128), problem.blocks // 4))


def _ring(problem: LinearProblem, rows: int, splits: int, stage_blocks: int, at_once: int) -> LinearDecodeTiles:
    """The number of stages of 16 KiB that fit in shared memory besides the input of a job, at most 12."""
    tokens = _token_tile(problem, 8, 16)
    stages = min(12, (215 - tokens // 8 * next_power_of_2(cdiv(problem.blocks, splits))) // 16)
    return LinearDecodeTiles(rows, splits, stages, stage_blocks, at_once, tokens)


def whole_ring(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """All of the shared memory: prefetching more of a long job saves more than starting the next kernel early."""
    return _ring(problem, 128, 1, 1, 4 if problem.blocks <= 16 else 2)


def half_ring(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """Half of the shared memory, which leaves room for the next kernel; split-K gives each multiprocessor a job."""
    ring = _ring(problem, 128, _job_splits(problem, gpu), 1, 2)
    return ring._replace(stages=min(ring.stages, 5))


def ring_of_half_tiles(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """A tile of 64 rows for each multiprocessor, whose stages hold two blocks of channels if there are pairs."""
    return _ring(problem, 64, 1, 2 - problem.blocks % 2, 16 // _token_tile(problem, 8, 16))


def _hopper_rows(problem: LinearProblem, gpu: GPU) -> int:
    """Rows of a tile: 64 where 128 would leave multiprocessors without work.

    Blocks of 32 take four products each: adding up three partials of 128 rows takes less time than twice the blocks.
    """
    tiles = cdiv(problem.planned_tokens, _token_tile(problem, 16, 128)) * cdiv(problem.rows, 128)
    enough = 4 * tiles >= gpu.multiprocessors if BLOCKS_OF_32(problem, gpu) else tiles >= gpu.multiprocessors
    return 128 if problem.plain_rows or enough else 64


def _hopper_tiles(problem: LinearProblem, rows: int, tokens: int) -> int:
    """Tiles of a launch; tiles of a plain weight count twice, because it has twice the blocks of channels."""
    tiles = cdiv(problem.rows, rows) + 2 * cdiv(problem.plain_rows, rows)
    return cdiv(problem.planned_tokens, tokens) * tiles


def _hopper_config(
    problem: LinearProblem, gpu: GPU, rows: int, tokens: int, part: tuple[int, int], most_splits: int = 0
) -> LinearHopperTiles:
    """Tiles with the stages that fit, and at most ``most_splits`` splits: by default 3, or 2 beside plain weights.

    Adding up the partials of a tile costs 2 to 5 us, so there are few: more jobs come from smaller tiles, as long as
    all of them run at once.
    """
    tiles = _hopper_tiles(problem, rows, tokens)
    spare = int(rows == 64 and tokens <= 32)
    shared_bytes = (190 if problem.plain else 200) // (1 + spare) << 10
    stages = min(16, shared_bytes // (128 * (rows + tokens) + 128 // problem.group * 4 * max(tokens, 32)))
    most_splits = most_splits or (2 if problem.plain else 3)
    splits = max(1, min(gpu.multiprocessors // tiles, problem.channels // 512, most_splits))
    plain_splits = 2 * splits if splits > 1 else 1 + (tiles <= gpu.multiprocessors)
    return LinearHopperTiles(rows, tokens, *part, splits, plain_splits, stages, spare)


def tiles_of_scaled_output(problem: LinearProblem, gpu: GPU) -> LinearHopperTiles:
    """Tiles of all tokens where they fill the GPU; each warpgroup has all rows of its tokens, which share a scale."""
    tokens = _token_tile(problem, 16, 128) // (1 if fills_gpu(problem, gpu) else 2)
    return _hopper_config(problem, gpu, 128, tokens, (128, tokens // 2), 1)


def tiles_at_once(problem: LinearProblem, gpu: GPU) -> LinearHopperTiles:
    """Tiles of 64 tokens instead of 128 if all of their jobs still run at once."""
    rows, tokens = _hopper_rows(problem, gpu), _token_tile(problem, 16, 128)
    if tokens == 128 and 2 * _hopper_tiles(problem, rows, 64) <= gpu.multiprocessors:
        tokens = 64
    part = (128, 64) if (rows, tokens) == (128, 128) else (64, tokens if rows == 128 else min(tokens, 64))
    return _hopper_config(problem, gpu, rows, tokens, part)


def _splits(programs: int, tiles: int, limit: int) -> int:
    """The largest power of two, at most ``limit``, that splits ``tiles`` into no more than ``programs``."""
    return 1 << (max(1, min(programs // max(tiles, 1), limit)).bit_length() - 1)


def _triton_config(
    problem: LinearProblem, gpu: GPU, rows: int, splits: int, plain_splits: int, warps: int, stages: int, early: int = 0
) -> LinearTiles:
    """Tiles of up to 64 tokens, with at most ``stages`` stages that fit into shared memory."""
    tokens, item = _token_tile(problem, 8, 64), problem.dtype.itemsize
    reads_fp8 = problem.quantized and problem.read_once
    plain_item = max([item, *(weight.dtype.itemsize for weight in problem.plain)])
    stage = max(
        128 * (rows + tokens * (1 if reads_fp8 else item)) * bool(problem.fp8),
        PLAIN_CHANNELS * plain_item * (rows + tokens) * bool(problem.plain),
    )
    # GPUs have 163 KiB of shared memory and more, or 99 KiB; some of it is used otherwise
    little = gpu.capability[0] == 12 or (8, 0) < gpu.capability < (9, 0)
    stages = max(2, min(stages, 1 + ((80 if little else 144) << 10) // stage))
    return LinearTiles(tokens, rows, splits, plain_splits, warps, stages, early)


def tiles_of_all_channels(problem: LinearProblem, gpu: GPU) -> LinearTiles:
    """Tiles of 128 rows if they fill their waves of programs; of 1024 channels, more stages gained nothing."""
    tiles, resident, few = cdiv(problem.rows, 128), 2 * gpu.multiprocessors, problem.planned_tokens <= 8
    full = few and 10 * tiles > 9 * resident * cdiv(tiles, resident)
    rows, warps = (128, 8) if full else (64, 4)
    stages = (4 if full else 5) if few and problem.channels > 1024 else 3
    return _triton_config(problem, gpu, rows, 1, 1, warps, stages, 2 if few else 0)


def tiles_read_early(problem: LinearProblem, gpu: GPU) -> LinearTiles:
    """Four blocks of the weight are read before the previous kernel has written the input.

    More blocks would take registers, so that fewer programs would be resident. From 8192 channels on, half the number
    of programs leaves more resources to the previous launch.
    """
    tiles, K = cdiv(problem.rows + problem.plain_rows, 64), problem.channels
    splits = _splits(4 * gpu.multiprocessors, tiles, K // 512)
    rows, warps = (128, 8) if K >= 8192 and not problem.plain else (64, 4)
    return _triton_config(problem, gpu, rows, splits, splits, warps, 3, 4)


def tiles_in_splits(channels: int, plain_tiles: int) -> Callable[[LinearProblem, GPU], LinearTiles]:
    """Splits of ``channels`` channels, for few rows. A row of a plain weight counts as ``plain_tiles`` rows."""

    def config(problem: LinearProblem, gpu: GPU) -> LinearTiles:
        limit, rows = problem.channels // channels, problem.rows + plain_tiles * problem.plain_rows
        splits = _splits(gpu.multiprocessors, cdiv(problem.planned_tokens, 64) * cdiv(rows, 128), limit)
        return _triton_config(problem, gpu, 128, splits, min(2 * splits, max(limit, 1)), 4, 5)

    return config


DECODE, HOPPER, TRITON = "linear_decode_hopper_kernel", "linear_hopper_kernel", "multi_linear_kernel"
DECODE_DATA, LAYERS = "h200_few_tokens.json: rows", "h200_layer_choices.json: rows"
RINGS, TUNED = "h200_checkouts_rings.json: rows", "h100_tune_v4_flash.json: linear.products"
LIBRARY: Table[LinearProblem] = Table(
    "linear.library",
    {"cuBLAS": one_product_of_cublas, TRITON: ANY},
    [
        Row(large_for_cublas, "cuBLAS", source="h100_tune_v32.json: linear.library"),
        Row(ANY, TRITON, source="h100_tune_v4_flash.json: linear.library"),
    ],
)
"""Of one weight: cuBLAS, or a launch that it shares. That launch is a row of `PRODUCTS`; any weight can be in one."""
PRODUCTS: Table[LinearProblem] = Table(
    "linear.products",
    {DECODE: decode_products, HOPPER: hopper_products, TRITON: ANY},
    [
        Row(streams_weights & fills_gpu & LONG_JOBS & UP_TO_8, DECODE, whole_ring, RINGS),
        Row(streams_weights & ~fills_gpu & fills_gpu_with_halves, DECODE, ring_of_half_tiles, DECODE_DATA),
        Row(streams_weights & (~fills_gpu | LONG_JOBS | FEW_CHANNELS), DECODE, half_ring, DECODE_DATA),
        Row(QUANTIZES_OUTPUT, HOPPER, tiles_of_scaled_output, LAYERS),
        Row(~UP_TO_8, HOPPER, tiles_at_once, LAYERS),
        Row(BLOCKS_OF_32, HOPPER, tiles_at_once, "h200_v41_linears.json: rows"),
        Row(WIDE & UP_TO_32, TRITON, tiles_of_all_channels, "h200_wide_linears.json: rows"),
        Row(WIDE_PLAIN & UP_TO_32, TRITON, tiles_read_early, TUNED),
        Row(UP_TO_8, TRITON, tiles_read_early, "h200_layer_linears.json: rows"),
        Row(UP_TO_32, TRITON, tiles_in_splits(512, 1), TUNED),
        Row(ANY, TRITON, tiles_in_splits(1024, 2)),
    ],
)


def quantizer_tiles(rows: int, channels: int) -> Callable[[RowsProblem, GPU], QuantizeTiles]:
    """Tiles of at most ``channels`` channels."""
    return lambda problem, gpu: QuantizeTiles(rows, min(channels, max(128, next_power_of_2(problem.channels))))


QUANTIZED_DATA = "h100_tune_v4_flash.json: linear.quantize_input"
# a row's values depend on nothing else
QUANTIZERS = one_kernel(
    "linear.quantize_input",
    "quantize_input_kernel",
    (up_to("planned_rows", 64), quantizer_tiles(2, 256), QUANTIZED_DATA),
    (ANY, quantizer_tiles(8, 512), QUANTIZED_DATA),
)


# --- the plan of an op ---


@planner("linear.multi_linear")
def plan(problem: LinearProblem, gpu: GPU) -> LinearPlan:
    """Each weight is cuBLAS's or shares a launch."""
    once = bool(not problem.quantized and problem.read_once)
    rounds = once and _rounds(problem, gpu)
    # heads are rotated by a launch anyway: in the product, many programs read each head, which took 5 us more
    quantizes = once and not rounds and (problem.rotated or _reads_quantized(problem, gpu, HOPPER))
    input_plan = None
    if quantizes or rounds or problem.rotated:
        channels = problem.groups * problem.channels
        input_plan = QUANTIZERS.choose(RowsProblem(problem.tokens, channels, problem.batch_invariant), gpu)
    problem = replace(problem, rotated=False, quantized=problem.quantized or quantizes, rounded=rounds)
    products, left = [], []
    for run in adjacent_runs(problem):
        joined = problem.weights[run[0]]._replace(rows=sum(problem.weights[i].rows for i in run), follows=False)
        alone = replace(problem, weights=(joined,))
        choice = LIBRARY.choose(alone, gpu)
        if choice.kernel == "cuBLAS":
            products.append(ProductPlan(choice, run, quantized=problem.quantized and bool(alone.read_once)))
        else:
            left += run
    products += [_product(problem, places, gpu) for places in _launches(problem, left, gpu)]
    return LinearPlan(input_plan, quantizes, rounds, tuple(products))


@planner("linear.empty_quantized")
def quantizes_before(problem: LinearProblem, gpu: GPU) -> bool:
    """Whether an op that has the values of the input should write them as FP8 too, for products to read."""
    return not _rounds(problem, gpu) and _reads_quantized(problem, gpu, DECODE, HOPPER)


def _reads_quantized(problem: LinearProblem, gpu: GPU, *kernels: str) -> bool:
    """Products read an input that is quantised before: of more than 8 tokens, or by one of these kernels."""
    if problem.planned_tokens > QUANTIZE_ABOVE:
        return True
    problem = replace(problem, rotated=False, quantized=True)
    launches = _launches(problem, range(len(problem.weights)), gpu)
    return any(_product(problem, places, gpu).choice.kernel in kernels for places in launches)


def _rounds(problem: LinearProblem, gpu: GPU) -> bool:
    """The input is rounded to FP8 values in bfloat16: all weights that read it, in blocks of 32, are cuBLAS's."""
    alone = (replace(problem, rotated=False, rounded=True, weights=(weight,)) for weight in problem.read_once)
    return problem.group != FP8_INPUT_GROUP and all(LIBRARY.choose(one, gpu).kernel == "cuBLAS" for one in alone)


def adjacent_runs(problem: LinearProblem) -> list[tuple[int, ...]]:
    """Places of weights that would be one product of cuBLAS: with many tokens, adjacent plain weights."""
    runs: list[tuple[int, ...]] = []
    for i, weight in enumerate(problem.weights):
        if weight.follows and problem.tokens >= JOIN_FROM:
            runs[-1] = (*runs[-1], i)
        else:
            runs.append((i,))
    return runs


def _launches(problem: LinearProblem, left: Sequence[int], gpu: GPU) -> Iterator[tuple[int, ...]]:
    """Packs weights into the fewest launches that the kernels allow.

    A launch has FP8 weights of one kind and unquantised weights of one kind. Weights are of a kind if the same compiled
    kernel serves them: same dtypes of weight and output, same way to read the input. So all projections of a layer's
    input are one launch: query latent and key in FP8, with compressors and index weights in bfloat16. The first FP8
    kind is paired with the first unquantised kind, and so on; a kind without a partner has a separate launch. Plain
    weights whose rows Hopper's tiles do not divide are of another kind, which does not keep the rest from these tiles.
    """
    kinds: tuple[dict, dict] = {}, {}
    for i in left:
        weight = problem.weights[i]
        odd = gpu.hopper and problem.quantized and weight.input_format is None and weight.rows % 64 > 0
        kind = weight.dtype, weight.out, weight.input_format, odd
        kinds[weight.input_format is None].setdefault(kind, []).append(i)
    for fp8, plain in zip_longest(*(kind.values() for kind in kinds), fillvalue=()):
        yield *fp8, *plain


def _product(problem: LinearProblem, places: tuple[int, ...], gpu: GPU) -> ProductPlan:
    """The plan of a launch of our kernels."""
    problem = replace(problem, weights=tuple(problem.weights[i]._replace(follows=False) for i in places))
    choice = PRODUCTS.choose(problem, gpu)
    kernel, config, blocks = choice.kernel, choice.config, problem.blocks
    token_tiles, splits, plain_splits = cdiv(problem.tokens, config.tokens), config.splits, config.plain_splits
    fp8, plain = (_tiled(weights, config.rows, problem.groups) for weights in (problem.fp8, problem.plain))
    if problem.batch_invariant or (fp8.TILES + plain.TILES) * token_tiles * config.warpgroups > COUNTERS:
        splits = plain_splits = 1
    if kernel != TRITON:
        splits = _without_empty(blocks, splits)
        plain_splits = _without_empty(cdiv(problem.channels, PLAIN_CHANNELS), plain_splits)
    if kernel == DECODE and (blocks % config.stage_blocks or cdiv(blocks, splits) % config.stage_blocks):
        raise ValueError(f"stages of {config.stage_blocks} blocks do not divide {blocks} blocks in {splits} splits")
    if kernel == HOPPER:  # 128 rows share a scale
        quantizes = QUANTIZES_OUTPUT(problem, gpu) and config.warpgroup_rows == 128
    else:
        quantizes = kernel == DECODE and problem.quantize_output and config.rows == 128
    fp8, plain = replace(fp8, SPLITS=splits), replace(plain, SPLITS=plain_splits)
    quantized = problem.quantized and bool(problem.read_once)
    dots = tuple(dot_format(problem.dtype, weights, gpu) for weights in (problem.fp8, problem.plain))
    return ProductPlan(choice, places, token_tiles, fp8, plain, quantized, quantizes, dots)


def _tiled(weights: Sequence[LinearWeight], rows: int, groups: int = 1) -> WeightTiles:
    """Tiles of ``rows`` rows over weights, or over each of the ``groups`` of one weight; not split."""
    sizes = tuple(weight.rows for weight in weights)
    *firsts, tiles = accumulate((groups * cdiv(size // groups, rows) for size in sizes), initial=0)
    return WeightTiles(sizes, tuple(firsts), tiles, 1, sizes[0] // groups if sizes and groups > 1 else 0)


def _without_empty(blocks: int, splits: int) -> int:
    """The number of splits of ``blocks`` none of which is empty, at most ``splits``."""
    return cdiv(blocks, cdiv(blocks, splits))


def dot_format(x: torch.dtype, weights: Sequence[LinearWeight], gpu: GPU) -> DotFormat:
    """Of weights of one kind, or none. No choice rounds the factors.

    Float16 and bfloat16 hold e4m3, and three bfloat16 hold a float32. Sums of FP8 products keep about 14 bits on
    compute capability 9.0, too few for a float32 output.
    """
    if not weights:
        return DotFormat(torch.float16)
    weight = weights[0]
    if weight.input_format is not None:
        if weight.input_format.fp8:
            return DotFormat(FP8 if gpu.native_fp8 and weight.out != F32 else torch.float16)
        return DotFormat(x) if x in HALVES else DotFormat(BF16, 3)
    if weight.dtype == x and x != F32:
        return DotFormat(x)
    return DotFormat(BF16, 3) if (weight.dtype, x) == (BF16, F32) else DotFormat(F32, 1, "tf32x3")
