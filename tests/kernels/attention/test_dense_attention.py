"""Causal attention over all keys of a request."""

import pytest
import torch

from deepseek_attn.kernels.attention import reference
from deepseek_attn.kernels.attention.reference import causal_attention, sparse_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 70), (5, 5), (63, 64), (64, 129), (33, 300)])
def test_equals_sparse_attention_over_every_visible_key(n, total, dtype, device):
    q, kv = torch.randn(n, 3, 24, device=device, dtype=dtype), torch.randn(total, 24, device=device, dtype=dtype)
    rows = torch.arange(total, device=device).expand(n, -1)
    last = torch.arange(total - n, total, device=device).unsqueeze(1)
    expected, _ = sparse_attention(q, kv, rows.masked_fill(rows > last, -1), 0.3, d_v=16)
    out = causal_attention(q, kv, 0.3, 16)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scratch", [1, 40_000])
def test_blocks_of_queries_change_nothing(monkeypatch, scratch):
    q, kv = torch.randn(50, 2, 16), torch.randn(90, 16)
    expected = causal_attention(q, kv, 0.25)
    monkeypatch.setattr(reference, "rows_per_block", lambda row: max(1, scratch // row))
    torch.testing.assert_close(causal_attention(q, kv, 0.25), expected)


def test_later_keys_are_not_read():
    q, kv = torch.randn(4, 2, 16), torch.randn(10, 16)
    expected = causal_attention(q[:3], kv[:9], 0.25)
    changed = torch.cat([kv[:9], torch.full((1, 16), 1e30)])
    torch.testing.assert_close(causal_attention(q, changed, 0.25)[:3], expected)


def test_no_queries():
    assert causal_attention(torch.empty(0, 2, 16), torch.randn(3, 16), 1.0).shape == (0, 2, 16)


@pytest.mark.parametrize("kv", [(3, 16), (5, 15), (5, 1, 16)], ids=str)
def test_shapes_that_do_not_fit(kv):
    with pytest.raises(ValueError, match=r"kv must be \[N >= 4, 16\]"):
        causal_attention(torch.randn(4, 2, 16), torch.randn(kv), 1.0)
