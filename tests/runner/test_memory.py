"""The memory of a runner, counted without it: against what was measured, real runners, and all layers one by one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from tests.support.tiers import tiered

pytest.importorskip("triton")

import triton
from triton.runtime._async_compile import active_mode

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.representatives import representatives
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner import ModelRunner, memory
from deepseek_attn.runner.ahead import request
from deepseek_attn.runner.memory import RunnerMemory
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.allocations import AllocationTrace
from tests.layers.parallel.cases import v4_config
from tests.support.small_models import two_layers
from tests.support.tiers import EXHAUSTIVE
from tests.support.typed import required, untyped
from tests.support.v41_cases import FOUR_LAYERS, tiny_for_kernels, with_repeated_layers

H200 = GPU((9, 0), 132)
DATA = Path(__file__).parents[2] / "docs" / "data"
TINY: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 3, "max_num_batched_tokens": 50}
SERVED: dict[str, Any] = {"numerics": "serving", "dtype": "bfloat16", "device": "cpu"}
FAMILIES = tiered(["tiny", "tiny_v32", "tiny_v41"], ["tiny_v32"])


def small_config(preset: str) -> AnyConfig:
    if preset == "tiny_v41":
        return tiny_for_kernels()
    return two_layers() if preset == "tiny" else ModelConfig.from_preset(preset).replace(num_hidden_layers=2)


def memory_of(config: AnyConfig, limits: tuple[int, int, int], numerics: str = "serving", **facts) -> RunnerMemory:
    chosen, dtype = numerics_for(config, numerics), torch.bfloat16
    return RunnerMemory.of(
        config,
        make_layout(config, chosen, dtype, *limits, 16),
        numerics=chosen,
        dtype=dtype,
        attention=AttentionOptions(),
        gpu=H200,
        **facts,
    )


@pytest.mark.exhaustive
def test_graphs_nearly_as_an_h200_captured_them():
    """`DecodeGraphs.nbytes` after a warm-up, on 2026-11-22, with layers that held their projections for 2 MB more."""
    config = ModelConfig.from_preset("v4_flash").replace(
        num_hidden_layers=6, n_routed_experts=32, num_nextn_predict_layers=0
    )
    assert memory_of(config, (16384, 8, 2048)).graphs == pytest.approx(31_468_980 - 2_097_152, rel=0.01)


@EXHAUSTIVE
def test_a_loaded_rank_as_an_h200_had_it():
    """What PyTorch's allocator had given out on each of two H200s, before any step, with routers in float32."""
    runs = json.loads((DATA / "h200_ranks.json").read_text())["runs"]
    rows = next(run["rows"] for run in runs if "--batch 1,8,32,128,256" in run["command"])  # the limits below are its
    loaded = next(row for row in rows if row["step"] == "load" and row["layout"] == "tp")
    config = ModelConfig.from_preset("v4_flash")
    found = memory_of(config, (8192, 256, 8192), parallel=Parallel(0, 2))
    routers = config.num_hidden_layers * config.n_routed_experts * config.hidden_size * 2
    predicted = found.weights + found.caches + found.buffers + found.cublas + routers
    assert predicted == pytest.approx(loaded["weights_and_caches_gb"] * 1e9, rel=0.001)


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_step_is_counted_as_the_allocator_counts_it(preset):
    with (
        ModelRunner.from_config(small_config(preset), **SERVED, **TINY) as runner,
        runner.op_settings(),
        torch.inference_mode(),
    ):
        warm_up, rows = WarmUp(runner, 2 * runner.has_mtp), [(1, 9), (1, 300), (48, 48)]
        warm_up.prefill(rows)
        with profile(profile_memory=True) as profiled:
            warm_up.prefill(rows)
        with AllocationTrace(runner.device, block=1) as trace:
            warm_up.prefill(rows)
            before = trace.nbytes
            trace.reset_peak()
            warm_up.prefill(rows)
    living = peak = 0
    for event in required(required(profiled).kineto_results).events():
        if event.name() == "[memory]":
            living += untyped(event).nbytes()
            peak = max(peak, living)
    assert trace.peak - before == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("preset", FAMILIES)
def test_what_a_runner_holds(preset):
    """Weights, caches and buffers of a real runner, each storage rounded up to 512 bytes."""
    config = small_config(preset)
    with AllocationTrace(torch.device("cpu")) as trace:
        runner = ModelRunner.from_config(config, **SERVED, **TINY)
    owners = memory._owners(trace, runner.model, {trace.key(pool.tensor) for pool in runner.pools})
    weights = sum(size for key, size in trace.living.items() if key in owners)
    found = memory_of(config, (TINY["max_model_len"], TINY["max_num_seqs"], TINY["max_num_batched_tokens"]))
    assert found.caches == runner.pools.nbytes()
    assert found.weights == pytest.approx(weights, rel=0.01)


def test_layers_that_stand_for_all():
    """The first of each kind, with layers that these read, and layers whose streams a drafter reads."""
    config = with_repeated_layers()
    kept = representatives(config, {})
    assert kept == {0: 2, 2: 2, 3: 2, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1}
    reduced = dataclasses.replace(config, layers=tuple(layer for layer in config.layers if layer.index in kept))
    assert representatives(reduced, {}).keys() == kept.keys()
    assert representatives(ModelConfig.from_preset("v41_flash"), {}) == {
        **{0: 1, 1: 1, 2: 2, 3: 10, 14: 1, 15: 5, 20: 1, 21: 3, 24: 3, 25: 9, 36: 1, 37: 1, 38: 1, 39: 1}
    }  # fmt: skip
    without = config.replace(num_nextn_predict_layers=0)
    assert representatives(without, {}) == {0: 2, 2: 2, 3: 2, 6: 1, 7: 1, 8: 2, 9: 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "drafts"), [("tiny", 2), ("tiny_v32", 0), ("v41", 2)])
def test_one_layer_of_each_kind_is_enough(preset, drafts, monkeypatch):
    config = with_repeated_layers() if preset == "v41" else ModelConfig.from_preset(preset)
    found = memory_of(config, (70, 3, 33), num_drafts=drafts)
    for module in (memory, request):
        monkeypatch.setattr(
            module, "representatives", lambda config, headers: {layer.index: 1 for layer in config.layers}
        )
    whole = memory_of(config, (70, 3, 33), num_drafts=drafts)
    assert (found.weights, found.caches, found.buffers) == (whole.weights, whole.caches, whole.buffers)
    assert found.step == pytest.approx(whole.step, rel=0.05)  # the caches of metadata of more layers
    assert found.graphs == whole.graphs


def test_parts_add_up_and_nothing_is_left_behind():
    driver = triton.runtime.driver._active
    for limits in ((1, 1, 1), (65, 1, 129), (4096, 17, 3)):
        found = memory_of(two_layers(), limits)
        assert found.total == sum(found.parts().values())
        assert min(found.parts().values()) >= 0
        assert min(found.weights, found.caches, found.step, found.graphs) > 0
    assert triton.runtime.driver._active is driver
    assert active_mode.get() is None


@pytest.mark.exhaustive
def test_ranks_share_weights_and_steps():
    config = v4_config()
    one, two, dp = (
        memory_of(config, (128, 3, 64), parallel=ranks) for ranks in (Parallel(), Parallel(0, 2), Parallel(0, 2, True))
    )
    assert max(two.weights, dp.weights) < one.weights
    assert two.caches == one.caches
    assert min(two.graphs, dp.graphs) > 0


@pytest.mark.exhaustive
def test_a_drafter_is_counted():
    """Its weights, its windows, and blocks of all sequences, which are more tokens than a step has."""
    config, limits = tiny_for_kernels().replace(**FOUR_LAYERS, engram_num_embeddings=[660]), (20, 8, 8)
    none = memory_of(config.replace(num_nextn_predict_layers=0), limits)
    used = memory_of(config, limits, num_drafts=2)
    drafter = sum(info.nbytes for name, info in RandomSource(config).entries().items() if name.startswith("mtp."))
    assert used.weights - none.weights == pytest.approx(drafter, rel=0.2)
    assert used.caches > none.caches
    assert used.step > 2 * none.step


@pytest.mark.exhaustive
def test_steps_that_wait_for_the_device_are_not_counted():
    with pytest.raises(ValueError, match=r"plain torch.*cannot be run on tensors without memory"):
        memory_of(ModelConfig.from_preset("tiny_v41"), (70, 3, 33), numerics="exact")


@pytest.mark.parametrize("limits", [(5, 4, 100), (300, 2, 9), (1, 1, 1)])
def test_no_step_of_a_warm_up_is_longer_than_sequences_may_be(limits: tuple[int, int, int]):
    config = ModelConfig.from_preset("tiny")
    layout = make_layout(config, numerics_for(config, "serving"), torch.bfloat16, *limits, 16)
    warm_up = WarmUp(untyped(SimpleNamespace(layout=layout, decode_query_len=3)))
    steps = warm_up.prefill_sizes() + warm_up.mixed_sizes()
    assert warm_up.prefill_sizes()
    assert all(new <= length <= limits[0] for rows in steps for new, length in rows)
    assert all(sum(new for new, _ in rows) <= limits[2] for rows in steps)
