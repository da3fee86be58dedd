"""The Triton top-k: compiled for every GPU generation, and the very columns that the plain-torch version selects."""

import os

import pytest
import torch

from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels import indexer
from deepseek_attn.kernels.indexer import MAX_TRITON_TOPK, PagedIndexKeys, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.indexer.launch import launch_topk, topk_indices
from deepseek_attn.kernels.indexer.plan import TOPK, TopkConfig, TopkProblem
from tests.kernels.compiled_launches import ONE, compiled_ops, on_gpus

NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = [
    "normal",
    "ties",
    "nan",
    "constant",
    "rising",
    "falling",
    "zeros",
    "wide",
    "clustered",
    "denormal",
    "minus inf",
]
KINDS += ["high sample", "low sample"]
# marks of a row listed in rounds, listed at once, and of a row that four programs share
SMALL = [
    TopkConfig(*tiling) for tiling in ((1, 128, 256, 256, 1, 1), (1, 512, 256, 512, 4, 2), (4, 128, 256, 256, 4, 1))
]


# --- every kernel compiles for every generation, on any machine ---


SHAPES = [(4096, 2048, 512), (1, 262144, 512), (128, 32768, 512), (4096, 32768, 1024), (4, 131072, 2048)]
SHAPES += [(128, 2048, 512), (64, 32768, 4096)]


@pytest.mark.parametrize(("arch", "shape"), on_gpus(SHAPES, [(128, 32768, 512)], ONE), ids=str)
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiles(arch, shape):
    T, W, k = shape
    table, owners = (torch.empty(*size, dtype=torch.int32, device="meta") for size in ((1, W // 64), (T,)))
    scores, slots = torch.empty(T, W, device="meta"), torch.empty(T, k, dtype=torch.int32, device="meta")
    keys = PagedIndexKeys(make_index_record("fp8", 128), slots, 64, table, owners)
    found = compiled_ops(arch, lambda: launch_topk(scores, owners, torch.empty_like(slots), keys, slots), alike=True)
    assert set(found) == {"topk_kernel"}


def check_config(config, W, k):
    """What a tiling must have to give the best ``k`` of ``W`` columns."""
    groups = 4 * 32 * config.num_warps
    assert min(config.tile, config.sample, config.capacity) >= groups
    assert config.capacity >= min(W, k + groups)


@pytest.mark.parametrize("k", [0, 1, 7, 64, 100, 192, 512, 513, 1024, 2048, 4095, 4096])
def test_a_config_has_capacity(k):
    for T in (1, 2, 7, 8, 32, 64, 128, 264, 512, 4096, 100_000):
        for W in (1, 100, 1024, 2048, 2049, 4096, 8193, 32768, 65_536, 65_537, 262_144, 300_000, 1_000_000, 8_000_000):
            for processors in (1, 16, 108, 132, 148):
                config = TOPK.plan(TopkProblem(T, W, k=k), GPU((9, 0), processors)).config
                check_config(config, W, k)
                threads = 32 * config.num_warps
                assert threads <= 1024
                # a tile and the one that is read ahead, and the candidates, stay in registers
                assert max(config.tile, config.capacity) <= 32 * threads
                assert k < config.capacity // 2 or config.capacity >= W
                # two counts are 16 bits of one number
                assert max(config.capacity, config.sample) < 2**16
                assert config.splits == 1 or (config.splits * 8192 <= W and T * config.splits <= 2 * processors)
                for size in (config.splits, config.tile, config.sample, config.capacity, config.words):
                    assert size & (size - 1) == 0


def forced(config):
    return forced_row(TOPK, Row(ANY, "topk_kernel", config))


# --- the kernels: on a GPU with DEEPSEEK_ATTN_TEST_DEVICE=cuda, some by TRITON_INTERPRET=1 ---


@pytest.fixture
def gpu(triton_device):
    return triton_device


@pytest.fixture
def real_gpu(device, needs_gpu):
    if device.type != "cuda":
        pytest.skip(f"needs an NVIDIA GPU; DEEPSEEK_ATTN_TEST_DEVICE is {os.environ.get('DEEPSEEK_ATTN_TEST_DEVICE')}")
    return device


def make(kind, T, W, k, device):
    """Scores of a kind and hostile lengths; past a row's length anything."""
    scores = torch.randn(T, W)
    if kind == "ties":
        scores = scores.clamp(min=0).mul(2).round()
    if kind == "nan":
        pick = torch.rand(T, W)
        scores[pick < 0.4] = NAN
        scores[(pick > 0.5) & (pick < 0.7)] = -INF
        scores[pick > 0.95] = INF
    if kind == "constant":
        scores.fill_(-3.5)
    if kind == "rising":
        scores = torch.arange(W).float().expand(T, W).clone()
    if kind == "falling":
        scores = -torch.arange(W).float().expand(T, W).clone()
    if kind == "clustered":
        scores = 1 + scores * 1e-7
    if kind == "denormal":
        scores *= 1e-41
    if kind == "minus inf":
        scores[torch.rand(T, W) < 0.9] = -INF
    if kind.endswith("sample"):
        # the columns of a sample, as the kernel draws it, are the highest or the lowest of all
        for sample in (1024, 2048, 4096, 8192) if W > 2048 else (128, 256):
            i = torch.arange(sample // 4)
            random = ((i * -1640531535) & 0x7FFFFFFF).float() * 2.0**-31
            run = ((i + random) * (W / sample)).long().clamp(max=W // 4 - 1)
            column = (4 * run[:, None] + torch.arange(4)).flatten().clamp(min=0, max=W - 1)
            scores[:, column] += 100 if kind == "high sample" else -100
    if kind == "zeros":
        scores = torch.where(torch.rand(T, W) < 0.5, -0.0, 0.0)
    if kind == "wide":
        scores = scores * torch.exp(20 * torch.randn(T, W))
    lens = torch.tensor([0, 1, W, W + 5, max(W - 1, 0), k, k + 1, W // 2, -3, HUGE]).repeat(T // 10 + 1)[:T]
    past = torch.arange(W) >= lens[:, None]
    junk = torch.tensor([NAN, INF, 1e30])[torch.arange(T) % 3]
    return torch.where(past, junk[:, None], scores).to(device), lens.to(device)


@pytest.mark.parametrize("kind", ["nan", "constant", "high sample", "low sample"] if INTERPRETED else KINDS)
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_small_configs(gpu, config, kind):
    for W, k in ((65, 1), (64, 7), (300, 30), (1300, 16)):
        scores, lens = make(kind, 10, W, k, gpu)
        out = torch.full((10, k), HUGE, dtype=torch.int32, device=gpu)
        check_config(config, W, k)
        with forced(config):
            got = launch_topk(scores, lens, out)
        assert torch.equal(got, reference.topk_indices(scores, lens, k))
        assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("junk", [-1, 0x7F7FFFFF])  # all marks, and candidates of the highest score
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_what_scratch_holds_before_does_not_matter(gpu, monkeypatch, config, junk):
    scores, lens = make("normal", 10, 1300, 16, gpu)
    want = reference.topk_indices(scores, lens, 16)
    empty = torch.empty

    def filled(*size, **options):
        made = empty(*size, **options)
        return made.fill_(junk << 32 | junk if made.dtype == torch.int64 else junk)

    monkeypatch.setattr(torch, "empty", filled)
    with forced(config):
        assert torch.equal(topk_indices(scores, lens, 16), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 64, 100, 192, 512, 513, 1024, 2048])
@pytest.mark.parametrize("W", [1, 65, 1000, 2048, 8193, 16385, 40_000, 300_000])
def test_large(real_gpu, W, k, kind):
    scores, lens = make(kind, 8 if W == 300_000 else 13, W, k, real_gpu)
    assert torch.equal(topk_indices(scores, lens.int(), k), reference.topk_indices(scores, lens, k))


def test_slots(gpu):
    T, pages, n, k = 6, 9, 32, 20
    scores, lens = (
        torch.randn(T, 3 * n * pages, device=gpu)[:, ::3].contiguous(),
        torch.tensor([0, 5, 20, 21, 200, 288]),
    )
    table = torch.randint(60_000, (4, 2 * pages), dtype=torch.int32, device=gpu)[:, :pages]
    requests = torch.tensor([3, 0, 0, 2, 1, 3], device=gpu)
    # the record and the pool are not read
    keys = PagedIndexKeys(make_index_record("fp8", 128), torch.empty(0, 0, device=gpu), n, table, requests)
    expected_slots = torch.full((T, k), HUGE, dtype=torch.int32, device=gpu)
    expected = reference.topk_indices(scores, lens.to(gpu), k, keys=keys, out_slots=expected_slots)
    assert int(expected_slots.max()) > n * pages
    for config in SMALL:
        slots, out = torch.full((2, T, k), HUGE, dtype=torch.int32, device=gpu)
        with forced(config):
            launch_topk(scores, lens.to(gpu), out, keys, slots)
        assert torch.equal(out, expected)
        assert torch.equal(slots, expected_slots)


def test_strided_rows(gpu):
    whole = torch.full((8, 90), INF, device=gpu)
    whole[:, 7:77] = torch.randn(8, 70, device=gpu)
    lens = torch.full((8,), 70, device=gpu)
    out = torch.full((8, 12), HUGE, dtype=torch.int32, device=gpu)
    with forced(SMALL[0]):
        launch_topk(whole[:, 7:77], lens, out[:, 2:11])
    assert torch.equal(out[:, 2:11], reference.topk_indices(whole[:, 7:77], lens, 9))
    assert out[:, [0, 1, 11]].eq(HUGE).all()


def test_nothing_to_select(gpu):
    none = torch.empty(0, dtype=torch.int32, device=gpu)
    assert topk_indices(torch.empty(0, 50, device=gpu), none, 7).shape == (0, 7)
    lens = torch.tensor([5, 5], device=gpu)
    assert topk_indices(torch.zeros(2, 5, device=gpu), lens, 0).shape == (2, 0)
    with forced(SMALL[0]):
        assert topk_indices(torch.empty(2, 0, device=gpu), lens, 3).eq(-1).all()


def test_a_row_does_not_depend_on_the_batch(real_gpu):
    scores, lens = make("ties", 100, 40_000, 512, real_gpu)
    whole = topk_indices(scores, lens, 512)
    alone = [topk_indices(scores[t : t + 1], lens[t : t + 1], 512) for t in range(100)]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize(("T", "W"), [(1, 262144), (8, 262144), (300, 32768), (300, 2048)])
def test_fifty_launches_are_bit_identical(real_gpu, T, W):
    scores, lens = make("ties", T, W, 512, real_gpu)
    first = topk_indices(scores, lens, 512)
    assert all(torch.equal(topk_indices(scores, lens, 512), first) for _ in range(50))


@pytest.mark.parametrize(("T", "W"), [(9, 70_000), (8, 262_144)])
def test_graph_replays_with_other_scores_and_lengths(real_gpu, T, W):
    scores, lens = make("normal", T, W, 512, real_gpu)
    topk_indices(scores, lens, 512)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = topk_indices(scores, lens, 512)
    for kind in KINDS:
        other, _ = make(kind, T, W, 512, real_gpu)
        scores.copy_(other)
        lens.copy_(lens.roll(1))
        graph.replay()
        assert torch.equal(got, reference.topk_indices(scores, lens, 512))


def test_more_than_two_gib_of_scores(real_gpu):
    T, W = 70, 8_000_000
    scores = torch.empty(T, W, device=real_gpu)
    scores[-2:] = torch.randn(2, W, device=real_gpu)
    lens = torch.zeros(T, dtype=torch.int32, device=real_gpu)
    lens[-2:] = W
    got = topk_indices(scores, lens, 64)
    assert torch.equal(got[-2:], reference.topk_indices(scores[-2:], lens[-2:], 64))
    assert got[:-2].eq(-1).all()


def test_refuses_what_it_cannot_take(gpu):
    scores, lens = torch.zeros(2, 64, device=gpu), torch.tensor([5, 5], device=gpu)
    with pytest.raises(ValueError, match="scores must be"):
        topk_indices(scores.double(), lens, 4)
    with pytest.raises(ValueError, match="lens must be"):
        topk_indices(scores, lens[:1], 4)


def test_plain_torch_serves_more_columns_than_the_kernel(gpu):
    scores, lens = torch.randn(2, MAX_TRITON_TOPK + 8, device=gpu), torch.tensor([MAX_TRITON_TOPK + 5, 3], device=gpu)
    got = indexer.topk_indices(scores, lens, MAX_TRITON_TOPK + 1)
    assert torch.equal(got, reference.topk_indices(scores, lens, MAX_TRITON_TOPK + 1))
