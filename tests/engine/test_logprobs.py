"""Log-probabilities of requests: the same as those of the whole text's logits, however it was computed."""

from __future__ import annotations

import itertools
import random
from itertools import product

import numpy as np
import pytest
import torch

from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.request_logprobs import RequestLogprobs
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.graph_steps import CapturedStep
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.logprobs import MAX_TOP, TokenLogprobs, packed_logprobs
from tests.engine.fake_runner import NOT_FINITE, FakeRunner
from tests.engine.test_deterministic import prompts_of
from tests.support.drafts import DraftedSource
from tests.support.predictable import PredictableSource
from tests.support.requests import finish, greedy
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required
from tests.support.v32_cases import small
from tests.support.v41_cases import shallow

CONFIGS = {
    "v4": (lambda: small_config([4, 0], mtp=1), PredictableSource),
    "v32": (lambda: small(num_nextn_predict_layers=1), PredictableSource),
    "v41": (shallow, DraftedSource),
}
SAMPLED = {"seed": 3, "max_tokens": 9, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **SAMPLED),
    SamplingParams(temperature=0.7, logprobs=0, n=2, prompt_logprobs=0, **SAMPLED),
    SamplingParams(temperature=0, **SAMPLED),
    SamplingParams(temperature=0.4, top_k=3, repetition_penalty=1.3, logit_bias={5: 3.0}, logprobs=1, **SAMPLED),
]


def make_runner(family: str, **options) -> ModelRunner:
    make_config, source = CONFIGS[family]
    config = make_config()
    options = {"max_model_len": 640, "max_num_seqs": 10, "max_snapshots": 6} | options
    return small_runner(config, source(config, 0), **options)


@pytest.fixture(scope="module")
def deterministic() -> ModelRunner:
    return make_runner("v4", deterministic=True)


def expected_logprobs(logits: torch.Tensor, tokens: list[int], top: int) -> TokenLogprobs:
    """Of the tokens after the rows of logits, one each."""
    return TokenLogprobs.of(tokens, packed_logprobs(logits, torch.tensor(tokens), top).numpy(), top)


def assert_those_of_the_text(runner: ModelRunner, request: Request, tolerance: float = 0.0) -> None:
    """The log-probabilities of a request's completions are those of the logits of each text, computed alone."""
    for each in request.group:
        assert each.error is None
        found, params, start = each.completion(), each.params, each.prompt_length - 1
        tokens = found.prompt_token_ids + found.token_ids
        (logits,) = runner.score([tokens])
        for part, rows, top in (
            (found.prompt_logprobs, slice(0, start), params.prompt_logprobs),
            (found.logprobs, slice(start, len(tokens) - 1), params.logprobs),
        ):
            assert (part is None) == (top is None)
            if part is None:
                continue
            expected = expected_logprobs(logits[rows], tokens[1:][rows], required(top))
            if not tolerance:
                assert part == expected
            assert part.token_ids.tolist() == tokens[1:][rows]
            np.testing.assert_allclose(part.logprobs, expected.logprobs, atol=tolerance)
            np.testing.assert_allclose(part.top_logprobs, expected.top_logprobs, atol=tolerance)


def generate(
    runner: ModelRunner, drafts: int = 0, prefixes: bool = False, preempt: bool = False, params=PARAMS, graphs=False
) -> tuple[list[Request], Engine]:
    """Requests of all parameters, in steps of few tokens."""
    groups = [list(zip([*prompts_of(runner)[1:4], prompt(runner.config, 70)], params, strict=True))]
    if prefixes:
        shared = prompt(runner.config, runner.layout.snapshot_block + 3, seed=50)
        groups = [[(shared + [n], own)] for n, own in enumerate(params)]
    if graphs:
        runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[2, 5, 10],
            capture=False, engram=runner.tables)  # fmt: skip
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    engine.scheduler.max_num_batched_tokens = 50
    rng, steps, requests = random.Random(drafts), itertools.count(1), []
    for group in groups:
        requests += [engine.add_request(tokens, own, index=i) for i, (tokens, own) in enumerate(group)]
        while engine.has_unfinished:
            engine.step()
            if preempt and next(steps) % 4 == 0 and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
    required(engine.prefixes).clear()
    runner.decode_query_len, runner.graphs = 1, None
    return requests, engine


WAYS = {
    "chunks": {},
    "drafts": {"drafts": 2},
    "preempted": {"preempt": True},
    "everything": {"drafts": 1, "preempt": True, "prefixes": True},
}


@exhaustive_on_cpu
@pytest.mark.parametrize("way", tiered(WAYS, ["drafts"]))
def test_bits_do_not_depend_on_the_batch(deterministic, way):
    requests, engine = generate(deterministic, **WAYS[way])
    for request in requests:
        assert_those_of_the_text(deterministic, request)
    assert engine.stats.accepted or not WAYS[way].get("drafts")
    assert engine.stats.cached_tokens or way != "everything"


@pytest.mark.parametrize(("family", "drafts"), tiered(product(CONFIGS, [0, 2]), [("v4", 2)]))
def test_steps_over_persistent_tensors(family, drafts, monkeypatch):
    """Greedy requests, whose tokens the runner chooses. The next step is launched early, as without."""
    runner, runs, run = make_runner(family), [], CapturedStep.run
    monkeypatch.setattr(CapturedStep, "run", lambda step: (runs.append(step), run(step))[1])
    plain = [greedy(9)] * 4
    asked = [greedy(9, logprobs=2), greedy(9, prompt_logprobs=1), greedy(9), greedy(9, logprobs=0, prompt_logprobs=0)]
    expected, _ = generate(runner, drafts, params=plain, graphs=True)
    without = len(runs)
    requests, engine = generate(runner, drafts, params=asked, graphs=True)
    assert len(runs) - without == without >= 4
    assert [r.completion().token_ids for r in requests] == [r.completion().token_ids for r in expected]
    for request in requests:
        assert_those_of_the_text(runner, request, tolerance=2e-5)
    assert engine.stats.accepted or not drafts


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("v4")


def test_a_prompt_that_is_scored_takes_no_prefix(runner):
    tokens = prompt(runner.config, 2 * runner.layout.snapshot_block + 5, seed=9)
    engine = Engine(runner)
    found = []
    for params in (greedy(2), greedy(2), greedy(2), greedy(2, prompt_logprobs=0), greedy(2)):
        request = engine.add_request(tokens, params)
        finish(engine)
        found.append(request.completion())
    assert [bool(completion.cached_tokens) for completion in found] == [False, True, True, False, True]
    assert found[3].prompt_logprobs.token_ids.tolist() == tokens[1:]
    required(engine.prefixes).clear()


def test_prompts_with_one_beginning_start_together(runner):
    """None waits for a snapshot of another, which it would not take."""
    tokens = prompt(runner.config, runner.layout.snapshot_block + 5, seed=9)
    engine = Engine(runner)
    for _ in range(3):
        engine.add_request(tokens, greedy(1, prompt_logprobs=0))
    engine.step()
    assert engine.last_step.prefills == 3
    finish(engine)
    required(engine.prefixes).clear()


def test_they_are_of_the_model_not_of_what_is_sampled_from(runner):
    tokens = prompt(runner.config, 9)
    (logits,) = runner.score([tokens])
    rare = int(logits[-1].argmin())
    params = SamplingParams(
        temperature=3,
        top_k=2,
        logit_bias={rare: 100.0},
        bad_words=[[int(logits[-1].argmax())]],
        logprobs=2,
        max_tokens=1,
    )
    engine = Engine(runner)
    request = engine.add_request(tokens, params)
    finish(engine)
    found = request.completion().logprobs
    log_softmax = logits[-1].double().log_softmax(0)
    assert required(found).token_ids.tolist() == [rare]
    assert required(found).ranks.tolist() == [runner.config.vocab_size]
    assert required(found).top_ids[0].tolist() == log_softmax.topk(2).indices.tolist()
    np.testing.assert_allclose(required(found).logprobs, [float(log_softmax[rare])], atol=1e-5)
    np.testing.assert_allclose(required(found).top_logprobs[0], log_softmax.topk(2).values.numpy(), atol=1e-5)


@pytest.mark.exhaustive
def test_they_come_with_the_tokens():
    """In each step's outputs, and in the completion of a stream at any time."""
    llm = LLM(max_model_len=200)
    params = greedy(12, logprobs=1, prompt_logprobs=0)
    stream = llm.stream("It is a truth universally", params)
    for _ in stream:
        completion = stream.completion
        assert required(completion.logprobs).token_ids.tolist() == completion.token_ids
    request = llm.engine.add_request(stream.completion.prompt_token_ids, params)
    outputs = [output for output in finish(llm.engine) if output.token_ids]
    assert all(required(output.logprobs).token_ids.tolist() == list(output.token_ids) for output in outputs)
    assert TokenLogprobs.join([required(output.logprobs) for output in outputs], 1) == request.completion().logprobs
    assert llm.generate("It is", greedy(2))[0].logprobs is None


def test_broken_logits_fail_alone():
    runner = FakeRunner.create()
    engine = Engine(runner)
    broken = engine.add_request([5, NOT_FINITE], greedy(3, logprobs=1))
    sound = engine.add_request([5, 6], greedy(3, logprobs=1))
    finish(engine)
    assert broken.completion().logprobs == TokenLogprobs.join([], 1)
    assert required(sound.completion().logprobs).token_ids.tolist() == sound.completion().token_ids


def test_a_request_that_ends_within_its_prompt(runner):
    engine = Engine(runner)
    engine.scheduler.max_num_batched_tokens = 10
    request = engine.add_request(prompt(runner.config, 35), greedy(3, logprobs=1, prompt_logprobs=2))
    engine.step()
    engine.cancel(request)
    found: Completion = request.completion()
    assert len(required(found.prompt_logprobs)) == 10
    assert required(found.logprobs).top_ids.shape == (0, 1)


def test_a_row_that_is_recorded_again_takes_its_place():
    def row(token: int) -> TokenLogprobs:
        return expected_logprobs(torch.zeros(1, 9), [token], 0)

    kept = RequestLogprobs(0, None, 0)
    for number, token in ((0, 4), (1, 5), (1, 6)):
        kept.record(number, row(token))
    assert required(kept.of_generated(0, 2)).token_ids.tolist() == [4, 6]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, MAX_TOP + 1, True, 0.5])
def test_numbers_that_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"(?s){name}={value}: must be an integer from 0 .* to {MAX_TOP}; .*score"):
        SamplingParams(**{name: value})


def test_more_alternatives_than_tokens(runner):
    engine = Engine(runner)
    request = engine.add_request([1, 2, 3], greedy(1, logprobs=MAX_TOP, prompt_logprobs=MAX_TOP))
    finish(engine)
    found = request.completion()
    assert required(found.logprobs).top_ids.shape == (1, runner.config.vocab_size)
    assert required(found.prompt_logprobs).top_ids.shape == (2, runner.config.vocab_size)


def test_a_step_without_them_has_none(runner):
    sequence = runner.sequence([1, 2, 3])
    output = runner.step([(sequence, 3)], StepOptions(greedy=True))
    assert output.logprobs is None
    assert output.scored is None
    sequence.free()
