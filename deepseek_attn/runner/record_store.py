"""Records of one sequence as its steps compute them: in memory, or in a file whose size memory does not limit.

Rows are stored by position. So tokens that are computed again, drafts that were rejected and steps that broke off leave
no row behind: the last computation of a position counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from deepseek_attn.runner.token_records import BLOCK_BYTES, RecordOptions, TokenRecords, write_records
from deepseek_attn.utils.files import existing_folder


class RecordStore:
    """Collects the records of a sequence, whose rows arrive step by step.

    Args:
        options: the records to make.
        template: records of zero tokens, with the dtypes and shapes.
        path: a file to write, which appears when the records are complete, and its folder with it; None: they are kept
            in memory.
        discard: keep nothing, where another rank writes the file.

    Attributes:
        records: what `finish` returned.
    """

    def __init__(self, options: RecordOptions, template: TokenRecords, path: Path | None = None, discard: bool = False):
        self.options, self.template, self.path, self._discard = options, template, path, discard
        self.length = 0
        self.records: TokenRecords | None = None
        self._memory = dict(template.arrays)
        self._spool: dict[str, IO[bytes]] = {}

    def put(self, start: int, rows: TokenRecords) -> None:
        """Stores the rows of the tokens from position ``start`` on.

        Raises:
            ValueError: the disk is full, or the folder cannot be written to.
        """
        if start > self.length:
            raise ValueError(f"rows from token {start} on, before rows of tokens {self.length} to {start - 1}")
        for name, array in rows.arrays.items() if not self._discard else ():
            self._put(name, start, array)
        self.length = max(self.length, start + len(rows))

    def finish(self, length: int) -> TokenRecords | None:
        """The first ``length`` rows; a file is written, and its arrays are read when they are used.

        Raises:
            ValueError: the file cannot be written.
        """
        if self._discard:
            return None
        length = min(length, self.length)
        if self.path is None:
            held = {name: array[:length] for name, array in self._memory.items()}
            self.records = replace(self.template, **held)
            return self.records
        shapes = {name: (length, *like.shape[1:]) for name, like in self.template.arrays.items()}
        whole = {name: like.new_empty(shapes[name], device="meta") for name, like in self.template.arrays.items()}
        records = replace(self.template, **whole)
        write_records(self.path, records, lambda name: self._stored(name, whole[name].nbytes), parents=True)
        self.close()
        self.records = TokenRecords.load(self.path)
        return self.records

    def close(self) -> None:
        """Drops records that were not written."""
        for file in self._spool.values():
            file.close()
        self._spool = {}

    def _put(self, name: str, start: int, rows: Tensor) -> None:
        if self.path is None:
            held, needed = self._memory[name], start + len(rows)
            if needed > len(held):  # grows by half, so that rows are copied about twice
                grown = held.new_empty(max(needed, len(held) * 3 // 2), *held.shape[1:])
                grown[:start] = held[:start]
                self._memory[name] = held = grown
            held[start:needed] = rows
            return
        data = rows.contiguous().reshape(-1).view(torch.uint8)
        row_bytes = data.numel() // max(1, len(rows))
        try:
            if name not in self._spool:
                self._spool[name] = tempfile.TemporaryFile(dir=existing_folder(self.path.parent))  # noqa: SIM115
            self._spool[name].seek(start * row_bytes)
            self._spool[name].write(data.numpy().data)
        except OSError as error:
            raise ValueError(f"records cannot be written in {str(self.path.parent)!r}: {error.strerror}") from error

    def _stored(self, name: str, left: int) -> Iterator[Tensor]:
        """The first ``left`` bytes of an array of the file, in blocks."""
        if left:
            self._spool[name].seek(0)
        while left:
            data = self._spool[name].read(min(left, BLOCK_BYTES))
            left -= len(data)
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)
