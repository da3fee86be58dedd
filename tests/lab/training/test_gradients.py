"""The differentiable path against autograd through transformers' float32 model, and against the paged caches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.names import hf_name
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.weights import build_model
from tests.support.oracle_transformers import TransformersOracle
from tests.support.small_models import assert_close, prompt

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of the largest gradient of a tensor


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Pair:
    """The tiny config through both programs: loss and gradients by transformers' names."""

    def __init__(self):
        config = ModelConfig.from_preset("tiny").replace(num_nextn_predict_layers=0)
        source = RandomSource(config, 0)
        tokens = torch.tensor([prompt(config, 140, 0)])
        self.model = build_model(config, source, CPU, 140)
        loss = next_token_loss(DenseModel(self.model)(tokens).logits, tokens)
        loss.backward()
        reference = TransformersOracle(config, source).model
        expected = next_token_loss(reference(tokens, use_cache=False).logits, tokens)
        expected.backward()
        self.losses = float(loss.detach()), float(expected.detach())
        self.gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def test_losses_agree(pair):
    assert pair.losses[0] == pytest.approx(pair.losses[1], rel=1e-5)


def renamed(name: str) -> str:
    return hf_name(name).replace(".gate_proj", ".gate_up_proj") if ".experts." in name else hf_name(name)


def test_gradients_equal_transformers(pair):
    """Every parameter that transformers gives a gradient, from the embedding to the compressors."""
    compared = set()
    for name, gradient in pair.gradients.items():
        if ".experts.w" in name:
            layer = name.split(".experts.")[0]
            stacked = {p: pair.gradients[f"{layer}.experts.{p}.weight"] for p in ("w1", "w2", "w3")}
            packed = hf_name(f"{layer}.experts")
            assert_same(pair.expected[f"{packed}.gate_up_proj"], torch.cat([stacked["w1"], stacked["w3"]], 1), name)
            assert_same(pair.expected[f"{packed}.down_proj"], stacked["w2"], name)
            compared |= {f"{packed}.gate_up_proj", f"{packed}.down_proj"}
        else:
            assert_same(pair.expected[hf_name(name)], gradient, name)
            compared.add(hf_name(name))
    assert compared == {name for name in pair.expected if pair.expected[name].abs().max() > 0}


def assert_same(expected: torch.Tensor, actual: torch.Tensor, name: str) -> None:
    assert_close(
        actual.flatten(1) if actual.dim() > 1 else actual.view(-1, 1),
        expected.view_as(actual).flatten(1) if actual.dim() > 1 else expected.view(-1, 1),
        TOLERANCE,
        name,
    )


def test_the_language_loss_leaves_the_indexer_alone(pair):
    assert not any(".indexer." in name for name in pair.gradients)
