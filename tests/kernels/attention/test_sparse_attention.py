"""Sparse attention with a sink against a loop over queries in float64."""

import math
from typing import Any

import pytest
import torch

import deepseek_attn.kernels.attention as kernels
import deepseek_attn.kernels.attention.reference as module
from deepseek_attn.kernels.attention import PagedKeys
from deepseek_attn.kernels.attention.reference import sparse_attention, sparse_attention_paged
from tests.support.typed import untyped

NAN, INF, HUGE = float("nan"), float("inf"), 2**31 - 1
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


class Rows:
    """Plain rows: a pool is ``[pages, n, dim]``."""

    name = "plain"

    def gather(self, pool, n, slots, dtype):
        rows = pool.flatten(0, 1)[slots.clamp(min=0)].to(dtype)
        return torch.where((slots >= 0)[..., None], rows, 0)

    def reader(self, pool, n, dtype):
        return lambda slots: self.gather(pool, n, slots, dtype)


ROWS = untyped(Rows())


def oracle(q, keys_of, scale, sink, d_v):
    """``keys_of(t)``: float64 ``[n, d]`` keys of query ``t``, repetitions included."""
    T, H, _ = q.shape
    out, lse = torch.zeros(T, H, d_v, dtype=torch.float64), torch.full((T, H), INF, dtype=torch.float64)
    for t in range(T):
        keys = keys_of(t)
        if len(keys) == 0:
            continue
        for h in range(H):
            logits = (keys @ q[t, h].double()) * scale
            lse[t, h] = logits.logsumexp(0)
            shift = lse[t, h] if sink is None else torch.logaddexp(lse[t, h], sink[h].double())
            out[t, h] = (logits - shift).exp() @ keys[:, :d_v]
    return out, lse


def kv_oracle(q, kv, indices, scale, sink=None, lens=None, d_v=None):
    def keys_of(t):
        row = indices[t].tolist()
        row = row if lens is None else row[: max(int(lens[t]), 0)]
        return kv[[i for i in row if 0 <= i < len(kv)]].double()

    return oracle(q, keys_of, scale, sink, q.shape[2] if d_v is None else d_v)


def make(T, H, d, N, K, dtype=torch.float32, seed=0):
    """Queries, keys whose odd rows are NaN, indices that name even rows, and lengths from 0 to K."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(T, H, d, generator=generator).to(dtype)
    kv = torch.randn(N, d, generator=generator).to(dtype)
    kv[1::2] = NAN
    indices = torch.randint(0, (N + 1) // 2, (T, K), generator=generator).mul(2).int()
    lens = torch.randint(0, K + 1, (T,), generator=generator).int()
    return q, kv, indices, lens, torch.randn(H, generator=generator)


def poison(indices, lens, kv_rows):
    """Past its length a row holds huge, negative or NaN-row indices; before it, every fifth column is a hole."""
    column = torch.arange(indices.shape[1])
    past = column >= lens[:, None]
    junk = torch.tensor([HUGE, 1, -HUGE, kv_rows, -1]).int()[column % 5].expand_as(indices)
    holes = torch.tensor([-1, kv_rows, HUGE, -2]).int()[column % 4].expand_as(indices)
    indices = torch.where(past, junk, indices)
    return torch.where(~past & (column % 5 == 2), holes, indices)


def check(got, expected, dtype=torch.float32):
    torch.testing.assert_close(got[0].double(), expected[0], **TOLERANCE[dtype])
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d_v", [None, 24], ids=["d_v_all", "d_v_24"])
@pytest.mark.parametrize(("T", "H", "N", "K"), [(1, 1, 1, 1), (9, 3, 31, 63), (7, 4, 200, 64), (33, 2, 77, 130)])
def test_random_ragged_batches_with_poison(T, H, N, K, d_v, dtype):
    q, kv, indices, lens, sink = make(T, H, 32, N, K, dtype)
    indices = poison(indices, lens, N)
    got = sparse_attention(q, kv, indices, 32**-0.5, sink, lens, d_v)
    check(got, kv_oracle(q, kv, indices, 32**-0.5, sink, lens, d_v), dtype)


def test_without_lengths_only_the_indices_decide():
    q, kv, indices, lens, _ = make(12, 3, 16, 50, 70)
    indices[torch.arange(70) >= lens[:, None]] = -1
    check(sparse_attention(q, kv, indices.long(), 0.25), kv_oracle(q, kv, indices, 0.25))


@pytest.mark.parametrize("T", [1, 9])
def test_max_logits(T):
    """Of a row with keys, of one without, and with a negative scale."""
    q, kv, indices, lens, sink = make(T, 3, 32, 31, 63)
    indices[:, :20] = poison(indices, lens, 31)[:, :20]
    for count, scale in ((0, 0.3), (20, 0.3), (20, -0.3)):
        lens[:] = torch.arange(T) % 7 if T > 1 else count
        expected = torch.full((T, 3), -INF, dtype=torch.float64)
        for t in range(T):
            valid = [i for i in indices[t, : lens[t]].tolist() if 0 <= i < 31]
            if valid:
                expected[t] = (scale * q[t].double() @ kv[valid].double().T).amax(1)
        found = torch.full((T, 3), NAN)
        got = sparse_attention(q, kv, indices, scale, sink, lens, max_logits=found)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, sparse_attention(q, kv, indices, scale, sink, lens), rtol=0, atol=0)


def test_nan_in_row_zero_does_not_leak():
    q, kv, indices, _, sink = make(6, 2, 16, 40, 9)
    indices = indices.clamp(min=2)
    kv[0] = NAN
    indices[:, ::2] = -1
    indices[3] = -1
    got = sparse_attention(q, kv, indices, 0.25, sink)
    assert got[0].isfinite().all()
    check(got, kv_oracle(q, kv, indices, 0.25, sink))


def test_nan_in_a_key_that_is_attended_is_not_hidden():
    q, kv, indices, _, _ = make(2, 1, 8, 10, 3)
    indices[0, 1] = 1
    out, _ = sparse_attention(q, kv, indices, 1.0)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("sink", [None, -INF, 0.5, INF], ids=str)
def test_lonely_queries(sink):
    q, kv, indices, lens, _ = make(4, 3, 8, 10, 5)
    lens[:] = torch.tensor([0, 5, 0, -1])
    indices[1] = torch.tensor([-1, 10, HUGE, -HUGE, -1])
    q[:2] = NAN
    sink = None if sink is None else torch.full((3,), sink)
    out, lse = sparse_attention(q, kv, indices, 1.0, sink, lens)
    assert out.eq(0).all()
    assert lse.eq(INF).all()


def test_sink_limits():
    q, kv, indices, _, _ = make(5, 4, 16, 30, 11)
    plain = sparse_attention(q, kv, indices, 0.25)
    sink = torch.tensor([-INF, INF, 1e30, -1e30])
    out, lse = sparse_attention(q, kv, indices, 0.25, sink)
    assert torch.equal(lse, plain[1])
    assert out[:, 1:3].eq(0).all()
    torch.testing.assert_close(out[:, 0::3], plain[0][:, 0::3])


def test_sink_takes_half():
    q, kv = torch.zeros(1, 1, 2), torch.tensor([[2.0, 4.0]])
    out, lse = sparse_attention(q, kv, torch.tensor([[0, 0, 0]]), 1.0, torch.tensor([math.log(3)]))
    assert out.flatten().tolist() == pytest.approx([1.0, 2.0])
    assert lse.item() == pytest.approx(math.log(3))


def test_large_logits_do_not_overflow():
    q, kv, indices, _, sink = make(5, 2, 16, 30, 11)
    check(sparse_attention(q * 100, kv, indices, 3.0, sink), kv_oracle(q * 100, kv, indices, 3.0, sink))


def test_duplicates_count_twice():
    q, kv, _, _, _ = make(1, 2, 8, 10, 3)
    twice = sparse_attention(q, kv, torch.tensor([[2, 2, 4]]), 1.0)
    check(twice, oracle(q, lambda _: kv[[2, 2, 4]].double(), 1.0, None, 8))
    assert not torch.allclose(twice[0], sparse_attention(q, kv, torch.tensor([[2, -1, 4]]), 1.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_rows_equal_the_whole(monkeypatch, dtype):
    q, kv, indices, lens, sink = make(41, 2, 16, 300, 200, dtype)
    indices = poison(indices, lens, 300)
    whole = sparse_attention(q, kv, indices, 0.25, sink, lens)
    chunks = [sparse_attention(q[s], kv, indices[s], 0.25, sink, lens[s]) for s in (slice(0, 7), slice(7, 41))]
    torch.testing.assert_close(whole, tuple(torch.cat(part) for part in zip(*chunks, strict=True)))
    monkeypatch.setattr(module, "SCRATCH_BYTES", 4 * 200 * 16 * 3)
    torch.testing.assert_close(whole, sparse_attention(q, kv, indices, 0.25, sink, lens))


def test_order_of_keys_does_not_matter():
    q, kv, indices, _, sink = make(6, 2, 16, 100, 65)
    torch.testing.assert_close(
        sparse_attention(q, kv, indices, 0.25, sink), sparse_attention(q, kv, indices.flip(1), 0.25, sink)
    )


@pytest.mark.parametrize(("T", "N", "K"), [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_empty_inputs(T, N, K):
    q, indices = torch.randn(T, 3, 8), torch.zeros(T, K, dtype=torch.int32)
    out, lse = sparse_attention(q, torch.randn(N, 8), indices, 1.0, lens=torch.full((T,), K), d_v=4)
    assert (out.shape, lse.shape) == ((T, 3, 4), (T, 3))
    assert out.eq(0).all()
    assert lse.eq(INF).all()


def make_pools(T, d, sizes, seed=0):
    """Pools of NaN with live slots only where an index points: ``(page size, columns)`` each."""
    generator = torch.Generator().manual_seed(seed)
    pools = []
    for n, K in sizes:
        pages = 3 + 2 * K // n
        pool = torch.full((pages, n, d), NAN)
        live = torch.randperm(pages * n, generator=generator)[: max(pages * n // 2, 1)]
        pool.view(-1, d)[live] = torch.randn(len(live), d, generator=generator)
        indices = live[torch.randint(0, len(live), (T, K), generator=generator)].int()
        lens = torch.randint(0, K + 1, (T,), generator=generator).int()
        pools.append(PagedKeys(ROWS, pool, n, poison(indices, lens, pages * n), lens))
    return pools


def paged_oracle(q, pools, scale, sink):
    def keys_of(t):
        keys = []
        for _, pool, _, indices, lens in pools:
            flat = pool.flatten(0, 1).double()
            row = indices[t].tolist() if lens is None else indices[t, : int(lens[t])].tolist()
            keys += [flat[i] for i in row if 0 <= i < len(flat)]
        return torch.stack(keys) if keys else torch.empty(0, q.shape[2])

    return oracle(q, keys_of, scale, sink, q.shape[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes", [[(64, 128)], [(64, 128), (2, 65)], [(53, 7), (61, 1)], [(4, 63), (2, 64), (1, 5)]], ids=str
)
def test_paged_pools_share_one_softmax(sizes, dtype):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(11, 3, 16, generator=generator).to(dtype)
    sink = torch.randn(3, generator=generator)
    pools = make_pools(11, 16, sizes)
    pools[0].lens[:3], pools[-1].lens[:2] = 0, 0  # rows without window, rows without anything
    check(sparse_attention_paged(q, pools, 0.25, sink), paged_oracle(q, pools, 0.25, sink), dtype)
    counted = [torch.arange(keys.indices.shape[1]) < keys.lens[:, None] for keys in pools]
    pools = [
        keys._replace(indices=torch.where(counts, keys.indices, -1), lens=None)
        for keys, counts in zip(pools, counted, strict=True)
    ]
    check(sparse_attention_paged(q, pools, 0.25), paged_oracle(q, pools, 0.25, None), dtype)


def test_paged_pool_of_nothing_but_nan_is_not_read():
    q = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(2))
    window, other = make_pools(4, 16, [(8, 20), (4, 9)])
    other.pool.fill_(NAN)
    other.lens.zero_()
    torch.testing.assert_close(
        sparse_attention_paged(q, [window, other], 0.25), sparse_attention_paged(q, [window], 0.25)
    )


def test_paged_equals_plain():
    q, kv, indices, lens, sink = make(13, 2, 16, 60, 33)
    indices = poison(indices, lens, 60)
    pools = [PagedKeys(ROWS, kv.view(12, 5, 16), 5, indices, lens)]
    torch.testing.assert_close(
        sparse_attention_paged(q, pools, 0.25, sink), sparse_attention(q, kv, indices, 0.25, sink, lens)
    )


def test_paged_empty():
    pools = make_pools(0, 8, [(4, 6), (2, 3)])
    out, lse = sparse_attention_paged(torch.empty(0, 3, 8), pools, 1.0)
    assert (out.shape, lse.shape) == ((0, 3, 8), (0, 3))


def test_the_public_ops_pass_every_argument_on_and_write_to_out():
    q, kv, indices, lens, sink = make(13, 2, 16, 60, 33)
    indices = poison(indices, lens, 60)
    expected = sparse_attention(q, kv, indices, 0.25, sink, lens, 12)
    keys = [PagedKeys(ROWS, kv.view(12, 5, 16), 5, indices, lens)]
    calls = {
        "rows": lambda out: kernels.sparse_attention(q, kv, indices, 0.25, sink, lens, 12, out, torch.empty(13, 2)),
        "pages": lambda out: kernels.sparse_attention_paged(q, keys, 0.25, sink, 12, out),
    }
    for call in calls.values():
        torch.testing.assert_close(call(None), expected)
        out = torch.full((13, 2, 24), NAN)[..., :12]
        assert call(out)[0] is out
        torch.testing.assert_close(out, expected[0])


@pytest.mark.parametrize("wrong", ["kv", "indices", "lens", "sink", "d_v", "max_logits"])
def test_refuses_wrong_shapes(wrong):
    q, kv, indices, lens, sink = make(4, 3, 8, 10, 5)
    args = {"kv": kv, "indices": indices, "lens": lens, "sink": sink, "d_v": 8, "max_logits": torch.empty(4, 3)}
    other = {"kv": kv[:, :4], "indices": indices[:3], "lens": lens[:1], "sink": sink[:1], "d_v": 9}
    args[wrong] = (other | {"max_logits": torch.empty(3, 4).T})[wrong]
    with pytest.raises(ValueError, match=wrong):
        sparse_attention(q, scale=1.0, **args)
