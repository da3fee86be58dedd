"""The differentiable path computes what a runner computes through its caches."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.lab.training.attention import index_loss, selected, shifted, window_mask
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.weights import build_model
from tests.support.small_models import assert_close, prompt, small_config, small_runner
from tests.support.tiers import tiered

CPU = torch.device("cpu")
BRANCHES = list(product((1, 4, 16), (False, True), (False, True)))  # ratio, overlap, indexer
QUICK = [(1, True, True), (4, False, True), (16, True, False)]


def both(config, length: int, rows: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of ``rows`` prompts: the differentiable path's, and a runner's."""
    source = RandomSource(config, 1)
    prompts = [prompt(config, length, seed) for seed in range(rows)]
    with torch.no_grad():
        dense = DenseModel(build_model(config, source, CPU, length))(torch.tensor(prompts)).logits
    return dense, small_runner(config, source).score(prompts, chunk_size=50)


@pytest.mark.parametrize(("ratio", "overlap", "indexer"), tiered([(0, False, False), *BRANCHES], QUICK))
def test_every_branch_equals_the_caches(ratio, overlap, indexer):
    switches: dict[str, Any] = (
        {"compress_overlap": {str(ratio): overlap}, "compress_indexer": {str(ratio): indexer}} if ratio else {}
    )
    config = small_config([ratio, ratio], **switches)
    dense, scored = both(config, 75)
    for row, expected in zip(dense, scored, strict=True):
        assert_close(row, expected)


@pytest.mark.parametrize("length", tiered([1, 3, 4, 19, 20, 21, 40, 41], [1, 21, 41]))
def test_short_and_uneven_lengths(length):
    """Fewer tokens than a window of entries, and around whole blocks of the sliding window of 20."""
    dense, scored = both(small_config([0, 4, 16]), length)
    for row, expected in zip(dense, scored, strict=True):
        assert_close(row, expected)


def test_another_router():
    dense, scored = both(small_config([0, 4], scoring_func="sigmoid"), 30)
    assert_close(dense[1], scored[1])


def test_reading_every_entry_differs_where_the_selection_binds():
    config = small_config([4, 4], index_topk=3)
    tokens = torch.tensor([prompt(config, 60, 0)])
    dense = DenseModel(build_model(config, RandomSource(config, 1), CPU, 60))
    with torch.no_grad():
        chosen, everything = dense(tokens).logits[0], dense(tokens, select=False).logits[0]
    assert_close(chosen[:15], everything[:15])  # up to 3 entries
    assert (chosen[20:] - everything[20:]).abs().amax(1).min() > 1e-3


def test_expert_loads_are_shares_of_the_tokens():
    config = small_config([0, 4], num_experts_per_tok=2)
    result = DenseModel(build_model(config, RandomSource(config, 1), CPU, 40))(torch.tensor([prompt(config, 40, 0)]))
    assert result.loads.shape == (2, 4)
    assert torch.allclose(result.loads.sum(1), torch.full((2,), 2.0))


def test_the_index_loss_trains_the_indexer_and_nothing_else():
    config = small_config([4, 4])
    model = build_model(config, RandomSource(config, 1), CPU, 40)
    DenseModel(model)(torch.tensor([prompt(config, 40, 0)])).index_loss.backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched
    assert all(".indexer." in name for name in touched)
    expected = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert touched == expected


def test_index_loss_is_the_divergence_over_what_was_readable():
    readable = torch.tensor([[[True, True, False], [True, False, False]]])
    scores = torch.tensor([[[1.0, 0.0, 9.0], [3.0, 1.0, 1.0]]])
    mass = torch.tensor([[[3.0, 1.0, 0.0], [5.0, 0.0, 0.0]]])
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([1.0, 0.0]).softmax(0)
    assert float(index_loss(scores, mass, readable)) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert float(index_loss(mass.log().clamp_min(-50), mass, readable)) == pytest.approx(0.0, abs=1e-6)


def test_selected_keeps_the_best_visible_entries():
    scores = torch.tensor([[[5.0, 1.0, 2.0, 9.0], [0.0, 3.0, 3.0, 3.0]]])
    visible = torch.tensor([[[True, True, True, False], [True] * 4]])
    expected = [[[True, False, True, False], [False, True, True, False]]]
    assert selected(scores, visible, 2).tolist() == expected
    assert selected(scores, visible, 4) is visible


@pytest.mark.parametrize(("first", "last"), [(0, 3), (1, 3), (1, 2), (3, 3)])
def test_window_mask_by_definition(first, last):
    window, blocks = 3, 3
    mask = window_mask(blocks, window, CPU, first, last)
    for block in range(blocks):
        for i in range(window):
            query = block * window + i
            keys = [(block - 1) * window + j for j in range(2 * window) if mask[block, i, j]]
            assert keys == [k for k in range(query - last + 1, query - first + 1) if k >= 0]


def test_shifted_rows():
    rows = torch.arange(6.0).view(1, 3, 2)
    assert shifted(rows).tolist() == [[[0.0, 0.0], [0.0, 1.0], [2.0, 3.0]]]
    assert shifted(rows, 2).tolist() == [[[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]]


def test_matrix_products_in_bfloat16_leave_the_rest_in_float32():
    """As on a GPU: logits and every gradient are float32, and a few percent from those of float32 products."""
    config = small_config([0, 4])
    model, tokens = build_model(config, RandomSource(config, 1), CPU, 40), torch.tensor([prompt(config, 40, 0)])
    exact = DenseModel(model)(tokens).logits.detach()
    logits = DenseModel(model, torch.bfloat16)(tokens).logits
    logits.square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert 1e-4 < float((logits.detach() - exact).norm() / exact.norm()) < 0.1
