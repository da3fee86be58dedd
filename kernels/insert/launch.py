"""Launches of cache writes and of norms and RoPE of queries.

Small batches pay for launches, not for bytes: in a decode step keys, query latents and compressors share one grid.
Programs that pool find the windows that close from the lengths of the requests, so that no program is started per
token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record
from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record, ScaleRule
from deepseek_attn.kernels.common.checks import check, check_quantized
from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.plans import RowsProblem, SharedLaunch, cdiv, next_power_of_2
from deepseek_attn.kernels.common.raw_queries import RawQueries, check_raw_queries
from deepseek_attn.kernels.common.row_ops_triton import RECORDS, EntryFormat
from deepseek_attn.kernels.common.rows import check_rotation, fp8_rows
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.compress_triton import (
    BatchArguments,
    PartArguments,
    PartShape,
    PoolingConfig,
    Scratch,
    compress_kernel,
    insert_tokens_kernel,
)
from deepseek_attn.kernels.insert.latents_triton import KeyLatentShape, insert_latents_kernel
from deepseek_attn.kernels.insert.norm_rope_triton import (
    HeadArguments,
    HeadShape,
    KeyArguments,
    QueryLatentArguments,
    QueryLatentShape,
    norm_rope_insert_kernel,
    query_norm_rope_kernel,
    rope_insert_kernel,
)
from deepseek_attn.kernels.insert.plan import ENTRIES, LATENTS, QUERIES, InsertProblem, WindowPlan, plan_insert
from deepseek_attn.kernels.insert.reference import check_part
from deepseek_attn.kernels.insert.types import (
    CacheRows,
    CompressBatch,
    CompressPart,
    IndexKeyRows,
    LatentAndKey,
    TokenRows,
)


def insert_tokens(tokens: TokenRows, compressors: Sequence[CompressPart], batch: CompressBatch | None) -> LatentAndKey:
    """See `kernels.insert.insert_tokens`."""
    count, kv = len(tokens.qr), tokens.kv
    query, query_shape = _query_latent(tokens)
    outs = LatentAndKey(query.out, torch.empty_like(kv, memory_format=torch.contiguous_format))
    key = _key_arguments("kv", kv, tokens.positions, tokens.cos_sin, tokens.cache, tokens.kv_weight, None, tokens.eps)
    key = key._replace(out=outs.kv, out_stride=outs.kv.stride(0))
    key_shape = _entry_format(*tokens.cache[:3], tokens.cos_sin)
    if count:
        plan = plan_insert(InsertProblem.of(count, True, compressors, batch), gpu(kv.device))
        rows, shapes = (key, query), {"SHAPE": key_shape, "QUERY_SHAPE": query_shape}
        if plan.keys is not None:
            norm_rope_insert_kernel[(count, 2)](*rows, **shapes, NATIVE_FP8=plan.keys.native_fp8, **plan.keys.options)
        _launch_windows(plan.windows, compressors, batch, rows if plan.keys is None else (), shapes)
    return outs


def compress_and_insert(compressors: Sequence[CompressPart], batch: CompressBatch) -> None:
    """The compressors' part of `insert_tokens` alone: one launch for all of them."""
    if count := len(batch.positions):
        plan = plan_insert(InsertProblem.of(count, False, compressors, batch), gpu(batch.positions.device))
        _launch_windows(plan.windows, compressors, batch)


def compress_latents(part: CompressPart, batch: CompressBatch) -> Tensor:
    """See `kernels.insert.compress_latents`: entries that are stored as they are, at the row of their token."""
    latents = torch.zeros(len(batch.positions), part.dim, dtype=part.dtype, device=part.kv.device)
    rows = PlainRecord(part.dim, part.dtype)
    none = part.cos_sin[:0]  # positions outside of a table are not rotated
    part = replace(part, record=rows, pool=latents.view(torch.uint8), page_entries=1, cos_sin=none, hadamard=False)
    compress_and_insert([part], replace(batch, slots=batch.latent_rows))
    return latents


def _launch_windows(
    plan: WindowPlan | None, compressors: Sequence[CompressPart], batch: CompressBatch | None,
    rows: tuple = (), shapes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Pools windows and stores ring rows; also writes keys and query latents if ``rows`` gives them."""
    if plan is None or batch is None:
        return
    tiles, tokens, requests = plan.launch.config, len(batch.positions), len(batch.prefix_lens)
    parts = [_part(part, batch, items) for part, items in zip(compressors, plan.items, strict=True)]
    step = BatchArguments(
        batch.positions, batch.token_to_req, batch.query_start_loc, batch.prefix_lens, batch.ring_pages, batch.slots,
        batch.valid, batch.ring_pages.stride(0),
    )  # fmt: skip
    unused = Scratch(compressors[0].kv, batch.token_to_req, 0)  # by programs that pool all channels of a window
    scratch = empty_scratch(compressors, plan.groups, batch.positions.device) if tiles.lanes > 1 else unused
    config = PoolingConfig(
        batch.ratio, batch.pooled_tokens, batch.rows, tiles, plan.group, sum(plan.items), plan.reuses_ring_rows,
        max(128, next_power_of_2(requests)), plan.launch.native_fp8,
    )  # fmt: skip
    arguments = (tuple(part for part, _ in parts), step, scratch, plan.programs, requests)
    options = {"PARTS": tuple(shape for _, shape in parts), "CONFIG": config, **plan.launch.options}
    if rows:
        programs = plan.programs + tokens * (2 + len(compressors))
        insert_tokens_kernel[(programs,)](*rows, *arguments, **(shapes or {}), **options)
    else:
        stored = (requests * batch.rows if plan.reuses_ring_rows else tokens) * len(compressors)
        compress_kernel[(stored + plan.programs,)](*arguments, **options)


def empty_scratch(compressors: Sequence[CompressPart], groups: int, device: torch.device) -> Scratch:
    """A row of pooled channels and a counter for each window that programs share; counters are 0 between launches."""
    width, rows = max(part.dim for part in compressors), groups * len(compressors)
    arrived = counters_of(device) if rows <= COUNTERS else torch.zeros(rows, dtype=torch.int32, device=device)
    return Scratch(torch.empty(rows * width, dtype=torch.float32, device=device), arrived, width)


def _part(part: CompressPart, batch: CompressBatch, items: int) -> tuple[PartArguments, PartShape]:
    """Checks a compressor's tensors; returns its runtime arguments and constants for the device code."""
    check_part(part, batch)
    arguments = PartArguments(
        part.kv, part.score, part.ape, part.state, part.kv.stride(0), part.score.stride(0), part.state.stride(0),
        part.norm_weight, part.cos_sin, part.cos_sin.shape[0], part.pool, part.pool.stride(0), part.eps,
    )  # fmt: skip
    entry = _entry_format(part.record, part.pool, part.page_entries, part.cos_sin, part.hadamard)
    return arguments, PartShape(entry, TRITON_DTYPES[part.dtype], items)


def rope_insert(rows: Tensor, positions: Tensor, cos_sin: Tensor, cache: CacheRows) -> None:
    """See `kernels.insert.rope_insert`."""
    arguments, shape = _key_arguments("rows", rows, positions, cos_sin, cache), _entry_format(*cache[:3], cos_sin)
    if T := len(rows):
        plan = ENTRIES.plan(RowsProblem(T), gpu(rows.device))
        rope_insert_kernel[(T,)](arguments, SHAPE=shape, NATIVE_FP8=plan.native_fp8, **plan.options)


def _key_arguments(
    name: str, rows: Tensor, positions: Tensor, cos_sin: Tensor, cache: CacheRows, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 0.0,
) -> KeyArguments:  # fmt: skip
    """Arguments of ``rows [T, d]`` that are rotated and stored, and normed if there is a ``weight``.

    Raises:
        ValueError: rows that do not fit the record or the norm, or another number of positions or slots.
    """
    check(name, rows, ("T", "d"), FLOATS, rows=True)
    check(f"the weight of {name}", weight, rows.shape[1:])
    check(f"the bias of {name}", bias, rows.shape[1:])
    check(f"positions of {name}", positions, rows.shape[:1])
    check(f"slots of {name}", cache.slots, rows.shape[:1])
    if cache.record.dim != rows.shape[1]:
        raise ValueError(f"{name} need a record of {rows.shape[1]} values, got {cache.record.dim}")
    return KeyArguments(
        rows, rows.stride(0), weight, bias, None, 0, positions, cos_sin, cos_sin.shape[0], cache.slots, eps,
        cache.pool, cache.pool.stride(0),
    )  # fmt: skip


def _query_latent(tokens: TokenRows) -> tuple[QueryLatentArguments, QueryLatentShape]:
    """Arguments and constants of `norm_query_latent`, which writes `QueryLatentArguments.out`."""
    qr, fp8, lora = tokens.qr, tokens.qr_fp8, len(tokens.q_weight)
    check("qr", qr, (len(tokens.positions), "q_lora"), FLOATS, rows=True)
    check("the weight of qr", tokens.q_weight, qr.shape[1:])
    if fp8 is not None:
        if lora % fp8.group:
            raise ValueError(f"a quantised latent needs a multiple of {fp8.group} channels, got {lora}")
        check_quantized("quantised latent", fp8, qr.shape)
    out = torch.empty_like(qr, memory_format=torch.contiguous_format)
    arguments = QueryLatentArguments(qr, qr.stride(0), tokens.q_weight, out, out.stride(0), tokens.eps, fp8_rows(fp8))
    pow2, group = (False, 0) if fp8 is None else (fp8.pow2_scales, fp8.group)
    return arguments, QueryLatentShape(lora, pow2, group)


def insert_latents(tokens: TokenRows, index: IndexKeyRows | None = None) -> Tensor:
    """See `kernels.insert.insert_latents`."""
    query, query_shape = _query_latent(tokens)
    T, kv, cache, record = len(tokens.qr), tokens.kv, tokens.cache, tokens.cache.record
    positions, cos_sin = tokens.positions, tokens.cos_sin
    rank, rope = len(tokens.kv_weight), cos_sin.shape[1]
    check("kv", kv, (T, rank + rope))
    check("the weight of kv", tokens.kv_weight, (rank,))
    key = _key_arguments("kv", kv, positions, cos_sin, cache, eps=tokens.eps)._replace(weight=tokens.kv_weight)
    check_rotation(rope, cos_sin)
    quantized = isinstance(record, Fp8DsMlaV32Record)
    if not quantized and record.name != "plain":
        raise ValueError(f"latents are stored in plain or fp8_v32 records, got {record.name!r}")
    record.check_pool(cache.pool, cache.page_entries, 4 if quantized else record.dtype.itemsize)
    rule = record.rule if quantized else ScaleRule(0.0, False)
    shape = KeyLatentShape(
        rank, rope, cache.page_entries, quantized, rule.pow2, struct.unpack("<i", struct.pack("<f", rule.floor))[0],
        TRITON_DTYPES[torch.bfloat16 if quantized else record.dtype],
    )  # fmt: skip
    index_key, index_shape = None, None
    if index is not None:
        norm = index.weight, index.bias, index.eps
        index_key = _key_arguments("index keys", index.k, positions, cos_sin, index.cache, *norm)
        index_shape = _entry_format(*index.cache[:3], cos_sin, index.hadamard)
    if T:
        plan = LATENTS.plan(RowsProblem(T), gpu(kv.device))
        shapes = {"SHAPE": shape, "QUERY_SHAPE": query_shape, "INDEX_SHAPE": index_shape}
        insert_latents_kernel[(T, 2 if index is None else 3)](
            key, query, index_key, **shapes, NATIVE_FP8=plan.native_fp8, **plan.options
        )
    return query.out


def query_norm_rope(raw_q: RawQueries) -> Tensor:
    """See `kernels.insert.query_norm_rope`."""
    plan, rows, shape, out, grid = head_launch(raw_q)
    if len(out):
        query_norm_rope_kernel[grid](rows, SHAPE=shape, **plan.options)
    return out


def head_launch(raw_q: RawQueries) -> SharedLaunch:
    """Checks the tensors, plans, and allocates the output.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    check_raw_queries(raw_q)
    q, cos_sin, padded = raw_q.q, raw_q.cos_sin, raw_q.padded_heads
    T, dim = q.shape[0], q.shape[1] // raw_q.num_heads
    out = torch.empty(T, padded, dim, dtype=q.dtype, device=q.device)
    check_rotation(dim, cos_sin)
    plan = QUERIES.plan(RowsProblem(T), gpu(q.device))
    rows = HeadArguments(
        q, cos_sin, raw_q.positions, out, raw_q.eps, cos_sin.shape[0], raw_q.num_heads, padded,
        q.stride(0), out.stride(0), out.stride(1),
    )  # fmt: skip
    shape = HeadShape(dim, cos_sin.shape[1], plan.config.heads, raw_q.norm)
    return SharedLaunch(plan, rows, shape, out, (T, cdiv(padded, shape.HEADS)))


def _entry_format(
    record: Record, pool: Tensor, page_entries: int, cos_sin: Tensor, hadamard: bool = False
) -> EntryFormat:
    """Constants of rows that are rotated by ``cos_sin``, with ``hadamard`` multiplied by a matrix, and stored.

    Raises:
        ValueError: a record, a pool or a number of channels that is not supported.
    """
    if record.name not in RECORDS:
        raise ValueError(f"records that are written are {', '.join(RECORDS)}, got {record.name!r}")
    dtype = record.dtype if record.name == "plain" else torch.bfloat16
    unit = {"plain": dtype.itemsize, "fp8_v4": 2, "index_fp8": 4}.get(record.name, 1)
    record.check_pool(pool, page_entries, unit)
    check_rotation(record.dim, cos_sin)
    if hadamard and record.dim & (record.dim - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two of channels, got {record.dim}")
    nope, place = record.nope_dim if record.name == "fp8_v4" else record.dim, RECORDS.index(record.name)
    return EntryFormat(page_entries, record.dim, nope, place, TRITON_DTYPES[dtype], cos_sin.shape[1], hadamard)
