"""How products of `linear` and `grouped_linear` are cut, and which are cuBLAS's: from shapes, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import triton

QUANTIZE_ABOVE = 8  # tokens up to which every program quantises for itself what it reads of the input


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Attributes:
        tokens, rows: of one program's tile; plain_rows: the same for plain weights.
        splits, plain_splits: programs that share the channels of a tile.
        plain_channels: channels that a program reads at once of a plain weight (of an FP8 one 128).
        warps, stages: of a program.
        early: blocks of weights that a program reads before the launch ahead of it has ended.
    """

    tokens: int
    rows: int = 64
    splits: int = 1
    plain_rows: int = 64
    plain_splits: int = 1
    plain_channels: int = 64
    warps: int = 4
    stages: int = 3
    early: int = 0


def choose_tiles(
    M: int, K: int, rows: int, plain_rows: int, capability: tuple[int, int], processors: int, item: int, plain_item: int
) -> Tiles:
    """The fastest cut measured for ``M`` tokens of ``K`` channels and so many weight rows of either kind.

    Up to 32 tokens the time is that of reading the weights, and programs share the channels of few rows.

    Args:
        capability, processors: of the GPU.
        item: bytes of an input value as programs of FP8 weights read it; plain_item: the same for plain weights.
    """
    tokens, block, warps, stages, limit = next(n for n in (8, 16, 32, 64) if n >= min(M, 64)), 128, 4, 5, K // 512
    if rows >= 32768 and M <= 32:
        block, warps, splits, stages = (128, 8, 1, 3) if M <= 16 else (64, 4, 1, 3)
        plain_splits = 1
    elif M <= 8:
        block, splits, stages = 64, _splits(4 * processors, triton.cdiv(rows + plain_rows, 64), limit), 3
        plain_splits = splits
    elif M <= 32:
        splits = _splits(processors, triton.cdiv(rows + plain_rows, 128), limit)
        plain_splits = min(2 * splits, max(limit, 1))
    else:
        tiles = triton.cdiv(M, tokens) * triton.cdiv(rows + 2 * plain_rows, 128)
        splits = _splits(processors, tiles, limit // 2)
        plain_splits = min(2 * splits, max(limit // 2, 1))
    stage = max(128 * (block + tokens * item) * bool(rows), 64 * plain_item * (block + tokens) * bool(plain_rows))
    # GPUs have 163 KiB of shared memory and more, or 99 KiB; some of it serves other ends
    room = (80 if capability[0] == 12 or (8, 0) < capability < (9, 0) else 144) << 10
    stages = max(2, min(stages, 1 + room // stage))
    early = 0
    if M <= 8:
        early = 4 if triton.cdiv(K, 128) > 8 * splits else 2  # programs with much to read ask for more ahead of time
    return Tiles(tokens, block, splits, block, plain_splits, warps=warps, stages=stages, early=early)


@dataclass(frozen=True)
class HopperTiles:
    """How a launch of `linear_hopper` is cut.

    Attributes:
        rows, tokens: of a tile; own_rows, own_tokens: of the part of it that one of one or two warpgroups multiplies.
        splits, plain_splits: jobs that share the channels of a tile.
        stages: blocks of channels in flight.
        spare: programs that a multiprocessor has room for beside its own, so that the next launch can start early.
    """

    rows: int
    tokens: int
    own_rows: int
    own_tokens: int
    splits: int = 1
    plain_splits: int = 1
    stages: int = 4
    spare: int = 0


def choose_hopper_tiles(
    M: int, K: int, rows: int, plain_rows: int, processors: int, rounded: bool = False
) -> HopperTiles:
    """The fastest cut measured for ``M`` tokens of ``K`` channels, so many rows of FP8 and of plain weights.

    Shares of a tile cost 2 to 5 us to add up, so that tiles are as small as it takes to give all multiprocessors one.

    Args:
        rounded: the output is rounded to FP8 as well, and so a warpgroup needs 128 rows.
    """
    tokens = next(n for n in (16, 32, 64, 128) if n >= min(M, 128))
    block, spare = 128, 0
    if rounded:
        tokens //= 2
        own_rows, own_tokens = 128, tokens // 2 if tokens > 16 else tokens
        spare = tokens <= 16
    elif plain_rows or triton.cdiv(M, tokens) * triton.cdiv(rows, 128) >= processors:
        own_rows, own_tokens = (128, 64) if tokens == 128 else (64, tokens)
    else:
        block, own_rows, own_tokens = 64, 64, min(tokens, 64)
        spare = tokens <= 32
    room = (190 if plain_rows else 200) // (1 + spare) << 10
    # a plain weight has twice as many blocks
    tiles = triton.cdiv(M, tokens) * (triton.cdiv(rows, block) + 2 * triton.cdiv(plain_rows, block))
    splits = 1 if rounded else max(1, min(processors // tiles, K // 512))
    if plain_rows and tokens == 128:
        splits = min(splits, 2)  # 2 and 4 shares took 17 and 25 us of C4A inputs; 4 and 8 took 31 us of fewer rows
    return HopperTiles(
        block,
        tokens,
        own_rows,
        own_tokens,
        splits,
        2 * splits if splits > 1 else 1 + (tiles <= processors),
        min(16, room // (128 * (block + tokens) + 4 * max(tokens, 32))),
        int(spare),
    )


def cublas_is_faster(M: int, N: int, K: int, fp8: bool, hopper: bool = False) -> bool:
    """Whether a product ``[M, K] x [K, N]`` takes cuBLAS less time than it adds to a launch; both in microseconds.

    cuBLAS does not share the channels of a tile: its time grows with K, whatever else, and so there is a least one.

    Args:
        hopper: FP8 weights are those of `linear_hopper`.
    """
    hopper = hopper and fp8
    if M <= 32 or (hopper and M <= 128):
        return False
    work = 2 * M * N * K
    latency, rate, ours = (K / 370, 1.2e9, 0.6e9 if hopper else 0.3e9) if fp8 else (K / 700, 0.75e9, 0.25e9)
    return 4 + max(latency, N * K / 4.2e6, work / rate) < max(N * K / 3e6, work / ours)


def _splits(programs: int, tiles: int, limit: int) -> int:
    """The largest power of two of shares with which ``tiles`` become no more than ``programs``."""
    return 1 << (max(1, min(programs // max(tiles, 1), limit)).bit_length() - 1)
