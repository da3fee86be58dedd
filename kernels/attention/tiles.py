"""How launches of `sparse_attention` are cut: tile sizes, warps, and programs that share a query's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Attributes:
        heads, keys: of one program's tiles; warps, stages: of a program; piece: channels of a piece.
        splits: programs that share a query's keys.
        hopper: use ``attend_hopper_kernel``, whose tiles are 64 heads and 64 keys.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    piece: int = 64
    splits: int = 1
    hopper: bool = False


def pieces(nope: int, dim: int, piece: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and widths of the pieces that cover channels ``[0, nope)`` and ``[nope, dim)``.

    Widths are powers of two from 16 to ``piece``; the last piece of either part may be wider than what is left.
    """
    starts, widths = [], []
    for start, end in ((0, nope), (nope, dim)):
        while start < end:
            left, width = end - start, piece
            while width > left and width > 16:
                width //= 2
            starts.append(start)
            widths.append(width)
            start += width
    return tuple(starts), tuple(widths)


def dot_dtype(q: torch.dtype, keys: torch.dtype, group: int = 0) -> torch.dtype:
    """What the products are computed in. float16 holds e4m3 times a power of two, and bf16 near 1, exactly.

    Args:
        keys: of the pool; not looked at if ``group`` channels share a scale.
    """
    if group == 64:
        return torch.float32 if q == torch.float32 else torch.float16
    return q if q == (torch.bfloat16 if group else keys) else torch.float32


def choose_tiles(
    T: int, H: int, dim: int, width: int, dtype: torch.dtype, hopper: bool, capability: tuple[int, int], processors: int
) -> Tiles:
    """The fastest cut measured on an H200 for ``T`` queries of ``H`` heads over up to ``width`` keys.

    Depends on shapes alone, so that a captured graph serves any lengths. ``hopper``: the Gluon kernel takes it.
    """
    small = H > 16 and T * _cdiv(H, 16) * _cdiv(width, 64) <= 80
    if dtype == torch.float32:
        tiles = Tiles(16, 16, 4, 1)
    elif capability[0] != 9:
        tiles = Tiles(16, 32, 4, 2) if H <= 16 or dim > 512 else Tiles(32, 32, 8, 2)
    elif hopper and not small:
        tiles = Tiles(64, 64, 8, 1, hopper=True)
    elif dim > 512:
        tiles = Tiles(16, 32, 8, 1) if H <= 16 else Tiles(64, 64, 8, 1, 128)
    elif T == 1 and width <= 128:
        tiles = Tiles(16, 16, 4, 1, 128)
    elif T == 1 and small and width <= 640:
        tiles = Tiles(16, 32, 8, 1, 128)
    elif small:
        tiles = Tiles(16, 64, 8, 2, 128)
    else:
        tiles = Tiles(16, 64, 4, 2) if H <= 16 else Tiles(64, 64, 8, 2, 128)
    blocks = _cdiv(width, tiles.keys)
    room = (2 if tiles.heads < 64 else 1) * processors // (T * _cdiv(H, tiles.heads))
    splits = max(1, min(blocks, room, 130))
    return replace(tiles, splits=_cdiv(blocks, _cdiv(blocks, splits)))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
