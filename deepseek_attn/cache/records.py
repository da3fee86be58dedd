"""Formats of cache entries: plain, V4's FP8 K = V, FP8 and FP4 index keys. `records_v32` has V3.2's latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record, as_bytes, check_largest, checked_slots, own_record, round_up
from deepseek_attn.kernels.common.blocks import value_range
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.quant import (
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    encode_e8m0,
    quantize_fp4,
    quantize_fp8,
)
from deepseek_attn.utils.tape import recording

_PAGE_ALIGN = 576  # bytes; FlashMLA's tensor maps address pools as rows of 576 bytes


@dataclass(frozen=True)
class PlainRecord(Record):
    """``dim`` values of ``dtype``, unquantised. Page: ``n * dim`` values, no padding.

    ========================  =================
    bytes of a page           content
    ========================  =================
    ``i * dim * itemsize``    entry i
    ========================  =================
    """

    dim: int
    dtype: torch.dtype = torch.bfloat16
    name = "plain"

    def __post_init__(self):
        if self.dim < 1 or self.dtype not in FLOATS:
            raise ValueError(
                f"plain records hold at least one float32, bfloat16 or float16, got dim {self.dim} of {self.dtype}"
            )

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim * self.dtype.itemsize,)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (as_bytes(rows.to(self.dtype)),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].contiguous().view(self.dtype).to(dtype)

    def insert(self, pool: Tensor, n: int, slots: Tensor, rows: Tensor) -> None:
        table = self._table(pool, n)
        if table is None or slots.device.type != "cpu":
            return super().insert(pool, n, slots, rows)
        self._check_rows(slots, rows)
        least, most = (0, -1) if recording() else value_range(slots)
        check_largest(most, table.shape[0])
        if least < 0:
            written = slots >= 0
            slots, rows = slots[written], rows[written]
        table.index_copy_(0, slots.to(torch.int64), rows.to(self.dtype))

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        table = self._table(pool, n)
        if table is None or dtype not in FLOATS:
            return super().gather(pool, n, slots, dtype)
        flat = slots.reshape(-1)
        if flat.device.type == "cpu":
            least, most = value_range(flat)
            check_largest(most, table.shape[0])
            if least >= 0:
                return table.index_select(0, flat).to(dtype).view(*slots.shape, self.dim)
        flat = checked_slots(flat, table.shape[0])
        rows = table.index_select(0, flat.clamp_min(0)).to(dtype)
        return rows.masked_fill_((flat < 0).unsqueeze(-1), 0).view(*slots.shape, self.dim)

    def reader(self, pool: Tensor, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        table = self._table(pool, n)
        return super().reader(pool, n, dtype) if table is None else lambda slots: table.index_select(0, slots).to(dtype)

    def _table(self, pool: Tensor, n: int) -> Tensor | None:
        """Pages without gaps as one table of rows ``[entries, dim]``; None for others, and without pages."""
        aligned = pool.storage_offset() % self.dtype.itemsize == 0
        if not len(pool) or pool.shape[1] != n * self.entry_bytes or not aligned or not pool.is_contiguous():
            return None
        return pool.view(self.dtype).view(-1, self.dim)


@dataclass(frozen=True)
class Fp8DsMlaRecord(Record):
    """FlashMLA's V4 record, ``fp8_v4``: e4m3 values, a scale per 64, rope values in bf16. 584 bytes for 448 + 64.

    ===========================================  ====================================================
    bytes of a page (448 + 64)                   content
    ===========================================  ====================================================
    ``i * 576 + 0 .. 447``                       entry i: 448 e4m3 values
    ``i * 576 + 448 .. 575``                     entry i: 64 bf16 rope values, not quantised
    ``n * 576 + i * 8 + 0 .. 6``                 entry i: e8m0 byte of values ``64 j .. 64 j + 63``
    ``n * 576 + i * 8 + 7``                      written 0
    ``n * 584 ..`` up to a multiple of 576       padding, never touched
    ===========================================  ====================================================

    In general a data row is ``nope_dim + 2 * rope_dim`` bytes, a scale row ``nope_dim / 64`` bytes rounded up to 8, and
    a page is rounded up to whole data rows. Rows are rounded to bf16 first. A scale is
    ``2**ceil(log2(max(amax, 1e-4) / 448))``: the smallest byte is 105. bf16 holds every decoded value exactly.
    """

    nope_dim: int = 448
    rope_dim: int = 64
    name = "fp8_v4"

    def __post_init__(self):
        if self.nope_dim < 64 or self.nope_dim % 64 or self.rope_dim < 0:
            got = f"nope_dim {self.nope_dim}, rope_dim {self.rope_dim}"
            raise ValueError(f"fp8_ds_mla needs nope_dim a positive multiple of 64 and rope_dim >= 0, got {got}")

    @property
    def dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.nope_dim + 2 * self.rope_dim, round_up(self.nope_dim // 64, 8))

    @property
    def page_align(self) -> int:
        return self.row_bytes[0]

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        rows = rows.to(torch.bfloat16)
        q, scale = quantize_fp8(rows[:, : self.nope_dim], 64)
        data = torch.cat((as_bytes(q), as_bytes(rows[:, self.nope_dim :])), dim=1)
        scales = data.new_zeros(rows.shape[0], self.row_bytes[1])
        scales[:, : scale.shape[1]] = encode_e8m0(scale)
        return data, scales

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        data, scales = parts
        q = data[:, : self.nope_dim].view(torch.float8_e4m3fn)
        out = torch.empty(data.shape[0], self.dim, dtype=dtype, device=data.device)
        out[:, : self.nope_dim] = dequantize_fp8(q, scales[:, : self.nope_dim // 64], 64)
        out[:, self.nope_dim :] = data[:, self.nope_dim :].contiguous().view(torch.bfloat16)
        return out


@dataclass(frozen=True)
class IndexFp8Record(Record):
    """Index key in e4m3 with one float32 scale, a power of two: 132 bytes for 128 values.

    ========================================  =========================================
    bytes of a page (dim 128)                 content
    ========================================  =========================================
    ``i * 128 .. i * 128 + 127``              entry i: 128 e4m3 values
    ``n * 128 + i * 4 .. + 3``                entry i: scale, float32 little endian
    ``n * 132 ..`` up to a multiple of 576    padding, never touched
    ========================================  =========================================

    Rows are rounded to bf16 first. The scale is ``2**ceil(log2(max(amax, 1e-4) / 448))`` over all values of the key.
    """

    dim: int = 128
    name = "index_fp8"
    page_align = _PAGE_ALIGN

    def __post_init__(self):
        if self.dim < 4 or self.dim % 4:
            raise ValueError(f"index_fp8 needs a dim that is a positive multiple of 4, got {self.dim}")

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim, 4)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        q, scale = quantize_fp8(rows.to(torch.bfloat16), self.dim)
        return as_bytes(q), as_bytes(scale)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        values, scales = parts
        scale = scales.contiguous().view(torch.float32)
        return dequantize_fp8(values.view(torch.float8_e4m3fn), scale, self.dim).to(dtype)


@dataclass(frozen=True)
class IndexFp4Record(Record):
    """Index key in e2m1 with an e8m0 scale per 32 values (MXFP4): 68 bytes for 128 values.

    ========================================  ==========================================================
    bytes of a page (dim 128)                 content
    ========================================  ==========================================================
    ``i * 64 .. i * 64 + 63``                 entry i: 128 e2m1 values, the even one in the low nibble
    ``n * 64 + i * 4 + g``                    entry i: e8m0 byte of values ``32 g .. 32 g + 31``
    ``n * 68 ..`` up to a multiple of 576     padding, never touched
    ========================================  ==========================================================

    Rows are rounded to bf16 first. A scale is ``2**ceil(log2(max(amax, 6 * 2**-126) / 6))``.
    """

    dim: int = 128
    name = "index_fp4"
    page_align = _PAGE_ALIGN

    def __post_init__(self):
        if self.dim < 32 or self.dim % 32:
            raise ValueError(f"index_fp4 needs a dim that is a positive multiple of 32, got {self.dim}")

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim // 2, self.dim // 32)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        packed, scale = quantize_fp4(rows.to(torch.bfloat16))
        return packed, encode_e8m0(scale)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return dequantize_fp4(parts[0], decode_e8m0(parts[1])).to(dtype)


def make_kv_record(kind: str, nope_dim: int, rope_dim: int, dtype: torch.dtype = torch.bfloat16) -> Record:
    """Record of a KV entry: ``"plain"`` rows of ``dtype`` or ``"fp8_ds_mla"`` (``dtype`` unused)."""
    if kind == "plain":
        return PlainRecord(nope_dim + rope_dim, dtype)
    if kind == "fp8_ds_mla":
        return Fp8DsMlaRecord(nope_dim, rope_dim)
    return own_record(kind, nope_dim, rope_dim, dtype, f"unknown KV record {kind!r}: supported are plain, fp8_ds_mla")


def make_index_record(kind: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> Record:
    """Record of an index key: ``"plain"`` rows of ``dtype``, ``"fp8"`` or ``"fp4"`` (``dtype`` unused)."""
    if kind == "plain":
        return PlainRecord(dim, dtype)
    if kind == "fp8":
        return IndexFp8Record(dim)
    if kind == "fp4":
        return IndexFp4Record(dim)
    return own_record(kind, dim, 0, dtype, f"unknown index record {kind!r}: supported are plain, fp8, fp4")
