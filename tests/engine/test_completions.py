"""Several completions of a prompt: each with random numbers of its own, and the prompt is computed once."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cli import main
from deepseek_attn.engine.drawing import make_generator
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.llm import IndexedPrompt
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.scheduler import Scheduler
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.model_runner import ModelRunner
from tests.engine.test_interruptions import LIBRARY, InterruptBefore
from tests.engine.test_speculation import draft_from
from tests.engine.workload import leaked
from tests.support.requests import finish, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered

OPTIONS = {"device": "cpu", "max_model_len": 200, "max_num_batched_tokens": 60, "progress": False}
PARAMS = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True, frequency_penalty=0.5)
PROMPTS = [prompt(100, 1), prompt(7, 2), prompt(1, 3)]


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=9, **OPTIONS)


@pytest.fixture(scope="module")
def expected(llm):
    """Tokens of each completion as those of a request of its own, with the random numbers that it must have."""
    found = []
    for index, ids in enumerate(PROMPTS):
        texts = []
        for completion in range(3):
            alone = replace(PARAMS, n=1)
            request = Request.create(llm.runner, llm.tokenizer, ids, alone, index)
            request.generator = make_generator(PARAMS, index, completion)
            llm.engine.submit(request)
            finish(llm.engine)
            texts.append(request.completion().token_ids)
        found.append(texts)
    return found


def tokens_of(completion):
    return [output.token_ids for output in completion.outputs]


def test_each_completion_has_its_own_random_numbers(llm, expected):
    """A completion has the others; the first is that of ``n=1``, whatever else is in the batch."""
    before = llm.engine.stats.prefill_tokens
    found = llm.generate(PROMPTS, PARAMS)
    assert [tokens_of(completion) for completion in found] == expected
    assert len({tuple(tokens) for texts in expected for tokens in texts}) == 9
    assert llm.engine.stats.prefill_tokens - before < 100 + 7 + 5, "prompts are computed once"
    assert [[other.cached_tokens for other in completion.others] for completion in found] == [[99, 99], [6, 6], [0, 0]]
    assert {output.finish_reason for completion in found for output in completion.outputs} == {"length"}
    [single] = llm.generate([PROMPTS[0]], replace(PARAMS, n=1))
    assert single.token_ids == expected[0][0]
    assert single.outputs == [single]
    assert leaked(llm.engine) == {}


@exhaustive_on_cpu
def test_more_completions_than_run_at_once(llm):
    [few] = llm.generate([PROMPTS[1]], PARAMS)
    [many] = llm.generate([PROMPTS[1]], replace(PARAMS, n=11))
    assert len(many.outputs) == 11
    assert tokens_of(many)[:3] == tokens_of(few)
    assert leaked(llm.engine) == {}


OPTIONS_BESIDE = [{}, {"max_snapshots": 4}, {"max_rollback": 6}]


@exhaustive_on_cpu
@pytest.mark.parametrize("options", tiered(OPTIONS_BESIDE, OPTIONS_BESIDE[-1:]), ids=str)
def test_drafts_and_snapshots(folder, expected, monkeypatch, options):
    runner = ModelRunner.from_pretrained(folder, max_num_seqs=4, **OPTIONS | options)
    texts = [ids + tokens for ids, found in zip(PROMPTS, expected, strict=True) for tokens in found]
    draft_from(monkeypatch, runner, texts, right=lambda position: position % 3 > 0)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 2))
    requests = [engine.add_request(ids, PARAMS, index=index) for index, ids in enumerate(PROMPTS)]
    finish(engine)
    assert [tokens_of(request.completion()) for request in requests] == expected
    assert 0 < engine.stats.acceptance_rate < 1
    assert leaked(engine) == {}


def test_a_prompt_is_yielded_once_all_are_done(llm, expected):
    params = replace(PARAMS, n=2)
    given = [IndexedPrompt(0, PROMPTS[0]), IndexedPrompt(1, [-1]), IndexedPrompt(2, PROMPTS[2], params)]
    found = dict(llm.generate_iter(given, PARAMS, max_in_flight=1))
    assert sorted(found) == [0, 1, 2]
    assert tokens_of(found[0]) == expected[0]
    assert found[1].error is not None
    assert tokens_of(found[2]) == expected[2][:2]


def test_cancelling_the_first_ends_all(llm):
    engine = llm.engine
    for steps in (0, 1, 2, 3, 5):
        request = engine.add_request(PROMPTS[0], PARAMS)
        for _ in range(steps):
            engine.step()
        others = [*request.others]
        assert engine.cancel(others[1])
        assert engine.cancel(request)
        assert not engine.cancel(request)
        finish(engine)
        assert {each.finish_reason for each in request.group} == {"abort"}
        assert leaked(engine) == {}
    request = Request.create(llm.runner, llm.tokenizer, PROMPTS[0], PARAMS)
    engine.cancel(request)
    assert all(each.finished for each in request.group)
    finish(engine)
    assert leaked(engine) == {}


@pytest.mark.exhaustive
def test_a_first_that_fails_leaves_the_prompt_to_the_others(llm, expected):
    """Before it has computed it, and after it has shared it."""
    for steps in (1, 2, 3):
        request = llm.engine.add_request(PROMPTS[0], PARAMS, index=0)
        for _ in range(steps):
            llm.engine.step()
        llm.engine._cancel(request)
        finish(llm.engine)
        assert tokens_of(request.completion())[1:] == expected[0][1:]
        assert leaked(llm.engine) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", [1, 4])
def test_interrupted_where_the_prompt_is_shared(llm, expected, every):
    """Before every so many lines of the functions that share it: the same tokens come, and no page is lost."""
    engine, params = llm.engine, replace(PARAMS, max_tokens=2)
    request = engine.add_request(PROMPTS[1], params, index=1)
    lines = {}
    while engine.has_unfinished:
        with InterruptBefore(None, LIBRARY) as trace:
            engine.step()
        lines |= trace.lines
    sharing = set[tuple[str, int]]()
    for function in (Request.share_prompt, CacheManager.fork, CacheManager.truncate, Scheduler._start):
        function = inspect.unwrap(function)
        source, start = inspect.getsourcelines(function)
        sharing |= {(Path(function.__code__.co_filename).name, start + i) for i in range(len(source))}
    chosen = [line for line in lines if (Path(line.file).name, line.number) in sharing]
    assert len(chosen) > 30
    for line in chosen[::every]:
        request, fired = engine.add_request(PROMPTS[1], params, index=1), False
        while engine.has_unfinished:
            with InterruptBefore(None if fired else line, LIBRARY) as trace:
                engine.step()
            fired |= trace.fired
        assert fired
        assert tokens_of(request.completion()) == [tokens[:2] for tokens in expected[1]], line
        assert leaked(engine) == {}


def test_a_stream_is_one_text(llm):
    with pytest.raises(ValueError, match="n=3: a stream is one text"):
        llm.stream(PROMPTS[0], PARAMS)
    assert not llm.engine.has_unfinished


def test_on_the_command_line(folder, expected, capsys, tmp_path):
    flags = ["generate", "--model", str(folder), "--device", "cpu", "--max-model-len", "200", "--ignore-eos"]
    flags += ["--n", "3", "--seed", "11", "--max-tokens", "7", "--frequency-penalty", "0.5"]
    lines = tmp_path / "lines"
    lines.write_text(json.dumps(PROMPTS[0]) + "\n" + json.dumps({"token_ids": PROMPTS[1], "n": 1}) + "\n")
    assert main([*flags, "--prompts", str(lines)]) == 0
    first, second = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda line: line["index"])
    assert [first["token_ids"], *(other["token_ids"] for other in first["others"])] == expected[0]
    assert second["token_ids"] == expected[1][0]
    assert "others" not in second
    assert main([*flags, "--token-ids", ",".join(map(str, PROMPTS[0]))]) == 0
    printed = capsys.readouterr()
    assert printed.err.count(" of 3 (length):") == 3
    assert first["others"][1]["text"] in printed.out
