"""Plans of the indexer: which kernels compute scores and select from them, and with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    LaunchBlock,
    Row,
    RowsProblem,
    Table,
    cdiv,
    channel_block,
    condition,
    equals,
    given_kernels,
    has,
    next_power_of_2,
    one_kernel,
)
from deepseek_attn.kernels.indexer.types import HOPPER_HEADS, HOPPER_KEYS, HOPPER_TOKENS, TRITON_HEAD_DIM

# --- scores ---


@dataclass(frozen=True)
class ScoresProblem:
    """Scores of queries against pages of keys, or against the keys of each query's candidate blocks.

    Attributes:
        tokens: queries; requests: that they belong to; width: keys of the longest request, or columns of candidates.
        heads, dim: of a query; key_format: ``fp8``, ``fp4`` or ``plain``.
        exact: products are float32; rounded: scores are rounded to another dtype.
        aligned: queries and pages start at multiples of 16 bytes.
    """

    tokens: int
    requests: int
    width: int
    heads: int
    dim: int
    key_format: str
    exact: bool = False
    rounded: bool = False
    aligned: bool = True
    batch_invariant: bool = False


class ScoresConfig(NamedTuple):
    """Tiling of a kernel of scores.

    Attributes:
        tokens: of one program; keys: of one tile; stages: tiles that are in flight.
        splits: programs that share the keys of a request.
    """

    tokens: int
    keys: int
    stages: int
    splits: int


@condition
def _hopper_heads(p: ScoresProblem, gpu: GPU) -> bool:
    """The kernels in Gluon copy 16 bytes at a time, and do not round scores."""
    return gpu.hopper and (p.heads, p.dim) == (HOPPER_HEADS, TRITON_HEAD_DIM) and p.aligned and not p.rounded


@condition
def _groups_fill_gpu(p: ScoresProblem, gpu: GPU) -> bool:
    """Requests have eight tokens or more on average, and their groups of eight adjacent tokens fill the GPU."""
    groups, tiles = cdiv(p.tokens, HOPPER_TOKENS), cdiv(p.width, HOPPER_KEYS)
    return HOPPER_TOKENS * p.requests <= p.tokens and groups * tiles >= 96 * gpu.multiprocessors


@condition
def _many_keys(p: ScoresProblem, gpu: GPU) -> bool:
    """With fewer keys the kernel is faster alone, but layers of 1, 8 and 32 requests took up to 3 % longer.

    8192 keys or more of each of eight requests are enough: 0.97 of the time of V3.2's layer
    (h100_tune_v32.json: indexer.scores).
    """
    return p.requests * p.width >= (1 << 16 if p.width >= 8192 else 1 << 18)


@cache
def _fewest_rounds(tokens: int, width: int, multiprocessors: int) -> int:
    """Splits of the keys with which all multiprocessors are busy to the end.

    A multiprocessor runs one program; starting one takes as long as eight of its tiles.
    """
    groups, tiles = cdiv(tokens, HOPPER_TOKENS), cdiv(width, HOPPER_KEYS)
    choices = range(1, 1 + min(multiprocessors, max(1, tiles // 8)))
    return min(choices, key=lambda n: cdiv(groups * n, multiprocessors) * (cdiv(tiles, n) + 8))


def eight_tokens(p: ScoresProblem, gpu: GPU) -> ScoresConfig:
    return ScoresConfig(HOPPER_TOKENS, HOPPER_KEYS, 8, _fewest_rounds(p.tokens, p.width, gpu.multiprocessors))


def decode_tokens(p: ScoresProblem, gpu: GPU) -> ScoresConfig:
    """Small programs, of which a multiprocessor holds several; each has at least four tiles."""
    tokens = 4 if p.batch_invariant else min(4, next_power_of_2(cdiv(p.tokens, p.requests)))
    fp4 = p.key_format == "fp4"
    resident = ((5, 4, 3) if fp4 else (6, 4, 2))[tokens // 2] * gpu.multiprocessors
    splits = max(1, min(resident // cdiv(p.tokens, tokens), cdiv(p.width, 4 * HOPPER_KEYS)))
    return ScoresConfig(tokens, HOPPER_KEYS, 4 if fp4 else 2, splits)


def exact_products(p: ScoresProblem, gpu: GPU) -> ScoresConfig:
    return ScoresConfig(1, 32, 1, max(1, min(8 * gpu.multiprocessors // p.tokens, cdiv(p.width, 64))))


def tokens_in_turn(p: ScoresProblem, gpu: GPU) -> ScoresConfig:
    """The number of programs that run at a time, or twice that: a partial last wave takes as long as a full one."""
    keys, tokens = _tile_keys(gpu), 4 if p.batch_invariant else min(4, cdiv(p.tokens, p.requests))
    resident = (4, 3, 3, 4)[tokens - 1] * gpu.multiprocessors
    return ScoresConfig(tokens, keys, 3, max(1, min(resident // cdiv(p.tokens, tokens), cdiv(p.width, 2 * keys))))


def one_token(p: ScoresProblem, gpu: GPU) -> ScoresConfig:
    """One tile per program where all run at a time; otherwise several waves of programs with four tiles or more.

    A last wave of a few long programs would take as long as a full wave.
    """
    keys, resident = _tile_keys(gpu), 4 * gpu.multiprocessors
    tiles = cdiv(p.width, keys)
    splits = max(resident // p.tokens, min(cdiv(4 * resident, p.tokens), cdiv(tiles, 4)))
    return ScoresConfig(1, keys, 3, min(tiles, splits))


def _tile_keys(gpu: GPU) -> int:
    return 128 if gpu.hopper else 64


FP8, FP4, INVARIANT = equals("key_format", "fp8"), equals("key_format", "fp4"), has("batch_invariant")
DECODE_SCORES = "index_scores_decode_hopper_kernel"
# every kernel gives FP8 keys the same bits
SCORES = Table(
    "indexer.scores",
    {
        "index_scores_hopper_kernel": _hopper_heads & FP8,
        DECODE_SCORES: _hopper_heads & (FP8 | FP4),
        "index_scores_kernel": ANY,
    },
    [
        Row(_groups_fill_gpu & ~INVARIANT, "index_scores_hopper_kernel", eight_tokens, "h200_index_scores.json: rows"),
        Row(FP4 | (_many_keys & ~INVARIANT), DECODE_SCORES, decode_tokens, "h200_few_scores.json: rows"),
        Row(has("exact"), "index_scores_kernel", exact_products),
        Row(ANY, "index_scores_kernel", tokens_in_turn, "h100_tune_v4_flash.json: indexer.scores"),
    ],
)

CANDIDATE_SCORES = one_kernel(
    "indexer.candidate_scores", "candidate_scores_kernel", (has("exact"), exact_products), (ANY, one_token)
)


# --- top-k ---


@dataclass(frozen=True, kw_only=True)
class TopkProblem(RowsProblem):
    """The ``k`` highest of up to ``channels`` scores in each row."""

    k: int

    @property
    def least_capacity(self) -> int:
        """Candidates that a program has room for, at least."""
        return max(4 * next_power_of_2(self.k), 2048)

    @property
    def rows_in_registers(self) -> bool:
        """A program has room for every column of its row as a candidate."""
        return self.channels <= self.least_capacity


@dataclass(frozen=True)
class TopkConfig:
    """Tiling of `topk_kernel`, a constant of the kernel. All fields except ``max_registers`` are powers of two.

    Each thread reads at least four columns at a time. When the buffer of candidates is full, it is reduced to the best
    k. Four columns per thread must still fit beside these: ``k + 4 * 32 * num_warps <= capacity``.

    Attributes:
        splits: programs that share a row; tile: columns that a program reads at a time.
        sample: columns that are read first.
        capacity: candidates that a program can hold; the expected number is half. Rows of at most ``capacity`` columns
            are not sampled.
        words: words of 32 columns that a thread lists at a time; num_warps: per program; max_registers: per thread.
    """

    splits: int
    tile: int
    sample: int
    capacity: int
    words: int
    num_warps: int
    max_registers: int | None = None


def short_rows(p: TopkProblem, gpu: GPU) -> TopkConfig:
    """A program holds its row. Many rows: fewer threads, which wait less for each other."""
    capacity = min(p.least_capacity, max(next_power_of_2(p.channels), 1024))
    warps = max(capacity // 1024, 2) if 4 * gpu.multiprocessors < p.rows else max(capacity // 512, 4)
    registers = 128 if gpu.multiprocessors < p.rows else None
    return TopkConfig(1, 512 * warps, 128 * warps, capacity, 4, warps, registers)


def long_rows(p: TopkProblem, gpu: GPU) -> TopkConfig:
    """A sample of the row gives a bound; so many of its scores reach it that ``k`` of the row do, too."""
    capacity = p.least_capacity
    if p.channels > 2**16:
        capacity = max(capacity, 4096, min(8 * next_power_of_2(p.k), 8192))  # so that a small sample is enough
    warps = max(capacity // 512, 8)
    target = capacity // 2
    wanted = 32 if target >= 4 * p.k else 64
    sample = max(min(next_power_of_2(wanted * p.channels // target), 8192), 128 * warps)
    # a multiprocessor has room for two programs; for only one if its capacity, and so its registers, are larger
    fit = 2 * gpu.multiprocessors if capacity == 2048 else gpu.multiprocessors
    splits = 1 << (max(1, min(fit // p.rows, p.channels // 8192, 32)).bit_length() - 1)
    registers = 128 if p.rows * splits > gpu.multiprocessors and warps < 32 else None
    return TopkConfig(splits, max(8192, 512 * warps), sample, capacity, 4 if splits == 1 else 1, warps, registers)


_TOPK = "h200_topk.json: rows"
# the selection is exact with every tiling
TOPK = one_kernel("indexer.topk", "topk_kernel", (has("rows_in_registers"), short_rows, _TOPK), (ANY, long_rows, _TOPK))


# --- candidate blocks ---


BLOCKS = one_kernel("indexer.blocks", "block_scores_kernel", (ANY, LaunchBlock(256)))
ENTRIES = one_kernel("indexer.candidate_entries", "candidate_entries_kernel", (ANY, channel_block(512)))


# --- queries ---


# Index queries alone, or together with the layer's queries. A head is computed by one program: its bits do not depend
# on the plan. Heads of one program, and warps as in `absorb_launch`, since the layer's heads are in the launch.
QUERIES = given_kernels(
    "indexer.queries",
    ("index_query_kernel", LaunchBlock(16, 4), "h100_tune_v32.json: indexer.queries"),
    ("queries_kernel", LaunchBlock(16, 4), "h100_tune_v4_flash.json: indexer.queries"),
    ("latent_queries_kernel", LaunchBlock(16, 4), "h100_tune_v32.json: indexer.queries"),
)
