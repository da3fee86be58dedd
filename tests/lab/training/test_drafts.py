"""The MTP layer in training: its drafts are a runner's, it leaves the backbone alone, and it learns to be accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.stored_weights import read_float32
from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.training import MtpTraining, TextTask, save_checkpoint, train
from deepseek_attn.lab.training.drafts import DraftModel, Drafts, count_accepted, draft_losses
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.loop import EVALUATION_SEED
from deepseek_attn.lab.training.save import TrainedSource
from deepseek_attn.lab.training.step import MtpStep
from deepseek_attn.lab.training.task import generator_of
from deepseek_attn.lab.training.weights import FreshSource, build_model
from deepseek_attn.runner.drafting import DraftRows
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions
from tests.support.small_models import assert_close, prompt, small_config, small_runner
from tests.support.tiers import EXHAUSTIVE, exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped

CPU = torch.device("cpu")
TEXT = "The cat sat on the mat, and the dog lay by the door. " * 300


def config(mtp: int = 1, **changes) -> ModelConfig:
    small = {"vocab_size": 300, "hc_sinkhorn_iters": 3, "moe_intermediate_size": 64}
    return small_config([0, 4], mtp=mtp, **small | changes)


def dense_drafts(config, source, tokens, depth) -> Drafts:
    with torch.no_grad():
        return DraftModel(DenseModel(build_model(config, source, CPU, len(tokens))))(torch.tensor([tokens]), depth)


# What is computed


@pytest.mark.parametrize("length", tiered([2, 20, 21, 50], [21]))
def test_first_drafts_equal_the_caches(length):
    """Shorter than the window of 20, and past it."""
    small = small_config([0, 4], mtp=1)
    source, tokens = RandomSource(small, 1), prompt(small, length)
    logits, drafts = small_runner(small, source).score_mtp([tokens], chunk_size=30)
    found = dense_drafts(small, source, tokens, 1)
    assert_close(found.backbone[0], logits[0])
    assert_close(found.logits[0][0], drafts[0])


def drafted_by_runner(config, source, tokens: list[int], num_drafts: int) -> tuple[list[int], list[torch.Tensor]]:
    """Drafts after ``tokens``, of which the last one was just chosen, and the logits of each."""
    runner = small_runner(config, source)
    sequence = runner.sequence(tokens[:-1])
    options = StepOptions(hidden_states=True, mtp=True)
    hidden_states = required(runner.step([(sequence, len(tokens) - 1)], options).hidden_states)[0]
    runner.manager.reserve([(sequence.cache, num_drafts - 1)])
    logits, draft_logits = [], runner.whole_model().draft_logits
    untyped(runner.model).draft_logits = lambda states: logits.append(draft_logits(states)) or logits[-1]
    rows = DraftRows(sequence, len(tokens) - 2, hidden_states, tokens[-1:])
    return runner.draft([rows], num_drafts).tokens[0].tolist(), [row[0] for row in logits]


@pytest.mark.parametrize(
    ("length", "window"),
    tiered([(2, 20), (9, 20), (21, 20), (22, 20), (50, 20), (30, 2)], [(22, 20)]),
)
def test_deeper_drafts_equal_the_caches(length, window):
    """With the runner's drafts as the text, draft d from a row has the runner's logits: the same keys are read.

    With a window of 2 the last drafts read rows of drafts only.
    """
    small = small_config([0, 4], mtp=1, sliding_window=window)
    source, tokens = RandomSource(small, 1), prompt(small, length)
    drafted, expected = drafted_by_runner(small, source, tokens, 4)
    assert len(expected) == 4
    found = dense_drafts(small, source, tokens + drafted[:3], 4)
    for draft, logits in enumerate(expected):
        row = found.logits[draft][0, length - 2 + draft]
        assert_close(row.unsqueeze(0), logits.unsqueeze(0), what=f"draft {draft}")
        assert int(row.argmax()) == drafted[draft]


def test_the_draft_loss_trains_the_mtp_layer_and_nothing_else():
    small = small_config([0, 4], mtp=1)
    model = build_model(small, RandomSource(small, 1), CPU, 40)
    tokens = torch.tensor([prompt(small, 40, seed) for seed in range(2)])
    drafts = DraftModel(DenseModel(model))(tokens, 3)
    draft_losses(drafts, torch.ones(2, 39, dtype=torch.bool), 0.5)[0].backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if name.startswith("mtp.") and p.requires_grad}
    for name in touched:
        assert required(model.get_parameter(name).grad).abs().max() > 0, name


def test_losses_by_definition():
    """Divergence and cross-entropy of every counted row from d on, against the backbone's next row."""
    generator = torch.Generator().manual_seed(0)
    backbone, logits = torch.randn(2, 5, 7, generator=generator), torch.randn(2, 2, 4, 7, generator=generator)
    counted = torch.tensor([[True, False, True, True], [True, True, False, True]])
    divergences, missed = [], []
    for draft in range(2):
        rows = [(b, p) for b in range(2) for p in range(draft, 4) if counted[b, p]]
        pairs = [(backbone[b, p + 1].softmax(0), logits[draft, b, p].softmax(0)) for b, p in rows]
        divergences.append(sum(float((t * (t / f).log()).sum()) for t, f in pairs) / len(rows))
        missed.append(sum(-float(f[t.argmax()].log()) for t, f in pairs) / len(rows))
    loss, divergence = draft_losses(Drafts(backbone, list(logits), torch.empty(0)), counted, 0.25)
    assert float(divergence) == pytest.approx(sum(divergences) / 2, rel=1e-5)
    assert float(loss) == pytest.approx(0.75 * sum(divergences) / 2 + 0.25 * sum(missed) / 2, rel=1e-5)


def test_accepted_drafts_by_definition():
    backbone = torch.eye(5)[torch.tensor([[4, 0, 1, 2, 3]])]
    # the backbone's choices at rows 1 to 4 are 0, 1, 2, 3; a draft is compared with that of the row after its own
    chosen = [[0, 4, 2, 3], [0, 1, 2, 4], [0, 4, 2, 3]]
    logits = [torch.eye(5)[torch.tensor([row])] for row in chosen]
    counted = torch.tensor([[True, True, True, True]])
    # 1st drafts: right at rows 0, 2, 3. 2nd: tried at 1 and 3, right at 1. 3rd: tried and right at 2.
    assert count_accepted(Drafts(backbone, logits, torch.empty(0)), counted).tolist() == [[3, 4], [1, 2], [1, 1]]
    counted = torch.tensor([[True, False, True, True]])
    assert count_accepted(Drafts(backbone, logits, torch.empty(0)), counted).tolist() == [[3, 3], [0, 1], [1, 1]]


# What is stored


def test_rounded_weights_cover_the_mtp_layer():
    small = config()
    model = build_model(small, FreshSource(small, 0), CPU, 32)
    source = TrainedSource(model, small)
    weights = source.rounded_parameters()
    assert set(weights) == {name for name, p in model.named_parameters() if p.is_floating_point()}
    drafting = source.rounded_parameters(backbone=False)
    assert set(drafting) == {name for name in weights if name.startswith("mtp.")}
    assert set(source.rounded_parameters(mtp=False)) == set(weights) - set(drafting)
    for name in ("e_proj.weight", "h_proj.weight", "enorm.weight", "attn.wkv.weight", "ffn.gate.bias", "hc_head_fn"):
        assert torch.equal(drafting[f"mtp.0.{name}"], read_float32(source, f"mtp.0.{name}")), name
    stored = read_float32(source, "mtp.0.ffn.experts.3.w2.weight")
    assert torch.equal(drafting["mtp.0.ffn.experts.w2.weight"][3], stored)
    assert not torch.equal(stored, model.get_parameter("mtp.0.ffn.experts.w2.weight")[3])


def test_the_mtp_layer_starts_as_a_layer_after_the_last():
    """Its sublayers alternate with those before it in which stream they read, and the streams are the backbone's."""
    small = config(hc_mult=4)
    source = FreshSource(small, 0)
    picked = [int(source.read(f"mtp.0.hc_{part}_base")[:4].argmax()) for part in ("attn", "ffn")]
    assert picked == [2 * 2 % 4, (2 * 2 + 1) % 4]
    assert torch.equal(source.read("mtp.0.hc_head_base"), torch.zeros(4))
    assert torch.equal(source.read("mtp.0.h_proj.weight"), torch.eye(128))


# What is learned


@pytest.fixture(scope="module")
def task() -> TextTask:
    return TextTask.from_text(TEXT, vocab_size=300)


SIZES: dict[str, Any] = {"steps": 24, "batch": 2, "seq_len": 24, "test_batches": 2}


@pytest.fixture(scope="module")
def result(task):
    return train(config(), task, **SIZES, mtp=MtpTraining(steps=24, depth=3), device="cpu")


@pytest.mark.exhaustive
def test_it_learns_to_be_accepted(result, task):
    """Chance is one in 300."""
    assert result.mtp.done == 24
    assert [step for step, _ in result.mtp.losses] == [20, 24]
    assert result.mtp.losses[-1][1] < result.mtp.losses[0][1]
    accepted = [result.metrics[f"acceptance_{draft}"] for draft in (1, 2, 3)]
    assert min(accepted) > 0.6, result.metrics
    assert set(result.metrics) == {"loss", "accuracy", "mtp_loss", *(f"acceptance_{draft}" for draft in (1, 2, 3))}


@EXHAUSTIVE
def test_an_mtp_layer_that_took_no_steps_to_speak_of_is_not_accepted(result, task):
    untrained = train(config(), task, **{**SIZES, "steps": 12}, mtp=MtpTraining(steps=1, lr=1e-9), device="cpu")
    assert untrained.metrics["acceptance_1"] < 0.2
    assert untrained.metrics["mtp_loss"] > 2 * result.metrics["mtp_loss"]


@pytest.mark.exhaustive
def test_the_backbone_is_what_it_is_without_an_mtp_layer(task):
    sizes: dict[str, Any] = SIZES | {"steps": 2}
    plain = train(config(mtp=0), task, **sizes, device="cpu")
    both = train(config(), task, **sizes, device="cpu")
    assert both.losses == plain.losses
    assert {name: both.metrics[name] for name in plain.metrics} == plain.metrics
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, both.model.get_parameter(name)), name


def first_drafts_accepted(runner: ModelRunner, task: TextTask) -> float:
    """The share through a runner's caches, on the batches of `evaluate`."""
    right = []
    for number in range(SIZES["test_batches"]):
        drawn = task.batch(SIZES["batch"], SIZES["seq_len"], generator_of(EVALUATION_SEED, number), "test")
        tokens = drawn.tokens[:, :-1]
        logits, drafts = runner.score_mtp(tokens.tolist())
        right += [d.argmax(-1) == row[1:].argmax(-1) for row, d in zip(logits, drafts, strict=True)]
    return float(torch.cat(right).float().mean())


@pytest.mark.exhaustive
def test_a_saved_checkpoint_drafts_as_training_said(result, task, tmp_path):
    directory = save_checkpoint(result.model, result.config, tmp_path / "trained", task.tokenizer)
    options = {"max_model_len": 64, "max_num_seqs": 4, "device": "cpu"}
    loaded = ModelRunner.from_pretrained(directory, progress=False, **options)
    kept = result.runner(**options)
    assert first_drafts_accepted(loaded, task) == pytest.approx(result.metrics["acceptance_1"], abs=0.02)
    prompts = task.batch(2, 30, torch.Generator().manual_seed(1)).tokens.tolist()
    for saved, own in zip(loaded.score_mtp(prompts)[1], kept.score_mtp(prompts)[1], strict=True):
        assert torch.equal(saved, own)


@pytest.mark.gpu
def test_training_on_a_gpu(device, task):
    """Captured steps of the MTP layer too."""
    trained = train(config(), task, **{**SIZES, "steps": 24}, mtp=MtpTraining(steps=24), device=device)
    assert trained.metrics["acceptance_1"] > 0.3
    runner = trained.runner(device=device, numerics="exact", dtype="float32", max_model_len=64, max_num_seqs=4)
    assert first_drafts_accepted(runner, task) == pytest.approx(trained.metrics["acceptance_1"], abs=0.1)


@exhaustive_on_cpu
def test_the_routers_bias_of_the_mtp_layer_follows_its_load(result):
    bias = result.model.mtp["0"].ffn.gate.bias
    assert 0 < bias.abs().max() <= 24 * 1e-3 + 1e-6
    small = config()
    model = build_model(small, FreshSource(small, 0), CPU, 32)
    step = MtpStep(DenseModel(model), 1, 16, 0.1, 3, 0.5)
    step.balance(torch.tensor([[0.9, 0.1, 0.5, 0.5]]))
    assert torch.equal(model.mtp["0"].ffn.gate.bias.sign(), torch.tensor([-1.0, 1.0, 0.0, 0.0]))
    assert not model.layers["1"].ffn.gate.bias.any()


def test_a_budget_covers_both(task):
    mtp = MtpTraining(steps=10**6)
    short = train(config(), task, **{**SIZES, "steps": 10**6}, budget_s=0.05, mtp=mtp, device="cpu")
    assert 0 < short.steps < 1000
    assert 0 < required(short.mtp).done < 1000
    assert short.seconds + required(short.mtp).seconds < 10


# What is refused, and the command


@pytest.mark.parametrize(
    ("changes", "mtp", "message"),
    [
        ({}, {"steps": 0}, r"mtp\.steps is 0"),
        ({}, {"depth": 0}, r"mtp\.depth is 0"),
        ({}, {"depth": 16}, r"mtp\.depth is 16: .* less than seq_len=16"),
        ({}, {"greedy_share": 1.5}, r"mtp\.greedy_share is 1\.5"),
        ({}, {"lr": -1.0}, r"mtp\.lr is -1\.0"),
        ({}, {"weight_decay": -1.0}, r"mtp\.weight_decay is -1\.0"),
        ({"mtp": 2}, {}, "only one MTP layer is trained"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, mtp, message, task):
    with pytest.raises(ValueError, match=message):
        train(config(**changes), task, steps=1, batch=2, seq_len=16, mtp=MtpTraining(**mtp), device="cpu")


def test_a_source_without_the_mtp_layer_is_refused():
    with pytest.raises(ValueError, match="the checkpoint has no MTP layer"):
        build_model(config(), FreshSource(config(mtp=0), 0), CPU, 32)


@pytest.mark.exhaustive
def test_the_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config().to_dict()), encoding="utf-8")
    command = ["train", "--text", str(tmp_path / "text.txt"), "--steps", "2", "--batch", "2", "--seq-len", "16"]
    command += ["--device", "cpu", "--mtp-steps", "3", "--mtp-depth", "2"]
    assert main([*command, "--config", str(file), "--out", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(printed["test"]) == {"loss", "accuracy", "mtp_loss", "acceptance_1", "acceptance_2"}
    assert (printed["mtp"]["steps"], printed["mtp"]["depth"], printed["mtp"]["lr"]) == (3, 2, 0.004)
    assert printed["mtp"]["losses"][-1][0] == 3
    assert json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8")) == printed
    generate = ["generate", "--model", str(tmp_path / "out"), "--prompt", "The", "--max-tokens", "6"]
    texts = []
    for speculate in ("1", "3"):
        assert main([*generate, "--temperature", "0", "--device", "cpu", "--speculate", speculate]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    file.write_text(json.dumps(config(mtp=0).to_dict()), encoding="utf-8")
    assert main([*command, "--config", str(file)]) == 2
    assert "--mtp-steps, --mtp-depth need a config with an MTP layer" in capsys.readouterr().err
