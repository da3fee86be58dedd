"""Groups of layers that compute the same rows of a prompt."""

from __future__ import annotations

import json

import torch

from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.estimates.prompts import prompt_groups


def test_groups_of_the_published_model():
    config = ModelConfig.from_preset("v41_flash")
    groups = prompt_groups(config, numerics_for(config, "serving"), torch.bfloat16, 8192, 16)
    assert [(group.first, group.last, group.rows) for group in groups] == [
        (0, 19, 8192), (20, 23, 2429), (24, 27, 2048), (28, 31, 1540), (32, 35, 1032), (36, 39, 524),
    ]  # fmt: skip
    assert groups[0].flops == groups[0].all_flops
    shares = [group.flops / group.all_flops for group in groups[1:]]
    assert shares == sorted(shares, reverse=True)
    assert 0.55 < sum(group.flops for group in groups) / sum(group.all_flops for group in groups) < 0.6
    short = prompt_groups(config, numerics_for(config, "serving"), torch.bfloat16, 600, 16)
    assert [group.rows for group in short] == [600] * 5 + [524]


def test_other_models_have_none():
    config = ModelConfig.from_preset("tiny")
    assert prompt_groups(config, numerics_for(config, "exact"), torch.float32, 100, 16) == []


def test_plan_shows_them(capsys):
    assert main(["plan", "--model", "tiny_v41", "--max-model-len", "200"]) == 0
    table = capsys.readouterr().out
    assert "a prompt of 200 tokens, for results at its end" in table
    assert main(["plan", "--model", "tiny_v41", "--max-model-len", "200", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["prompt"]
    assert [(group["first"], group["last"], group["rows"]) for group in facts["groups"]] == [
        (0, 3, 200), (4, 5, 37), (6, 7, 30),
    ]  # fmt: skip
    assert main(["plan", "--model", "tiny"]) == 0
    assert "a prompt of" not in capsys.readouterr().out
