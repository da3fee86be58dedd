"""Exact top-k of index scores in Triton: a sample tells which scores are worth keeping, and these are searched.

The device code is in `topk_kernels`; this file checks arguments and decides how rows are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import gpu, supports_pdl
from deepseek_attn.kernels.indexer.topk_triton import select_kernel

_MAX_K = 4096


@dataclass(frozen=True)
class Cut:
    """How a launch is cut. All but ``registers`` are powers of two.

    Attributes:
        parts: programs that share a row.
        tile: columns that a program reads at a time.
        sample: columns that are read first.
        room: columns that a program may keep, twice k at least. Rows of so many are not sampled.
        warps: of a program, with 4 to 16 columns of ``tile`` and of ``room`` for each thread.
        registers: that a thread may use.
    """

    parts: int
    tile: int
    sample: int
    room: int
    warps: int
    registers: int | None = None


def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    token_to_req: Tensor | None = None,
    page_entries: int = 0,
    out_slots: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """Same as `reference.topk_indices`, for float32 scores on a GPU and ``k`` up to 4096.

    Args:
        cut: how to cut the launch; by default chosen from shapes alone.

    Notes:
        One launch. Scratch of a program is 12 bytes for each of ``room`` columns, and one for each of ``tile``. Rows
        are shared by several programs only where there are few; these use the counters of `counters_of`.
    """
    out = _checked(scores, lens, k, out, block_table, token_to_req, page_entries, out_slots)
    T, W = scores.shape
    if out.numel() == 0:
        return out
    if cut is None:
        cut = choose_cut(T, W, k, gpu(scores.device).multiprocessors)
    paged = out_slots is not None
    # a pointer is needed even where a flag says that it is not read
    table, requests, slots = (block_table, token_to_req, out_slots) if paged else (out, lens, out)
    pdl = supports_pdl(scores.device)
    programs = T * cut.parts if cut.room < W else 0
    groups = torch.empty(programs, cut.room + cut.tile // 4, dtype=torch.int32, device=scores.device)
    kept = torch.empty(programs, 2, cut.room, dtype=torch.int32, device=scores.device)
    counts = torch.empty(T, cut.parts, dtype=torch.int32, device=scores.device)
    select_kernel[(T, cut.parts)](
        scores,
        lens,
        out,
        table,
        requests,
        slots,
        groups,
        kept,
        counts,
        counters_of(scores.device) if cut.parts > 1 else counts,
        W,
        scores.stride(0),
        out.stride(0),
        slots.stride(0),
        table.stride(0),
        K=k,
        PARTS=cut.parts,
        TILE=cut.tile,
        BLOCK=cut.room // 2,
        SAMPLE=cut.sample,
        TARGET=cut.room // 2,
        ROOM=cut.room,
        R=32 * cut.warps,
        ALIGNED=W % 4 == 0 and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0,
        PAGE=page_entries if paged else 0,
        PDL=pdl,
        num_warps=cut.warps,
        launch_pdl=pdl,
        maxnreg=cut.registers,
    )
    return out


def choose_cut(T: int, W: int, k: int, processors: int) -> Cut:
    """How to cut ``T`` rows of up to ``W`` columns, measured on an H200.

    k = 512 of so many rows took, in microseconds: 6.0 (128 x 2048), 11.5 (1 x 32768), 17 (32 x 32768), 26
    (128 x 32768), 24 (8 x 262144), 66 (512 x 32768), 55 (4096 x 2048), 176 (4096 x 8192).
    """
    power = triton.next_power_of_2(k)
    room = min(max(triton.next_power_of_2(W), 1024, 2 * power), max(4 * power, 2048))
    many = 4 * processors < T
    warps = max(room // 512, 4 if many or room >= W else 8)
    tile = 512 * warps
    parts = 1
    # two programs fit a processor; each should have a whole tile
    while T * parts * 2 <= 2 * processors and 2 * parts * tile <= W and parts < (64 if T <= 2 else 16):
        parts *= 2
    # a row's sample should have 32 scores that reach the bound
    sample = min(max(room, triton.next_power_of_2(64 * W // room)), 8192)
    return Cut(parts, tile, max(sample, 128 * warps), room, warps, {4: 128, 8: 80}.get(warps) if many else None)


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
