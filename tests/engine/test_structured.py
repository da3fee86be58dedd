"""Structured output of models with random weights: always of its structure, with drafts as without."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.cli import main
from deepseek_attn.engine import decoding, logits, structured
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.logits import LogitsRow, LogitsRules, processed_logits
from deepseek_attn.engine.prompts import Prompts
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.engine.structured import GrammarState, compiled_grammar
from deepseek_attn.runner import allowed_tokens, graphs
from deepseek_attn.runner.allowed_tokens import restrict, some_restricted
from deepseek_attn.runner.graph_steps import CapturedStep
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.conversation import Chat
from deepseek_attn.text.reply import DSML, END_THINK, THINK
from tests.engine.test_interruptions import interrupted_everywhere
from tests.engine.test_speculation import draft_from
from tests.engine.workload import leaked, use_buckets
from tests.support.interruptions import InterruptBefore
from tests.support.requests import finish, greedy, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

pytest.importorskip("llguidance", reason="pip install 'deepseek-attn[structured]'")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["one", "two", None]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def check_json(value):
    """What `SCHEMA` asks for."""
    assert list(value) == ["name", "kind", "numbers"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 5
    assert value["kind"] in ("one", "two", None)
    assert len(value["numbers"]) <= 3
    assert all(type(number) is int and -9 <= number <= 99 for number in value["numbers"])


CHOICES = ("yes", "no way", 'a "quoted" \\ one\n', "grüße €", "yesterday")
REGEX = r"(ab|c[0-9]){1,4}[0-9]{2,3}é?"
LARK = 'start: "[" item ("," item)~0..3 "]"\nitem: /[a-c]{1,3}/ | "(" item ")"'
STRUCTURES = {
    "json_schema": (SCHEMA, lambda text: check_json(json.loads(text))),
    "regex": (REGEX, lambda text: required(re.fullmatch(REGEX, text))[0]),
    "choices": (CHOICES, CHOICES.index),
    "grammar": (LARK, lambda text: required(re.fullmatch(r"\[[a-c(),]+\]", text))[0]),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 400,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 90,
    "progress": False,
}


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


def params_of(kind, **options):
    return SamplingParams(**{"max_tokens": 250, "seed": 4, kind: STRUCTURES[kind][0]} | options)


SAMPLED: dict[str, Any] = {"temperature": 2.5}
PLAIN: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.5}
ASKED = [*((kind, SAMPLED) for kind in STRUCTURES), ("json_schema", PLAIN), ("grammar", PLAIN)]
JOBS = [
    ([max(token, 20) for token in prompt(5 + 9 * i, i)], params_of(kind, **options))
    for i, (kind, options) in enumerate(ASKED)
]
JOBS.append((prompt(20, 99), SamplingParams(seed=4, max_tokens=30, ignore_eos=True)))


def kind_of(params):
    return next(kind for kind in STRUCTURES if getattr(params, kind) is not None)


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate([ids for ids, _ in JOBS], [params for _, params in JOBS])


def test_texts_are_of_their_structure(llm, expected):
    """Beside a request without one. The end comes where the text is complete, and padding of the vocabulary never."""
    for (_, params), completion in zip(JOBS[:-1], expected, strict=False):
        assert (completion.finish_reason, completion.error) == ("stop", None), completion
        STRUCTURES[kind_of(params)][1](completion.text)
        assert completion.token_ids[-1] in llm.runner.eos_token_ids
        assert all(token < len(llm.tokenizer) for token in completion.token_ids)
    alone = llm.generate([JOBS[-1][0]], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
    assert len(alone[0].token_ids) == len(expected[-1].token_ids) == 30


@pytest.mark.parametrize(("buckets", "preempt"), tiered([(False, True), (True, False)], [(False, True)]))
def test_texts_with_drafts_are_the_same(folder, expected, monkeypatch, buckets, preempt):
    """Drafts of which some are wrong: matchers go on over them, and back."""
    runner = ModelRunner.from_pretrained(folder, **OPTIONS)
    if buckets:
        use_buckets(runner)
    known = [ids + completion.token_ids for (ids, _), completion in zip(JOBS, expected, strict=True)]
    draft_from(monkeypatch, runner, known, right=lambda position: position * 7 % 5 < 3)
    with LLM(folder, **OPTIONS) as llm:
        engine = Engine(runner, llm.tokenizer, MTPSpeculation(runner, 3))
    requests = [engine.add_request(ids, params, index=i) for i, (ids, params) in enumerate(JOBS)]
    while engine.has_unfinished:
        engine.step()
        if preempt and engine.stats.steps % 4 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0], engine.last_step)
    assert [r.completion().token_ids for r in requests] == [completion.token_ids for completion in expected]
    assert 0.2 < engine.stats.acceptance_rate < 0.9
    assert leaked(engine) == {}


def test_the_answer_after_reasoning_has_the_structure(llm):
    """Reasoning is free, and does not end the text."""
    think, end = (llm.tokenizer.token_id(token) for token in (THINK, END_THINK))

    def close(output, row):
        return row.index_fill(0, torch.tensor([end], device=row.device), 1e3) if len(output) == 9 else row

    params = params_of("choices", logits_processors=[close], logit_bias={1: 20})
    for ids in ([*prompt(9), think], [*prompt(9), think, 30, end]):
        [completion] = llm.generate([ids], params)
        assert completion.answer in CHOICES
        assert (completion.token_ids.index(end) <= 9) if ids[-1] == think else completion.token_ids[-1] == 1
        assert bool(completion.reasoning) == (ids[-1] == think)


GREEDY = [([max(token, 20) for token in prompt(7 + 9 * i, i)], params_of(kind, temperature=0, **options))
          for i, (kind, options) in enumerate([("json_schema", {"logprobs": 3}), ("regex", {}), ("choices", {}),
              ("grammar", {"logprobs": 0})])]  # fmt: skip
GREEDY.append((prompt(30, 98), greedy(40, logprobs=1)))


def run_greedy(engine):
    """Requests of each kind and one without, which starts later."""
    requests = [engine.add_request(*job) for job in GREEDY[:-1]]
    for _ in range(3):
        engine.step()
    requests.append(engine.add_request(*GREEDY[-1]))
    finish(engine)
    assert leaked(engine) == {}
    return [request.completion() for request in requests]


@pytest.fixture
def runner(llm, monkeypatch):
    """Its decode steps run over persistent tensors."""
    monkeypatch.setattr(llm.runner, "graphs", None)
    use_buckets(llm.runner)
    return llm.runner


@exhaustive_on_cpu
def test_greedy_texts_over_persistent_tensors(llm, runner, monkeypatch):
    """The device chooses among the allowed tokens, and the next step is launched with them before the host reads them.

    Log-probabilities are of the model's distribution, to which the allowed tokens make no difference.
    """
    found, runs, run, early = [], [], CapturedStep.run, DecodeGraphs.launch_next_step
    monkeypatch.setattr(CapturedStep, "run", lambda step: (runs.append(step), run(step))[1])
    monkeypatch.setattr(DecodeGraphs, "launch_next_step", lambda *args: (found.append(args), early(*args))[1])
    ahead = run_greedy(Engine(runner, llm.tokenizer))
    longest = max(len(completion.token_ids) for completion in ahead)
    assert len(runs) < longest + 5  # launched steps were those that came next
    assert len(found) > longest - 5
    runner.graphs = None
    for (ids, params), completion, after in zip(GREEDY, ahead, run_greedy(Engine(runner, llm.tokenizer)), strict=True):
        assert completion.token_ids == after.token_ids
        if params.logprobs is not None:
            assert required(completion.logprobs).top_ids.tolist() == required(after.logprobs).top_ids.tolist()
            np.testing.assert_allclose(
                required(completion.logprobs).logprobs, required(after.logprobs).logprobs, atol=2e-5
            )
            [text] = runner.score_logprobs([ids + completion.token_ids])
            np.testing.assert_allclose(required(completion.logprobs).logprobs, text.logprobs[len(ids) - 1 :], atol=2e-5)
    for (_, params), completion in zip(GREEDY[:-1], ahead, strict=False):
        STRUCTURES[kind_of(params)][1](completion.text)


@pytest.mark.parametrize("output", [[], [40, 41], [40, 128, 97], [128], [128, 97], [128, 97, 98]], ids=str)
def test_what_the_runner_allows_is_what_logits_processing_leaves(llm, output):
    """In reasoning (before token 128), in the answer, and behind its end."""
    vocab, stops = llm.runner.config.vocab_size, [1, 77]
    params = SamplingParams(temperature=0, regex="[a-zA-Z!-@]{1,2}").resolved()
    grammar = GrammarState(compiled_grammar(params, llm.tokenizer, vocab, [1]), begins_after=128)
    rules = LogitsRules(params, [], stops, vocab, grammar)
    rows = torch.randn(1, vocab)
    expected, failures = processed_logits(rows, [LogitsRow(rules, output, 0, len(output), len(output))])
    allowed = rules.allowed(output)
    assert torch.equal(restrict(rows.clone(), [required(allowed)]), expected)
    assert torch.equal(some_restricted(torch.cat([rows] * 2), [None, allowed]), torch.cat([rows, expected]))
    assert failures == {}


LONG = SamplingParams(temperature=0, max_tokens=5, regex="[a-z ]{300}")


@pytest.mark.exhaustive
def test_interrupted_before_any_line(llm, runner):
    """Ctrl-C at every stage: the next steps give the same tokens."""
    ids = [[max(token, 20) for token in prompt(length, length)] for length in (30, 12, 9)]
    jobs = list(zip(ids, [LONG, replace(LONG, temperature=0.8, seed=3), LONG], strict=True))
    before = runner.manager.available_pages()

    def make_engine():
        use_buckets(runner)
        return Engine(runner, llm.tokenizer)

    interrupted_everywhere(make_engine, jobs, every=83, start=7)
    interrupted_everywhere(make_engine, jobs[::2], 5, tuple(required(module.__file__) for module in MASKING))
    assert runner.manager.available_pages() == before


MASKING = structured, logits, allowed_tokens, graphs, decoding


@pytest.mark.exhaustive
def test_errors_before_any_line(llm, runner):
    """They end requests with a message, or none; the next request of the same LLM is right."""
    ids, engine = [25, 26, 27], llm.engine
    files = tuple(required(module.__file__) for module in MASKING)
    with InterruptBefore(None, files) as trace:
        [expected] = llm.generate([ids], LONG)
    fired = 0
    for line in list(trace.lines)[::9]:
        with InterruptBefore(line, files, RuntimeError) as broken:
            try:
                [completion] = llm.generate([ids], LONG)
                assert (completion.token_ids == expected.token_ids) == (completion.error is None)
            except RuntimeError:
                pass
        fired += broken.fired
        assert leaked(engine) == {}
        assert llm.generate([ids], LONG) == [expected]
    assert fired > 13


def test_ctrl_c_aborts_the_requests_of_an_llm(llm, runner):
    """At the callback of a step, while another step has been launched."""
    stop = iter(range(4))

    def interrupt(stats):
        if next(stop, None) is None:
            raise KeyboardInterrupt

    [expected] = llm.generate([[25, 26, 27]], LONG)
    llm.engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[25, 26, 27], [30, 31]], LONG)
    llm.engine.on_step = None
    assert not llm.engine.has_unfinished
    assert leaked(llm.engine) == {}
    assert llm.generate([[25, 26, 27]], LONG) == [expected]


HI = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHORT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
DRAWN = SamplingParams(max_tokens=250, seed=5, temperature=1.5)


@pytest.fixture(scope="module")
def chats(folder):
    options: dict[str, Any] = OPTIONS | {"max_model_len": 4000, "max_num_batched_tokens": 2000}
    return LLM(folder, **options)


def test_a_response_format_restricts_the_answer(chats):
    completion = chats.chat(HI, DRAWN, response_format=FORMAT)
    assert completion.finish_reason == "stop"
    check_json(json.loads(completion.answer))
    own = chats.chat(HI, replace(DRAWN, choices=("yes",)), response_format=FORMAT)
    assert own.answer == "yes"


@pytest.mark.exhaustive
def test_a_response_format_restricts_streams_and_chats_with_tools(chats):
    completion = chats.chat(HI, DRAWN, response_format=FORMAT)
    assert "".join(chats.chat(HI, DRAWN, response_format=FORMAT, stream=True)) == completion.text
    assert chats.chat(HI, DRAWN, response_format=FORMAT, tools=[TOOL], tool_choice="none").text == completion.text
    begun = chats.chat(HI, replace(DRAWN, max_tokens=20), response_format={"type": "json_object"})
    assert begun.answer.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        pytest.param(HI, {"response_format": {"type": "text"}}, marks=pytest.mark.exhaustive),
        (
            HI,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "boolean"}, "strict": False},
                }
            },
        ),
        (HI, {"tools": [TOOL]}),
        pytest.param([{"role": "system", "content": "s", "tools": [TOOL]}, *HI], {}, marks=pytest.mark.exhaustive),
        pytest.param([*HI, {"role": "assistant", "content": "{", "prefix": True}], {}, marks=pytest.mark.exhaustive),
        ([*HI, {"role": "assistant", "content": "{"}], {"continue_final_message": True}),
    ],
    ids=["text", "not strict", "tools", "tools of a message", "prefix", "continued"],
)
def test_a_response_format_that_is_only_asked_for(chats, messages, options):
    options = {"response_format": SHORT} | options
    ids, _ = chats.chat_prompt(messages, **options)
    params = replace(DRAWN, max_tokens=8)
    assert chats.chat(messages, params, **options).token_ids == chats.generate([ids], params)[0].token_ids


def test_a_response_format_without_the_package_is_only_asked_for(chats, monkeypatch):
    ids, _ = chats.chat_prompt(HI, response_format=SHORT)
    params = replace(DRAWN, max_tokens=8)
    monkeypatch.setattr("deepseek_attn.engine.structured.find_spec", lambda name: None)
    assert chats.chat(HI, params, response_format=SHORT).token_ids == chats.generate([ids], params)[0].token_ids


@pytest.mark.exhaustive
def test_a_response_format_of_a_line(folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text(json.dumps({"messages": HI, "response_format": FORMAT, "seed": 5}))
    flags = ["--model", str(folder), "--device", "cpu", "--max-model-len", "4000", "--max-tokens", "250"]
    assert main(["generate", *flags, "--prompts", str(tmp_path / "prompts")]) == 0
    check_json(json.loads(json.loads(capsys.readouterr().out)["text"]))


def test_min_tokens_do_not_keep_a_complete_text_from_its_end(llm):
    [completion] = llm.generate([prompt(9)], SamplingParams(choices=["yes"], min_tokens=50, seed=1))
    assert (completion.text, completion.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema .* type: strin"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(a)\\1"}, "backreferences are not supported"),
        ({"grammar": "start: y"}, 'unknown name: "y"'),
        ({"grammar": 'root ::= "a'}, "grammar"),
    ],
    ids=str,
)
def test_wrong_structures_are_refused_before_anything_runs(llm, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt(5)], SamplingParams(**params))
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "a", "choices": ["b"]}, "only one of regex, choices can be given"),
        ({"regex": "a", "ignore_eos": True}, "must not be beside ignore_eos"),
        ({"choices": []}, "choices"),
        ({"choices": [3]}, "choices"),
        ({"json_schema": 3}, "json_schema=3: must be a JSON schema"),
        ({"regex": ""}, "regex"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_gbnf_and_completions_share_what_is_compiled(llm):
    params = SamplingParams(grammar='root ::= "x" [0-9] | "yy"', n=4, seed=2)
    [completion] = llm.generate([prompt(7)], params)
    assert all(re.fullmatch("x[0-9]|yy", output.text) for output in completion.outputs)


def test_without_the_package_there_is_a_message(llm, monkeypatch):
    known = builtins.__import__

    def missing(name, *args, **options):
        if name == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return known(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'deepseek-attn\[structured\]'"):
        llm.generate([prompt(5)], SamplingParams(regex="never compiled"))


def test_without_a_tokenizer_there_is_a_message(folder):
    engine = Engine(ModelRunner.from_pretrained(folder, **OPTIONS))
    request = engine.add_request(prompt(5), SamplingParams(regex="a"))
    finish(engine)
    assert "regex needs a tokenizer" in required(request.error)


@pytest.mark.exhaustive
def test_on_the_command_line(folder, capsys, tmp_path):
    flags = ["generate", "--model", str(folder), "--device", "cpu", "--max-model-len", "400", "--token-ids", "5,6,7"]
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar").write_text(LARK)
    for kind, given in (
        ("json_schema", [str(tmp_path / "schema.json")]),
        ("json_schema", [json.dumps(SCHEMA)]),
        ("regex", [REGEX]),
        ("choices", list(CHOICES)),
        ("grammar", [str(tmp_path / "grammar")]),
    ):
        assert main([*flags, "--seed", "3", "--" + kind.replace("_", "-"), *given]) == 0
        STRUCTURES[kind][1](capsys.readouterr().out.removesuffix("\n"))
    assert main([*flags, "--regex", "("]) == 2
    assert "unclosed group" in capsys.readouterr().err


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BOTH = [TOOL, WEATHER]
CALL = {"tools": BOTH, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
WHOLE = replace(DRAWN, max_tokens=600)


def joined(stream) -> list[tuple[str, str]]:
    """(name, arguments) of the calls of a stream's deltas."""
    calls: list[tuple[str, str]] = []
    for delta in stream.deltas():
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(calls):
                calls.append((piece["function"]["name"], ""))
            name, text = calls[piece["index"]]
            calls[piece["index"]] = (name, text + piece["function"]["arguments"])
    return calls


def check_calls(completion, names: set[str]) -> None:
    assert (completion.finish_reason, completion.answer) == ("stop", ""), completion.text
    assert completion.tool_calls
    for call in completion.tool_calls:
        assert call.name in names
        check_json(call.values) if call.name == "weather" else call.values == {}


def test_a_call_of_a_named_function(chats):
    """Its arguments are of its schema, whole and streamed; beside "required", one call or more of any function."""
    completion = chats.chat(HI, WHOLE, **CALL)
    check_calls(completion, {"weather"})
    [call] = completion.tool_calls
    assert joined(chats.chat(HI, WHOLE, stream=True, **CALL)) == [(call.name, call.arguments)]
    close, *names = (chats.tokenizer.encode_plain(character)[0] for character in "/fw")
    for name, called in zip(names, ("f", "weather"), strict=True):
        bias = {close: 60, name: 60}  # a block ends after the first call, else there are calls up to max_tokens
        completion = chats.chat(HI, replace(WHOLE, logit_bias=bias), tools=BOTH, tool_choice="required")
        check_calls(completion, {called})


@pytest.mark.parametrize("choice", [CALL["tool_choice"], "required"], ids=["named", "required"])
def test_required_calls_come_behind_reasoning(chats, choice):
    """Reasoning is free, but for the beginning of calls, which would end it."""
    end, begins_calls = (chats.tokenizer.token_id(token) for token in (END_THINK, DSML))

    def wanted(output, row):
        if len(output) > 9:
            return row
        likeliest = torch.tensor([begins_calls if len(output) < 9 else end], device=row.device)
        return row.index_add(0, likeliest, torch.full_like(row[:1], 1e4))  # an excluded token, at -inf, stays excluded

    bias = {chats.tokenizer.encode_plain("/")[0]: 60}  # ends the calls after the first
    params = replace(WHOLE, logits_processors=[wanted], logit_bias=bias)
    options = {"tools": BOTH, "tool_choice": choice, "thinking": True}
    completion = chats.chat(HI, params, **options)
    check_calls(completion, {"weather", "f"})
    assert completion.token_ids.index(end) == 9
    assert completion.reasoning
    assert begins_calls not in completion.token_ids[:9]
    assert joined(chats.chat(HI, params, stream=True, **options)) == [
        (c.name, c.arguments) for c in completion.tool_calls
    ]
    cut = chats.chat(HI, replace(params, max_tokens=5), **options)
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())


def test_required_calls_without_the_package(chats, monkeypatch):
    """The prompt of chat mode begins them; a name, and calls behind reasoning, need a grammar."""
    for module in ("prompts", "structured"):
        monkeypatch.setattr(f"deepseek_attn.engine.{module}.find_spec", lambda name: None)
    options = {"tools": BOTH, "tool_choice": "required"}
    ids, _ = chats.chat_prompt(HI, **options)
    params = replace(DRAWN, max_tokens=8)
    assert chats.chat(HI, params, **options).token_ids == chats.generate([ids], params)[0].token_ids
    assert Prompts.chat_params(chats.prompts, Chat(HI, options | {"thinking": True}), params).grammar is not None
    assert Prompts.chat_params(chats.prompts, Chat(HI, {**CALL}), params).grammar is not None


def test_tokens_that_do_not_come_in_reasoning():
    """Of a greedy request too, whose mask has them."""
    params = SamplingParams(temperature=0, choices=("yes",)).resolved()
    rules = LogitsRules(params, [], [1], 40, GrammarState(None, 12, (13,)))
    mask = np.unpackbits(np.frombuffer(required(rules.allowed([20])), dtype=np.uint8), bitorder="little")
    assert [i for i in range(40) if not mask[i]] == [1, 13]
    assert rules.excluded([20]) == [1, 13]


def test_required_calls_of_lines_and_files(folder, capsys, tmp_path):
    """``--prompts`` and ``--messages`` of the command."""
    (tmp_path / "prompts").write_text(json.dumps({"messages": HI, **CALL, "seed": 5}))
    (tmp_path / "chat").write_text(json.dumps({"messages": HI, **CALL}))
    flags = ["--model", str(folder), "--device", "cpu", "--max-model-len", "4000", "--max-tokens", "600"]
    assert main(["generate", *flags, "--prompts", str(tmp_path / "prompts")]) == 0
    [call] = json.loads(capsys.readouterr().out)["tool_calls"]
    assert (call["name"], call["problem"]) == ("weather", None)
    check_json(json.loads(call["arguments"]))
    assert main(["generate", *flags, "--messages", str(tmp_path / "chat"), "--seed", "5"]) == 0
    assert '"weather"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"choices": ("yes",)}, CALL, "tool_choice=.* beside choices: the text is calls"),
        ({"ignore_eos": True}, CALL, "tool_choice=.* beside ignore_eos: the text is calls, which EOS ends"),
        ({}, {**CALL, "tools": [TOOL]}, "there is no function 'weather' among tools: 'f'"),
        ({}, {"tool_choice": "required"}, "a call needs tools"),
        (
            {},
            {"tools": [{"name": "f", "parameters": {"minProperties": 1}}], "tool_choice": "required"},
            "a call of 'f' cannot be required: its parameters have minProperties",
        ),
    ],
    ids=["structure", "ignore_eos", "unknown", "no tools", "schema"],
)
def test_calls_that_cannot_be_required(chats, params, options, message):
    for stream in (False, True):
        with pytest.raises(ValueError, match=message):
            chats.chat(HI, replace(DRAWN, **params), stream=stream, **options)
