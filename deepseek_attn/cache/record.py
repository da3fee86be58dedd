"""Cache records: entries written to and read from a paged pool of bytes, whatever their format.

A pool is a uint8 tensor ``[num_pages, page_bytes]``. Its last dimension is contiguous; its page stride is free, so a
pool may be a slice of a larger allocation that interleaves the pages of several layers. A page of ``n`` entries is
page-separated: for each part of the record, ``n`` consecutive rows of that part, then padding. A slot is
``page * n + offset``; a negative slot is empty. Addresses are computed in int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import value_range
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.utils.registry import Registry
from deepseek_attn.utils.tape import recording

RECORD_KINDS = ("plain", "fp8_ds_mla", "fp8_fp4", "fp8", "fp4", "fp8_v4", "fp8_v32", "fp8_v41", "fp4_v41")
"""Names of the package's own records, for keys and index keys; names that only `Numerics` uses included."""


class Record(ABC):
    """One entry format. Subclasses define the parts of an entry, and convert values to bytes and back.

    A record from outside the package is made by ``cls(nope_dim, rope_dim, dtype)``: of a key with so many channels that
    are not rotated and that are, and of the model's dtype; of an index key ``rope_dim`` is 0. See `register_record`.

    Attributes:
        name: name of the format.
        dim: values per entry.
        nope_dim, rope_dim: of FP8 keys: quantised values, which come first, and rotated ones, in bfloat16.
        dtype: of values that are stored as they are.
        row_bytes: bytes per entry of each part, in the order of the parts in a page.
        page_align: page sizes are rounded up to a multiple of this many bytes.
    """

    name: str
    dim: int
    nope_dim: int = 0
    rope_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
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
        return round_up(n * self.entry_bytes, self.page_align)

    def allocate(self, num_pages: int, n: int, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed pool, uint8 ``[num_pages, page_bytes(n)]``."""
        if num_pages < 1:
            raise ValueError(f"a pool holds at least one page, got num_pages = {num_pages}")
        return torch.zeros(num_pages, self.page_bytes(n), dtype=torch.uint8, device=device)

    def insert(self, pool: Tensor, n: int, slots: Tensor, rows: Tensor) -> None:
        """Encodes ``rows`` and writes them at ``slots``; nothing else in the pool changes.

        Args:
            pool: uint8 ``[num_pages, >= n * entry_bytes]``.
            n: entries per page.
            slots: int64 or int32 ``[T]``, distinct where not negative. Rows of negative slots are not written.
            rows: ``[T, dim]`` float32, bfloat16 or float16.

        Raises:
            ValueError: a shape, dtype or stride that does not fit and, on the CPU, a slot past the end of the pool.

        Notes:
            Never waits for a GPU: there a skipped row becomes a copy of a written one instead of being masked out.
        """
        self.check_pool(pool, n, pages=1)
        self._check_rows(slots, rows)
        if not slots.numel():
            return
        slots = checked_slots(slots, pool.shape[0] * n)
        written = slots >= 0
        if slots.device.type == "cpu":
            if not recording() and not written.all():
                slots, rows = slots[written], rows[written]
            page, offset = _page_offset(slots, n)
            for view, part in zip(self._views(pool, n), self.encode(rows), strict=True):
                _store(view, page, offset, part)
            return
        first = written.int().argmax()
        source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), first)
        page, offset = _page_offset(slots[source], n)
        for view, part in zip(self._views(pool, n), self.encode(rows), strict=True):
            # With no row to write at all, every row becomes the present content of slot 0.
            content = torch.where(written.any(), part[source], view[:1, 0])
            _store(view, page, offset, content)

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Reads and decodes entries.

        Args:
            pool: uint8 ``[num_pages, >= n * entry_bytes]``.
            n: entries per page.
            slots: int64 or int32, any shape. Negative slots give zeros, whatever the pool holds.
            dtype: float32, bfloat16 or float16.

        Returns:
            ``[*slots.shape, dim]`` of ``dtype``. bfloat16 is exact for every quantised format.

        Raises:
            ValueError: a shape, dtype or stride that does not fit and, on the CPU, a slot past the end of the pool.
        """
        self.check_pool(pool, n, pages=1)
        if dtype not in FLOATS:
            raise ValueError(f"entries are read as float32, bfloat16 or float16, not {dtype}")
        flat = checked_slots(slots, pool.shape[0] * n).reshape(-1)
        page, offset = _page_offset(flat, n)
        parts = tuple(_load(view, page, offset) for view in self._views(pool, n))
        out = self.decode(parts, dtype).masked_fill_((flat < 0).unsqueeze(-1), 0)
        return out.view(*slots.shape, self.dim)

    def reader(self, pool: Tensor, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """`gather` as a function of slots ``[T]`` that are known to be in the pool."""
        return lambda slots: self.gather(pool, n, slots, dtype)

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

    def check_pool(self, pool: Tensor, n: int, unit: int = 1, pages: int = 0) -> None:
        """Raises ValueError unless a pool has ``pages`` of ``n`` entries or more, at multiples of ``unit`` bytes."""
        need = n * self.entry_bytes  # nothing touches padding, which a pool of another library may not have
        if pool.dtype != torch.uint8 or pool.dim() != 2:
            raise ValueError(f"a pool is uint8 [num_pages, page_bytes], got {pool.dtype} {list(pool.shape)}")
        if pool.shape[0] < pages or pool.shape[1] < need:
            least = "at least one page" if pages == 1 else "pages"
            needs = f"a {self.name} pool with {n} entries per page needs {least} of {need} bytes"
            raise ValueError(f"{needs}, got {list(pool.shape)}")
        if pool.stride(1) != 1 or (pool.shape[0] > 1 and pool.stride(0) < need):
            wanted = f"bytes of a page must be contiguous and pages at least {need} bytes apart"
            raise ValueError(f"pool strides {pool.stride()} are not supported: {wanted}")
        if pool.stride(0) % unit or pool.data_ptr() % unit:
            start = f"a page stride of {pool.stride(0)} and an address of {pool.data_ptr()}"
            raise ValueError(f"pages of {self.name} must start at multiples of {unit} bytes, got {start}")

    def _check_rows(self, slots: Tensor, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != self.dim or rows.dtype not in FLOATS:
            wanted = f"[T, {self.dim}] float32, bfloat16 or float16"
            raise ValueError(f"{self.name} rows must be {wanted}, got {list(rows.shape)} {rows.dtype}")
        if tuple(slots.shape) != (rows.shape[0],):
            raise ValueError(f"one slot per row: got slots {list(slots.shape)} for {rows.shape[0]} rows")


def _record_problems(cls: type[Record]) -> list[str]:
    """Problems of a record class from outside the package, other than missing methods and a missing name."""
    try:
        record = _make(cls, 64, 64, torch.float32)
    except Exception as error:
        return [f"must be made by cls(nope_dim, rope_dim, dtype), and cls(64, 64, torch.float32) raises {error!r}"]
    if getattr(record, "dim", None) != 128:
        return [f"must have dim = nope_dim + rope_dim, and has {getattr(record, 'dim', None)!r} of 64 + 64"]
    try:
        parts = record.encode(torch.ones(3, 128, dtype=torch.float32, device="cpu"))
        shapes = [(part.dtype, tuple(part.shape)) for part in parts]
        back = record.decode(parts, torch.float32)
    except Exception as error:
        return [f"encode of ones [3, 128] and decode of the result raise {error!r}"]
    wanted = [(torch.uint8, (3, width)) for width in record.row_bytes]
    if shapes != wanted:
        return [f"encode of ones [3, 128] gives {shapes}, and row_bytes {record.row_bytes} ask for {wanted}"]
    if back.shape != (3, 128) or back.dtype != torch.float32:
        return [f"decode must give float32 [3, 128] back, and gives {back.dtype} {list(back.shape)}"]
    return []


OWN_RECORDS = Registry("a cache record", Record, RECORD_KINDS, _record_problems)


def register_record(cls: type[Record]) -> type[Record]:
    """Makes a record from outside the package known by its ``name``, for ``Numerics.kv_record`` and ``index_record``.

    Without it, ``module:Class`` names the class. Plain torch reads and writes such records: on a GPU with
    ``backend="reference"``. An impl whose backend lists the name in ``supported_kv_records`` reads them as well.

    Raises:
        ValueError: with everything that the class lacks.
    """
    return OWN_RECORDS.register(cls)


def own_record(kind: str, nope_dim: int, rope_dim: int, dtype: torch.dtype, supported: str) -> Record:
    """The record from outside the package that ``kind`` names, for keys of these channels.

    Raises:
        ValueError: no such record; ``supported`` begins the message.
    """
    cls = OWN_RECORDS.find(kind)
    if cls is None:
        raise ValueError(f"{supported}, a registered record, or module:Class")
    return _make(cls, nope_dim, rope_dim, dtype)


def _make(cls: Any, nope_dim: int, rope_dim: int, dtype: torch.dtype) -> Record:
    """A record from outside the package; the package's own classes have other arguments."""
    return cls(nope_dim, rope_dim, dtype)


def _page_offset(slots: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each slot; negative slots become slot 0, whose content the caller discards."""
    slots = slots.clamp_min(0)
    page = slots // n
    return page, slots - page * n


def checked_slots(slots: Tensor, capacity: int) -> Tensor:
    """``slots`` as int64; ValueError for another dtype and, on the CPU, for a slot that is not below ``capacity``."""
    if slots.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slots are int64 or int32, got {slots.dtype}")
    if slots.device.type == "cpu" and not recording():
        check_largest(value_range(slots)[1], capacity)
    return slots.to(torch.int64)


def check_largest(slot: int, capacity: int) -> None:
    """ValueError for a slot that is not below ``capacity``."""
    if slot >= capacity:
        raise ValueError(f"slot {slot} is past the end of the pool, which holds {capacity} entries")


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


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
