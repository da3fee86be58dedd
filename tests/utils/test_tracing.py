"""Ranges in a trace: all stages while a profile is taken, nothing otherwise, and a disabled stage costs little."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
import torch

from deepseek_attn import SamplingParams
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.tracing import profile, ranges, stage, traced
from tests.support.tiers import tiered

STEP = {"schedule", "model", "mtp", "sample", "metadata", "attention", "moe", "head"}
LAYER = {"project", "insert", "select", "attend", "output"}
STREAMS = {"hc_pre", "hc_post_pre", "hc_post", "hc_head"}


def ranges_of(path):
    """(name, start, end) of every range in a trace file."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "expected"),
    tiered([("tiny", STEP | LAYER | STREAMS), ("tiny_v32", STEP | LAYER)], [("tiny", STEP | LAYER | STREAMS)]),
)
def test_a_trace_has_every_stage(preset, expected, tmp_path):
    runner = ModelRunner.from_config(preset, device="cpu", numerics="exact", max_model_len=64, max_num_seqs=1)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 2))
    engine.add_request(range(1, 20), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    with profile(tmp_path / "trace.json"):
        while engine.has_unfinished:
            engine.step()
    found = ranges_of(tmp_path / "trace.json")
    counts = Counter(name for name, _, _ in found)
    assert expected <= set(counts)
    assert counts["model"] == engine.stats.steps
    attention = [(start, end) for name, start, end in found if name == "attention"]
    assert len(attention) == counts["output"] >= engine.stats.steps * len(runner.backbone_layers)
    for name, start, end in found:
        if name in LAYER:
            assert any(first <= start and end <= last for first, last in attention)


def test_nothing_is_recorded_unless_switched_on():
    calls = []
    double = traced("double")(lambda x: calls.append(x) or 2 * x)
    with torch.profiler.profile(acc_events=True) as profiler:
        with stage("off"):
            assert double(2) == 4
        with ranges(), stage("on"):
            assert double(x=3) == 6
        with stage("off"):
            pass
    names = {event.key for event in profiler.key_averages()}
    assert {"on", "double"} <= names
    assert "off" not in names
    assert calls == [2, 3]


def test_ranges_end_with_an_error():
    with pytest.raises(KeyError), ranges(), stage("broken"):
        raise KeyError
    assert stage("next") is stage("one more")


def test_a_disabled_stage_makes_nothing():
    """One object for all stages, without a range of the profiler: what a step pays for its stages is a call."""
    assert stage("off") is stage("another")
    assert not isinstance(stage("off"), torch.profiler.record_function)
    with torch.profiler.profile(acc_events=True) as profiler:
        assert traced("off")(abs)(-3) == 3
    assert "off" not in [event.key for event in profiler.key_averages()]


def test_a_trace_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(ValueError, match="no trace can be written"), profile(path):
            raise AssertionError("nothing may run")


def test_the_trace_of_an_interrupted_block_is_written(tmp_path):
    def interrupted():
        with profile(tmp_path / "trace.json"), stage("model"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [name for name, _, _ in ranges_of(tmp_path / "trace.json")] == ["model"]


def test_a_compressed_trace(tmp_path):
    with profile(tmp_path / "trace.json.gz"), stage("model"):
        pass
    assert b"traceEvents" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
