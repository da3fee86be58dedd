"""Problems of linear layers, configurations of their kernels, and the plans that consist of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.kernels.common.invariance import MANY_ROWS
from deepseek_attn.kernels.common.plans import Choice, cdiv
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP


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
    def fp8_group(self) -> int:
        """Channels of an FP8 input that share a scale; 0 if the product reads no FP8 input."""
        return self.input_format.group if self.input_format is not None and self.input_format.fp8 else 0


@dataclass(frozen=True)
class LinearProblem:
    """Projections of one input.

    Attributes:
        tokens, channels: of the input; with groups, the channels of a single group.
        dtype: of the input.
        weights: FP8 and unquantised weights in any order; one FP8 weight if there are groups.
        groups: diagonal blocks of the weight.
        rotated: inverse RoPE is applied to the input before the product.
        quantized: the caller has quantised the input in groups of ``group`` channels, for weights that read it so.
        rounded: the input is rounded before to values that bfloat16 holds: FP8 in groups of 32, with their scales.
        aligned, quantized_aligned: address and row stride of the input, or of its FP8 copy, are multiples of 16 bytes.
        quantize_output: also return the output in FP8 if that needs no further launch; for one weight.
        batch_invariant: sums of a token do not depend on the number of tokens.
    """

    tokens: int
    channels: int
    dtype: torch.dtype
    weights: tuple[LinearWeight, ...]
    groups: int = 1
    rotated: bool = False
    quantized: bool = False
    group: int = FP8_INPUT_GROUP
    rounded: bool = False
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
    def read_once(self) -> list[LinearWeight]:
        """The weights whose input an earlier launch may quantise."""
        return [weight for weight in self.weights if weight.fp8_group == self.group]

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
    warpgroups = 1


class LinearHopperTiles(NamedTuple):
    """Configuration of a launch of `linear_hopper_kernel`.

    Attributes:
        rows, tokens: weight rows and tokens of a tile.
        warpgroup_rows, warpgroup_tokens: size of the part of a tile that each of one or two warpgroups multiplies.
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
    plain_splits = warpgroups = 1


class QuantizeTiles(NamedTuple):
    """Configuration of a launch of `quantize_input_kernel`: rows and channels of a program."""

    rows: int
    channels: int


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


@dataclass(frozen=True)
class ProductPlan:
    """One launch, or one product of cuBLAS.

    Attributes:
        weights: indices into the problem's weights, FP8 weights first; cuBLAS multiplies adjacent weights as one.
        token_tiles: number of token tiles.
        fp8, plain: tiles of the FP8 and of the unquantised weights; none for cuBLAS.
        quantized: an earlier launch quantises the inputs of FP8 weights.
        quantizes_output: the launch also writes the output in FP8.
        dots: of FP8 and of unquantised weights, for `multi_linear_kernel`.
    """

    choice: Choice
    weights: tuple[int, ...]
    token_tiles: int = 1
    fp8: WeightTiles = NO_TILES
    plain: WeightTiles = NO_TILES
    quantized: bool = False
    quantizes_output: bool = False
    dots: tuple[DotFormat, ...] = ()

    @property
    def jobs(self) -> int:
        """Tiles of all weights and tokens, times their splits."""
        return self.token_tiles * sum(tiles.TILES * tiles.SPLITS for tiles in (self.fp8, self.plain))


@dataclass(frozen=True)
class LinearPlan:
    """Launches of an op, in execution order.

    Attributes:
        input: plan of the launch that prepares the input: quantises or rounds it, or only applies inverse RoPE. None:
            no launch.
        quantizes, rounds: what the ``input`` launch does.
        products: launches of the products.
    """

    input: Choice | None
    quantizes: bool
    rounds: bool
    products: tuple[ProductPlan, ...]
