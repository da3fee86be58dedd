"""Copies cached entries out of pages into a contiguous workspace."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block


class GathersRows(Protocol):
    """A byte layout that can be read by slot; slots < 0 give zeros and read nothing."""

    def gather(self, pool: Tensor, n: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns ``[..., dim]`` rows at int64 ``slots [...]`` of a pool with ``n`` entries per page."""


def dequantize_and_gather_k_cache(
    out: Tensor,
    record: GathersRows,
    pool: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Writes the last ``gather_lens[r]`` entries of each request to ``out[r, offset:]``, in order.

    Args:
        out: ``[b, M, dim]`` workspace; rows that are not written keep what they held.
        record: byte layout of the pool.
        pool: ``[pages, ...]`` cache pages, as ``record`` wants them.
        seq_lens: ``[b]`` entries (not tokens) of each request.
        gather_lens: ``[b]`` entries to copy, or None for all of them.
        block_table: ``[b, pages]`` page ids.
        block_size: entries per page.
        offset: first row written in each request's part of the workspace.

    Raises:
        ValueError: shapes disagree, more is asked for than a request has, or the workspace or table is too short.

    Notes:
        The lengths are read on the host, once per call.
    """
    b, M, dim = out.shape
    lens = seq_lens if gather_lens is None else gather_lens
    if seq_lens.shape != (b,) or lens.shape != (b,) or block_table.dim() != 2 or block_table.shape[0] != b:
        raise ValueError(
            f"out has {b} requests: got seq_lens {tuple(seq_lens.shape)}, gather_lens {tuple(lens.shape)}, "
            f"block_table {tuple(block_table.shape)}"
        )
    seq_list, len_list = seq_lens.tolist(), lens.tolist()
    _check_lengths(seq_list, len_list, M - offset, block_table.shape[1] * block_size)
    per_block = rows_per_block(dim * 16)
    for r, (seq_len, length) in enumerate(zip(seq_list, len_list, strict=True)):
        for start, end in row_blocks(length, per_block):
            pos = torch.arange(seq_len - length + start, seq_len - length + end, device=out.device)
            slots = block_table[r, pos // block_size].long() * block_size + pos % block_size
            out[r, offset + start : offset + end] = record.gather(pool, block_size, slots, out.dtype)


def _check_lengths(seq_lens: list[int], gather_lens: list[int], room: int, table_entries: int) -> None:
    for r, (seq_len, length) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        if not 0 <= length <= seq_len:
            raise ValueError(f"request {r}: cannot gather {length} of {seq_len} entries")
        if length > room:
            raise ValueError(f"request {r}: {length} entries do not fit in {room} workspace rows")
        if seq_len > table_entries and length > 0:
            raise ValueError(f"request {r}: {seq_len} entries, but its block table covers {table_entries}")
