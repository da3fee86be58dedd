"""How prefill requests share the BF16 workspace."""

from __future__ import annotations

import torch

WORKSPACE_REQUESTS = 5


def get_prefill_workspace_size(max_model_len: int) -> int:
    """Rows of the prefill workspace: five requests of full length (944 MB at 163840 tokens and 576 bf16 values)."""
    return WORKSPACE_REQUESTS * max_model_len


def split_prefill_chunks(seq_lens: torch.Tensor, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Groups consecutive requests, as many as fit, whose tokens together fit in the workspace.

    Args:
        seq_lens: integer ``[R]`` on the CPU, context and new tokens of each request.
        workspace_size: rows of the workspace.
        request_offset: added to both ends of every range.

    Returns:
        ``(first, last)`` ranges, ``last`` exclusive. ``[10, 15, 20, 5]`` in 30 rows gives ``[(0, 2), (2, 4)]``.

    Raises:
        ValueError: a request alone is longer than the workspace.
    """
    chunks: list[tuple[int, int]] = []
    first, used = 0, 0
    lengths = seq_lens.tolist()
    for index, length in enumerate(lengths):
        if length > workspace_size:
            raise ValueError(
                f"request {index} has {length} tokens and the prefill workspace {workspace_size} rows: "
                "raise prefill_workspace_rows or max_model_len"
            )
        if used + length > workspace_size:
            chunks.append((first + request_offset, index + request_offset))
            first, used = index, 0
        used += length
    if lengths:
        chunks.append((first + request_offset, len(lengths) + request_offset))
    return chunks


def chunk_workspace_starts(seq_lens: torch.Tensor, chunks: list[tuple[int, int]]) -> torch.Tensor:
    """First workspace row of each request, counted from its chunk's start: int32 ``[R]``.

    ``[10, 15, 20, 5]`` in the chunks above starts at ``[0, 10, 0, 20]``.
    """
    lengths = seq_lens.long()
    starts = lengths.cumsum(0) - lengths
    for first, last in chunks:
        starts[first:last] -= starts[first].clone()
    return starts.int()
