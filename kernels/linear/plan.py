"""Plans of linear layers: which kernels compute the projections of one input, and in which tiles.

An op first quantises its input, unless programs do that as they read it. Each weight then goes to cuBLAS where that is
faster; all others share launches. A block-diagonal weight (`LinearProblem.groups`) has a launch of its own.

Rows are timed in whole layers where their source says so: a kernel that is faster alone can delay the next launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import torch

from deepseek_attn.kernels.common.counters import COUNTERS
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.invariance import MANY_ROWS
from deepseek_attn.kernels.common.plans import (
    ANY,
    Choice,
    KernelPlan,
    Row,
    RowsProblem,
    Table,
    at_least,
    cdiv,
    condition,
    has,
    kernel_planner,
    next_power_of_2,
    one_kernel,
    planner,
    up_to,
)
from deepseek_attn.kernels.common.quant import InputFormat

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
HALVES = (torch.bfloat16, torch.float16)
FP8_INPUT_GROUP = 128  # channels of a token that share a scale where a launch quantises the input
QUANTIZE_ABOVE = 8  # tokens up to which each Triton program quantises the part of the input that it reads
JOIN_FROM = 256  # tokens; with 128, the five plain projections of a C4A layer take 1.6 us longer as one product
DECODE_TOKENS = 16  # at most, of `linear_decode_hopper`
HOPPER_FP8_WEIGHTS, HOPPER_PLAIN_WEIGHTS = 3, 5  # FP8 and plain weights of a launch on Hopper, at most
OWN_BLOCKS = 16  # of a job whose input `linear_decode_hopper` quantises, at most: a register holds one value
PLAIN_CHANNELS = 64  # of a plain weight that a program of `linear_triton` reads at once; of an FP8 weight a group


class LinearWeight(NamedTuple):
    """One weight of a `LinearProblem`.

    Attributes:
        rows: of all groups; dtype, out: of the weight and of the output.
        input_format: how the product of an FP8 weight reads its input; None for a plain weight.
        aligned: its address is a multiple of 16 bytes.
        follows: it begins in memory where the weight before it ends; both are plain and have the same dtypes.
    """

    rows: int
    dtype: torch.dtype
    out: torch.dtype
    input_format: InputFormat | None = None
    aligned: bool = True
    follows: bool = False

    @property
    def reads_fp8(self) -> bool:
        """The product reads its input quantised to FP8."""
        return self.input_format is not None and self.input_format.fp8

    @property
    def reads_fp8_once(self) -> bool:
        """A launch before may quantise its input; for groups of 32, programs always quantise what they read."""
        return self.input_format is not None and self.input_format.fp8 and self.input_format.group == FP8_INPUT_GROUP


@dataclass(frozen=True)
class LinearProblem:
    """Projections of one input.

    Attributes:
        tokens, channels: of the input; with groups, the channels of one of them.
        dtype: of the input.
        weights: FP8 and plain ones in any order; one FP8 weight if there are groups.
        groups: diagonal blocks of the weight.
        rotated: the input is rotated back before the product (inverse RoPE).
        quantized: the caller has quantised the input, for weights with `LinearWeight.reads_fp8_once`.
        aligned, quantized_aligned: address and rows of the input, or of its FP8 values, are multiples of 16 bytes.
        quantize_output: the output of the only weight is wanted as FP8 too, where that needs no further launch.
        batch_invariant: sums of a token do not depend on the number of tokens.
    """

    tokens: int
    channels: int
    dtype: torch.dtype
    weights: tuple[LinearWeight, ...]
    groups: int = 1
    rotated: bool = False
    quantized: bool = False
    aligned: bool = True
    quantized_aligned: bool = True
    quantize_output: bool = False
    batch_invariant: bool = False

    @property
    def planned_tokens(self) -> int:
        """Tokens that the launch is configured for."""
        return MANY_ROWS if self.batch_invariant else self.tokens

    @property
    def fp8(self) -> list[LinearWeight]:
        """The FP8 weights."""
        return [weight for weight in self.weights if weight.input_format is not None]

    @property
    def plain(self) -> list[LinearWeight]:
        """The weights of float dtypes."""
        return [weight for weight in self.weights if weight.input_format is None]

    @property
    def rows(self) -> int:
        """Rows of the FP8 weights."""
        return sum(weight.rows for weight in self.fp8)

    @property
    def weight_values(self) -> int:
        """Values of the FP8 weights, for one group."""
        return self.rows * self.channels

    @property
    def plain_rows(self) -> int:
        """Rows of the plain weights."""
        return sum(weight.rows for weight in self.plain)

    @property
    def blocks(self) -> int:
        """Blocks of 128 channels."""
        return cdiv(self.channels, 128)


class LinearTiles(NamedTuple):
    """Configuration of a launch of `multi_linear_kernel`.

    Attributes:
        tokens, rows: tokens and weight rows of a program's tile.
        splits, plain_splits: split-K, the number of programs that share the channels of a tile.
        warps, stages: of a program.
        prefetched_blocks: blocks of weights that a program reads before the previous kernel has ended.
    """

    tokens: int
    rows: int = 64
    splits: int = 1
    plain_splits: int = 1
    warps: int = 4
    stages: int = 3
    prefetched_blocks: int = 0


class LinearHopperTiles(NamedTuple):
    """Configuration of a launch of `linear_hopper_kernel`.

    Attributes:
        rows, tokens: weight rows and tokens of a tile.
        warpgroup_rows, warpgroup_tokens: of the part of a tile that a warpgroup multiplies; there are one or two.
        splits, plain_splits: split-K, the number of jobs that share the channels of a tile.
        stages: blocks of channels in flight.
        spare: further programs that fit on a multiprocessor, so that the next kernel can start early.
    """

    rows: int
    tokens: int
    warpgroup_rows: int
    warpgroup_tokens: int
    splits: int = 1
    plain_splits: int = 1
    stages: int = 4
    spare: int = 0

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply a tile."""
        return self.rows // self.warpgroup_rows * (self.tokens // self.warpgroup_tokens)


class LinearDecodeTiles(NamedTuple):
    """Configuration of a launch of `linear_decode_hopper_kernel`.

    Attributes:
        rows: weight rows of a tile, 64 or 128; tokens: 8 or 16.
        splits: split-K, the number of jobs that share the channels of a tile.
        stages: of the ring of weights; stage_blocks: blocks of 128 channels of a stage.
        stages_at_once: stages that are multiplied together.
    """

    rows: int
    splits: int = 1
    stages: int = 11
    stage_blocks: int = 1
    stages_at_once: int = 2
    tokens: int = 8


# --- what the kernels support ---


@condition
def one_product_of_cublas(problem: LinearProblem, gpu: GPU) -> bool:
    """A plain product, or a block-scaled FP8 one on Hopper; cuBLAS chooses its sums by the number of tokens."""
    if len(problem.weights) != 1 or problem.batch_invariant:
        return False
    (weight,) = problem.weights
    if weight.input_format is None:
        return weight.dtype == problem.dtype and weight.out in (problem.dtype, F32)
    if not (gpu.hopper and problem.quantized and weight.reads_fp8_once and weight.out == BF16):
        return False
    return weight.rows // problem.groups % 128 == 0 and problem.channels % 512 == 0  # 16-byte rows of scales


@condition
def hopper_products(problem: LinearProblem, gpu: GPU) -> bool:
    """FP8 weights with quantised inputs, beside plain weights of the input's dtype; TMA reads steps of 16 bytes.

    Sums of FP8 products have 14 bits, too few for float32 outputs.
    """
    fp8, plain = problem.fp8, problem.plain
    return (
        gpu.hopper
        and problem.quantized
        and problem.quantized_aligned
        and problem.dtype in HALVES
        and 0 < len(fp8) <= HOPPER_FP8_WEIGHTS
        and len(plain) <= HOPPER_PLAIN_WEIGHTS
        and all(weight.rows % _row_multiple(problem) == 0 and weight.aligned for weight in problem.weights)
        and all(weight.reads_fp8_once and weight.out in HALVES for weight in fp8)
        and (not plain or (problem.aligned and problem.channels % 8 == 0))
        and all(weight.dtype == problem.dtype for weight in plain)
    )


@condition
def decode_products(problem: LinearProblem, gpu: GPU) -> bool:
    """FP8 weights and up to 16 tokens, quantised before or in jobs of few channels; outputs as in `hopper_products`."""
    return (
        gpu.hopper
        and problem.planned_tokens <= DECODE_TOKENS
        and problem.dtype in HALVES
        and 0 < len(problem.weights) <= HOPPER_FP8_WEIGHTS
        and all(weight.reads_fp8_once and weight.out in HALVES for weight in problem.weights)
        and all(weight.rows % _row_multiple(problem) == 0 and weight.aligned for weight in problem.weights)
        and (
            problem.quantized or (problem.groups == 1 and cdiv(problem.blocks, _job_splits(problem, gpu)) <= OWN_BLOCKS)
        )
    )


def _row_multiple(problem: LinearProblem) -> int:
    """What rows of weights must be multiples of: tiles of 64 rows, or in groups and for a quantised output of 128."""
    return 128 * problem.groups if problem.groups > 1 or problem.quantize_output else 64


# --- where they are the fastest ---


@condition
def streams_weights(problem: LinearProblem, gpu: GPU) -> bool:
    """Weights of 32 MiB or more: a ring is set up before smaller ones are read. Inputs of more than 64 KiB lose."""
    return problem.weight_values >= 1 << 25 and problem.blocks * _decode_tokens(problem) <= 512


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
    """cuBLAS takes less time than the product adds to a launch of ours; in microseconds.

    cuBLAS does not split K: its time is at least proportional to K.
    """
    M, N, K = problem.tokens, problem.weights[0].rows // problem.groups, problem.channels
    fp8, on_hopper = problem.weights[0].input_format is not None, hopper_products(problem, gpu)
    if M <= 32 or (on_hopper and M <= 128):
        return False
    work = 2 * M * N * K
    latency, rate, ours = (K / 370, 1.2e9, 0.6e9 if on_hopper else 0.3e9) if fp8 else (K / 700, 0.75e9, 0.25e9)
    return 4 + max(latency, N * K / 4.2e6, work / rate) < max(N * K / 3e6, work / ours)


@condition
def quantizes_output(problem: LinearProblem, gpu: GPU) -> bool:
    """A warpgroup then needs 128 rows; up to 32 tokens, tiles of 64 rows win more."""
    return problem.quantize_output and problem.planned_tokens > 32


@condition
def long_sums(problem: LinearProblem, gpu: GPU) -> bool:
    """More than 64 tokens and 16384 channels, and tiles of 64 rows that cannot be split."""
    tokens, K, rows = problem.planned_tokens, problem.channels, _hopper_rows(problem, gpu)
    return tokens > 64 and K >= 16384 and rows == 64 and gpu.multiprocessors // _hopper_tiles(problem, 64, 128) == 1


UP_TO_8, UP_TO_32 = up_to("planned_tokens", 8), up_to("planned_tokens", 32)
"""The time is that of reading the weights."""
LONG_JOBS = at_least("weight_values", 1 << 26)
"""Reading FP8 weights of 64 MiB or more takes longer than the next kernel gains by starting early."""
FEW_CHANNELS = up_to("channels", 1024)
"""V3.2's queries, of 1536, take 1.02 of a layer's time with `linear_triton`."""
WIDE = at_least("rows", 1 << 15)
"""Rows enough for programs of all channels."""
WIDE_PLAIN = up_to("rows", 0) & at_least("plain_rows", 1 << 15)
"""The same of plain weights alone, such as a head."""


# --- configurations ---


def _almost_fill(tiles: int, gpu: GPU) -> bool:
    return 10 * tiles >= 9 * gpu.multiprocessors


def _decode_tokens(problem: LinearProblem) -> int:
    return 8 if problem.planned_tokens <= 8 else 16


def _job_splits(problem: LinearProblem, gpu: GPU) -> int:
    """Split-K of `linear_decode_hopper`: none if tiles give every multiprocessor a job."""
    if fills_gpu(problem, gpu) or fills_gpu_with_halves(problem, gpu):
        return 1
    return max(1, min(gpu.multiprocessors // cdiv(problem.rows, 128), problem.blocks // 4))


def _ring_stages(blocks: int, tokens: int) -> int:
    """Stages of 16 KiB in shared memory beside the input of a job of so many blocks, at most 12."""
    return min(12, (215 - tokens // 8 * next_power_of_2(blocks)) // 16)


def whole_ring(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """All of the shared memory: what is read early of one long job is worth more than an early next kernel."""
    tokens = _decode_tokens(problem)
    at_once = 4 if problem.blocks <= 16 and tokens == 8 else 2
    return LinearDecodeTiles(128, 1, _ring_stages(problem.blocks, tokens), 1, at_once, tokens)


def half_ring(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """Half of the shared memory, which leaves room for the next kernel; split-K gives each multiprocessor a job."""
    tokens, splits = _decode_tokens(problem), _job_splits(problem, gpu)
    return LinearDecodeTiles(128, splits, min(_ring_stages(cdiv(problem.blocks, splits), tokens), 5), 1, 2, tokens)


def ring_of_half_tiles(problem: LinearProblem, gpu: GPU) -> LinearDecodeTiles:
    """A tile of 64 rows for each multiprocessor, whose stages hold two blocks of channels if there are pairs."""
    tokens = _decode_tokens(problem)
    pairs = 2 - problem.blocks % 2
    return LinearDecodeTiles(64, 1, _ring_stages(problem.blocks, tokens), pairs, 16 // tokens, tokens)


def _hopper_tokens(problem: LinearProblem) -> int:
    return next(n for n in (16, 32, 64, 128) if n >= min(problem.planned_tokens, 128))


def _hopper_rows(problem: LinearProblem, gpu: GPU) -> int:
    """Rows of a tile: 64 where 128 would leave multiprocessors without work."""
    tiles = cdiv(problem.planned_tokens, _hopper_tokens(problem)) * cdiv(problem.rows, 128)
    return 128 if problem.plain_rows or tiles >= gpu.multiprocessors else 64


def _hopper_tiles(problem: LinearProblem, rows: int, tokens: int) -> int:
    """Tiles of a launch; those of a plain weight count twice, for it has twice as many blocks of channels."""
    tiles = cdiv(problem.rows, rows) + 2 * cdiv(problem.plain_rows, rows)
    return cdiv(problem.planned_tokens, tokens) * tiles


def _hopper_config(
    problem: LinearProblem, gpu: GPU, rows: int, tokens: int, part: tuple[int, int], most_splits: int
) -> LinearHopperTiles:
    """Tiles with the stages that fit, and at most ``most_splits`` splits.

    Adding up the partials of a tile costs 2 to 5 us, so there are few: more jobs come from smaller tiles, as long as
    all of them run at once.
    """
    tiles = _hopper_tiles(problem, rows, tokens)
    spare = int(rows == 64 and tokens <= 32)
    shared_bytes = (190 if problem.plain else 200) // (1 + spare) << 10
    stages = min(16, shared_bytes // (128 * (rows + tokens) + 4 * max(tokens, 32)))
    splits = max(1, min(gpu.multiprocessors // tiles, problem.channels // 512, most_splits))
    plain_splits = 2 * splits if splits > 1 else 1 + (tiles <= gpu.multiprocessors)
    return LinearHopperTiles(rows, tokens, *part, splits, plain_splits, stages, spare)


def tiles_of_scaled_output(problem: LinearProblem, gpu: GPU) -> LinearHopperTiles:
    """Tiles of all tokens where they fill the GPU; each warpgroup has all rows of its tokens, which share a scale."""
    tokens = _hopper_tokens(problem) // (1 if _almost_fill(cdiv(problem.rows, 128), gpu) else 2)
    return _hopper_config(problem, gpu, 128, tokens, (128, tokens // 2), 1)


def tiles_of_long_sums(problem: LinearProblem, gpu: GPU) -> LinearHopperTiles:
    """Two splits of long sums with tiles of 128 rows, instead of one with 64."""
    return _hopper_config(problem, gpu, 128, 128, (64, 128), 2 if problem.plain else 3)


def tiles_at_once(problem: LinearProblem, gpu: GPU) -> LinearHopperTiles:
    """Tiles of 64 tokens instead of 128 if all of their jobs still run at once."""
    rows, tokens = _hopper_rows(problem, gpu), _hopper_tokens(problem)
    if tokens == 128 and 2 * _hopper_tiles(problem, rows, 64) <= gpu.multiprocessors:
        tokens = 64
    part = (128, 64) if (rows, tokens) == (128, 128) else (64, tokens if rows == 128 else min(tokens, 64))
    return _hopper_config(problem, gpu, rows, tokens, part, 2 if problem.plain else 3)


def _splits(programs: int, tiles: int, limit: int) -> int:
    """The largest power of two, at most ``limit``, that splits ``tiles`` into no more than ``programs``."""
    return 1 << (max(1, min(programs // max(tiles, 1), limit)).bit_length() - 1)


def _triton_config(
    problem: LinearProblem, gpu: GPU, rows: int, splits: int, plain_splits: int, warps: int, stages: int, early: int = 0
) -> LinearTiles:
    """Tiles of up to 64 tokens, with at most ``stages`` stages that fit into shared memory."""
    tokens = next(n for n in (8, 16, 32, 64) if n >= min(problem.planned_tokens, 64))
    reads_fp8 = problem.quantized and any(weight.reads_fp8_once for weight in problem.fp8)
    item, plain_item = (1 if reads_fp8 else problem.dtype.itemsize), problem.dtype.itemsize
    plain_item = max([plain_item, *(weight.dtype.itemsize for weight in problem.plain)])
    stage = max(
        128 * (rows + tokens * item) * bool(problem.fp8),
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
    """Four blocks are read before the input is there; more takes registers, and so room from other programs.

    From 8192 channels on half as many programs, which leave the launch before more room.
    """
    tiles, K = cdiv(problem.rows + problem.plain_rows, 64), problem.channels
    splits = _splits(4 * gpu.multiprocessors, tiles, K // 512)
    rows, warps = (128, 8) if K >= 8192 and not problem.plain else (64, 4)
    return _triton_config(problem, gpu, rows, splits, splits, warps, 3, 4)


def tiles_in_splits(problem: LinearProblem, gpu: GPU) -> LinearTiles:
    """Programs share the channels of few rows, as they do up to 8 tokens."""
    limit = problem.channels // 512
    splits = _splits(gpu.multiprocessors, cdiv(problem.rows + problem.plain_rows, 128), limit)
    return _triton_config(problem, gpu, 128, splits, min(2 * splits, max(limit, 1)), 4, 5)


def tiles_of_many_tokens(problem: LinearProblem, gpu: GPU) -> LinearTiles:
    """Tiles of 64 tokens, and half as many splits."""
    limit = problem.channels // 1024
    tiles = cdiv(problem.planned_tokens, 64) * cdiv(problem.rows + 2 * problem.plain_rows, 128)
    splits = _splits(gpu.multiprocessors, tiles, limit)
    return _triton_config(problem, gpu, 128, splits, min(2 * splits, max(limit, 1)), 4, 5)


DECODE, HOPPER, TRITON = "linear_decode_hopper_kernel", "linear_hopper_kernel", "multi_linear_kernel"
DECODE_DATA, LAYERS = "h200_few_tokens.json: rows", "h200_layer_choices.json: rows"
TUNED = "h100_tune_v4_flash.json: linear.products"
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
        Row(streams_weights & fills_gpu & LONG_JOBS, DECODE, whole_ring, DECODE_DATA),
        Row(streams_weights & fills_gpu & FEW_CHANNELS, DECODE, half_ring, DECODE_DATA),
        Row(streams_weights & ~fills_gpu & fills_gpu_with_halves, DECODE, ring_of_half_tiles, DECODE_DATA),
        Row(streams_weights & ~fills_gpu & ~fills_gpu_with_halves, DECODE, half_ring, DECODE_DATA),
        Row(quantizes_output, HOPPER, tiles_of_scaled_output, LAYERS),
        Row(long_sums, HOPPER, tiles_of_long_sums, LAYERS),
        Row(~UP_TO_8, HOPPER, tiles_at_once, LAYERS),
        Row(WIDE & UP_TO_32, TRITON, tiles_of_all_channels, "h200_wide_linears.json: rows"),
        Row(WIDE_PLAIN & UP_TO_32, TRITON, tiles_read_early, TUNED),
        Row(UP_TO_8, TRITON, tiles_read_early, "h200_layer_linears.json: rows"),
        Row(UP_TO_32, TRITON, tiles_in_splits, TUNED),
        Row(ANY, TRITON, tiles_of_many_tokens),
    ],
)


# --- the input ---


@dataclass(frozen=True)
class QuantizeProblem(RowsProblem):
    """Rows that are quantised, rotated back, or both: ``rotated``."""

    rotated: bool = False


class QuantizeTiles(NamedTuple):
    """Configuration of a launch of `quantize_input_kernel`: rows and channels of a program, and its warps."""

    rows: int
    channels: int
    warps: int


def tiles_of(rows: int, channels: int, warps: int) -> Callable[[QuantizeProblem, GPU], QuantizeTiles]:
    """Tiles of at most ``channels`` channels."""
    return lambda problem, gpu: QuantizeTiles(rows, min(channels, max(128, next_power_of_2(problem.channels))), warps)


QUANTIZED_DATA = "h100_tune_v4_flash.json: linear.quantize_input"
QUANTIZERS = one_kernel(
    "linear.quantize_input",
    "quantize_input_kernel",
    (up_to("planned_rows", 64), tiles_of(2, 256, 4), QUANTIZED_DATA),
    (has("rotated"), tiles_of(4, 512, 2)),
    (ANY, tiles_of(8, 512, 4), QUANTIZED_DATA),
)
plan_quantize = kernel_planner(QUANTIZERS)  # a row's values depend on nothing else


# --- the plan of an op ---


@dataclass(frozen=True)
class WeightTiles:
    """Tiles of the weights of one kind in a launch, constants of its kernel.

    Attributes:
        SIZES, FIRSTS: rows of each weight, and its first tile; TILES: of all of them.
        SPLITS: split-K partials of a tile.
        GROUP_ROWS: rows of a diagonal block of the only weight; 0 for dense weights.
    """

    SIZES: tuple[int, ...]
    FIRSTS: tuple[int, ...]
    TILES: int
    SPLITS: int
    GROUP_ROWS: int = 0


NO_TILES = WeightTiles((), (), 0, 1)


class DotFormat(NamedTuple):
    """Dtype of the factors of a product, values of it that x is split into, and ``input_precision`` of `tl.dot`."""

    dtype: torch.dtype
    parts: int = 1
    precision: str | None = None


_NO_DOT = DotFormat(torch.float16)  # where a launch has no weights of a kind


@dataclass(frozen=True)
class ProductPlan:
    """One launch, or a product of cuBLAS.

    Attributes:
        weights: places of its weights in the problem, FP8 ones first; adjacent ones of cuBLAS are one product.
        token_tiles: tiles that the tokens take.
        fp8, plain: tiles of the weights of each kind; none for cuBLAS.
        quantized: FP8 inputs are quantised before the launch.
        quantizes_output: it writes the output as FP8 too.
        dots: of FP8 and of plain weights, for `multi_linear_kernel`.
    """

    choice: Choice
    weights: tuple[int, ...]
    token_tiles: int = 1
    fp8: WeightTiles = NO_TILES
    plain: WeightTiles = NO_TILES
    quantized: bool = False
    quantizes_output: bool = False
    dots: tuple[DotFormat, ...] = ()


@dataclass(frozen=True)
class LinearPlan:
    """Launches of an op in order.

    Attributes:
        input: of the launch that quantises the input, or rotates it without FP8 values; None: there is none.
        quantizes: it quantises.
        products: what follows.
        gpu: that the plan was made for.
    """

    input: KernelPlan | None
    quantizes: bool
    products: tuple[ProductPlan, ...]
    gpu: GPU


@planner("linear.multi_linear")
def plan(problem: LinearProblem, gpu: GPU) -> LinearPlan:
    """Each weight is cuBLAS's or shares a launch."""
    once = not problem.quantized and any(weight.reads_fp8_once for weight in problem.weights)
    # heads are rotated by a launch anyway: in the product, many programs read each head, which took 5 us more
    quantizes = once and (problem.planned_tokens > QUANTIZE_ABOVE or problem.rotated)
    input_plan = None
    if quantizes or problem.rotated:
        channels = problem.groups * problem.channels
        rows = QuantizeProblem(problem.tokens, channels, problem.batch_invariant, problem.rotated)
        input_plan = KernelPlan.of(QUANTIZERS.choose(rows, gpu), gpu)
    problem = replace(problem, rotated=False, quantized=problem.quantized or quantizes)
    products, left = [], []
    for run in adjacent_runs(problem):
        joined = problem.weights[run[0]]._replace(rows=sum(problem.weights[i].rows for i in run), follows=False)
        choice = LIBRARY.choose(replace(problem, weights=(joined,)), gpu)
        if choice.kernel == "cuBLAS":
            products.append(ProductPlan(choice, run, quantized=problem.quantized))
        else:
            left += run
    products += [_product(problem, places, gpu) for places in _launches(problem.weights, left)]
    return LinearPlan(input_plan, quantizes, tuple(products), gpu)


@planner("linear.empty_quantized")
def quantizes_before(problem: LinearProblem, gpu: GPU) -> bool:
    """Whether an op that has the values of the input should write them as FP8 too, for products to read."""
    if problem.planned_tokens > QUANTIZE_ABOVE:
        return True
    return PRODUCTS.choose(replace(problem, quantized=True), gpu).kernel == DECODE


def adjacent_runs(problem: LinearProblem) -> list[tuple[int, ...]]:
    """Places of weights that would be one product of cuBLAS: with many tokens, adjacent plain weights."""
    runs: list[tuple[int, ...]] = []
    for i, weight in enumerate(problem.weights):
        if weight.follows and problem.tokens >= JOIN_FROM:
            runs[-1] = (*runs[-1], i)
        else:
            runs.append((i,))
    return runs


def _launches(weights: Sequence[LinearWeight], left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Packs weights into as few launches as the kernels allow.

    A launch has FP8 weights of one kind and plain weights of one kind, where a kind is all that the compiled kernel
    depends on: the dtypes of weight and output, and how the input is read. So everything that projects the input of a
    layer is one launch: query latent and key in FP8, with compressors and index weights in bfloat16. Each kind of FP8
    weights is paired with one of plain weights, in order; a kind left over has a separate launch.
    """
    kinds: tuple[dict, dict] = {}, {}
    for i in left:
        weight = weights[i]
        kind = (
            weight.dtype,
            weight.out,
            weight.input_format and (weight.input_format if weight.input_format.fp8 else weight.input_format.group),
        )
        kinds[weight.input_format is None].setdefault(kind, []).append(i)
    for fp8, plain in zip_longest(*(kind.values() for kind in kinds), fillvalue=()):
        yield *fp8, *plain


def _product(problem: LinearProblem, places: tuple[int, ...], gpu: GPU) -> ProductPlan:
    """The plan of a launch of our kernels."""
    problem = replace(problem, weights=tuple(problem.weights[i]._replace(follows=False) for i in places))
    choice = PRODUCTS.choose(problem, gpu)
    config, splits, plain_splits = choice.config, choice.config.splits, getattr(choice.config, "plain_splits", 1)
    token_tiles, blocks = cdiv(problem.tokens, config.tokens), problem.blocks
    fp8, plain = _tiled(problem.fp8, config.rows, problem.groups), _tiled(problem.plain, config.rows)
    warpgroups = config.warpgroups if choice.kernel == HOPPER else 1
    if problem.batch_invariant or (fp8.TILES + plain.TILES) * token_tiles * warpgroups > COUNTERS:
        splits = plain_splits = 1
    if choice.kernel != TRITON:
        splits = _without_empty(blocks, splits)
        plain_splits = _without_empty(cdiv(problem.channels, PLAIN_CHANNELS), plain_splits)
    quantizes = problem.quantize_output and choice.kernel != TRITON
    if choice.kernel == DECODE:
        quantizes = quantizes and config.rows == 128
        if blocks % config.stage_blocks or cdiv(blocks, splits) % config.stage_blocks:
            raise ValueError(f"stages of {config.stage_blocks} blocks do not divide {blocks} blocks in {splits} splits")
    elif choice.kernel == HOPPER:
        quantizes = quantizes_output(problem, gpu)
    quantized = problem.quantized and any(weight.reads_fp8_once for weight in problem.fp8)
    fp8, plain = replace(fp8, SPLITS=splits), replace(plain, SPLITS=plain_splits)
    dots = tuple(dot_format(problem.dtype, kind[0], gpu) if kind else _NO_DOT for kind in (problem.fp8, problem.plain))
    return ProductPlan(choice, places, token_tiles, fp8, plain, quantized, quantizes, dots)


def _tiled(weights: Sequence[LinearWeight], rows: int, groups: int = 1) -> WeightTiles:
    """Tiles of ``rows`` rows over weights, or over each of the ``groups`` of one weight."""
    sizes, firsts, tiles = tuple(weight.rows for weight in weights), [], 0
    if groups > 1:
        group_rows = sizes[0] // groups
        return WeightTiles(sizes, (0,), groups * cdiv(group_rows, rows), 1, group_rows)
    for size in sizes:
        firsts.append(tiles)
        tiles += cdiv(size, rows)
    return WeightTiles(sizes, tuple(firsts), tiles, 1)


def _without_empty(blocks: int, splits: int) -> int:
    """The number of splits of ``blocks`` none of which is empty, at most ``splits``."""
    return cdiv(blocks, cdiv(blocks, splits))


def dot_format(x: torch.dtype, weight: LinearWeight, gpu: GPU) -> DotFormat:
    """No choice rounds the factors: float16 and bfloat16 hold e4m3, and three bfloat16 hold a float32.

    Sums of FP8 products keep about 14 bits on compute capability 9.0, too few for a float32 output.
    """
    if weight.reads_fp8:
        return DotFormat(FP8 if gpu.native_fp8 and weight.out != F32 else torch.float16)
    if weight.input_format is not None:
        return DotFormat(x) if x in HALVES else DotFormat(BF16, 3)
    if weight.dtype == x and x != F32:
        return DotFormat(x)
    return DotFormat(BF16, 3) if (weight.dtype, x) == (BF16, F32) else DotFormat(F32, 1, "tf32x3")
