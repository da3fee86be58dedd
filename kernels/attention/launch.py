"""Attention of queries over their own lists of keys, and gathers of keys: checks, and launches by the plans.

For any GPU from compute capability 8.0 on. Keys are read in place: rows of a workspace, or entries of one or two paged
pools. `plan` chooses among `attend_triton` (any GPU), `attend_hopper` (``fp8_v4`` pages), `attend_v32_hopper`
(``fp8_v32`` pages) and `attend_rows_hopper` (rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record
from deepseek_attn.kernels.attention.attend_hopper import attend_hopper_kernel
from deepseek_attn.kernels.attention.attend_rows_hopper import attend_rows_hopper_kernel
from deepseek_attn.kernels.attention.attend_triton import (
    AttendOutputs,
    AttendPool,
    AttendQueries,
    AttendShape,
    CombineShape,
    RawQArguments,
    RawQShape,
    attend_kernel,
    attention_combine_kernel,
)
from deepseek_attn.kernels.attention.attend_v32_hopper import attend_v32_hopper_kernel
from deepseek_attn.kernels.attention.gather_triton import EntryShape, GatherPool, GatherRows, gather_kernel
from deepseek_attn.kernels.attention.plan import GATHER, AttendPlan, AttendProblem, plan_attend
from deepseek_attn.kernels.attention.reference import check_attention, check_gather, value_dim
from deepseek_attn.kernels.attention.types import AttendedKeys, EntryLayout, PagedKeys, RequestEntries
from deepseek_attn.kernels.common.checks import check, contiguous_rows
from deepseek_attn.kernels.common.device import FLOATS, LOG2E, fp8_view, gpu
from deepseek_attn.kernels.common.plans import RowsProblem, cdiv, launch_options
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.raw_queries import RawQueries, check_raw_queries
from deepseek_attn.kernels.common.rows import check_rotation
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES

V41_PAIR = {"fp8_v41", "fp4_v41"}  # the only records that one launch reads together


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor | None = None, lens: Tensor | None = None,
    d_v: int | None = None, out: Tensor | None = None, max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.attention.sparse_attention`."""
    check_attention(q, indices, lens, sink)
    check("kv", kv, ("N", q.shape[2]), FLOATS, rows=True)
    check("max_logits", max_logits, q.shape[:2], torch.float32, contiguous=True)
    layout = EntryLayout(1, q.shape[2], q.shape[2])
    keys = AttendedKeys(layout, kv, kv.shape[0], contiguous_rows(indices), _contiguous(lens))
    pools = [keys] if kv.shape[0] and indices.shape[1] else []
    return _attend(q, pools, scale, sink, d_v, out, max_logits, rows=True)


def sparse_attention_paged(
    q: Tensor, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None = None, d_v: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.attention.sparse_attention_paged`."""
    return _attend(q, _checked_pools(q, keys, sink), scale, sink, d_v, out)


def _attend(
    q: Tensor, keys: list[AttendedKeys], scale: float, sink: Tensor | None, d_v: int | None, out: Tensor | None,
    max_logits: Tensor | None = None, rows: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, H, _), d_v = q.shape, value_dim(q, d_v)
    check("out", out, (T, H, d_v), q.dtype, rows=True)
    out = torch.empty(T, H, d_v, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    if not keys or out.numel() == 0:
        if max_logits is not None:
            max_logits.fill_(float("-inf"))
        return out.zero_(), lse.fill_(float("inf"))
    plan = plan_attend(AttendProblem.of(q, keys, d_v, rows, sink), gpu(q.device))
    outputs = AttendOutputs(out, out.stride(0), out.stride(1), lse, max_logits, _contiguous(sink))
    launch(plan, contiguous_rows(q), keys, scale, outputs, d_v)
    return out, lse


def attend_raw_q(
    raw_q: RawQueries, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None, groups: int, q: Tensor | None
) -> QuantizedRows:
    """`kernels.attention.attend_raw_q`."""
    check_raw_queries(raw_q)
    (T, width), H, rope = raw_q.q.shape, raw_q.num_heads, raw_q.cos_sin.shape[1]
    by_head = raw_q.q.view(T, H, width // H)
    check("q", q, by_head.shape, by_head.dtype, rows=True)
    rotated, q = q is not None, by_head if q is None else q
    pools, dim, record = _checked_pools(q, keys, sink), q.shape[2], keys[0].record
    check_rotation(dim, raw_q.cos_sin)
    if record.name != "fp8_v4" or rope != record.rope_dim or dim % 128 or H % groups or raw_q.padded_heads != H:
        raise ValueError(
            f"{H} projected heads of {dim} channels, {rope} of them rotated, padded to {raw_q.padded_heads}, in "
            f"{groups} groups over {record.name} records with {record.rope_dim} rotated channels: supported are "
            "fp8_v4 records with that many rotated channels, heads of multiples of 128 channels, no padding, and "
            "groups of equal size; call query_norm_rope, sparse_attention_paged and grouped_linear for others"
        )
    if not pools:
        raise ValueError("queries need keys: all pools or lists of indices are empty")
    rows = empty_quantized_rows(T, width, q.device, groups=groups)
    if not T:
        return rows
    plan = plan_attend(AttendProblem.of(q, pools, dim, False, sink, raw_q=True), gpu(q.device))
    lse = None if plan.combine else torch.empty(T, H, dtype=torch.float32, device=q.device)
    arguments = RawQArguments(
        raw_q.positions, raw_q.cos_sin, len(raw_q.cos_sin), raw_q.eps, fp8_view(rows.values), rows.values.stride(0),
        rows.values.stride(1), H // groups, rows.scale, rows.scale.stride(1),
    )  # fmt: skip
    shape = RawQShape(TRITON_DTYPES[q.dtype], rope, rotated, raw_q.norm, rows.pow2_scales, plan.attend.native_fp8)
    launch(plan, q, pools, scale, AttendOutputs(None, 0, 0, lse, None, _contiguous(sink)), dim, arguments, shape)
    return rows


def launch(
    plan: AttendPlan, q: Tensor, keys: Sequence[AttendedKeys], scale: float, outputs: AttendOutputs, d_v: int,
    raw: RawQArguments | None = None, raw_shape: RawQShape | None = None,
) -> None:  # fmt: skip
    """Attends to ``keys`` of one or two pools, into ``outputs``, or of raw queries into the tensors of ``raw``."""
    (T, H, dim), kernel, tiles, combine = q.shape, plan.attend.kernel, plan.attend.config, plan.combine
    parts = outputs
    if combine is not None:  # split-K partials, without the sink: the combining launch adds it
        dtype = torch.float16 if plan.dtype == torch.float16 else torch.float32
        partials = torch.empty(T, plan.splits, H, d_v, dtype=dtype, device=q.device)
        lse = torch.empty(T, plan.splits, H, dtype=torch.float32, device=q.device)
        largest = None if outputs.largest is None else torch.empty_like(lse)
        parts = AttendOutputs(partials, 0, 0, lse, largest, None)
    queries = AttendQueries(q, q.stride(0), q.stride(1), scale * LOG2E)
    pools = [AttendPool(key.pool, key.pool.stride(0), key.indices, key.indices.stride(0), key.lens) for key in keys]
    widths, limits = [key.indices.shape[1] for key in keys], [key.limit for key in keys]
    second, width, limit = (pools[1], widths[1], limits[1]) if len(keys) > 1 else (None, 0, 0)
    arguments = queries, pools[0], second, parts, raw, H, widths[0], width, limits[0], limit
    shape = AttendShape(
        dim, d_v, len(keys), keys[0].layout, keys[-1].layout, TRITON_DTYPES[plan.dtype], plan.attend.native_fp8, tiles,
        combine is not None, raw_shape,
    )  # fmt: skip
    blocks = cdiv(H, tiles.heads)
    grid, options = (T * blocks, plan.splits), launch_options(tiles.warps, plan.attend.pdl)
    if kernel == "attend_rows_hopper_kernel":
        rows = queries, pools[0], parts, H, T * blocks, widths[0], limits[0]
        grid = (min(T * blocks, gpu(q.device).multiprocessors),)
        attend_rows_hopper_kernel[grid](*rows, DIM=dim, **launch_options(tiles.warps))
    elif kernel == "attend_v32_hopper_kernel":
        attend_v32_hopper_kernel[grid](queries, pools[0], parts, H, widths[0], limits[0], SHAPE=shape, **options)
    elif kernel == "attend_hopper_kernel":
        attend_hopper_kernel[grid](*arguments, SHAPE=shape, **options)
    else:
        grid = T, plan.splits, blocks
        attend_kernel[grid](*arguments, SHAPE=shape, num_stages=tiles.stages, **plan.attend.options)
    if combine is not None:  # in a fixed order
        shape, grid = CombineShape(d_v, combine.config, raw_shape), (T, H, cdiv(d_v, combine.config.channels))
        attention_combine_kernel[grid](parts, outputs, raw, H, plan.splits, SHAPE=shape, **combine.options)
        if parts.largest is not None:
            torch.amax(parts.largest, 1, out=outputs.largest)


def dequantize_and_gather_k_cache(out: Tensor, requests: RequestEntries, offset: int) -> None:
    """`kernels.attention.dequantize_and_gather_k_cache`; a CUDA graph may hold the launch."""
    check_gather(out, requests)
    record, pool, block_size, block_table, seq_lens, gather_lens = requests
    b, M, _ = out.shape
    layout, plain, max_rows = _entry_layout(record, block_size), record.name == "plain", M - offset
    raw_dtype = record.dtype if plain else torch.bfloat16
    record.check_pool(pool, block_size, {"plain": raw_dtype.itemsize, "fp8_v4": 2, "fp8_v32": 4}.get(record.name, 1))
    if b == 0 or max_rows <= 0:
        return
    plan = GATHER.plan(RowsProblem(b * max_rows, record.dim), gpu(out.device))
    shape = EntryShape(layout, record.dim, TRITON_DTYPES[raw_dtype], plan.native_fp8, plan.config.size)
    gather_kernel[(cdiv(max_rows, shape.ROWS), b)](
        GatherRows(out[:, offset:], out.stride(0), out.stride(1)), GatherPool(pool, pool.stride(0)),
        seq_lens, gather_lens, block_table, max_rows, block_table.shape[1], block_table.stride(0),
        SHAPE=shape, **launch_options(plan.config.warps),
    )  # fmt: skip


def _checked_pools(q: Tensor, keys: Sequence[PagedKeys], sink: Tensor | None) -> list[AttendedKeys]:
    """Keys of pools with entries as the kernels read them; ValueError if they do not fit each other or ``q``."""
    if not 1 <= len(keys) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(keys)}")
    records = [pool_keys.record for pool_keys in keys]
    if any(record != records[0] for record in records) and {record.name for record in records} != V41_PAIR:
        raise ValueError(f"two pools must hold the same record, or the two records of DeepSeek-V4.1, got {records}")
    checked_keys = [_checked_keys(pool_keys, q, sink) for pool_keys in keys]
    return [pool_keys for pool_keys in checked_keys if pool_keys.indices.shape[1] and pool_keys.limit]


def _checked_keys(keys: PagedKeys, q: Tensor, sink: Tensor | None) -> AttendedKeys:
    record, pool, n = keys.record, keys.pool, keys.entries
    check_attention(q, keys.indices, keys.lens, sink)
    if record.dim != q.shape[2]:
        raise ValueError(f"the record holds {record.dim} channels, q {tuple(q.shape)}")
    layout, most = _entry_layout(record, n), 512 if record.name == "fp8_v4" else 1 << 16  # 8 scale bytes at once
    if layout.group in (64, 128) and (layout.nope > most or record.rope_dim % 16):
        raise ValueError(
            f"{record.name} is read with up to {most} quantised and a multiple of 16 rotated channels, got {record}"
        )
    unit = record.dtype.itemsize if record.name == "plain" else {"fp8_v4": 8, "fp8_v32": 4}.get(record.name, 1)
    record.check_pool(pool, n, unit)
    if record.name == "plain":
        pool = pool[:, : pool.shape[1] // unit * unit].view(record.dtype)
    return AttendedKeys(layout, pool, len(pool) * n, contiguous_rows(keys.indices), _contiguous(keys.lens))


def _entry_layout(record: Record, n: int) -> EntryLayout:
    """The layout of entries in pages of ``n``; ValueError if no kernel reads the record."""
    nope, rope = record.nope_dim, record.rope_dim
    if record.name == "plain":
        return EntryLayout(n, record.dim, record.dim)
    if record.name == "fp8_v4":
        return EntryLayout(n, nope, nope + 2 * rope, nope, 64)
    if record.name == "fp8_v32":
        return EntryLayout(n, nope, record.entry_bytes, nope + nope // 32, 128)
    if record.name in V41_PAIR:
        return EntryLayout(n, record.dim, record.row_bytes[0], group=32 if record.name == "fp8_v41" else 16)
    raise ValueError(f"records that are read are plain, fp8_v4, fp8_v32, fp8_v41 and fp4_v41, got {record.name!r}")


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()
