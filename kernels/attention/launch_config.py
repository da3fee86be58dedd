"""Launch configurations of `sparse_attention`: kernel, tile sizes, warps and split-K."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.invariance import planned_rows

ROWS_HOPPER_HEADS = 64
MIN_ROWS_HOPPER_HEADS = 17
"""A program of `attend_rows_hopper_kernel` computes 64 heads, however few there are."""


@dataclass(frozen=True)
class LaunchConfig:
    """Configuration of a launch of `attend_kernel`, `attend_hopper_kernel` or `attend_v32_hopper_kernel`.

    Attributes:
        heads, keys: of a tile; warps, stages: of a program; piece: channels of a piece.
        splits: programs among which a query's keys are split (split-K).
        hopper: launch ``attend_hopper_kernel`` or ``attend_v32_hopper_kernel``, whose tiles are 64 heads and 64 keys.
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
    """Dtype of the factors of products. float16 holds e4m3 times a power of two, and bf16 near 1, exactly.

    Args:
        keys: of the pool; group: quantised channels that share a scale, 0 for none. With a group, ``keys`` is unused.
    """
    if group == 64:
        return torch.float32 if q == torch.float32 else torch.float16
    return q if q == (torch.bfloat16 if group else keys) else torch.float32


def choose_config(
    T: int, H: int, dim: int, width: int, dtype: torch.dtype, hopper: bool, gpu: GPU, from_heads: bool = False
) -> LaunchConfig:
    """The fastest configuration measured on an H200 for ``T`` queries of ``H`` heads over up to ``width`` keys.

    Depends on shapes alone, so that a captured graph serves any lengths. ``hopper``: a kernel for Hopper supports the
    record and dtype. ``from_heads``: for `attend_heads`.
    """
    small = H > 16 and T * _cdiv(H, 16) * _cdiv(width, 64) <= 80
    if dtype == torch.float32:
        config = LaunchConfig(16, 16, 4, 1)
    elif gpu.capability[0] != 9:
        config = LaunchConfig(16, 32, 4, 2) if H <= 16 or dim > 512 else LaunchConfig(32, 32, 8, 2)
    elif hopper and dim > 512:
        # at 1 query of 16 heads 9.7 us instead of 10.2; at 4 queries 13.2 instead of 12.1
        one = T == 1 and H <= 16
        config = LaunchConfig(16, 32, 4, 2, 128) if one else LaunchConfig(64, 64, 8, 1, hopper=True)
    elif hopper and not small:
        config = LaunchConfig(64, 64, 8, 1, hopper=True)
    elif dim > 512:
        config = LaunchConfig(16, 32, 8, 1) if H <= 16 else LaunchConfig(64, 64, 8, 1, 128)
    elif T == 1 and width <= 192:
        config = LaunchConfig(16, 16, 4, 2, 128)
    elif T == 1 and small and width <= 640:
        config = LaunchConfig(16, 32, 8, 1, 128)
    elif small:
        config = LaunchConfig(16, 64, 8, 2, 128)
    else:
        config = LaunchConfig(16, 64, 4, 2) if H <= 16 else LaunchConfig(64, 64, 8, 2, 128)
    blocks = _cdiv(width, config.keys)
    tiles = T * _cdiv(H, config.heads)
    splits = max(1, min(blocks, (2 if config.heads < 64 else 1) * gpu.multiprocessors // tiles, 130))
    blocks_of_split = _cdiv(blocks, splits)
    # two blocks take less time than another launch, which combines splits; from heads on, that launch also rotates and
    # quantises, which a program of this one does more slowly than many of that one
    alone = (3 if H <= 64 else 2) if from_heads else 6
    if config.hopper and alone * tiles >= gpu.multiprocessors and blocks - blocks_of_split <= 2:
        return config
    return replace(config, splits=_cdiv(blocks, blocks_of_split))


def supports_rows_hopper(q: Tensor, kv: Tensor, indices: Tensor, d_v: int, gpu: GPU) -> bool:
    """Whether `attend_rows_hopper_kernel` supports these arguments of `sparse_attention` and is the faster one.

    It needs Hopper's instructions, 16-bit rows of the queries' dtype that the compiler knows to be aligned, and enough
    queries to fill the GPU: it does not split a query's keys.
    """
    T, H, dim = q.shape
    return (
        gpu.capability == (9, 0)
        and H >= MIN_ROWS_HOPPER_HEADS
        and rows_hopper_jobs(planned_rows(T), H) >= gpu.multiprocessors // 2
        and q.dtype == kv.dtype
        and q.element_size() == 2
        and d_v == dim
        and dim in (128, 256, 512)
        and kv.numel() > 0
        and indices.shape[1] > 0
        and _aligned(q, q.stride(0), q.stride(1))
        and q.stride(2) == 1
        and _aligned(kv, kv.stride(0))
    )


def rows_hopper_jobs(T: int, H: int) -> int:
    """Jobs of the persistent `attend_rows_hopper_kernel`: blocks of 64 heads of a query."""
    return T * _cdiv(H, ROWS_HOPPER_HEADS)


def _aligned(rows: Tensor, *strides: int) -> bool:
    """Whether the compiler sees that rows can be copied 16 bytes at a time."""
    return rows.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
