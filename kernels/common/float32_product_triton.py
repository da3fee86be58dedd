"""Triton device code of float32 products on bfloat16 tensor cores, and of the sum of their partial sums.

A float32 weight is exactly the sum of three bfloat16 values, and products of bfloat16 are exact in float32. A bfloat16
weight has one such term: a third of the work, and the same sums except for their rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.float32_product_plan import Float32ProductTiles


class ProductArguments(NamedTuple):
    """Runtime arguments of `float32_product_kernel`.

    Attributes:
        x: ``[T, K]`` with contiguous rows, ``x_stride`` elements apart.
        weight: ``[N, K]``, or its terms bfloat16 ``[3, N, K]``.
        sums: float32 ``[partials, T, COLUMNS]``.
    """

    x: Any
    weight: Any
    sums: Any
    x_stride: Any


@dataclass(frozen=True)
class ProductConfig:
    """Constants of `float32_product_kernel`.

    Attributes:
        N, K: rows and channels of the weight; COLUMNS: of the sums, ``N``, or ``N + 1`` with the sum of squares of x.
        SPLIT: channels of a split; a program adds up ``GROUPS`` groups of ``INNER`` splits.
        PRESPLIT: the weight comes as three terms.
        TILES: `Float32ProductTiles`.
    """

    N: int
    K: int
    COLUMNS: int
    SPLIT: int
    INNER: int
    GROUPS: int
    PRESPLIT: bool
    TILES: Float32ProductTiles


@triton.jit
def _split_float32(w):
    """(first, second, third) bfloat16 values that add up to float32 ``w``."""
    first = w.to(tl.bfloat16)
    rest = w - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_float32_weight_kernel(w_ptr, terms_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Writes the three bfloat16 values of each of ``size`` float32 to ``terms [3, size]``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()  # the memory of the terms may still be read by the previous kernel
        gdc_launch_dependents()
    first, second, third = _split_float32(tl.load(w_ptr + at, mask=at < size, other=0))
    tl.store(terms_ptr + at, first, mask=at < size)
    tl.store(terms_ptr + size + at, second, mask=at < size)
    tl.store(terms_ptr + 2 * size + at, third, mask=at < size)


@triton.jit(do_not_specialize=["T"])
def float32_product_kernel(arguments, T, CONFIG: tl.constexpr, PDL: tl.constexpr):
    """Program ``(column block, row block, partial)``: products with the weight; in column ``N``, if any, squares of x.

    ``INNER`` consecutive splits are summed to a group, ``GROUPS`` consecutive groups to a partial sum.
    """
    N: tl.constexpr = CONFIG.N
    K: tl.constexpr = CONFIG.K
    COLUMNS: tl.constexpr = CONFIG.COLUMNS
    SPLIT: tl.constexpr = CONFIG.SPLIT
    INNER: tl.constexpr = CONFIG.INNER
    GROUPS: tl.constexpr = CONFIG.GROUPS
    PRESPLIT: tl.constexpr = CONFIG.PRESPLIT
    BLOCK_T: tl.constexpr = CONFIG.TILES.rows
    BLOCK_N: tl.constexpr = CONFIG.TILES.columns
    BLOCK_K: tl.constexpr = 64 if arguments.x.dtype.element_ty == tl.bfloat16 else 32
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(2)
    # rows beyond the last one read the last one: loads need no mask along rows, the stores have one
    w_row = arguments.weight + tl.minimum(column, N - 1).to(tl.int64) * K
    x_row = arguments.x + tl.minimum(token, T - 1).to(tl.int64) * arguments.x_stride
    if PDL:
        gdc_wait()  # until x, and the terms of the weight if there are any, have been written
        gdc_launch_dependents()
    begin = split * GROUPS * INNER * SPLIT
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    group = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + GROUPS * INNER * SPLIT, K), BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        inside = (channel < K)[None, :]
        x = tl.load(x_row[:, None] + channel[None, :], mask=inside, other=0)
        if PRESPLIT:
            third = tl.load(w_row[:, None] + (2 * N * K + channel)[None, :], mask=inside, other=0)
            second = tl.load(w_row[:, None] + (N * K + channel)[None, :], mask=inside, other=0)
            first = tl.load(w_row[:, None] + channel[None, :], mask=inside, other=0)
        else:
            first = tl.load(w_row[:, None] + channel[None, :], mask=inside, other=0)
            if x.dtype == tl.bfloat16 and first.dtype == tl.float32:
                first, second, third = _split_float32(first)
        if x.dtype == tl.bfloat16 and arguments.weight.dtype.element_ty == tl.bfloat16 and not PRESPLIT:
            acc += tl.dot(x, tl.trans(first))
        elif x.dtype == tl.bfloat16:
            # the smallest term first, so that its bits are not lost in the sum of the larger terms
            product = tl.dot(x, tl.trans(third))
            product = tl.dot(x, tl.trans(second), product)
            acc += tl.dot(x, tl.trans(first), product)
        else:
            acc += tl.dot(x.to(tl.float32), tl.trans(first.to(tl.float32)), input_precision="ieee")
        if COLUMNS > N:
            squares += x.to(tl.float32) * x.to(tl.float32)
        # end of a split: its sum is added to its group's, in the order in which `summed` adds stored splits
        if GROUPS * INNER > 1 and (start + BLOCK_K) % SPLIT == 0:
            group += acc
            acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        # end of a group
        if GROUPS > 1 and (start + BLOCK_K) % (INNER * SPLIT) == 0:
            total += group
            group = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    total += group + acc  # a last split or group that is not full
    row = arguments.sums + (split * T + token).to(tl.int64) * COLUMNS
    tl.store(row[:, None] + column[None, :], total, mask=(token < T)[:, None] & (column < N)[None, :])
    # every column block has all squares of its rows: the first one stores them
    if COLUMNS > N and tl.program_id(0) == 0:
        tl.store(row + N, tl.sum(squares, 1), mask=token < T)


@triton.jit
def summed(sums_ptr, at, stride, SPLITS: tl.constexpr, INNER: tl.constexpr):
    """Adds the entries ``at`` of ``SPLITS`` partial sums, ``stride`` apart: each ``INNER`` first, then four of them."""
    total = tl.zeros(at.shape, tl.float32)
    for start in tl.static_range(0, SPLITS, 4 * INNER):
        four = tl.zeros(at.shape, tl.float32)
        for first in tl.static_range(start, min(start + 4 * INNER, SPLITS), INNER):
            group = tl.load(sums_ptr + first * stride + at)
            for split in tl.static_range(first + 1, min(first + INNER, SPLITS)):
                group += tl.load(sums_ptr + split * stride + at)
            four += group
        total += four
    return total
