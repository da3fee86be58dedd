"""Records: how one cache entry is laid out in bytes, and how entries are written to and read from a paged pool.

A pool is a uint8 tensor ``[num_pages, page_bytes]``. Its last dimension is contiguous; its page stride is free, so a
pool may be a slice of a larger allocation that interleaves the pages of several layers. A page of ``n`` entries is
page-separated: for each part of the record, ``n`` rows of that part, one after the other, then padding. A slot is
``page * n + offset``; a negative slot means "none". Addresses are computed in int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.reference.quant import (
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    encode_e8m0,
    quantize_fp4,
    quantize_fp8,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PAGE_ALIGN = 576  # bytes; FlashMLA's tensor maps address pools as rows of 576 bytes


class Record(ABC):
    """One entry format. Subclasses say which parts an entry has and how values become bytes and back.

    Attributes:
        name: name of the format.
        dim: values per entry.
        row_bytes: bytes per entry of each part, in the order of the parts in a page.
        page_align: page sizes are rounded up to a multiple of this many bytes.
    """

    name: str
    dim: int
    page_align: int = 1

    @property
    @abstractmethod
    def row_bytes(self) -> tuple[int, ...]: ...

    @abstractmethod
    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """``[T, dim]`` values to the bytes of each part, uint8 ``[T, row_bytes[i]]``."""

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The inverse of ``encode``: ``[T, dim]`` of ``dtype``, which may share the memory of ``parts``."""

    @property
    def entry_bytes(self) -> int:
        """Content bytes of one entry, page padding excluded."""
        return sum(self.row_bytes)

    def page_bytes(self, n: int) -> int:
        """Bytes of a page of ``n`` entries, padding included."""
        if n < 1:
            raise ValueError(f"a page holds at least one entry, got n = {n}")
        return _round_up(n * self.entry_bytes, self.page_align)

    def allocate(self, num_pages: int, n: int, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed pool, uint8 ``[num_pages, page_bytes(n)]``."""
        if num_pages < 1:
            raise ValueError(f"a pool holds at least one page, got num_pages = {num_pages}")
        return torch.zeros(num_pages, self.page_bytes(n), dtype=torch.uint8, device=device)

    def insert(self, pool: Tensor, n: int, slots: Tensor, rows: Tensor) -> None:
        """Encodes ``rows`` and writes them at ``slots``; nothing else in the pool changes.

        Args:
            pool: uint8 ``[num_pages, >= page_bytes(n)]``.
            n: entries per page.
            slots: int64 or int32 ``[T]``, distinct where not negative. Rows of negative slots are not written.
            rows: ``[T, dim]`` float32, bfloat16 or float16.

        Raises:
            ValueError: a shape, dtype or stride that does not fit and, on the CPU, a slot past the end of the pool.

        Notes:
            Never waits for a GPU: there a skipped row becomes a copy of a written one instead of being masked out.
        """
        self._check_pool(pool, n)
        self._check_rows(slots, rows)
        if not slots.numel():
            return
        slots = _checked_slots(slots, pool.shape[0] * n)
        written = slots >= 0
        if slots.device.type == "cpu":
            if not written.all():
                slots, rows = slots[written], rows[written]
            page, offset = _page_offset(slots, n)
            for view, part in zip(self._views(pool, n), self.encode(rows), strict=True):
                _store(view, page, offset, part)
            return
        first = written.int().argmax()
        source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), first)
        page, offset = _page_offset(slots[source], n)
        for view, part in zip(self._views(pool, n), self.encode(rows), strict=True):
            # With no row to write at all, every row becomes what slot 0 already holds.
            content = torch.where(written.any(), part[source], view[:1, 0])
            _store(view, page, offset, content)

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Reads and decodes entries.

        Args:
            pool: uint8 ``[num_pages, >= page_bytes(n)]``.
            n: entries per page.
            slots: int64 or int32, any shape. Negative slots give zeros, whatever the pool holds.
            dtype: float32, bfloat16 or float16.

        Returns:
            ``[*slots.shape, dim]`` of ``dtype``. bfloat16 is exact for every quantised format.

        Raises:
            ValueError: a shape, dtype or stride that does not fit and, on the CPU, a slot past the end of the pool.
        """
        self._check_pool(pool, n)
        if dtype not in _FLOATS:
            raise ValueError(f"entries are read as float32, bfloat16 or float16, not {dtype}")
        flat = _checked_slots(slots, pool.shape[0] * n).reshape(-1)
        page, offset = _page_offset(flat, n)
        parts = tuple(_load(view, page, offset) for view in self._views(pool, n))
        out = self.decode(parts, dtype).masked_fill_((flat < 0).unsqueeze(-1), 0)
        return out.view(*slots.shape, self.dim)

    def describe(self, n: int = 64) -> str:
        """One line for people: the format, its parts and the size of a page of ``n`` entries."""
        parts = " + ".join(str(b) for b in self.row_bytes)
        padding = self.page_bytes(n) - n * self.entry_bytes
        page = f"page of {n} entries {self.page_bytes(n)} B ({padding} B padding)"
        return f"{self.name}: {self.dim} values in {self.entry_bytes} B ({parts}), {page}"

    def _views(self, pool: Tensor, n: int) -> list[Tensor]:
        """One uint8 view ``[num_pages, n, row_bytes]`` per part, on the pool's own memory."""
        views, start = [], 0
        for width in self.row_bytes:
            views.append(pool[:, start : start + n * width].unflatten(1, (n, width)))
            start += n * width
        return views

    def _check_pool(self, pool: Tensor, n: int) -> None:
        need = self.page_bytes(n)
        if pool.dtype != torch.uint8 or pool.dim() != 2:
            raise ValueError(f"a pool is uint8 [num_pages, page_bytes], got {pool.dtype} {list(pool.shape)}")
        if pool.shape[0] < 1 or pool.shape[1] < need:
            needs = f"a {self.name} pool with {n} entries per page needs at least one page of {need} bytes"
            raise ValueError(f"{needs}, got {list(pool.shape)}")
        if pool.stride(1) != 1 or (pool.shape[0] > 1 and pool.stride(0) < need):
            wanted = f"bytes of a page must be contiguous and pages at least {need} bytes apart"
            raise ValueError(f"pool strides {pool.stride()} are not supported: {wanted}")

    def _check_rows(self, slots: Tensor, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != self.dim or rows.dtype not in _FLOATS:
            wanted = f"[T, {self.dim}] float32, bfloat16 or float16"
            raise ValueError(f"{self.name} rows must be {wanted}, got {list(rows.shape)} {rows.dtype}")
        if tuple(slots.shape) != (rows.shape[0],):
            raise ValueError(f"one slot per row: got slots {list(slots.shape)} for {rows.shape[0]} rows")


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
        if self.dim < 1 or self.dtype not in _FLOATS:
            raise ValueError(
                f"plain records hold at least one float32, bfloat16 or float16, got dim {self.dim} of {self.dtype}"
            )

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim * self.dtype.itemsize,)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (_bytes(rows.to(self.dtype)),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].contiguous().view(self.dtype).to(dtype)

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if pool.shape[1] != n * self.entry_bytes or not pool.is_contiguous() or dtype not in _FLOATS:
            return super().gather(pool, n, slots, dtype)
        # pages without gaps are one table of rows
        flat = _checked_slots(slots, pool.shape[0] * n).reshape(-1)
        rows = pool.view(self.dtype).view(-1, self.dim).index_select(0, flat.clamp_min(0)).to(dtype)
        return rows.masked_fill_((flat < 0).unsqueeze(-1), 0).view(*slots.shape, self.dim)


@dataclass(frozen=True)
class Fp8DsMlaRecord(Record):
    """FlashMLA's V4 record ``fp8_ds_mla``: e4m3 values, a scale per 64, rope values in bf16. 584 bytes for 448 + 64.

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
    name = "fp8_ds_mla"

    def __post_init__(self):
        if self.nope_dim < 64 or self.nope_dim % 64 or self.rope_dim < 0:
            got = f"nope_dim {self.nope_dim}, rope_dim {self.rope_dim}"
            raise ValueError(f"fp8_ds_mla needs nope_dim a positive multiple of 64 and rope_dim >= 0, got {got}")

    @property
    def dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.nope_dim + 2 * self.rope_dim, _round_up(self.nope_dim // 64, 8))

    @property
    def page_align(self) -> int:
        return self.row_bytes[0]

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        rows = rows.to(torch.bfloat16)
        q, scale = quantize_fp8(rows[:, : self.nope_dim], 64)
        data = torch.cat((_bytes(q), _bytes(rows[:, self.nope_dim :])), dim=1)
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
        return _bytes(q), _bytes(scale)

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
    raise ValueError(f"unknown KV record {kind!r}: supported are plain, fp8_ds_mla")


def make_index_record(kind: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> Record:
    """Record of an index key: ``"plain"`` rows of ``dtype``, ``"fp8"`` or ``"fp4"`` (``dtype`` unused)."""
    if kind == "plain":
        return PlainRecord(dim, dtype)
    if kind == "fp8":
        return IndexFp8Record(dim)
    if kind == "fp4":
        return IndexFp4Record(dim)
    raise ValueError(f"unknown index record {kind!r}: supported are plain, fp8, fp4")


def _page_offset(slots: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each slot; negative slots become slot 0, whose content the caller discards."""
    slots = slots.clamp_min(0)
    page = slots // n
    return page, slots - page * n


def _checked_slots(slots: Tensor, capacity: int) -> Tensor:
    if slots.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slots are int64 or int32, got {slots.dtype}")
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= capacity:
        raise ValueError(f"slot {int(slots.max())} is past the end of the pool, which holds {capacity} entries")
    return slots.to(torch.int64)


def _load(view: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """Rows ``[T, width]`` of a byte view. Reading 8 bytes at a time is 12 times faster on a CPU than single bytes."""
    wide = _widest(view)
    return view.view(wide)[page, offset].view(torch.uint8)


def _store(view: Tensor, page: Tensor, offset: Tensor, content: Tensor) -> None:
    wide = _widest(view, content)
    view.view(wide)[page, offset] = content.view(wide)


def _widest(*tensors: Tensor) -> torch.dtype:
    """The widest integer dtype as which all of these byte tensors can be viewed."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if all(
            t.shape[-1] % size == 0
            and t.storage_offset() % size == 0
            and t.data_ptr() % size == 0
            and all(stride % size == 0 for stride in t.stride()[:-1])
            for t in tensors
        ):
            return dtype
    return torch.uint8


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
