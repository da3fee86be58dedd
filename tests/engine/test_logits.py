"""Logits processing against transformers' processors and float64 by hand: single rows, and whole texts with drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.config.defaults import REPETITION_PENALTIES
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.engine.drawing import make_generator, sample
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.logits import NOTHING_LEFT, LogitsRow, LogitsRules, bad_word_ids, processed_logits
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from tests.engine.test_speculation import draft_from
from tests.engine.workload import leaked, use_buckets
from tests.support.requests import finish
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped

VOCAB = 67
PROMPT = [3, 9, 9, 40, 41]
OUTPUT = [5, 9, 5, 5, 12, 60]
STOPS = [1, 7]


def row_of(params, prompt=PROMPT, output=OUTPUT, drafts=0):
    """A row after a prompt and an output, whose last tokens are drafts."""
    resolved = SamplingParams(**params).resolved() if isinstance(params, dict) else params
    rules = LogitsRules(resolved, bad_word_ids(resolved.bad_words, None), STOPS, VOCAB)
    assert rules.apply_to(0)
    tokens = [*prompt, *output, 2, 2]  # later drafts, which the row does not come after
    end = len(prompt) + len(output)
    return LogitsRow(rules, tokens, len(prompt), end - drafts, end)


def logits_of(rows=1):
    return 6 * torch.randn(rows, VOCAB, dtype=torch.float32, device="cpu")


def processed(params, logits, **row):
    kept = logits.clone()
    found, failures = processed_logits(logits, [row_of(params, **row)])
    assert failures == {}
    assert torch.equal(logits, kept), "the model's logits were changed"
    return found


def ids(tokens):
    return untyped(torch.tensor([tokens], dtype=torch.int64, device="cpu"))  # transformers wants a LongTensor


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_is_transformers(penalty, drafts):
    logits = logits_of()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids(PROMPT + OUTPUT), logits.clone())
    assert torch.equal(processed({"repetition_penalty": penalty}, logits, drafts=drafts), expected)


@pytest.mark.parametrize("words", [[[5]], [[9], [12, 60, 3]], [[12, 60, 3], [60, 3], [5, 60, 4], [9, 5, 5, 12, 60, 8]]])
def test_bad_words_are_transformers(words):
    logits = logits_of()
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=66)(ids(OUTPUT), logits.clone())
    found = processed({"bad_words": words}, logits)
    assert torch.equal(found, expected)
    assert (found == -torch.inf).any()


def test_bad_words_do_not_begin_in_the_prompt():
    logits = logits_of()
    assert torch.equal(processed({"bad_words": [[41, 30]]}, logits, output=[]), logits), "as in vLLM"
    found = processed({"bad_words": [[41, 30]]}, logits, output=[41])
    assert (found == -torch.inf).nonzero().tolist() == [[0, 30]]


@pytest.mark.parametrize("generated", [0, 3, 4, 6])
def test_min_tokens_is_transformers(generated):
    logits, output = logits_of(), OUTPUT[:generated]
    theirs = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, STOPS)
    assert torch.equal(
        processed({"min_tokens": 4}, logits, output=output), theirs(ids(PROMPT + output), logits.clone())
    )


def test_logit_bias_is_transformers():
    logits, bias = logits_of(), {3: -100.0, 9: 2.5, 66: 100.0}
    theirs = SequenceBiasLogitsProcessor(untyped({(token,): value for token, value in bias.items()}))
    assert torch.equal(processed({"logit_bias": bias}, logits), theirs(ids(OUTPUT), logits.clone()))


def test_frequency_and_presence_are_those_of_the_output():
    logits = logits_of()
    found = processed({"frequency_penalty": 0.7, "presence_penalty": -1.1}, logits, drafts=3)
    expected = logits.double()
    for token in set(OUTPUT):
        expected[0, token] += 1.1 - 0.7 * OUTPUT.count(token)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_allowed_tokens():
    found = processed({"allowed_token_ids": [4, 2, 66]}, logits_of())
    assert found.isfinite().nonzero()[:, 1].tolist() == [2, 4, 66]


def test_all_of_them_come_in_the_order_of_vllm():
    """Exclusions, bias, functions, repetition, frequency, presence: the functions see biases and no penalties."""
    logits, seen = logits_of(), []

    def double(output, row):
        assert output == OUTPUT
        seen.append(row.clone())
        return row * 2

    def add(prompt, output, row):
        assert (prompt, output) == (PROMPT, OUTPUT)
        row += 1
        return row

    params: dict[str, Any] = {
        "allowed_token_ids": range(1, 66), "bad_words": [[30], [60, 31]], "min_tokens": 9, "logit_bias": {9: 3, 5: -8},
        "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2,
        "logits_processors": [double, add],
    }  # fmt: skip
    expected = logits[0].double()
    expected[[0, 66, 30, 31, *STOPS]] = -torch.inf
    expected[9] += 3
    expected[5] -= 8
    found = processed(params, logits)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-6, atol=1e-6)
    expected = expected * 2 + 1
    for token in {*PROMPT, *OUTPUT}:
        expected[token] = expected[token] / 1.4 if expected[token] > 0 else expected[token] * 1.4
    for token in set(OUTPUT):
        expected[token] -= 0.3 * OUTPUT.count(token) + 0.2
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-5)


def test_rows_of_a_batch_do_not_depend_on_each_other(monkeypatch):
    """Requests with and without rules, several rows of one, and blocks of two rows."""
    monkeypatch.setattr("deepseek_attn.engine.logits.ELEMENTS_PER_BLOCK", 2 * VOCAB)
    asked = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "logit_bias": {5: 1}},
        {"bad_words": [[9], [60, 4]], "presence_penalty": 1},
    ]
    rows = [row_of(params, drafts=drafts) for params in asked for drafts in (0, 1, 3)]
    shared = row_of({"frequency_penalty": 1.0}, output=OUTPUT[:3])
    ahead = [replace(shared, confirmed=len(PROMPT) + 3, end=len(PROMPT) + 3 + n) for n in range(3)]
    plain = LogitsRow(None, PROMPT, len(PROMPT), len(PROMPT), len(PROMPT))
    rows = [plain, *rows, *ahead, plain]
    logits = logits_of(len(rows))
    found, _ = processed_logits(logits, rows)
    for i, row in enumerate(rows):
        alone, _ = processed_logits(logits[i : i + 1], [row])
        assert torch.equal(found[i], alone[0]), i
    assert torch.equal(found[[0, -1]], logits[[0, -1]])
    assert processed_logits(logits[:2], [plain, plain])[0].data_ptr() == logits.data_ptr(), "nobody asked, nobody pays"


def test_counts_follow_the_tokens():
    """Of an output that grows, and after the tensors were dropped; in between a count may be interrupted."""
    row = row_of({"frequency_penalty": 1.0, "repetition_penalty": 2.0}, output=[])
    row.token_ids = [*PROMPT, *(OUTPUT * 20)]
    for end in (5, 6, 9, 9, 40, 41, 100):
        row.confirmed = end
        counts = required(row.rules).counts(row, torch.device("cpu"))
        assert counts.output.tolist() == [row.token_ids[5:end].count(i) for i in range(VOCAB)]
        assert counts.prompt.nonzero().flatten().tolist() == sorted(set(PROMPT))
        if end == 40:
            required(row.rules).forget()


@pytest.mark.parametrize("min_p", tiered([0.05, 0.3, 1.0], [0.3]))
def test_min_p_is_transformers(min_p):
    """The tokens that are drawn are those that the warper keeps; top-k is over them."""
    logits = torch.randn(1, 12, dtype=torch.float32, device="cpu")
    kept = MinPLogitsWarper(min_p)(untyped(None), logits / 0.9)[0].isfinite().nonzero().flatten().tolist()
    for top_k in (0, 4):
        params = SamplingParams(temperature=0.9, min_p=min_p, top_k=top_k, seed=3)
        rows = logits.expand(4000, -1).contiguous()
        drawn = sample(rows, [params] * 4000, [make_generator(params, i) for i in range(4000)])
        best = logits[0].argsort(descending=True)[: top_k or 12].tolist()
        assert sorted(set(drawn.tolist())) == sorted(set(kept) & set(best))
    assert 1 <= len(kept) < 12


@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_the_most_extreme_penalties_leave_finite_logits(penalty):
    """Of logits far beyond those that models compute, and of zero."""
    logits = torch.tensor([[1e30, 0.0, -1e30, 3.0]])
    rules = LogitsRules(SamplingParams(repetition_penalty=penalty).resolved(), [], [], 4)
    found, failures = processed_logits(logits, [LogitsRow(rules, [0, 1, 2], 3, 3, 3)])
    assert found.isfinite().all()
    assert not failures


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_p": 1.1}, r"min_p=1.1: must be in \[0, 1\]"),
        ({"min_p": float("nan")}, "min_p=nan"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0: must be in \[0.001, 1000\]"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2.5: must be in \[-2, 2\]"),
        ({"frequency_penalty": "1"}, "frequency_penalty='1'"),
        ({"logit_bias": {3: 101}}, r"logit_bias=\{3: 101\}: must map token ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5: must be at most max_tokens=4"),
        ({"n": 0}, "n=0: must be an integer from 1 to 16384"),
        ({"n": 10**9}, "n=1000000000: must be an integer from 1 to 16384"),
        ({"n": 2, "temperature": 0}, "n=2: must be 1 with temperature 0"),
        ({"logits_processors": [3]}, "logits_processors"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1: must be True or False"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_numbers_of_numpy_are_numbers():
    """As a loop over an array, or a cell of a table, gives them."""
    given = {
        "temperature": np.float32(0.5), "top_p": np.float64(0.5), "top_k": np.int32(3), "max_tokens": np.int64(9),
        "min_tokens": np.uint8(2), "n": np.int64(2), "seed": np.uint64(2**64 - 1), "stop_token_ids": np.array([3, 4]),
        "allowed_token_ids": [np.int64(5)], "bad_words": [np.array([6, 7]), [np.int16(8)]],
        "logit_bias": {np.int64(3): np.float32(0.25)}, "logprobs": np.int64(1),
    }  # fmt: skip
    params, plain = SamplingParams(**untyped(given)), {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "max_tokens": 9, "min_tokens": 2, "n": 2, "seed": 2**64 - 1,
        "stop_token_ids": (3, 4), "allowed_token_ids": (5,), "bad_words": ((6, 7), (8,)), "logit_bias": {3: 0.25},
        "logprobs": 1,
    }  # fmt: skip
    assert params == SamplingParams(**untyped(plain))
    assert {type(getattr(params, name)) for name in ("temperature", "max_tokens", "seed")} == {int, float}
    for wrong in ({"max_tokens": np.float32(3)}, {"top_k": np.bool_(True)}, {"stop_token_ids": np.array([0.5])}):
        with pytest.raises(ValueError, match="invalid sampling parameters"):
            SamplingParams(**untyped(wrong))


def test_what_depends_on_the_model_is_checked_before_anything_runs(llm):
    engine = llm.engine
    for params, message in (
        ({"logit_bias": {512: 1}}, r"logit_bias has the ids \[512\]: the vocabulary has 512 tokens"),
        ({"allowed_token_ids": [5, 600]}, r"allowed_token_ids has the ids \[600\]"),
        ({"bad_words": [[5, 512]]}, r"bad_words has the ids \[512\]"),
        ({"logits_processors": [lambda row: row]}, "needs 1 arguments, and is called with"),
        ({"min_tokens": 300}, "min_tokens=300: must be at most max_tokens=256"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate([PROMPT], SamplingParams(**untyped(params)))
    with pytest.raises(ValueError, match="bad_words has the text 'x', and there is no tokenizer"):
        bad_word_ids(("x",), None)
    assert not engine.has_unfinished
    assert SamplingParams(**untyped({"logit_bias": {"5": 1}, "bad_words": "a", "stop": None})).logit_bias == {5: 1}


def test_bad_words_are_those_within_a_text_too():
    """Of a word, the ids at the beginning of a text and behind a space."""
    tokenizer = Tokenizer(SMALL_CHECKPOINT)
    found = bad_word_ids(("the", " was", (7, 8)), tokenizer)
    assert [tokenizer.decode(word) for word in found[:-1]] == ["the", " the", "was", " was"]
    assert found[-1] == (7, 8)
    assert len(bad_word_ids(("The,",), tokenizer)) >= 1


# Whole texts. Rules that change the tokens of a small vocabulary quickly.


def later(output, row):
    """A function of the output: the token after the newest one is twice as likely, odd tokens never come twice."""
    if output:
        row[(output[-1] + 1) % len(row)] += 2
    for token in output:
        if token % 2:
            row[token] = -torch.inf
    return row


RULES = {
    "none": {},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.7},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": {7: 4.0, 30: -5.0, 100: 3.5}},
    "allowed": {"allowed_token_ids": range(20, 60), "presence_penalty": 1.0, "temperature": 1.5},
    "bad words": {"bad_words": [[i] for i in range(0, 500, 3)]},
    "min tokens": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": range(2, 500, 3)},
    "functions": {"logits_processors": [later], "temperature": 0.8},
    "min-p": {"min_p": 0.4, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.8, "temperature": 1.0},
    "none, sampled": {"temperature": 1.0},
    "all": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_p": 0.05, "temperature": 0.9,
        "logit_bias": {9: 2.0}, "bad_words": [[i] for i in range(1, 500, 7)], "logits_processors": [later],
        "top_p": 0.9,
    },
}  # fmt: skip
COUNT = 10


def params_of(name):
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "seed": 5, "ignore_eos": True} | RULES[name])


JOBS = [
    ([random.Random(i).randrange(2, 512) for _ in range(3 + 11 * i)], params_of(name)) for i, name in enumerate(RULES)
]
OPTIONS = {"device": "cpu", "max_model_len": 240, "progress": False}


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=5, max_num_batched_tokens=60, **OPTIONS)


def by_hand(runner, prompt, params, index):
    """Token after token: logits of the text alone, transformers' processors, penalties in float64, one draw."""
    params, tokens, generator = params.resolved(), list(prompt), make_generator(params, index)
    stops = {*params.stop_token_ids, *runner.eos_token_ids}
    sequence = runner.sequence(prompt)
    for _ in range(params.max_tokens):
        output = tokens[len(prompt) :]
        while sequence.num_pending:
            row = runner.step([(sequence, min(sequence.num_pending, 60))]).rows[0].float()
        if params.allowed_token_ids:
            row = torch.full_like(row, -torch.inf).index_copy(
                1, *(lambda i: (i, row[:, i]))(torch.tensor(params.allowed_token_ids, dtype=torch.int64, device="cpu"))
            )
        if params.bad_words:
            row = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids(output), row)
        row = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(stops))(ids(tokens), row)
        if params.logit_bias:
            row = SequenceBiasLogitsProcessor(untyped({(t,): float(b) for t, b in params.logit_bias.items()}))(
                ids(output), row
            )
        for function in params.logits_processors:
            row = function(output, row[0].clone())[None]
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids(tokens), row).double()
        for token in set(output):
            row[0, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        plain = SamplingParams(temperature=params.temperature, top_p=params.top_p, min_p=params.min_p)
        generator.position = len(output)
        tokens.append(int(sample(row.float(), [plain], [generator])))
        if not params.ignore_eos and tokens[-1] in stops:
            break
        sequence.append(tokens[-1])
    sequence.free()
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(llm):
    return [by_hand(llm.runner, prompt, params, index) for index, (prompt, params) in enumerate(JOBS)]


def texts(engine, preempt=False):
    requests = [engine.add_request(prompt, params, index=i) for i, (prompt, params) in enumerate(JOBS)]
    rng = random.Random(2)
    while engine.has_unfinished:
        engine.step()
        if preempt and engine.stats.steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
    assert leaked(engine) == {}
    assert all(request.rules._counts is None for request in requests), "device memory of requests that ended"
    return [request.completion().token_ids for request in requests]


def named(found, expected):
    return [name for name, tokens, right in zip(RULES, found, expected, strict=True) if tokens != right]


@exhaustive_on_cpu
def test_rules_change_the_texts(llm, expected):
    """Else the other tests would show nothing."""
    kept = [{key: getattr(params, key) for key in ("temperature", "max_tokens", "seed")} for _, params in JOBS]
    plain = llm.generate([prompt for prompt, _ in JOBS], [SamplingParams(**each, ignore_eos=True) for each in kept])
    for name, without, tokens in zip(RULES, plain, expected, strict=True):
        assert (without.token_ids[: len(tokens)] == tokens) == name.startswith("none"), name


def test_texts_are_those_by_hand(llm, expected):
    """Requests with and without rules in one batch, greedy and sampled."""
    assert named(texts(llm.engine), expected) == []


BUCKETS_AND_PREEMPTIONS = [(False, False), (False, True), (True, False), (True, True)]


@exhaustive_on_cpu
@pytest.mark.parametrize(("buckets", "preempt"), tiered(BUCKETS_AND_PREEMPTIONS, [(False, True)]))
def test_texts_with_drafts_are_the_same(folder, expected, monkeypatch, buckets, preempt):
    """Drafts of which three in five are right, each row with its own history; also after a request lost its caches."""
    runner = ModelRunner.from_pretrained(folder, max_num_seqs=5, max_num_batched_tokens=60, **OPTIONS)
    if buckets:
        use_buckets(runner)
    known = [prompt + tokens for (prompt, _), tokens in zip(JOBS, expected, strict=True)]
    draft_from(monkeypatch, runner, known, right=lambda position: position * 7 % 5 < 3)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    assert named(texts(engine, preempt), expected) == []
    assert 0.3 < engine.stats.acceptance_rate < 0.9


def test_requests_that_ask_for_nothing_stay_on_the_device(folder, monkeypatch):
    """Greedy steps over persistent tensors choose their tokens themselves, unless a request of the batch has rules."""
    runner = ModelRunner.from_pretrained(folder, max_num_seqs=5, max_num_batched_tokens=60, **OPTIONS)
    use_buckets(runner)
    engine, chosen = Engine(runner), []
    step = runner.step
    monkeypatch.setattr(runner, "step", lambda batch, options: chosen.append(options.greedy) or step(batch, options))
    for params, on_device in (
        (params_of("none"), [True] * 4),
        (replace(params_of("none"), min_tokens=3), [False] * 3 + [True]),
        (params_of("bias"), [False] * 4),
    ):
        chosen.clear()
        engine.add_request(PROMPT, replace(params, max_tokens=4))
        finish(engine)
        assert chosen == on_device


def test_a_function_that_fails_ends_its_request_alone(llm, monkeypatch):
    def broken(output, row):
        if len(output) == 2:
            raise KeyError("no such word")
        return row

    asked = [broken, lambda output, row: row[:-1], lambda output, row: None, lambda output, row: row * -torch.inf]
    params = [SamplingParams(max_tokens=5, seed=1, ignore_eos=True, logits_processors=[f]) for f in asked]
    params += [SamplingParams(allowed_token_ids=[5], bad_words=[[5]]), SamplingParams(max_tokens=5, ignore_eos=True)]
    found = llm.generate([PROMPT] * len(params), params)
    messages = [completion.error for completion in found]
    assert messages[0] == "a logits processor failed: KeyError: 'no such word'"
    assert len(found[0].token_ids) == 2
    assert "it returned shape [511], and the row has the shape [512]" in messages[1]
    assert "it returned None" in messages[2]
    assert messages[4] == NOTHING_LEFT
    assert messages[5] is None
    assert len(found[5].token_ids) == 5


def test_drafts_that_fail_are_only_rejected(folder, expected, monkeypatch):
    """A function that fails after a wrong draft, which does not come about without drafts."""
    place = list(RULES).index("functions")
    prompt, params = JOBS[place]
    right = expected[place]

    def strict(output, row):
        if output != right[: len(output)]:
            raise RuntimeError("not of this text")
        return later(output, row)

    runner = ModelRunner.from_pretrained(folder, max_num_seqs=1, max_num_batched_tokens=60, **OPTIONS)
    draft_from(monkeypatch, runner, [prompt + right], right=lambda position: position % 4 > 1)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    request = engine.add_request(prompt, replace(params, logits_processors=[strict]), index=place)
    finish(engine)
    assert request.error is None
    assert request.completion().token_ids == right
    assert 0 < engine.stats.acceptance_rate < 1
