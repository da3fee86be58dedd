"""Rows of attention: decode over paged FP8 entries, prefill over gathered rows; with FlashMLA where it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.cache.records import Fp8DsMlaRecord, Record
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.kernels.attention import PagedKeys, sparse_attention, sparse_attention_paged
from deepseek_attn.lab.bench.cases.case import OpCase

V4, V32 = Fp8DsMlaRecord(448, 64), Fp8DsMlaV32Record()
D_V = 512
PAGE, PAGES = 64, 4096
DECODES = {  # heads, keys of the window and of the compressed pool
    "SWA Flash": (V4, 64, (128,)),
    "C4A Flash": (V4, 64, (128, 512)),
    "C128A 128K Flash": (V4, 64, (128, 1024)),
    "C128A 1M Flash": (V4, 64, (128, 8192)),
    "SWA Pro": (V4, 128, (128,)),
    "C4A Pro": (V4, 128, (128, 1024)),
    "C128A 1M Pro": (V4, 128, (128, 8192)),
    "C4A Flash, 8 of 64 heads": (V4, 8, (128, 512)),
    "C4A Pro, 16 of 128 heads": (V4, 16, (128, 1024)),
}
BATCHES = (1, 8, 32, 128, 256)
V32_TOPK, V32_HEADS = 2048, (16, 64, 128)
V32_BATCHES, V32_TOKENS = (1, 8, 32, 128), (1, 2, 4)  # requests, and query tokens of each: 1 + drafts
PREFILLS = ((4096, 64, 128), (4096, 64, 640), (4096, 128, 1152), (512, 64, 640))  # queries, heads, keys


class Query(NamedTuple):
    """Arguments of decode attention, in the shapes of `flash_mla.sparse_decode`."""

    q: Tensor
    sink: Tensor | None
    keys: list[PagedKeys]


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    rows = [
        _decode(f"{name} B={B}", record, heads, widths, B, 1, device)
        for name, (record, heads, widths) in DECODES.items()
        for B in BATCHES
    ]
    for heads, B, n in product(V32_HEADS, V32_BATCHES, V32_TOKENS):
        rows.append(_decode(f"V3.2 H={heads} B={B} tokens={n}", V32, heads, (V32_TOPK,), B, n, device))
    return rows + [_prefill(*shape, device) for shape in PREFILLS]


def _decode(
    label: str, record: Record, heads: int, widths: tuple[int, ...], B: int, n: int, device: torch.device
) -> OpCase:
    """``B`` requests with ``n`` query tokens each; every query reads ``widths[i]`` keys of pool ``i``.

    Our kernel takes one row per token; FlashMLA takes the tokens of a request together. FlashMLA's inputs are prepared
    beforehand (padded heads and, for V3.2, -1 past the lengths of index rows), so that only the kernel is timed.
    """
    T, scale = B * n, record.dim**-0.5

    def make(device: torch.device, seed: int) -> tuple[Query, Query]:
        g = torch.Generator(device).manual_seed(seed)
        q = torch.randn(T, heads, record.dim, device=device, generator=g).bfloat16()
        sink = torch.randn(heads, device=device, generator=g) if record is V4 else None
        keys = []
        for i, K in enumerate(widths):
            slots = torch.randint(PAGE * PAGES, (T, K), device=device, generator=g, dtype=torch.int32)
            lens = torch.full((T,), K, device=device, dtype=torch.int32)
            keys.append(PagedKeys(record, _pool(record, i, device), PAGE, slots, lens))
        return Query(q, sink, keys), for_flash_mla(q, sink, keys, n)

    def triton(ours: Query, theirs: Query) -> Tensor:
        return sparse_attention_paged(ours.q, ours.keys, scale, ours.sink, d_v=D_V)[0]

    schedule = cache(flash_mla.new_schedule)  # made by the first call; lengths are the same in all

    def flashmla(ours: Query, theirs: Query) -> Tensor:
        return flash_mla.sparse_decode(theirs.q, theirs.keys, scale, theirs.sink, schedule())[0]

    width = sum(widths)
    entries = sum(min(T * K, PAGE * PAGES) for K in widths)  # at most the whole pool
    size = record.entry_bytes * entries + T * (2 * heads * (record.dim + D_V) + 4 * width)
    run = _with_flash_mla(triton, flashmla, AttentionSpec(heads, record.dim), device)
    return OpCase("sparse_attention", label, make, run, size, 2 * T * heads * width * (record.dim + D_V))


def for_flash_mla(q: Tensor, sink: Tensor | None, keys: list[PagedKeys], n: int) -> Query:
    """Arguments of `flash_mla.sparse_decode` for the rows of requests with ``n`` query tokens each.

    Heads are padded. Keys have no lengths for V3.2 or for several tokens per request: every column must hold a key.
    """
    missing = flash_mla.padded_heads(q.shape[1]) - q.shape[1]
    q, sink = F.pad(q, (0, 0, 0, missing)), None if sink is None else F.pad(sink, (0, missing))
    if keys[0].record is V4 and n == 1:
        return Query(q, sink, keys)
    grouped = [part._replace(indices=part.indices.unflatten(0, (-1, n)), lens=None) for part in keys]
    return Query(q.unflatten(0, (-1, n)), sink, grouped)


def _prefill(T: int, heads: int, width: int, device: torch.device) -> OpCase:
    rows, scale = 16384, D_V**-0.5

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        q, kv = (torch.randn(*shape, D_V, device=device, generator=g).bfloat16() for shape in ((T, heads), (rows,)))
        indices = torch.randint(rows, (T, width), device=device, generator=g, dtype=torch.int32)
        sink, lens = torch.randn(heads, device=device, generator=g), torch.full((T,), width, device=device)
        return q, kv, indices, scale, sink, lens.int()

    run = _with_flash_mla(sparse_attention, flash_mla.sparse_prefill, AttentionSpec(heads, D_V), device)
    size = 2 * D_V * (2 * T * heads + rows) + 4 * T * width
    return OpCase(
        "sparse_attention", f"prefill T={T} H={heads} K={width}", make, run, size, 4 * T * heads * width * D_V
    )


def _with_flash_mla(
    triton: Callable, flashmla: Callable, spec: AttentionSpec, device: torch.device
) -> dict[str, Callable]:
    usable, _ = flash_mla.supported(device, spec)
    return {"triton": triton} | ({"flashmla": flashmla} if usable else {})


@cache
def _pool(record: Record, number: int, device: torch.device) -> Tensor:
    """A pool of random entries that all cases share."""
    g = torch.Generator(device).manual_seed(number)
    pool = record.allocate(PAGES, PAGE, device)
    for slots in torch.arange(PAGES * PAGE, device=device).split(1 << 15):
        record.insert(pool, PAGE, slots, torch.randn(len(slots), record.dim, device=device, generator=g))
    return pool
