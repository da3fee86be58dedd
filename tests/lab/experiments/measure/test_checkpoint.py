"""A checkpoint of which some layers at a time are in memory gives the results of the whole one."""

from __future__ import annotations

import json

import pytest
import torch

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.checkpoint import measure_own, measure_variant, open_source, read_prompts
from deepseek_attn.lab.experiments.measure.quality import compare, next_token_loss
from deepseek_attn.lab.experiments.measure.recall import measure_recall

CPU = torch.device("cpu")
OWN = ",".join(str(spec.ratio) for spec in ModelConfig.from_pretrained("tiny").layers)
LATE = ",".join([*OWN.split(",")[:-1], "128"])  # another ratio in the last layer alone


def settings(layers: int = 0, at_once: int = 0) -> CheckpointSettings:
    return CheckpointSettings("tiny", None, 100, 51, layers, at_once)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """By ``layers_at_once``: (the checkpoint's own result, those of variants)."""
    variants = [
        ModelVariant("own", OWN),
        ModelVariant("late", LATE),
        ModelVariant("official", OWN, numerics="official"),
    ]
    found = {}
    for at_once in (0, 2):
        folder = tmp_path_factory.mktemp("own")
        own = measure_own(settings(at_once=at_once), CPU, folder)
        found[at_once] = own, {v.name: measure_variant(v, settings(at_once=at_once), CPU, folder) for v in variants}
    return found


def test_groups_of_layers_change_nothing(results):
    assert json.dumps(results[2]) == json.dumps(results[0])


def test_own_quality_is_that_of_a_whole_runner(results):
    config, source = open_source(settings())
    prompts = read_prompts(settings(), config)
    runner = ModelRunner.from_source(config, source, device="cpu", max_model_len=51, max_num_batched_tokens=51)
    logits = runner.score(prompts)
    own, _ = results[2]
    assert own["loss"] == compare(logits, logits, prompts)["loss"]
    assert own["layers"] == measure_recall(runner, prompts)


def test_a_variant_that_changes_nothing_is_equal_and_others_are_not(results):
    _, variants = results[2]
    assert variants["own"]["kl"] == 0.0
    assert variants["own"]["layers"] == results[0][0]["layers"]
    for name in ("late", "official"):
        assert variants[name]["kl"] > 0, name


def test_a_change_of_a_late_layer_starts_from_kept_states(results, tmp_path, monkeypatch):
    own = measure_own(settings(at_once=2), CPU, tmp_path)
    computed = []
    make = ModelRunner.from_source
    monkeypatch.setattr(ModelRunner, "from_source", lambda *a, **o: computed.append(o["layers"]) or make(*a, **o))
    late = measure_variant(ModelVariant("late", LATE), settings(at_once=2), CPU, tmp_path)
    assert computed == [[4, 5]]
    assert [row["layer"] for row in late["layers"]] == [row["layer"] for row in own["layers"]]
    assert late["layers"][:4] == own["layers"][:4]


def test_the_first_layers_alone(tmp_path):
    config, source = open_source(settings())
    prompts = read_prompts(settings(), config)
    own = measure_own(settings(layers=3, at_once=2), CPU, tmp_path)
    runner = ModelRunner.from_source(config, source, device="cpu", layers=[0, 1, 2], max_model_len=51)
    losses = [
        next_token_loss(rows, torch.tensor(ids, dtype=torch.int64, device="cpu"))
        for rows, ids in zip(runner.score(prompts), prompts, strict=True)
    ]
    assert own["loss"] == pytest.approx(float(torch.cat(losses).double().mean()), rel=1e-6)
    assert len(own["layers"]) == 3
