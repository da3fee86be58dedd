"""Sinkhorn's rounds of few tokens, which a CPU computes in NumPy, against those of many."""

import pytest
import torch

from deepseek_attn.kernels.hyper_connection import reference


@pytest.mark.parametrize("m", [1, 3, 4])
def test_few_tokens_are_as_among_many(m):
    """With an eps that is large enough to be seen."""
    logits = 2 * torch.randn(reference.FEW_TOKENS + 1, m, m)
    expected = reference.sinkhorn(logits, 20, 1e-2)
    for count in range(reference.FEW_TOKENS + 1):
        few = reference.sinkhorn(logits[:count], 20, 1e-2)
        torch.testing.assert_close(few, expected[:count], rtol=3e-6, atol=0)


def test_few_tokens_have_a_gradient():
    logits = torch.randn(2, 4, 4)
    weights, grads = torch.randn(2, 4, 4), []
    for count in (2, 2 * reference.FEW_TOKENS):
        leaf = logits.clone().requires_grad_()
        (reference.sinkhorn(leaf.repeat(count // 2, 1, 1), 20, 1e-6)[:2] * weights).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
