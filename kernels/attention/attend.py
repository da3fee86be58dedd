"""Attention of each query over its own list of keys, for any GPU from compute capability 8.0 on: checks.

Keys are read in place: rows of a workspace, or entries of one or two paged pools. `plan` chooses among `attend_triton`
(any GPU), `attend_hopper` (``fp8_v4`` pages), `attend_v32_hopper` (``fp8_v32`` pages) and `attend_rows_hopper` (rows);
`launch` launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.attend_triton import AttendOutputs
from deepseek_attn.kernels.attention.launch import RawQ, launch
from deepseek_attn.kernels.attention.plan import AttendProblem, plan_attend
from deepseek_attn.kernels.attention.types import AttendedKeys, EntryLayout, PagedKeys
from deepseek_attn.kernels.common.checks import INTS, check
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.raw_queries import RawQueries, check_raw_queries
from deepseek_attn.kernels.common.records import CacheRecord, check_pool
from deepseek_attn.kernels.common.rows import row_block

V41_PAIR = {"fp8_v41", "fp4_v41"}  # the only records that one launch reads together


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor | None = None, lens: Tensor | None = None,
    d_v: int | None = None, out: Tensor | None = None, max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.attention.sparse_attention`."""
    _check_query(q, sink, indices, lens)
    check("kv", kv, ("N", q.shape[2]), FLOATS, rows=True)
    check("max_logits", max_logits, q.shape[:2], torch.float32, contiguous=True)
    layout = EntryLayout(1, q.shape[2], q.shape[2])
    keys = AttendedKeys(layout, kv, kv.stride(0), kv.shape[0], _rows_contiguous(indices), _contiguous(lens))
    return _attend(q, [keys], scale, sink, d_v, out, max_logits, rows=True)


def sparse_attention_paged(
    q: Tensor, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None = None, d_v: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.attention.sparse_attention_paged`."""
    return _attend(q, _checked_pools(q, keys, sink), scale, sink, d_v, out)


def attend_raw_q(
    raw_q: RawQueries, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None, groups: int,
    pow2_scales: bool = True, q: Tensor | None = None,
) -> QuantizedRows:  # fmt: skip
    """`kernels.attention.attend_raw_q`."""
    check_raw_queries(raw_q)
    (T, width), H = raw_q.q.shape, raw_q.num_heads
    by_head = raw_q.q.view(T, H, width // H)
    check("q", q, by_head.shape, by_head.dtype, rows=True)
    rotated, q = q is not None, by_head if q is None else q
    pools = _with_entries(_checked_pools(q, keys, sink))
    _check_heads(raw_q, keys[0].record, groups)
    if not pools:
        raise ValueError("queries need keys: all pools or lists of indices are empty")
    rows = empty_quantized_rows(T, width, q.device, pow2_scales, groups)
    if not T:
        return rows
    plan, dim = plan_attend(AttendProblem.of(q, pools, q.shape[2], False, sink, raw_q=True), gpu(q.device)), q.shape[2]
    lse = None if plan.combine else torch.empty(T, H, dtype=torch.float32, device=q.device)
    outputs = AttendOutputs(None, 0, 0, lse, None, _contiguous(sink))
    launch(plan, q, pools, scale, outputs, dim, RawQ.of(raw_q, rows, rotated, plan))
    return rows


def _check_heads(raw_q: RawQueries, record: CacheRecord, groups: int) -> None:
    H, dim, rope = raw_q.num_heads, record.dim, raw_q.cos_sin.shape[1]
    row_block(dim, raw_q.cos_sin)
    if record.name != "fp8_v4" or rope != record.rope_dim or dim % 128 or H % groups or raw_q.padded_heads != H:
        raise ValueError(
            f"{H} projected heads of {dim} channels, {rope} of them rotated, padded to {raw_q.padded_heads}, in "
            f"{groups} groups over {record.name} records with {record.rope_dim} rotated channels: supported are "
            "fp8_v4 records that rotate as many, heads of multiples of 128 channels, no padding, and groups of equal "
            "size; call query_norm_rope, sparse_attention_paged and grouped_linear for others"
        )


def _checked_pools(q: Tensor, keys: Sequence[PagedKeys], sink: Tensor | None) -> list[AttendedKeys]:
    """Keys as the kernels read them; ValueError if they do not go with each other or with ``q``."""
    if not 1 <= len(keys) <= 2:
        raise ValueError(f"one or two pools share a softmax, got {len(keys)}")
    records = [pool_keys.record for pool_keys in keys]
    if any(record != records[0] for record in records) and {record.name for record in records} != V41_PAIR:
        raise ValueError(f"two pools must hold the same record, or the two records of DeepSeek-V4.1, got {records}")
    for pool_keys in keys:
        _check_query(q, sink, pool_keys.indices, pool_keys.lens)
    checked_keys = [_checked_keys(pool_keys) for pool_keys in keys]
    if any(record.dim != q.shape[2] for record in records):
        raise ValueError(f"the records hold {[r.dim for r in records]} channels, q {tuple(q.shape)}")
    return checked_keys


def _with_entries(keys: list[AttendedKeys]) -> list[AttendedKeys]:
    """The sources that have columns of indices and entries to read."""
    return [pool_keys for pool_keys in keys if pool_keys.indices.shape[1] and pool_keys.limit]


def _entry_layout(record: CacheRecord, n: int) -> EntryLayout:
    """The layout of entries in pages of ``n``; ValueError if no kernel reads the record."""
    nope, rope = record.nope_dim, record.rope_dim
    if record.name == "plain":
        return EntryLayout(n, record.dim, record.dim)
    if record.name == "fp8_v4":
        layout, most = EntryLayout(n, nope, nope + 2 * rope, nope, 64), 512  # 8 scale bytes are read at once
    elif record.name == "fp8_v32":
        layout, most = EntryLayout(n, nope, record.entry_bytes, nope + nope // 32, 128), 1 << 16
    elif record.name in V41_PAIR:
        return EntryLayout(n, record.dim, record.row_bytes[0], group=32 if record.name == "fp8_v41" else 16)
    else:
        raise ValueError(f"records that are read are plain, fp8_v4, fp8_v32, fp8_v41 and fp4_v41, got {record.name!r}")
    if nope > most or rope % 16:
        raise ValueError(
            f"{record.name} is read with up to {most} quantised and a multiple of 16 rotated channels, got {record}"
        )
    return layout


def _checked_keys(keys: PagedKeys) -> AttendedKeys:
    record, pool, n = keys.record, keys.pool, keys.entries
    unit = record.dtype.itemsize if record.name == "plain" else {"fp8_v4": 8, "fp8_v32": 4}.get(record.name, 1)
    check_pool(record, pool, n, unit)
    if record.name == "plain":
        pool = pool[:, : pool.shape[1] // unit * unit].view(record.dtype)
    indices, lens = _rows_contiguous(keys.indices), _contiguous(keys.lens)
    return AttendedKeys(_entry_layout(record, n), pool, pool.stride(0), pool.shape[0] * n, indices, lens)


def _attend(
    q: Tensor,
    keys: list[AttendedKeys],
    scale: float,
    sink: Tensor | None,
    d_v: int | None,
    out: Tensor | None,
    max_logits: Tensor | None = None,
    rows: bool = False,
) -> tuple[Tensor, Tensor]:
    T, H, dim = q.shape
    d_v = dim if d_v is None else d_v
    if not 0 < d_v <= dim:
        raise ValueError(f"d_v must be in 1 .. {dim}, got {d_v}")
    check("out", out, (T, H, d_v), q.dtype, rows=True)
    out = torch.empty(T, H, d_v, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device)
    keys = _with_entries(keys)
    if not keys or out.numel() == 0:
        if max_logits is not None:
            max_logits.fill_(float("-inf"))
        return out.zero_(), lse.fill_(float("inf"))
    plan = plan_attend(AttendProblem.of(q, keys, d_v, rows, sink), gpu(q.device))
    q = q if q.stride(2) == 1 else q.contiguous()
    outputs = AttendOutputs(out, out.stride(0), out.stride(1), lse, max_logits, _contiguous(sink))
    launch(plan, q, keys, scale, outputs, d_v)
    return out, lse


def _rows_contiguous(indices: Tensor) -> Tensor:
    return indices if indices.stride(1) == 1 else indices.contiguous()


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _check_query(q: Tensor, sink: Tensor | None, indices: Tensor, lens: Tensor | None) -> None:
    check("q", q, ("T", "H", "d"), FLOATS)
    T, H, _ = q.shape
    check("sink", sink, (H,), FLOATS)
    check("indices", indices, (T, "K"), INTS)
    check("lens", lens, (T,), INTS)
