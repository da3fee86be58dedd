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
from deepseek_attn.kernels.attention.attend_hopper import HopperShape, attend_hopper_kernel
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
from deepseek_attn.kernels.attention.types import AttendedKeys, EntryLayout, PagedKeys
from deepseek_attn.kernels.common.checks import check, contiguous_rows
from deepseek_attn.kernels.common.device import FLOATS, LOG2E, fp8_view, gpu
from deepseek_attn.kernels.common.plans import RowsProblem, cdiv, launch_options, next_power_of_2
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
    keys = AttendedKeys(layout, kv, kv.stride(0), kv.shape[0], contiguous_rows(indices), _contiguous(lens))
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
    values, scales = rows.values, rows.scale
    arguments = RawQArguments(
        raw_q.positions, raw_q.cos_sin, len(raw_q.cos_sin), raw_q.eps, fp8_view(values), values.stride(0),
        values.stride(1), H // groups, scales, scales.stride(1),
    )  # fmt: skip
    shape = RawQShape(TRITON_DTYPES[q.dtype], rope, rotated, raw_q.norm, rows.pow2_scales, plan.attend.native_fp8)
    launch(plan, q, pools, scale, AttendOutputs(None, 0, 0, lse, None, _contiguous(sink)), dim, arguments, shape)
    return rows


def launch(
    plan: AttendPlan, q: Tensor, keys: Sequence[AttendedKeys], scale: float, outputs: AttendOutputs, d_v: int,
    raw: RawQArguments | None = None, raw_shape: RawQShape | None = None,
) -> None:  # fmt: skip
    """Attends to ``keys`` of one or two pools, into ``outputs``, or of raw queries into the tensors of ``raw``."""
    if plan.combine is None:
        _launch_attend(plan, q, keys, scale, outputs, d_v, raw, raw_shape)
        return
    T, H, _ = q.shape
    partials = torch.empty(T, plan.splits, H, d_v, dtype=plan.partial_dtype, device=q.device)
    lse = torch.empty(T, plan.splits, H, dtype=torch.float32, device=q.device)
    largest = None if outputs.largest is None else torch.empty_like(lse)
    # with one split the kernel would add the sink itself, and the launch that combines adds it again
    parts, tiles = AttendOutputs(partials, 0, 0, lse, largest, None), plan.combine.config
    _launch_attend(plan, q, keys, scale, parts, d_v, raw, raw_shape)
    attention_combine_kernel[(T, H, cdiv(d_v, tiles.channels))](  # in a fixed order
        parts, outputs, raw, H, plan.splits,
        SHAPE=CombineShape(d_v, tiles.splits, tiles.channels, plan.attend.pdl, raw_shape),
        **launch_options(tiles.warps, plan.attend.pdl),
    )  # fmt: skip
    if largest is not None:
        torch.amax(largest, 1, out=outputs.largest)


def _launch_attend(
    plan: AttendPlan, q: Tensor, keys: Sequence[AttendedKeys], scale: float, outputs: AttendOutputs, d_v: int,
    raw: RawQArguments | None, raw_shape: RawQShape | None,
) -> None:  # fmt: skip
    """The launch that attends, into the result or its split-K partials."""
    (T, H, dim), kernel, tiles, split = q.shape, plan.attend.kernel, plan.attend.config, plan.combine is not None
    queries = AttendQueries(q, q.stride(0), q.stride(1), scale * LOG2E)
    pools = [AttendPool(each.pool, each.page_stride, each.indices, each.indices.stride(0), each.lens) for each in keys]
    widths, limits = [each.indices.shape[1] for each in keys], [each.limit for each in keys]
    layouts, head_blocks = [each.layout for each in keys], cdiv(H, tiles.heads)
    if kernel == "attend_rows_hopper_kernel":
        rows = queries, pools[0], outputs, H, T * head_blocks, widths[0], limits[0]
        attend_rows_hopper_kernel[(plan.programs,)](*rows, DIM=dim, **launch_options(tiles.warps))
        return
    first, grid = layouts[0], (T * head_blocks, plan.splits)
    options = launch_options(tiles.warps, plan.attend.pdl)
    if kernel == "attend_v32_hopper_kernel":
        shape = HopperShape(first.nope, first.entries, 0, split)
        attend_v32_hopper_kernel[grid](queries, pools[0], outputs, H, widths[0], limits[0], SHAPE=shape, **options)
        return
    second, width, limit = (pools[1], widths[1], limits[1]) if len(keys) > 1 else (None, 0, 0)
    arguments = queries, pools[0], second, outputs, raw, H, widths[0], width, limits[0], limit
    if kernel == "attend_hopper_kernel":
        shape = HopperShape(first.nope, first.entries, layouts[1].entries if second else 0, split, raw_shape)
        attend_hopper_kernel[grid](*arguments, SHAPE=shape, **options)
        return
    shape = _portable_shape(plan, layouts, dim, d_v, raw_shape)
    attend_kernel[(T, plan.splits, head_blocks)](*arguments, SHAPE=shape, num_stages=tiles.stages, **options)


def _portable_shape(
    plan: AttendPlan, layouts: Sequence[EntryLayout], dim: int, d_v: int, raw_shape: RawQShape | None
) -> AttendShape:
    """Constants of `attend_kernel`."""
    tiles = plan.attend.config
    starts, widths = pieces(layouts[0].nope, dim, tiles.piece)
    return AttendShape(
        DIM=dim,
        D_V=d_v,
        POOLS=len(layouts),
        FIRST=layouts[0],
        SECOND=layouts[-1],
        STARTS=starts,
        WIDTHS=widths,
        V_PIECES=sum(start < d_v for start in starts),
        DTYPE=TRITON_DTYPES[plan.dtype],
        PRECISION="tf32x3" if plan.dtype == torch.float32 else None,
        NATIVE_FP8=plan.attend.native_fp8,
        SPLIT=plan.combine is not None,
        RAW_Q=raw_shape,
        BLOCK_H=tiles.heads,
        BLOCK_N=tiles.keys,
        STAGES=tiles.stages,
        PDL=plan.attend.pdl,
    )


def pieces(nope: int, dim: int, piece: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and widths of the pieces that cover channels ``[0, nope)`` and ``[nope, dim)``.

    Widths are powers of two from 16 to ``piece``; the last piece of a part may be wider than the remaining channels.
    """
    starts, widths = [], []
    for start, end in ((0, nope), (nope, dim)):
        while start < end:
            left, width = end - start, piece
            while width > left and width > 16:
                width //= 2
            starts.append(start)
            widths.append(width)
            start += width
    return tuple(starts), tuple(widths)


def dequantize_and_gather_k_cache(
    out: Tensor, record: Record, pool: Tensor, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor,
    block_size: int, offset: int,
) -> None:  # fmt: skip
    """`kernels.attention.dequantize_and_gather_k_cache`; a CUDA graph may hold the launch."""
    check_gather(out, record, seq_lens, gather_lens, block_table)
    b, M, _ = out.shape
    layout, plain, max_rows = _entry_layout(record, block_size), record.name == "plain", M - offset
    coded, raw = 0 if plain else layout.nope, record.dtype if plain else torch.bfloat16
    record.check_pool(pool, block_size, {"plain": raw.itemsize, "fp8_v4": 2, "fp8_v32": 4}.get(record.name, 1))
    if b == 0 or max_rows <= 0:
        return
    plan, group = GATHER.plan(RowsProblem(b * max_rows, record.dim), gpu(out.device)), layout.group or 64
    coded_block = max(group, next_power_of_2(coded))
    whole = coded and record.dim <= coded_block  # one tile also holds the unquantised channels
    shape = EntryShape(
        N=block_size,
        ENTRY=record.entry_bytes if plain else layout.row,
        CODED=coded,
        GROUP=group,
        RAW_AT=layout.rope,
        RAW=record.dim - coded,
        RAW_DTYPE=TRITON_DTYPES[raw],
        DTYPE=TRITON_DTYPES[out.dtype],
        CODED_BLOCK=coded_block,
        RAW_BLOCK=0 if whole else next_power_of_2(record.dim - coded),
        NATIVE_FP8=plan.native_fp8,
        ROWS=plan.config.size,
    )
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
    indices, lens = contiguous_rows(keys.indices), _contiguous(keys.lens)
    return AttendedKeys(layout, pool, pool.stride(0), pool.shape[0] * n, indices, lens)


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
