"""Training: it learns, is reproducible, and what it saves scores through the paged caches as it said."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.checkpoint.stored_weights import read_float32
from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.training import TextTask, save_checkpoint, train
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.loop import EVALUATION_SEED
from deepseek_attn.lab.training.save import TrainedSource
from deepseek_attn.lab.training.step import BackboneStep, parameter_groups
from deepseek_attn.lab.training.task import generator_of
from deepseek_attn.lab.training.weights import FreshSource, build_model, rounded
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from tests.support.small_models import small_config
from tests.support.typed import required, untyped

CPU = torch.device("cpu")
TEXT = "The cat sat on the mat, and the dog lay by the door. " * 300


def config(**changes) -> ModelConfig:
    small = {"vocab_size": 300, "hc_sinkhorn_iters": 3, "moe_intermediate_size": 64, "num_attention_heads": 2}
    return small_config([0, 4, 16], **small | changes)


@pytest.fixture(scope="module")
def task() -> TextTask:
    return TextTask.from_text(TEXT, vocab_size=300)


@pytest.fixture(scope="module")
def result(task):
    return train(config(), task, steps=24, batch=2, seq_len=40, device="cpu", test_batches=2)


def test_it_learns(result):
    steps, losses = zip(*result.losses, strict=True)
    assert steps == (20, 24)
    assert losses[1] < 3.0 < 5.7  # ln 300 = 5.7 is where it starts
    assert result.steps == 24
    assert result.metrics["loss"] < 3.0
    assert result.metrics["accuracy"] > 0.3


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_weights(task):
    def weights(seed):
        trained = train(config(), task, steps=2, batch=1, seq_len=16, seed=seed, device="cpu", test_batches=1)
        return torch.cat([p.detach().flatten() for p in trained.model.parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def through_the_caches(runner: ModelRunner, task: TextTask, batches: int, batch: int, seq_len: int) -> float:
    losses = []
    for number in range(batches):
        tokens = task.batch(batch, seq_len, generator_of(EVALUATION_SEED, number), "test").tokens
        logits = [row.cpu() for row in runner.score(tokens.tolist())]
        losses += [F.cross_entropy(row[:-1], ids[1:]) for row, ids in zip(logits, tokens, strict=True)]
    return float(torch.stack(losses).mean())


def test_paged_caches_give_the_loss_that_training_reported(result, task):
    runner = result.runner(device="cpu", max_model_len=64, max_num_seqs=4)
    assert through_the_caches(runner, task, 2, 2, 40) == pytest.approx(result.metrics["loss"], abs=1e-3)


def test_a_saved_checkpoint_is_the_same_model(result, task, tmp_path):
    directory = save_checkpoint(result.model, result.config, tmp_path / "trained", task.tokenizer)
    runner = ModelRunner.from_pretrained(directory, device="cpu", max_model_len=64, max_num_seqs=4, progress=False)
    assert through_the_caches(runner, task, 2, 2, 40) == pytest.approx(result.metrics["loss"], abs=1e-3)
    tokenizer = Tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode(TEXT) == task.ids.tolist()
    with SafetensorsSource(directory) as source:
        assert source.entries()["layers.1.ffn.experts.0.w1.weight"].dtype == "I8"
        assert source.entries()["layers.1.attn.wq_a.weight"].dtype == "F8_E4M3"


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "bf16"])
def test_rounded_weights_are_what_a_checkpoint_stores(quantized):
    small = config() if quantized else config(quantization_config=None)
    model = build_model(small, FreshSource(small, 0), CPU, 32)
    source = TrainedSource(model, small)
    weights = source.rounded_parameters()
    assert set(weights) == {name for name, p in model.named_parameters() if p.is_floating_point()}
    for name in ("layers.0.attn.wo_a.weight", "embed.weight", "layers.1.ffn.gate.bias", "layers.2.hc_attn_fn"):
        assert torch.equal(weights[name], read_float32(source, name)), name
    for expert in (0, 3):
        stored = read_float32(source, f"layers.1.ffn.experts.{expert}.w2.weight")
        assert torch.equal(weights["layers.1.ffn.experts.w2.weight"][expert], stored)


@pytest.mark.parametrize("form", ["fp4", "fp8", "BF16", "F32"])
def test_rounding_passes_gradients_straight_through(form):
    values = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    result = rounded(values, form)
    assert torch.equal(result, values) == (form == "F32")
    weight = torch.arange(result.numel(), dtype=torch.float32).view_as(result)
    (result * weight).sum().backward()
    assert torch.equal(required(values.grad), weight)


def test_every_trained_parameter_is_in_one_group():
    small = config()
    model = build_model(small, FreshSource(small, 0), CPU, 32)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay, keep = (group["params"] for group in parameter_groups(trainable, 0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decay} >= {
        "head.weight",
        "layers.0.attn.wq_a.weight",
        "layers.1.ffn.experts.w1.weight",
    }
    assert {names[id(p)] for p in keep} >= {"embed.weight", "norm.weight", "layers.1.attn.attn_sink", "hc_head_fn"}
    grouped = [names[id(p)] for p in [*decay, *keep]]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trained)
    assert not any(name.endswith(("gate.bias", "tid2eid")) for name in trained)


def test_the_routers_bias_follows_the_load(result):
    bias = result.model.layers["2"].ffn.gate.bias
    assert bias.abs().max() > 0
    assert bias.abs().max() <= 24 * 1e-3 + 1e-6
    assert not bias.requires_grad


def test_balance_lifts_the_experts_that_got_less():
    small = config()
    model = build_model(small, FreshSource(small, 0), CPU, 32)
    step = BackboneStep(DenseModel(model), 1, 16, 0.1)
    step.balance(torch.tensor([[0.9, 0.1, 0.5, 0.5]]).expand(3, 4))
    assert torch.equal(model.layers["1"].ffn.gate.bias.sign(), torch.tensor([-1.0, 1.0, 0.0, 0.0]))
    assert model.layers["0"].ffn.gate.hash, "a hash layer has no bias"


@pytest.mark.gpu
def test_training_on_a_gpu(device, task):
    """Captured steps of both stages, bfloat16 products; the caches then run in float32."""
    trained = train(config(), task, steps=60, batch=4, seq_len=48, device=device, test_batches=2)
    assert trained.losses[-1][1] < 3.0
    runner = trained.runner(device=device, numerics="exact", dtype="float32", max_model_len=64, max_num_seqs=4)
    assert through_the_caches(runner, task, 2, 4, 48) == pytest.approx(trained.metrics["loss"], abs=2e-2)


def test_a_budget_ends_the_training(task):
    short = train(config(), task, steps=10**6, batch=2, seq_len=24, budget_s=0.05, device="cpu", test_batches=1)
    assert 0 < short.steps < 1000
    assert short.seconds < 10


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"steps": 0}, "steps is 0"),
        ({}, {"seq_len": 5000}, "exceeds the model's 4096 positions"),
        ({"vocab_size": 200}, {}, "task text has 300 tokens, vocab_size is 200"),
        ({}, {"dense_share": 1.5}, "between 0 and 1"),
        ({}, {"lr": -1.0, "budget_s": 0.0}, r"lr is -1\.0: .*; budget_s is 0\.0: "),
        ({}, {"lr": float("nan"), "weight_decay": float("inf")}, "lr is nan: .*; weight_decay is inf: "),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, arguments, message, task):
    with pytest.raises(ValueError, match=message):
        train(config(**changes), task, **{"steps": 1, "batch": 2, "seq_len": 16, "device": "cpu"} | arguments)


def test_other_families_are_refused(task):
    with pytest.raises(ValueError, match="only DeepSeek-V4"):
        train(untyped(ModelConfig.from_preset("tiny_v32")), task, steps=1, device="cpu")


def test_the_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict()), encoding="utf-8")
    command = ["train", "--config", str(tmp_path / "config.json"), "--text", str(tmp_path / "text.txt"), "--steps", "2"]
    command += ["--batch", "2", "--seq-len", "16", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["steps"] == 2
    assert set(printed["test"]) == {"loss", "accuracy"}
    assert json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8")) == printed
    generate = ["generate", "--model", str(tmp_path / "out"), "--prompt", "The", "--max-tokens", "3"]
    assert main([*generate, "--device", "cpu"]) == 0
    assert main(command) == 2
    assert "not an empty directory" in capsys.readouterr().err
