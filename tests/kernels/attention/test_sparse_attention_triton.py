"""The Triton kernels of sparse attention on a GPU, against float32 torch."""

import os

import pytest
import torch

from deepseek_attn.cache.records import Fp8DsMlaRecord, PlainRecord
from deepseek_attn.kernels.attention import PagedKeys, reference
from tests.kernels.attention.sparse_attention_cases import (
    HUGE,
    INF,
    LIMIT,
    NAN,
    TINY,
    V4,
    V41,
    Launch,
    check,
    forced,
    hostile,
    make_pool,
    skip_unless_it_runs,
)

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.attention.launch import sparse_attention, sparse_attention_paged
from tests.support.typed import required


def paged(q, pools, sink, config=None, **options):
    with forced(config):
        return sparse_attention_paged(q, pools, q.shape[2] ** -0.5, sink, **options)


def paged_reference(q, pools, sink):
    return reference.sparse_attention_paged(q.float(), pools, q.shape[2] ** -0.5, sink)


@pytest.mark.parametrize("K", [1, 7, 64, 100, 192, 512, 513, 1024])
@pytest.mark.parametrize("H", [1, 8, 16, 32, 64, 100, 128])
def test_two_fp8_pools(gpu, H, K):
    for T in (1, 9, 70):
        q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H) * 2
        pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, K, 64, 99)]
        check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])


@pytest.mark.parametrize("n", [(64, 2), (1, 64), (53, 61), (256, 32)], ids=str)
@pytest.mark.parametrize("record", [V4, TINY, Fp8DsMlaRecord(128, 32)], ids=lambda r: str(r.dim))
def test_page_sizes_and_dims(gpu, record, n):
    q, sink = torch.randn(33, 40, record.dim).bfloat16(), torch.randn(40)
    pools = [make_pool(record, 33, 128, n[0], 999), make_pool(record, 33, 130, n[1], 999)]
    check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])
    check(paged(q, pools[:1], None), paged_reference(q, pools[:1], None), LIMIT[q.dtype])


CONFIGS = [
    Launch(16, 32, 4, 2),
    Launch(16, 16, 4, 1, 128, 9),
    Launch(16, 32, 8, 1, 128, 5),
    Launch(16, 64, 8, 2, 128, 3),
    Launch(32, 32, 8, 2, 64, 7),
    Launch(64, 64, 8, 2),
    Launch(64, 64, 8, 2, 128, 5),
    Launch(64, 64, 8, 1, 64, 1, True),
    Launch(64, 64, 8, 1, 64, 4, True),
    Launch(64, 64, 8, 1, 64, 130, True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda t: f"{t.heads}x{t.keys}x{t.splits}{'g' * t.hopper}")
def test_every_configuration_gives_the_same(gpu, config):
    skip_unless_it_runs(config)
    q, sink = torch.randn(21, 100, 512).bfloat16(), torch.randn(100)
    pools = [make_pool(V4, 21, 128, 64, 31, stride=3), make_pool(V4, 21, 700, 2, 999, stride=2)]
    expected = paged_reference(q, pools, sink)
    for _ in range(5):
        check(paged(q, pools, sink, config=config), expected, LIMIT[q.dtype])
    counted = [torch.arange(keys.indices.shape[1]) < required(keys.lens)[:, None] for keys in pools]
    without = [
        keys._replace(indices=torch.where(counts, keys.indices, -1), lens=None)
        for keys, counts in zip(pools, counted, strict=True)
    ]
    check(paged(q, without, sink, config=config), expected, LIMIT[q.dtype])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda t: f"{t.heads}x{t.keys}x{t.splits}{'g' * t.hopper}")
def test_nan_in_queries_without_keys_is_not_seen(gpu, config):
    """Rows that only fill up a batch."""
    skip_unless_it_runs(config)
    q, sink = torch.randn(13, 128, 512).bfloat16(), torch.randn(128)
    pools = [make_pool(V4, 13, 128, 64, 31), make_pool(V4, 13, 63, 2, 99)]
    expected = paged_reference(q, pools, sink)
    for keys in pools:
        required(keys.lens)[[2, 7]] = 0
    q[[2, 7]] = NAN
    out, lse = paged(q, pools, sink, config=config)
    assert out[[2, 7]].eq(0).all()
    assert lse[[2, 7]].eq(INF).all()
    others = [t for t in range(13) if t not in (2, 7)]
    check((out[others], lse[others]), (expected[0][others], expected[1][others]), LIMIT[q.dtype])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda t: f"{t.heads}x{t.keys}x{t.splits}{'g' * t.hopper}")
def test_nan_in_one_query_or_key_is_not_hidden(gpu, config):
    """By other splits, or by none: a maximum ignores NaN."""
    skip_unless_it_runs(config)
    q, sink = torch.randn(9, 40, 512).bfloat16(), torch.randn(40)
    pools = [make_pool(V4, 9, 128, 64, 31), make_pool(V4, 9, 63, 2, 99)]
    expected = paged_reference(q, pools, sink)
    q[8, 3, 500], others = NAN, [h for h in range(40) if h != 3]
    out, lse = paged(q, pools, sink, config=config)
    assert out[8, 3].isnan().all()
    assert lse[8, 3].isnan()
    check((out[:8], lse[:8]), (expected[0][:8], expected[1][:8]), LIMIT[q.dtype])
    check((out[8, others], lse[8, others]), (expected[0][8, others], expected[1][8, others]), LIMIT[q.dtype])
    pools[1].indices[8, 7] = 0  # an entry of NaN
    out, lse = paged(q, pools, sink, config=config)
    assert out[8].isnan().all()
    assert lse[8].isnan().all()


@pytest.mark.triton
@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_float32(device, splits):
    """The same in Triton's interpreter."""
    q, kv = torch.randn(2, 3, 48, device=device), torch.randn(50, 48, device=device)
    indices = torch.randint(50, (2, 40), device=device).int()
    q[1, 2, 40] = NAN
    with forced(Launch(16, 16, 4, 1, 64, splits)):
        out, lse = sparse_attention(q, kv, indices, 0.2)
    wrong = torch.tensor([[False, False, False], [False, False, True]], device=device)
    assert torch.equal(out.isnan().all(2), wrong)
    assert torch.equal(out.isnan().any(2), wrong)
    assert torch.equal(lse.isnan(), wrong)


@pytest.mark.parametrize("H", [8, 64])
@pytest.mark.parametrize(("q_dtype", "dtype"), [
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
], ids=str)  # fmt: skip
def test_plain_pools(gpu, q_dtype, dtype, H):
    for dim in (512, 80, 24):
        q, sink = torch.randn(17, H, dim).to(q_dtype), torch.randn(H)
        record = PlainRecord(dim, dtype)
        pools = [make_pool(record, 17, 128, 64, 31, 2), make_pool(record, 17, 99, 2, 500)]
        check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q_dtype])


def test_float32_queries_read_fp8_in_float32(gpu):
    q, sink = torch.randn(5, 16, 512), torch.randn(16)
    pools = [make_pool(V4, 5, 128, 64, 31), make_pool(V4, 5, 130, 2, 999)]
    check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [1, 7, 64, 100, 192, 513, 1024])
@pytest.mark.parametrize("H", [1, 8, 32, 64, 128])
def test_workspace_rows(gpu, H, K, dtype):
    T = 130 if K < 600 else 40
    q, kv, sink = torch.randn(T, H, 512).to(dtype), torch.randn(2001, 512).to(dtype), torch.randn(H)
    kv[::2] = NAN
    indices, lens = hostile(T, K, torch.arange(1, 2000, 2), 0)
    got = sparse_attention(q, kv, indices, 512**-0.5, sink, lens)
    check(got, reference.sparse_attention(q.float(), kv, indices, 512**-0.5, sink, lens), LIMIT[dtype])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "H", "dim", "widths", "n", "config"), [
    (1, 5, 96, (9, 33), (3, 5), None), (3, 20, 512, (33, 70), (64, 32), Launch(16, 16, 4, 1)),
    (2, 3, 512, (40, 65), (64, 128), Launch(16, 16, 4, 1, 128, 3)), (3, 2, 96, (1, 40), (2, 7), None),
    (9, 64, 512, (128, 512), (64, 128), None), (300, 64, 512, (128, 513), (64, 256), None),
], ids=str)  # fmt: skip
def test_the_records_of_v41(device, T, H, dim, widths, n, config, dtype):
    """Window keys of FP8 and entries of FP4 under one softmax, in either order, or one of them alone."""
    if device.type != "cuda" and (os.environ.get("TRITON_INTERPRET") != "1" or dtype != torch.float32 or T > 8):
        pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1, which multiplies float32")
    with device:
        q, sink = torch.randn(T, H, dim).to(dtype), torch.randn(H)
        pools = [make_pool(r, T, K, entries, 99) for r, K, entries in zip(V41[dim], widths, n, strict=True)]
        for some in (pools, pools[::-1], pools[:1], pools[1:]):
            check(paged(q, some, sink, config=config), paged_reference(q, some, sink), LIMIT[dtype])


@pytest.mark.triton
@pytest.mark.parametrize(("T", "H", "K", "config"), [
    (1, 5, 33, None), (3, 20, 70, Launch(16, 16, 4, 1)), (3, 20, 70, Launch(16, 16, 4, 1, 64, 4)),
], ids=str)  # fmt: skip
def test_max_logits(device, T, H, K, config):
    """In float32, which Triton's interpreter multiplies correctly; whole and split."""
    q, kv = torch.randn(T, H, 80, device=device), torch.randn(300, 80, device=device)
    indices, lens = (part.to(device) for part in hostile(T, K, torch.arange(299), 299))
    kv[299] = NAN
    found, expected = (torch.full((T, H), NAN, device=device) for _ in range(2))
    with forced(config):
        got = sparse_attention(q, kv, indices, 0.2, None, lens, 64, max_logits=found)
    check(got, reference.sparse_attention(q, kv, indices, 0.2, None, lens, 64, None, expected), LIMIT[q.dtype])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("T", "H", "d"), [(1, 8, 512), (9, 64, 576), (70, 64, 512), (300, 100, 512), (5, 128, 512)])
def test_max_logits_change_no_bit_of_the_rest(gpu, T, H, d):
    """On Hopper the two cases of many queries are `attend_rows_hopper_kernel`'s."""
    q, kv, sink = torch.randn(T, H, d).bfloat16(), torch.randn(2001, d).bfloat16(), torch.randn(H)
    indices, lens = hostile(T, 321, torch.arange(2000), 2000)
    kv[2000] = NAN
    found, expected = torch.full((T, H), NAN), torch.full((T, H), NAN)
    got = sparse_attention(q, kv, indices, 0.05, sink, lens, 512, max_logits=found)
    without = sparse_attention(q, kv, indices, 0.05, sink, lens, 512)
    assert all(torch.equal(a, b) for a, b in zip(got, without, strict=True))
    reference.sparse_attention(q.float(), kv, indices, 0.05, sink, lens, 512, None, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("T", "H", "dim", "dtype"), [
    (70, 64, 512, torch.bfloat16), (300, 100, 512, torch.float16), (500, 20, 128, torch.bfloat16),
    (140, 128, 256, torch.bfloat16),
], ids=str)  # fmt: skip
def test_rows_on_hopper_when_replayed(gpu, T, H, dim, dtype):
    """More items than programs, or fewer; unaligned outputs; other lengths, rows and queries in a captured graph."""
    q, kv, sink = torch.randn(T, H, dim).to(dtype), torch.randn(3000, dim + 64).to(dtype)[:, :dim], torch.randn(H)
    kv[::2] = NAN
    indices, lens = hostile(T, 333, torch.arange(1, 3000, 2), 0)
    out = torch.full((T, H, dim + 2), NAN, dtype=dtype)[:, :, 1:-1]
    arguments = q, kv, indices, dim**-0.5, sink, lens
    sparse_attention(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_attention(*arguments, out=out)
    for round_ in range(4):
        q.normal_()
        kv[1::2].normal_()
        for old, new in zip((indices, lens), hostile(T, 333, torch.arange(1, 3000, 2), 0), strict=True):
            old.copy_(new if round_ else torch.zeros_like(new))
        graph.replay()
        check(got, reference.sparse_attention(q.float(), kv, *arguments[2:]), LIMIT[dtype])
        first = [tensor.clone() for tensor in got]
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))
    assert out.data_ptr() == got[0].data_ptr()


def test_nan_in_a_row_that_is_attended_is_not_hidden(gpu):
    q, kv = torch.randn(200, 64, 512).bfloat16(), torch.randn(500, 512).bfloat16()
    kv[400:] = NAN
    indices = torch.randint(400, (200, 300)).int()
    indices[7, 200] = 450
    out, _ = sparse_attention(q, kv, indices, 0.05)
    assert out[7].isnan().all()
    assert out[:7].isfinite().all()
    assert out[8:].isfinite().all()


def test_keys_wider_than_values(gpu):
    q, kv = torch.randn(50, 20, 576).bfloat16(), torch.randn(999, 576).bfloat16()
    indices, lens = hostile(50, 300, torch.arange(999), 3)
    got = sparse_attention(q, kv, indices.long(), 0.07, None, lens.long(), 512)
    check(got, reference.sparse_attention(q.float(), kv, indices, 0.07, None, lens, 512), LIMIT[q.dtype])


@pytest.mark.gpu_memory(5)
def test_pool_over_two_gib(gpu):
    pages = 61_000
    pools = [make_pool(V4, 9, 128, 64, pages), make_pool(V4, 9, 512, 64, pages)]
    assert pools[0].pool.numel() > 2**31
    assert int(pools[1].indices[-1].clamp(max=pages * 64).amax()) // 64 > 57_000
    q, sink = torch.randn(9, 64, 512).bfloat16(), torch.randn(64)
    for config in (None, Launch(16, 64, 8, 2, 128, 4)):
        check(paged(q, pools, sink, config=config), paged_reference(q, pools, sink), LIMIT[q.dtype])


def test_strided_queries_and_output(gpu):
    whole = torch.randn(9, 70, 512).bfloat16()
    pools = [make_pool(V4, 9, 128, 64, 31, stride=3), make_pool(V4, 9, 300, 64, 99, stride=5)]
    out = torch.full((9, 70, 512), NAN).bfloat16()
    got = paged(whole[:, 3:67], pools, None, out=out[:, 3:67])
    check(got, paged_reference(whole[:, 3:67], pools, None), LIMIT[whole.dtype])
    assert got[0].data_ptr() == out[:, 3:67].data_ptr()
    assert out[:, :3].isnan().all()
    assert out[:, 67:].isnan().all()


@pytest.mark.parametrize("T", [3, 200])
def test_sink_limits(gpu, T):
    q = torch.randn(T, 64, 512).bfloat16()
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 300, 64, 99)]
    sink = torch.randn(64)
    sink[:4] = torch.tensor([INF, -INF, 1e30, -1e30])
    got, plain = paged(q, pools, sink), paged(q, pools, None)
    check(got, paged_reference(q, pools, sink), LIMIT[q.dtype])
    assert got[0][:, [0, 2]].eq(0).all()
    assert torch.equal(got[0][:, [1, 3]], plain[0][:, [1, 3]])
    assert torch.equal(got[1], plain[1])


@pytest.mark.parametrize("T", [1, 5, 200])
def test_nan_in_a_key_that_is_attended_is_not_hidden(gpu, T):
    q, record = torch.randn(T, 64, 512).bfloat16(), V4
    pool = record.allocate(9, 64, gpu)
    record.insert(pool, 64, torch.arange(576), torch.randn(576, 512))
    pool[2].fill_(0xFF)
    indices = torch.randint(128, (T, 200)).int()
    indices[0, 50] = 130
    out, _ = paged(q, [PagedKeys(record, pool, 64, indices)], None)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize(("T", "widths"), [(0, (128, 512)), (5, (0, 0)), (5, (0, 100)), (5, (100, 0))], ids=str)
def test_empty(gpu, T, widths):
    q = torch.randn(T, 8, 512).bfloat16()
    pool = V4.allocate(5, 64, gpu)
    V4.insert(pool, 64, torch.arange(320), torch.randn(320, 512))
    pools = [PagedKeys(V4, pool, 64, torch.randint(320, (T, K)).int()) for K in widths]
    out, lse = paged(q, pools, None)
    assert (out.shape, lse.shape) == ((T, 8, 512), (T, 8))
    check((out, lse), paged_reference(q, pools, None), LIMIT[q.dtype])
    empty = sparse_attention(q, torch.empty(0, 512).bfloat16(), torch.zeros(T, 4).int(), 1.0)
    assert empty[0].eq(0).all()
    assert empty[1].eq(INF).all()


@pytest.mark.parametrize("lens", [(128, 0), (0, 1024), (1, 1), (0, 0), (128, 1024)], ids=str)
@pytest.mark.parametrize(("T", "H"), [(1, 64), (2, 128), (8, 128), (140, 64), (9, 16)], ids=str)
def test_where_keys_end(gpu, T, H, lens):
    """Splits without a key, pools without one, and the widest rows."""
    q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H)
    pool = V4.allocate(20, 64, gpu)
    V4.insert(pool, 64, torch.arange(1280), torch.randn(1280, 512))
    pools = []
    for width, count in zip((128, 1024), lens, strict=True):
        indices = torch.randint(1280, (T, width)).int()
        indices[:, count:] = HUGE
        pools.append(PagedKeys(V4, pool, 64, indices, torch.full((T,), count).int()))
    check(paged(q, pools, sink), paged_reference(q, pools, sink), LIMIT[q.dtype])


@pytest.mark.parametrize(("T", "H"), [(1, 64), (8, 64), (33, 128), (300, 64), (9, 8)], ids=str)
def test_fifty_launches_are_bit_identical(gpu, T, H):
    q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H)
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 1024, 64, 99)]
    first = paged(q, pools, sink)
    for _ in range(50):
        again = paged(q, pools, sink)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(("T", "H"), [(1, 64), (9, 64), (9, 8), (200, 64)], ids=str)
def test_graph_replays_with_other_lengths_indices_and_queries(gpu, T, H):
    q, sink = torch.randn(T, H, 512).bfloat16(), torch.randn(H)
    pools = [make_pool(V4, T, 128, 64, 31), make_pool(V4, T, 513, 2, 2999)]
    paged(q, pools, sink)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged(q, pools, sink)
    for round_ in range(4):
        for keys in pools:
            other = make_pool(keys.record, T, keys.indices.shape[1], keys.entries, keys.pool.shape[0])
            keys.pool.copy_(other.pool)
            keys.indices.copy_(other.indices)
            lens = required(other.lens)
            required(keys.lens).copy_(lens if round_ else torch.zeros_like(lens))
        q.normal_()
        graph.replay()
        check(got, paged_reference(q, pools, sink), LIMIT[q.dtype])


def test_refuses_what_it_cannot_read(gpu):
    q, pool = torch.randn(2, 4, 512).bfloat16(), V4.allocate(3, 64, gpu)
    indices = torch.zeros(2, 5).int()
    good = PagedKeys(V4, pool, 64, indices)
    other = PagedKeys(PlainRecord(512), PlainRecord(512).allocate(3, 64, gpu), 64, indices)
    wrong = {
        "one or two pools": [good] * 3,
        "same record": [good, other],
        "65 entries per page needs": [good._replace(entries=65)],
        "indices must be": [good._replace(indices=indices.float())],
        "lens must be": [good._replace(lens=torch.zeros(3).int())],
        "multiples of 8 bytes": [good._replace(pool=torch.empty(3, 37445, dtype=torch.uint8)[:, 5:])],
    }
    for words, pools in wrong.items():
        with pytest.raises(ValueError, match=words):
            paged(q, pools, None)
    with pytest.raises(ValueError, match="sink must be"):
        paged(q, [good], torch.zeros(3))
    with pytest.raises(ValueError, match="out must be"):
        paged(q, [good], None, out=torch.empty(2, 4, 512))
