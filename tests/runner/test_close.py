"""Closing a model frees what it holds, even where sequences and engines are still referenced; and short reprs."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator

import pytest
import torch

from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.graphs import DecodeGraphs
from tests.support import v32_cases, v41_cases
from tests.support.requests import greedy
from tests.support.small_models import small_config, small_runner
from tests.support.typed import required, untyped

CLOSED = "this model was closed, and its weights and caches are freed"


def runner_with_all():
    runner = small_runner(small_config([0, 4], mtp=1), max_snapshots=2, max_model_len=200, max_num_seqs=2)
    runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, torch.device("cpu"), capture=False)
    return runner


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Objects are freed with their last user or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_of(runner) -> list[weakref.ref]:
    """Everything large that a runner holds."""
    held = [*runner.model.parameters(), *(pool.tensor for pool in runner.pools), runner.workspace, runner.graphs]
    return [weakref.ref(thing) for thing in held if thing is not None]


FAMILIES = {
    "v4": (runner_with_all, {}),
    "v32": (lambda **options: v32_cases.make_runner(v32_cases.small(), **options), {}),
    "v41": (lambda **options: v41_cases.make_runner(v41_cases.shallow(), **options), {}),
    "experts in files": (lambda **options: small_runner(small_config([0, 4]), **options), {"expert_memory": "disk"}),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_a_model_is_freed_with_its_last_user(case, no_collections):
    """The next one may need the memory before Python looks for cycles."""
    make, options = FAMILIES[case]
    runner = make(**options)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 1) if runner.has_mtp else None)
    engine.add_request([5] * 70, SamplingParams(n=2, max_tokens=4, temperature=1, seed=0))
    for _ in range(3):
        engine.step()
    next(engine.run([Request.create(runner, None, [6] * 9, greedy(4))]))  # and is left
    [logits], [records] = runner.score_records([[7] * 30], runner.record_options(routes=True, selections=True))
    assert torch.equal(logits, runner.score([[7] * 30], replay=[records])[0])
    held = [weakref.ref(runner), *memory_of(runner)]
    assert len(held) > 20
    del engine, runner
    assert [ref() for ref in held if ref() is not None] == []


def test_weights_and_caches_are_freed(no_collections):
    """Though a sequence, an engine and a request that has not ended are held."""
    runner = runner_with_all()
    engine = Engine(runner, decoder=MTPSpeculation(runner, 1))
    sequence, request = runner.sequence([1, 2, 3]), engine.add_request([5] * 70, greedy(4))
    runner.step([(sequence, 2)])
    for _ in range(3):
        engine.step()
    assert not request.finished
    held = memory_of(runner)
    runner.close()
    assert [ref() for ref in held if ref() is not None] == []
    with pytest.raises(RuntimeError, match=CLOSED):
        engine.step()
    with pytest.raises(RuntimeError, match=CLOSED):
        sequence.save("nowhere")
    sequence.free()
    assert engine.cancel(request)


def test_a_closed_model_says_so():
    with runner_with_all() as runner:
        sequence = runner.sequence([1, 2, 3])
        assert not runner.closed
    assert runner.closed
    runner.close()
    for use in (
        lambda: runner.score([[1, 2]]),
        lambda: runner.sequence([1]),
        lambda: runner.step([(sequence, 1)]),
        lambda: runner.fingerprint(),
        lambda: runner.expect_drafts(1),
        lambda: runner.backbone_layers,
        lambda: runner.step_metadata([sequence.cache], [1]),
        lambda: Engine(runner).add_request([1]),
    ):
        with pytest.raises(RuntimeError, match=CLOSED):
            use()
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = untyped(runner).modle


def test_a_model_is_closed_after_an_error():
    with pytest.raises(KeyError), runner_with_all() as runner:
        raise KeyError
    assert runner.closed


def test_reprs_are_one_line():
    runner = runner_with_all()
    facts = "deepseek_v4, 2 of 2 layers, 1 MTP, float32, exact numerics, cpu"
    assert re.fullmatch(rf"ModelRunner\({facts}, [\d.]+ MB of weights, [\d.]+ MB of caches\)", repr(runner))
    loaded = re.fullmatch(
        r"LoadReport\((\d+) tensors, [\d.]+ MB, ignored: none, mtp_loaded=True\)", repr(runner.report)
    )
    assert int(required(loaded)[1]) == len(runner.report.loaded)
    part = small_runner(runner.config, layers=[1], attention_only=True)
    assert "1 of 2 layers, attention only, no MTP, float32" in repr(part)
    assert re.search(r"ignored: \d+ attention only, \d+ layers not requested,", repr(part.report))
    runner.close()
    assert repr(runner) == "ModelRunner(deepseek_v4, closed)"
