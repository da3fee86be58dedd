"""Arguments and results of the index builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class IndexRows(NamedTuple):
    """Rows of indices: int32 ``[T, K]``, -1 for unused columns, and int32 ``[T]``, the leading columns that count."""

    indices: Tensor
    lens: Tensor


class DecodeRows(NamedTuple):
    """Rows of a decode step, equally many of each request.

    Attributes:
        positions: int64 ``[T]``; is_valid: bool ``[T]``, false for padding.
        prefix_lens, seq_lens: int32 ``[B]``, lengths of the requests before and after the step.
    """

    positions: Tensor
    is_valid: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor


class EntryCounts(NamedTuple):
    """Numbers of entries that each token sees, int64 ``[T]``, and that it reads after a selection, int32 ``[T]``."""

    visible: Tensor
    selected: Tensor


@dataclass(frozen=True)
class EntryGroup:
    """Compressed entries of one ratio, as a step indexes them.

    Attributes:
        ratio: tokens per entry.
        block_table: ``[B, pages]`` page ids; block_size: entries per page.
        width: columns of the rows of all closed entries; 0 where no layer reads every entry.
    """

    ratio: int
    block_table: Tensor
    block_size: int
    width: int


@dataclass(frozen=True)
class StepIndices:
    """Index tensors of a step of ``T`` tokens, the first ``Dt`` of them of decode requests.

    Attributes:
        slot_mapping: int64 ``[T]`` slot of each token, -1 for padding.
        swa: slots ``[Dt, window]`` of the window of decode tokens: positions ``max(pos - window + 1, 0) .. pos``,
            ascending, then -1; None for a model without a window.
        compressed_slots: by ratio, int64 ``[T]`` slot of the entry ``pos // ratio`` that a token completes, or -1.
        entries: by ratio with a width, slots ``[Dt, width]`` of the entries ``0 .. (pos + 1) // ratio - 1``, then -1.
        prefill_entries: by ratio with a width, int32 ``[T - Dt, width]``: the same entries, local to the request; empty
            for a decode step.
    """

    slot_mapping: Tensor
    swa: IndexRows | None
    compressed_slots: dict[int, Tensor]
    entries: dict[int, IndexRows]
    prefill_entries: dict[int, Tensor]
