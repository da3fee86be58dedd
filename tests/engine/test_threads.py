"""Several threads use one model: each call returns what it returns alone, or is refused, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.lab.inspect import inspect_attention
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner.session import LayerSession
from tests.engine.fake_runner import FakeRunner
from tests.engine.test_engine import expected, pages_free, tokens
from tests.support.requests import finish, greedy
from tests.support.threads import PATIENCE, together
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped

WORDS = ["The morning", "She said that", "It", "My dear " * 17, "He had", "To be " * 5]
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=3, max_tokens=4, ignore_eos=True)


def load(folder: Path | None, drafts: int = 0, device: torch.device | str = "cpu", deterministic: bool = False) -> LLM:
    return LLM(
        folder, speculate=drafts, device=device, deterministic=deterministic, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=61, max_snapshots=2, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module", params=tiered([0, 2], [2]), ids=["no drafts", "drafts"])
def llm(request, folder):
    with load(folder, request.param) as llm:
        yield llm


@pytest.fixture
def nothing_left(llm):
    """No page and no request is left when a test is over."""
    yield
    assert not llm.engine.has_unfinished
    assert not llm.engine._runs
    llm.engine.prefixes.clear()
    pages = llm.runner.layout.pages
    assert llm.runner.manager.available_pages() == {group: count - 1 for group, count in pages.items()}


def calls(llm: LLM) -> list:
    """Each kind of call, with prompts that begin alike and others."""
    message = [{"role": "user", "content": "Who?"}]
    return [
        lambda: [completion.text for completion in llm.generate(WORDS[:3], SHORT)],
        lambda: [completion.text for completion in llm.generate(WORDS[3], DRAWN)],
        lambda: "".join(llm.stream(WORDS[3], SHORT)),
        lambda: list(llm.stream(WORDS[4], DRAWN)),
        lambda: sorted((i, done.text) for i, done in llm.generate_iter(WORDS, SHORT, max_in_flight=2)),
        lambda: llm.chat(message, SHORT).text,
        lambda: "".join(llm.chat(message, DRAWN, stream=True)),
    ]


@exhaustive_on_cpu
def test_each_call_returns_its_own(llm, nothing_left):
    alone = [call() for call in calls(llm)]
    assert together(*calls(llm)) == alone


@pytest.mark.exhaustive
def test_tasks_of_an_event_loop(llm, nothing_left):
    async def gather() -> list:
        return await asyncio.gather(*(asyncio.to_thread(call) for call in calls(llm)[:4]))

    assert asyncio.run(gather()) == [call() for call in calls(llm)[:4]]


@pytest.mark.exhaustive
def test_the_runner_and_its_layers_beside_requests(llm, nothing_left):
    """Steps of requests, scores, steps by hand and hidden states; the scratch memory and the caches are the same."""
    runner, x = llm.runner, torch.randn(70, llm.runner.config.hidden_size)

    def steps_by_hand() -> list[torch.Tensor]:
        sequence, found = runner.sequence([7] * 50), []
        for n in (33, 16, 1):
            found += runner.step([(sequence, n)]).logits
        sequence.truncate(45)
        copy = sequence.fork()
        copy.append(9)
        found += runner.step([(copy, copy.num_pending)]).logits
        copy.free()
        sequence.free()
        return found

    def layers() -> list[torch.Tensor]:
        session = LayerSession(runner, layers=[0])
        sequence, found = session.sequence(), []
        for part in x.split(35):
            found.append(sequence.run(part))
        sequence.free()
        return found

    def inspected() -> list[dict]:
        return [inspect_attention(runner, list(range(5, 75)), queries=[-1], layers=[1]).to_json()]

    # together the prompts of both need more pages than there are
    scores = [lambda n=n: runner.score([[5 + n] * 20] * 4) for n in range(2)]
    uses = [steps_by_hand, layers, *scores, inspected, calls(llm)[3]]
    alone = [use() for use in uses]
    for found, right in zip(together(*uses), alone, strict=True):
        assert not isinstance(found, BaseException), found
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_streams_and_devices_of_the_threads(device):
    """On a GPU each thread launches on a stream of its own; steps are graphs, some of them launched early."""

    def on_its_stream(call):
        def run():
            with torch.cuda.stream(torch.cuda.Stream(device)):
                return call()

        return run

    with load(None, 1, device, deterministic=True) as llm:
        alone = [call() for call in calls(llm)]
        for _ in range(5):
            assert together(*map(on_its_stream, calls(llm))) == alone


@pytest.mark.exhaustive
def test_threads_take_turns_at_one_stream(llm, nothing_left):
    """Each piece is read by another thread, beside requests of others."""
    with ThreadPoolExecutor(3) as pool:

        def read(iterator) -> list:
            done, found = object(), []
            while (item := pool.submit(next, iterator, done).result(PATIENCE)) is not done:
                found.append(item)
            return found

        prompts = WORDS[:4]
        alone = list(llm.stream(WORDS[0], DRAWN)), llm.generate(prompts, SHORT), llm.generate(WORDS[5], SHORT)
        streamed, iterated, other = together(
            lambda: read(llm.stream(WORDS[0], DRAWN)),
            lambda: read(llm.generate_iter(prompts, SHORT)),
            lambda: llm.generate(WORDS[5], SHORT),
        )
    cached = [replace(done.completion, cached_tokens=0) for done in sorted(iterated)]
    assert streamed == alone[0]
    assert cached == [replace(completion, cached_tokens=0) for completion in alone[1]]
    assert other[0].text == alone[2][0].text


def test_two_threads_at_one_generator(llm, nothing_left):
    """The second is refused, the first goes on."""
    inside, over = threading.Event(), threading.Event()

    def prompts():
        yield WORDS[0]
        inside.set()
        assert over.wait(PATIENCE)
        yield WORDS[1]

    completions = llm.generate_iter(prompts(), SHORT)

    def second() -> None:
        assert inside.wait(PATIENCE)
        try:
            with pytest.raises(ValueError, match="generator already executing"):
                next(completions)
        finally:
            over.set()

    found, refused = together(lambda: list(completions), second)
    assert refused is None
    assert [done.completion.text for done in sorted(found)] == [c.text for c in llm.generate(WORDS[:2], SHORT)]


@pytest.mark.exhaustive
def test_a_stream_is_closed_by_another_thread(llm, nothing_left, monkeypatch):
    """While one thread waits for the next piece: that was the last."""
    stream = llm.stream(WORDS[0], greedy(200))
    first, step, computing = next(stream), llm.runner.step, threading.Event()
    closing = threading.Thread(target=stream.close, daemon=True)

    def slow_step(*args):
        if not computing.is_set():
            computing.set()
            last = llm.engine.turns.last
            closing.start()
            while llm.engine.turns.last is last:  # until the other thread waits for its turn
                pass
        return step(*args)

    monkeypatch.setattr(llm.runner, "step", slow_step)
    [rest] = together(lambda: list(stream))
    closing.join(PATIENCE)
    assert stream.completion.finish_reason == "abort"
    assert stream.completion.text == first + "".join(rest)
    assert len(stream.completion.token_ids) < 200
    assert llm.generate(WORDS[0], greedy(20))[0].text.startswith(first)


def test_one_call_fails_and_the_others_go_on(llm, nothing_left):
    """Its prompts raise, its consumer raises, it is interrupted: each caller gets its own exception."""

    def source(error):
        yield WORDS[1]
        raise error

    def interrupted():
        with closing(llm.stream(WORDS[4], greedy(50))) as stream:
            next(stream)
            raise KeyboardInterrupt

    alone = [call() for call in calls(llm)[:3]]
    *found, first, second, third = together(
        *calls(llm)[:3],
        lambda: list(llm.generate_iter(source(OSError("gone")), SHORT, max_in_flight=3)),
        lambda: list(llm.generate_iter(source(KeyboardInterrupt()), SHORT, max_in_flight=3)),
        interrupted,
    )
    assert found == alone
    assert [type(error) for error in (first, second, third)] == [OSError, KeyboardInterrupt, KeyboardInterrupt]


def test_closed_while_others_generate(folder):
    """Everything that goes on ends with the message of a closed model; what had ended stays as it is."""
    llm, begun = load(folder), threading.Barrier(3)
    done = llm.generate(WORDS[0], SHORT)[0].text

    def read():
        with closing(llm.stream(WORDS[0], greedy(240))) as stream:
            next(stream)
            begun.wait(PATIENCE)
            list(stream)

    def close() -> None:
        begun.wait(PATIENCE)
        llm.close()

    *errors, none = together(read, read, close)
    assert none is None
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert all("this model was closed" in str(error) for error in errors)
    assert not llm.engine.scheduler.running
    assert done
    with pytest.raises(RuntimeError, match="this model was closed"):
        llm.generate(WORDS[0], SHORT)


# the engine alone


def test_requests_come_and_go_in_several_threads():
    """Added, stepped and cancelled at random places of the others' steps."""
    engine = Engine(FakeRunner.create(max_num_batched_tokens=60, max_snapshots=2))

    def add_and_cancel(first: int) -> list[tuple[Request, bool]]:
        found = []
        for n in range(6):
            request = engine.add_request(tokens(20 + 7 * n, first), greedy(9))
            found.append((request, n % 3 == 1 and engine.cancel(request)))
            engine.step()
        return found

    def run(first: int) -> list[tuple[Request, bool]]:
        requests = [Request.create(engine.runner, None, tokens(30 + n, first), greedy(5)) for n in range(6)]
        reported = {request: [] for request in requests}
        for outputs in engine.run(requests, max_in_flight=2):
            for output in outputs:
                reported[output.request] += output.token_ids  # of no others
        assert all(reported[request] == request.completion().token_ids for request in requests)
        return [(request, False) for request in requests]

    found = together(
        *(lambda first=first: add_and_cancel(first) for first in (1, 2)), *(lambda: run(5), lambda: run(6))
    )
    finish(engine)
    for requests in found:
        assert not isinstance(requests, BaseException), requests
        for request, cancelled in requests:
            generated = request.completion().token_ids
            assert request.finish_reason == ("abort" if cancelled else "length"), request.error
            assert generated == expected(engine, request.prompt_token_ids, len(generated))
            assert len(generated) == request.params.max_tokens or cancelled
    required(engine.prefixes).clear()
    assert pages_free(engine)


def test_outputs_go_to_the_run_that_has_the_request():
    """Whoever makes the step; a request that was added goes over to the run that takes it."""
    engine = Engine(FakeRunner.create())
    added, taken = [engine.add_request(tokens(n), greedy(4)) for n in (20, 30)]
    other = Request.create(engine.runner, None, tokens(40), greedy(6))
    first, second = engine.run([taken]), engine.run([other, added])
    assert [(output.request, len(output.token_ids)) for output in next(first)] == [(taken, 1)]
    with pytest.raises(ValueError, match="part of another run"):
        next(engine.run([taken]))
    assert [(output.request, len(output.token_ids)) for output in engine.step()] == [(added, 2)]
    assert [(output.request, len(output.token_ids)) for output in next(first)] == [(taken, 1)]
    while not added.finished:
        assert {output.request for output in engine.step()} == {added}
    assert [(output.request, output.finished) for output in next(first)] == [(taken, True)]
    reported = [output for outputs in second for output in outputs]
    assert [output.request for output in reported].count(added) == 1  # that it has ended
    assert sum(len(output.token_ids) for output in reported) == 6
    assert not engine.has_unfinished
    assert pages_free(engine)


def test_a_call_from_within_a_step():
    """Cancelling waits until the step has ended; a new request and another step are refused."""
    engine, refused = Engine(FakeRunner.create()), []
    first, second = [engine.add_request(tokens(n), greedy(9)) for n in (20, 30)]
    dropped = engine.run([Request.create(engine.runner, None, tokens(40), greedy(9))])
    next(dropped)
    step = engine.runner.step

    def call_back(*args):
        nonlocal dropped
        engine.runner.step = step
        for call in (engine.step, lambda: engine.add_request(tokens(9), greedy(2))):
            with pytest.raises(RuntimeError, match="from within a step of this engine"):
                call()
            refused.append(call)
        assert engine.cancel(second)
        assert not second.finished
        dropped = None  # its generator is collected, which cancels
        gc.collect()
        return step(*args)

    untyped(engine.runner).step = call_back
    engine.step()
    assert len(refused) == 2
    assert second.finish_reason == "abort"
    assert engine.scheduler.running == [first]
    finish(engine)
    assert first.completion().token_ids == expected(engine, tokens(20), 9)
    assert pages_free(engine)


def test_a_request_that_was_not_submitted_can_be_cancelled():
    engine = Engine(FakeRunner.create())
    request = Request.create(engine.runner, None, tokens(9), greedy(5))
    assert engine.cancel(request)
    assert [output.finished for outputs in engine.run([request]) for output in outputs] == [True]
    assert request.completion().finish_reason == "abort"
    assert not engine.has_unfinished


def test_ranks_take_calls_of_one_thread():
    """The order of the steps of two threads would differ from rank to rank."""
    runner = FakeRunner.create()
    runner.parallel = replace(Parallel.single(), world=2)
    engine = Engine(runner)

    def run(n: int):
        return engine.run([Request.create(runner, None, tokens(n), greedy(3))])

    first, second = run(20), run(30)
    next(first)
    next(second)  # in one thread any number
    [refused] = together(lambda: next(run(40)))
    assert isinstance(refused, RuntimeError)
    assert "make them in one thread" in str(refused)
    assert len(list(first)) == len(list(second)) == 2
    [found] = together(lambda: list(run(40)))  # the others have ended
    assert len(found) == 3
    assert pages_free(engine)
