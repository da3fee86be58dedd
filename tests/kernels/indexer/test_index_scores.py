"""Scores of the lightning indexer against the formula in float64."""

import pytest
import torch

import deepseek_attn.kernels.indexer.reference as module
from deepseek_attn.kernels.indexer import index_scores


def make(T, heads, dim, N, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T + N)
    q = torch.randn(T, heads, dim, generator=generator).to(dtype)
    k = torch.randn(N, dim, generator=generator).to(dtype)
    return q, k, torch.randn(T, heads, generator=generator)


def oracle(q, k, weights):
    scores = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64)
    for h in range(q.shape[1]):
        scores += weights[:, h, None].double() * (q[:, h].double() @ k.double().T).clamp(min=0)
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "heads", "dim", "N"), [(1, 1, 8, 1), (63, 4, 32, 65), (5, 64, 128, 111)])
def test_matches_the_formula(T, heads, dim, N, dtype):
    q, k, weights = make(T, heads, dim, N, dtype)
    got = index_scores(q, k, weights)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), oracle(q, k, weights), rtol=1e-4, atol=1e-4)


def test_blocks_of_rows_and_keys(monkeypatch):
    q, k, weights = make(23, 3, 16, 301)
    monkeypatch.setattr(module, "KEYS_PER_BLOCK", 37)
    monkeypatch.setattr(module, "GEMM_BYTES", 4 * 3 * (37 + 16) * 5)
    torch.testing.assert_close(index_scores(q, k, weights).double(), oracle(q, k, weights), rtol=1e-4, atol=1e-4)


def test_negative_products_count_for_nothing_before_the_weight():
    q, k = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0], [-3.0]])
    assert index_scores(q, k, torch.tensor([[10.0, -1.0]])).tolist() == [[20.0, -3.0]]


def test_bad_key_or_query_stays_in_its_column_or_row():
    q, k, weights = make(4, 2, 8, 6)
    clean = index_scores(q, k, weights)
    k[2] = float("nan")
    q[1] = float("nan")
    got = index_scores(q, k, weights)
    assert got[1].isnan().all()
    assert got[:, 2].isnan().all()
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1], keep[:, 2] = False, False
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize(("T", "N"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_score(T, N):
    assert index_scores(*make(T, 4, 8, N)).shape == (T, N)


def test_refuses_wrong_shapes():
    q, k, weights = make(3, 2, 8, 4)
    with pytest.raises(ValueError, match="weights"):
        index_scores(q, k, weights[:, :1])
