"""From positions within a request to slots of the cache, or to rows of the prefill workspace."""

from __future__ import annotations

import torch
from torch import Tensor


def convert_req_index(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    workspace_request_ids: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    slot_mapping: Tensor | None = None,
) -> Tensor:
    """Slots, int32 ``[T, K]``, of ``token_indices``; -1 where there is none.

    Args:
        req_id: ``[T]`` row of ``block_table`` of each query.
        block_table: ``[B, pages]`` page ids; a negative one means no page.
        token_indices: ``[T, K]`` positions within the request; negative ones are invalid, and so are those beyond the
            block table.
        block_size: entries per page.
        workspace_request_ids: ``[T]`` row of ``workspace_starts`` of each query, or -1 for queries that get slots.
        workspace_starts: ``[R]`` first workspace row of a request: such a query gets ``start + position``.
        slot_mapping: ``[T]``; queries with a negative slot are padding and get -1 everywhere.
    """
    requests, pages = block_table.shape
    token = token_indices.long()
    block = torch.div(token, block_size, rounding_mode="floor")
    valid = (token >= 0) & (block < pages)
    if slot_mapping is not None:
        valid &= (slot_mapping >= 0)[:, None]
    if requests == 0 or pages == 0 or token.numel() == 0:
        return torch.full_like(token_indices, -1, dtype=torch.int32)
    request = req_id.long()[:, None]
    page = block_table[request.clamp(0, requests - 1), block.clamp(0, pages - 1)].long()
    paged = valid & (page >= 0) & (request >= 0) & (request < requests)
    out = torch.where(paged, page * block_size + token % block_size, -1)
    if workspace_request_ids is not None and workspace_starts is not None and workspace_starts.numel():
        prefill = workspace_request_ids.long()
        start = workspace_starts.long()[prefill.clamp(0, workspace_starts.shape[0] - 1)]
        rows = torch.where(valid, start[:, None] + token, -1)
        out = torch.where((prefill >= 0)[:, None], rows, out)
    return out.int()


def compact_valid(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the entries that are not -1 to the front of each row, in their order.

    Args:
        indices: int32 ``[T, K]``.

    Returns:
        ``(indices, counts)``: int32 ``[T, K]`` with a tail of -1, and int32 ``[T]``.
    """
    width = indices.shape[1]
    valid = indices >= 0
    place = valid.long().cumsum(1) - 1
    out = indices.new_full((indices.shape[0], width + 1), -1)
    out.scatter_(1, place.masked_fill(~valid, width), indices)
    return out[:, :width].contiguous(), valid.sum(1, dtype=torch.int32)
