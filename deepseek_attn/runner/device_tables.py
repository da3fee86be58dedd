"""Block tables on the device, at fixed addresses, where captured decode steps read them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from deepseek_attn.cache.layout import STATE, CacheLayout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.utils.device import to_device


class DeviceTables:
    """Block tables of sequences on the device, one row each; the last row is all null pages, for padding.

    Attributes:
        tables: int32 ``[max_num_seqs + 1, pages]`` by group, pages of the longest sequence.
        null_row: row of padding.
        spans: tokens per page by group, the state group left out.
    """

    def __init__(self, layout: CacheLayout, device: torch.device):
        self.null_row = layout.max_num_seqs
        self.spans = {group: span.page_tokens for group, span in layout.spans.items()}
        widths = {group: -(-layout.max_model_len // span) for group, span in self.spans.items()}
        if STATE in layout.pages:
            widths[STATE] = 1
        self.tables = {
            group: torch.full((self.null_row + 1, width), NULL_PAGE, dtype=torch.int32, device=device)
            for group, width in widths.items()
        }
        self._rows: OrderedDict[int, _Row] = OrderedDict()

    def rows(self, caches: list[SequenceCache]) -> list[int]:
        """Table rows of these sequences, brought up to date. A new sequence takes the least recently used row."""
        for cache in caches:
            if id(cache) in self._rows:
                self._rows.move_to_end(id(cache))
        return [self._row(cache) for cache in caches]

    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())

    def _row(self, cache: SequenceCache) -> int:
        row = self._rows.get(id(cache))
        if row is None:
            if len(self._rows) >= self.null_row:
                self._rows.popitem(last=False)
            taken = {row.number for row in self._rows.values()}
            number = next(number for number in range(self.null_row) if number not in taken)
            row = self._rows[id(cache)] = _Row(number, cache)
        if row.version != cache.version:
            for group, pages in cache.tables.items():
                self._upload(group, row, pages)
            row.version = cache.version
        return row.number

    def _upload(self, group: str, row: _Row, pages: list[int]) -> None:
        """Copies everything from the first page that differs."""
        known = row.pages.get(group, [])
        if known == pages[: len(known)] and len(known) == len(pages):
            return
        first = next((i for i, (a, b) in enumerate(zip(known, pages, strict=False)) if a != b), len(known))
        row.pages[group] = known[:first]  # all that is certain until the copy has been launched
        if first < len(pages):
            table = self.tables[group]
            table[row.number, first : len(pages)] = to_device(pages[first:], table.device, torch.int32)
        row.pages[group] = list(pages)


@dataclass
class _Row:
    """The pages of a sequence that are on the device. Holding the sequence keeps its id from being reused."""

    number: int
    cache: SequenceCache
    version: int = -1
    pages: dict[str, list[int]] = field(default_factory=dict)
