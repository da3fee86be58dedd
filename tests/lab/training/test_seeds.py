"""Seeds that are trained as one model: each learns what it learns alone, up to rounding."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.experiments.define.sizes import sized_model
from deepseek_attn.lab.experiments.define.v41 import make_v41
from deepseek_attn.lab.training import TrainResult, make_task
from deepseek_attn.lab.training.loop import Paused, deterministic_ops, train_stepwise
from deepseek_attn.lab.training.state import TrainingState
from deepseek_attn.lab.training.step import TrainingStep
from tests.support.small_models import small_config
from tests.support.tiers import exhaustive_on_cpu, tiered

SEEDS = (0, 3, 4)
TASK = make_task("recall", vocab_size=64, symbols=8, pairs=4, questions=8, gap=4)
OPTIONS = {"steps": 6, "batch": 2, "seq_len": 40, "lr": 1e-3, "weight_decay": 0.1}


def config(ratios: list[int]) -> ModelConfig:
    small = {"vocab_size": 64, "hc_sinkhorn_iters": 2, "moe_intermediate_size": 32, "index_topk": 2}
    return small_config(ratios, sliding_window=8, **small)


@pytest.fixture(autouse=True)
def _report_each_step(monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.training.loop.REPORT_EVERY", 1)


def finish(stepping):
    while True:
        try:
            next(stepping)
        except StopIteration as end:
            return end.value


def together(config, device="cpu", **options) -> list[TrainResult]:
    return finish(train_stepwise(config, TASK, seeds=SEEDS, device=device, test_batches=0, **OPTIONS, **options))


def alone(config, seed: int, device="cpu", **options) -> TrainResult:
    options = OPTIONS | options
    return finish(train_stepwise(config, TASK, seeds=[seed], device=device, test_batches=0, **options))[0]


@exhaustive_on_cpu
@pytest.mark.parametrize("selection", tiered(["learned", "random"], ["learned"], quick_on_gpu=["random"]))
def test_each_seed_has_the_losses_that_it_has_alone(selection):
    """Three steps that read all entries with exact weights, and three with selected ones and rounded weights."""
    schedule = config([0, 4])
    results = together(schedule, selection=selection)
    for seed, result in zip(SEEDS, results, strict=True):
        expected = alone(schedule, seed, selection=selection)
        assert [step for step, _ in result.losses] == [1, 2, 3, 4, 5, 6]
        losses, wanted = (torch.tensor([loss for _, loss in each.losses]) for each in (result, expected))
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)
        for name, parameter in expected.model.named_parameters():
            found = result.model.get_parameter(name)
            torch.testing.assert_close(found, parameter, rtol=0, atol=2e-3, msg=name)  # Adam's steps are 1e-3 in all
    biases = [result.model.get_parameter("layers.1.ffn.gate.bias") for result in results]
    assert not torch.equal(biases[0], biases[1])


@exhaustive_on_cpu
def test_a_training_that_is_stopped_goes_on_to_the_same_bits(tmp_path):
    schedule, path = config([0, 4]), tmp_path / "state"
    whole = together(schedule)
    stops = iter([False, False, False, True])
    with pytest.raises(Paused):
        together(schedule, state=TrainingState(path, {}), stop=lambda: next(stops))
    for result, wanted in zip(together(schedule, state=TrainingState(path, {}, resume=True)), whole, strict=True):
        assert result.losses == wanted.losses
        for name, parameter in wanted.model.named_parameters():
            assert torch.equal(result.model.get_parameter(name), parameter), name


@exhaustive_on_cpu
def test_shared_selections_and_engrams(monkeypatch):
    """V4.1: the hash of n-grams, tables, blocks of candidates and entries of other layers, for all seeds at a time."""
    monkeypatch.setitem(OPTIONS, "steps", 2)
    base = sized_model("1m").replace(
        num_hidden_layers=4, compress_ratios=[0] * 4, hidden_size=64, vocab_size=64, index_topk=3,
        num_attention_heads=2, moe_intermediate_size=32,
    )  # fmt: skip
    model = make_v41(base, [0, 2, 1, 1], {"selection": 2, "candidates": 3, "engram": True})
    for seed, result in zip(SEEDS, together(model), strict=True):
        losses, wanted = (torch.tensor(each.losses) for each in (result, alone(model, seed)))
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)


def test_a_config_with_an_mtp_layer_is_refused():
    with pytest.raises(ValueError, match="set num_nextn_predict_layers to 0"):
        together(small_config([0, 4], mtp=1, vocab_size=64))


@pytest.mark.gpu
def test_a_captured_step_computes_what_an_eager_one_does(device, monkeypatch):
    schedule, found = config([0, 4]), []
    for eager_steps in (1, 1, 100):
        monkeypatch.setattr("deepseek_attn.lab.training.step.EAGER_STEPS", eager_steps)
        with deterministic_ops(True, device):
            found.append([result.losses for result in together(schedule, device)])
    assert found[0] == found[1]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[2]), rtol=1e-3, atol=1e-3)
    losses, expected = torch.tensor(found[0][1]), torch.tensor(alone(schedule, SEEDS[1], device).losses)
    torch.testing.assert_close(losses, expected, rtol=3e-2, atol=3e-2)  # products are bfloat16


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_run_as_it_is(device, monkeypatch, caplog):
    def refuse(self):
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr("deepseek_attn.lab.training.step.EAGER_STEPS", 1)
    monkeypatch.setattr(TrainingStep, "capture", refuse)
    assert len(together(config([0, 4]), device)[0].losses) == 6
    assert "are not captured as a CUDA graph: not permitted" in caplog.text
