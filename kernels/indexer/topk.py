"""Launches of `topk_indices` in Triton: checks, and how the rows are tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.counters import counters_of
from deepseek_attn.kernels.common.device import gpu, supports_pdl
from deepseek_attn.kernels.indexer.topk_triton import topk_kernel
from deepseek_attn.kernels.indexer.types import MAX_TRITON_TOPK, PagedIndexKeys


@dataclass(frozen=True)
class TopkLaunchConfig:
    """Tiling of `topk_kernel`. All but ``max_registers`` are powers of two; `check_config` says which ones go together.

    Attributes:
        splits: programs that share a row.
        tile: columns that a program reads at a time.
        sample: columns that are read first.
        capacity: candidates that a program can hold; half of them are aimed at. Rows of up to as many columns are not
            sampled.
        words: of 32 columns each, that a thread lists at a time.
        num_warps: of a program.
        max_registers: per thread.
    """

    splits: int
    tile: int
    sample: int
    capacity: int
    words: int
    num_warps: int
    max_registers: int | None = None


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
        One launch. If W is more than ``capacity``, scratch is a bit for each score, and 8 bytes for each candidate that
        a program can hold. Programs share a row only where there are few rows; they count arrivals in `counters_of`.
    """
    out = _checked(scores, lens, k, out, keys, out_slots)
    T, W = scores.shape
    if out.numel() == 0:
        return out
    if config is None:
        config = choose_config(T, W, k, gpu(scores.device).multiprocessors)
    else:
        check_config(config, W, k)
    # a pointer is needed even where PAGE says that it is not read
    table, requests, slots, page_entries = out, lens, out, 0
    if keys is not None and out_slots is not None:
        table, requests, slots, page_entries = keys.block_table, keys.token_to_req, out_slots, keys.entries
    pdl = supports_pdl(scores.device)
    long_rows = T if config.capacity < W else 0
    words = triton.cdiv(W, 128) * 4
    counts = torch.empty(T, config.splits, dtype=torch.int32, device=scores.device)
    topk_kernel[(T, config.splits)](
        scores,
        lens,
        out,
        table,
        requests,
        slots,
        torch.empty(long_rows, words, dtype=torch.int32, device=scores.device),
        torch.empty(long_rows, config.splits, config.capacity, dtype=torch.int64, device=scores.device),
        counts,
        counters_of(scores.device) if config.splits > 1 else counts,
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
        WORDS=config.words,
        R=32 * config.num_warps,
        ALIGNED=W % 4 == 0 and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0,
        PAGE=page_entries,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.max_registers,
    )
    return out


def choose_config(T: int, W: int, k: int, processors: int) -> TopkLaunchConfig:
    """Tiling for ``T`` rows of up to ``W`` columns and a GPU of so many ``processors``, measured on an H200."""
    power = triton.next_power_of_2(k)
    capacity = max(4 * power, 2048)
    if capacity >= W:
        capacity = min(capacity, max(triton.next_power_of_2(W), 1024))
        # many rows: fewer threads, which wait less for each other
        warps = max(capacity // 1024, 2) if 4 * processors < T else max(capacity // 512, 4)
        return TopkLaunchConfig(1, 512 * warps, 128 * warps, capacity, 4, warps, 128 if processors < T else None)
    if W > 2**16:
        capacity = max(capacity, 4096, min(8 * power, 8192))  # so that a small sample is enough
    warps = max(capacity // 512, 8)
    # a row's sample should have so many scores that reach the bound that k of the row reach it, too
    target = capacity // 2
    wanted = 32 if target >= 4 * k else 64
    sample = max(min(triton.next_power_of_2(wanted * W // target), 8192), 128 * warps)
    # two programs fit a processor, or one of more registers
    fit = 2 * processors if capacity == 2048 else processors
    splits = 1
    while 2 * T * splits <= fit and 2 * splits * 8192 <= W and splits < 32:
        splits *= 2
    words = 4 if splits == 1 else 1
    max_registers = 128 if T * splits > processors and warps < 32 else None
    return TopkLaunchConfig(splits, max(8192, 512 * warps), sample, capacity, words, warps, max_registers)


def check_config(config: TopkLaunchConfig, W: int, k: int):
    """Raises ValueError unless the tiling gives the best ``k`` of ``W`` columns.

    Each thread reads at least a group of four columns at a time. If there are too many candidates, the best k of them
    are kept, and a group of each thread must have room beside them.
    """
    groups = 4 * 32 * config.num_warps
    least = min(config.tile, config.sample, config.capacity)
    if least < groups:
        raise ValueError(
            f"tile, sample and capacity of {config.num_warps} warps must be at least {groups}, got {least}"
        )
    if config.capacity < W and k + groups > config.capacity:
        raise ValueError(
            f"capacity must be at least k + 4 * 32 * num_warps = {k} + {groups} for rows of {W} columns, got "
            f"{config.capacity}"
        )


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
