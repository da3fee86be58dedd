"""FlashMLA's kernels on hostile inputs: decode over 584-byte pages that the torch record wrote, prefill over a bf16
workspace, and V3.2's 656-byte pages."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.impls import flash_mla
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.attention.reference import sparse_attention, sparse_attention_paged
from tests.support.report import INF, Report, on_cpu_too

RECORD, V32 = Fp8DsMlaRecord(448, 64), Fp8DsMlaV32Record()


class Pool(NamedTuple):
    """``width`` index columns into ``pages`` pages of ``entries``, ``stride`` page sizes apart; with lengths or not."""

    width: int
    entries: int
    pages: int
    stride: int = 1
    lens: bool = True


def make_pages(T: int, shape: Pool, device) -> PagedKeys:
    """A NaN pool with about 2T + 600 live slots, the very last among them; index rows have holes and, past their
    length, a slot of NaN. Row 0 sees nothing."""
    K, n, pages = shape.width, shape.entries, shape.pages
    size, dead = RECORD.page_bytes(n), pages * n // 2
    pool = torch.full((pages, size * shape.stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
    live = torch.randint(pages * n, (2 * T + 600,), device=device)
    live[0] = pages * n - 1
    live = live[live != dead].unique()
    RECORD.insert(pool, n, live, torch.randn(len(live), 512, device=device) * 2)
    indices = live[torch.randint(len(live), (T, K), device=device)].int()
    indices[:, -1:] = live[-1].int()
    indices[:, 2::5] = -1
    counts = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
    counts[0], counts[-1] = 0, K
    if not shape.lens:
        indices[0] = -1
        return PagedKeys(RECORD, pool, n, indices, None)
    past = torch.arange(K, device=device) >= counts[:, None]
    return PagedKeys(RECORD, pool, n, indices.masked_fill(past, dead), counts)


def paged_reference(q: Tensor, pages: list[PagedKeys], scale: float, sink: Tensor | None):
    return sparse_attention_paged(q.float(), pages, scale, sink)


SCALE = 512**-0.5
WINDOW = Pool(128, 64, 99)
DECODE = {f"window, {heads} heads": (heads, 9, [WINDOW]) for heads in (1, 8, 16, 32, 64, 100, 128)}
DECODE |= {
    f"window + {K} entries, {heads} heads": (heads, 9, [WINDOW, Pool(K, 64, 301)])
    for heads in (8, 64, 128)
    for K in (1, 7, 64, 100, 192, 512, 513, 1024)
}
DECODE |= {
    "window + 8192 entries in pages of 32, 128 heads": (128, 4, [WINDOW, Pool(8192, 32, 999)]),
    "window + 8192 entries in pages of 32, 64 heads": (64, 4, [WINDOW, Pool(8192, 32, 999)]),
    "window + entries in pages of 2, 64 heads": (64, 5, [WINDOW, Pool(192, 2, 2999)]),
    "window + entries in pages of 1, 16 heads": (16, 5, [WINDOW, Pool(192, 1, 4999)]),
    "pools of strided pages, 64 heads": (64, 9, [WINDOW._replace(stride=3), Pool(512, 64, 301, 5)]),
    "257 queries, 64 heads": (64, 257, [WINDOW, Pool(512, 64, 301)]),
    "no lengths, 64 heads": (64, 9, [WINDOW._replace(lens=False), Pool(512, 64, 301, lens=False)]),
    "pools of 61000 pages (2.1 GiB), 64 heads": (64, 9, [Pool(128, 64, 61_000), Pool(512, 64, 61_000)]),
}
SMALL = ["window, 1 heads", "window + 7 entries, 8 heads", "window + entries in pages of 2, 64 heads"]


@pytest.mark.gpu_memory(5)
@pytest.mark.parametrize("name", on_cpu_too(DECODE, SMALL))
def test_decode(report, checked, name):
    heads, T, pools = DECODE[name]
    pages = [make_pages(T, pool, checked) for pool in pools]
    q, sink = torch.randn(T, heads, 512, device=checked).bfloat16(), torch.randn(heads, device=checked) * 2
    out = torch.full((T, heads, 512), float("nan"), device=checked).bfloat16()
    got = flash_mla.sparse_decode(q, pages, SCALE, sink, out=out)
    report.compare("decode", name, got, paged_reference(q, pages, SCALE, sink))
    report.add("decode", name + " lonely row", float(got[0][0].float().abs().max()), 0.0)
    assert not report.failed


@pytest.fixture
def batch(checked) -> tuple[Tensor, list[PagedKeys], Tensor]:
    """33 queries of 64 heads, their pages, and sinks, some of them out of the ordinary."""
    pages = [make_pages(33, Pool(128, 64, 99), checked), make_pages(33, Pool(512, 64, 301), checked)]
    q, sink = torch.randn(33, 64, 512, device=checked).bfloat16(), torch.randn(64, device=checked)
    sink[:3] = torch.tensor([INF, -INF, 50.0])
    return q, pages, sink


@pytest.mark.on_cpu
def test_decode_launches_are_bit_identical(report, batch):
    q, pages, sink = batch
    schedule = flash_mla.new_schedule()
    first, lse = flash_mla.sparse_decode(q, pages, SCALE, sink, schedule)
    report.compare("decode", "sinks +inf, -inf, 50", (first, lse), paged_reference(q, pages, SCALE, sink))
    launches = 50 if q.is_cuda else 2
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, SCALE, sink, schedule)[0]) for _ in range(launches))
    report.add("decode", f"{launches} launches on one plan are bit-identical", float(not same), 0.0)
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, SCALE, sink)[0]) for _ in range(launches // 5))
    report.add("decode", "fresh plans are bit-identical", float(not same), 0.0)
    assert not report.failed


@pytest.mark.on_cpu
def test_decode_of_three_queries_per_row(report, batch):
    """Rows of three queries share a length, so their indices must name live slots all along."""
    q, pages, sink = batch
    pages = [p._replace(indices=live_indices(p), lens=p.lens[::3].repeat_interleave(3)) for p in pages]
    rows = [p._replace(indices=p.indices.view(11, 3, -1), lens=p.lens[::3].contiguous()) for p in pages]
    out, lse = flash_mla.sparse_decode(q.view(11, 3, 64, 512), rows, SCALE, sink)
    expected = paged_reference(q, pages, SCALE, sink)
    report.compare("decode", "3 queries per row", (out.flatten(0, 1), lse.flatten(0, 1)), expected)
    assert not report.failed


def live_indices(page: PagedKeys) -> Tensor:
    """New indices in the shape of the old ones. The last row's length is its width, so all it names is live or -1."""
    row = page.indices[-1]
    return row[torch.randint(len(row), page.indices.shape, device=row.device)]


def test_decode_as_a_graph(report, batch):
    """Capture with a new plan, replay with other lengths, indices and queries."""
    q, pages, sink = batch
    pages = [p._replace(indices=live_indices(p), lens=p.lens.clone()) for p in pages]
    flash_mla.sparse_decode(q, pages, SCALE, sink)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_mla.sparse_decode(q, pages, SCALE, sink, flash_mla.new_schedule())
    for replay in range(3):
        for page in pages:
            page.lens.copy_(torch.randint(0, page.indices.shape[1] + 1, page.lens.shape, device=q.device))
            page.lens[replay] = 0
            page.indices.copy_(live_indices(page))
        q.normal_()
        graph.replay()
        report.compare("decode", f"graph replay {replay}", got, paged_reference(q, pages, SCALE, sink))
    assert not report.failed


WIDTHS = (1, 7, 64, 100, 128, 192, 513, 640, 1152, 8320)
PREFILL = [(dim, heads, K) for dim in (512, 576) for heads in (8, 64, 128) for K in WIDTHS]


@pytest.mark.parametrize(("dim", "heads", "K"), on_cpu_too(PREFILL, [(512, 8, 7), (576, 8, 7)]))
def test_prefill(report, checked, dim, heads, K):
    check_prefill(report, checked, dim, heads, K)
    assert not report.failed


def check_prefill(report: Report, device: torch.device, dim: int, heads: int, K: int) -> None:
    T = 65 if K > 2000 else 213
    q, kv = torch.randn(T, heads, dim, device=device).bfloat16(), torch.randn(9001, dim, device=device).bfloat16()
    kv[1::2] = float("nan")
    indices = torch.randint(4500, (T, K), device=device, dtype=torch.int32) * 2
    indices[:, 2::5] = torch.where(indices[:, 2::5] % 4 == 0, -1, 9001)
    lens = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
    lens[0] = 0
    junk = torch.where(torch.arange(K, device=device) >= lens[:, None], 1, indices).int()
    sink = torch.randn(heads, device=device) if dim == 512 else None
    got = flash_mla.sparse_prefill(q, kv, junk, dim**-0.5, sink, lens)
    expected = sparse_attention(q.float(), kv, indices, dim**-0.5, sink, lens, 512)
    report.compare("prefill" if dim == 512 else "v32", f"sparse_fwd d {dim}, {K} keys, {heads} heads", got, expected)


@pytest.mark.on_cpu
def test_a_kernel_that_is_one_percent_off_is_found(report, checked, monkeypatch):
    right = flash_mla.sparse_prefill

    def wrong(*args, **keywords):
        out, lse = right(*args, **keywords)
        return out * 1.01, lse

    monkeypatch.setattr(flash_mla, "sparse_prefill", wrong)
    found = Report()
    check_prefill(found, checked, 512, 8, 7)
    assert [case.case for case in found if not case.passed] == ["sparse_fwd d 512, 7 keys, 8 heads"]


def v32_pool(pages: int, n: int, live: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """656-byte entries at ``live`` (512 e4m3, 4 float32 scales, 64 bf16), NaN elsewhere; and the keys read from them.

    The kernel multiplies in bf16: it rounds a scale that is no power of two, and the product, to bf16.
    """
    device = live.device
    latent, rope = torch.randn(len(live), 4, 128, device=device), torch.randn(len(live), 64, device=device).bfloat16()
    scales = latent.abs().amax(2) / 448
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if pow2 else scales
    values = (latent / scales[..., None]).to(torch.float8_e4m3fn)
    read = (values.float() * scales.bfloat16().float()[..., None]).bfloat16().float()
    keys = torch.full((pages * n, 576), float("nan"), device=device)
    keys[live] = torch.cat([read.flatten(1), rope.float()], 1)
    pool = torch.full((pages * n, 656), 0xFF, dtype=torch.uint8, device=device)
    pool[live] = torch.cat([values.flatten(1).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], 1)
    return pool.view(pages, n * 656), keys


V32_CASES = [
    (pow2, *shape) for pow2 in (True, False) for shape in ((16, 100, 5), (64, 64, 9), (128, 2048, 33), (128, 1, 3))
]


@pytest.mark.parametrize(("pow2", "heads", "K", "T"), on_cpu_too(V32_CASES, [(True, 16, 100, 5), (False, 16, 100, 5)]))
def test_decode_of_v32_pages(report, checked, pow2, heads, K, T):
    live = torch.randperm(199 * 64, device=checked)[:5000]
    pool, keys = v32_pool(199, 64, live, pow2)
    q = torch.randn(T, heads, 576, device=checked).bfloat16()
    indices = live[torch.randint(len(live), (T, K), device=checked)].int()
    lens = torch.randint(0, K + 1, (T,), device=checked, dtype=torch.int32)
    lens[0] = 0
    expected = sparse_attention(q.float(), keys, indices, 0.1352, None, lens, 512)
    got = flash_mla.sparse_decode(q, [PagedKeys(V32, pool, 64, indices, lens)], 0.1352)
    name = f"656 B pages, {'power-of-two' if pow2 else 'raw'} scales, {K} keys, {heads} heads"
    report.compare("v32", name, got, expected)
    masked = torch.where(torch.arange(K, device=checked) < lens[:, None], indices, -1)
    out, lse = flash_mla.sparse_decode(q[None], [PagedKeys(V32, pool, 64, masked[None])], 0.1352)
    report.compare("v32", name + ", one row", (out[0], lse[0]), expected)
    assert not report.failed
