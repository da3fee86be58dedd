"""Candidate blocks in Triton: compiled for every GPU generation, and the selection of plain torch."""

import os

import numpy
import pytest
import torch

from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels.indexer import CandidateBlocks, IndexQueries, PagedIndexKeys, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.indexer import launch
from deepseek_attn.kernels.indexer.plan import CANDIDATE_SCORES, ScoresConfig
from tests.kernels.compiled_launches import compiled_ops, on_gpus
from tests.kernels.indexer.test_index_scores_triton import Batch, agree

NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMATS = ["plain", "fp8", "fp4"]
VARIANTS = [(fmt, T) for fmt in FORMATS for T in (1, 4096)]


@pytest.fixture
def ops(triton_device):
    if INTERPRETED and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton 3.6's interpreter cannot read the bounds of a loop with NumPy 2.4 or later")


@pytest.fixture
def real_gpu(device, needs_gpu):
    if device.type != "cuda":
        pytest.skip("needs an NVIDIA GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda")
    return device


def make_batch(fmt, device, lens=(301, 0, 70, 128), new=(3, 1, 2, 4), H=5, **options):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return Batch(fmt, list(lens), list(new), H, 32, device, stride=2, dtype=dtype, **options)


def kept_by_reference(batch, k, size, count):
    kept = torch.full((len(batch.q), count), HUGE, dtype=torch.int32, device=batch.q.device)
    reference.index_select(*batch.args(), k=k, candidates=CandidateBlocks(size, kept, fill=True))
    return kept


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("size", "count", "k"), [(8, 3, 16), (3, 9, 20), (1, 17, 16)])
@pytest.mark.usefixtures("ops")
def test_selection_among_candidates(device, fmt, size, count, k):
    batch = make_batch(fmt, device)
    kept = kept_by_reference(batch, k, size, count)
    other = batch.args()[0]._replace(weights=batch.weights.flip(0).contiguous())
    limited = CandidateBlocks(size, kept, fill=False)
    expected = reference.index_select(other, *batch.args()[1:], k, candidates=limited)
    out = torch.full((len(batch.q), k), HUGE, dtype=torch.int32, device=device)
    slots = torch.full_like(out, HUGE)
    got = launch.index_select(other, *batch.args()[1:], k, None, out, slots, limited)
    row_scores = reference.paged_index_scores(other, *batch.args()[1:]).cpu()
    agree(got, expected, row_scores, 1e-5 if INTERPRETED else 1e-3)
    blocks = [{b for b in row if b >= 0} for row in kept.tolist()]
    assert all(e // size in own for own, row in zip(blocks, got.tolist(), strict=True) for e in row if e >= 0)
    pages = batch.table[batch.requests.long()].gather(1, got.clamp(min=0).long() // 32)
    assert torch.equal(slots, torch.where(got >= 0, pages * 32 + got % 32, -1).int())


@pytest.mark.parametrize(("size", "count"), [(8, 3), (3, 9), (1, 17)])
@pytest.mark.usefixtures("ops")
def test_blocks_are_kept(device, size, count):
    """Of scores with ties and NaN; where there are none because everything is selected; and +inf for the newest."""
    width, skip = 83, 16
    visible = torch.tensor([83, 0, 16, 17, 40, 64], device=device)
    given = torch.randn(6, width, device=device).mul(4).round().div(4)
    given[0, 20:30], given[4, 7], given[5, :64] = NAN, INF, -1.0
    given[torch.arange(width, device=device) >= visible[:, None]] = NAN
    given[visible <= skip] = NAN
    expected = torch.full((6, count), HUGE, dtype=torch.int32, device=device)
    kept = expected.clone()
    for row, n in enumerate(visible.tolist()):
        known = torch.zeros(1, n, device=device) if n <= skip else given[row : row + 1, :n]
        blocks = CandidateBlocks(size, expected[row : row + 1], fill=True)
        reference._limit(known, visible[row : row + 1], blocks)
    launch.keep_blocks(given, visible, skip, CandidateBlocks(size, kept, fill=True))
    assert torch.equal(kept, expected)


@pytest.mark.usefixtures("ops")
def test_columns_without_an_entry(device):
    """They are -inf where the length of the row covers them, and not written past it; a NaN key has no number."""
    batch = make_batch("plain", device, lens=[100, 40], new=[2, 1])
    kept = torch.tensor([[0, 5, 12, -1], [2, 3, 12, -1], [0, 1, 2, 3]], dtype=torch.int32, device=device)
    page = batch.table[0, 1:2].long()
    batch.record.insert(batch.pool, 32, page * 32 + 9, torch.full((1, 128), NAN, device=device))  # entry 41 of block 5
    got = torch.full((3, 32), NAN, device=device)
    launch.launch_scores(*batch.args(), 0, got, CandidateBlocks(8, kept, fill=False))
    scored = reference.paged_index_scores(*batch.args()).cpu()
    for row, blocks in enumerate(kept.tolist()):
        n = int(batch.visible[row])
        for column, value in enumerate(got[row].tolist()):
            entry = blocks[column // 8] * 8 + column % 8
            if column >= n:
                assert value != value
            elif blocks[column // 8] < 0 or entry >= n:
                assert value == -INF
            else:
                expected = float(scored[row, entry])
                assert (value != value) == (expected != expected)
                assert value != value or abs(value - expected) <= 1e-2 * max(1, abs(expected))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("H", [32, 20])
def test_equal_to_scores_of_all_entries(real_gpu, fmt, H):
    """The bits of a score do not depend on how its key was found, nor on the batch, nor on the launch."""
    batch = Batch(fmt, [9000, 3000, 12], [3, 40, 1], H, 64, real_gpu, 2200, stride=3)
    kept = kept_by_reference(batch, 512, 8, 128)
    blocks = CandidateBlocks(8, kept, fill=False)
    found = torch.full((len(batch.q), 1024), NAN, device=real_gpu)
    launch.launch_scores(*batch.args(), 0, found, blocks)
    whole = launch.paged_index_scores(*batch.args())
    for row, n in enumerate(batch.visible.tolist()):
        entry = (kept[row].long()[:, None] * 8 + torch.arange(8, device=real_gpu)).flatten()[: min(n, 1024)]
        known = (entry >= 0) & (entry < n)
        mine = found[row, : len(entry)]
        assert mine[~known].eq(-INF).all()
        torch.testing.assert_close(mine[known], whole[row, entry[known]], rtol=1e-5, atol=1e-6)
    for splits in (1, 3, 8):
        config = ScoresConfig(1, 128 if fmt != "plain" else 64, 4, splits)
        again = torch.full_like(found, NAN)
        with forced_row(CANDIDATE_SCORES, Row(ANY, "candidate_scores_kernel", config)):
            launch.launch_scores(*batch.args(), 0, again, blocks)
        torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-6, equal_nan=True)
    for _ in range(50):
        again = torch.full_like(found, NAN)
        launch.launch_scores(*batch.args(), 0, again, blocks)
        assert torch.equal(again.nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("fmt", FORMATS)
def test_as_v41_selects(real_gpu, fmt, monkeypatch):
    """Blocks kept from one layer's scores, then the selection of another, in row blocks of a few queries."""
    monkeypatch.setattr(launch, "SCORE_BYTES", 1 << 20)
    batch = Batch(fmt, [40_000, 17_000, 600], [5, 30, 1], 32, 64, real_gpu, 2200)
    shape = (len(batch.q), 2048)
    mine, other = (torch.full(shape, HUGE, dtype=torch.int32, device=real_gpu) for _ in range(2))
    width = batch.table.shape[1] * 64
    args = (*batch.args(), 512, width)
    got = launch.index_select(*args, candidates=CandidateBlocks(8, mine, fill=True))
    assert torch.equal(got, launch.index_select(*args))
    reference.index_select(*args, candidates=CandidateBlocks(8, other, fill=True))
    assert (torch.where(mine == other, 0, 1).sum(1) < 20).all() or fmt != "plain"
    queries = IndexQueries(batch.q, batch.weights.neg())
    limited = CandidateBlocks(8, mine, fill=False)
    got = launch.index_select(queries, *batch.args()[1:], 512, width, candidates=limited)
    expected = reference.index_select(queries, *batch.args()[1:], 512, width, candidates=limited)
    agree(got, expected, reference.paged_index_scores(queries, *batch.args()[1:]).cpu(), 1e-3)


@pytest.mark.usefixtures("ops")
def test_nothing_to_select(device):
    batch = make_batch("fp8", device)
    kept = torch.zeros(0, 4, dtype=torch.int32, device=device)
    for fill in (True, False):
        blocks = CandidateBlocks(8, kept, fill)
        assert launch.index_select(*batch.args(slice(0, 0)), 4, candidates=blocks).shape == (0, 4)


def meta_batch(fmt, T):
    """As a decode of V4.1, or a prefill of one request, at 65,536 entries."""

    def of(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    record = make_index_record(fmt, 128, torch.bfloat16)
    dtype = torch.bfloat16 if fmt == "plain" else torch.float8_e4m3fn
    queries = IndexQueries(of(T, 32, 128, dtype=dtype), of(T, 32, dtype=torch.float32))
    pool = of(9, record.page_bytes(64), dtype=torch.uint8)
    keys = PagedIndexKeys(record, pool, 64, of(1, 1024), of(T))
    return queries, keys, of(T, dtype=torch.int64), of(T, 2048)


def call(fmt, T):
    queries, keys, visible, kept = meta_batch(fmt, T)
    for fill in (True, False):
        slots = torch.empty(T, 512, dtype=torch.int32, device="meta")
        launch.index_select(queries, keys, visible, 512, out_slots=slots, candidates=CandidateBlocks(8, kept, fill))


@pytest.mark.parametrize(("arch", "variant"), on_gpus(VARIANTS, [("fp8", 1)]), ids=str)
@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
def test_compiles(monkeypatch, arch, variant):
    scores = launch.launch_scores  # without candidates, and top-k: they have compile tests of their own
    monkeypatch.setattr(launch, "launch_scores", lambda *args: scores(*args) if len(args) == 6 else None)
    monkeypatch.setattr(launch, "launch_topk", lambda *_: None)
    found = compiled_ops(arch, lambda: call(*variant))
    assert set(found) == {"candidate_scores_kernel", "block_scores_kernel", "candidate_entries_kernel"}
    fmt, _T = variant
    for kernel in found["candidate_scores_kernel"]:
        assert "cp.async" in kernel.asm["ptx"], "keys of the next tile are read meanwhile"
        assert ("e4m3" in kernel.asm["ptx"]) == (arch != "sm80" and fmt != "plain") or arch.startswith("sm10")


def test_bad_arguments_are_named():
    queries, keys, visible, kept = meta_batch("fp8", 3)
    for fill in (True, False):
        for wrong in (kept[:2], kept.long(), kept.t().contiguous().t()):
            with pytest.raises(ValueError, match=r"candidate blocks must be int32 \[3, n\]"):
                launch.index_select(queries, keys, visible, 4, candidates=CandidateBlocks(8, wrong, fill))
