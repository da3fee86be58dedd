"""Argument types of the attention ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepseek_attn.kernels.common.records import CacheRecord


class PagedKeys(NamedTuple):
    """Keys that each of ``T`` queries reads from one pool of cache pages.

    Attributes:
        record: byte layout of an entry: ``plain``, ``fp8_v4`` or ``fp8_v32``.
        pool: uint8 ``[pages, at least entries * record.entry_bytes]`` with contiguous pages; the page stride is free.
        entries: per page.
        indices: integer ``[T, K]`` slots, ``page * entries + offset``; -1 for none.
        lens: integer ``[T]`` leading columns of ``indices`` that count, or None for all.
    """

    record: CacheRecord
    pool: Tensor
    entries: int
    indices: Tensor
    lens: Tensor | None = None
