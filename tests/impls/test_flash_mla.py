"""The FlashMLA adapter: which flavour it finds, what it refuses, and the arguments it passes to the kernels.

The kernels are stand-ins on the CPU and, on a GPU that has them, the installed ones.
"""

import sys
import types
from itertools import product
from typing import Any

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.attention.reference import sparse_attention, sparse_attention_paged
from deepseek_attn.kernels.common.device import GPU, meta_stands_for
from tests.support import fake_flash_mla
from tests.support.tiers import tiered
from tests.support.typed import required

RECORD, V32 = Fp8DsMlaRecord(448, 64), Fp8DsMlaV32Record()
INF = float("inf")
CUDA = torch.device("cuda")


@pytest.fixture
def install(monkeypatch):
    """Installs a stand-in, or nothing for None, on a machine that then appears to have a Hopper GPU."""

    def put(module):
        flash_mla.flavour.cache_clear()
        monkeypatch.setitem(sys.modules, "flash_mla", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(flash_mla, "compute_capability", lambda device: (9, 0))
        return module

    yield put
    flash_mla.flavour.cache_clear()


@pytest.fixture(params=fake_flash_mla.FLAVOURS)
def fake(request, install):
    return install(fake_flash_mla.make(request.param))


@pytest.fixture(params=[*fake_flash_mla.FLAVOURS, pytest.param("installed", marks=pytest.mark.gpu)])
def kernels(request):
    """Kernels for the test's tensors: a stand-in, whose calls it returns, or the installed package on a GPU."""
    if request.param != "installed":
        yield request.getfixturevalue("install")(fake_flash_mla.make(request.param)).calls
        return
    usable, reason = flash_mla.supported(CUDA)
    if not usable:
        pytest.skip(reason)
    torch.set_default_device(CUDA)
    yield None
    torch.set_default_device(None)


def test_without_a_gpu_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flash_mla, "_module", lambda: pytest.fail("flash_mla was imported"))
    assert flash_mla.supported("cpu") == (False, "FlashMLA needs an NVIDIA GPU; the device is cpu")
    assert not flash_mla.supported("cuda")[0]


def test_not_installed_says_how_to_install(install):
    install(None)
    usable, reason = flash_mla.supported(CUDA)
    assert not usable
    assert "not installed: pip install --no-deps sgl-flash-mla" in reason


@pytest.mark.parametrize(
    ("error", "word"),
    [(OSError("undefined symbol"), "undefined symbol"), (ModuleNotFoundError("no libs", name="libs"), "no libs")],
    ids=["library", "dependency"],
)
def test_a_broken_package_is_a_reason_not_an_error(install, monkeypatch, error, word):
    install(None)

    def broken():
        raise error

    monkeypatch.setattr(flash_mla, "_module", broken)
    usable, reason = flash_mla.supported(CUDA)
    assert not usable
    assert word in reason


@pytest.mark.parametrize(
    ("flavour", "name", "legacy", "out"),
    [("sgl", "sgl-flash-mla", True, False), ("vllm", "vllm", False, True), ("upstream", "upstream", False, False)],
)
def test_flavours_are_told_apart(install, flavour, name, legacy, out):
    install(fake_flash_mla.make(flavour))
    found = flash_mla.flavour()
    assert (found.name, found.version, found.use_legacy, found.supports_out, found.problem) == (
        name, "1.2.3", legacy, out, "",
    )  # fmt: skip
    assert flash_mla.supported(CUDA) == (True, f"{name} 1.2.3 on compute capability 9.0")


def test_upstream_without_sm90_names_the_release_and_the_remedy(install):
    module = install(fake_flash_mla.make("upstream"))

    def current(q, k_cache, indices=None, extra_k_cache=None, enable_batch_invariant=False):
        """Upstream since 2026.09.30."""

    module.flash_mla_with_kvcache = current
    usable, reason = flash_mla.supported(CUDA)
    assert not usable
    assert "2026.09.30" in reason
    assert "pip install --no-deps sgl-flash-mla" in reason


def test_upstream_of_dense_days_is_too_old(install):
    module = install(fake_flash_mla.make("upstream"))
    module.flash_mla_with_kvcache = lambda q, k_cache, block_table, cache_seqlens, head_dim_v: None
    assert "too old" in flash_mla.supported(CUDA)[1]


def test_sgl_built_without_legacy_kernels(install):
    module = install(fake_flash_mla.make("sgl"))
    module.has_legacy = lambda: False
    assert "lacks the SM90" in flash_mla.supported(CUDA)[1]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0), (7, 5)], ids=lambda c: f"sm{c[0]}{c[1]}")
def test_other_gpus_are_refused_by_name(install, monkeypatch, capability):
    install(fake_flash_mla.make("sgl"))
    monkeypatch.setattr(flash_mla, "compute_capability", lambda device: capability)
    usable, reason = flash_mla.supported(CUDA)
    assert not usable
    assert f"{capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (AttentionSpec(64, 512), ""),
        (AttentionSpec(128, 576), ""),
        (AttentionSpec(1, 512, kv_record="plain"), ""),
        (AttentionSpec(64, 256), "256"),
        (AttentionSpec(64, 512, rope_dim=32), "32"),
        (AttentionSpec(129, 512), "129"),
        (AttentionSpec(64, 512, dtype=torch.float32), "dtype='bfloat16'"),
    ],
)
def test_shapes_without_a_kernel_are_refused(install, spec, word):
    install(fake_flash_mla.make("sgl"))
    usable, reason = flash_mla.supported(CUDA, spec)
    assert usable == (not word)
    assert word in reason


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (8, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_what_exists_and_no_further(heads, padded):
    assert flash_mla.padded_heads(heads) == padded


@pytest.mark.parametrize("heads", [0, 129])
def test_impossible_head_counts(heads):
    with pytest.raises(ValueError, match=str(heads)):
        flash_mla.padded_heads(heads)


def poisoned_pool(pages, n, live, stride=None):
    """A pool of NaN bytes in which only the slots ``live`` are written."""
    size = RECORD.page_bytes(n)
    pool = torch.full((pages, stride or size), 0xFF, dtype=torch.uint8)[:, :size]
    RECORD.insert(pool, n, live, torch.randn(len(live), 512))
    return pool


def paged_keys(T, K, pages, n, stride=None, lens=True):
    """Pages with holes in the index rows, slots of NaN past the lengths, and one row that sees nothing."""
    slots = torch.randperm(pages * n)
    live, dead = slots[: pages * n // 2], slots[-1]
    indices = live[torch.randint(len(live), (T, K))].int()
    indices[:, 2::5] = -1
    counts = torch.randint(0, K + 1, (T,)).int()
    if lens:
        counts[0] = 0
        indices = torch.where(torch.arange(K) >= counts[:, None], dead.int(), indices)
    else:
        indices[0] = -1
    return PagedKeys(RECORD, poisoned_pool(pages, n, live, stride), n, indices, counts if lens else None)


def reference(q, pages, scale, sink):
    return sparse_attention_paged(q, pages, scale, sink)


def check(got, expected, lse=1e-4):
    error = (got[0].float() - expected[0].float()).norm() / expected[0].float().norm().clamp(min=1e-9)
    assert float(error) < 4e-3
    torch.testing.assert_close(got[1], expected[1], rtol=lse, atol=lse)


@pytest.mark.parametrize(
    ("heads", "K"),
    tiered(
        product([1, 8, 64, 100, 128], [1, 7, 64, 100, 192, 513]),
        [(1, 1), (8, 7), (64, 64), (100, 192), (128, 513)],
    ),
)
def test_decode_over_two_pools(kernels, heads, K):
    q = torch.randn(5, heads, 512).bfloat16()
    sink = torch.randn(heads)
    pages = [paged_keys(5, 128, 9, 64), paged_keys(5, K, 7, 32, stride=32 * 584 + 5 * 576)]
    got = flash_mla.sparse_decode(q, pages, 0.05, sink)
    check(got, reference(q, pages, 0.05, sink))
    assert got[0].shape == (5, heads, 512)
    assert bool((got[0][0] == 0).all())
    assert bool((got[1][0] == INF).all())
    if kernels:
        assert kernels.decode == [{"q": (5, 1, 64 if heads <= 64 else 128, 512), "widths": [128, -(-K // 64) * 64]}]


@pytest.mark.parametrize("n", [1, 2, 53, 64, 256])
def test_decode_over_one_pool_of_any_page_size(kernels, n):
    q = torch.randn(3, 16, 512).bfloat16()
    pages = [paged_keys(3, 70, 11, n, lens=False)]
    check(flash_mla.sparse_decode(q, pages, 0.05), reference(q, pages, 0.05, None))


def test_decode_with_extreme_sinks(kernels):
    q = torch.randn(4, 8, 512).bfloat16()
    sink = torch.tensor([INF, -INF, 0.0, 1.0, -1.0, 30.0, -30.0, 5.0])
    pages = [paged_keys(4, 64, 9, 64)]
    got = flash_mla.sparse_decode(q, pages, 0.05, sink)
    check(got, reference(q, pages, 0.05, sink))
    assert bool((got[0][:, 0] == 0).all())


def test_decode_into_out_writes_every_row(kernels):
    pages = [paged_keys(5, 64, 9, 64)]
    for heads in (8, 64):
        q = torch.randn(5, heads, 512).bfloat16()
        out = torch.full((5, heads, 512), float("nan"), dtype=torch.bfloat16)
        returned, _ = flash_mla.sparse_decode(q, pages, 0.05, out=out)
        assert returned is out
        torch.testing.assert_close(out, flash_mla.sparse_decode(q, pages, 0.05)[0], rtol=0, atol=0)


def test_decode_of_padded_queries_takes_the_sinks_of_the_real_heads(kernels):
    q = torch.randn(3, 8, 512).bfloat16()
    padded, sink = torch.nn.functional.pad(q, (0, 0, 0, 56)), torch.randn(8)
    pages = [paged_keys(3, 64, 9, 64)]
    got = flash_mla.sparse_decode(padded, pages, 0.05, sink)
    check((got[0][:, :8], got[1][:, :8]), reference(q, pages, 0.05, sink))


def test_decode_of_several_queries_per_row(kernels):
    q = torch.randn(2, 3, 16, 512).bfloat16()
    page = paged_keys(6, 100, 9, 64, lens=False)
    indices = page.indices.view(2, 3, 100)
    lens = torch.tensor([100, 40], dtype=torch.int32)
    out, lse = flash_mla.sparse_decode(q, [PagedKeys(RECORD, page.pool, 64, indices, lens)], 0.05)
    flat = PagedKeys(RECORD, page.pool, 64, page.indices, lens.repeat_interleave(3))
    expected = reference(q.flatten(0, 1), [flat], 0.05, None)
    check((out.flatten(0, 1), lse.flatten(0, 1)), expected)
    assert lse.shape == (2, 3, 16)


def test_a_call_without_a_schedule_plans_for_itself(fake):
    q = torch.randn(3, 64, 512).bfloat16()
    for _ in range(3):
        pages = [paged_keys(3, 64, 9, 64)]
        check(flash_mla.sparse_decode(q, pages, 0.05), reference(q, pages, 0.05, None))
    assert fake.calls.schedules == 3


def test_a_schedule_is_reused_and_a_stale_one_is_what_the_stand_in_refuses(fake):
    q = torch.randn(3, 64, 512).bfloat16()
    page, schedule = paged_keys(3, 64, 9, 64), flash_mla.new_schedule()
    for _ in range(2):
        flash_mla.sparse_decode(q, [page], 0.05, schedule=schedule)
    assert fake.calls.schedules == 1
    shorter = PagedKeys(RECORD, page.pool, 64, page.indices, (required(page.lens) - 1).clamp(min=0))
    with pytest.raises(AssertionError, match="stale plan"):
        flash_mla.sparse_decode(q, [shorter], 0.05, schedule=schedule)


def test_nothing_is_launched_while_launches_are_recorded(fake):
    """Indices are then what their kernels would have written: anything."""
    q, kv = torch.randn(3, 64, 512).bfloat16(), torch.randn(5, 512).bfloat16()
    anything = torch.full((3, 128), 1 << 30, dtype=torch.int32)
    pool = poisoned_pool(3, 64, torch.arange(4))
    pages = [PagedKeys(RECORD, pool, 64, anything, torch.full((3,), 128, dtype=torch.int32))]
    with meta_stands_for(GPU((9, 0), 132)):
        assert flash_mla.sparse_prefill(q, kv, anything, 0.05)[0].shape == q.shape
        assert flash_mla.sparse_decode(q, pages, 0.05)[0].shape == q.shape
    assert fake.calls.decode == fake.calls.prefill == []


def test_zero_rows_and_empty_workspaces_never_launch(kernels):
    pool = poisoned_pool(3, 64, torch.arange(4))
    pages = [PagedKeys(RECORD, pool, 64, torch.empty(0, 64, dtype=torch.int32), torch.empty(0, dtype=torch.int32))]
    out, lse = flash_mla.sparse_decode(torch.empty(0, 8, 512, dtype=torch.bfloat16), pages, 0.05, torch.zeros(8))
    assert (out.shape, lse.shape) == ((0, 8, 512), (0, 8))
    empty = torch.empty(0, 512, dtype=torch.bfloat16)
    none = torch.empty(0, 7, dtype=torch.int32)
    assert flash_mla.sparse_prefill(torch.empty(0, 8, 512, dtype=torch.bfloat16), empty, none, 0.05)[0].shape[0] == 0
    q, out = torch.randn(2, 8, 512).bfloat16(), torch.full((2, 8, 512), float("nan")).bfloat16()
    got, lse = flash_mla.sparse_prefill(q, empty, torch.zeros(2, 7, dtype=torch.int32), 0.05, out=out)
    assert got is out
    assert bool((got == 0).all())
    assert bool((lse == INF).all())
    assert kernels in (None, fake_flash_mla.Calls())


def v32_pool(pages, n, live, pow2):
    """656-byte entries: 512 e4m3, 4 float32 scales, 64 bf16; and the keys that the kernels read, with bf16 products."""
    latent, rope = torch.randn(len(live), 4, 128), torch.randn(len(live), 64).bfloat16()
    scales = latent.abs().amax(2) / 448
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if pow2 else scales
    values = (latent / scales[..., None]).to(torch.float8_e4m3fn)
    keys = torch.full((pages * n, 576), float("nan"))
    keys[live] = torch.cat([(values.bfloat16() * scales.bfloat16()[..., None]).flatten(1), rope], 1).float()
    pool = torch.full((pages * n, 656), 0xFF, dtype=torch.uint8)
    pool[live] = torch.cat([values.flatten(1).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], 1)
    return pool.view(pages, n * 656), keys


@pytest.mark.parametrize("pow2", [True, False], ids=["pow2_scales", "raw_scales"])
@pytest.mark.parametrize("heads", [16, 128])
def test_v32_decode_masks_by_index_because_its_kernel_takes_no_lengths(kernels, heads, pow2):
    live = torch.randperm(9 * 64)[:300]
    pool, keys = v32_pool(9, 64, live, pow2)
    q = torch.randn(4, heads, 576).bfloat16()
    indices, lens = live[torch.randint(300, (4, 100))].int(), torch.tensor([100, 0, 65, 1]).int()
    out, lse = flash_mla.sparse_decode(q, [PagedKeys(V32, pool, 64, indices, lens)], 0.1)
    check((out, lse), sparse_attention(q, keys, indices, 0.1, None, lens, 512))
    with pytest.raises(ValueError, match="one"):
        flash_mla.sparse_decode(q, [PagedKeys(V32, pool, 64, indices, lens)] * 2, 0.1)


@pytest.mark.parametrize(
    ("K", "dim"),
    tiered(product([1, 7, 64, 100, 192, 513], [512, 576]), [(1, 512), (7, 576), (64, 512), (100, 576), (513, 512)]),
)
def test_prefill_ignores_what_is_past_the_length(kernels, K, dim):
    q, kv = torch.randn(6, 16, dim).bfloat16(), torch.randn(200, dim).bfloat16()
    kv[1::2] = float("nan")
    lens = torch.randint(0, K + 1, (6,)).int()
    lens[1] = 0
    indices = torch.randint(0, 100, (6, K)).mul(2).int()
    indices[:, 2::5] = -1
    past = torch.arange(K) >= lens[:, None]
    sink, out = torch.randn(16), torch.full((6, 16, 512), float("nan")).bfloat16()
    got = flash_mla.sparse_prefill(q, kv, torch.where(past, 1, indices).int(), 0.05, sink, lens, out)
    check(got, sparse_attention(q, kv, indices, 0.05, sink, lens, 512))
    assert got[0] is out
    if kernels:
        assert kernels.prefill == [{"q": (6, 64, dim), "width": -(-K // 128) * 128}]


def test_prefill_without_lengths_or_sinks(kernels):
    q, kv = torch.randn(6, 64, 512).bfloat16(), torch.randn(50, 512).bfloat16()
    indices = torch.randint(-1, 60, (6, 256)).int()
    check(flash_mla.sparse_prefill(q, kv, indices, 0.05), sparse_attention(q, kv, indices, 0.05))


def test_sm100_needs_pages_a_multiple_of_576_apart(fake, monkeypatch):
    q = torch.randn(3, 64, 512).bfloat16()
    pages = [paged_keys(3, 64, 9, 64, stride=64 * 584 + 600)]
    flash_mla.sparse_decode(q, pages, 0.05)  # fine on SM90
    monkeypatch.setattr(flash_mla, "compute_capability", lambda device: (10, 0))
    page = pages[0]
    cuda_like: Any = types.SimpleNamespace(type="cuda")
    with pytest.raises(ValueError, match=f"page stride of {64 * 584 + 600}"):
        flash_mla._cache_view(page, 512, cuda_like)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.zeros(3, 8, 512)}, "bfloat16"),
        ({"q": torch.zeros(3, 8, 256, dtype=torch.bfloat16)}, "256"),
        ({"sink": torch.zeros(9)}, "sink"),
        ({"sink": torch.zeros(8).bfloat16()}, "sink"),
        ({"out": torch.zeros(3, 8, 512)}, "out"),
        ({"indices": torch.zeros(3, 64, dtype=torch.int64)}, "int32"),
        ({"indices": torch.zeros(2, 64, dtype=torch.int32)}, r"\[3, K\]"),
        ({"lens": torch.zeros(2, dtype=torch.int32)}, "lens"),
        ({"pool": torch.zeros(3, 64 * 584 - 1, dtype=torch.uint8)}, "pool"),
        ({"pool": torch.zeros(3, 64 * 584, dtype=torch.int8)}, "uint8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("fake", ["upstream"], indirect=True)
def test_decode_says_what_it_was_given(fake, change, word):
    q = change.get("q", torch.zeros(3, 8, 512, dtype=torch.bfloat16))
    page = PagedKeys(
        RECORD,
        change.get("pool", torch.zeros(3, 37440, dtype=torch.uint8)),
        64,
        change.get("indices", torch.zeros(3, 64, dtype=torch.int32)),
        change.get("lens"),
    )
    with pytest.raises(ValueError, match=word):
        flash_mla.sparse_decode(q, [page], 0.05, change.get("sink"), out=change.get("out"))
    assert not fake.calls.decode
