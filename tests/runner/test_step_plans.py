"""The kernels of a model's steps with their reasons, without a GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from deepseek_attn.checkpoint import CanonicalSource, RandomSource
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.cli import main
from deepseek_attn.cli.plan_table import WIDTH
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.config.trailing import trailing_parts
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import Choice
from deepseek_attn.runner.ahead.recording import recorded_launches
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.step_plans import HEAD, INPUTS, LIBRARIES, brief, derived_fields, step_plans
from deepseek_attn.runner.warm_up import WarmUp
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.v41_cases import FOUR_LAYERS, tiny_for_kernels

MODELS = {
    "tiny": {}, "tiny_v32": {}, "v4_flash": {"num_hidden_layers": 4, "n_routed_experts": 32},
    "v41_flash": FOUR_LAYERS | {"engram_num_embeddings": [384006168], "n_routed_experts": 32},
}  # fmt: skip


def facts_of(config):
    return {
        "numerics": numerics_for(config, "serving"),
        "dtype": torch.bfloat16,
        "attention": AttentionOptions(),
        "gpu": GPU((9, 0), 132),
    }


def headers_of(model):
    """The config of a model with fewer layers and experts, and the headers of its checkpoint."""
    config = ModelConfig.from_preset(model).replace(**MODELS[model])
    return config, CanonicalSource(RandomSource(config), canonical_names(config)).entries()


def plans_of(model, batches, context, prefills=()):
    config, headers = headers_of(model)
    return step_plans(config, headers, batches, context, prefills, **facts_of(config))


@pytest.mark.parametrize("model", tiered(MODELS, ["tiny", "tiny_v32"]))
def test_every_kernel_that_a_step_launches_is_listed(model):
    """In each step by itself, and no other kernel."""
    config, headers = headers_of(model)
    found = plans_of(model, [1, 33], 300, [65])
    sizes = RunnerSizes(300, 33, 256, 16)
    request = RunnerRequest.of(config, headers, sizes=sizes, **facts_of(config))
    with recorded_launches(request.gpu) as launches:
        runner = MetaRunner.build(request)
        warm_up = WarmUp(runner)
        once = {"split_float32_weight_kernel", "latent_dequantize_kernel"}  # per weight
        assert [step.split()[0] for step in found.steps] == ["decode", "decode", "prefill"]
        for step in found.steps:
            launches.latest.clear()
            kind, size = step.split()
            with runner.op_settings(), torch.inference_mode():
                if kind == "prefill":
                    warm_up.prefill([(int(size), int(size))])
                elif runner.graphs is None:
                    warm_up.prefill([(1, 300)] * int(size))
                else:
                    warm_up.decode(StepSize(int(size), 1, 300))
            launched = {variant.name for variant in launches.latest} - once
            listed = {line.kernel for (_, line), steps in found.counts.items() if steps[step]}
            assert launched
            assert listed - set(LIBRARIES) - once == launched


@exhaustive_on_cpu
def test_upper_layers_of_v41_compute_trailing_rows():
    """Kernels of a prompt are those of the rows that results at its end need, counted over all layers."""
    config = tiny_for_kernels()
    headers = CanonicalSource(RandomSource(config), canonical_names(config)).entries()
    found = step_plans(config, headers, [1], 300, [300], **facts_of(config))
    assert found.trailing == trailing_parts(config.layers, config.sliding_window)
    products: dict[str, set[tuple[str, str]]] = {}
    for (part, line), steps in found.counts.items():
        if line.op == "moe.experts" and steps["prefill 300"]:
            products.setdefault(part, set()).add((line.kernel, line.config))
    assert products[found.layers[0]] != products[found.layers[-1]]
    assert not step_plans(config, headers, [1], 300, **facts_of(config)).trailing


def test_parts_of_a_step():
    found = plans_of("tiny_v32", [2], 40)
    assert found.layers
    assert {part for part, _ in found.counts} == {INPUTS, *found.layers, HEAD}
    assert ("block_kernel" in {line.kernel for part, line in found.counts if part == HEAD}) or any(
        line.op.startswith("sampling") for part, line in found.counts if part == HEAD
    )
    norms = {part for part, line in found.counts if line.op == "norm.rms_norm"}
    assert norms >= set(found.layers)
    groups = found.groups()
    assert sum(len(rows) for rows in groups.values()) < len(found.counts)  # parts share lines
    grouped = {(part, line) for parts, rows in groups.items() for line, _ in rows for part in parts}
    assert grouped == set(found.counts)


@dataclass(frozen=True)
class SplitPlan:
    products: tuple[Choice, ...]
    splits: int


class Nested(NamedTuple):
    rows: int
    swizzle: bool


def test_fields_are_written_briefly():
    choice = Choice("rms_norm_kernel", Nested(4, True), "any", "not measured")
    assert brief(choice.config) == "rows=4 swizzle"
    assert (
        brief({"tiles": Nested(4, True), "few": False, "splits": 3, "none": None}) == "tiles=(rows=4 swizzle) splits=3"
    )
    assert brief(None) == ""
    assert derived_fields(SplitPlan((choice,), 3)) == {"splits": 3}
    assert derived_fields(choice) == {}


def test_a_page_of_a_model(capsys):
    command = ["info", "--plans", "tiny_v32", "--gpu", "h100", "--batch", "1,32", "--context", "64", "--prefill", "9"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["capability"], facts["multiprocessors"], facts["context"]) == ([9, 0], 132, 64)
    kinds = Counter(bool(row["op"]) for row in facts["kernels"])
    assert kinds[True]
    assert {step for row in facts["kernels"] for step in row["steps"]} == {"decode 1", "decode 32", "prefill 9"}
    planned = [row for row in facts["kernels"] if row["op"]]
    assert all(row["condition"] and row["source"] and row["kernel"] for row in planned)
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    for row in facts["kernels"]:
        assert any(row["kernel"] in line and row["op"] in line for line in lines)
    assert any("because any; source: not measured" in line for line in lines)
    assert re.fullmatch(r"\d+ of [1-9]\d* choices are measured; .*", lines[-1])


def test_gpus_differ(capsys):
    kernels = {}
    for gpu in ("h100", "a100", "8.0:108"):
        assert main(["info", "--plans", "tiny", "--gpu", gpu, "--batch", "32", "--json"]) == 0
        kernels[gpu] = json.loads(capsys.readouterr().out)["kernels"]
    assert kernels["a100"] == kernels["8.0:108"]
    assert any("hopper" in row["kernel"] for row in kernels["h100"])
    assert not any("hopper" in row["kernel"] for row in kernels["a100"])


def test_without_a_gpu_one_must_be_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info", "--plans", "tiny"]) == 2
    assert "there is no GPU here: name one with --gpu a100, l40s, h100" in capsys.readouterr().err
