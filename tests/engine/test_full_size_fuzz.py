"""Long prompts, many requests and drafts on the real models: every text is that of the request alone, without drafts.

Requests arrive over the run, share prefixes and are cancelled on the way. Chunks are small, the pools hold little more
than one of eight sequences at its longest, and now and then a request loses its caches.

On a CPU small models in float32, where texts are equal. On a GPU (``DEEPSEEK_ATTN_TEST_DEVICE=cuda``) models whose
layers have the published sizes, decoding in CUDA graphs. Where float32 texts part there, their tokens must be as
likely as the best ones within rounding; the default numerics may choose another token where two are close.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch

from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.runner.model_runner import ModelRunner
from tests.engine.workload import (
    Job,
    alone,
    cache_bytes,
    differences,
    leaked,
    make_jobs,
    together,
    use_buckets,
    worse_tokens,
)
from tests.support.predictable import PredictableSource
from tests.support.small_models import two_layers
from tests.support.tiers import EXHAUSTIVE, tiered
from tests.support.typed import required

SEQS, SNAPSHOTS, DRAFTS = 8, 12, (0, 1, 2, 3)


class Size(NamedTuple):
    """What runs on a kind of device."""

    configs: dict[str, AnyConfig]
    requests: int
    longest: int
    chunk: int
    greedy: float


def small() -> Size:
    """For a CPU."""
    configs = {"v4": two_layers(), "v32": ModelConfig.from_preset("tiny_v32").replace(num_hidden_layers=3)}
    return Size(configs, requests=16, longest=1200, chunk=200, greedy=0.8)


def large() -> Size:
    """For a GPU: heads, records and top-k of the published models; few layers and experts."""
    v32 = ModelConfig.from_preset("v32").replace(
        vocab_size=2048, hidden_size=1024, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=3,
        first_k_dense_replace=1, num_attention_heads=16, n_routed_experts=32, index_topk=512,
    )  # fmt: skip
    configs = {"v4": ModelConfig.from_preset("tiny_gpu"), "v32": v32}
    return Size(configs, requests=32, longest=3500, chunk=512, greedy=1.0)


def size_of(device: torch.device) -> Size:
    return large() if device.type == "cuda" else small()


def options(size: Size, numerics: str) -> dict:
    dtype = torch.float32 if numerics == "exact" else torch.bfloat16
    return {"dtype": dtype, "numerics": numerics, "max_model_len": size.longest + 64, "progress": False}


@lru_cache(maxsize=1)
def workload(device: torch.device, family: str, numerics: str) -> tuple[ModelRunner, list[Job], list[list[int]]]:
    """A runner for single requests, the requests, and the tokens of each."""
    size = size_of(device)
    config = size.configs[family]
    runner = ModelRunner.from_source(
        config, PredictableSource(config), device=device, max_num_seqs=1, **options(size, numerics)
    )
    jobs = make_jobs(size.requests, size.longest, config.vocab_size, seed=3, greedy=size.greedy)
    jobs = [
        replace(
            job, arrival=job.arrival // 2, params=replace(job.params, max_tokens=3 * required(job.params.max_tokens))
        )
        for job in jobs
    ]
    return runner, jobs, alone(runner, jobs)


CASES = [(f, n, drafts) for n in ("exact", "serving") for f in ("v4", "v32") for drafts in DRAFTS]
# On a CPU float32 shows all that there is, and three drafts take the paths of fewer. Steps without drafts are the other
# model's, and test_workload runs this one's with drafts.
ON_A_GPU = [case for case in CASES if case[1] == "serving" or case[2] in (1, 2) or case == ("v32", "exact", 0)]


@EXHAUSTIVE
@pytest.mark.parametrize(("family", "numerics", "drafts"), tiered(CASES, CASES, gpu=ON_A_GPU))
def test_every_text_is_that_of_the_request_alone(report, device, family, numerics, drafts):
    size = size_of(device)
    config = size.configs[family]
    single, jobs, expected = workload(device, family, numerics)
    chosen = options(size, numerics)
    sizes = {"max_num_seqs": SEQS, "max_num_batched_tokens": size.chunk, "max_snapshots": SNAPSHOTS}
    longest = chosen["max_model_len"]
    limit = cache_bytes(config, numerics, chosen["dtype"], longest * 5 // 4, sizes | {"max_model_len": longest})
    runner = ModelRunner.from_source(
        config, PredictableSource(config), device=device, kv_cache_bytes=limit, **sizes, **chosen
    )
    if device.type == "cpu" and drafts % 2 == 0 and isinstance(runner.model, DeepseekV4):
        use_buckets(runner)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    preempt_every(engine, 9)
    requests = together(engine, jobs)
    wrong = differences(requests, jobs, expected)
    if device.type == "cpu":
        assert wrong == []
    else:
        rest = [requests[index] for index in wrong]
        allowed = {"exact": (1e-3, 0.0), "serving": (0.1, 0.02)}[numerics]
        generated = sum(len(request.completion().token_ids) for request in requests)
        found = worse_tokens(single, rest, allowed[0]) / max(1, generated)
        name = f"{family}, {drafts} drafts: {len(wrong)} of {len(jobs)} texts differ; tokens worse by {allowed[0]:g}"
        report.add(f"fuzz {numerics}", name, found, allowed[1])
        assert not report.failed
    assert leaked(engine) == {}
    stats = engine.stats
    assert stats.preempted > 3
    assert stats.cached_tokens > 0
    assert stats.finished["abort"] > 3
    assert not drafts or 0.1 < stats.acceptance_rate < 0.95


def preempt_every(engine: Engine, steps: int) -> None:
    """From now on, a running request loses its caches after every ``steps`` steps."""
    step, rng, count = engine.step, random.Random(steps), itertools.count(1)

    def then_preempt():
        outputs = step()
        if next(count) % steps == 0 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
            engine.stats.preempted += 1
        return outputs

    engine.step = then_preempt
