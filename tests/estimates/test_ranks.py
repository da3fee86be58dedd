"""Predictions for ranks: against measurements, and by hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from deepseek_attn.cli import main, plan_facts
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.estimates.machines import H200, MACHINES
from deepseek_attn.estimates.ranks import RankLayout, RankModel, busiest_share
from tests.layers.parallel.cases import v4_config
from tests.support.tiers import EXHAUSTIVE, tiered
from tests.support.v41_cases import tiny_for_kernels

DATA = Path(__file__).parents[2] / "docs" / "data"


def model(name: str, ranks: int, **options) -> RankModel:
    config = ModelConfig.from_preset(name)
    return RankModel(config, numerics_for(config, "serving"), torch.bfloat16, RankLayout(ranks, **options), H200)


def test_traffic_of_a_step():
    tp = {part.name: part for part in model("v4_flash", 4).step(8, 1, 8192).collectives}
    assert tp["sum"].calls == 2 * 43 + 1
    assert tp["sum"].sent == 87 * 3 * (8 * 4096 * 2) * 2  # to three others, with a number beside each word
    ring = {part.name: part for part in model("v4_flash", 4).step(512, 1, 8192).collectives}
    assert ring["sum"].sent == 87 * 2 * 3 * (512 * 4096 * 2) // 4
    assert not any(part.network for part in ring.values())
    dp = {part.name: part for part in model("v4_pro", 16, dp_attention=True).step(512, 1, 8192).collectives}
    assert dp["gather tokens"].sent == 61 * 15 * 32 * 7168 * 2
    assert dp["gather tokens"].network == dp["gather tokens"].sent // 8
    assert dp["gather token ids"].calls == 3


MEASURED = [
    (run["ranks"], run["layers"], row)
    for run in json.loads((DATA / "h200_ranks.json").read_text())["runs"]
    if run["date"] > "2026-11-22"  # with older kernels
    for row in run["rows"]
    if row["step"] == "prefill" or (row["step"] == "decode" and row["sums"] == "as it is")
]


@pytest.mark.parametrize(
    ("ranks", "layers", "row"),
    MEASURED,
    ids=[f"{ranks} {row['layout']} {row['step']} {row.get('batch', row.get('tokens'))}" for ranks, _, row in MEASURED],
)
def test_measured_steps_are_predicted_within_a_fifth(ranks, layers, row):
    config = ModelConfig.from_preset("v4_flash").replace(num_hidden_layers=layers)
    layout = RankLayout(ranks, row["layout"] == "dp")
    found = RankModel(config, numerics_for(config, "serving"), torch.bfloat16, layout, H200)
    if row["step"] == "decode":
        predicted = found.step(row["batch"], 1, row["context"])
    else:
        tokens = row["tokens"] // (ranks if layout.dp_attention else 1)
        predicted = found.step(1, tokens, tokens)
    assert predicted.microseconds == pytest.approx(row["ms"] * 1e3, rel=0.2)


ALONE = [(name, row) for name in MACHINES for row in json.loads((DATA / f"{name}_model.json").read_text())["rows"]]


@pytest.mark.parametrize(("name", "row"), ALONE, ids=[f"{name} {row['batch'] * row['tokens']}" for name, row in ALONE])
def test_measured_steps_of_one_gpu_are_predicted_within_a_fifth(name, row):
    config = ModelConfig.from_preset("v4_flash").replace(num_hidden_layers=8)
    found = RankModel(config, numerics_for(config, "serving"), torch.bfloat16, RankLayout(1), MACHINES[name])
    predicted = found.step(row["batch"], row["tokens"], row["context"]).microseconds
    assert predicted == pytest.approx(row["microseconds"], rel=0.2)


@pytest.mark.parametrize(("experts", "ranks", "rows"), [(256, 2, 1), (256, 2, 8), (256, 4, 8), (384, 16, 32)])
def test_share_of_the_busiest_rank(experts, ranks, rows):
    """Against drawn choices."""
    generator, most, chosen = random.Random(0), 0, 0
    for _ in range(400):
        found = {expert for _ in range(rows) for expert in generator.sample(range(experts), 6)}
        most += max(Counter(expert * ranks // experts for expert in found).values())
        chosen += len(found)
    assert busiest_share(experts, 6, rows, ranks) == pytest.approx(most / chosen, rel=0.04)


def test_share_of_a_rank_when_all_experts_are_chosen():
    assert busiest_share(256, 6, 10**5, 8) == pytest.approx(1 / 8)
    assert busiest_share(256, 6, 1, 1) == 1
    assert busiest_share(384, 6, 1, 64) == pytest.approx(1 / 6)  # at least one expert


def test_ranks_with_a_part_of_every_expert_read_equally_much():
    """Two ranks of V4-Flash divide the widths of experts, eight ranks the experts."""
    for ranks, share in ((2, 1 / 2), (8, busiest_share(256, 6, 1, 8))):
        found = model("v4_flash", ranks)
        one = model("v4_flash", 1)
        routed, alone = (m._experts(m.config.layers[5], 1, 1).bytes["routed weights"] for m in (found, one))
        assert routed == pytest.approx(alone * share)
        assert found.chosen_experts(1) == pytest.approx(6 if ranks == 2 else 6 * share)


def test_experts_are_shared_out():
    """Twice the ranks, half the routed weights that a batch reads, and the same attention with data-parallel ranks."""
    one, two = (model("v4_flash", n).step(128, 1, 8192).stages for n in (2, 4))
    assert 0.45 < two["experts"] / one["experts"] < 0.6
    alone, four = model("v4_flash", 1).step(32, 1, 8192), model("v4_flash", 4, dp_attention=True).step(128, 1, 8192)
    assert alone.stages["attention"] == four.stages["attention"]
    assert alone.microseconds == sum(alone.stages.values())
    assert not alone.collectives


@pytest.mark.parametrize("ranks", tiered([2, 8], [8]))
def test_v41_on_ranks(ranks):
    """Draft stages have fewer experts than blocks."""
    found, config = model("v41_flash", ranks), ModelConfig.from_preset("v41_flash")
    assert found.step(8, 1, 8192).stages["n-gram memory"] > 0
    stage = found._experts(config.mtp_layers[0], 10**6, 1).bytes["routed weights"]
    assert stage * 3 == found._experts(config.layers[0], 10**6, 1).bytes["routed weights"]


def test_the_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(v4_config().to_dict()))
    limits = ["--model", str(file), "--max-model-len", "300", "--max-num-seqs", "3", "--gpu", "h200", "--ranks", "2"]
    assert main(["plan", *limits, "--layout", "dp", "--batch", "4", "--prefill", "96", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts, gpu = found["ranks"], found["gpu"]
    assert found["numerics"] == "serving"
    assert gpu["total"] == sum(gpu["parts"].values())
    assert gpu["parts"]["caches"] == found["caches"]
    assert gpu["parts"]["nccl"] > 0
    assert gpu["fits"]
    assert [(step["requests"], step["tokens"]) for step in facts["steps"]] == [(4, 1), (2, 96)]
    assert main(["plan", *limits]) == 0
    assert "2 x h200, layout tp" in capsys.readouterr().out
    assert main(["plan", *limits[:-1], "3"]) == 2
    assert "n_routed_experts = 8 is not a multiple of 3" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_need_a_gpu_by_name(device, capsys, monkeypatch):
    monkeypatch.setattr(plan_facts, "pick_device", lambda wanted: torch.device(device))
    assert main(["plan", "--ranks", "2"]) == 2
    assert "--gpu h100 or h200" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--ranks", "2", "--gpu", "a100"])
    assert f"choose from {', '.join(sorted(MACHINES))}" in capsys.readouterr().err.replace("'", "")


@EXHAUSTIVE
def test_a_gpu_holds_what_is_said_to_fit(capsys):
    """Sequences of 500 tokens; one percent more take more than there is."""
    limits = ["--model", "tiny", "--max-model-len", "500", "--max-num-batched-tokens", "65", "--gpu", "h200"]

    def plan(*more):
        assert main(["plan", *limits, "--batch", "1", *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    count = plan("--memory", "880MB")["sequences_that_fit"]
    assert plan("--max-num-seqs", str(count))["gpu"]["total"] <= 880_000_000
    assert plan("--max-num-seqs", str(count + count // 100 + 1))["gpu"]["total"] > 880_000_000
    assert plan("--memory", "500MB")["sequences_that_fit"] == 0  # less than CUDA's context


@pytest.mark.parametrize("family", tiered(["v4", "v32", "v41"], ["v32"]))
def test_every_family_has_a_plan(family, tmp_path, capsys):
    model = {"v4": "tiny", "v32": "tiny_v32", "v41": str(tmp_path / "config.json")}[family]
    (tmp_path / "config.json").write_text(json.dumps(tiny_for_kernels().to_dict()))
    limits = ["--max-model-len", "100", "--max-num-seqs", "2", "--max-num-batched-tokens", "9", "--gpu", "h200"]
    assert main(["plan", "--model", model, *limits, "--speculate", "2", "--batch", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["parts"]["step"] > 0


@pytest.mark.parametrize(
    ("model", "drafts", "message"),
    [("tiny", "99", "--speculate 99"), ("tiny_v41", "6", "dspark_block_size 5 is the most"), ("tiny_v41", "0", "FP8")],
)
def test_plans_that_are_refused(model, drafts, message, capsys):
    assert main(["plan", "--model", model, "--gpu", "h200", "--speculate", drafts]) == 2
    assert message in capsys.readouterr().err
