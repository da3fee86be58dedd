"""The mixed workload of `workload`, small: the real model, each way of running it, against each request alone."""

from __future__ import annotations

from functools import lru_cache

import pytest

from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.model_runner import ModelRunner
from tests.engine.test_speculation import config_of
from tests.engine.workload import PREEMPTED, alone, differences, leaked, make_jobs, together, use_buckets, variants
from tests.support.tiers import EXHAUSTIVE

LONGEST = 320


@lru_cache(maxsize=2)
def workload(preset: str, greedy: float = 0.8):
    config = config_of(preset)
    runner = ModelRunner.from_config(config, device="cpu", numerics="exact", max_num_seqs=1, max_model_len=LONGEST + 64)
    jobs = make_jobs(12, LONGEST, config.vocab_size, 9, greedy)  # in which prompts share blocks
    return config, jobs, alone(runner, jobs)


# test_speculation has the others, and everything has all of them
CASES = [("tiny", variant) for variant in ("batched", "pressure", "everything")]
CASES += [(preset, "everything") for preset in ("tiny_v32", "tiny_v41")]


@EXHAUSTIVE  # test_soak has a short workload, test_speculation one with drafts
@pytest.mark.parametrize(("preset", "variant"), CASES)
def test_every_request_is_what_it_is_alone(preset, variant):
    config, jobs, expected = workload(preset)
    options = variants(config, LONGEST)[variant]
    engine = Engine(ModelRunner.from_config(config, device="cpu", numerics="exact", **options))
    requests = together(engine, jobs, preempt=variant in PREEMPTED)
    assert differences(requests, jobs, expected) == []
    if "max_snapshots" in options:
        assert engine.stats.hit_rate > 0.03
    if variant in PREEMPTED:
        assert engine.stats.preempted > 3
    assert engine.stats.finished["abort"] > 3
    assert leaked(engine) == {}


@EXHAUSTIVE  # test_speculation and test_ahead have steps over persistent tensors of fewer requests
@pytest.mark.parametrize(("preset", "drafts"), [("tiny", 0), ("tiny", 2), ("tiny_v41", 0), ("tiny_v41", 2)])
def test_greedy_requests_over_persistent_tensors(preset, drafts):
    """Decode steps of few sizes that choose the tokens themselves and are launched early, or verify drafts."""
    config, jobs, expected = workload(preset, greedy=1)
    runner = ModelRunner.from_config(config, device="cpu", numerics="exact", **variants(config, LONGEST)["everything"])
    use_buckets(runner)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    requests = together(engine, jobs, preempt=True)
    assert differences(requests, jobs, expected) == []
    assert engine.stats.finished["abort"] > 3
    assert leaked(engine) == {}
