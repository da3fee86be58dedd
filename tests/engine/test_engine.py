"""The engine's promises one by one: order, room, failures that stay alone, cancellation, reuse, statistics."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.cache.layout import STATE, WINDOW, ratio_group
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.engine.decoding import NextToken
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.runner import Sequence
from tests.engine.fake_runner import BROKEN, NOT_FINITE, FakeRunner
from tests.support.requests import finish, greedy
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import required, untyped

C4, C16 = ratio_group(4), ratio_group(16)


def tokens(n: int, first: int = 10) -> list[int]:
    return [2 + (first + i * 37) % 450 for i in range(n)]


def expected(engine: Engine, prompt: list[int], count: int) -> list[int]:
    found = list(prompt)
    for _ in range(count):
        found.append(untyped(engine.runner).oracle(found))
    return found[len(prompt) :]


def pages_free(engine: Engine) -> bool:
    free, pages = engine.runner.manager.available_pages(), engine.runner.layout.pages
    return free == {group: count - 1 for group, count in pages.items()}


# order and room


def test_decodes_go_on_while_a_long_prompt_is_read():
    engine = Engine(FakeRunner.create(max_num_batched_tokens=50))
    first = engine.add_request(tokens(20), greedy(30))
    engine.step()
    engine.add_request(tokens(300), greedy(2))
    for chunk in (49, 49, 49, 49, 49, 49, 6):
        engine.step()
        stats = engine.last_step
        assert (stats.decodes, stats.decode_tokens, stats.prefills, stats.prefill_tokens) == (1, 1, 1, chunk)
    assert len(first.completion().token_ids) == 8
    finish(engine)
    assert first.completion().token_ids == expected(engine, tokens(20), 30)


def test_requests_start_in_order_and_no_more_than_there_is_room_for():
    engine = Engine(FakeRunner.create(max_num_seqs=2))
    requests = [engine.add_request(tokens(n), greedy(3)) for n in (30, 5, 5, 5)]
    engine.step()
    assert engine.scheduler.running == requests[:2]
    assert (engine.last_step.running, engine.last_step.waiting, engine.last_step.admitted) == (2, 2, 2)
    finish(engine)
    assert all(request.finish_reason == "length" for request in requests)
    assert pages_free(engine)


def test_a_request_waits_for_pages_of_all_its_tokens():
    """Two requests of 3 pages each do not start together on 5 pages; nothing is computed in vain."""
    engine = Engine(FakeRunner.create(pages={C4: 6}))
    requests = [engine.add_request(tokens(700), greedy(3)) for _ in range(2)]
    engine.step()
    assert engine.scheduler.running == requests[:1]
    finish(engine)
    assert engine.stats.preempted == 0
    assert engine.stats.prefill_tokens == 1400


def test_the_last_to_start_gives_up_its_pages():
    engine = Engine(FakeRunner.create(pages={C4: 4}))
    requests = [engine.add_request(tokens(n), greedy(200)) for n in (250, 240)]
    finish(engine)
    assert [request.preemptions for request in requests] == [0, 1]
    assert engine.stats.preempted == 1
    for request, n in zip(requests, (250, 240), strict=True):
        assert request.completion().token_ids == expected(engine, tokens(n), 200)
    assert pages_free(engine)


def test_sampling_goes_on_where_it_was_after_a_preemption(monkeypatch):
    """Random numbers are counted, so a request that computes its tokens again draws what it would have drawn."""
    monkeypatch.setattr(FakeRunner, "_compute", lambda self, sequence, n: torch.zeros(1, 512))
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for disturbed in (False, True):
        engine = Engine(FakeRunner.create())
        request = engine.add_request([5, 6], params)
        for step in range(20):
            engine.step()
            if disturbed and step in (3, 4, 11):
                engine.scheduler.preempt(request, engine.last_step)
        finish(engine)
        found.append(request.completion().token_ids)
    assert found[0] == found[1]


# failures


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([3, 512], "token id 512"),
        ([3, "a"], "token id 'a'"),
        ([3] * 901, "exceeds max_model_len=900"),
        (None, "a list or a one-dimensional array of integers, got None"),
    ],
    ids=["empty", "outside", "text", "long", "none"],
)
def test_a_bad_request_fails_alone(prompt, message):
    engine = Engine(FakeRunner.create())
    good = engine.add_request(tokens(9), greedy(5))
    bad = engine.add_request(prompt, greedy(5))
    assert bad.finish_reason == "error"
    assert message in bad.error
    outputs = finish(engine)
    assert [output.request for output in outputs].count(bad) == 1
    assert (bad.completion().finish_reason, bad.completion().token_ids) == ("error", [])
    assert good.completion().token_ids == expected(engine, tokens(9), 5)
    assert engine.stats.finished == {"error": 1, "length": 1}


@pytest.mark.parametrize("at", [0, 40, 99, 120], ids=lambda at: f"token{at}")
@pytest.mark.parametrize("broken", [BROKEN, NOT_FINITE], ids=["step", "logits"])
def test_a_request_that_breaks_the_step_fails_alone(broken, at):
    """A token that breaks the step, whose batch then runs one by one; or NaN logits, for the last token only."""
    engine = Engine(FakeRunner.create(max_num_batched_tokens=60))
    good = [engine.add_request(tokens(n), greedy(8)) for n in (100, 3)]
    prompt = tokens(121)
    prompt[at] = broken
    bad = engine.add_request(prompt, greedy(8))
    good.append(engine.add_request(tokens(70), greedy(8)))
    finish(engine)
    if broken == BROKEN or at == 120:
        assert bad.finish_reason == "error"
        assert ("RuntimeError: a broken token" if broken == BROKEN else "NaN") in required(bad.error)
    else:
        assert bad.finish_reason == "length"
    for request, n in zip(good, (100, 3, 70), strict=True):
        assert request.completion().token_ids == expected(engine, tokens(n), 8)
    assert pages_free(engine)


@pytest.mark.parametrize("shortage", [OutOfPages("few"), MemoryError("full")], ids=["pages", "memory"])
def test_a_request_that_finds_no_room_when_its_step_runs_again_waits(shortage, monkeypatch):
    """The step of a broken request fails; of those that then run alone, one needs more than there is at that moment."""
    runner = FakeRunner.create(max_num_batched_tokens=60)
    engine = Engine(runner)
    good = [engine.add_request(tokens(n), greedy(8)) for n in (20, 7)]
    bad = engine.add_request([*tokens(5), BROKEN], greedy(8))
    step, short = runner.step, [shortage]

    def short_of_room(batch, options):
        if short and [sequence for sequence, _ in batch] == [good[1].sequence]:
            raise short.pop()
        return step(batch, options)

    monkeypatch.setattr(runner, "step", short_of_room)
    finish(engine)
    assert not short
    assert bad.finish_reason == "error"
    for request, n in zip(good, (20, 7), strict=True):
        assert request.completion().token_ids == expected(engine, tokens(n), 8)
    assert pages_free(engine)


def test_a_prompt_that_no_pool_can_hold_fails_at_once():
    engine = Engine(FakeRunner.create(pages={C4: 3}))
    bad = engine.add_request(tokens(800), greedy(5))
    assert bad.error == "800 tokens need 4 pages of the ratio4 pool, which has 2; raise kv_cache_bytes"
    good = engine.add_request(tokens(500), greedy(5))
    finish(engine)
    assert good.finish_reason == "length"


def test_an_answer_that_outgrows_the_pools_alone_fails_with_what_it_has():
    engine = Engine(FakeRunner.create(pages={C4: 2}))
    bad = engine.add_request(tokens(200), greedy(100))
    finish(engine)
    assert bad.finish_reason == "error"
    assert "the ratio4 pool has 0 free pages" in required(bad.error)
    assert bad.completion().token_ids == expected(engine, tokens(200), 60)  # the entry of 256 closes at 260
    assert pages_free(engine)


def test_pages_held_by_others_are_no_reason_to_stop():
    runner = FakeRunner.create(max_num_seqs=2, max_snapshots=2)
    engine = Engine(runner)
    engine.add_request(tokens(200), greedy(1))
    finish(engine)
    others = [runner.sequence(tokens(9)) for _ in range(2)]
    runner.step([(other, 9) for other in others])
    bad = engine.add_request(tokens(200), greedy(1))
    finish(engine)
    assert "the state pool has 0 free pages" in required(bad.error)
    for other in others:
        other.free()
    good = engine.add_request(tokens(200), greedy(1))
    finish(engine)
    assert good.finish_reason == "length"


def test_out_of_memory_makes_smaller_steps(caplog):
    runner = FakeRunner.create()
    runner.max_tokens = 30
    engine = Engine(runner)
    requests = [engine.add_request(tokens(n), greedy(5)) for n in (200, 40, 1)]
    finish(engine)
    assert engine.scheduler.max_num_batched_tokens == 18  # 150, 75, 37, 18
    assert [record.name for record in caplog.records] == ["deepseek_attn.engine.engine"] * 3
    assert "out of memory in a step of 37 tokens: at most 18" in caplog.text
    for request, n in zip(requests, (200, 40, 1), strict=True):
        assert request.completion().token_ids == expected(engine, tokens(n), 5)


@exhaustive_on_cpu
def test_a_shortage_of_memory_that_passes_leaves_steps_as_large_as_before():
    runner = FakeRunner.create()
    engine = Engine(runner)
    for _ in range(2):
        engine.add_request(tokens(150), greedy(1))
        finish(engine)
        runner.max_tokens = 1
        requests = [engine.add_request(tokens(n), greedy(300)) for n in (20, 7)]
        engine.step()
        assert engine.scheduler.max_num_batched_tokens == 1
        runner.max_tokens = 150
        finish(engine)
        assert engine.scheduler.max_num_batched_tokens == 150
        assert [request.finish_reason for request in requests] == ["length"] * 2


def test_a_shortage_of_memory_that_stays_is_met_ever_more_rarely():
    """A prompt loses its caches with each failure, and ends nevertheless."""
    runner = FakeRunner.create()
    runner.max_tokens, failures, step = 3, [], runner.step

    def recorded(batch, options=None):
        if sum(n for _, n in batch) > 3:
            failures.append(engine.stats.steps)
        return step(batch, options)

    runner.step = recorded
    engine = Engine(runner)
    for _ in range(4):
        request = engine.add_request(tokens(400), greedy(2))
        finish(engine)
        assert request.completion().token_ids == expected(engine, tokens(400), 2)
    assert engine.stats.steps > 500
    assert len(failures) < 16


def test_out_of_memory_for_one_token_fails_that_request():
    runner = FakeRunner.create()
    runner.max_tokens = 0
    engine = Engine(runner)
    requests = [engine.add_request(tokens(20), greedy(5)) for _ in range(2)]
    finish(engine)
    assert all(
        "out of memory for a single token: fake memory is full" in required(request.error) for request in requests
    )
    assert pages_free(engine)


def test_a_keyboard_interrupt_is_no_failure_of_a_request():
    engine = Engine(FakeRunner.create())
    request = engine.add_request(tokens(20), greedy(5))

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    engine.runner.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.run([request]):
            pass
    assert request.finish_reason == "abort"
    assert not engine.has_unfinished or finish(engine)
    assert pages_free(engine)


def test_parameters_of_another_type_are_refused():
    engine = Engine(FakeRunner.create())
    for params in ({}, {"max_tokens": 3}, 5, "greedy", [greedy(3)]):
        bad = engine.add_request(tokens(9), untyped(params))
        assert bad.error == f"params: SamplingParams, got {params!r}"
        assert engine.has_unfinished
        assert [output.request for output in engine.step()] == [bad]
        assert not engine.has_unfinished
    assert pages_free(engine)


def test_wrong_arguments_of_a_run_are_refused_and_leave_nothing():
    engine = Engine(FakeRunner.create())
    requests = [engine.add_request(tokens(5), greedy(2)) for _ in range(2)]
    for given, most, message in (
        (None, None, "an iterable of requests is needed, got None"),
        (requests[0], None, "an iterable of requests is needed, got Request"),
        (requests, 0, "max_in_flight=0: must be an integer of at least 1"),
        (requests, 1.5, "max_in_flight=1.5"),
        ([requests[0], 5], None, "a Request is needed, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            list(engine.run(untyped(given), untyped(most)))
    for given in (None, 5):
        with pytest.raises(ValueError, match=f"a Request is needed, got {given}"):
            engine.cancel(untyped(given))
    assert [request.finish_reason for request in requests] == ["abort", None], "the run that began cancelled its own"
    finish(engine)
    assert requests[1].finish_reason == "length"
    assert pages_free(engine)
    assert "index='x': must be an integer" in required(
        engine.add_request(tokens(5), greedy(2), index=untyped("x")).error
    )


def test_a_request_runs_once_and_in_its_own_engine():
    runner = FakeRunner.create()
    engine, other, elsewhere = Engine(runner), Engine(runner), Engine(FakeRunner.create())
    request = engine.submit(Request.create(runner, None, tokens(9), greedy(5)))
    for wrong in (engine, other):
        with pytest.raises(ValueError, match="submitted before"):
            wrong.submit(request)
    with pytest.raises(ValueError, match="submitted before"):
        next(other.run([request]))
    with pytest.raises(ValueError, match="of another engine"):
        other.cancel(request)
    with pytest.raises(ValueError, match="made for another runner"):
        elsewhere.submit(Request.create(runner, None, tokens(9), greedy(5)))
    with pytest.raises(ValueError, match="a Request is needed, got"):
        engine.submit(untyped(tokens(9)))
    assert not other.has_unfinished
    assert not elsewhere.has_unfinished
    finish(engine)
    assert request.completion().token_ids == expected(engine, tokens(9), 5)
    for ended in (request, engine.add_request([], greedy(3))):
        with pytest.raises(ValueError, match=r"has ended \((length|error)\)"):
            engine.submit(ended)
        assert not engine.cancel(ended)
    finish(engine)
    assert not engine.has_unfinished
    assert pages_free(engine)


def test_a_callback_that_raises_loses_no_outputs():
    engine = Engine(FakeRunner.create())
    request, failed, seen = engine.add_request(tokens(20), greedy(4)), engine.add_request([], greedy(4)), []

    def on_step(stats):
        seen.append(stats)
        if len(seen) in (1, 2, 4):
            raise OSError("no space left on device")

    engine.on_step = on_step
    outputs = []
    while engine.has_unfinished:
        try:
            outputs.append(engine.step())
        except OSError:
            outputs.append([])
    assert [len(step) for step in outputs] == [0, 0, 2, 0, 1]
    reported = [token for step in outputs for output in step for token in output.token_ids]
    assert reported == request.completion().token_ids == expected(engine, tokens(20), 4)
    assert [output.request for output in outputs[2]] == [failed, request]
    assert engine.stats.finished == {"error": 1, "length": 1}
    assert engine.stats.generated == 4


def test_a_failure_is_logged_with_its_traceback(caplog):
    engine = Engine(FakeRunner.create())
    engine.add_request([*tokens(5), BROKEN], greedy(3))
    engine.add_request(tokens(5), greedy(3))
    finish(engine)
    records = {record.levelname: record for record in caplog.records}
    assert set(records) == {"WARNING", "ERROR"}
    for record in records.values():
        assert record.name == "deepseek_attn.engine.engine"
        assert record.exc_info[2] is not None
        assert str(record.exc_info[1]) == "a broken token"
    assert records["ERROR"].getMessage() == "a request failed: RuntimeError: a broken token"


# cancellation


@pytest.mark.parametrize("steps", [0, 1, 3, 6], ids=["waiting", "reading", "decoding", "finished"])
def test_cancel(steps):
    engine = Engine(FakeRunner.create(max_num_batched_tokens=60))
    request = engine.add_request(tokens(100), greedy(3))
    other = engine.add_request(tokens(8), greedy(30))
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request) == (steps < 6)
    assert not engine.cancel(request)
    assert request.finish_reason == ("abort" if steps < 6 else "length")
    outputs = finish(engine)
    assert [output.request for output in outputs].count(request) == (steps < 6)
    done = request.completion().token_ids
    assert done == expected(engine, tokens(100), len(done))
    assert other.completion().token_ids == expected(engine, tokens(8), 30)
    assert pages_free(engine)


def test_leaving_run_cancels_only_its_own_requests():
    engine = Engine(FakeRunner.create())
    mine, other = [engine.add_request(tokens(n), greedy(9)) for n in (30, 40)]
    steps = engine.run([mine])
    next(steps)
    steps.close()
    assert (mine.finish_reason, other.finish_reason) == ("abort", None)
    finish(engine)
    assert other.completion().token_ids == expected(engine, tokens(40), 9)


# many requests


def touched_requests(monkeypatch, waiting: int) -> list[int]:
    """Number of different requests that each operation reads, hashes or compares, while so many wait."""
    engine, touched = Engine(FakeRunner.create(max_num_seqs=2)), set()

    def touch(request, *args):
        touched.add(id(request))

    def read(request, name):
        touch(request)
        return object.__getattribute__(request, name)

    def count(operation) -> int:
        touched.clear()
        operation()
        return len(touched)

    requests = [Request.create(engine.runner, None, tokens(9), greedy(3)) for _ in range(waiting)]
    steps = engine.run(requests)
    next(steps)  # submits them
    late = Request.create(engine.runner, None, tokens(30), greedy(3))
    with monkeypatch.context() as patch:
        patch.setattr(Request, "__getattribute__", read)
        patch.setattr(Request, "__hash__", lambda request: touch(request) or object.__hash__(request))
        patch.setattr(Request, "__eq__", lambda request, other: touch(request) or touch(other) or NotImplemented)
        counts = [count(lambda: next(steps)) for _ in range(9)]  # of which some admit and end requests
        counts.append(count(lambda: engine.cancel(requests[-1])))
        counts.append(count(lambda: engine.cancel(requests[waiting // 2])))
        counts.append(count(lambda: engine.submit(late)))
        counts.append(count(engine.step))
        counts.append(count(lambda: next(engine.run([late]))))
    steps.close()
    return counts


def test_time_does_not_grow_with_the_requests_that_wait(monkeypatch):
    few, many = touched_requests(monkeypatch, 40), touched_requests(monkeypatch, 400)
    assert few == many
    assert max(few) <= 5


# prefix reuse


def ask(engine: Engine, prompt: list[int], count: int = 3):
    request = engine.add_request(prompt, greedy(count))
    finish(engine)
    assert request.completion().token_ids == expected(engine, prompt, count)
    return request.completion()


def test_the_same_prompt_again():
    engine = Engine(FakeRunner.create(max_snapshots=4))
    prompt = tokens(300)
    assert [ask(engine, prompt).cached_tokens for _ in range(2)] == [0, 256]  # blocks of 64 tokens
    assert engine.last_step.pages[STATE] == (0, 4), "a kept prefix holds no state page"
    assert (engine.stats.queried_tokens, engine.stats.cached_tokens) == (600, 256)
    assert engine.stats.hit_rate == 256 / 600


@pytest.mark.parametrize("ratios", [(4, 16), None], ids=["v4", "v32"])
def test_a_prompt_of_whole_blocks_is_never_taken_whole(ratios):
    """The logits of its last token have to come from somewhere."""
    engine = Engine(FakeRunner.create(ratios=ratios, max_snapshots=4))
    assert [ask(engine, tokens(128)).cached_tokens for _ in range(2)] == [0, 64]


def test_a_shared_beginning_is_found_at_the_second_request():
    """The first leaves snapshots at its own edges, the second one where the two part, and the third starts there."""
    engine = Engine(FakeRunner.create(max_snapshots=8, max_num_batched_tokens=600, max_model_len=700))
    system = tokens(400, first=20)
    cached = [ask(engine, system + tokens(150, first=30 + i)).cached_tokens for i in range(4)]
    assert cached == [0, 0, 384, 384]


def test_requests_that_come_together_share_too():
    """Prompts that wait for the budget are looked up when their turn comes."""
    engine = Engine(FakeRunner.create(max_snapshots=8, max_num_batched_tokens=400))
    system = tokens(384, first=20)
    requests = [engine.add_request(system + tokens(9, first=30 + i), greedy(2)) for i in range(4)]
    finish(engine)
    assert [request.completion().cached_tokens for request in requests] == [0, 384, 384, 384]
    for i, request in enumerate(requests):
        assert request.completion().token_ids == expected(engine, system + tokens(9, first=30 + i), 2)


def test_the_next_turn_of_a_conversation():
    engine = Engine(FakeRunner.create(max_snapshots=8))
    first = ask(engine, tokens(100), 60)
    turn = [*tokens(100), *first.token_ids, *tokens(30, first=99)]
    assert ask(engine, turn).cached_tokens == 128  # 160 tokens before the new turn
    assert ask(engine, turn).cached_tokens == 128


def test_a_recomputed_request_starts_from_what_it_left():
    engine = Engine(FakeRunner.create(max_snapshots=4))
    request = engine.add_request(tokens(140), greedy(9))
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(request, engine.last_step)
    engine.step()
    assert engine.last_step.cached_tokens == 128
    finish(engine)
    assert request.completion().token_ids == expected(engine, tokens(140), 9)
    assert request.completion().cached_tokens == 0, "that is what it had when it first started"


def test_snapshots_go_before_requests_do():
    engine = Engine(FakeRunner.create(max_snapshots=8, pages={C4: 4, C16: 4, WINDOW: 30}))
    ask(engine, tokens(300))
    assert len(required(engine.prefixes)) > 0
    assert engine.last_step.pages[C4][0] > 0
    requests = [engine.add_request(tokens(300, first=50 + i), greedy(4)) for i in range(2)]
    finish(engine)
    assert engine.stats.evicted > 0
    assert engine.stats.preempted == 0
    assert all(request.finish_reason == "length" for request in requests)


def test_engines_of_one_runner_share_its_prefixes():
    runner = FakeRunner.create(max_snapshots=3)
    first, second = Engine(runner), Engine(runner)
    prompts = [tokens(150, first=40 + i) for i in range(3)]
    assert [ask(engine, prompt).cached_tokens for prompt in prompts for engine in (first, second)] == [0, 128] * 3
    del first
    assert [ask(second, prompt).cached_tokens for prompt in prompts] == [128] * 3
    required(runner.prefixes).clear()
    assert pages_free(second)


def test_without_snapshots_nothing_is_kept():
    engine = Engine(FakeRunner.create())
    assert engine.prefixes is None
    assert [ask(engine, tokens(300)).cached_tokens for _ in range(2)] == [0, 0]
    assert pages_free(engine)


# statistics and the decoding hook


def test_step_statistics():
    engine = Engine(FakeRunner.create(max_num_batched_tokens=100))
    engine.add_request(tokens(90), greedy(2))
    engine.add_request(tokens(30), greedy(2))
    engine.step()
    stats = engine.last_step
    assert (stats.prefills, stats.prefill_tokens, stats.decodes, stats.tokens, stats.generated) == (2, 100, 0, 100, 1)
    assert stats.pages == {WINDOW: (2, 4 * 3 + 1), C4: (2, 16), C16: (1, 8), STATE: (2, 4)}
    assert stats.seconds > 0
    assert stats.tokens_per_second == 100 / stats.seconds
    finish(engine)
    total = engine.stats
    assert (total.steps, total.prefill_tokens, total.decode_tokens, total.generated) == (3, 120, 2, 4)
    assert total.finished == {"length": 2}
    assert total.tokens_per_second == 122 / total.seconds


class TwoDrafts(NextToken):
    """Drafts two tokens, right or wrong, and keeps what the model confirms: what speculation does."""

    decode_tokens = 3

    def __init__(self, oracle):
        self.oracle, self.accepted = oracle, 0

    def propose(self, running):
        for request in running:
            ids = request.sequence.token_ids
            if request.sequence.num_pending == 1 and len(ids) > request.prompt_length:
                right = self.oracle(ids)
                ids.extend([right, self.oracle([*ids, right]) if len(ids) % 2 else 7])

    def accept(self, work, output):
        accepted = super().accept(work, output)
        for request in accepted.tokens:
            ids = request.sequence.token_ids
            drafts = len(ids) - request.prompt_length - request.stop.count
            if drafts:
                known = len(ids) - drafts
                count = next(i for i in range(3) if i == 2 or self.oracle(ids[: known + i]) != ids[known + i])
                self.accepted += count
                accepted.tokens[request] = [*ids[known : known + count], self.oracle(ids[: known + count])]
                request.sequence.truncate(known + count)
                del ids[known:]
        return accepted


@pytest.mark.parametrize("pages", [None, {C4: 4}], ids=["roomy", "short"])
def test_a_decoder_that_takes_several_tokens_per_step(pages):
    runner = FakeRunner.create(max_snapshots=4, pages=pages)
    decoder = TwoDrafts(runner.oracle)
    engine = Engine(runner, decoder=decoder)
    lengths = (250, 7, 240)
    requests = [engine.add_request(tokens(n), greedy(40)) for n in lengths]
    finish(engine)
    for request, n in zip(requests, lengths, strict=True):
        assert request.completion().token_ids == expected(engine, tokens(n), 40)
    assert decoder.accepted > 40
    assert engine.stats.steps < (30 if pages is None else 60)
    assert (engine.stats.preempted > 0) == (pages is not None)
    required(engine.prefixes).clear()
    assert pages_free(engine)


def test_forks_of_a_request_outlive_it():
    engine = Engine(FakeRunner.create())
    request = engine.add_request(tokens(100), greedy(2))
    engine.step()
    child: Sequence = request.sequence.fork()
    finish(engine)
    child.token_ids.append(33)
    [logits] = required(engine.runner.step([(child, child.num_pending)]).logits)
    assert int(logits.argmax()) == untyped(engine.runner).oracle(child.token_ids)
    child.free()
    assert pages_free(engine)
