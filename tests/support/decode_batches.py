"""Batches of decode steps from positions."""

from __future__ import annotations

import torch

from deepseek_attn.attention.decode_builder import DecodeBatch, RowOwners
from deepseek_attn.kernels.indices import DecodeRows


def decode_batch(
    positions: torch.Tensor, valid: torch.Tensor, tables: dict[str, torch.Tensor], max_len: int
) -> DecodeBatch:
    """A batch with as many requests as the tables have rows, and equally many rows of each."""
    requests = len(next(iter(tables.values())))
    by_request = positions.view(requests, -1)
    rows = DecodeRows(positions, valid, by_request[:, 0].int(), (by_request[:, -1] + 1).int())
    return DecodeBatch(rows, RowOwners.create(requests, by_request.shape[1], positions.device), tables, max_len)
