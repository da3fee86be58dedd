"""Triton kernels of `reference.gather`: cached entries out of pages into a contiguous workspace, decoded on the way.

One program copies a few rows. Lengths are read on the GPU, so that nothing waits and a CUDA graph may hold the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, has_native_fp8
from deepseek_attn.kernels.common.fp8 import decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops import round_to
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

ROWS, WARPS = 4, 2  # of a program: 85 to 92 % of the bandwidth of a copy on an H200


@dataclass(frozen=True)
class EntryShape:
    """Where the parts of an entry are, ``CODED`` e4m3 values with a scale per ``GROUP`` and ``RAW`` other ones.

    Attributes:
        N: entries of a page; ENTRY: bytes from one to the next; RAW_AT: byte from which on the other values are, of
            ``RAW_DTYPE``. A group of 64 has its e8m0 scale behind the entries of the page, one of 128 a float32 behind
            the values.
        DTYPE: of a decoded row; NATIVE_FP8: the GPU converts e4m3 itself.
        CODED_BLOCK, RAW_BLOCK: tiles of either part. Where both fit in the first, the second is 0 and a row is stored
            at once.
    """

    N: int
    ENTRY: int
    CODED: int
    GROUP: int
    RAW_AT: int
    RAW: int
    RAW_DTYPE: Any
    DTYPE: Any
    CODED_BLOCK: int
    RAW_BLOCK: int
    NATIVE_FP8: bool


@triton.jit
def _copy_rows(slot, out_row, wanted, pool_ptr, page_stride, SHAPE: tl.constexpr):
    """Decodes entry ``slot[r]`` into the row that ``out_row[r]`` points at, where ``wanted``; zeros for slots < 0."""
    R: tl.constexpr = slot.shape[0]
    CODED: tl.constexpr = SHAPE.CODED
    GROUP: tl.constexpr = SHAPE.GROUP
    RAW: tl.constexpr = SHAPE.RAW
    RAW_DTYPE: tl.constexpr = SHAPE.RAW_DTYPE
    DTYPE: tl.constexpr = SHAPE.DTYPE
    CODED_BLOCK: tl.constexpr = SHAPE.CODED_BLOCK
    live = wanted & (slot >= 0)
    page = pool_ptr + (slot // SHAPE.N) * page_stride
    row = page + (slot % SHAPE.N) * SHAPE.ENTRY
    raw = (row + SHAPE.RAW_AT).to(tl.pointer_type(RAW_DTYPE))
    if CODED:
        channel = tl.arange(0, CODED_BLOCK)
        group = tl.arange(0, CODED_BLOCK // GROUP)
        known = live[:, None] & (group < CODED // GROUP)[None, :]
        if GROUP == 64:
            scales = page + SHAPE.N * SHAPE.ENTRY + (slot % SHAPE.N) * ((CODED // GROUP + 7) // 8 * 8)
            scale = decode_e8m0(tl.load(scales[:, None] + group[None, :], mask=known, other=127))
        else:
            scales = (row + CODED).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales[:, None] + group[None, :], mask=known, other=0)
        inside = (channel < CODED)[None, :]
        code = tl.load(row[:, None] + channel[None, :], mask=live[:, None] & inside, other=0)
        value = decode_e4m3(code, SHAPE.NATIVE_FP8, tl.float32)
        value = tl.reshape(value, (R, CODED_BLOCK // GROUP, GROUP)) * scale[:, :, None]
        value = tl.reshape(value, (R, CODED_BLOCK))
        if SHAPE.RAW_BLOCK == 0 and RAW:
            rest = ((channel >= CODED) & (channel < CODED + RAW))[None, :]
            kept = tl.load(raw[:, None] + (channel - CODED)[None, :], mask=live[:, None] & rest, other=0)
            value = tl.where(rest, kept.to(tl.float32), value)
            inside = inside | rest
        value = round_to(tl.where(live[:, None], value, 0.0), DTYPE).to(DTYPE)
        tl.store(out_row[:, None] + channel[None, :], value, mask=wanted[:, None] & inside)
    if SHAPE.RAW_BLOCK:
        channel = tl.arange(0, SHAPE.RAW_BLOCK)
        inside = (channel < RAW)[None, :]
        value = tl.load(raw[:, None] + channel[None, :], mask=live[:, None] & inside, other=0).to(tl.float32)
        value = round_to(value, DTYPE).to(DTYPE)
        tl.store(out_row[:, None] + (CODED + channel)[None, :], value, mask=wanted[:, None] & inside)


@triton.jit
def _page_slots(request, position, wanted, table_ptr, table_stride, pages, N: tl.constexpr):
    """Slots of entries ``position`` of ``request``; -1 where the table has no page."""
    block = position // N
    at = table_ptr + request * table_stride + block
    page = tl.load(at, mask=wanted & (block < pages), other=-1).to(tl.int64)
    return tl.where(page >= 0, page * N + position % N, -1)


@triton.jit(do_not_specialize=["room", "pages"])
def _gather_kernel(
    out_ptr,
    pool_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    table_ptr,
    room,
    pages,
    page_stride,
    table_stride,
    out_stride_r,
    out_stride_row,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + r).to(tl.int64)
    length = seq_len
    if gather_lens_ptr is not None:
        length = tl.load(gather_lens_ptr + r).to(tl.int64)
    first = tl.program_id(0) * ROWS
    if first < length:
        row = first + tl.arange(0, ROWS)
        wanted = (row < length) & (row < room)
        slot = _page_slots(r, seq_len - length + row, wanted, table_ptr, table_stride, pages, SHAPE.N)
        out_row = out_ptr + r * out_stride_r + row.to(tl.int64) * out_stride_row
        _copy_rows(slot, out_row, wanted, pool_ptr, page_stride, SHAPE)


@triton.jit(do_not_specialize=["rows", "requests", "pages"])
def _gather_packed_kernel(
    out_ptr,
    pool_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    rows,
    requests,
    pages,
    page_stride,
    table_stride,
    out_stride_row,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, REQUESTS)
    start = tl.load(starts_ptr + each, mask=each < requests, other=2147483647)
    request = tl.maximum(tl.sum((start[None, :] <= row[:, None]).to(tl.int32), 1) - 1, 0)
    position = row - tl.load(starts_ptr + request).to(tl.int64)
    wanted = (row < rows) & (position >= 0) & (position < tl.load(seq_lens_ptr + request))
    slot = _page_slots(request.to(tl.int64), position, wanted, table_ptr, table_stride, pages, SHAPE.N)
    _copy_rows(slot, out_ptr + row * out_stride_row, wanted, pool_ptr, page_stride, SHAPE)


def dequantize_and_gather_k_cache(
    out: Tensor,
    record: Any,
    pool: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Same as `reference.gather.dequantize_and_gather_k_cache`, for plain rows and both FP8 records of keys.

    Raises:
        ValueError: shapes that disagree, or a record or pool that is not supported.

    Notes:
        Lengths are not checked: that would wait for the GPU. What does not fit in the workspace is not copied, and
        entries beyond the block table become zeros.
    """
    b, M, _ = out.shape
    lens = seq_lens if gather_lens is None else gather_lens
    if seq_lens.shape != (b,) or lens.shape != (b,) or block_table.dim() != 2 or block_table.shape[0] != b:
        raise ValueError(
            f"out has {b} requests: got seq_lens {tuple(seq_lens.shape)}, gather_lens {tuple(lens.shape)}, "
            f"block_table {tuple(block_table.shape)}"
        )
    shape = _entry_shape(out, record, pool, block_table, block_size)
    room = M - offset
    if b == 0 or room <= 0:
        return
    _gather_kernel[(triton.cdiv(room, ROWS), b)](
        out[:, offset:],
        pool,
        seq_lens,
        gather_lens,
        block_table,
        room,
        block_table.shape[1],
        pool.stride(0),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        ROWS=ROWS,
        SHAPE=shape,
        num_warps=WARPS,
    )


def gather_packed(
    out: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
) -> None:
    """Reads whole requests: ``out[starts[r] + i]`` becomes entry ``i`` of request ``r``, rounded to ``out.dtype``.

    Args:
        out: ``[rows, dim]``; rows of no request keep what they held.
        block_table: ``[b, pages]``; seq_lens: ``[b]``; starts: int32 ``[b]``, ascending, without overlap.
    """
    b = len(seq_lens)
    if starts.shape != (b,) or block_table.dim() != 2 or block_table.shape[0] != b:
        raise ValueError(f"{b} seq_lens, but starts {tuple(starts.shape)} and block_table {tuple(block_table.shape)}")
    shape = _entry_shape(out, record, pool, block_table, page_entries)
    if b == 0 or out.shape[0] == 0:
        return
    _gather_packed_kernel[(triton.cdiv(out.shape[0], ROWS),)](
        out,
        pool,
        starts,
        seq_lens,
        block_table,
        out.shape[0],
        b,
        block_table.shape[1],
        pool.stride(0),
        block_table.stride(0),
        out.stride(0),
        ROWS=ROWS,
        REQUESTS=triton.next_power_of_2(b),
        SHAPE=shape,
        num_warps=WARPS,
    )


def _entry_shape(out: Tensor, record: Any, pool: Tensor, block_table: Tensor, n: int) -> EntryShape:
    """How `_copy_rows` finds the parts of an entry."""
    if out.dtype not in FLOATS or out.shape[-1] != record.dim or out.stride(-1) != 1 or block_table.stride(1) != 1:
        raise ValueError(
            f"out must have contiguous rows of {record.dim} float32, bfloat16 or float16 values and block_table "
            f"contiguous rows, got {tuple(out.shape)} {out.dtype}, strides {out.stride()} and {block_table.stride()}"
        )
    need = n * record.entry_bytes
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or pool.shape[1] < need:
        raise ValueError(
            f"a pool of {n} entries per page must be uint8 [pages, at least {need}] with contiguous pages, got "
            f"{tuple(pool.shape)} {pool.dtype}, strides {pool.stride()}"
        )
    raw = torch.bfloat16
    if record.name == "plain":
        raw, coded, group, raw_at, entry = record.dtype, 0, 64, 0, record.entry_bytes
    elif record.name == "fp8_v4":
        coded, group, raw_at, entry = record.nope_dim, 64, record.nope_dim, record.row_bytes[0]
    elif record.name == "fp8_v32":
        coded, group, entry = record.latent_dim, 128, record.entry_bytes
        raw_at = coded + coded // group * 4
    else:
        raise ValueError(f"records that are gathered are plain, fp8_v4 and fp8_v32, got {record.name!r}")
    unit = 4 if group == 128 else raw.itemsize
    if pool.stride(0) % unit or pool.data_ptr() % unit:
        raise ValueError(
            f"pages of {record.name} must start at multiples of {unit} bytes, got a page stride of {pool.stride(0)} "
            f"and an address of {pool.data_ptr()}"
        )
    block = max(group, triton.next_power_of_2(max(coded, 1)))
    return EntryShape(
        N=n,
        ENTRY=entry,
        CODED=coded,
        GROUP=group,
        RAW_AT=raw_at,
        RAW=record.dim - coded,
        RAW_DTYPE=TRITON_DTYPES[raw],
        DTYPE=TRITON_DTYPES[out.dtype],
        CODED_BLOCK=block,
        RAW_BLOCK=0 if coded and record.dim <= block else triton.next_power_of_2(record.dim - coded),
        NATIVE_FP8=has_native_fp8(out.device),
    )
