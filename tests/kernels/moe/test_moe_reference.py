"""Routed experts in plain torch, against each chosen expert of each token in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.kernels.moe import reference
from deepseek_attn.kernels.moe.types import ExpertsCall
from tests.kernels.moe.moe_cases import make_case

LIMIT = 2.0


def by_hand(case) -> torch.Tensor:
    out = torch.zeros(case.x.shape, dtype=torch.float64)
    w1, w3, w2 = (stack.weight.double() for stack in (case.w1, case.w3, case.w2))
    for t, row in enumerate(case.x.double()):
        for expert, weight in zip(case.experts[t].tolist(), case.weights[t].double(), strict=True):
            if expert >= 0:
                gate, up = w1[expert] @ row, w3[expert] @ row
                out[t] += w2[expert] @ (F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT) * weight)
    return out


def run(case, rows: slice = slice(None)) -> torch.Tensor:
    x, experts, weights = case.x[rows], case.experts[rows], case.weights[rows]
    return reference.moe_experts(ExpertsCall(x, experts, weights, case.w1, case.w3, case.w2, LIMIT))


@pytest.mark.parametrize("T", [1, 2, 5, 6, 40])
def test_every_pair_counts_once(T):
    case = make_case(T, 96, 40, 7, 3, "plain", torch.float32, "cpu")
    case.experts[T // 2, 1] = -1  # another rank's
    expected = by_hand(case)
    torch.testing.assert_close(run(case).double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("T", [0, 1, 3, 40])
def test_tokens_without_an_expert_of_this_rank_are_zero(T):
    case = make_case(T, 96, 40, 7, 3, "plain", torch.float32, "cpu")
    case.experts[: T - 1] = -1
    out = run(case)
    assert out.shape == case.x.shape
    assert not out[: T - 1].any()
    assert out[max(T - 1, 0) :].any() == (T > 0)
    case.experts[:] = -1
    assert torch.equal(run(case), torch.zeros(T, 96))
