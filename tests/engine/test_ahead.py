"""Asynchronous scheduling: decode steps launched before the tokens of the step before are read; the same tokens."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.engine.decoding import NextToken
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.graph_steps import CapturedStep, DecodeStep, DraftStep, StepSize
from deepseek_attn.runner.graphs import DecodeGraphs
from tests.support.requests import finish, greedy, prompt
from tests.support.small_models import two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

OPTIONS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 5, "max_num_batched_tokens": 256}


class Waiting(NextToken):
    """Launches no step before the tokens of the one before it have been read."""

    def next_step(self, work, runner) -> list:
        return []


@pytest.fixture(scope="module")
def machine():
    """Where the tests run, and a runner there with persistent tensors: captured as CUDA graphs on a GPU."""
    device = torch.device(os.environ.get("DEEPSEEK_ATTN_TEST_DEVICE", "cpu"))
    config = two_layers() if device.type == "cpu" else "tiny_gpu"
    return ModelRunner.from_config(
        config, device=device, numerics="exact", dtype="float32", cuda_graphs=False, max_snapshots=4, **OPTIONS
    )


@pytest.fixture
def runner(machine, monkeypatch):
    """Every page is back when a test is over."""
    before = machine.manager.available_pages()
    graphs = DecodeGraphs(machine.model, machine.layout, machine.device, batches=[2, 5])
    monkeypatch.setattr(machine, "graphs", graphs)
    monkeypatch.setattr(machine, "prefixes", None)
    yield machine
    assert machine.manager.available_pages() == before


@pytest.fixture
def runs(monkeypatch):
    """Steps that were run, in order."""
    found, run = [], CapturedStep.run
    monkeypatch.setattr(CapturedStep, "run", lambda step: (found.append(step), run(step))[1])
    return found


def generate(runner, prompts, params, decoder=None) -> list[list[int]]:
    engine = Engine(runner, decoder=decoder)
    requests = [engine.add_request(p, q) for p, q in zip(prompts, params, strict=True)]
    finish(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.completion().token_ids for request in requests]


PROMPTS = [prompt(n, n) for n in (1, 62, 58, 127)]


def test_one_run_a_step_over_page_borders(runner, runs):
    lengths = [8, 5, 9, 8]  # 62 + 5 and 58 + 9 tokens go over the page of 64
    expected = generate(runner, PROMPTS, [greedy(n) for n in lengths], Waiting())
    waited = len(runs)
    assert generate(runner, PROMPTS, [greedy(n) for n in lengths]) == expected
    assert len(runs) - waited == waited  # a request that reaches max_tokens is not in the step launched early
    runner.graphs = None
    assert generate(runner, PROMPTS, [greedy(n) for n in lengths]) == expected


def test_the_next_step_is_launched_early(runner, runs):
    engine = Engine(runner)
    request = engine.add_request(PROMPTS[2], greedy(6))
    engine.step()
    assert not runner.next_step_launched
    for ran in (2, 3, 4, 5):
        engine.step()
        assert len(runs) == ran
        assert runner.next_step_launched == (len(request.completion().token_ids) < 6)
    engine.step()
    assert len(runs) == 5
    assert request.finished


@exhaustive_on_cpu
def test_a_request_that_stops_leaves_the_others(runner, runs):
    """At a stop token, which nobody knows before; the rows of the others count."""
    expected = generate(runner, PROMPTS, [greedy(16)] * 4)
    stop = next(token for i, token in enumerate(expected[1]) if i > 5 and token not in expected[1][:i])
    end = expected[1].index(stop) + 1
    runs.clear()
    params = [greedy(16)] + [greedy(30, stop_token_ids=(stop,))] + [greedy(16)] * 2
    found = generate(runner, PROMPTS, params)
    assert found == [expected[0], expected[1][:end], *expected[2:]]
    assert len(runs) == 15


@exhaustive_on_cpu
def test_others_come_and_go(runner, runs):
    expected = generate(runner, PROMPTS, [greedy(16)] * 4)
    runs.clear()
    engine = Engine(runner)
    first = [engine.add_request(p, greedy(16)) for p in PROMPTS[:2]]
    for _ in range(5):
        engine.step()
    ran = len(runs)
    second = [engine.add_request(p, greedy(16)) for p in PROMPTS[2:]]
    engine.step()
    assert len(runs) == ran  # the step that was launched early is used
    assert engine.last_step.decodes == 2
    assert engine.last_step.prefills == 0
    engine.step()
    assert engine.last_step.prefills == 2
    for _ in range(4):
        engine.step()
    engine.cancel(first[0])
    finish(engine)
    found = [request.completion().token_ids for request in first + second]
    assert found[1:] == expected[1:]
    assert 5 < len(found[0]) < 16
    assert found[0] == expected[0][: len(found[0])]


def test_nobody_left(runner):
    """The only request is cancelled while a step of it is launched; the next one starts at once."""
    expected = generate(runner, PROMPTS[1:2], [greedy(9)])
    engine = Engine(runner)
    request = engine.add_request(PROMPTS[0], greedy(16))
    for _ in range(4):
        engine.step()
    assert runner.next_step_launched
    engine.cancel(request)
    request = engine.add_request(PROMPTS[1], greedy(9))
    engine.step()
    assert engine.last_step.prefills == 1
    finish(engine)
    assert [request.completion().token_ids] == expected


CHANGES = {
    "nothing": lambda sequence: sequence,
    "another token": lambda sequence: sequence.append((sequence.token_ids[-1] + 1) % 200),
    "truncate": lambda sequence: sequence.truncate(len(sequence.token_ids) - 3),
    "free": lambda sequence: sequence.free(),
    "fork": lambda sequence: sequence.fork(),
}


@pytest.mark.parametrize("change", tiered(CHANGES, list(CHANGES)[1:4:2]))
def test_what_has_changed_is_computed_again(runner, runs, change):
    """A sequence that is driven by hand, with another step than the one that was launched early."""
    sequence = runner.sequence(PROMPTS[3])
    logits = runner.step([(sequence, sequence.num_pending)]).rows[0]
    tokens = [[int(logits.argmax())]]
    for _ in range(5):
        sequence.append(tokens[0][-1])
        output = runner.step([(sequence, 1)], StepOptions(greedy=True, next_step=((sequence, 300),)))
        assert output.logits is None
        tokens = output.tokens()
    assert runner.next_step_launched
    runs.clear()
    fork = CHANGES[change](sequence)
    if not sequence.num_pending:
        sequence.append(tokens[0][-1])
    if sequence.num_pending > 1:
        runner.step([(sequence, sequence.num_pending - 1)])
    found = runner.step([(sequence, 1)], StepOptions(greedy=True)).tokens()
    assert len(runs) == (change != "nothing")
    text = sequence.token_ids
    assert found == [[int(runner.score([text])[0][-1].argmax())]]
    if change == "fork":
        fork.append(tokens[0][-1])
        assert runner.step([(fork, 1)], StepOptions(greedy=True)).tokens() == found
        fork.free()
    sequence.free()


def test_drawn_tokens_wait(runner, runs):
    """One request that samples: the host has to choose, so no step is launched early."""
    params = [greedy(9), SamplingParams(temperature=1, seed=3, max_tokens=9, ignore_eos=True)]
    found = generate(runner, PROMPTS[:2], params)
    assert len(runs) == 8
    runner.graphs = None
    assert generate(runner, PROMPTS[:2], params) == found


@exhaustive_on_cpu
def test_no_page_left(runner, runs, monkeypatch):
    """Room for each step, and never for the one after it."""
    expected = generate(runner, PROMPTS, [greedy(10)] * 4)
    launch = runner._launch_next_step

    def full(batch):
        raise OutOfPages("full")

    def tight(run, caches):
        with monkeypatch.context() as patch:
            patch.setattr(runner.manager, "reserve", full)
            launch(run, caches)
        assert not runner.next_step_launched

    monkeypatch.setattr(runner, "_launch_next_step", tight)
    assert generate(runner, PROMPTS, [greedy(10)] * 4) == expected
    assert len(runs) == 2 * 9


@pytest.mark.exhaustive
def test_snapshots_of_what_was_generated(runner, runs, monkeypatch):
    """No step is launched early before the prefix cache shares pages: it would have to copy them."""
    prompts = [prompt(n, n) for n in (1, 120, 40, 127)]
    params = [greedy(n) for n in (6, 12, 9, 8)]  # two fill a block of 128 tokens
    expected = generate(runner, prompts, params)
    ran = len(runs)
    monkeypatch.setattr(runner, "prefixes", PrefixCache(runner.manager))
    assert generate(runner, prompts, params) == expected
    assert len(runner.prefixes)
    assert len(runs) == 2 * ran
    runner.prefixes.clear()


def test_broken_logits_fail_alone(runner, monkeypatch):
    if runner.device.type != "cpu":
        pytest.skip("a captured step calls no Python")
    expected = generate(runner, PROMPTS, [greedy(10)] * 4)
    logits, calls = runner.model.logits, []

    def broken(streams):
        found = logits(streams)
        calls.append(len(found))
        if len(calls) == 8:
            found[2] = float("nan")
        return found

    monkeypatch.setattr(runner.model, "logits", broken)
    engine = Engine(runner)
    requests = [engine.add_request(p, greedy(10)) for p in PROMPTS]
    finish(engine)
    assert [r.finish_reason for r in requests] == ["length", "length", "error", "length"]
    assert "NaN" in required(requests[2].error)
    found = [r.completion().token_ids for r in requests]
    assert found[2] == expected[2][: len(found[2])]
    assert len(found[2]) == 7
    assert found[:2] + found[3:] == expected[:2] + expected[3:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_drafts", tiered([1, 3], [3]))
def test_drafts_over_persistent_tensors(runner, runs, num_drafts, monkeypatch):
    """The MTP layer's drafts, captured or not, are those of eager passes; the tokens are those without speculation."""
    expected, step, found = generate(runner, PROMPTS, [greedy(10)] * 4), runner.step, []

    def recorded(batch, options):
        found.append([sequence.token_ids[sequence.num_computed :][:n] for sequence, n in batch])
        return step(batch, options)

    monkeypatch.setattr(runner, "step", recorded)
    assert generate(runner, PROMPTS, [greedy(10)] * 4, MTPSpeculation(runner, num_drafts)) == expected
    assert {(type(step), step.size.num_drafts) for step in runs[-9:]} == {(DecodeStep, num_drafts)}
    persistent, found, runner.graphs = found, [], None
    runs.clear()
    assert generate(runner, PROMPTS, [greedy(10)] * 4, MTPSpeculation(runner, num_drafts)) == expected
    assert not runs
    assert found == persistent


def test_padded_rows_of_drafts_write_nothing(runner):
    size = StepSize(requests=3, rows_per_request=2, max_len=300, num_drafts=3)
    step = DraftStep(runner.model, runner.layout, runner.graphs.tables, size)
    before = [pool.tensor.clone() for pool in runner.pools]
    with torch.inference_mode():
        step.run()
    assert all(torch.equal(a, pool.tensor) for a, pool in zip(before, runner.pools, strict=True))
