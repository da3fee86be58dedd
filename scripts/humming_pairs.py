"""Helpers of Humming's indexed products, in Triton: pairs sorted by expert, and sums of outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # pairs that a program counts
PLACED = 128  # pairs that a program places


class SortedPairs(NamedTuple):
    """Pairs sorted by expert, each expert's pairs padded to whole blocks of rows: the input of Humming's products.

    Attributes:
        ids: int32, pair numbers ``token * k + i``; the number of pairs where a block is not full.
        experts: int32, one per block.
        num_rows: int32 ``[1]``, rows of all blocks in use.
    """

    ids: Tensor
    experts: Tensor
    num_rows: Tensor


def sort_pairs(experts: Tensor, num_experts: int, block: int) -> SortedPairs:
    """The pairs of ``experts`` int32 ``[T, k]`` in blocks of ``block`` rows."""
    pairs, device = experts.numel(), experts.device
    blocks = min(pairs, pairs // block + num_experts)
    ids = torch.empty(-(-blocks * block // 4) * 4, dtype=torch.int32, device=device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    num_rows = torch.empty(1, dtype=torch.int32, device=device)
    padded, chunks = triton.next_power_of_2(num_experts), triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, padded, dtype=torch.int32, device=device)
    count_kernel[(chunks,)](experts, counts, ids, len(ids), pairs, E=padded, CHUNK=CHUNK, num_warps=4)
    place_kernel[(triton.cdiv(pairs, PLACED),)](
        experts,
        counts,
        ids,
        block_experts,
        num_rows,
        pairs,
        blocks,
        chunks,
        M=block,
        E=padded,
        CHUNKS=min(16, triton.next_power_of_2(chunks)),
        CHUNK=CHUNK,
        PLACED=PLACED,
        num_warps=8,
    )
    return SortedPairs(ids, block_experts, num_rows)


@triton.jit
def count_kernel(experts_ptr, counts_ptr, ids_ptr, slots, pairs, E: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs of each expert in each chunk of pairs, ``[chunks, E]``; fills ``ids`` with the invalid index ``pairs``."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    tl.store(counts_ptr + chunk * E + tl.arange(0, E), tl.histogram(expert, E, mask=pair < pairs))
    for first in range(chunk * CHUNK, slots, tl.num_programs(0) * CHUNK):
        slot = first + tl.arange(0, CHUNK)
        tl.store(ids_ptr + slot, pairs + slot * 0, mask=slot < slots)


@triton.jit
def place_kernel(
    experts_ptr,
    counts_ptr,
    ids_ptr,
    block_experts_ptr,
    num_rows_ptr,
    pairs,
    blocks,
    chunks,
    M: tl.constexpr,
    E: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PLACED: tl.constexpr,
):
    """`SortedPairs` in blocks of ``M``, from the counts of `count_kernel`; ``PLACED`` pairs a program."""
    program = tl.program_id(0)
    first = program * PLACED
    chunk = first // CHUNK
    e = tl.arange(0, E)
    total = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for some in range(0, chunks, CHUNKS):
        row = some + tl.arange(0, CHUNKS)
        part = tl.load(counts_ptr + row[:, None] * E + e[None, :], mask=row[:, None] < chunks, other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(row[:, None] < chunk, part, 0), 0)
    padded = (total + M - 1) // M * M
    end = tl.cumsum(padded, 0)
    pair = first + tl.arange(0, PLACED)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    rank = tl.zeros([PLACED], tl.int32)
    for start in range(chunk * CHUNK, first + PLACED, 64):
        other = start + tl.arange(0, 64)
        others = tl.load(experts_ptr + other, mask=other < pairs, other=-1)
        rank += tl.sum(((others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    tl.store(ids_ptr + tl.gather(end - padded + before, expert, 0) + rank, pair, mask=pair < pairs)
    for start in range(program * 32, blocks, tl.num_programs(0) * 32):
        block = start + tl.arange(0, 32)
        owner = tl.sum((end[None, :] <= block[:, None] * M).to(tl.int32), 1)
        tl.store(block_experts_ptr + block, owner, mask=(block < blocks) & (owner < E))
    if program == 0:
        tl.store(num_rows_ptr, tl.sum(padded, 0))


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Outputs ``[T * k, D]`` of pairs to bfloat16 ``[T, D]``, with 16 warps a token as vLLM's sum."""
    (tokens, k), hidden = weights.shape, outputs.shape[1]
    out = torch.empty(tokens, hidden, dtype=outputs.dtype, device=outputs.device)
    block = max(128, min(triton.next_power_of_2(hidden), 4096))
    weighted_sum_kernel[(tokens,)](outputs, weights, out, D=hidden, K=k, BLOCK=block, num_warps=16, num_stages=3)
    return out


@triton.jit
def weighted_sum_kernel(outputs_ptr, weights_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, D, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(K):
            value = tl.load(outputs_ptr + (token * K + i) * D + channel, mask=channel < D, other=0)
            total += value.to(tl.float32) * tl.load(weights_ptr + token * K + i)
        tl.store(out_ptr + token * D + channel, total.to(out_ptr.dtype.element_ty), mask=channel < D)
