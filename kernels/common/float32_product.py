"""Products of rows with a weight in true float32, on bfloat16 tensor cores; other ops call it.

A float32 weight is the sum of three bfloat16 values, exactly, and products of bfloat16 are exact in float32. A
bfloat16 weight is one of them: a third of the work, and the same sums but for their rounding. Split-K: the kernel that
uses the product adds the partial sums (`summed`), in an order that does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.device import supports_pdl
from deepseek_attn.kernels.common.invariance import batch_invariant

GROUPS = 8  # of splits; the partial sums of a group are added first, then those of four groups
MANY = 512  # rows from which a program computes a whole group, or four of them, of a product with hundreds of columns
ENOUGH_TILES = 100  # of a bfloat16 weight, for programs that compute four groups


@dataclass(frozen=True)
class PartialSums:
    """A product as partial sums over splits of the channels.

    Attributes:
        sums: float32 ``[splits, T, columns]``; inner: consecutive splits that are added before the others.
    """

    sums: Tensor
    inner: int


@triton.jit
def _split_float32(w):
    """(first, second, third) bfloat16 values that add up to float32 ``w``."""
    first = w.to(tl.bfloat16)
    rest = w - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_weight_kernel(w_ptr, terms_ptr, size, PAIRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Writes the three bfloat16 values of each of ``size`` float32 to ``terms [3, size]``; see `split_weight`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first, second, third = _split_float32(tl.load(w_ptr + at, mask=at < size, other=0))
    if PAIRED:
        at = at // 32 * 32 + at // 2 % 4 * 8 + at // 8 % 4 * 2 + at % 2
    tl.store(terms_ptr + at, first, mask=at < size)
    tl.store(terms_ptr + size + at, second, mask=at < size)
    tl.store(terms_ptr + 2 * size + at, third, mask=at < size)


@triton.jit(do_not_specialize=["T"])
def product_kernel(
    x_ptr,
    weight_ptr,
    sums_ptr,
    T,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    INNER: tl.constexpr,
    GROUPS: tl.constexpr,
    PRESPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums over ``GROUPS`` groups of ``INNER`` splits of ``SPLIT`` channels; in column ``N``, if any, of squares of x.

    ``PRESPLIT``: the weight is bfloat16 ``[3, N, K]``.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(2)
    w_row = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
    x_row = x_ptr + tl.minimum(token, T - 1).to(tl.int64) * x_stride
    if PDL:
        gdc_wait()
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
        if x.dtype == tl.bfloat16 and weight_ptr.dtype.element_ty == tl.bfloat16 and not PRESPLIT:
            acc += tl.dot(x, tl.trans(first))
        elif x.dtype == tl.bfloat16:
            product = tl.dot(x, tl.trans(third))
            product = tl.dot(x, tl.trans(second), product)
            acc += tl.dot(x, tl.trans(first), product)
        else:
            acc += tl.dot(x.to(tl.float32), tl.trans(first.to(tl.float32)), input_precision="ieee")
        if COLUMNS > N:
            squares += x.to(tl.float32) * x.to(tl.float32)
        if GROUPS * INNER > 1 and (start + BLOCK_K) % SPLIT == 0:
            group += acc
            acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        if GROUPS > 1 and (start + BLOCK_K) % (INNER * SPLIT) == 0:
            total += group
            group = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    total += group + acc
    row = sums_ptr + (split * T + token).to(tl.int64) * COLUMNS
    tl.store(row[:, None] + column[None, :], total, mask=(token < T)[:, None] & (column < N)[None, :])
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


def float32_product(x: Tensor, weight: Tensor, split: int, squares: bool = False, many: int = MANY) -> PartialSums:
    """``x weight^T`` of ``x [T, K]`` with contiguous rows and a contiguous ``weight [N, K]``, float32 or bfloat16.

    Args:
        split: channels per partial sum, a multiple of 64.
        squares: add a column, the sum of squares of x.
        many: rows from which a program adds up a group of splits or more.
    """
    (T, K), N, pdl = x.shape, len(weight), supports_pdl(x.device)
    grouped, bfloat16 = many <= T and not batch_invariant(), x.dtype == torch.bfloat16
    one_term = weight.dtype == torch.bfloat16
    presplit = grouped and bfloat16 and not one_term
    block_t, block_n, stages, warps = _tiles(T, N, bfloat16, one_term, grouped)
    splits = triton.cdiv(K, split)
    inner = triton.cdiv(splits, GROUPS)
    groups = 1
    if grouped and one_term and triton.cdiv(T, block_t) * triton.cdiv(N, block_n) >= ENOUGH_TILES:
        groups = 4
    program_splits = groups * inner if grouped else 1
    columns = N + squares
    sums = torch.empty(triton.cdiv(splits, program_splits), T, columns, dtype=torch.float32, device=x.device)
    if T == 0:
        return PartialSums(sums, 1 if grouped else inner)
    if presplit:
        weight = split_weight(weight)
    product_kernel[(triton.cdiv(N, block_n), triton.cdiv(T, block_t), len(sums))](
        x,
        weight,
        sums,
        T,
        x.stride(0),
        N=N,
        K=K,
        COLUMNS=columns,
        SPLIT=split,
        INNER=inner if grouped else 1,
        GROUPS=groups,
        PRESPLIT=presplit,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=64 if bfloat16 else 32,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return PartialSums(sums, 1 if grouped else inner)


def split_weight(weight: Tensor, paired: bool = False) -> Tensor:
    """A contiguous float32 weight ``[N, K]`` as bfloat16 ``[3, N, K]`` that adds up to it, the largest first.

    ``paired``: of each 32 channels, the first two of every eight come first, then the next two of every eight, and so
    on: the order in which a thread of a tensor core has eight consecutive ones in its left factor.

    Raises:
        ValueError: ``paired`` with K that is no multiple of 32.
    """
    if paired and weight.shape[1] % 32:
        raise ValueError(f"paired channels are reordered within groups of 32, and the weight has {weight.shape[1]}")
    terms, pdl = torch.empty(3, *weight.shape, dtype=torch.bfloat16, device=weight.device), supports_pdl(weight.device)
    split_weight_kernel[(triton.cdiv(weight.numel(), 1024),)](
        weight,
        terms,
        weight.numel(),
        PAIRED=paired,
        BLOCK=1024,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=pdl,
    )
    return terms


def _tiles(T: int, N: int, bfloat16: bool, one_term: bool, grouped: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a program's tile, its stages and warps.

    The fastest measured on an H200. From 64 rows on Triton takes the tensor cores' instructions for a warpgroup: 128
    rows times 16,384 channels of 25 columns take 5.7 us instead of 17.

    Args:
        bfloat16: rows are; one_term: the weight is.
        grouped: a program adds up groups of splits.
    """
    if not bfloat16:
        return 16 if T <= 16 and not batch_invariant() else 32, 32, 3, 4
    if grouped and one_term and N > 64:
        return (64 if T < 2 * MANY else 128), 64, 4, 4
    if grouped and N > 64:  # wide tiles read less shared memory: 63 us instead of 76 at 4096 x 4096 x 256
        return 128, 128, 3, 8
    if grouped:
        return 128, 32 if N <= 32 else 64, 3, 4
    few = 64 if one_term else 16
    if batch_invariant() or few < T:
        return 64, 32, 3, 4
    return 16 if T <= 16 else 32, 32, 3, 4
