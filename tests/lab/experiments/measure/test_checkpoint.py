"""A checkpoint of which some layers at a time are in memory gives the results of the whole one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.lab.experiments.define.settings import CheckpointSettings
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from deepseek_attn.lab.experiments.measure.checkpoint import measure_own, measure_variant, open_source, read_prompts
from deepseek_attn.lab.experiments.measure.quality import compare, next_token_loss
from deepseek_attn.lab.experiments.measure.recall import measure_recall
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import untyped

CPU = torch.device("cpu")
OWN = ",".join(str(spec.ratio) for spec in ModelConfig.from_pretrained("tiny").layers)
LATE = ",".join([*OWN.split(",")[:-1], "128"])  # another ratio in the last layer alone


def settings(layers: int = 0, at_once: int = 0) -> CheckpointSettings:
    return CheckpointSettings("tiny", None, 60, 51, layers, at_once)


VARIANTS = {
    variant.name: variant
    for variant in (
        ModelVariant("own", OWN),
        ModelVariant("late", LATE),
        ModelVariant("official", OWN, numerics="official"),
    )
}


class Results:
    """Results of a checkpoint by ``layers_at_once``, each computed when it is first asked for."""

    def __init__(self, model: str, variants: dict[str, ModelVariant], factory: pytest.TempPathFactory):
        self.model, self.variants, self.factory = model, variants, factory
        self._own: dict = {}
        self._of_variants: dict = {}

    def settings(self, at_once: int) -> CheckpointSettings:
        return replace(settings(at_once=at_once), model=self.model)

    def own(self, at_once: int) -> Any:
        """The checkpoint's own result."""
        return self._own_and_folder(at_once)[0]

    def of(self, name: str, at_once: int) -> Any:
        """The result of a variant."""
        if (name, at_once) not in self._of_variants:
            folder = self._own_and_folder(at_once)[1]
            found = measure_variant(self.variants[name], self.settings(at_once), CPU, folder)
            self._of_variants[name, at_once] = found
        return self._of_variants[name, at_once]

    def _own_and_folder(self, at_once: int) -> tuple[Any, Path]:
        if at_once not in self._own:
            folder = self.factory.mktemp("own")
            self._own[at_once] = measure_own(self.settings(at_once), CPU, folder), folder
        return self._own[at_once]

    def all(self, at_once: int) -> str:
        return json.dumps([self.own(at_once), *(self.of(name, at_once) for name in self.variants)])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results("tiny", VARIANTS, tmp_path_factory)


@pytest.mark.exhaustive
def test_groups_of_layers_change_nothing(results):
    assert results.all(2) == results.all(0)


@pytest.mark.exhaustive
def test_own_quality_is_that_of_a_whole_runner(results):
    config, source = open_source(settings())
    prompts = read_prompts(settings(), config)
    runner = ModelRunner.from_source(config, source, device="cpu", max_model_len=51, max_num_batched_tokens=51)
    logits = runner.score(prompts)
    own = results.own(2)
    assert own["loss"] == untyped(compare(logits, logits, prompts))["loss"]
    assert own["layers"] == measure_recall(runner, prompts)


def test_a_variant_that_changes_nothing_is_equal_and_others_are_not(results):
    own = results.of("own", 2)
    assert own["kl"] == 0.0
    assert own["layers"] == results.own(0)["layers"]
    for name in ("late", "official"):
        assert results.of(name, 2)["kl"] > 0, name


@pytest.mark.exhaustive
def test_a_change_of_a_late_layer_starts_from_kept_states(tmp_path, monkeypatch):
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


FAMILIES = {
    "tiny_v32": [
        ModelVariant("own", "own"),
        ModelVariant("top 2", "own", index_topk=2),
        ModelVariant("official", "own", numerics="official"),
        ModelVariant("dense", "own", indexer=False),
    ],
    "tiny_v41": [ModelVariant("own", "own"), ModelVariant("top 2", "own", index_topk=2)],
}


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Results]:
    return {
        model: Results(model, {variant.name: variant for variant in variants}, tmp_path_factory)
        for model, variants in FAMILIES.items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_layers_of_other_families_change_nothing(families, family):
    """Layers of V4.1 read entries, index keys, selections and candidates of layers in earlier groups."""
    assert families[family].all(1) == families[family].all(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_those_of_a_whole_runner(families, family):
    found = families[family]
    config, source = open_source(found.settings(1))
    prompts = read_prompts(found.settings(1), config)
    options = {"device": "cpu", "max_model_len": 51, "max_num_batched_tokens": 51}
    with ModelRunner.from_source(config, source, **options) as runner:
        own, rows = runner.score(prompts), measure_recall(runner, prompts)
    with ModelRunner.from_source(config.replace(index_topk=2), source, **options) as runner:
        fewer = runner.score(prompts)
    assert found.own(1)["loss"] == untyped(compare(own, own, prompts))["loss"]
    assert found.own(1)["layers"] == rows
    assert found.of("own", 1)["kl"] == 0.0
    expected: Any = compare(own, fewer, prompts)
    assert {key: found.of("top 2", 1)[key] for key in expected} == expected
    assert expected["kl"] > 0


@exhaustive_on_cpu
def test_dense_attention_of_a_v32_reads_all_tokens(families):
    dense, official = (families["tiny_v32"].of(name, 1) for name in ("dense", "official"))
    assert dense["kl"] > 0
    assert official["kl"] > 0
    assert all(row["token_mass"] == pytest.approx(1.0) for row in dense["layers"])


def test_other_families_keep_their_schedule(tmp_path):
    given = replace(settings(), model="tiny_v41")
    with pytest.raises(ValueError, match=r"changes schedule, indexer of a deepseek_v41.*index_topk"):
        measure_variant(ModelVariant("other", "0,4*", indexer=True), given, CPU, tmp_path)
