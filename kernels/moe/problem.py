"""Problems of the mixture of experts, configurations of its kernels, and the plans that consist of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import Choice
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.moe.types import ExpertsCall

INVARIANT_LOAD = 48  # rows of an expert that batch-invariant launches are planned for: tiles of 64 pairs
QUAD = 4  # blocks of 128 channels whose FP4 scales `experts_hopper_kernel` loads at once, 16 bytes of a weight row


@dataclass(frozen=True)
class ExpertsProblem:
    """One pass of `moe_experts`.

    Attributes:
        tokens, topk: of the routing ``[tokens, topk]``.
        routed: experts that the router chooses from.
        hidden, inner: channels of tokens, and between the products.
        dtype: of the tokens; weights: format of the stacks, ``plain``, ``fp8`` or ``fp4``.
        row_exponents: FP4 stacks have exponents of their rows.
        aligned: TMA can load the stacks: their addresses are multiples of 16 bytes.
        batch_invariant: the result of a token must not depend on the number of tokens.
        in_rows: weights are in rows of a cache (``slots``).
        first_beside_copies, second_beside_copies: launches copy w2, or other experts, while the product runs.
    """

    tokens: int
    topk: int
    routed: int
    hidden: int
    inner: int
    dtype: torch.dtype
    weights: str
    input_format: InputFormat
    row_exponents: bool = False
    aligned: bool = True
    batch_invariant: bool = False
    in_rows: bool = False
    first_beside_copies: bool = False
    second_beside_copies: bool = False

    @classmethod
    def of(cls, call: ExpertsCall) -> ExpertsProblem:
        """The problem of these arguments."""
        x, experts, _, w1, w3, w2, *_ = call
        (tokens, topk), stacks, slots = experts.shape, (w1, w3, w2), call.slots
        # threads read the scales of FP8 stacks, TMA everything else
        loaded = [part for stack in stacks for part in stack[: 2 if w1.format == "fp4" else 1] if part is not None]
        return cls(
            tokens, topk, call.num_routed or call.num_experts, x.shape[1], w1.weight.shape[1], x.dtype, w1.format,
            call.input_format, all(stack.exponent is not None for stack in stacks),
            all(part.data_ptr() % 16 == 0 for part in loaded), batch_invariant(),
            slots is not None, slots is not None and slots.outputs_ready is not None,
            slots is not None and slots.beside_copies,
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """(token, expert) pairs of the pass."""
        return self.tokens * self.topk

    @property
    def load(self) -> float:
        """Mean number of rows of an expert."""
        return INVARIANT_LOAD if self.batch_invariant else self.pairs / self.routed

    @property
    def whole_quads(self) -> bool:
        """Both widths are multiples of 512 channels."""
        return self.hidden % (128 * QUAD) == 0 and self.inner % (128 * QUAD) == 0


class ExpertFactors(NamedTuple):
    """Formats and dtypes of the factors of `grouped_product_kernel`.

    Attributes:
        weights: ``plain``, ``fp8`` or ``fp4``; dtype: of both factors.
        quantize: inputs are quantised to FP8; scaled: the product reads the e4m3 values and their float32 scales.
    """

    weights: str
    dtype: torch.dtype
    quantize: bool
    scaled: bool


@dataclass(frozen=True)
class ExpertTiles:
    """Tiling of `grouped_product_kernel`.

    Attributes:
        pairs, rows, channels: of a program's tile: (token, expert) pairs of one expert, weight rows, channels at once.
        warps, stages: of a program.
    """

    pairs: int
    rows: int
    channels: int
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperExpertTiles:
    """Tiling of `experts_hopper_kernel`.

    Attributes:
        sizes: numbers of routed rows that a tile is rounded up to, multiples of the first in rising order.
        part: upper bound of routed rows per product.
        stages: upper bound of stages in flight; shared memory may allow fewer.
        programs: per multiprocessor, 1 to 3.
        warpgroups: number of warpgroups that multiply, 1 to 3; three only with one program per multiprocessor.
        overlap: two parts are multiplied at the same time, which takes more registers.
        channels: per stage, 128 or 256; 256 only for FP4 weights in one part.
    """

    sizes: tuple[int, ...]
    part: int
    stages: int = 8
    programs: int = 1
    warpgroups: int = 2
    overlap: bool = True
    channels: int = 128


@dataclass(frozen=True)
class HopperExpertTiling:
    """Constants of `experts_hopper_kernel`. Triton 3.6 accepts a field in a list only when it has a constexpr name.

    Attributes:
        N, K: output channels and channels of the product.
        FP4: weights are FP4, else FP8.
        HALF_QUAD: rows of FP4 end with half of a quad of blocks.
        GATED: a job computes ``swiglu`` of two products, of 32 rows of either weight per warpgroup.
        TILES: the plan's; PARTS: of its largest tile; STAGES: in flight.
        SCALES: input scales of a part; TMA writes at multiples of 128 bytes.
        ROW_BLOCKS: jobs of a tile.
        WAIT: the previous launch, which may still run, writes tiles or weights. Otherwise it writes only rows of x.
        BOX: routed rows that are loaded at once.
        REGISTERS: of a thread of the warpgroups after the first; LOADERS: of the two warps that load.
    """

    N: int
    K: int
    FP4: bool
    HALF_QUAD: bool
    GATED: bool
    TILES: HopperExpertTiles
    PARTS: int
    STAGES: int
    SCALES: int
    ROW_BLOCKS: int
    WAIT: bool
    BOX: int
    REGISTERS: int
    LOADERS: int


class HopperProduct(NamedTuple):
    """One launch of `experts_hopper_kernel`.

    Attributes:
        tiling: its constants.
        weight_rows, weight_bytes: of a weight tile that is loaded at once.
        programs: of the launch; registers: of a thread at its start.
    """

    tiling: HopperExpertTiling
    weight_rows: int
    weight_bytes: int
    programs: int
    registers: int


@dataclass(frozen=True)
class ExpertsPlan:
    """Kernels of one pass of `moe_experts`, in execution order.

    Attributes:
        grouping: sorts (token, expert) pairs by expert; `grouped_product_kernel` if the products do that themselves.
            `prepare_decode_rows_kernel` also quantises the tokens.
        inputs: converts the tokens to the format of the first product. None: no launch, because ``grouping`` converts
            them or the product reads them unconverted.
        product: kernel and tiles of both products, first with w1 and w3, then with w2.
        hidden: converts the result of the first product for the second. None: no launch; it is read unconverted.
        combine: sums the outputs of each token's experts.
        factors: formats of the products' factors.
        hopper: both launches of `experts_hopper_kernel`; empty for other kernels.
    """

    grouping: Choice
    inputs: Choice | None
    product: Choice
    hidden: Choice | None
    combine: Choice
    factors: ExpertFactors
    hopper: tuple[HopperProduct, ...]
