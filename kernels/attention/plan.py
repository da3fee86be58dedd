"""Plans of sparse attention and of gathers: kernel, tiles, splits of a query's keys; FlashMLA or own kernels.

All choices depend on shapes, dtypes and alignment alone, so that a captured graph serves any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.types import AttendedKeys
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import (
    ANY,
    HOPPER,
    Choice,
    LaunchBlock,
    Row,
    RowsProblem,
    Table,
    at_least,
    cdiv,
    condition,
    equals,
    next_power_of_2,
    one_kernel,
    planner,
    up_to,
)


@dataclass(frozen=True, kw_only=True)
class AttendProblem(RowsProblem):
    """Queries ``[rows, heads, channels]``, each over up to ``width`` keys.

    Attributes:
        d_v: channels of a value; nope: leading channels of a key that precede its unquantised channels, or all.
        dtype: of the queries; key_dtype: of a key's values in memory.
        group: quantised channels that share a scale; 0 for unquantised keys.
        pools: number of pools that keys are read from, 1 or 2.
        key_rows: keys are rows of one tensor, not cache entries.
        sink: each head has an attention sink logit.
        raw_q: the kernel applies norm and RoPE to the queries and quantises its output.
        aligned_q, aligned_keys: the compiler knows that rows can be copied 16 bytes at a time.
    """

    heads: int
    d_v: int
    width: int
    nope: int
    dtype: torch.dtype = torch.bfloat16
    key_dtype: torch.dtype = torch.uint8
    group: int = 0
    pools: int = 1
    key_rows: bool = False
    sink: bool = False
    raw_q: bool = False
    aligned_q: bool = True
    aligned_keys: bool = True

    @classmethod
    def of(
        cls, q: Tensor, keys: Sequence[AttendedKeys], d_v: int, key_rows: bool, sink: Tensor | None, raw_q: bool = False
    ) -> AttendProblem:
        """The problem of these arguments, in the current context of batch invariance."""
        first, (T, H, dim) = keys[0], q.shape
        return cls(
            T, dim, batch_invariant(), heads=H, d_v=d_v, width=sum(part.indices.shape[1] for part in keys),
            nope=first.layout.nope, dtype=q.dtype, key_dtype=first.pool.dtype, group=first.layout.group,
            pools=len(keys), key_rows=key_rows, sink=sink is not None, raw_q=raw_q,
            aligned_q=q.stride(2) == 1 and _aligned(q, q.stride(0), q.stride(1)),
            aligned_keys=_aligned(first.pool, first.pool.stride(0)),
        )  # fmt: skip

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of products. float16 holds e4m3 times a power of two, and bf16 near 1, exactly."""
        if self.group == 64:
            return torch.float32 if self.dtype == torch.float32 else torch.float16
        return self.dtype if self.dtype == (torch.bfloat16 if self.group else self.key_dtype) else torch.float32


def _aligned(rows: Tensor, *strides: int) -> bool:
    return rows.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)


class AttendTiles(NamedTuple):
    """Launch configuration of the kernels that attend.

    Attributes:
        heads, keys: of a tile; warps, stages: of a program; piece: channels of a piece of `attend_kernel`.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    piece: int = 64


class CombineTiles(NamedTuple):
    """Launch configuration of `attention_combine_kernel`: splits and channels of a program, and its warps."""

    splits: int
    channels: int
    warps: int


HOPPER_TILES = AttendTiles(64, 64, 8, 1)
"""The only tiles of the kernels for Hopper."""


@condition
def v4_pages(problem: AttendProblem, gpu: GPU) -> bool:
    """Entries of ``fp8_v4`` whose sizes `attend_hopper_kernel` is written for."""
    dim = problem.channels
    sizes = dim in (128, 256, 512) and problem.nope == dim - 64 and problem.d_v == dim
    return problem.group == 64 and sizes and problem.product_dtype == torch.float16


@condition
def v32_pages(problem: AttendProblem, gpu: GPU) -> bool:
    """Entries of ``fp8_v32`` that `attend_v32_hopper_kernel` reads 16 bytes at a time; it knows no sinks."""
    sizes = problem.nope in (256, 512) and problem.d_v == problem.nope == problem.channels - 64
    entries = problem.group == 128 and problem.product_dtype == torch.bfloat16 and problem.aligned_keys
    return sizes and entries and problem.pools == 1 and not problem.sink


@condition
def half_rows(problem: AttendProblem, gpu: GPU) -> bool:
    """Rows that `attend_rows_hopper_kernel` copies 16 bytes at a time: 16-bit, of the queries' dtype."""
    dtypes = problem.dtype == problem.key_dtype and problem.dtype.itemsize == 2
    sizes = problem.channels in (128, 256, 512) and problem.d_v == problem.channels
    return problem.key_rows and dtypes and sizes and problem.aligned_q and problem.aligned_keys


@condition
def small(problem: AttendProblem, gpu: GPU) -> bool:
    """So little work that tiles of 16 heads fill the GPU better; never for up to 16 heads."""
    return problem.heads > 16 and problem.planned_rows * cdiv(problem.heads, 16) * cdiv(problem.width, 64) <= 80


@condition
def rows_fill_gpu(problem: AttendProblem, gpu: GPU) -> bool:
    """`attend_rows_hopper_kernel` splits no query's keys: it needs a program for half of the multiprocessors."""
    return problem.planned_rows * cdiv(problem.heads, 64) >= gpu.multiprocessors // 2


TUNED_V4 = "h100_tune_v4_flash.json: attention.attend"
TUNED_V32 = "h100_tune_v32.json: attention.attend"
LAYERS = "h200_layer_choices.json: rows"
MANY_HEADS, WIDE, ONE = ~up_to("heads", 16), ~up_to("channels", 512), equals("planned_rows", 1)

ATTEND = Table(
    "attention.attend",
    {
        "attend_kernel": ANY,
        "attend_hopper_kernel": HOPPER & v4_pages,
        "attend_v32_hopper_kernel": HOPPER & v32_pages,
        "attend_rows_hopper_kernel": HOPPER & half_rows,
    },
    [
        Row(MANY_HEADS & rows_fill_gpu, "attend_rows_hopper_kernel", HOPPER_TILES, TUNED_V4),
        Row(equals("product_dtype", torch.float32), "attend_kernel", AttendTiles(16, 16, 4, 1)),
        Row(~HOPPER & (~MANY_HEADS | WIDE), "attend_kernel", AttendTiles(16, 32, 4, 2)),
        Row(~HOPPER, "attend_kernel", AttendTiles(32, 32, 8, 2)),
        # 9.7 us instead of 10.2; with 4 queries 13.2 instead of 12.1
        Row(v32_pages & WIDE & ONE & ~MANY_HEADS, "attend_kernel", AttendTiles(16, 32, 4, 2, 128)),
        Row(WIDE | ~small, "attend_v32_hopper_kernel", HOPPER_TILES, TUNED_V32),
        Row(~small, "attend_hopper_kernel", HOPPER_TILES, LAYERS),
        Row(WIDE & ~MANY_HEADS, "attend_kernel", AttendTiles(16, 32, 8, 1)),
        Row(WIDE, "attend_kernel", AttendTiles(64, 64, 8, 1, 128), TUNED_V32),
        Row(ONE & small & up_to("width", 640), "attend_kernel", AttendTiles(16, 32, 8, 1, 128), LAYERS),
        Row(small, "attend_kernel", AttendTiles(16, 64, 8, 2, 128), LAYERS),
        Row(~MANY_HEADS, "attend_kernel", AttendTiles(16, 64, 4, 2)),
        Row(ANY, "attend_kernel", AttendTiles(64, 64, 8, 2, 128)),
    ],
)  # fmt: skip


def splits_of_keys(problem: AttendProblem, gpu: GPU, choice: Choice) -> int:
    """Programs that share the keys of a query (split-K); each gets at least one tile of keys."""
    if choice.kernel == "attend_rows_hopper_kernel":
        return 1
    tiles: AttendTiles = choice.config
    blocks = cdiv(problem.width, tiles.keys)
    programs = problem.planned_rows * cdiv(problem.heads, tiles.heads)
    splits = max(1, min(blocks, (2 if tiles.heads < 64 else 1) * gpu.multiprocessors // programs, 130))
    blocks_of_split = cdiv(blocks, splits)
    # Two more blocks per program take less time than a second launch that combines splits. For raw queries the second
    # launch also rotates and quantises, with more programs and so faster than the programs of this launch.
    alone = (3 if problem.heads <= 64 else 2) if problem.raw_q else 6
    if choice.kernel != "attend_kernel" and alone * programs >= gpu.multiprocessors and blocks - blocks_of_split <= 2:
        return 1
    return cdiv(blocks, blocks_of_split)


@dataclass(frozen=True)
class CombineProblem:
    """Split-K partials of ``splits`` splits and ``d_v`` channels; ``quantized``: their sum is quantised."""

    splits: int
    d_v: int
    quantized: bool


def whole_columns(problem: CombineProblem, gpu: GPU) -> CombineTiles:
    """A warp holds whole columns of partials.

    With more warps, which sum across, 8 queries of 64 heads in 10 splits took 17.9 us (4 warps) and 26.9 us (8 warps),
    attention included, instead of 13.4 us.
    """
    warps = 1 if 16 < problem.splits <= 65 else 2
    splits = next_power_of_2(problem.splits)
    channels = min(next_power_of_2(problem.d_v), 256 * warps, max(64, 4096 * warps // splits))
    if problem.quantized and channels < 128:  # channels that share a scale
        warps, channels = 2 * warps, 128
    return CombineTiles(splits, channels, warps)


COMBINE = one_kernel("attention.combine", "attention_combine_kernel", (ANY, whole_columns))


@dataclass(frozen=True)
class AttendPlan:
    """Launches of one attention.

    Attributes:
        attend: kernel and tiles; splits: of the keys of a query.
        combine: the launch that combines splits, or rotates and quantises; None if ``attend`` writes the result.
        dtype: of products, and of split-K partials where it is float16; others are float32.
    """

    attend: Choice
    splits: int
    combine: Choice | None
    dtype: torch.dtype


def attend_plan(problem: AttendProblem, gpu: GPU, choice: Choice, splits: int) -> AttendPlan:
    """The plan with this kernel and number of splits."""
    # `attend_hopper_kernel` stores 512 channels of a head as FP8 itself
    last = splits == 1 and (not problem.raw_q or (choice.kernel == "attend_hopper_kernel" and problem.channels == 512))
    combine = None if last else COMBINE.choose(CombineProblem(splits, problem.d_v, problem.raw_q), gpu)
    return AttendPlan(choice, splits, combine, problem.product_dtype)


@planner("attention.attend")
def plan_attend(problem: AttendProblem, gpu: GPU) -> AttendPlan:
    """Kernel, tiles and splits of `sparse_attention`, `sparse_attention_paged` or `attend_raw_q`."""
    choice = ATTEND.choose(problem, gpu)
    return attend_plan(problem, gpu, choice, splits_of_keys(problem, gpu, choice))


@dataclass(frozen=True)
class LayerCall:
    """A layer's attention of ``queries`` of ``heads`` over up to ``width`` keys, on a GPU that has FlashMLA.

    ``record``: of the pages that are read, or "" for rows of a workspace.
    """

    queries: int
    heads: int
    width: int
    record: str


@condition
def flashmla_runs(problem: LayerCall, gpu: GPU) -> bool:
    """FlashMLA is compiled for compute capabilities 9.0 and 10.0."""
    return gpu.capability in ((9, 0), (10, 0))


HEADS_64, HEADS_128 = equals("heads", 64), equals("heads", 128)
COMPILED = HEADS_64 | HEADS_128
"""Head counts that FlashMLA is compiled for; of pages it pads others."""
WINDOW_OR_MANY = up_to("width", 128) | ~up_to("width", 2048)
ROWS, V32 = equals("record", ""), equals("record", "fp8_v32")
V32_OPS, DECODE = "h200_v32_ops.json: rows", "h200_attention_decode.json: results"

# Own kernels convert each V3.2 entry, with its float32 scale, once for 64 heads. With 128 heads, pairs of FlashMLA's
# blocks decode a key once for all of them, which wins where many queries fill the GPU. Head counts that FlashMLA is not
# compiled for pay for padding.
LIBRARY = Table(
    "attention.library",
    {"FlashMLA": flashmla_runs & (~ROWS | COMPILED), "attend_kernel": ANY},
    [
        Row(ROWS, "FlashMLA", source="h100_tune_v4_pro.json: attention.library"),
        Row(V32 & HEADS_128 & at_least("queries", 2), "FlashMLA", source=V32_OPS),
        Row(V32 & HEADS_64 & at_least("queries", 8), "FlashMLA", source=V32_OPS),
        Row(V32 & at_least("queries", 32), "FlashMLA", source=V32_OPS),
        Row(HEADS_128 & WINDOW_OR_MANY & at_least("queries", 9), "FlashMLA", source=DECODE),
        Row(HEADS_128 & at_least("queries", 33), "FlashMLA", source=DECODE),
        Row(ANY, "attend_kernel", source=DECODE),
    ],
)
"""FlashMLA, or own kernels, among which `ATTEND` chooses, for queries that are normed and rotated.

Raw queries always go to own kernels: with 128 heads too, where FlashMLA may attend faster, since the launches that
`attend_raw_q` saves take longer.
"""


# A program decodes four rows: 85 to 92 % of the bandwidth of a copy on an H200.
GATHER = one_kernel("attention.gather", "gather_kernel", (ANY, LaunchBlock(4, 2)))
