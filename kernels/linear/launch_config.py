"""Launch configurations of linear products, and which products are cuBLAS's: from shapes, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from deepseek_attn.kernels.common.invariance import batch_invariant

PLAIN_CHANNELS = 64  # of a plain weight that a program reads at once; of an FP8 weight: 128


@dataclass(frozen=True)
class LaunchConfig:
    """Tiling of a launch of `linear_triton`.

    Attributes:
        tokens, rows: tokens and weight rows of a program's tile; plain_rows: weight rows for plain weights.
        splits, plain_splits: split-K, the number of programs that share the channels of a tile.
        warps, stages: of a program.
        prefetched_blocks: blocks of weights that a program reads before the previous kernel has ended.
    """

    tokens: int
    rows: int = 64
    splits: int = 1
    plain_rows: int = 64
    plain_splits: int = 1
    warps: int = 4
    stages: int = 3
    prefetched_blocks: int = 0


def choose_config(
    M: int,
    K: int,
    rows: int,
    plain_rows: int,
    capability: tuple[int, int],
    multiprocessors: int,
    item: int,
    plain_item: int,
) -> LaunchConfig:
    """The fastest configuration measured.

    Up to 32 tokens the time is that of reading the weights, and programs share the channels of few rows.

    Args:
        M, K: tokens and channels of the input.
        rows, plain_rows: rows of all FP8 weights and of all plain ones.
        capability, multiprocessors: of the GPU.
        item: bytes of an input value as programs of FP8 weights read it; plain_item: the same for plain weights.
    """
    tokens, block, warps, stages, limit = next(n for n in (8, 16, 32, 64) if n >= min(M, 64)), 128, 4, 5, K // 512
    wide = rows >= 32768
    if wide and M <= 32:
        tiles, resident = triton.cdiv(rows, 128), 2 * multiprocessors
        full = M <= 8 and 10 * tiles > 9 * resident * triton.cdiv(tiles, resident)  # waves of programs with large tiles
        block, warps = (128, 8) if full else (64, 4)
        splits, plain_splits, stages = 1, 1, 3
        if M <= 8 and K > 1024:  # of 1024 channels, more stages gained nothing
            stages = 4 if full else 5
    elif M <= 8:
        block, splits, stages = 64, _splits(4 * multiprocessors, triton.cdiv(rows + plain_rows, 64), limit), 3
        plain_splits = splits
        if K >= 8192 and not plain_rows:
            block, warps = 128, 8  # half as many programs, which leave the launch before more room
    elif M <= 32:
        splits = _splits(multiprocessors, triton.cdiv(rows + plain_rows, 128), limit)
        plain_splits = min(2 * splits, max(limit, 1))
    else:
        tiles = triton.cdiv(M, tokens) * triton.cdiv(rows + 2 * plain_rows, 128)
        splits = _splits(multiprocessors, tiles, limit // 2)
        plain_splits = min(2 * splits, max(limit // 2, 1))
    stage = max(128 * (block + tokens * item) * bool(rows), 64 * plain_item * (block + tokens) * bool(plain_rows))
    # GPUs have 163 KiB of shared memory and more, or 99 KiB; some of it is used otherwise
    shared_bytes = (80 if capability[0] == 12 or (8, 0) < capability < (9, 0) else 144) << 10
    stages = max(2, min(stages, 1 + shared_bytes // stage))
    prefetched = 0
    if M <= 8:  # what a program reads before its input is there; more takes registers, and so room from other programs
        prefetched = 2 if wide else 4
    return LaunchConfig(
        tokens, block, splits, block, plain_splits, warps=warps, stages=stages, prefetched_blocks=prefetched
    )


@dataclass(frozen=True)
class HopperLaunchConfig:
    """Tiling of a launch of `linear_hopper`.

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


def choose_hopper_config(
    M: int, K: int, rows: int, plain_rows: int, multiprocessors: int, quantize_output: bool = False
) -> HopperLaunchConfig:
    """The fastest configuration measured in whole layers; arguments are those of `choose_config`.

    Partials of a tile cost 2 to 5 us to add up, so there are few: more jobs come from smaller tiles, as long as all of
    them run at once.

    Args:
        quantize_output: the output is quantised to FP8 as well, and so a warpgroup needs 128 rows; for more than 32
            tokens, see `quantizes_output`.
    """
    tokens = next(n for n in (16, 32, 64, 128) if n >= min(M, 128))
    many = triton.cdiv(M, tokens) * triton.cdiv(rows, 128) >= multiprocessors
    block = 128 if quantize_output or plain_rows or many else 64

    def tiles(tokens: int) -> int:  # a plain weight has twice as many blocks of channels
        return triton.cdiv(M, tokens) * (triton.cdiv(rows, block) + 2 * triton.cdiv(plain_rows, block))

    if quantize_output:
        if not _almost_fill(triton.cdiv(rows, 128), multiprocessors):  # with tiles of all tokens
            tokens //= 2
        warpgroup_rows, warpgroup_tokens = 128, tokens // 2
    elif tokens == 128 and K >= 16384 and block == 64 and multiprocessors // tiles(128) == 1:
        block, warpgroup_rows, warpgroup_tokens = 128, 64, 128  # two splits of long sums instead of one
    else:
        if tokens == 128 and 2 * tiles(64) <= multiprocessors:
            tokens = 64
        if block == 64:
            warpgroup_rows, warpgroup_tokens = 64, min(tokens, 64)
        else:
            warpgroup_rows, warpgroup_tokens = (128, 64) if tokens == 128 else (64, tokens)
    spare = block == 64 and tokens <= 32
    shared_bytes = (190 if plain_rows else 200) // (1 + spare) << 10
    splits = 1 if quantize_output else max(1, min(multiprocessors // tiles(tokens), K // 512, 2 if plain_rows else 3))
    return HopperLaunchConfig(
        block,
        tokens,
        warpgroup_rows,
        warpgroup_tokens,
        splits,
        2 * splits if splits > 1 else 1 + (tiles(tokens) <= multiprocessors),
        min(16, shared_bytes // (128 * (block + tokens) + 4 * max(tokens, 32))),
        int(spare),
    )


@dataclass(frozen=True)
class FewHopperConfig:
    """Tiling of a launch of `linear_few_hopper`.

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


FEW_TOKENS = 16  # at most, of `linear_few_hopper`
_FEW_BYTES = 1 << 25  # smaller weights are read before a ring is set up
_LONG_BYTES = 1 << 26  # weights that take longer to read than the next kernel gains by starting early


def choose_few_hopper_config(M: int, K: int, rows: int, multiprocessors: int) -> FewHopperConfig | None:
    """The fastest configuration measured for weights of ``rows`` rows; None where another kernel is faster.

    Each multiprocessor gets a job, over all channels if there are as many tiles. A ring of half of the shared memory
    leaves room for the next kernel, whose weights are then read early; where a program has one long job, what is read
    of it early is worth more.
    """
    tokens, blocks, tiles = 8 if M <= 8 else 16, K // 128, triton.cdiv(rows, 128)
    if rows * K < _FEW_BYTES or blocks * tokens > 512:  # wider inputs, of more than 64 KiB, were slower
        return None
    if _almost_fill(tiles, multiprocessors):
        stages = _ring_stages(blocks, tokens)
        if rows * K >= _LONG_BYTES:
            return FewHopperConfig(128, 1, stages, 1, 4 if blocks <= 16 and tokens == 8 else 2, tokens)
        if blocks > 8:  # V3.2's queries: 1.02 of the time of a layer with `linear_triton`
            return None
        return FewHopperConfig(128, 1, min(stages, 5), 1, 2, tokens)
    if _almost_fill(2 * tiles, multiprocessors) and blocks % 2 == 0:
        return FewHopperConfig(64, 1, _ring_stages(blocks, tokens), 2, 16 // tokens, tokens)
    splits = max(1, min(multiprocessors // tiles, blocks // 4))
    return FewHopperConfig(128, splits, min(_ring_stages(triton.cdiv(blocks, splits), tokens), 5), 1, 2, tokens)


def _almost_fill(tiles: int, multiprocessors: int) -> bool:
    """Whether nine of ten multiprocessors get a tile, or more."""
    return 10 * tiles >= 9 * multiprocessors


def _ring_stages(blocks: int, tokens: int) -> int:
    """Stages of 16 KiB in shared memory beside the input of a job of so many blocks, at most 12."""
    return min(12, (215 - tokens // 8 * triton.next_power_of_2(blocks)) // 16)


def quantizes_output(M: int) -> bool:
    """Whether `linear_hopper` quantises a grouped product on the way; up to 32 tokens tiles of 64 rows win more."""
    return M > 32


def cublas_is_faster(M: int, N: int, K: int, fp8: bool, hopper: bool = False) -> bool:
    """Whether cuBLAS computes ``[M, K] x [K, N]`` in less time than it adds to a launch of ours; times in microseconds.

    cuBLAS does not split K: its time is at least proportional to K.

    Args:
        fp8: the weight is FP8; hopper: `linear_hopper` would compute it if so.
    """
    hopper = hopper and fp8
    if M <= 32 or (hopper and M <= 128) or batch_invariant():
        return False
    work = 2 * M * N * K
    latency, rate, ours = (K / 370, 1.2e9, 0.6e9 if hopper else 0.3e9) if fp8 else (K / 700, 0.75e9, 0.25e9)
    return 4 + max(latency, N * K / 4.2e6, work / rate) < max(N * K / 3e6, work / ours)


def _splits(programs: int, tiles: int, limit: int) -> int:
    """The largest power of two, at most ``limit``, that splits ``tiles`` into no more than ``programs``."""
    return 1 << (max(1, min(programs // max(tiles, 1), limit)).bit_length() - 1)
