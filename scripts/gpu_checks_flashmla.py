"""FlashMLA's kernels on hostile inputs: decode over 584-byte pages that the torch record wrote, prefill over a bf16
workspace, and V3.2's 656-byte pages."""

from __future__ import annotations

import torch
from gpu_checks import INF, Report
from torch import Tensor

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.impls import flash_mla
from deepseek_attn.kernels.attention.reference import sparse_attention, sparse_attention_paged

RECORD = Fp8DsMlaRecord(448, 64)


def make_pages(T: int, K: int, n: int, pages: int, device, stride: int = 1, lens: bool = True) -> flash_mla.Pages:
    """A NaN pool with about 2T + 600 live slots, the very last among them; index rows have holes and, past their
    length, a slot of NaN. Row 0 sees nothing."""
    size, dead = RECORD.page_bytes(n), pages * n // 2
    pool = torch.full((pages, size * stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
    live = torch.randint(pages * n, (2 * T + 600,), device=device)
    live[0] = pages * n - 1
    live = live[live != dead].unique()
    RECORD.insert(pool, n, live, torch.randn(len(live), 512, device=device) * 2)
    indices = live[torch.randint(len(live), (T, K), device=device)].int()
    indices[:, -1:] = live[-1].int()
    indices[:, 2::5] = -1
    counts = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
    counts[0], counts[-1] = 0, K
    if not lens:
        indices[0] = -1
        return flash_mla.Pages(pool, n, indices, None)
    past = torch.arange(K, device=device) >= counts[:, None]
    return flash_mla.Pages(pool, n, indices.masked_fill(past, dead), counts)


def paged_reference(q: Tensor, pages: list[flash_mla.Pages], scale: float, sink: Tensor | None):
    pools = [(RECORD, page.pool, page.entries, page.indices, page.lens) for page in pages]
    return sparse_attention_paged(q.float(), pools, scale, sink)


def check_decode(report: Report, device, quick: bool) -> None:
    scale = 512**-0.5
    cases: list[tuple[str, int, int, list[tuple]]] = []
    window = (128, 64, 99)
    for heads in (1, 8, 16, 32, 64, 100, 128):
        cases.append((f"window, {heads} heads", heads, 9, [window]))
    for heads in (8, 64, 128):
        for K in (1, 7, 64, 100, 192, 512, 513, 1024):
            cases.append((f"window + {K} entries, {heads} heads", heads, 9, [window, (K, 64, 301)]))
    cases += [
        ("window + 8192 entries in pages of 32, 128 heads", 128, 4, [window, (8192, 32, 999)]),
        ("window + 8192 entries in pages of 32, 64 heads", 64, 4, [window, (8192, 32, 999)]),
        ("window + entries in pages of 2, 64 heads", 64, 5, [window, (192, 2, 2999)]),
        ("window + entries in pages of 1, 16 heads", 16, 5, [window, (192, 1, 4999)]),
        ("pools of strided pages, 64 heads", 64, 9, [(*window, 3), (512, 64, 301, 5)]),
        ("257 queries, 64 heads", 64, 257, [window, (512, 64, 301)]),
        ("no lengths, 64 heads", 64, 9, [(*window, 1, False), (512, 64, 301, 1, False)]),
    ]
    big = 999 if quick else 61_000
    name = f"pools of {big} pages ({big * 37440 / 2**30:.1f} GiB), 64 heads"
    cases.append((name, 64, 9, [(128, 64, big), (512, 64, big)]))
    for name, heads, T, pools in cases[:: 7 if quick else 1]:
        pages = [make_pages(T, *pool[:3], device, *pool[3:]) for pool in pools]
        q, sink = torch.randn(T, heads, 512, device=device).bfloat16(), torch.randn(heads, device=device) * 2
        out = torch.full((T, heads, 512), float("nan"), device=device).bfloat16()
        got = flash_mla.sparse_decode(q, pages, scale, sink, out=out)
        report.compare("decode", name, got, paged_reference(q, pages, scale, sink))
        report.add("decode", name + " lonely row", float(got[0][0].float().abs().max()), 0.0)
        del pages
    check_decode_contracts(report, device, scale)


def check_decode_contracts(report: Report, device, scale: float) -> None:
    pages = [make_pages(33, 128, 64, 99, device), make_pages(33, 512, 64, 301, device)]
    q, sink = torch.randn(33, 64, 512, device=device).bfloat16(), torch.randn(64, device=device)
    sink[:3] = torch.tensor([INF, -INF, 50.0])
    schedule = flash_mla.new_schedule()
    first, lse = flash_mla.sparse_decode(q, pages, scale, sink, schedule)
    report.compare("decode", "sinks +inf, -inf, 50", (first, lse), paged_reference(q, pages, scale, sink))
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, scale, sink, schedule)[0]) for _ in range(50))
    report.add("decode", "50 launches on one plan are bit-identical", float(not same), 0.0)
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, scale, sink)[0]) for _ in range(10))
    report.add("decode", "fresh plans are bit-identical", float(not same), 0.0)
    # rows of three queries share a length, so their indices must name live slots all along
    pages = [flash_mla.Pages(p.pool, p.entries, live_indices(p), p.lens[::3].repeat_interleave(3)) for p in pages]
    rows = [flash_mla.Pages(p.pool, p.entries, p.indices.view(11, 3, -1), p.lens[::3].contiguous()) for p in pages]
    got = [x.flatten(0, 1) for x in flash_mla.sparse_decode(q.view(11, 3, 64, 512), rows, scale, sink)]
    report.compare("decode", "3 queries per row", got, paged_reference(q, pages, scale, sink))
    if torch.device(device).type == "cuda":
        check_graph(report, q, pages, scale, sink)


def live_indices(page: flash_mla.Pages) -> Tensor:
    """New indices in the shape of the old ones. The last row's length is its width, so all it names is live or -1."""
    row = page.indices[-1]
    return row[torch.randint(len(row), page.indices.shape, device=row.device)]


def check_graph(report: Report, q: Tensor, pages: list[flash_mla.Pages], scale: float, sink: Tensor) -> None:
    """Capture with a new plan, replay with other lengths, indices and queries."""
    flash_mla.sparse_decode(q, pages, scale, sink)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_mla.sparse_decode(q, pages, scale, sink, flash_mla.new_schedule())
    for round_ in range(3):
        for page in pages:
            page.lens.copy_(torch.randint(0, page.indices.shape[1] + 1, page.lens.shape, device=q.device))
            page.lens[round_] = 0
            page.indices.copy_(live_indices(page))
        q.normal_()
        graph.replay()
        report.compare("decode", f"graph replay {round_}", got, paged_reference(q, pages, scale, sink))


def check_prefill(report: Report, device, quick: bool) -> None:
    for dim, section in ((512, "prefill"), (576, "v32")):
        for heads in (8, 64, 128) if not quick else (8,):
            for K in (1, 7, 64, 100, 128, 192, 513, 640, 1152, 8320) if not quick else (7,):
                T = 65 if K > 2000 else 213
                q, kv = (
                    torch.randn(T, heads, dim, device=device).bfloat16(),
                    torch.randn(9001, dim, device=device).bfloat16(),
                )
                kv[1::2] = float("nan")
                indices = torch.randint(4500, (T, K), device=device, dtype=torch.int32) * 2
                indices[:, 2::5] = torch.where(indices[:, 2::5] % 4 == 0, -1, 9001)
                lens = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
                lens[0] = 0
                junk = torch.where(torch.arange(K, device=device) >= lens[:, None], 1, indices).int()
                sink = torch.randn(heads, device=device) if dim == 512 else None
                got = flash_mla.sparse_prefill(q, kv, junk, dim**-0.5, sink, lens)
                expected = sparse_attention(q.float(), kv, indices, dim**-0.5, sink, lens, 512)
                report.compare(section, f"sparse_fwd d {dim}, {K} keys, {heads} heads", got, expected)


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


def check_v32(report: Report, device, quick: bool) -> None:
    live = torch.randperm(199 * 64, device=device)[:5000]
    shapes = ((16, 100, 5), (64, 64, 9), (128, 2048, 33), (128, 1, 3))[: 1 if quick else None]
    for pow2, (heads, K, T) in [(pow2, shape) for pow2 in (True, False) for shape in shapes]:
        pool, keys = v32_pool(199, 64, live, pow2)
        q = torch.randn(T, heads, 576, device=device).bfloat16()
        indices = live[torch.randint(len(live), (T, K), device=device)].int()
        lens = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
        lens[0] = 0
        expected = sparse_attention(q.float(), keys, indices, 0.1352, None, lens, 512)
        got = flash_mla.sparse_decode(q, [flash_mla.Pages(pool, 64, indices, lens)], 0.1352)
        name = f"656 B pages, {'power-of-two' if pow2 else 'raw'} scales, {K} keys, {heads} heads"
        report.compare("v32", name, got, expected)
        masked = torch.where(torch.arange(K, device=device) < lens[:, None], indices, -1)
        got = flash_mla.sparse_decode(q[None], [flash_mla.Pages(pool, 64, masked[None])], 0.1352)
        report.compare("v32", name + ", one row", [x[0] for x in got], expected)
