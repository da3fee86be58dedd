"""A checkpoint of which some layers at a time are in memory gives the results of the whole one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.checkpoint import measure_own, measure_variant, open_source, read_prompts
from deepseek_attn.lab.experiments.measure.quality import compare, next_token_loss
from deepseek_attn.lab.experiments.measure.recall import measure_recall
from tests.support.typed import untyped

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


@pytest.mark.exhaustive
def test_groups_of_layers_change_nothing(results):
    assert json.dumps(results[2]) == json.dumps(results[0])


@pytest.mark.exhaustive
def test_own_quality_is_that_of_a_whole_runner(results):
    config, source = open_source(settings())
    prompts = read_prompts(settings(), config)
    runner = ModelRunner.from_source(config, source, device="cpu", max_model_len=51, max_num_batched_tokens=51)
    logits = runner.score(prompts)
    own: Any = results[2][0]
    assert own["loss"] == untyped(compare(logits, logits, prompts))["loss"]
    assert own["layers"] == measure_recall(runner, prompts)


def test_a_variant_that_changes_nothing_is_equal_and_others_are_not(results):
    _, variants = results[2]
    assert variants["own"]["kl"] == 0.0
    assert variants["own"]["layers"] == results[0][0]["layers"]
    for name in ("late", "official"):
        assert variants[name]["kl"] > 0, name


@pytest.mark.exhaustive
def test_a_change_of_a_late_layer_starts_from_kept_states(results, tmp_path, monkeypatch):
    own: Any = measure_own(settings(at_once=2), CPU, tmp_path)
    computed = []
    make = ModelRunner.from_source
    monkeypatch.setattr(ModelRunner, "from_source", lambda *a, **o: computed.append(o["layers"]) or make(*a, **o))
    late: Any = measure_variant(ModelVariant("late", LATE), settings(at_once=2), CPU, tmp_path)
    assert computed == [[4, 5]]
    assert [row["layer"] for row in late["layers"]] == [row["layer"] for row in own["layers"]]
    assert late["layers"][:4] == own["layers"][:4]


@pytest.mark.exhaustive
def test_the_first_layers_alone(tmp_path):
    config, source = open_source(settings())
    prompts = read_prompts(settings(), config)
    own: Any = measure_own(settings(layers=3, at_once=2), CPU, tmp_path)
    runner = ModelRunner.from_source(config, source, device="cpu", layers=[0, 1, 2], max_model_len=51)
    losses = [
        next_token_loss(rows, torch.tensor(ids, dtype=torch.int64, device="cpu"))
        for rows, ids in zip(runner.score(prompts), prompts, strict=True)
    ]
    assert own["loss"] == pytest.approx(float(torch.cat(losses).double().mean()), rel=1e-6)
    assert len(own["layers"]) == 3


@pytest.fixture(scope="module", params=["tiny_v32", "tiny_v41"])
def family(request, tmp_path_factory) -> dict:
    """Results of another family: its own by ``layers_at_once``, those of variants, and the whole model's."""
    variants = [ModelVariant("own", "own"), ModelVariant("top 2", "own", index_topk=2)]
    if request.param == "tiny_v32":
        variants += [ModelVariant("official", "own", numerics="official"), ModelVariant("dense", "own", indexer=False)]
    found: dict = {"own": {}, "variants": {}, "name": request.param}
    for at_once in (0, 1):
        given = replace(settings(at_once=at_once), model=request.param)
        folder = tmp_path_factory.mktemp("own")
        found["own"][at_once] = measure_own(given, CPU, folder)
        found["variants"][at_once] = {v.name: measure_variant(v, given, CPU, folder) for v in variants}
    config, source = open_source(given)
    found["prompts"] = prompts = read_prompts(given, config)
    options = {"device": "cpu", "max_model_len": 51, "max_num_batched_tokens": 51}
    for name, changes in (("own", {}), ("top 2", {"index_topk": 2})):
        with ModelRunner.from_source(config.replace(**changes), source, **options) as runner:
            found[f"whole {name}"] = runner.score(prompts), measure_recall(runner, prompts)
    return found


@pytest.mark.exhaustive
def test_groups_of_layers_of_other_families_change_nothing(family):
    """Layers of V4.1 read entries, index keys, selections and candidates of layers in earlier groups."""
    for at_once, own in family["own"].items():
        assert json.dumps(own) == json.dumps(family["own"][0]), at_once
        assert json.dumps(family["variants"][at_once]) == json.dumps(family["variants"][0]), at_once


@pytest.mark.exhaustive
def test_other_families_are_those_of_a_whole_runner(family):
    (own, rows), (fewer, _), prompts = family["whole own"], family["whole top 2"], family["prompts"]
    found, variants = family["own"][1], family["variants"][1]
    assert found["loss"] == untyped(compare(own, own, prompts))["loss"]
    assert found["layers"] == rows
    assert variants["own"]["kl"] == 0.0
    expected: Any = compare(own, fewer, prompts)
    assert {key: variants["top 2"][key] for key in expected} == expected
    assert expected["kl"] > 0


def test_dense_attention_of_a_v32_reads_all_tokens(family):
    if family["name"] != "tiny_v32":
        pytest.skip("V4.1 has no dense form")
    dense = family["variants"][1]["dense"]
    assert dense["kl"] > 0
    assert family["variants"][1]["official"]["kl"] > 0
    assert all(row["token_mass"] == pytest.approx(1.0) for row in dense["layers"])


def test_other_families_keep_their_schedule(tmp_path):
    given = replace(settings(), model="tiny_v41")
    with pytest.raises(ValueError, match=r"changes schedule, indexer of a deepseek_v41.*index_topk"):
        measure_variant(ModelVariant("other", "0,4*", indexer=True), given, CPU, tmp_path)
