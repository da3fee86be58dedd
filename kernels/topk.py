"""Exact top-k of index scores in Triton: each slice of a row to its candidates, and these again, until one is left.

The device code is in `topk_kernels`; this file checks arguments and decides how rows are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.topk_kernels import select_kernel

_MAX_K = 4096


@dataclass(frozen=True)
class Slices:
    """How a launch is cut.

    Attributes:
        size: columns of one program's slice, a power of two up to 32768; twice ``room`` at least if rows are longer.
        groups: that these are in when they are thinned out, a power of two; 0: they are not.
        room: what a slice may leave over, a power of two from k on.
        warps: of a program.
    """

    size: int
    groups: int
    room: int
    warps: int


def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    token_to_req: Tensor | None = None,
    page_entries: int = 0,
    out_slots: Tensor | None = None,
    slices: Slices | None = None,
) -> Tensor:
    """Same as `reference.topk_indices`, for float32 scores on a GPU and ``k`` up to 4096.

    Args:
        slices: how to cut the launch; by default chosen from shapes alone.

    Notes:
        Scores are read once. Scratch is at most two thirds of their size.
    """
    out = _checked(scores, lens, k, out, block_table, token_to_req, page_entries, out_slots)
    T, W = scores.shape
    if out.numel() == 0:
        return out
    slices = choose_slices(W, k) if slices is None else slices
    paged = out_slots is not None
    # a pointer is needed even where a flag says that it is not read
    table, requests, slots = (block_table, token_to_req, out_slots) if paged else (out, lens, out)
    pdl = scores.is_cuda and torch.cuda.get_device_capability(scores.device) >= (9, 0)
    pdl = scores.is_cuda and torch.cuda.get_device_capability(scores.device) >= (9, 0)
    keys = columns = counts = lens
    width, parts_before, level = W, 0, 0
    while True:
        parts = max(1, triton.cdiv(width, slices.size))
        room = slices.room if parts > 1 or slices.groups else 0
        left = torch.empty(2, T, parts, room, dtype=torch.int32, device=scores.device)
        left_counts = torch.empty(T, parts, dtype=torch.int32, device=scores.device)
        select_kernel[(T, parts)](
            scores,
            keys,
            columns,
            counts,
            lens,
            out,
            left[0],
            left[1],
            left_counts,
            table,
            requests,
            slots,
            W,
            parts_before,
            scores.stride(0),
            out.stride(0),
            slots.stride(0),
            table.stride(0),
            K=k,
            LEVEL=level,
            SLICE=slices.size,
            GROUPS=slices.groups,
            SLACK=slices.groups // 8 - k // 8 if slices.groups else 0,
            ROOM=slices.room,
            PAGE=page_entries if paged else 0,
            PDL=pdl,
            num_warps=slices.warps,
            launch_pdl=pdl,
        )
        if parts == 1:
            return out
        (keys, columns), counts = left, left_counts
        width, parts_before, level = parts * slices.room, parts, level + 1


def choose_slices(W: int, k: int) -> Slices:
    """How to cut rows of up to ``W`` columns, measured on an H200.

    k = 512 of so many rows took, in microseconds: 5.4 (1 x 2048), 13 (1 x 32768), 18 (1 x 262144), 28 (8 x 262144), 63
    (256 x 32768). Slices of 16384 took 26 for the last but one and 76 for the last.
    """
    power = triton.next_power_of_2(k)
    room = max(2 * power, 1024)
    if W <= 2048:
        size = max(triton.next_power_of_2(W), 1024)
        return Slices(size, 0, room, size // 256)
    size = max(min(4 * room, 16384), 2 * room)
    groups = room if 4 * room <= size else 0
    return Slices(size, groups, room, min(size // 512, 16))


def _checked(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None,
    block_table: Tensor | None,
    token_to_req: Tensor | None,
    page_entries: int,
    out_slots: Tensor | None,
) -> Tensor:
    if scores.dim() != 2 or scores.dtype != torch.float32 or (scores.stride(1) != 1 and scores.numel()):
        raise ValueError(
            f"scores must be float32 [T, W] with contiguous rows, got {tuple(scores.shape)} {scores.dtype}, "
            f"strides {scores.stride()}"
        )
    T, W = scores.shape
    if lens.shape != (T,) or lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lens must be int32 or int64 [{T}], got {tuple(lens.shape)} {lens.dtype}")
    if not 0 <= k <= _MAX_K:
        raise ValueError(f"k must be in 0 .. {_MAX_K}, got {k}: use reference.topk_indices for more")
    if out is None:
        out = torch.empty(T, k, dtype=torch.int32, device=scores.device)
    for name, rows in (("out", out), ("out_slots", out_slots)):
        if rows is not None and (rows.shape != (T, k) or rows.dtype != torch.int32 or (k > 1 and rows.stride(1) != 1)):
            raise ValueError(
                f"{name} must be int32 [{T}, {k}] with contiguous rows, got {tuple(rows.shape)} {rows.dtype}, "
                f"strides {rows.stride()}"
            )
    if out_slots is not None:
        if block_table is None or token_to_req is None or page_entries < 1:
            raise ValueError("out_slots need a block_table, token_to_req and page_entries")
        if block_table.dim() != 2 or block_table.stride(1) != 1 or block_table.shape[1] * page_entries < W:
            raise ValueError(
                f"block_table must be [B, P] with contiguous rows and pages of {page_entries} for {W} columns, got "
                f"{tuple(block_table.shape)}"
            )
        if token_to_req.shape != (T,):
            raise ValueError(f"token_to_req must be [{T}], got {tuple(token_to_req.shape)}")
    return out
