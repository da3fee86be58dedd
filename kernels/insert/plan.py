"""Plans of cache writes: rows of a step's tokens, windows that compressors pool, heads of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    Choice,
    Row,
    Table,
    cdiv,
    has,
    next_power_of_2,
    one_kernel,
    planner,
    up_to,
)
from deepseek_attn.kernels.insert.types import CompressBatch, CompressPart


@dataclass(frozen=True)
class InsertProblem:
    """Cache writes of a layer's step: keys of its tokens, entries of its compressors, or both.

    Attributes:
        tokens, requests: of the step.
        keys: query latents and keys are normed, and the keys rotated and stored.
        dims: channels of the entries of each compressor; none for keys alone.
        ratio: tokens of a window; pooled_tokens: that an entry pools; ring_rows: of a request's ring.
        max_query_len: largest number of new tokens of a request.
    """

    tokens: int
    keys: bool
    dims: tuple[int, ...] = ()
    requests: int = 0
    ratio: int = 0
    pooled_tokens: int = 0
    ring_rows: int = 0
    max_query_len: int = 0

    @classmethod
    def of(
        cls, tokens: int, keys: bool, compressors: Sequence[CompressPart], batch: CompressBatch | None
    ) -> InsertProblem:
        """The problem of tensors."""
        if batch is None or not compressors:
            return cls(tokens, keys)
        dims, requests = tuple(part.dim for part in compressors), len(batch.prefix_lens)
        return cls(tokens, keys, dims, requests, batch.ratio, batch.pooled_tokens, batch.rows, batch.max_query_len)

    @property
    def reuses_ring_rows(self) -> bool:
        """Whether a token may overwrite the ring row of a token that a window of the step pools."""
        return self.max_query_len > self.ring_rows - self.pooled_tokens + 1


class RowTiles(NamedTuple):
    """Launch configuration of the kernels of `norm_rope_triton` and `latents_triton`.

    Attributes:
        warps: of a program; the order of a row's sum depends on it.
        early: programs may start before the previous kernel has ended.
        heads: of a query that a program computes.
    """

    warps: int
    early: bool
    heads: int = 1


class PoolTiles(NamedTuple):
    """Launch configuration of pooling.

    The order of a window's sum depends on all but ``programs`` and must be the same in every step: these follow from
    the tokens that an entry pools, and from nothing else.

    Attributes:
        warps: of a program; lanes: tokens that are summed side by side, and combined at the end; reads: tokens that a
            lane loads at once; channels: of a program, 0 for all. With ``lanes`` of 1 a program pools all channels.
        chunks: maximum blocks of ``channels`` per program.
        values: channels of a program that pools whole windows, several narrow ones at once.
        programs: maximum number of programs that pool.
    """

    warps: int
    lanes: int
    reads: int
    channels: int = 0
    chunks: int = 1
    values: int = 512
    programs: int = 1056  # eight for each multiprocessor of an H200


class WindowPlan(NamedTuple):
    """The launch that pools the step's complete compression windows, and their division among its programs.

    Attributes:
        launch: of `compress_kernel`, or of `insert_tokens_kernel`, which also writes keys and query latents.
        group: consecutive windows of a request that form a group; groups: upper bound of their number in the step.
        items: work items per group and compressor: each has some windows, or some channels if a group is one window.
        programs: number of programs that pool windows.
        reuses_ring_rows: the programs that pool the old content of a ring row also store its new content.
    """

    launch: Choice
    group: int
    groups: int
    items: tuple[int, ...]
    programs: int
    reuses_ring_rows: bool


class InsertPlan(NamedTuple):
    """Launches of `insert_tokens` or a part of it.

    Attributes:
        keys: launch of `norm_rope_insert_kernel`; None without keys, or if the ``windows`` launch also writes them.
        windows: None without compressors.
    """

    keys: Choice | None
    windows: WindowPlan | None


FEW_TOKENS = up_to("tokens", 256)
"""Few enough that starting early pays: programs that wait take the place of others that could run."""


def whole_windows(problem: InsertProblem, gpu: GPU) -> PoolTiles:
    """A program loads all tokens of a window at once."""
    return PoolTiles(POOL_WARPS, 1, next_power_of_2(problem.pooled_tokens))


POOL_WARPS = 4
SHARED_WINDOWS = PoolTiles(POOL_WARPS, 16, 4, channels=32)
SHORT_WINDOWS = up_to("pooled_tokens", 16)
PROGRAMS = "h200_index_scores.json: rows"
LATENTS_DATA = "h100_tune_v32.json: insert.insert_latents"

WINDOWS = Table(
    "insert.windows",
    # ring rows can be stored while windows are pooled
    {"insert_tokens_kernel": has("keys") & ~has("reuses_ring_rows"), "compress_kernel": ANY},
    [
        Row(SHORT_WINDOWS, "insert_tokens_kernel", whole_windows, "h200_tune_v4_pro.json: insert.windows"),
        Row(ANY, "insert_tokens_kernel", SHARED_WINDOWS),
        Row(SHORT_WINDOWS, "compress_kernel", whole_windows, PROGRAMS),
        Row(ANY, "compress_kernel", SHARED_WINDOWS, PROGRAMS),
    ],
)
KEYS = one_kernel(  # same warps as in a launch with compressors: the order of a row's sum must not depend on the step
    "insert.keys",
    "norm_rope_insert_kernel",
    (has("dims") & FEW_TOKENS, RowTiles(POOL_WARPS, early=True)),
    (has("dims"), RowTiles(POOL_WARPS, early=False), "h200_tune_v4_pro.json: insert.keys"),
    (FEW_TOKENS, RowTiles(1, early=True), "h200_tune_v41_flash.json: insert.keys"),
    (ANY, RowTiles(1, early=False), PROGRAMS),
)
# starting early is 1 to 3 % of a layer's time with few tokens, and costs nothing with 8192
LATENTS = one_kernel("insert.insert_latents", "insert_latents_kernel", (ANY, RowTiles(2, early=True), LATENTS_DATA))
ENTRIES = one_kernel("insert.rope_insert", "rope_insert_kernel", (ANY, RowTiles(1, early=True)))
# a head per warp: its sum is the same in every batch
QUERIES = one_kernel("insert.query_norm_rope", "query_norm_rope_kernel", (ANY, RowTiles(4, early=True, heads=4)))


@planner("insert.insert_tokens")
def plan_insert(problem: InsertProblem, gpu: GPU) -> InsertPlan:
    """One launch for everything where no token overwrites the ring row of a token that it pools; else two."""
    windows = divide_windows(problem, WINDOWS.choose(problem, gpu)) if problem.dims else None
    together = windows is not None and windows.launch.kernel == "insert_tokens_kernel"
    return InsertPlan(KEYS.choose(problem, gpu) if problem.keys and not together else None, windows)


def divide_windows(problem: InsertProblem, launch: Choice) -> WindowPlan:
    """Groups of windows, and the programs that pool them: at most one for each work item that there can be."""
    tiles: PoolTiles = launch.config
    group, items = 1, [cdiv(dim, max(tiles.channels, 1)) for dim in problem.dims]
    if tiles.lanes == 1:  # narrow windows are pooled several at a time
        windows = [max(tiles.values // max(64, next_power_of_2(dim)), 1) for dim in problem.dims]
        group = max(windows)
        items = [group // count for count in windows]
    groups = min(problem.tokens, problem.tokens // (problem.ratio * group) + problem.requests)
    programs = min(groups * sum(items), tiles.programs)
    return WindowPlan(launch, group, groups, tuple(items), programs, problem.reuses_ring_rows)
