"""Launches of `topk_indices` in Triton: checks, and how the rows are tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import gpu, supports_pdl
from deepseek_attn.kernels.indexer.topk_triton import topk_few_rows_kernel, topk_kernel
from deepseek_attn.kernels.indexer.types import MAX_TRITON_TOPK, PagedIndexKeys


@dataclass(frozen=True)
class TopkLaunchConfig:
    """Tiling of `topk_kernel` or `topk_few_rows_kernel`. All but the last two are powers of two.

    Attributes:
        splits: programs that share a row.
        tile: columns that a program reads at a time.
        sample: columns that are read first.
        capacity: candidates that a program can hold, at least 2 k. Rows of up to as many columns are not sampled.
        num_warps: of a program, so that each thread has 4 to 16 columns of ``tile`` and of ``capacity``.
        max_registers: per thread.
        few_rows: by `topk_few_rows_kernel`; 4 candidates of each thread must have room beside the best k.
    """

    splits: int
    tile: int
    sample: int
    capacity: int
    num_warps: int
    max_registers: int | None = None
    few_rows: bool = False


def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    keys: PagedIndexKeys | None = None,
    out_slots: Tensor | None = None,
    config: TopkLaunchConfig | None = None,
) -> Tensor:
    """`kernels.indexer.topk_indices` in Triton, for float32 scores; ``config``: by default chosen from shapes alone.

    Notes:
        One launch. Scratch of a program is 12 bytes for each of ``capacity`` columns, and one for each of ``tile``;
        with ``few_rows`` 8 for each of ``capacity``.
        Programs share a row only where there are few rows; they count arrivals in `counters_of`.
    """
    out = _checked(scores, lens, k, out, keys, out_slots)
    T, W = scores.shape
    if out.numel() == 0:
        return out
    if config is None:
        config = choose_config(T, W, k, gpu(scores.device).multiprocessors)
    # a pointer is needed even where PAGE says that it is not read
    table, requests, slots, page_entries = out, lens, out, 0
    if keys is not None and out_slots is not None:
        table, requests, slots, page_entries = keys.block_table, keys.token_to_req, out_slots, keys.entries
    aligned = W % 4 == 0 and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
    pdl = supports_pdl(scores.device)
    programs = T * config.splits if config.capacity < W else 0
    counts = torch.empty(T, config.splits, dtype=torch.int32, device=scores.device)
    counters = counters_of(scores.device) if config.splits > 1 or config.few_rows else counts
    if config.few_rows:
        topk_few_rows_kernel[(T, config.splits)](
            scores,
            lens,
            out,
            table,
            requests,
            slots,
            torch.empty(programs, config.capacity, dtype=torch.int64, device=scores.device),
            counts,
            counters,
            W,
            scores.stride(0),
            out.stride(0),
            slots.stride(0),
            table.stride(0),
            K=k,
            SPLITS=config.splits,
            TILE=config.tile,
            SAMPLE=config.sample,
            TARGET=config.capacity // 2,
            CAPACITY=config.capacity,
            R=32 * config.num_warps,
            ALIGNED=aligned,
            PAGE=page_entries,
            PDL=pdl,
            enable_fp_fusion=True,
            num_warps=config.num_warps,
            launch_pdl=pdl,
            maxnreg=config.max_registers,
        )
        return out
    groups = torch.empty(programs, config.capacity + config.tile // 4, dtype=torch.int32, device=scores.device)
    candidates = torch.empty(programs, 2, config.capacity, dtype=torch.int32, device=scores.device)
    topk_kernel[(T, config.splits)](
        scores,
        lens,
        out,
        table,
        requests,
        slots,
        groups,
        candidates,
        counts,
        counters,
        W,
        scores.stride(0),
        out.stride(0),
        slots.stride(0),
        table.stride(0),
        K=k,
        SPLITS=config.splits,
        TILE=config.tile,
        BLOCK=config.capacity // 2,
        SAMPLE=config.sample,
        TARGET=config.capacity // 2,
        CAPACITY=config.capacity,
        R=32 * config.num_warps,
        ALIGNED=aligned,
        PAGE=page_entries,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.max_registers,
    )
    return out


def choose_config(T: int, W: int, k: int, processors: int) -> TopkLaunchConfig:
    """Tiling for ``T`` rows of up to ``W`` columns, measured on an H200.

    Microseconds for k = 512: 6.2 (128 x 2048), 51 (4096 x 2048), 10 (1 x 32768), 17 (64 x 32768), 22 (128 x 32768),
    55 (512 x 32768), 384 (4096 x 32768); with ``few_rows`` 13 (1 x 262144; 22 without), 18 (8 x 262144; 31 without).
    """
    power = triton.next_power_of_2(k)
    capacity = min(max(triton.next_power_of_2(W), 1024, 2 * power), max(4 * power, 2048))
    many = 4 * processors < T
    warps = max(capacity // 512, 4 if many or capacity >= W else 8)
    tile = 512 * warps
    splits = 1
    # a sample of 4096 has 16 to 64 scores that reach the bound
    if k <= 512 and 2**17 < W <= 2**19 and processors >= 16 * T:
        # one program fits a processor; each should have two tiles
        while T * splits * 2 <= processors and splits < 32 and 4 * splits * 4096 <= W:
            splits *= 2
        return TopkLaunchConfig(splits, 4096, 4096, 4096, 8, few_rows=True)
    # two programs fit a processor; each should have a whole tile
    while T * splits * 2 <= 2 * processors and 2 * splits * tile <= W and splits < (64 if T <= 2 else 16):
        splits *= 2
    # a row's sample should have 32 scores that reach the bound
    sample = max(min(max(capacity, triton.next_power_of_2(64 * W // capacity)), 8192), 128 * warps)
    max_registers = {4: 128, 8: 80}.get(warps) if many else None
    return TopkLaunchConfig(splits, tile, sample, capacity, warps, max_registers)


def _checked(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None,
    keys: PagedIndexKeys | None,
    out_slots: Tensor | None,
) -> Tensor:
    """The result to write to."""
    if scores.dim() != 2 or scores.dtype != torch.float32 or (scores.stride(1) != 1 and scores.numel()):
        raise ValueError(
            f"scores must be float32 [T, W] with contiguous rows, got {tuple(scores.shape)} {scores.dtype}, "
            f"strides {scores.stride()}"
        )
    T, W = scores.shape
    if lens.shape != (T,) or lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lens must be int32 or int64 [{T}], got {tuple(lens.shape)} {lens.dtype}")
    if not 0 <= k <= MAX_TRITON_TOPK:
        raise ValueError(f"k must be in 0 .. {MAX_TRITON_TOPK}, got {k}: use reference.topk_indices for more")
    if out is None:
        out = torch.empty(T, k, dtype=torch.int32, device=scores.device)
    for name, rows in (("out", out), ("out_slots", out_slots)):
        if rows is not None and (rows.shape != (T, k) or rows.dtype != torch.int32 or (k > 1 and rows.stride(1) != 1)):
            raise ValueError(
                f"{name} must be int32 [{T}, {k}] with contiguous rows, got {tuple(rows.shape)} {rows.dtype}, "
                f"strides {rows.stride()}"
            )
    if out_slots is not None:
        if keys is None:
            raise ValueError("out_slots need keys: a block_table, token_to_req and entries per page")
        _record, _pool, page_entries, block_table, token_to_req = keys
        if block_table.dim() != 2 or block_table.stride(1) != 1 or block_table.shape[1] * page_entries < W:
            raise ValueError(
                f"block_table must be [B, P] with contiguous rows and pages of {page_entries} for {W} columns, got "
                f"{tuple(block_table.shape)}"
            )
        if token_to_req.shape != (T,):
            raise ValueError(f"token_to_req must be [{T}], got {tuple(token_to_req.shape)}")
    return out
