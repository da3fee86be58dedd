"""Speculative decoding: the same tokens in fewer steps, and draft caches that are those of a teacher-forced run.

Drafts of random weights are never right, so `draft_from` puts known continuations in place of the drafter's. The MTP
layer, or the DSpark stages, still run and write their caches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from deepseek_attn import LLM, ModelConfig, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.drafting import DraftRows
from deepseek_attn.runner.graph_steps import CapturedStep, DecodeStep
from deepseek_attn.runner.graphs import DecodeGraphs, DraftTokens
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions
from tests.engine.workload import PREEMPTED, alone, differences, leaked, make_jobs, together, variants
from tests.runner.test_revisions import DSPARK_KEYS
from tests.support.requests import greedy, prompt
from tests.support.small_models import two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped
from tests.support.v41_cases import shallow

LONGEST = 300
TOLERANCE = 2e-5  # of the largest logit, between a step's rows and the same rows in steps of other sizes


def config_of(preset: str) -> AnyConfig:
    """A small model like the preset, or V4 with a DSpark drafter."""
    if preset == "tiny_v41":
        return shallow()
    if preset == "tiny_v32":
        return ModelConfig.from_preset(preset).replace(num_hidden_layers=2)
    tiny = two_layers()
    if preset == "tiny":
        return tiny
    schedule = {"compress_ratios": [*tiny.compress_ratios, 0, 0], "dspark_target_layer_ids": [0, 1]}
    return tiny.replace(**DSPARK_KEYS | schedule)


@lru_cache(maxsize=2)
def workload(preset: str):
    config = config_of(preset)
    runner = ModelRunner.from_config(config, device="cpu", numerics="exact", max_num_seqs=1, max_model_len=LONGEST + 64)
    jobs = make_jobs(10, LONGEST, config.vocab_size, seed=25)  # in which prompts share a block
    return config, jobs, alone(runner, jobs)


def texts_of(texts, next_ids, meta, last_rows):
    """For each request of `CapturedStep.draft`, which of ``texts`` it computes, and the place of its newest token."""
    per_request = len(next_ids) // len(last_rows)
    for request, row in enumerate(last_rows.tolist()):
        first = request * per_request
        chosen, start = next_ids[first : row + 1].tolist(), int(meta.positions[first]) + 1
        newest = start + len(chosen) - 1
        yield next((t for t in texts if meta.is_valid_token[first] and t[start : newest + 1] == chosen), []), newest


def draft_from(monkeypatch, runner, texts, right=lambda position: True):
    """Drafts are the tokens of ``texts`` where ``right(position)``, and wrong tokens elsewhere.

    Whether the host asks for them or a step over persistent tensors makes them itself.
    """
    draft, draft_in_step = runner.draft, CapturedStep.draft

    def token(text, position):
        if position >= len(text):
            return 1
        return text[position] if right(position) else (text[position] + 1) % runner.config.vocab_size

    def known(sequence, position):
        return token(next((t for t in texts if t[: len(sequence.token_ids)] == sequence.token_ids), []), position)

    def replaced_in_step(step, hidden_states, next_ids, meta, last_rows, next_starts):
        found, logits = draft_in_step(step, hidden_states, next_ids, meta, last_rows, next_starts)
        for request, (text, newest) in enumerate(texts_of(texts, next_ids, meta, last_rows)):
            for i, drafts in enumerate(found):
                drafts[request] = token(text, newest + 1 + i)
        return found, logits

    def replaced(batch, num_drafts=1):
        found = draft(batch, num_drafts)
        assert found.tokens.shape == (len(batch), num_drafts)
        tokens = [
            [known(rows.sequence, rows.start + len(rows.next_ids) + 1 + i) for i in range(num_drafts)] for rows in batch
        ]
        return DraftTokens(torch.tensor(tokens), found.logits)

    monkeypatch.setattr(runner, "draft", replaced)
    monkeypatch.setattr(CapturedStep, "draft", replaced_in_step)


def record_drafts(monkeypatch, runner, texts=()):
    """Collects (tokens, logits) of the first draft of every step: the MTP layer's logits after those tokens.

    Those within steps over persistent tensors are found where they compute one of ``texts``.
    """
    draft, draft_in_step, found = runner.draft, CapturedStep.draft, []

    def recorded_in_step(step, hidden_states, next_ids, meta, last_rows, next_starts):
        drafts, logits = draft_in_step(step, hidden_states, next_ids, meta, last_rows, next_starts)
        for (text, newest), row in zip(texts_of(texts, next_ids, meta, last_rows), logits, strict=True):
            if text and isinstance(step, DecodeStep):
                found.append((text[: newest + 1], row.clone()))
        return drafts, logits

    monkeypatch.setattr(CapturedStep, "draft", recorded_in_step)

    def recorded(batch, num_drafts=1):
        drafts = draft(batch, num_drafts)
        for rows, logits in zip(batch, drafts.logits if drafts.tokens.shape[1] else [], strict=False):
            sequence, start = rows.sequence, rows.start
            assert start + len(rows.next_ids) == sequence.num_computed
            found.append(([*sequence.token_ids[: start + 1], *rows.next_ids], logits.clone()))
        return drafts

    monkeypatch.setattr(runner, "draft", recorded)
    return found


V4_CASES = [("batched", 1), ("chunks", 2), ("prefixes", 2), ("pressure", 3), ("preempted", 2), ("everything", 3)]
# everything has all of them, which models with a DSpark drafter share
CASES = [("tiny", *case) for case in V4_CASES[2:]] + [("tiny_v32", "everything", 3)]
CASES += [("tiny_dspark", *case) for case in (V4_CASES[0], V4_CASES[3], V4_CASES[4])]
CASES += [("tiny_v41", *case) for case in (V4_CASES[1], V4_CASES[2], V4_CASES[5])]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "variant", "drafts"), CASES)
def test_every_request_is_what_it_is_without(preset, variant, drafts, monkeypatch):
    """Greedy and sampled requests, with drafts of which three in five are right; the MTP rows behind them."""
    config, jobs, expected = workload(preset)
    options = variants(config, LONGEST)[variant]
    runner = ModelRunner.from_config(config, device="cpu", numerics="exact", **options)
    drafted = record_drafts(monkeypatch, runner)
    texts = [job.prompt + tokens for job, tokens in zip(jobs, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, right=lambda position: position * 7 % 5 < 3)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts))
    requests = together(engine, jobs, preempt=variant in PREEMPTED)
    assert differences(requests, jobs, expected) == []
    assert leaked(engine) == {}
    assert 0.3 < engine.stats.acceptance_rate < 0.9
    if variant in PREEMPTED:
        assert engine.stats.preempted > 3
    if "max_snapshots" in options:
        assert engine.stats.cached_tokens > 0
    assert_teacher_forced(preset, drafted)


# (preset, drafts, whether steps run over persistent tensors, which drafts are right, tokens of the first reply)
FOLLOWED = [
    ("tiny", 2, False, lambda position: position % 3, 60),  # a draft after the edge of a block is accepted
    ("tiny", 2, True, lambda position: position % 3, 60),
    ("tiny", 1, False, lambda position: False, 60),  # no step computes more than the edge
    ("tiny", 3, False, lambda position: True, 29),  # the last step passes the edge
    ("tiny_v32", 2, False, lambda position: position % 3, 60),
    ("tiny_dspark", 2, False, lambda position: position % 3, 60),
    ("tiny_v41", 2, False, lambda position: position % 3, 60),
]


@exhaustive_on_cpu
@pytest.mark.parametrize(
    ("preset", "drafts", "persistent", "right", "count"),
    tiered(FOLLOWED, [FOLLOWED[0]], quick_on_gpu=[FOLLOWED[3], FOLLOWED[6]]),
)
@pytest.mark.parametrize("preempted", tiered([False, True], [False]))
def test_the_next_turn_starts_from_generated_tokens(preset, drafts, persistent, right, count, preempted, monkeypatch):
    """With drafts as many of its tokens come from the prefix cache as without, and draft caches are as if computed."""
    config = config_of(preset)
    options = {"device": "cpu", "numerics": "exact", "max_num_seqs": 2, "max_model_len": 200, "max_snapshots": 4}
    plain, runner = (ModelRunner.from_config(config, **options) for _ in range(2))
    if persistent:
        runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, capture=False)
    first = prompt(101)
    engines = Engine(plain), Engine(runner, decoder=MTPSpeculation(runner, drafts))
    expected = run_to_end(engines[0], first, count)
    turn = [*first, *expected.token_ids, *prompt(9, seed=1)]
    answer = run_to_end(engines[0], turn, 8)
    assert answer.cached_tokens >= 128
    text = [*turn, *answer.token_ids]
    drafted = record_drafts(monkeypatch, runner, [text])
    draft_from(monkeypatch, runner, [text], right)
    assert run_to_end(engines[1], first, count, preempted) == expected
    assert run_to_end(engines[1], turn, 8) == answer
    after = [(tokens, logits) for tokens, logits in drafted if len(tokens) > len(turn)]
    assert after
    for tokens, logits in after:
        truth = block_logits(plain, tokens) if config.dspark else plain.score_mtp([tokens])[1][0][-1]
        assert float((logits - truth).abs().max()) < TOLERANCE * float(truth.abs().max())


def run_to_end(engine: Engine, tokens: list[int], count: int, preempted: bool = False) -> Completion:
    """The completion of a prompt; ``preempted``: it loses its caches in the middle of its reply."""
    request = engine.add_request(tokens, greedy(count))
    while not request.finished:
        engine.step()
        if preempted and not request.preemptions and request.num_generated > count // 2:
            engine.scheduler.preempt(request, engine.last_step)
    return request.completion()


def assert_teacher_forced(preset, drafted):
    """A sample of the MTP layer's logits against a fresh sequence of the same tokens."""
    runner = scorer(preset)
    chosen = [pair for pair in drafted if len(pair[0]) > 2][:: max(1, len(drafted) // 12)]
    assert len(chosen) > 8
    for tokens, logits in chosen:
        truth = block_logits(runner, tokens) if runner.config.dspark else runner.score_mtp([tokens])[1][0][-1]
        assert float((logits - truth).abs().max()) < TOLERANCE * float(truth.abs().max())


def block_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits of the first draft after ``tokens`` by a DSpark drafter, in a sequence of its own."""
    sequence = runner.sequence(tokens)
    output = runner.step([(sequence, len(tokens) - 1)], StepOptions(all_logits=True, hidden_states=True, mtp=True))
    runner.manager.reserve([(sequence.cache, required(runner.drafter).rows_past_end(1))])
    drafts = runner.draft([DraftRows(sequence, 0, required(output.hidden_states)[0], tokens[1:])])
    sequence.free()
    return drafts.logits[0]


@lru_cache(maxsize=2)
def scorer(preset: str) -> ModelRunner:
    config = config_of(preset)
    return ModelRunner.from_config(config, device="cpu", numerics="exact", max_num_seqs=1, max_model_len=LONGEST + 64)


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "progress": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plain(directory):
    return LLM(directory, **OPTIONS)


@pytest.fixture(scope="module")
def speculating(directory):
    return LLM(directory, speculate=3, **OPTIONS)


@pytest.fixture
def llm(speculating):
    """Three drafts per step, by an engine of its own; every page is back when a test is over."""
    speculating.engine = Engine(speculating.runner, speculating.tokenizer, MTPSpeculation(speculating.runner, 3))
    before = speculating.runner.manager.available_pages()
    yield speculating
    assert speculating.runner.manager.available_pages() == before


def test_right_drafts_are_all_accepted(llm, plain, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(25))[0].token_ids
    draft_from(monkeypatch, llm.runner, [prompt(30) + expected])
    assert llm.generate([prompt(30)], greedy(25))[0].token_ids == expected
    stats = llm.engine.stats
    # the prompt gives one token, then each step gives four
    assert (stats.steps, stats.verified, stats.drafted, stats.accepted) == (1 + 6, 6, 18, 18)
    assert (stats.acceptance_rate, stats.tokens_per_step, stats.generated) == (1.0, 4.0, 25)


def test_wrong_drafts_cost_nothing_but_work(llm, plain, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(9))[0].token_ids
    draft_from(monkeypatch, llm.runner, [prompt(30) + expected], right=lambda position: False)
    assert llm.generate([prompt(30)], greedy(9))[0].token_ids == expected
    stats = llm.engine.stats
    # as many steps as without; two, one and no draft fit before max_tokens in the last three
    assert (stats.steps, stats.verified, stats.drafted, stats.accepted) == (9, 7, 5 * 3 + 2 + 1, 0)
    assert (stats.acceptance_rate, stats.tokens_per_step, stats.generated) == (0.0, 1.0, 9)


@pytest.mark.parametrize("length", tiered([1, 2, 3, 4, 5, 41, 43, 83], [4]))
def test_drafts_after_prompts_that_end_in_few_tokens(llm, plain, length, monkeypatch):
    """The last tokens of a prompt, as few as a verification has, are not taken for one."""
    expected = plain.generate([prompt(length)], greedy(8))[0].token_ids
    drafted = record_drafts(monkeypatch, llm.runner)
    draft_from(monkeypatch, llm.runner, [prompt(length) + expected], right=lambda position: position % 3)
    assert llm.generate([prompt(length)], greedy(8))[0].token_ids == expected
    assert len(drafted) >= 3
    for tokens, logits in drafted[::2]:
        truth = plain.runner.score_mtp([tokens])[1][0][-1]
        assert float((logits - truth).abs().max()) < TOLERANCE * float(truth.abs().max())


def use_persistent_tensors(llm, monkeypatch) -> DecodeGraphs:
    runner = llm.runner
    graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, capture=False)
    monkeypatch.setattr(runner, "graphs", graphs)
    return graphs


@pytest.mark.exhaustive
@pytest.mark.parametrize("right", [2, 3, 5])
def test_decode_steps_over_persistent_tensors(llm, plain, right, monkeypatch):
    """What CUDA graphs replay, run eagerly: verifications of one to four tokens, padded to the longest of a step."""
    runner, graphs = llm.runner, use_persistent_tensors(llm, monkeypatch)
    prompts = [prompt(n, n) for n in (60, 3, 41)]
    expected = plain.generate(prompts, greedy(20))
    texts = [p + c.token_ids for p, c in zip(prompts, expected, strict=True)]
    drafted = record_drafts(monkeypatch, runner, texts)
    draft_from(monkeypatch, runner, texts, right=lambda position: position % right)
    assert llm.generate(prompts, greedy(20)) == expected
    assert {size.num_drafts for size in graphs._decode_steps} == {3}
    assert graphs._draft_steps
    assert len(drafted) > 20
    for tokens, logits in drafted[::4]:
        truth = plain.runner.score_mtp([tokens])[1][0][-1]
        assert float((logits - truth).abs().max()) < TOLERANCE * float(truth.abs().max())


@exhaustive_on_cpu
def test_progress_counts_tokens_that_stay(llm, plain, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(25))[0].token_ids
    draft_from(monkeypatch, llm.runner, [prompt(30) + expected], right=lambda position: position % 3)
    outputs = [output for step in llm.engine.run([llm.engine.add_request(prompt(30), greedy(25))]) for output in step]
    assert sum(output.computed for output in outputs) == 30 + 25 - 1
    assert [token for output in outputs for token in output.token_ids] == expected


@pytest.mark.parametrize("drafts", tiered([1, 2, 3], [2]))
def test_sampled_tokens_are_those_of_the_seed(directory, plain, drafts, monkeypatch):
    """The same random number meets the same logits, so what is drawn, and with it its distribution, is the same."""
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, seed=seed, max_tokens=14, ignore_eos=True)
        for seed, (t, k, p) in enumerate([(1, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.9), (0.5, 40, 0.8), (2, 0, 1.0)])
    ]
    prompts = [prompt(n, n) for n in (3, 50, 1, 2, 17)]
    expected = [completion.token_ids for completion in plain.generate(prompts, params)]
    llm = LLM(directory, speculate=drafts, **OPTIONS)
    texts = [ids + tokens for ids, tokens in zip(prompts, expected, strict=True)]
    draft_from(monkeypatch, llm.runner, texts, right=lambda position: position % 4)
    assert [completion.token_ids for completion in llm.generate(prompts, params)] == expected
    assert 0.4 < llm.engine.stats.acceptance_rate < 1


@pytest.mark.parametrize("place", tiered(range(1, 9), [8]))
def test_a_stop_token_among_accepted_drafts(llm, plain, place, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(12))[0].token_ids
    draft_from(monkeypatch, llm.runner, [prompt(30) + expected])
    [completion] = llm.generate([prompt(30)], greedy(12, stop_token_ids=(expected[place],)))
    assert completion.token_ids == expected[: expected.index(expected[place]) + 1]
    assert completion.finish_reason == "stop"
    assert llm.engine.stats.generated == len(completion.token_ids)


@exhaustive_on_cpu
def test_a_stop_string_among_accepted_drafts(llm, plain, monkeypatch):
    [whole] = plain.generate("Grüße, 世界", greedy(24))
    stop = whole.text[5:7]
    expected = plain.generate("Grüße, 世界", greedy(24, stop=(stop,)))[0]
    draft_from(monkeypatch, llm.runner, [whole.prompt_token_ids + whole.token_ids])
    [completion] = llm.generate("Grüße, 世界", greedy(24, stop=(stop,)))
    assert completion == expected
    assert completion.finish_reason == "stop"
    assert "".join(llm.stream("Grüße, 世界", greedy(24, stop=(stop,)))) == expected.text


@pytest.mark.parametrize("count", tiered(range(1, 10), [5]))
def test_max_tokens_anywhere(llm, plain, count, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(12))[0].token_ids
    draft_from(monkeypatch, llm.runner, [prompt(30) + expected])
    [completion] = llm.generate([prompt(30)], greedy(count))
    assert (completion.token_ids, completion.finish_reason) == (expected[:count], "length")
    assert llm.engine.stats.steps == 1 + -(-(count - 1) // 4)


@pytest.mark.parametrize("persistent", tiered([False, True], [True]))
@pytest.mark.parametrize("length", tiered([189, *range(193, 200)], [196]))
def test_max_model_len_anywhere(llm, plain, length, persistent, monkeypatch):
    expected = plain.generate([prompt(length)], greedy(50))[0]
    if persistent:
        use_persistent_tensors(llm, monkeypatch)
    draft_from(monkeypatch, llm.runner, [prompt(length) + expected.token_ids + [1] * 9])
    assert llm.generate([prompt(length)], greedy(50)) == [expected]
    assert length + len(expected.token_ids) == OPTIONS["max_model_len"]


@pytest.mark.parametrize("broken", tiered(range(29, 37), [31]))
def test_broken_logits_fail_one_request_where_they_would_without(llm, plain, broken, monkeypatch):
    """The row at a position is NaN: all tokens before it come out, whether it was a draft's row or not."""
    lengths = (30, 12, 21)
    prompts = [prompt(n, n) for n in lengths]
    expected = plain.generate(prompts, greedy(12))
    draft_from(monkeypatch, llm.runner, [p + c.token_ids for p, c in zip(prompts, expected, strict=True)])
    step = llm.runner.step

    def poisoned(batch, options):
        output = step(batch, options)
        for (sequence, _), logits in zip(batch, output.logits, strict=True):
            row = broken - sequence.num_computed
            if sequence.token_ids[:30] == prompts[0] and -len(logits) <= row < 0:
                logits[row] = float("nan")
        return output

    monkeypatch.setattr(llm.runner, "step", poisoned)
    completions = llm.generate(prompts, greedy(12))
    assert [c.finish_reason for c in completions] == ["error", "length", "length"]
    assert completions[0].token_ids == expected[0].token_ids[: broken - 29]
    assert "NaN" in completions[0].error
    assert completions[1:] == expected[1:]


def test_no_memory_for_drafts(llm, plain, monkeypatch):
    expected = plain.generate([prompt(30)], greedy(8))

    def fail(batch, drafts):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(llm.runner, "draft", fail)
    assert llm.generate([prompt(30)], greedy(8)) == expected
    assert llm.engine.stats.drafted == 0


@pytest.mark.parametrize("limit", tiered([1, 2, 3], [2]))
def test_steps_too_small_for_drafts(llm, plain, limit, monkeypatch):
    """Memory runs out in every step of more than ``limit`` tokens, when drafts are proposed already."""
    prompts = [prompt(30), prompt(2)]
    expected = plain.generate(prompts, greedy(9))
    draft_from(monkeypatch, llm.runner, [p + c.token_ids for p, c in zip(prompts, expected, strict=True)])
    step, calls = llm.runner.step, []

    def small(batch, options):
        calls.append(batch)
        if len(calls) > 2 and sum(n for _, n in batch) > limit:
            raise torch.OutOfMemoryError("full")
        return step(batch, options)

    monkeypatch.setattr(llm.runner, "step", small)
    assert llm.generate(prompts, greedy(9)) == expected


def test_a_step_that_fails_is_repeated_one_by_one(llm, plain, monkeypatch):
    prompts = [prompt(30), prompt(5, 1)]
    expected = plain.generate(prompts, greedy(12))
    draft_from(monkeypatch, llm.runner, [p + c.token_ids for p, c in zip(prompts, expected, strict=True)])
    step, calls = llm.runner.step, []

    def fails_together(batch, options):
        calls.append(batch)
        output = step(batch, options) if len(calls) != 3 else None
        if output is None:
            raise RuntimeError("the third step")
        return output

    monkeypatch.setattr(llm.runner, "step", fails_together)
    assert llm.generate(prompts, greedy(12)) == expected
    assert llm.engine.stats.acceptance_rate == 1


def test_what_cannot_be_speculated(directory, plain):
    with pytest.raises(ValueError, match="0 drafts per step: supported are 1 to 15"):
        MTPSpeculation(plain.runner, 0)
    with pytest.raises(ValueError, match="16 drafts per step: supported are 1 to 15"):
        LLM(directory, speculate=16, **OPTIONS)
    with pytest.raises(ValueError, match="4 drafts per step: supported are 1 to 3"):
        LLM(directory, speculate=4, **untyped(OPTIONS | {"max_num_batched_tokens": 4}))
    with pytest.raises(ValueError, match="need an MTP layer"):
        LLM(directory, speculate=1, layers=[0], **OPTIONS)
