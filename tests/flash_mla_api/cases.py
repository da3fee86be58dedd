"""Calls of FlashMLA's three functions with random arguments, compared with float64 attention one query at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.support.oracle_flash_mla import (
    HUGE,
    INF,
    Expected,
    Shape,
    attend_one,
    column,
    random_pool,
    random_selection,
    random_sink,
    random_tables,
    request_lengths,
    sparse_decode,
    spread_out,
    stacked,
)
from tests.support.report import Report


class Functions(Protocol):
    """`deepseek_attn.flash_mla_api`, or the package ``flash_mla``."""

    get_mla_metadata: Any
    flash_mla_with_kvcache: Any
    flash_mla_sparse_fwd: Any


@dataclass(frozen=True)
class Decode:
    """Sparse decoding of ``b`` requests of ``s_q`` queries over one or two FP8 caches."""

    b: int
    s_q: int
    h_q: int
    d_qk: int
    main: Shape
    extra: Shape | None = None
    attn_sink: bool = True

    @property
    def gflop(self) -> float:
        width = self.main.topk + (self.extra.topk if self.extra else 0)
        return 2e-9 * self.b * self.s_q * self.h_q * width * (self.d_qk + 512)

    def run(self, functions: Functions, device: torch.device, report: Report, tame: bool = False, **options) -> None:
        q = spread_out(torch.randn(self.b, self.s_q, self.h_q, self.d_qk).bfloat16().to(device))
        shapes = [shape for shape in (self.main, self.extra) if shape is not None]
        pools = [random_pool(self.b, self.s_q, self.d_qk, shape, device, tame, tame) for shape in shapes]
        sink = random_sink(self.h_q, device) if self.attn_sink else None
        scale = self.d_qk**-0.55
        if not tame:  # as columns of larger tensors
            pools = [pool._replace(topk_length=column(pool.topk_length)) for pool in pools]
            sink = column(sink)
        main = pools[0]
        more: dict[str, Any] = {}
        if self.extra is not None:
            more = {
                "extra_k_cache": pools[1].k_cache,
                "extra_indices_in_kvcache": spread_out(pools[1].indices),
                "extra_topk_length": pools[1].topk_length,
            }
        out, lse = functions.flash_mla_with_kvcache(
            q, main.k_cache, None, None, 512, *functions.get_mla_metadata(), softmax_scale=scale, is_fp8_kvcache=True,
            indices=spread_out(main.indices), attn_sink=sink, topk_length=main.topk_length, **more, **options,
        )  # fmt: skip
        check(report, str(self), (out, lse.transpose(1, 2)), sparse_decode(q, pools, scale, sink))


@dataclass(frozen=True)
class Prefill:
    """Sparse attention of ``s_q`` queries over ``s_kv`` rows; ``lonely``: some rows have only invalid indices."""

    s_q: int
    s_kv: int
    topk: int
    h_q: int
    d_qk: int
    attn_sink: bool = False
    topk_length: bool = False
    lonely: bool = False

    @property
    def gflop(self) -> float:
        return 2e-9 * self.s_q * self.h_q * self.topk * (self.d_qk + 512)

    def run(self, functions: Functions, device: torch.device, report: Report, tame: bool = False, **options) -> None:
        q = torch.randn(self.s_q, self.h_q, self.d_qk).bfloat16().to(device)
        kv = (torch.randn(self.s_kv, 1, self.d_qk) * 0.3).bfloat16()
        rows = random_selection(torch.full((self.s_q,), self.s_kv), self.topk)
        none = torch.tensor([-HUGE - 1, -2, -1, self.s_kv, self.s_kv + 1, 114_514, HUGE - 7, HUGE])
        rows = torch.where(rows < 0, none[torch.randint(len(none), rows.shape)], rows)
        if self.lonely:
            rows[torch.rand(self.s_q) < 0.2] = int(none[torch.randint(len(none), ())])
        lens = torch.randint(self.topk + 1, (self.s_q,)) if self.topk_length else torch.full((self.s_q,), self.topk)
        past = torch.arange(self.topk) >= lens[:, None]
        unread = torch.ones(self.s_kv, dtype=torch.bool)
        unread[rows[~past & (rows >= 0) & (rows < self.s_kv)]] = False
        kv[unread] = float("nan")
        if tame:  # there a row that is named behind the length can, rarely, reach the output
            rows = torch.where(past, -1, rows)
        topk_length = lens.int().to(device) if self.topk_length else None
        topk_length = topk_length if tame else column(topk_length)
        kv, indices = spread_out(kv.to(device)), spread_out(rows[:, None].int().to(device))
        sink = random_sink(self.h_q, device) if self.attn_sink else None
        sink = sink if tame else column(sink)
        out, max_logits, lse = functions.flash_mla_sparse_fwd(
            spread_out(q), kv, indices, sm_scale=0.05, attn_sink=sink, topk_length=topk_length, **options
        )
        shown = range(self.s_q) if self.s_q < 5000 else range(self.s_q - 50, self.s_q)
        found = []
        for t in shown:
            row = indices[t, 0, : int(lens[t])]
            keys = kv[row[(row >= 0) & (row < self.s_kv)].long(), 0].double()
            found.append(attend_one(q[t], keys, 0.05, sink))
        expected = stacked(found)
        got = out[shown[0] :], lse[shown[0] :]
        assert got[0].shape == (len(shown), self.h_q, 512)
        check(report, str(self), got, expected)
        torch.testing.assert_close(max_logits[shown[0] :].double(), expected.max_logits, rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Dense:
    """Dense decoding of ``b`` requests of ``s_q`` queries over plain pages; ``block_size``: entries of a page."""

    b: int
    s_q: int
    s_k: int
    h_q: int
    h_k: int
    causal: bool = False
    is_varlen: bool = False
    zero_seqlen_k: bool = False
    d_qk: int = 576
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def gflop(self) -> float:
        return 2e-9 * self.b * self.s_q * self.h_q * self.s_k * (self.d_qk + 512)

    def run(self, functions: Functions, device: torch.device, report: Report, tame: bool = False, **options) -> None:
        n = self.block_size
        lengths = request_lengths(self.b, self.s_q, self.s_k, self.is_varlen, self.zero_seqlen_k)
        tables = random_tables(lengths, n)
        shape = (tables.numel(), n, self.h_k, self.d_qk)
        k_cache = torch.full((shape[0], n + 1, *shape[2:]), float("nan"), dtype=self.dtype, device=device)[:, :n]
        keys = []
        for length, table in zip(lengths.tolist(), tables, strict=True):
            part = (torch.randn(length, *shape[2:]) * 0.3).to(self.dtype).to(device)
            at = torch.arange(length)
            k_cache[table[at // n], at % n] = part
            keys.append(part.double())
            table[-(-length // n) :] = HUGE - 3000  # blocks that are not in use may be any number
        q = torch.randn(self.b, self.s_q, self.h_q, self.d_qk).to(self.dtype).to(device)
        out, lse = functions.flash_mla_with_kvcache(
            spread_out(q), k_cache, spread_out(tables.int().to(device)), lengths.int().to(device), 512,
            *functions.get_mla_metadata(), causal=self.causal, **options,
        )  # fmt: skip
        found, group = [], self.h_q // self.h_k
        for i in range(self.b):
            for j in range(self.s_q):
                visible = max(len(keys[i]) - (self.s_q - 1 - j if self.causal else 0), 0)
                heads = [
                    attend_one(q[i, j, g * group : (g + 1) * group], keys[i][:visible, g], self.d_qk**-0.5)
                    for g in range(self.h_k)
                ]
                found.append(Expected(*(torch.cat(part) for part in zip(*heads, strict=True))))
        check(report, str(self), (out, lse.transpose(1, 2)), stacked(found))


Case = Decode | Prefill | Dense


def check(report: Report, case: str, got: tuple[Tensor, Tensor], expected: Expected) -> None:
    """Compares ``(out, lse)`` of queries ``[..., h, d]``; heads without a key, or whose sink is +inf, are 0."""
    out, lse = got[0].flatten(0, -3), got[1].flatten(0, -2)
    assert lse.dtype == torch.float32
    report.compare("flash_mla_api", case, (out, lse), (expected.out, expected.lse))
    assert not report.failed
    assert bool((out[(expected.out == 0).all(-1)] == 0).all())
    assert bool((lse.isposinf() == (expected.lse == INF)).all())
