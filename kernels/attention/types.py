"""Argument types of the attention ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deepseek_attn.cache.record import Record


class PagedKeys(NamedTuple):
    """Keys that each of ``T`` queries reads from one pool of cache pages.

    Attributes:
        record: byte layout of an entry: ``plain``, ``fp8_v4``, ``fp8_v32``, ``fp8_v41`` or ``fp4_v41``.
        pool: uint8 ``[pages, at least entries * record.entry_bytes]`` with contiguous pages; the page stride is free.
        entries: per page.
        indices: integer ``[T, K]`` slots, ``page * entries + offset``; -1 for none.
        lens: integer ``[T]`` leading columns of ``indices`` that count, or None for all.
    """

    record: Record
    pool: Tensor
    entries: int
    indices: Tensor
    lens: Tensor | None = None


class RequestEntries(NamedTuple):
    """Entries of ``b`` requests in the pages of a pool.

    Attributes:
        record, pool: byte layout and pages, as in `PagedKeys`; entries: per page.
        block_table: int32 ``[b, pages]`` page ids; a negative page gives zeros.
        seq_lens: int ``[b]`` entries (not tokens) of each request.
        gather_lens: int ``[b]``, the last entries that are copied, or None for all.
    """

    record: Record
    pool: Tensor
    entries: int
    block_table: Tensor
    seq_lens: Tensor
    gather_lens: Tensor | None


@dataclass(frozen=True)
class EntryLayout:
    """Where the channels of an entry are; a constant of the kernels.

    Attributes:
        entries: per page, 1 for rows of one tensor.
        nope: channels before the rotated ones, or all of them.
        row: from one entry to the next, in elements of the pool; rope: where the rotated channels begin.
        group: quantised channels that share a scale, 0 if none is quantised.
    """

    entries: int
    nope: int
    row: int
    rope: int = 0
    group: int = 0


@dataclass(frozen=True)
class AttendedKeys:
    """Checked keys of one pool.

    Attributes:
        layout: of an entry.
        pool: elements of the keys' dtype, or bytes; a page, or a row of a tensor, along the first dimension.
        limit: entries in the pool; indices, lens: as in `PagedKeys`, rows and lengths contiguous.
    """

    layout: EntryLayout
    pool: Tensor
    limit: int
    indices: Tensor
    lens: Tensor | None
