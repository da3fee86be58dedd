"""Steps that verify, accept and draft on the device; the next one is launched before the host has read any of it.

The same tokens and the same acceptance as where the host accepts and drafts, in one run per step. Steps run eagerly
over persistent tensors, as CUDA graphs replay them; `draft_from` decides which drafts are right.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.prefix import PrefixCache
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.graph_steps import CapturedStep, DecodeStep
from deepseek_attn.runner.graphs import DecodeGraphs
from tests.engine.test_speculation import config_of, draft_from
from tests.engine.workload import alone, differences, leaked, make_jobs, together, use_buckets, variants
from tests.support.invariance_cases import MIXED, SAME
from tests.support.requests import finish, greedy, prompt
from tests.support.small_models import assert_close, small_config, small_runner, two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

OPTIONS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 5, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def machine():
    return ModelRunner.from_config(two_layers(), device="cpu", max_snapshots=4, **OPTIONS)


@pytest.fixture
def runner(machine, monkeypatch):
    """A runner with persistent tensors; every page is back when a test is over."""
    before = machine.manager.available_pages()
    graphs = DecodeGraphs(machine.model, machine.layout, machine.device, batches=[2, 5], capture=False)
    monkeypatch.setattr(machine, "graphs", graphs)
    monkeypatch.setattr(machine, "prefixes", None)
    monkeypatch.setattr(machine, "decode_query_len", 1)
    yield machine
    assert machine.manager.available_pages() == before


@pytest.fixture
def runs(monkeypatch):
    """Runs of steps that make drafts, in order."""
    found, run = [], CapturedStep.run

    def counted(step):
        if isinstance(step, DecodeStep) and step.size.num_drafts:
            found.append(step)
        run(step)

    monkeypatch.setattr(CapturedStep, "run", counted)
    return found


def generate(runner, params, drafts=0, prompts=None):
    """Tokens of each request, and how many drafts of each verification were right, in order."""
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    accept, accepted = engine.decoder.accept, []

    def recorded(work, output):
        found = accept(work, output)
        accepted.extend(found.verified.values())
        return found

    engine.decoder.accept = recorded
    requests = [engine.add_request(p, q) for p, q in zip(prompts or PROMPTS, params, strict=True)]
    finish(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.completion().token_ids for request in requests], accepted


PROMPTS = [prompt(n, n) for n in (1, 62, 58, 127)]
COUNTS = [17, 21, 36, 23]
WRONG = (0, 2, 5, 9, 14, 20, 27, 35)  # of 36 positions: between them are runs of 0 to 7 right drafts
RIGHT = {  # which drafts are right, by position
    "all": lambda position: True,
    "none": lambda position: False,
    "some": lambda position: position % 36 not in WRONG,
}


@pytest.fixture(scope="module")
def expected(machine):
    """What the prompts lead to without speculation."""
    return generate(machine, [greedy(36)] * 4)[0]


def cut(expected, counts=COUNTS):
    return [tokens[:n] for tokens, n in zip(expected, counts, strict=True)]


ACCEPTED = [(1, "all"), (1, "none"), (2, "some"), (3, "all"), (3, "none"), (7, "all"), (7, "some"), (3, "some")]


@pytest.mark.parametrize(("drafts", "right"), tiered(ACCEPTED, [(3, "some")]))
def test_device_and_host_accept_the_same(runner, runs, expected, drafts, right, monkeypatch):
    """One run per step, whatever is right; texts, drafts and their fates are those of the eager path."""
    texts = [p + tokens for p, tokens in zip(PROMPTS, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, RIGHT[right])
    params = [greedy(n) for n in COUNTS]
    steps, step = [], runner.step
    monkeypatch.setattr(runner, "step", lambda *args: (steps.append(args[1].drafts), step(*args))[1])
    found, accepted = generate(runner, params, drafts)
    assert found == cut(expected)
    assert Counter(steps) == {0: 1, drafts: len(steps) - 1}  # 0: the prompts
    ended_together = len({len(tokens) for tokens in found}) == 1
    assert len(runs) - (len(steps) - 1) <= (0 if ended_together else 4)  # at most one for nothing per request that ends
    counts = {count for number, count in accepted if number == drafts}
    if right == "some":
        assert counts >= {*range(min(drafts, 3) + 1), drafts}
    else:
        assert counts == {drafts if right == "all" else 0}
    runner.graphs = None
    assert generate(runner, params, drafts) == (found, accepted)


def test_the_next_step_is_launched_early(runner, runs, expected, monkeypatch):
    draft_from(monkeypatch, runner, [PROMPTS[2] + expected[2]], RIGHT["some"])
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    request = engine.add_request(PROMPTS[2], greedy(30))
    engine.step()  # the prompt; the host drafts
    assert not runner.next_step_launched
    for ran in range(2, 8):
        engine.step()
        assert len(runs) == ran
        assert runner.next_step_launched
    finish(engine)
    assert request.completion().token_ids == expected[2][:30]
    assert len(runs) == engine.stats.verified + 1  # the last one was launched for nothing


def test_results_are_read_while_the_next_step_runs(runner, runs, expected, monkeypatch):
    """The host asks for nothing of a step before the one after it was launched."""
    draft_from(monkeypatch, runner, [PROMPTS[2] + expected[2]])
    engine = Engine(runner, decoder=MTPSpeculation(runner, 2))
    engine.add_request(PROMPTS[2], greedy(30))
    engine.step()
    engine.step()
    step, launched = runner.step, []

    def watched(batch, options):
        output = step(batch, options)
        launched.append(len(runs))
        for name in ("tokens", "drafts"):
            read = getattr(output, name)
            setattr(
                output, name, lambda read=read: (launched.append((len(runs), runner.next_step_launched)), read())[1]
            )
        return output

    monkeypatch.setattr(runner, "step", watched)
    for ran in (3, 4, 5):
        launched.clear()
        engine.step()
        assert launched == [ran, (ran, True), (ran, True)]
    finish(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_request_that_stops_leaves_the_others(runner, runs, expected, drafts, monkeypatch):
    texts = [p + tokens for p, tokens in zip(PROMPTS, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, RIGHT["some"])
    stop = next(token for i, token in enumerate(expected[1]) if i > 5 and token not in expected[1][:i])
    end = expected[1].index(stop) + 1
    params = [greedy(16), greedy(16, stop_token_ids=(stop,)), greedy(16), greedy(16)]
    found, accepted = generate(runner, params, drafts)
    assert found == cut(expected, [16, end, 16, 16])
    ran = len(runs)
    engine_steps = len(runs)
    runs.clear()
    runner.graphs = None
    assert generate(runner, params, drafts) == (found, accepted)
    assert not runs
    assert engine_steps == ran < 16


@pytest.mark.exhaustive
def test_others_come_and_go(runner, runs, expected, monkeypatch):
    texts = [p + tokens for p, tokens in zip(PROMPTS, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, RIGHT["some"])
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    first = [engine.add_request(p, greedy(36)) for p in PROMPTS[:2]]
    for _ in range(5):
        engine.step()
    ran = len(runs)
    second = [engine.add_request(p, greedy(16)) for p in PROMPTS[2:]]
    engine.step()
    assert len(runs) == ran  # the step that was launched early is used
    assert (engine.last_step.decodes, engine.last_step.prefills) == (2, 0)
    engine.step()
    assert engine.last_step.prefills == 2
    for _ in range(3):
        engine.step()
    assert runner.next_step_launched
    engine.cancel(first[0])
    finish(engine)
    found = [request.completion().token_ids for request in first + second]
    assert found[1:] == cut(expected[1:], [36, 16, 16])
    assert 5 < len(found[0]) < 36
    assert found[0] == expected[0][: len(found[0])]


@pytest.mark.exhaustive
def test_one_that_samples_among_greedy_ones(runner, runs, expected, monkeypatch):
    """The host chooses for all while it is there; then steps accept on the device again."""
    draft_from(monkeypatch, runner, [p + t for p, t in zip(PROMPTS, expected, strict=True)], RIGHT["some"])
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=3, ignore_eos=True)
    params = [greedy(16), sampled, greedy(20), greedy(20)]
    found, _ = generate(runner, params, 3)
    assert runs
    assert [found[0], *found[2:]] == [expected[0][:16], *cut(expected[2:], [20, 20])]
    runs.clear()
    runner.graphs = None
    assert generate(runner, params, 3)[0] == found
    assert generate(runner, params)[0] == found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("drafts", "right"), [*product([2, 7], RIGHT)])
def test_max_model_len(runner, drafts, right, monkeypatch):
    """Lengths at which no row and no draft fits any more, for each distance to them."""
    prompts = [prompt(n, n) for n in (288, 289, 291, 294)]
    expected, _ = generate(runner, [greedy(50)] * 4, prompts=prompts)
    assert {len(p + t) for p, t in zip(prompts, expected, strict=True)} == {300}
    texts = [p + tokens for p, tokens in zip(prompts, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, RIGHT[right])
    assert generate(runner, [greedy(50)] * 4, drafts, prompts)[0] == expected


@exhaustive_on_cpu
def test_no_page_left_for_the_next_step(runner, runs, expected, monkeypatch):
    """Room for each step, and never for the one after it."""
    draft_from(monkeypatch, runner, [p + t for p, t in zip(PROMPTS, expected, strict=True)], RIGHT["some"])
    launch = runner._launch_next_step

    def full(batch):
        raise OutOfPages("full")

    def tight(run, batch):
        with monkeypatch.context() as patch:
            patch.setattr(runner.manager, "reserve", full)
            launch(run, batch)
        assert not runner.next_step_launched

    monkeypatch.setattr(runner, "_launch_next_step", tight)
    assert generate(runner, [greedy(n) for n in COUNTS], 3)[0] == cut(expected)


def test_drafts_are_dropped_before_a_request_loses_its_caches(runner, runs, expected, monkeypatch):
    reserve, refused = runner.manager.reserve, []

    def tight(batch):
        if any(n > 1 and cache.num_tokens > 130 for cache, n in batch):
            refused.append(batch)
            raise OutOfPages("no page for drafts")
        reserve(batch)

    draft_from(monkeypatch, runner, [p + t for p, t in zip(PROMPTS, expected, strict=True)])
    monkeypatch.setattr(runner.manager, "reserve", tight)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    requests = [engine.add_request(p, greedy(20)) for p in PROMPTS]
    finish(engine)
    assert [r.completion().token_ids for r in requests] == cut(expected, [20] * 4)
    assert refused
    assert engine.stats.preempted == 0


@pytest.mark.exhaustive
def test_prompts_that_start_from_snapshots(runner, runs, monkeypatch):
    prompts = [prompt(n, n) for n in (1, 120, 40, 140)]
    params = [greedy(n) for n in (10, 17, 20, 14)]  # one goes past a block of 128 tokens, and one begins with a block
    expected, _ = generate(runner, params, prompts=prompts)
    draft_from(monkeypatch, runner, [p + t for p, t in zip(prompts, expected, strict=True)], RIGHT["some"])
    monkeypatch.setattr(runner, "prefixes", PrefixCache(runner.manager))
    for _ in range(2):
        assert generate(runner, params, 3, prompts)[0] == expected
    assert len(runner.prefixes)
    runner.prefixes.clear()


@exhaustive_on_cpu
@pytest.mark.parametrize("call", tiered(range(3, 12), [7]))
def test_broken_logits_fail_alone(runner, expected, call, monkeypatch):
    """A step's row of one request is NaN, the first one or that of a draft: its tokens before it come out."""
    draft_from(monkeypatch, runner, [p + t for p, t in zip(PROMPTS, expected, strict=True)])
    logits, calls = runner.model.logits, []

    def broken(states):
        found = logits(states)
        calls.append(len(found))
        if len(calls) == call:
            found[2 * 4 + call % 4] = float("nan")
        return found

    monkeypatch.setattr(runner.model, "logits", broken)
    engine = Engine(runner, decoder=MTPSpeculation(runner, 3))
    requests = [engine.add_request(p, greedy(36)) for p in PROMPTS]
    finish(engine)
    found = [r.completion().token_ids for r in requests]
    assert found[:2] + found[3:] == cut(expected[:2] + expected[3:], [36] * 3)
    assert found[2] == expected[2][: len(found[2])]
    if call % 4:  # computed again, with nothing broken: the row was a draft's
        assert len(found[2]) == 36
    else:
        assert "NaN" in required(requests[2].error)
        assert len(found[2]) < 36


CHANGES = {
    "nothing": lambda sequence: None,
    "another token": lambda sequence: sequence.token_ids.__setitem__(-2, (sequence.token_ids[-2] + 1) % 200),
    "fewer drafts": lambda sequence: sequence.token_ids.pop(),
    "truncate": lambda sequence: sequence.truncate(sequence.num_computed - 2),
    "the same tokens earlier": lambda sequence: earlier(sequence),
    "free": lambda sequence: sequence.free(),
    "fork": lambda sequence: sequence.fork().free(),
}


def earlier(sequence) -> None:
    """The tokens that are pending, in the place of two computed ones."""
    pending = sequence.token_ids[sequence.num_computed :]
    sequence.truncate(sequence.num_computed - 2)
    sequence.token_ids += pending


def test_rows_of_drafts_end_where_pages_do(runner):
    """The MTP layer's rows of drafts after the first, which lie past the request's last row, up to its limit."""
    runner.expect_drafts(3)
    pool = runner.pools.get(runner.mtp_layers[0].name, "window")
    for limit in (60, 61, 62):  # the prompt's 59 tokens and one more, then none, one or two rows of drafts
        sequence = runner.sequence(prompt(60, 3))
        runner.step([(sequence, 59)], StepOptions(mtp=True))
        runner.manager.reserve([(sequence.cache, 5)])
        page = sequence.cache.tables["window"][0]
        rows = pool.tensor.view(len(pool.tensor), pool.entries, -1)
        rows[page, 59:] = 0  # what the round before left
        before = rows.clone()
        with torch.inference_mode():
            run = runner.graphs.run([sequence.cache], [[sequence.token_ids[59]]], 4, num_drafts=3, limits=[limit])
        assert len(run.drafts()[0]) == 3
        changed = (rows != before).any(2).nonzero().tolist()
        assert changed == [[page, position] for position in range(59, limit)]
        sequence.free()


@pytest.mark.parametrize("change", tiered(CHANGES, ["another token", "fewer drafts", "the same tokens earlier"]))
def test_what_has_changed_is_computed_again(runner, runs, change):
    """A sequence that is driven by hand, with another step than the one that was launched early."""
    runner.expect_drafts(2)
    sequence = runner.sequence(PROMPTS[3])
    runner.step([(sequence, sequence.num_pending)], StepOptions(mtp=True))
    sequence.token_ids += [5, 6, 7]
    for _ in range(4):
        options = StepOptions(last=3, greedy=True, drafts=2, next_step=((sequence, 299),))
        output = runner.step([(sequence, 3)], options)
        tokens, [drafts] = output.tokens()[0], output.drafts()
        right = next((i for i in range(2) if tokens[i] != sequence.token_ids[-2 + i]), 2)
        length = sequence.num_computed - 2 + right
        sequence.truncate(length, keep_pages=True)
        sequence.token_ids += [tokens[right], *drafts]
    assert runner.next_step_launched
    runs.clear()
    CHANGES[change](sequence)
    if sequence.num_pending > 3 or not sequence.num_pending:
        sequence.token_ids += [1, 2, 3] if not sequence.num_pending else []
        if sequence.num_pending > 3:
            runner.step([(sequence, sequence.num_pending - 3)], StepOptions(mtp=True))
    pending = sequence.num_pending
    found = runner.step([(sequence, pending)], StepOptions(last=3, greedy=True, drafts=2)).tokens()
    assert len(runs) == (change not in ("nothing", "fork"))
    assert found == [runner.score([sequence.token_ids])[0][-pending:].argmax(-1).tolist()]
    sequence.free()


ROLLBACKS = [(0, 1), (1, 1), (1, 3), (3, 3), (3, 5), (0, 7), (3, 7), (7, 7)]


@pytest.mark.parametrize(("right", "drafts"), tiered(ROLLBACKS, [(3, 7)]))
def test_a_launched_step_leaves_what_a_rollback_needs(drafts, right):
    """Compressor rings, windows and entries after a launched step was dropped, back to the shortest length allowed.

    At lengths around the edges of windows of 4, 16 and 128 tokens and of pages.
    """
    runner = small_runner(small_config(list(MIXED), mtp=1), max_model_len=320, max_num_seqs=36)
    runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, capture=False)
    runner.expect_drafts(drafts)
    lengths = [61, 64, 115, 124, 127, 128, 135]
    vocab = runner.config.vocab_size
    texts = [[token % vocab for token in prompt(n, n)] for n in lengths]
    sequences = [runner.sequence(text) for text in texts]
    for sequence in sequences:
        runner.step([(sequence, sequence.num_pending)], StepOptions(mtp=True))
    truth = [list(text) for text in texts]
    for _ in range(1 + right):  # the tokens that greedy decoding leads to
        scored = runner.score(truth)
        truth = [text + [int(rows[-1].argmax())] for text, rows in zip(truth, scored, strict=True)]
    for sequence, text in zip(sequences, truth, strict=True):
        known = text[len(sequence.token_ids) :]
        sequence.token_ids += known + [(known[-1] + 1) % vocab] * (1 + drafts - len(known))
    options = StepOptions(last=1 + drafts, greedy=True, drafts=drafts, next_step=tuple((s, 319) for s in sequences))
    output = runner.step([(s, 1 + drafts) for s in sequences], options)
    assert runner.next_step_launched
    assert all(len(d) == drafts for d in required(output.drafts)())
    shortest = []
    for sequence, text in zip(sequences, truth, strict=True):
        sequence.truncate(len(text), keep_pages=True)
        assert sequence.num_computed == len(text)
        sequence.truncate(max(sequence.cache.low_water, 1))
        assert sequence.num_computed  # in place
        shortest.append(len(sequence.token_ids))
        sequence.token_ids += [token % vocab for token in prompt(24, 9)]
    texts = [list(sequence.token_ids) for sequence in sequences]
    logits = [[] for _ in sequences]
    for n in (1, 1, 5, 1, 16):
        for rows, found in zip(logits, runner.step([(s, n) for s in sequences], StepOptions(all_logits=True)).rows,
                               strict=True):  # fmt: skip
            rows.append(found)
    for sequence in sequences:
        sequence.free()
    for rows, n, scored in zip(logits, shortest, runner.score(texts), strict=True):
        assert_close(torch.cat(rows), scored[n:], SAME, f"back to {n}")


LONGEST = 220
VARIANTS = ["batched", "chunks", "prefixes", "pressure", "preempted", "everything"]
DRAFTS_AND_SHARES = [(1, 0.8), (2, 1.0), (3, 0.8), (7, 1.0), (2, 0.8), (3, 1.0), (7, 0.8), (1, 1.0)]
FUZZ = [  # each number of drafts; the variants by turns on one model or the other, and the last on both
    (preset, variant, *DRAFTS_AND_SHARES[(2 * at + i) % len(DRAFTS_AND_SHARES)])
    for i, preset in enumerate(("tiny", "tiny_v32"))
    for at, variant in enumerate(VARIANTS)
    if at % 2 != i or variant == "everything"
]


@lru_cache(maxsize=2)
def one_by_one(preset: str) -> ModelRunner:
    config = config_of(preset)
    return ModelRunner.from_config(config, device="cpu", numerics="exact", max_num_seqs=1, max_model_len=LONGEST + 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "variant", "drafts", "share"), FUZZ)
def test_random_workloads(preset, variant, drafts, share, monkeypatch):
    """Arrivals, cancellations, preemptions, shared prefixes, few pages; greedy requests, perhaps with sampled ones."""
    config = one_by_one(preset).config
    jobs = make_jobs(9, LONGEST, config.vocab_size, seed=drafts, greedy=share)
    expected = alone(one_by_one(preset), jobs)
    runner = ModelRunner.from_config(config, device="cpu", numerics="exact", **variants(config, LONGEST)[variant])
    use_buckets(runner)
    texts = [job.prompt + tokens for job, tokens in zip(jobs, expected, strict=True)]
    draft_from(monkeypatch, runner, texts, right=lambda position: position * 7 % 5 < 3)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts))
    requests = together(engine, jobs, preempt=variant in ("preempted", "everything"))
    assert differences(requests, jobs, expected) == []
    assert leaked(engine) == {}
    assert engine.stats.accepted > 0
