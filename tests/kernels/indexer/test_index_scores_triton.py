"""Indexer scores and selection over pages: the reference against the formula, Triton against the reference."""

import os

import numpy
import pytest
import torch

from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.indexer import IndexQueries, IndexQueryRows, PagedIndexKeys
from deepseek_attn.kernels.indexer.plan import SCORES, ScoresConfig, ScoresProblem, decode_tokens
from deepseek_attn.kernels.indexer.reference import (
    index_query,
    index_select as reference_select,
    paged_index_scores as reference_scores,
)

NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMATS = ["plain", "fp8", "fp4"]
LIMIT = 2e-3  # relative: Hopper's FP8 products keep 13 bits of their sums
BATCHES = {
    "one": ([1000], [1]),
    "decode": ([5, 0, 70, 3000, 1], [1] * 5),
    "two each": ([50, 300, 2000], [2] * 3),
    "three each": ([64, 129, 1000], [3] * 3),
    "four each": ([3, 301], [4, 4]),
    "ragged": ([90, 700, 1200, 33], [1, 2, 7, 30]),
    "prefill": ([600, 900], [100, 133]),
}


class Batch:
    """Requests with live entries at random pages of a pool that is NaN (0xFF) elsewhere, and junk in their tables."""

    def __init__(self, fmt, lens, new, H=64, n=64, device="cpu", pages=200, stride=1, dtype=torch.bfloat16, dim=128):
        self.record, self.n = make_index_record(fmt, dim, dtype), n
        used = [-(-length // n) for length in lens]
        size = self.record.page_bytes(n)
        self.pool = torch.full((pages, size * stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
        self.table = torch.full((len(lens), 2 * max(used) + 3), HUGE, dtype=torch.int32, device=device)[
            :, : max(used) + 1
        ]
        ids = torch.randperm(pages - 1, device=device)[: sum(used)] + 1
        ids[-1:] = pages - 1
        first = 0
        for r, (length, count) in enumerate(zip(lens, used, strict=True)):
            self.table[r, :count] = ids[first : first + count]
            entries = torch.arange(length, device=device)
            slots = self.table[r].long()[entries // n] * n + entries % n
            self.record.insert(self.pool, n, slots, torch.randn(length, dim, device=device))
            first += count
        self.requests = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(new)).int().to(device)
        visible = [max(0, length - m + 1 + j) for length, m in zip(lens, new, strict=True) for j in range(m)]
        self.visible = torch.tensor(visible, device=device)
        T = len(visible)
        angles = torch.rand(50, min(32, dim // 4), device=device) * 6
        q, weights = torch.randn(T, H * dim, device=device).to(dtype), torch.randn(T, H, device=device)
        at = torch.randint(50, (T,), device=device)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.q, self.weights, _ = index_query(IndexQueryRows(q, weights, cos_sin, at, 0.1, fmt))

    def args(self, tokens=slice(None), score_dtype=torch.float32):
        """Queries, keys and visible entries of these tokens: the first arguments of the ops."""
        queries = IndexQueries(self.q[tokens], self.weights[tokens], score_dtype)
        keys = PagedIndexKeys(self.record, self.pool, self.n, self.table, self.requests[tokens])
        return queries, keys, self.visible[tokens]


@pytest.mark.parametrize("fmt", FORMATS)
def test_reference_reads_each_request_through_its_pages(fmt):
    batch = Batch(fmt, [90, 0, 70], [1, 2, 3], H=3, n=32, stride=2, dtype=torch.float32)
    got = reference_scores(*batch.args())
    assert got.shape == (6, 4 * 32)
    for t, (r, n) in enumerate(zip(batch.requests.tolist(), batch.visible.tolist(), strict=True)):
        slots = [int(batch.table[r, e // 32]) * 32 + e % 32 for e in range(n)]
        keys = batch.record.gather(batch.pool, 32, torch.tensor(slots).long(), torch.float32).double()
        q = batch.q[t].double()
        q = torch.stack(q.chunk(2, 1), 2).flatten(1) if fmt == "fp4" else q  # even channels come first
        products = torch.einsum("hd,nd->hn", q, keys).clamp(min=0)
        torch.testing.assert_close(got[t, :n].double(), batch.weights[t].double() @ products, rtol=1e-4, atol=1e-3)
        assert got[t, n:].eq(-INF).all()


# --- the kernel: on a GPU with DEEPSEEK_ATTN_TEST_DEVICE=cuda, small ones also by TRITON_INTERPRET=1 ---


@pytest.fixture
def ops(triton_device):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.indexer import launch

    return launch


@pytest.fixture
def real_gpu(ops, device, needs_gpu):
    if device.type != "cuda":
        pytest.skip("needs an NVIDIA GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda")
    return device


def check(got, expected, limit=LIMIT):
    """Close where there are scores; not written (NaN) elsewhere."""
    live = expected > -INF
    assert got[~live].isnan().all()
    error = (got[live].double() - expected[live].double()).norm() / expected[live].double().norm().clamp(min=1e-30)
    assert error <= limit  # false for NaN


def written(ops, batch, tokens=slice(None), skip=0, **options):
    """Scores that a kernel writes over NaN; rows that see up to ``skip`` entries get none."""
    queries, keys, visible = batch.args(tokens, **options)
    out = torch.full((len(queries.q), batch.table.shape[1] * batch.n), NAN, device=batch.q.device)
    ops.launch_scores(queries, keys, visible, skip, out)
    return out


def expected_scores(batch, skip=0):
    return reference_scores(*batch.args()).masked_fill_((batch.visible <= skip)[:, None], -INF)


@pytest.mark.parametrize("fmt", FORMATS)
def test_small(ops, device, fmt):
    if INTERPRETED and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton 3.6's interpreter cannot read the bounds of a loop with NumPy 2.4 or later")
    for tokens, keys in ((1, 16), (2, 32), (4, 16)):
        batch = Batch(fmt, [90, 0, 71], [1, 2, 4], 5, 32, device, stride=2, dtype=torch.float32)
        row = Row(ANY, "index_scores_kernel", ScoresConfig(tokens, keys, 1, 2))
        with forced_row(SCORES, row):
            got = written(ops, batch, skip=50)
        check(got, expected_scores(batch, 50), 1e-5 if INTERPRETED else LIMIT)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("H", [64, 20, 1])
@pytest.mark.parametrize("n", [64, 32, 2])
@pytest.mark.parametrize("shape", BATCHES)
def test_batches(ops, real_gpu, shape, n, H, fmt):
    lens, new = BATCHES[shape]
    batch = Batch(fmt, lens, new, H, n, real_gpu, 2200, stride=3)
    for skip in (0, 64):
        got = written(ops, batch, skip=skip)
        check(got, expected_scores(batch, skip))


@pytest.mark.parametrize("fmt", ["plain", "fp4"])
def test_rounded_scores(ops, real_gpu, fmt):
    """Scores are bfloat16 numbers, nearer to the rounded reference than unrounded ones: products are rounded too."""
    batch = Batch(fmt, [90, 0, 171], [1, 2, 4], 32, 32, real_gpu)
    expected = reference_scores(*batch.args(score_dtype=torch.bfloat16))
    got = written(ops, batch, score_dtype=torch.bfloat16)
    live = expected > -INF
    assert torch.equal(got[live].bfloat16().float(), got[live])
    unrounded = reference_scores(*batch.args())
    assert (got - expected)[live].norm() < 0.3 * (unrounded - expected)[live].norm()  # another order of sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [128, 48, 32])
def test_plain_dtypes_and_dims(ops, real_gpu, dim, dtype):
    batch = Batch("plain", [50, 301], [1, 60], 10, 32, real_gpu, dtype=dtype, dim=dim)
    got = written(ops, batch)
    check(got, reference_scores(*batch.args()), 1e-5 if dtype == torch.float32 else 1e-3)


def test_a_nan_key_has_no_number_for_a_score(ops, real_gpu):
    for fmt in FORMATS:
        batch = Batch(fmt, [200], [3], device=real_gpu)
        slot = int(batch.table[0, 1]) * 64 + 5
        batch.record.insert(
            batch.pool, 64, torch.tensor([slot], device=real_gpu), torch.full((1, 128), NAN, device=real_gpu)
        )
        got = written(ops, batch)[0, :198]
        assert got.isnan().nonzero().flatten().tolist() == [69]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_score_does_not_depend_on_the_batch(ops, real_gpu, fmt):
    batch = Batch(fmt, [2000, 1990], [40, 40], device=real_gpu)
    whole = written(ops, batch)
    for t in range(80):
        alone = written(ops, batch, slice(t, t + 1))
        assert torch.equal(whole[t].nan_to_num(), alone[0].nan_to_num())
    for _ in range(50):
        again = written(ops, batch)
        assert torch.equal(whole.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_pool_over_two_gib(ops, real_gpu, fmt):
    batch = Batch(fmt, [3000, 900], [1, 70], device=real_gpu, pages=58_000, stride=5 if fmt == "fp8" else 9)
    assert int(batch.table[1, 14]) > 57_000, "the last page that the second request reads"
    assert batch.pool.stride(0) * 57_000 > 2**31
    got = written(ops, batch)
    check(got, reference_scores(*batch.args()))


@pytest.mark.parametrize("n", [64, 32, 128])
@pytest.mark.parametrize("shape", ["decode", "two each", "four each", "ragged", "prefill"])
def test_all_kernels_give_the_same_bits(ops, real_gpu, shape, n):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lens, new = BATCHES[shape]
    batch = Batch("fp8", lens, new, 64, n, real_gpu, 2200, stride=3)
    decode = decode_tokens(ScoresProblem(len(batch.q), len(lens), 64_000, 64, 128, "fp8"), GPU((9, 0), 132))
    plain = Row(ANY, "index_scores_kernel", ScoresConfig(2, 128, 3, 2))
    rows = [Row(ANY, "index_scores_hopper_kernel", ScoresConfig(8, 64, 8, splits)) for splits in (1, 3)]
    rows += [Row(ANY, "index_scores_decode_hopper_kernel", decode._replace(splits=splits)) for splits in (1, 3)]
    for skip in (0, 64):
        expected = expected_scores(batch, skip)
        results = []
        for row in (plain, *rows):
            with forced_row(SCORES, row):
                results.append(written(ops, batch, skip=skip))
            check(results[-1], expected)
            assert torch.equal(results[-1].nan_to_num(), results[0].nan_to_num())


def test_a_long_prompt(ops, real_gpu):
    batch = Batch("fp8", [7000], [1000], device=real_gpu)
    got = written(ops, batch)
    check(got, reference_scores(*batch.args()))
    for t in (0, 501, 999):
        alone = written(ops, batch, slice(t, t + 1))
        assert torch.equal(got[t].nan_to_num(), alone[0].nan_to_num())


def agree(got, expected, scores, limit):
    """The same entries, but for some whose scores are as close as rounding makes them."""
    for mine, other, row in zip(got.tolist(), expected.tolist(), scores, strict=True):
        assert [e for e in mine if e >= 0] == sorted({e for e in mine if e >= 0})
        assert mine.count(-1) == other.count(-1)
        swapped = sorted(set(mine) ^ set(other))
        if swapped:
            threshold = row[[e for e in other if e >= 0]].min()
            assert (row[swapped] - threshold).abs().max() <= limit * row[row > -INF].abs().max()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", BATCHES)
def test_selection(ops, real_gpu, shape, fmt, monkeypatch):
    monkeypatch.setattr(ops, "SCORE_BYTES", 1 << 18)
    lens, new = BATCHES[shape]
    batch = Batch(fmt, lens, new, device=real_gpu, pages=2200)
    for k in (7, 64, 512):
        out = torch.full((len(batch.q), k), HUGE, dtype=torch.int32, device=real_gpu)
        slots = torch.full_like(out, HUGE)
        got = ops.index_select(*batch.args(), k, out=out, out_slots=slots)
        agree(got, reference_select(*batch.args(), k), reference_scores(*batch.args()).cpu(), 1e-3)
        pages = batch.table[batch.requests.long()].gather(1, got.clamp(min=0).long() // 64)
        assert torch.equal(slots, torch.where(got >= 0, pages * 64 + got % 64, -1).int())


def test_selection_in_a_graph(ops, real_gpu):
    batch = Batch("fp8", [3000, 40, 900], [2, 2, 2], device=real_gpu)
    ops.index_select(*batch.args(), 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.index_select(*batch.args(), 64)
    for shift in (0, 1000, 5000):
        batch.visible.sub_(shift).clamp_(min=0)
        batch.weights.neg_()
        graph.replay()
        agree(got, reference_select(*batch.args(), 64), reference_scores(*batch.args()).cpu(), 1e-3)


def test_nothing_to_score(ops, device):
    batch = Batch("fp8", [90, 7], [1, 2], 5, 32, device)
    assert ops.paged_index_scores(*batch.args(slice(0, 0))).shape == (0, 128)
    assert ops.paged_index_scores(*batch.args(), width=0).shape == (3, 0)
    assert ops.index_select(*batch.args(slice(0, 0)), 4).shape == (0, 4)


def test_refuses_what_it_cannot_take(ops, device):
    batch = Batch("fp8", [90], [2], 5, 32, device)
    queries, keys, visible = batch.args()
    other = make_index_record("fp8", 64)
    for words, args in {
        "q for index_fp8 keys must be contiguous": (queries._replace(q=queries.q.float()), keys, visible),
        "q for index_fp8 keys must be": (queries, keys._replace(record=other), visible),
        "weights must be": (queries._replace(weights=queries.weights.double()), keys, visible),
        "99 entries per page needs": (queries, keys._replace(entries=99), visible),
        "multiples of 4 bytes": (queries, keys._replace(pool=keys.pool[:, 1:]), visible),
        "width must be in": (queries, keys, visible, 10_000),
        "token_to_req must be": (queries, keys._replace(token_to_req=keys.token_to_req[:1]), visible),
    }.items():
        with pytest.raises(ValueError, match=words):
            ops.paged_index_scores(*args)
