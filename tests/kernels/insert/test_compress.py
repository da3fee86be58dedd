"""Compression of windows, cut into steps in every way, against one softmax per window of the whole sequence."""

import random
from itertools import product

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord, IndexFp4Record, IndexFp8Record, PlainRecord
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.insert import CompressBatch, CompressPart, reference
from deepseek_attn.kernels.insert.plan import WINDOWS, PoolTiles
from tests.support.tiers import tiered

NAN = float("nan")
EPS = 1e-6
LENGTH = 300


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def op(request, device):
    """The reference, and the kernel where it runs: on a GPU, or interpreted."""
    if request.param == "torch":
        return reference.compress_and_insert
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.insert.launch import compress_and_insert

    return compress_and_insert


def rotary_table(rope, positions=LENGTH):
    angles = torch.outer(torch.arange(positions).double(), 10000.0 ** -(torch.arange(0, rope, 2).double() / rope))
    return torch.cat([angles.cos(), angles.sin()], 1).float()


class Compressed:
    """One compressor, the projections of a few sequences, and pools full of NaN."""

    def __init__(
        self, record, rope, ratio, overlap, rows, requests, pages, device, dtype=torch.float32, hadamard=False
    ):
        self.ratio, self.coff, self.dim, self.record, self.rope = ratio, 1 + overlap, record.dim, record, rope
        width = self.coff * self.dim
        self.kv = torch.randn(requests, LENGTH, width) * 3
        self.score = torch.randn(requests, LENGTH, width) * 2
        self.score[:, 7] = self.score[:, 7] * 1e3  # a token that outweighs its window
        self.ape, self.norm = torch.randn(ratio, width), torch.rand(self.dim) + 0.5
        self.dtype, self.hadamard, self.device = dtype, hadamard, device
        self.n = 4
        size = record.page_bytes(self.n)
        self.pool = torch.full((pages, 2 * size + 576), 0xFF, dtype=torch.uint8, device=device)[:, :size]
        self.state = torch.full((requests + 2, rows, 2 * width), NAN, device=device)

    def part(self, tokens):
        """This compressor over the tokens ``(request, position)`` of a step."""
        kv = torch.stack([self.kv[r, p] if r >= 0 else torch.full_like(self.kv[0, 0], NAN) for r, p in tokens])
        score = torch.stack([self.score[r, p] if r >= 0 else torch.full_like(self.kv[0, 0], NAN) for r, p in tokens])
        table = rotary_table(self.rope).to(self.device)
        fixed = (self.ape.to(self.device), self.state, self.norm.to(self.device), EPS, table, self.record, self.pool)
        return CompressPart(kv.to(self.device), score.to(self.device), *fixed, self.n, self.dtype, self.hadamard)

    def latent(self, request, index):
        """Entry ``index`` of a request before it is rotated, in float64, from its whole sequence."""
        first = (index + 1) * self.ratio - self.coff * self.ratio
        values, scores = [], []
        for p in range(max(first, 0), (index + 1) * self.ratio):
            half = slice(0, self.dim) if self.coff == 2 and p < index * self.ratio else slice(-self.dim, None)
            values.append(self.kv[request, p, half].double())
            scores.append((self.score[request, p, half] + self.ape[p % self.ratio, half]).double())
        pooled = (torch.stack(scores).softmax(0) * torch.stack(values)).sum(0)
        return pooled * (pooled.square().mean() + EPS).rsqrt() * self.norm.double()

    def entry(self, request, index):
        """Entry ``index`` of a request in float64."""
        entry = self.latent(request, index)
        tail = entry[self.dim - self.rope :].clone().unflatten(0, (-1, 2))
        cos, sin = rotary_table(self.rope)[index * self.ratio].double().chunk(2)
        entry[self.dim - self.rope :] = torch.stack(
            [tail[:, 0] * cos - tail[:, 1] * sin, tail[:, 0] * sin + tail[:, 1] * cos], 1
        ).flatten()
        if self.hadamard:
            h = torch.ones(1, 1, dtype=torch.float64)
            while len(h) < self.dim:
                h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
            entry = entry @ h * self.dim**-0.5
        return entry


class Batch:
    """Requests whose pages are scattered over the pools; steps of any shape, with padding wherever one likes."""

    def __init__(self, requests, ratio, overlap, rollback, device, first_page=1, seed=0):
        self.ratio, self.overlap, self.device = ratio, overlap, device
        self.rows = (1 + overlap) * ratio + rollback
        pages = -(-(LENGTH // ratio) // 4)
        order = list(range(first_page, first_page + requests * pages))
        random.Random(seed).shuffle(order)
        self.tables = [order[r * pages : (r + 1) * pages] for r in range(requests)]
        self.rings = random.Random(seed).sample(range(1, requests + 2), requests)
        self.lengths = [0] * requests
        self.pages = first_page + requests * pages

    def step(self, op, parts, queries, padding=0):
        """Computes ``queries[r]`` tokens of each request, with ``padding`` invalid rows after each of them."""
        tokens, owners, starts, prefix = [], [], [0], list(self.lengths)
        for r, q in enumerate(queries):
            tokens += [(r, p) for p in range(self.lengths[r], self.lengths[r] + q)] + [(-1, 0)] * padding
            owners += [r] * (q + padding)
            starts.append(len(tokens))
            self.lengths[r] += q
        slots = [-1 if r < 0 or (p + 1) % self.ratio else self.slot(r, p // self.ratio) for r, p in tokens]
        rings = torch.tensor([self.rings, [2**31 - 1] * len(self.rings)], dtype=torch.int32).T.to(self.device)
        batch = CompressBatch(
            self.ratio,
            self.overlap,
            self.rows,
            torch.tensor([p for _, p in tokens], device=self.device),
            torch.tensor(owners, dtype=torch.int32, device=self.device),
            torch.tensor(starts, dtype=torch.int32, device=self.device),
            torch.tensor(prefix, dtype=torch.int32, device=self.device),
            rings[:, 0],
            torch.tensor(slots, device=self.device),
            torch.tensor([r >= 0 for r, _ in tokens], device=self.device),
            max(queries) + padding,
        )
        op([part.part(tokens) for part in parts], batch)

    def slot(self, r, index):
        return self.tables[r][index // 4] * 4 + index % 4

    def check(self, parts, tolerance):
        """Every entry and every ring row; nothing else may have been written."""
        for part in parts:
            written = []
            for r, length in enumerate(self.lengths):
                entries = range(length // self.ratio)
                slots = torch.tensor([self.slot(r, i) for i in entries], dtype=torch.int64, device=self.device)
                written += slots.tolist()
                if len(slots):
                    got = part.record.gather(part.pool, part.n, slots, torch.float32).double().cpu()
                    expected = torch.stack([part.entry(r, i) for i in entries])
                    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
                kept = range(max(length - self.rows, 0), length)
                ring = part.state[self.rings[r]].cpu()
                for p in kept:
                    row = torch.cat([part.kv[r, p], part.score[r, p] + part.ape[p % self.ratio]])
                    assert torch.equal(ring[p % self.rows], row)
                assert int((~ring.isnan()).any(1).sum()) == len(kept)
            others = sorted(set(range(len(part.pool) * part.n)) - set(written))
            for area in part.record._views(part.pool, part.n):
                assert area.flatten(0, 1)[others].eq(0xFF).all()
            idle = sorted(set(range(len(part.state))) - set(self.rings))
            assert part.state[idle].isnan().all()


KINDS = {"C4A": (4, True), "C5_overlap": (5, True), "C16_overlap": (16, True), "C8A": (8, False), "C1A": (1, False)}
CUTS = {
    "at_once": [250],
    "one_by_one": [1] * 40,
    "mtp": [3, 1, 2, 3, 3, 1] * 5,
    "ragged": [1, 17, 2, 64, 5, 33, 1, 1, 40],
    "residues": [129, 1, 2, 3, 4, 5, 6, 7, 8],
}


@pytest.mark.parametrize(
    ("kind", "cut"),
    tiered(product(KINDS, CUTS), [*zip(KINDS, [*CUTS, *CUTS], strict=False), *zip(KINDS, [*CUTS][::-1], strict=False)]),
)
def test_entries_and_rings_of_any_cut(op, device, kind, cut):
    ratio, overlap = KINDS[kind]
    batch = Batch(3, ratio, overlap, 2, device)
    sizes = (PlainRecord(24, torch.float32), 8), (PlainRecord(16, torch.float32), 4)
    parts = [Compressed(*size, ratio, overlap, batch.rows, 3, batch.pages + 1, device) for size in sizes]
    for i, q in enumerate(CUTS[cut]):
        # the others run along at their own pace, and sometimes not at all
        batch.step(op, parts, [q, i % 3, (5 * i) % 4])
    batch.check(parts, 1e-5)


@pytest.mark.parametrize("rollback", [0, 1, 5])
def test_c128a(op, device, rollback):
    batch = Batch(2, 128, False, rollback, device)
    parts = [Compressed(PlainRecord(24, torch.float32), 8, 128, False, batch.rows, 2, batch.pages, device)]
    for queries in ([100, 127], [27, 1], [1, 1], [1, 0], [2, 127], [100, 1], [60, 20]):
        batch.step(op, parts, queries)
    batch.check(parts, 1e-5)


def test_padding_rows_are_skipped(op, device):
    """Their projections are NaN, and they may sit between the tokens of requests."""
    batch = Batch(3, 4, True, 8, device)
    parts = [Compressed(PlainRecord(24, torch.float32), 8, 4, True, batch.rows, 3, batch.pages, device)]
    for queries in ([9, 3, 4], [1, 1, 1], [2, 0, 1], [0, 1, 3], [1, 3, 2], [11, 1, 1]):
        batch.step(op, parts, queries, padding=2)
    batch.check(parts, 1e-5)


def test_tokens_taken_back(op, device):
    """Up to ``rows - coff * ratio`` tokens may be computed again with other values."""
    batch = Batch(1, 4, True, 3, device)
    parts = [Compressed(PlainRecord(24, torch.float32), 8, 4, True, batch.rows, 1, batch.pages, device)]
    for q, back in ((6, 3), (4, 3), (4, 2), (9, 3), (1, 1), (4, 1), (3, 0)):
        batch.step(op, parts, [q])
        batch.lengths[0] -= back
        for part in parts:
            lost = slice(batch.lengths[0], batch.lengths[0] + back)
            part.kv[0, lost], part.score[0, lost] = torch.randn(2, back, part.kv.shape[2])
    part, length = parts[0], batch.lengths[0]
    slots = torch.tensor([batch.slot(0, i) for i in range(length // 4)], device=device)
    got = part.record.gather(part.pool, part.n, slots, torch.float32).double().cpu()
    expected = torch.stack([part.entry(0, i) for i in range(length // 4)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents(op, device, dtype):
    """Pooled and normed, not rotated, at the rows of the tokens that complete windows; no pool is written."""
    latents = reference.compress_latents
    if op is not reference.compress_and_insert:
        from deepseek_attn.kernels.insert.launch import compress_latents as latents
    batch = Batch(3, 2, False, 3, device)
    part = Compressed(PlainRecord(24, torch.float32), 8, 2, False, batch.rows, 3, batch.pages, device, dtype)
    results = []

    def run(parts, step):
        results.append((latents(parts[0], step), step))

    for queries in ([9, 3, 4], [1, 1, 1], [2, 0, 1], [0, 1, 3], [1, 1, 1], [1, 1, 1]):
        batch.step(run, [part], queries, padding=1)
    assert part.pool.eq(0xFF).all()
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for got, step in results:
        assert got.dtype == dtype
        for row, slot in enumerate(step.slots.tolist()):
            if slot < 0:
                assert got[row].eq(0).all()
                continue
            expected = part.latent(int(step.token_to_req[row]), int(step.positions[row]) // 2)
            assert (got[row].double().cpu() - expected).abs().max() <= limit * expected.abs().max()


@pytest.fixture
def shared_windows(op, monkeypatch):
    """Small tiles: several programs pool the channels of a window, and each program several jobs.

    Their scratch is full of NaN. Yields the counters, which must be zero after each step.
    """
    from deepseek_attn.kernels.insert import launch

    counters = []

    def empty_scratch(parts, groups, device):
        counters.append(torch.zeros(groups * len(parts), dtype=torch.int32, device=device))
        return launch.Scratch(torch.full((groups * len(parts) * 80,), NAN, device=device), counters[-1], 80)

    monkeypatch.setattr(launch, "empty_scratch", empty_scratch)
    with forced_row(WINDOWS, Row(ANY, "compress_kernel", PoolTiles(4, 16, 4, channels=32, programs=5))):
        yield counters


@pytest.mark.parametrize(
    "op", [pytest.param("triton", marks=pytest.mark.triton)], indirect=True
)  # torch has no programs
@pytest.mark.parametrize("kind", [(128, False), (16, True)], ids=["C128A", "C16_overlap"])
def test_windows_that_programs_share(shared_windows, op, device, kind: tuple[int, bool]):
    """Every cut gives the same bits, and entries as one softmax over the window does."""
    pools = []
    for steps in ([[180, 130]], [[127, 128], [1, 1], [1, 1], [51, 0]], [[60, 3]] * 3 + [[0, 121]]):
        torch.manual_seed(5)
        batch = Batch(2, *kind, 2, device)
        sizes = (PlainRecord(80, torch.float32), 8), (PlainRecord(40, torch.float32), 4)
        parts = [Compressed(*size, *kind, batch.rows, 2, batch.pages, device) for size in sizes]
        for queries in steps:
            batch.step(op, parts, queries)
            assert not shared_windows[-1].any()
        batch.check(parts, 1e-5)
        pools.append(torch.cat([part.pool.flatten() for part in parts]))
    assert all(torch.equal(pool, pools[0]) for pool in pools[1:])


@pytest.mark.gpu
def test_the_rows_of_v4_do_not_depend_on_the_cut(op, device):
    """Entries of 512 channels, byte by byte: in a step of their own, and among others."""
    for kind in ((128, False), (4, True)):
        pools = []
        for steps in (
            [[260, 256]],
            [[255, 130]] + [[1, 1]] * 5 + [[0, 121]],
            [[127, 1]] * 2 + [[1, 127], [2, 0], [3, 127]],
        ):
            torch.manual_seed(5)
            batch = Batch(2, *kind, 2, device)
            part = Compressed(Fp8DsMlaRecord(448, 64), 64, *kind, batch.rows, 2, batch.pages, device, torch.bfloat16)
            for queries in steps:
                batch.step(op, [part], queries)
            assert batch.lengths == [260, 256]
            pools.append(part.pool)
        assert all(torch.equal(pool, pools[0]) for pool in pools[1:])


RECORDS = {
    "fp8_ds_mla": (Fp8DsMlaRecord(64, 64), 64, False, 0.07),
    "index_fp8": (IndexFp8Record(128), 64, False, 0.07),
    "index_fp4": (IndexFp4Record(128), 64, False, 0.3),
    "hadamard": (PlainRecord(128, torch.float32), 64, True, 1e-5),
    "narrow_hadamard": (PlainRecord(32, torch.float32), 16, True, 1e-5),
    "index_fp4_hadamard": (IndexFp4Record(128), 64, True, 0.3),
    "plain_bf16": (PlainRecord(128, torch.bfloat16), 64, False, 0.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECORDS)
def test_records(op, device, name, dtype):
    record, rope, rotate, tolerance = RECORDS[name]
    batch = Batch(2, 4, True, 3, device)
    part = Compressed(record, rope, 4, True, batch.rows, 2, batch.pages, device, dtype, rotate)
    for queries in ([9, 3], [1, 1], [2, 4], [2, 0]):
        batch.step(op, [part], queries)
    batch.check([part], max(tolerance, 1e-5 if dtype == torch.float32 else 0.02))


def test_stored_bytes_do_not_depend_on_the_cut(op, device):
    pools = []
    for sizes in ([40], [1] * 40, [3, 2] * 8, [17, 23]):
        torch.manual_seed(3)
        batch = Batch(1, 4, True, 3, device)
        parts = [
            Compressed(Fp8DsMlaRecord(64, 64), 64, 4, True, batch.rows, 1, batch.pages, device, torch.bfloat16),
            Compressed(IndexFp4Record(128), 64, 4, True, batch.rows, 1, batch.pages, device, torch.bfloat16, True),
        ]
        for q in sizes:
            batch.step(op, parts, [q])
        pools.append(torch.cat([part.pool.flatten() for part in parts]))
    assert all(torch.equal(pool, pools[0]) for pool in pools[1:])


@pytest.mark.gpu_memory(5)
@pytest.mark.gpu
def test_pages_over_two_gib(op, device):
    """Rings and entries whose byte offsets pass 2**31."""
    record, first = Fp8DsMlaRecord(448, 64), 58_000
    batch = Batch(1, 4, True, 3, device, first_page=first)
    part = Compressed(record, 64, 4, True, batch.rows, 1, 1, device, torch.bfloat16)
    part.n = 64
    batch.tables = [[first + 3000]]
    part.pool = torch.full((first + 3001, record.page_bytes(64)), 0xFF, dtype=torch.uint8, device=device)
    assert part.pool.numel() > 2**31
    part.state = torch.full((25_000, batch.rows, 2 * 2 * 512), NAN, device=device)
    assert part.state.numel() > 2**29
    batch.rings = [24_999]
    batch.slot = lambda r, index: (first + 3000) * 64 + index
    for q in (9, 1, 1, 1, 4):
        batch.step(op, [part], [q])
    slots = torch.arange(4, device=device) + batch.slot(0, 0)
    got = record.gather(part.pool, 64, slots, torch.float32).double().cpu()
    expected = torch.stack([part.entry(0, i) for i in range(4)])
    assert (got - expected).abs().max() <= 0.07 * expected.abs().max()
    assert torch.equal(part.state[24_999, 15 % batch.rows, :1024].cpu(), part.kv[0, 15])


def test_nothing_to_do(op, device):
    batch = Batch(2, 4, True, 3, device)
    part = Compressed(PlainRecord(24, torch.float32), 8, 4, True, batch.rows, 2, batch.pages, device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    none = torch.zeros(2, dtype=torch.int32, device=device)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    whole = part.part([(0, 0)])
    nothing = CompressPart(whole.kv[:0], whole.score[:0], *list(vars(whole).values())[2:])
    op(
        [nothing],
        CompressBatch(4, True, batch.rows, empty, empty.int(), starts, none, none, empty, empty.bool(), 0),
    )
    assert part.pool.eq(0xFF).all()
    assert part.state.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(2, 48)}, r"kv must be float32 \[1, 48\]"),
        ({"score": torch.zeros(1, 48, dtype=torch.bfloat16)}, "score .* got bfloat16"),
        ({"state": torch.zeros(3, 12, 96)}, r"rings of 11 rows"),
        ({"ape": torch.zeros(5, 48)}, r"ape must be contiguous float32 \[4, 48\]"),
        ({"record": PlainRecord(25, torch.float32)}, "24 channels, and the record holds 25"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_refuses(op, change, message):
    batch = Batch(1, 4, True, 3, torch.device("cpu"))
    part = Compressed(PlainRecord(24, torch.float32), 8, 4, True, batch.rows, 1, batch.pages, torch.device("cpu"))

    def changed(parts, step):
        op([CompressPart(**(vars(parts[0]) | change))], step)

    with pytest.raises(ValueError, match=message):
        batch.step(changed, [part], [1])
