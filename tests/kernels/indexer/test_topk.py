"""Exact top-k: the set, its order, ties, NaN and lengths."""

import math
from itertools import product

import pytest
import torch

import deepseek_attn.kernels.indexer.reference as module
from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels.indexer import PagedIndexKeys, topk_indices
from tests.support.tiers import tiered

NAN, INF = float("nan"), float("inf")


def oracle(scores, lens, k):
    rows = []
    for row, n in zip(scores.tolist(), lens.tolist(), strict=True):
        n = min(max(n, 0), len(row))
        key = [-INF if math.isnan(v) else v for v in row[:n]]
        best = sorted(sorted(range(n), key=lambda i: (-key[i], i))[:k])
        rows.append(best + [-1] * (k - len(best)))
    return rows


def random_scores(kind, T, N, generator):
    scores = torch.randn(T, N, generator=generator)
    if kind == "ties":
        scores = scores.clamp(min=0).mul(2).round()
    if kind == "nan":
        pick = torch.rand(T, N, generator=generator)
        scores[pick < 0.4] = NAN
        scores[(pick > 0.5) & (pick < 0.7)] = -INF
        scores[pick > 0.95] = INF
    if kind == "constant":
        scores.zero_()
    return scores


@pytest.mark.parametrize(
    ("N", "k", "kind"),
    tiered(
        product([1, 63, 65, 600, 1111], [1, 7, 64, 513], ["normal", "ties", "nan", "constant"]),
        [
            (1, 1, "normal"),
            (63, 64, "ties"),
            (65, 7, "nan"),
            (600, 513, "constant"),
            (1111, 64, "ties"),
            (600, 7, "ties"),
            (1111, 513, "nan"),
        ],
    ),
)
def test_matches_a_stable_sort(N, k, kind):
    generator = torch.Generator().manual_seed(N * k)
    scores = random_scores(kind, 9, N, generator)
    lens = torch.tensor([0, 1, N, N + 5, max(N - 1, 0), k, k + 1, N // 2, -3])
    for t, n in enumerate(lens.tolist()):
        scores[t, max(n, 0) :] = [NAN, INF, 1e30][t % 3]  # past the length: anything
    got = topk_indices(scores, lens, k)
    assert got.dtype == torch.int32
    assert got.tolist() == oracle(scores, lens, k)


@pytest.mark.parametrize("fill", [NAN, -INF], ids=["nan", "minus_inf"])
def test_rows_without_a_number_give_the_first_valid_columns(fill):
    got = topk_indices(torch.full((3, 100), fill), torch.tensor([100, 2, 0]), 4)
    assert got.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [-1] * 4]


def test_nan_is_taken_only_to_fill_up():
    scores = torch.tensor([[NAN, 1.0, NAN, 2.0, -INF, 9.0]])
    assert topk_indices(scores, torch.tensor([5]), 2).tolist() == [[1, 3]]
    assert topk_indices(scores, torch.tensor([5]), 4).tolist() == [[0, 1, 2, 3]]


def test_a_row_does_not_depend_on_the_batch(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores = random_scores("ties", 33, 257, generator)
    lens = torch.randint(0, 258, (33,), generator=generator)
    whole = topk_indices(scores, lens, 64)
    alone = torch.cat([topk_indices(scores[t : t + 1], lens[t : t + 1], 64) for t in range(33)])
    monkeypatch.setattr(module, "rows_per_block", lambda _: 5)
    assert torch.equal(whole, alone)
    assert torch.equal(whole, topk_indices(scores, lens, 64))


def test_zero_rows_columns_and_k():
    none = torch.empty(0, dtype=torch.int32)
    assert topk_indices(torch.empty(0, 50), none, 7).shape == (0, 7)
    assert topk_indices(torch.empty(2, 0), torch.tensor([0, 3]), 3).eq(-1).all()
    assert topk_indices(torch.zeros(2, 5), torch.tensor([5, 5]), 0).shape == (2, 0)


def test_refuses_wrong_shapes():
    with pytest.raises(ValueError, match="lens"):
        topk_indices(torch.zeros(2, 5), torch.tensor([5]), 1)
    with pytest.raises(ValueError, match="out_slots need keys"):
        module.topk_indices(torch.zeros(2, 5), torch.tensor([5, 5]), 1, out_slots=torch.zeros(2, 1, dtype=torch.int32))


def test_slots_of_the_selected_columns():
    scores, lens = torch.tensor([[1.0, 5.0, 3.0, 4.0], [1.0, 2.0, 9.0, 9.0]]), torch.tensor([4, 1])
    table = torch.tensor([[7, 2], [5, 0]], dtype=torch.int32)
    # the record and the pool are not read
    keys = PagedIndexKeys(make_index_record("fp8", 128), torch.empty(0, 0), 2, table, torch.tensor([1, 0]))
    slots = torch.empty(2, 2, dtype=torch.int32)
    assert module.topk_indices(scores, lens, 2, keys=keys, out_slots=slots).tolist() == [[1, 3], [0, -1]]
    assert slots.tolist() == [[5 * 2 + 1, 0 * 2 + 1], [7 * 2, -1]]
