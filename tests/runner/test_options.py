"""The keyword arguments of LLM and of the constructors of ModelRunner: one list, which each of them takes and shows."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from deepseek_attn import LLM, ModelConfig, ModelRunner
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.runner.build import build_runner
from deepseek_attn.runner.options import RunnerOptions
from tests.support.typed import untyped

PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(build_runner).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def test_names_and_types_are_those_of_build_runner():
    hints = get_type_hints(build_runner)
    assert get_type_hints(RunnerOptions) == {name: hints[name] for name in PARAMETERS}


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (LLM, ["model", "speculate"]),
        (ModelRunner.from_pretrained, ["model"]),
        (ModelRunner.from_config, ["config", "seed"]),
        (ModelRunner.from_source, ["config", "source"]),
    ],
)
def test_help_lists_them_with_their_defaults(function, own):
    found = inspect.signature(function).parameters
    assert list(found) == [*own, *PARAMETERS]
    assert {name: found[name].default for name in PARAMETERS} == {n: p.default for n, p in PARAMETERS.items()}


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda **options: LLM("absent", **options), "LLM"),
        (lambda **options: ModelRunner.from_pretrained("absent", **options), "from_pretrained"),
        (lambda **options: ModelRunner.from_config("absent", **options), "from_config"),
        (
            lambda **options: ModelRunner.from_source(ModelConfig.from_preset("tiny"), untyped(None), **options),
            "from_source",
        ),
    ],
    ids=["LLM", "from_pretrained", "from_config", "from_source"],
)
def test_unknown_options_are_named_before_anything_is_read(make, where):
    names = ".*attention_only, backend, .*max_num_seqs, .*progress"
    with pytest.raises(ValueError, match=f"^{where}: no such options: max_seqs, temperature; there are {names}"):
        make(max_seqs=3, temperature=0, device="cpu")


def test_known_options_arrive():
    config = ModelConfig.from_preset("tiny")
    given = {"layers": [1], "attention_only": True, "max_num_seqs": 3, "device": "cpu", "progress": False}
    for runner in (
        ModelRunner.from_config(config, seed=4, **given),
        ModelRunner.from_source(config, RandomSource(config, 4), **given),
    ):
        assert [spec.name for spec in runner.backbone_layers] == ["layers.1"]
        assert runner.layout.max_num_seqs == 3
