"""Gathers entries of cache pages into contiguous rows in Triton: checks and launches of `gather_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.gather_triton import EntryShape, GatherPool, GatherRows, gather_kernel
from deepseek_attn.kernels.attention.plan import GatherProblem, plan_gather
from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.plans import KernelPlan, cdiv
from deepseek_attn.kernels.common.records import CacheRecord, check_pool
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES


def dequantize_and_gather_k_cache(
    out: Tensor, record: CacheRecord, pool: Tensor, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor,
    block_size: int, offset: int,
) -> None:  # fmt: skip
    """`kernels.attention.dequantize_and_gather_k_cache`; a CUDA graph may hold the launch."""
    b, M, _ = out.shape
    check("out", out, ("b", "M", record.dim), FLOATS, rows=True)
    check("seq_lens", seq_lens, (b,))
    check("gather_lens", gather_lens, (b,))
    check("block_table", block_table, (b, "pages"), rows=True)
    plan, shape = _planned_shape(out, record, pool, block_size)
    max_rows = M - offset
    if b == 0 or max_rows <= 0:
        return
    gather_kernel[(cdiv(max_rows, shape.ROWS), b)](
        GatherRows(out[:, offset:], out.stride(0), out.stride(1)), GatherPool(pool, pool.stride(0)),
        seq_lens, gather_lens, block_table, max_rows, block_table.shape[1], block_table.stride(0),
        SHAPE=shape, enable_fp_fusion=True, num_warps=plan.config.warps,
    )  # fmt: skip


def _planned_shape(out: Tensor, record: CacheRecord, pool: Tensor, n: int) -> tuple[KernelPlan, EntryShape]:
    """The plan for a record and the constants of its launch; checks the pool."""
    raw = torch.bfloat16
    if record.name == "plain":
        raw, coded, group, raw_at, entry = record.dtype, 0, 64, 0, record.entry_bytes
    elif record.name == "fp8_v4":
        coded, group, raw_at, entry = record.nope_dim, 64, record.nope_dim, record.row_bytes[0]
    elif record.name == "fp8_v32":
        coded, group, entry = record.nope_dim, 128, record.entry_bytes
        raw_at = coded + coded // group * 4
    elif record.name in ("fp8_v41", "fp4_v41"):
        coded, group, raw_at, entry = record.dim, 32 if record.name == "fp8_v41" else 16, 0, record.row_bytes[0]
    else:
        raise ValueError(
            f"records that are gathered are plain, fp8_v4, fp8_v32, fp8_v41 and fp4_v41, got {record.name!r}"
        )
    unit = 4 if group == 128 else 1 if coded == record.dim else raw.itemsize
    check_pool(record, pool, n, unit)
    plan = plan_gather(GatherProblem(record.dim, coded, group), gpu(out.device))
    tiles = plan.config
    shape = EntryShape(
        N=n,
        ENTRY=entry,
        CODED=coded,
        GROUP=group,
        RAW_AT=raw_at,
        RAW=record.dim - coded,
        RAW_DTYPE=TRITON_DTYPES[raw],
        DTYPE=TRITON_DTYPES[out.dtype],
        CODED_BLOCK=tiles.coded_block,
        RAW_BLOCK=tiles.raw_block,
        NATIVE_FP8=plan.native_fp8,
        ROWS=tiles.rows,
    )
    return plan, shape
