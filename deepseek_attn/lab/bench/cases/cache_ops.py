"""Rows of the ops around the caches: norms, rotation and insertion, compression, index tensors, gathering."""

from __future__ import annotations

import torch

from deepseek_attn.cache.layout import entries_per_page
from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp8Record, PlainRecord, Record
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.kernels.indices import EntryGroup, reference as indices
from deepseek_attn.kernels.insert import CacheRows, CompressBatch, CompressPart, RawQueries, TokenRows, reference
from deepseek_attn.lab.bench.cases.case import OpCase

TOKENS = (1, 8, 32, 128, 4096)
HEAD, ROPE, Q_LORA, WINDOW, TOPK, PAGE, POSITIONS = 512, 64, 1024, 128, 512, 64, 1 << 17
KV, INDEX = Fp8DsMlaRecord(HEAD - ROPE, ROPE), IndexFp8Record(128)
EPS = 1e-6


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    rows = [_norm_rope_insert(T) for T in TOKENS]
    rows += [_query_norm_rope(T, H) for H in (64, 128) for T in TOKENS]
    rows += [_compress_decode(T, 4) for T in TOKENS[:-1]] + [_compress_decode(T, 128) for T in TOKENS[:-1]]
    rows += [_compress_prefill(8192, ratio) for ratio in (4, 128)]
    rows += [_insert_tokens(T, ratio) for ratio in (4, 128) for T in TOKENS[:-1]]
    rows += [_decode_step(T, length) for T, length in ((1, 8192), (128, 8192), (128, 1 << 17), (8, 1 << 20))]
    rows += [_global(T) for T in (1, 128)] + [_combine(T) for T in (512, 4096)]
    records = {"fp8_ds_mla": KV, "V3.2": Fp8DsMlaV32Record(512, ROPE), "bf16": PlainRecord(HEAD)}
    rows += [_gather(label, record, 4, 16384) for label, record in records.items()]
    return rows + [_gather("V3.2", records["V3.2"], requests, length) for requests, length in ((1, 131072), (32, 8192))]


def _table(device: torch.device, g: torch.Generator) -> torch.Tensor:
    return torch.randn(POSITIONS, ROPE, device=device, generator=g)


def _pages(shape: tuple[int, ...], device: torch.device, g: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 50_000, shape, device=device, generator=g, dtype=torch.int32)


def _norm_rope_insert(T: int) -> OpCase:
    from deepseek_attn.kernels.insert.launch import insert_tokens

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        qr, kv = (torch.randn(T, n, device=device, generator=g).bfloat16() for n in (Q_LORA, HEAD))
        weights = torch.ones(Q_LORA, device=device), torch.ones(HEAD, device=device)
        positions = torch.randint(POSITIONS, (T,), device=device, generator=g)
        slots = torch.randperm(T + PAGE, device=device, generator=g)[:T]
        pool = KV.allocate(T // PAGE + 2, PAGE, device)
        cache = CacheRows(KV, pool, PAGE, slots)
        return (TokenRows(qr, kv, *weights, EPS, _table(device, g), positions, cache),)

    run = {
        "triton": lambda tokens: insert_tokens(tokens, (), None),
        "torch": lambda tokens: reference.insert_tokens(tokens, (), None),
    }
    size = T * (2 * 2 * (Q_LORA + HEAD) + KV.entry_bytes + 4 * ROPE)
    return OpCase("norm_rope_insert", f"T={T}", make, run, size)


def _query_norm_rope(T: int, heads: int) -> OpCase:
    from deepseek_attn.kernels.insert.launch import query_norm_rope

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        q = torch.randn(T, heads * HEAD, device=device, generator=g).bfloat16()
        positions = torch.randint(POSITIONS, (T,), device=device, generator=g)
        return (RawQueries(q, heads, EPS, _table(device, g), positions, heads),)

    run = {"triton": query_norm_rope, "torch": reference.query_norm_rope}
    return OpCase("query_norm_rope", f"{heads} heads T={T}", make, run, 4 * T * heads * HEAD)


def _compress_parts(
    ratio: int, T: int, rings: int, rows: int, device: torch.device, g: torch.Generator
) -> list[CompressPart]:
    """The compressors of a C4A layer (its own and its indexer's) or of a C128A layer."""
    parts = []
    for record, dim in ((KV, HEAD), (INDEX, INDEX.dim))[: 2 if ratio == 4 else 1]:
        width = (2 if ratio == 4 else 1) * dim
        kv, score = torch.randn(2, T, width, device=device, generator=g)
        ape = torch.randn(ratio, width, device=device, generator=g)
        state = torch.randn(rings, rows, 2 * width, device=device, generator=g)
        pool = record.allocate(T // PAGE + 2, PAGE, device)
        norm = torch.ones(dim, device=device)
        parts.append(
            CompressPart(kv, score, ape, state, norm, EPS, _table(device, g), record, pool, PAGE, torch.bfloat16)
        )
    return parts


def _compress_case(label: str, ratio: int, T: int, requests: int, positions: torch.Tensor) -> OpCase:
    from deepseek_attn.kernels.insert.launch import compress_and_insert

    pooled = ratio * (2 if ratio == 4 else 1)
    rows, new = pooled + 16, T // requests
    closing = int(((positions + 1) % ratio == 0).sum())

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        parts = _compress_parts(ratio, T, requests + 1, rows, device, g)
        at = positions.to(device)
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * new
        owners = torch.arange(T, device=device, dtype=torch.int32) // new
        rings = torch.randperm(requests, device=device, generator=g).int() + 1
        slots = torch.where((at + 1) % ratio == 0, torch.randperm(T, device=device, generator=g), -1)
        valid = torch.ones(T, dtype=torch.bool, device=device)
        prefix = at.view(requests, new)[:, 0].int()
        batch = CompressBatch(ratio, ratio == 4, rows, at, owners, starts, prefix, rings, slots, valid, new)
        # tensors of their own, so that the size of a set is known
        return parts, batch, [tensor for part in parts for tensor in (part.kv, part.score, part.state)]

    run = {"triton": lambda parts, batch, _: compress_and_insert(parts, batch)}
    channels = HEAD + (INDEX.dim if ratio == 4 else 0)
    kept = min(new, rows) * requests
    size = 8 * channels * (closing * pooled + 2 * kept * pooled // ratio)
    return OpCase("compress", label, make, run, size)


def _compress_decode(T: int, ratio: int) -> OpCase:
    """One token per request, at each phase of a window."""
    positions = 4 * ratio - 1 + torch.arange(T) * (4 * ratio + 1)
    return _compress_case(f"C{ratio}A decode T={T}", ratio, T, T, positions)


def _compress_prefill(T: int, ratio: int) -> OpCase:
    return _compress_case(f"C{ratio}A prefill T={T}", ratio, T, 1, torch.arange(T))


def _insert_tokens(T: int, ratio: int) -> OpCase:
    """Keys and compressors in one launch."""
    from deepseek_attn.kernels.insert.launch import compress_and_insert, insert_tokens

    first, second = _norm_rope_insert(T), _compress_decode(T, ratio)

    def make(device: torch.device, seed: int) -> tuple:
        return *first.make(device, seed), *second.make(device, seed)

    def two_launches(tokens, parts, batch, _):
        insert_tokens(tokens, (), None)
        compress_and_insert(parts, batch)

    run = {
        "triton": lambda tokens, parts, batch, _: insert_tokens(tokens, parts, batch),
        "two launches": two_launches,
    }
    return OpCase("insert_tokens", f"C{ratio}A decode T={T}", make, run, first.bytes + second.bytes)


def _decode_step(T: int, length: int) -> OpCase:
    from deepseek_attn.kernels.indices import launch

    width = length // 128

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        positions = torch.randint(length - 128, length, (T,), device=device, generator=g)
        owners = torch.arange(T, device=device, dtype=torch.int32)
        tables = [_pages((T, -(-length // (r * entries_per_page(r)))), device, g) for r in (4, 128)]
        groups = [EntryGroup(r, table, entries_per_page(r), width if r == 128 else 0)
                  for r, table in zip((4, 128), tables, strict=True)]  # fmt: skip
        valid = torch.ones(T, dtype=torch.bool, device=device)
        return positions, owners, valid, _pages((T, length // PAGE), device, g), PAGE, WINDOW, groups

    run = {"triton": launch.step_indices, "torch": indices.step_indices}
    size = T * (4 * (WINDOW + width) + 3 * 8 + 4 * (width // 32 + 3))
    return OpCase("step_indices", f"decode T={T} length={length}", make, run, size)


def _global(T: int) -> OpCase:
    from deepseek_attn.kernels.indices import launch

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        topk = torch.randint(1 << 14, (T, TOPK), device=device, generator=g, dtype=torch.int32)
        owners = torch.arange(T, device=device, dtype=torch.int32)
        valid = torch.ones(T, dtype=torch.bool, device=device)
        return topk, owners, _pages((T, 256), device, g), 64, valid

    run = {
        "triton": launch.compute_global_topk_indices_and_lens,
        "torch": indices.compute_global_topk_indices_and_lens,
    }
    return OpCase("step_indices", f"chosen entries T={T}", make, run, 8 * T * TOPK)


def _combine(T: int) -> OpCase:
    from deepseek_attn.kernels.indices import launch

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        topk = torch.randint(1 << 14, (T, TOPK), device=device, generator=g, dtype=torch.int32)
        starts, length, gather = (torch.tensor(x, device=device) for x in ([0, T], [1 << 16], [T + WINDOW - 1]))
        return topk, starts.int(), length.int(), gather.int(), WINDOW, 4, TOPK, 1 << 15, 1 << 14

    run = {"triton": launch.combine_topk_swa_indices, "torch": indices.combine_topk_swa_indices}
    return OpCase("step_indices", f"entries and window T={T}", make, run, 4 * T * (2 * TOPK + WINDOW))


def _gather(label: str, record: Record, requests: int, length: int) -> OpCase:
    from deepseek_attn.kernels.attention import RequestEntries, dequantize_and_gather_k_cache

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        pages = requests * length // PAGE
        pool = torch.randint(0, 120, (pages, record.page_bytes(PAGE)), device=device, generator=g, dtype=torch.uint8)
        table = torch.randperm(pages, device=device, generator=g).view(requests, -1).int()
        out = torch.empty(requests, length, record.dim, dtype=torch.bfloat16, device=device)
        lens = torch.full((requests,), length, dtype=torch.int32, device=device)
        return out, RequestEntries(record, pool, PAGE, table, lens, None), 0

    size = requests * length * (record.entry_bytes + 2 * record.dim)
    return OpCase("gather", f"{label} {requests} x {length}", make, {"triton": dequantize_and_gather_k_cache}, size)
