"""Triton device code of `gather`: entries of cache pages decoded into contiguous rows, a few rows a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.attention.types import EntryLayout
from deepseek_attn.kernels.common.fp8_triton import decode_e2m1, decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops_triton import round_to


class GatherRows(NamedTuple):
    """Workspace that is written: ``[b, M, dim]`` rows with these strides, in elements."""

    out: Any
    stride_request: Any
    stride_row: Any


class GatherPool(NamedTuple):
    """Pages that are read, ``page_stride`` bytes from one to the next."""

    pool: Any
    page_stride: Any


@dataclass(frozen=True)
class EntryShape:
    """Cache entries that are decoded.

    Attributes:
        LAYOUT: of an entry. Quantised values are e4m3. Groups of 128 have float32 scales after the values of the
            entry, smaller groups e8m0 scales after the entries of the page. Groups of 16: e2m1 with e4m3 scales.
        DIM: channels of an entry; RAW_DTYPE: of the unquantised ones.
        NATIVE_FP8: the GPU has instructions that convert e4m3; ROWS: rows per program.
    """

    LAYOUT: EntryLayout
    DIM: int
    RAW_DTYPE: tl.dtype
    NATIVE_FP8: bool
    ROWS: int


@triton.jit
def _copy_rows(slot, out_row, wanted, pages, SHAPE: tl.constexpr):
    """Decodes entry ``slot[r]`` to the row at ``out_row[r]`` where ``wanted[r]``; zeros for slots < 0."""
    R: tl.constexpr = slot.shape[0]
    N: tl.constexpr = SHAPE.LAYOUT.entries
    GROUP: tl.constexpr = SHAPE.LAYOUT.group
    CODED: tl.constexpr = SHAPE.LAYOUT.nope if GROUP > 0 else 0  # quantised channels, before unquantised ones
    RAW: tl.constexpr = SHAPE.DIM - CODED
    RAW_DTYPE: tl.constexpr = SHAPE.RAW_DTYPE
    ENTRY: tl.constexpr = SHAPE.LAYOUT.row if GROUP > 0 else RAW * (RAW_DTYPE.primitive_bitwidth // 8)
    DTYPE: tl.constexpr = out_row.dtype.element_ty
    # tile widths of the two parts; RAW_BLOCK is 0 if one tile holds both
    CODED_BLOCK: tl.constexpr = max(GROUP, triton.next_power_of_2(CODED))
    RAW_BLOCK: tl.constexpr = 0 if GROUP > 0 and SHAPE.DIM <= CODED_BLOCK else triton.next_power_of_2(RAW)
    live = wanted & (slot >= 0)
    page = pages.pool + (slot // N) * pages.page_stride
    row = page + (slot % N) * ENTRY
    raw = (row + SHAPE.LAYOUT.rope).to(tl.pointer_type(RAW_DTYPE))
    if CODED:
        # quantised values, with a scale per group
        channel = tl.arange(0, CODED_BLOCK)
        group = tl.arange(0, CODED_BLOCK // GROUP)
        known = live[:, None] & (group < CODED // GROUP)[None, :]
        if GROUP == 128:  # float32 scales behind a key's values; smaller groups have theirs behind the page's entries
            scales = (row + CODED).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales[:, None] + group[None, :], mask=known, other=0)
        else:
            SCALES: tl.constexpr = (CODED // GROUP + 7) // 8 * 8 if GROUP == 64 else CODED // GROUP
            scales = page + N * ENTRY + (slot % N) * SCALES
            byte = tl.load(scales[:, None] + group[None, :], mask=known, other=127)
            scale = decode_e4m3(byte, SHAPE.NATIVE_FP8, tl.float32) if GROUP == 16 else decode_e8m0(byte)
        inside = (channel < CODED)[None, :]
        if GROUP == 16:
            pair = tl.arange(0, CODED_BLOCK // 2)
            code = tl.load(row[:, None] + pair[None, :], mask=live[:, None] & (pair < CODED // 2)[None, :], other=0)
            value = decode_e2m1(code)
        else:
            code = tl.load(row[:, None] + channel[None, :], mask=live[:, None] & inside, other=0)
            value = decode_e4m3(code, SHAPE.NATIVE_FP8, tl.float32)
        value = tl.reshape(value, (R, CODED_BLOCK // GROUP, GROUP)) * scale[:, :, None]
        value = tl.reshape(value, (R, CODED_BLOCK))
        if RAW_BLOCK == 0 and RAW:  # both parts fit in one tile, and are stored together
            rest = ((channel >= CODED) & (channel < CODED + RAW))[None, :]
            kept = tl.load(raw[:, None] + (channel - CODED)[None, :], mask=live[:, None] & rest, other=0)
            value = tl.where(rest, kept.to(tl.float32), value)
            inside = inside | rest
        # slots without an entry give zeros
        value = round_to(tl.where(live[:, None], value, 0.0), DTYPE).to(DTYPE)
        tl.store(out_row[:, None] + channel[None, :], value, mask=wanted[:, None] & inside)
    # unquantised values in a tile of their own
    if RAW_BLOCK:
        channel = tl.arange(0, RAW_BLOCK)
        inside = (channel < RAW)[None, :]
        value = tl.load(raw[:, None] + channel[None, :], mask=live[:, None] & inside, other=0).to(tl.float32)
        value = round_to(value, DTYPE).to(DTYPE)
        tl.store(out_row[:, None] + (CODED + channel)[None, :], value, mask=wanted[:, None] & inside)


@triton.jit
def _page_slots(request, position, wanted, table_ptr, table_stride, pages, N: tl.constexpr):
    """Slots of the entries at ``position`` of ``request``; -1 where the block table has no page."""
    block = position // N
    at = table_ptr + request * table_stride + block
    page = tl.load(at, mask=wanted & (block < pages), other=-1).to(tl.int64)
    return tl.where(page >= 0, page * N + position % N, -1)


@triton.jit(do_not_specialize=["max_rows", "pages", "table_stride", "seq_lens_ptr", "gather_lens_ptr", "table_ptr"])
def gather_kernel(
    rows, pool, seq_lens_ptr, gather_lens_ptr, table_ptr, max_rows, pages, table_stride, SHAPE: tl.constexpr
):  # fmt: skip
    """Decodes ``SHAPE.ROWS`` entries of request ``program 1`` into rows from ``program 0 * SHAPE.ROWS`` on.

    Args:
        rows, pool: `GatherRows` and `GatherPool`.
        seq_lens_ptr, gather_lens_ptr: ``[b]`` entries of a request, and how many of the last are copied; None: all.
        table_ptr: ``[b, pages]`` page ids with ``table_stride`` between rows; max_rows: of a request in ``rows``.
    """
    r = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + r).to(tl.int64)
    length = seq_len
    if gather_lens_ptr is not None:
        length = tl.load(gather_lens_ptr + r).to(tl.int64)
    first = tl.program_id(0) * SHAPE.ROWS
    if first < length:  # the grid is for the longest request
        row = first + tl.arange(0, SHAPE.ROWS)
        wanted = (row < length) & (row < max_rows)
        slot = _page_slots(r, seq_len - length + row, wanted, table_ptr, table_stride, pages, SHAPE.LAYOUT.entries)
        out_row = rows.out + r * rows.stride_request + row.to(tl.int64) * rows.stride_row
        _copy_rows(slot, out_row, wanted, pool, SHAPE)
