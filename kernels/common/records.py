"""Cache records as kernels see them: byte layout and a check of pools."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CacheRecord(Protocol):
    """Byte layout of one cache entry; `deepseek_attn.cache.record.Record` and its subclasses are such."""

    @property
    def name(self) -> str:
        """``plain``, ``fp8_v4``, ``fp8_v32``, ``fp8_v41``, ``fp4_v41``, ``index_fp8`` or ``index_fp4``."""
        ...

    @property
    def dim(self) -> int:
        """Channels of an entry."""
        ...

    @property
    def nope_dim(self) -> int:
        """Quantised channels of a key, which come first; 0 for other records."""
        ...

    @property
    def rope_dim(self) -> int:
        """Rotated channels of a key, in bfloat16 behind the quantised ones; 0 for other records."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the values of a ``plain`` record."""
        ...

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry in each part of a page."""
        ...

    @property
    def entry_bytes(self) -> int:
        """The sum of ``row_bytes``."""
        ...

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """``[..., dim]`` values at int64 ``slots [...]`` of a pool with ``n`` entries per page; zeros for slots < 0."""
        ...

    def insert(self, pool: Tensor, n: int, slots: Tensor, rows: Tensor) -> None:
        """Writes ``rows [T, dim]`` at int64 ``slots [T]``; slots < 0 are skipped."""
        ...


def check_pool(record: CacheRecord, pool: Tensor, entries: int, unit: int) -> None:
    """Checks that ``pool`` holds pages of ``entries`` of this record, which start at multiples of ``unit`` bytes.

    Raises:
        ValueError: it does not.
    """
    need = entries * record.entry_bytes
    if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or pool.shape[1] < need:
        raise ValueError(
            f"a pool of {entries} entries per page must be uint8 [pages, at least {need}] with contiguous pages, got "
            f"{tuple(pool.shape)} {pool.dtype}, strides {pool.stride()}"
        )
    if pool.stride(0) % unit or pool.data_ptr() % unit:
        raise ValueError(
            f"pages of {record.name} must start at multiples of {unit} bytes, got a page stride of {pool.stride(0)} "
            f"and an address of {pool.data_ptr()}"
        )
