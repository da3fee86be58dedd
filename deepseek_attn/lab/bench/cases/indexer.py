"""The lightning indexer: queries, scores of decodes and of a prefill chunk, top-k, and scores with their top-k."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepseek_attn.cache.record import Record
from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels.indexer import (
    CandidateBlocks,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
    index_query,
    index_select,
    paged_index_scores,
    reference,
    topk_indices,
)
from deepseek_attn.lab.bench.cases.case import OpCase

HEADS, DIM, PAGE = 64, 128, 64  # of DeepSeek-V4 Flash and Pro
V41_HEADS, BLOCKS, BLOCK = 32, 2048, 8  # of DeepSeek-V4.1-Flash: candidate blocks of a query, entries of a block


def cases(device: torch.device) -> list[OpCase]:
    """Rows for decodes of 1 to 128 requests, 8K to 1M tokens long, and for prefill chunks of 4096 queries."""
    decodes = ((1, 32768), (1, 262144), (8, 32768), (8, 262144), (32, 32768), (128, 2048), (128, 32768))
    rows = ((1, 2048), (1, 32768), (1, 262144), (8, 262144), (64, 32768), (128, 2048), (256, 32768))
    chosen = ((8, 8, 32768), (8, 8, 262144), (4096, 1, 2048), (4096, 1, 32768))
    return [
        *(_query(T, "fp8") for T in (1, 8, 128, 4096)),
        _query(4096, "fp4"),
        *(_scores(B, B, entries, "fp8") for B, entries in decodes),
        _scores(8, 8, 262144, "fp4"),
        _scores(32, 8, 32768, "fp8"),
        _scores(1024, 1, 32768, "fp8"),
        *(_topk(T, entries, 512) for T, entries in rows),
        _topk(256, 32768, 1024),
        *(_select(T, B, entries) for T, B, entries in chosen),
        *(_candidates(T, B, 65536, fill) for fill in (False, True) for T, B in ((1, 1), (8, 8), (32, 32), (1024, 1))),
    ]


def _query(T: int, key_format: str) -> OpCase:
    """``T`` queries, rotated and quantised; with the Hadamard matrix for FP4."""

    def make(device: torch.device, seed: int) -> tuple[IndexQueryRows]:
        torch.manual_seed(seed)
        q = torch.randn(T, HEADS * DIM, device=device, dtype=torch.bfloat16)
        positions = torch.randint(4096, (T,), device=device)
        weights, cos_sin = torch.randn(T, HEADS, device=device), torch.randn(4096, 64, device=device)
        return (IndexQueryRows(q, weights, cos_sin, positions, 0.01, key_format, hadamard=key_format == "fp4"),)

    run = {"triton": index_query, "torch": reference.index_query}
    return OpCase("index_query", f"{key_format} T={T}", make, run, T * HEADS * (3 * DIM + 8))


def _pool_of(record: Record, B: int, entries: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of random bytes that decode to finite numbers, and its block table in random order."""
    pages = B * entries // PAGE
    pool = torch.randint(0, 0x70, (pages, record.page_bytes(PAGE)), dtype=torch.uint8, device=device)
    if record.name == "index_fp8":
        pool[:, PAGE * DIM : PAGE * (DIM + 4)].view(torch.float32).fill_(0.25)
    return pool, torch.randperm(pages, device=device).view(B, -1).int()


def _score_inputs(
    T: int, B: int, entries: int, key_format: str, device: torch.device, seed: int, heads: int = HEADS
) -> tuple[IndexQueries, PagedIndexKeys, torch.Tensor]:
    """Arguments of `paged_index_scores`: ``T / B`` queries of each request, which see ``entries`` entries."""
    torch.manual_seed(seed)
    record = make_index_record(key_format, DIM)
    pool, table = _pool_of(record, B, entries, device)
    q = torch.randn(T, heads, DIM, device=device).to(torch.float8_e4m3fn)
    requests = torch.arange(B, dtype=torch.int32, device=device).repeat_interleave(T // B)
    num_visible = torch.full((T,), entries, device=device)
    queries = IndexQueries(q, torch.randn(T, heads, device=device))
    return queries, PagedIndexKeys(record, pool, PAGE, table, requests), num_visible


def _scores(T: int, B: int, entries: int, key_format: str) -> OpCase:
    """Scores of ``T`` queries of ``B`` requests with ``entries`` keys each."""
    size = B * entries * make_index_record(key_format, DIM).entry_bytes + 4 * T * entries
    flops = 2 * T * entries * HEADS * DIM
    label = f"{key_format} {B}x{T // B} queries, {entries} entries"
    return OpCase("index_scores", label, lambda device, seed: _score_inputs(T, B, entries, key_format, device, seed),
                  {"triton": paged_index_scores}, size, flops, "fp8")  # fmt: skip


def _topk(T: int, entries: int, k: int) -> OpCase:
    """The best ``k`` of ``entries`` scores in ``T`` rows."""

    def make(device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return torch.randn(T, entries, device=device), torch.full((T,), entries, device=device)

    run = {
        "triton": lambda scores, lens: topk_indices(scores, lens, k),
        "torch.topk": lambda scores, lens: scores.topk(k, dim=1),
        "torch": lambda scores, lens: reference.topk_indices(scores, lens, k),
    }
    return OpCase("topk", f"{T}x{entries} k={k}", make, run, 4 * T * (entries + k))


def _select(T: int, B: int, entries: int) -> OpCase:
    """Scores and their top 512 in bounded memory."""
    size = B * entries * make_index_record("fp8", DIM).entry_bytes + 4 * T * 512
    label = f"fp8 {B}x{T // B} queries, {entries} entries"
    return OpCase("index_select", label, lambda device, seed: _score_inputs(T, B, entries, "fp8", device, seed),
                  {"triton": lambda *args: index_select(*args, k=512)}, size, 2 * T * entries * HEADS * DIM,
                  "fp8")  # fmt: skip


def _candidates(T: int, B: int, entries: int, fill: bool) -> OpCase:
    """V4.1: the top 512 of all entries and the candidate blocks, or the top 512 of the entries in candidate blocks."""

    def make(device: torch.device, seed: int) -> tuple:
        inputs = _score_inputs(T, B, entries, "fp8", device, seed, V41_HEADS)
        kept = torch.rand(T, entries // BLOCK, device=device).topk(BLOCKS, dim=1).indices.sort(dim=1).values
        kept[:, -1] = entries // BLOCK - 1
        slots = torch.empty(T, 512, dtype=torch.int32, device=device)
        return *inputs, slots, CandidateBlocks(BLOCK, kept.int(), fill)

    def run(op: Callable) -> Callable:
        return lambda queries, keys, num_visible, slots, candidates: op(
            queries, keys, num_visible, 512, out_slots=slots, candidates=candidates
        )

    scored = entries if fill else BLOCKS * BLOCK
    keys = B * entries if fill else min(B * entries, T * scored)
    size = keys * make_index_record("fp8", DIM).entry_bytes + 4 * T * (BLOCKS + 2 * 512)
    label = f"{'keeps' if fill else 'in'} candidates, {B}x{T // B} queries, {entries} entries"
    return OpCase(
        "index_select", label, make, {"triton": run(index_select)}, size, 2 * T * scored * V41_HEADS * DIM, "fp8"
    )
