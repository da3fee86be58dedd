"""`hc_mix` and `hc_collapse`, of which `hc_pre` consists."""

import torch

from deepseek_attn.kernels.hyper_connection import hc_collapse, hc_mix, reference


def test_mix_and_collapse_are_hc_pre():
    m, dim, tokens = 4, 24, 5
    streams, rows = torch.randn(tokens, m, dim), (2 + m) * m
    weights = torch.randn(rows, m * dim) * 0.1, torch.randn(rows), torch.rand(3)
    norm = torch.rand(dim)
    x, post, comb = reference.hc_pre(streams, *weights, 1e-20, 1e-6, 20, norm)
    pre, *rest = hc_mix(streams, *weights, 1e-20, 1e-6, 20)
    assert torch.equal(hc_collapse(streams, pre, 1e-20, norm), x)
    assert torch.equal(rest[0], post)
    assert torch.equal(rest[1], comb)
    first = torch.zeros(tokens, m).index_fill_(1, torch.tensor(0), 1)
    assert torch.equal(hc_collapse(streams, first, 1e-20), streams[:, 0])


def test_a_tiny_epsilon_counts():
    """Of rows of 1e-9, whose mean square of 1e-18 is far above 1e-20 and far below 1e-6."""
    x = torch.full((1, 1, 8), 1e-9)
    assert torch.allclose(hc_collapse(x, torch.ones(1, 1), 1e-20, torch.ones(8)), torch.full((1, 8), 1 / 1.01**0.5))
