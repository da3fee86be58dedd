"""``scripts/ray_generate.py`` with actors whose calls run in any order, as those of a Ray actor of two threads do."""

from __future__ import annotations

import importlib
import json
import queue
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.llm import IndexedCompletion
from tests.support.tiers import tiered

ENDED = object()


class Stream:
    """Results of a call that yields, one reference after the other; the call runs in a thread of its own."""

    def __init__(self, results):
        self.results: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(results,), daemon=True).start()

    def _run(self, results):
        try:
            for result in results:
                self.results.put(result)
        finally:
            self.results.put(ENDED)

    def __next__(self):
        if (result := self.results.get(timeout=60)) is ENDED:
            raise StopIteration
        return result


class Ray:
    """A module in place of ``ray``: the calls of actors wait until `wait`, which runs them in another order."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, order):
        self.order, self.calls = order, []

    def init(self, address, **options):
        pass

    shutdown = get = staticmethod(lambda value=None: value)

    def remote(self, **options):
        return lambda actor: SimpleNamespace(remote=lambda *args: self.handle(actor(*args)))

    def handle(self, actor):
        def call(name):
            return SimpleNamespace(remote=lambda *args: self.calls.append((getattr(actor, name), args)))

        streamed = SimpleNamespace(remote=lambda params: Stream(actor.completions(params)))

        class Handle:
            put, end = call("put"), call("end")
            completions = SimpleNamespace(options=lambda **options: streamed)

        return Handle()

    def wait(self, streams, num_returns, timeout):
        calls, self.calls = self.order(self.calls), []
        for function, args in calls:
            function(*args)
        ready = [stream for stream in streams if not stream.results.empty()]
        return ready[:num_returns], ready[num_returns:]


class EchoLLM:
    """Completes every prompt with itself; of ``lost`` prompts nothing is heard."""

    lost = 0

    def __init__(self, model, **options):
        pass

    def generate_iter(self, prompts, params, encode):
        for item in filter(None, prompts):
            if item.index >= self.lost:
                done = Completion([], [item.params.max_tokens], encode(item.prompt), "stop")
                yield IndexedCompletion(item.index, done)


def shuffled(calls):
    return random.Random(len(calls)).sample(calls, len(calls))


@pytest.fixture
def generate(monkeypatch, tmp_path):
    """Runs the script on so many prompts; its exit status."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    script = importlib.import_module("ray_generate")
    monkeypatch.setattr(script, "LLM", EchoLLM)
    monkeypatch.chdir(tmp_path)

    def run(count, order, *flags, form="prompt {}"):
        Path("prompts").write_text("".join(f"{form.format(number)}\n" for number in range(count)))
        monkeypatch.setitem(sys.modules, "ray", Ray(order))
        return script.run(script.make_parser().parse_args(["--prompts", "prompts", "--out", "out", *flags]))

    return run


@pytest.mark.parametrize("order", [lambda calls: calls[::-1], shuffled], ids=["reversed", "shuffled"])
@pytest.mark.parametrize(("count", "actors"), tiered([(1, 2), (40, 3), (200, 2), (200, 3)], [(1, 2), (40, 3)]))
def test_every_prompt_has_its_line(generate, count, actors, order):
    assert generate(count, order, "--actors", str(actors)) == 0
    lines = [json.loads(line) for line in Path("out").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(count))
    assert all(line["text"] == f"prompt {line['index']}" for line in lines)


def test_ids_and_parameters_of_prompts(generate):
    form = '{{"prompt": "prompt {0}", "id": "p{0}", "max_tokens": 1{0}}}'
    assert generate(20, shuffled, "--actors", "2", form=form) == 0
    lines = {line["id"]: line for line in map(json.loads, Path("out").read_text().splitlines())}
    for number in range(20):
        line = lines[f"p{number}"]
        assert (line["index"], line["text"], line["token_ids"]) == (number, f"prompt {number}", [int(f"1{number}")])


def test_prompts_without_a_line_are_a_failure(generate, monkeypatch, capsys):
    monkeypatch.setattr(EchoLLM, "lost", 3)
    assert generate(16, shuffled, "--actors", "2") == 1
    assert "3 prompts have no line; --resume goes on with them" in capsys.readouterr().err
    assert len(Path("out").read_text().splitlines()) == 13
