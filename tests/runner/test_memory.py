"""The memory of a runner, counted without it: against what was measured, real runners, and all layers one by one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

import triton

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner import ModelRunner, memory
from deepseek_attn.runner.compile_ahead import RunnerSizes
from deepseek_attn.runner.memory import RunnerMemory
from deepseek_attn.runner.planner import make_plan
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.allocations import AllocationTrace
from tests.layers.parallel.cases import v4_config
from tests.support.tiers import EXHAUSTIVE

H200 = GPU((9, 0), 132)
DATA = Path(__file__).parents[2] / "docs" / "data"
TINY = {"max_model_len": 300, "max_num_seqs": 3, "max_num_batched_tokens": 50}


def memory_of(config: AnyConfig, limits: tuple[int, int, int], numerics: str = "serving", **facts) -> RunnerMemory:
    chosen, dtype = numerics_for(config, numerics), torch.bfloat16
    return RunnerMemory.of(
        config,
        make_layout(config, chosen, dtype, *limits, 16),
        numerics=chosen,
        dtype=dtype,
        attention=AttentionOptions(),
        sizes=RunnerSizes(*limits, 16),
        gpu=H200,
        **facts,
    )


def test_graphs_nearly_as_an_h200_captured_them():
    """`DecodeGraphs.nbytes` after a warm-up, on 2026-11-22, with layers that held their projections for 2 MB more."""
    config = ModelConfig.from_preset("v4_flash").replace(
        num_hidden_layers=6, n_routed_experts=32, num_nextn_predict_layers=0
    )
    assert memory_of(config, (16384, 8, 2048)).graphs == pytest.approx(31_468_980 - 2_097_152, rel=0.01)


@EXHAUSTIVE
def test_a_loaded_rank_as_an_h200_had_it():
    """What PyTorch's allocator had given out on each of two H200s, before any step."""
    rows = json.loads((DATA / "h200_ranks.json").read_text())["rows"]
    loaded = next(row for row in rows if row["step"] == "load")
    found = memory_of(ModelConfig.from_preset("v4_flash"), (8192, 256, 8192), parallel=Parallel(0, 2))
    predicted = found.weights + found.caches + found.buffers + found.cublas
    assert predicted == pytest.approx(loaded["weights_and_caches_gb"] * 1e9, rel=0.001)


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
def test_a_step_is_counted_as_the_allocator_counts_it(preset):
    options = {"numerics": "serving", "dtype": "bfloat16", "device": "cpu"}
    with ModelRunner.from_config(preset, **options, **TINY) as runner, runner.op_settings(), torch.inference_mode():
        warm_up, rows = WarmUp(runner), [(1, 9), (1, 300), (48, 48)]
        warm_up.prefill(rows)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            warm_up.prefill(rows)
        with AllocationTrace(runner.device, block=1) as trace:
            warm_up.prefill(rows)
            before = trace.nbytes
            trace.reset_peak()
            warm_up.prefill(rows)
    living = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            living += event.nbytes()
            peak = max(peak, living)
    assert trace.peak - before == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
def test_what_a_runner_holds(preset):
    """Weights, caches and buffers of a real runner, each storage rounded up to 512 bytes."""
    with AllocationTrace(torch.device("cpu")) as trace:
        runner = ModelRunner.from_config(preset, numerics="serving", dtype="bfloat16", device="cpu", **TINY)
    owners = memory._owners(trace, runner.model, {trace.key(pool.tensor) for pool in runner.pools})
    weights = sum(size for key, size in trace.living.items() if key in owners)
    found = memory_of(ModelConfig.from_preset(preset), tuple(TINY.values()))
    assert found.caches == runner.pools.nbytes()
    assert found.weights == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(("preset", "drafts"), [("tiny", 2), ("tiny_v32", 0)])
def test_one_layer_of_each_kind_is_enough(preset, drafts, monkeypatch):
    config = ModelConfig.from_preset(preset)
    found = memory_of(config, (70, 3, 33), num_drafts=drafts)
    monkeypatch.setattr(memory, "layers_by_kind", lambda layers, headers: [[layer] for layer in layers])
    monkeypatch.setattr("deepseek_attn.runner.compile_ahead.distinct_layers", lambda layers, headers: tuple(layers))
    whole = memory_of(config, (70, 3, 33), num_drafts=drafts)
    assert (found.weights, found.caches, found.buffers) == (whole.weights, whole.caches, whole.buffers)
    assert found.step == pytest.approx(whole.step, rel=0.05)  # the caches of metadata of more layers
    assert found.graphs == whole.graphs


def test_parts_add_up_and_nothing_is_left_behind():
    run = triton.runtime.jit.JITFunction.run
    for limits in ((1, 1, 1), (65, 1, 129), (4096, 17, 3)):
        found = memory_of(ModelConfig.from_preset("tiny"), limits)
        assert found.total == sum(found.parts().values())
        assert min(found.parts().values()) >= 0
        assert min(found.weights, found.caches, found.step, found.graphs) > 0
    assert triton.runtime.jit.JITFunction.run is run


def test_ranks_share_weights_and_steps():
    config = v4_config()
    one, two, dp = (
        memory_of(config, (128, 3, 64), parallel=ranks) for ranks in (Parallel(), Parallel(0, 2), Parallel(0, 2, True))
    )
    assert max(two.weights, dp.weights) < one.weights
    assert two.caches == one.caches
    assert dp.graphs == 0  # its steps are eager


def test_what_no_stand_in_runs_is_said():
    config = ModelConfig.from_preset("tiny_v41")
    assert not memory.has_stand_in(config)
    plan = make_plan(config, numerics_for(config, "serving"), torch.bfloat16, 128, 3, 64)
    found = RunnerMemory.without_steps(plan, 1000)
    assert found.left_out == ("what steps allocate",)
    assert found.total == 1000 + plan.total - plan.index_logits


@pytest.mark.parametrize("limits", [(5, 4, 100), (300, 2, 9), (1, 1, 1)])
def test_no_step_of_a_warm_up_is_longer_than_sequences_may_be(limits):
    config = ModelConfig.from_preset("tiny")
    layout = make_layout(config, numerics_for(config, "serving"), torch.bfloat16, *limits, 16)
    steps = WarmUp(SimpleNamespace(layout=layout)).prefill_sizes()
    assert all(new <= length <= limits[0] for rows in steps for new, length in rows)
    assert all(sum(new for new, _ in rows) <= limits[2] for rows in steps)
