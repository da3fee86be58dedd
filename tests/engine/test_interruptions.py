"""Steps that an exception breaks off at any line: the next ones give the same tokens, and nothing is left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_attn.cache.layout import WINDOW, ratio_group
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.engine.completion import Completion
from deepseek_attn.engine.decoding import NextToken
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.logprobs import TokenLogprob
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.testing import poison_caches
from tests.engine import fake_runner
from tests.engine.fake_runner import FakeRunner
from tests.engine.test_full_size_fuzz import large
from tests.support.drafts import DraftedSource
from tests.support.interruptions import LIBRARY, InterruptBefore, Interrupted, Line
from tests.support.invariance_cases import pages_returned
from tests.support.predictable import PredictableSource
from tests.support.requests import finish, greedy
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import tiered
from tests.support.typed import required
from tests.support.v32_cases import small
from tests.support.v41_cases import shallow

Jobs = list[tuple[list[int], SamplingParams]]


class Workload:
    """The same requests again and again, one of which comes later; collects what steps return."""

    def __init__(self, engine: Engine, jobs: Jobs, files: tuple[str, ...] = LIBRARY):
        self.engine, self.jobs, self.files = engine, jobs, files
        self.requests: list[Request] = []
        self.reported: dict[Request, list[int]] = defaultdict(list)
        self.logprobs: dict[Request, list[TokenLogprob]] = defaultdict(list)
        self.steps = 0

    def step(self, line: Line | None = None) -> InterruptBefore:
        """One step, interrupted before a line if it gets there."""
        if not self.engine.has_unfinished:
            self.steps = 0
            if self.engine.prefixes is not None:
                self.engine.prefixes.clear()
        for prompt_ids, params in {0: self.jobs[:-1], 3: self.jobs[-1:]}.get(self.steps, []):
            self.requests.append(self.engine.add_request(prompt_ids, params))
        self.steps += 1
        assert self.steps < 2000, "the engine makes no progress"
        outputs = []
        with InterruptBefore(line, self.files) as trace:
            outputs = self.engine.step()
        for output in outputs:
            self.reported[output.request] += output.token_ids
            self.logprobs[output.request] += output.logprobs or []
        return trace

    def run(self) -> dict[Line, None]:
        """All requests to their end; returns the lines that have run."""
        lines: dict[Line, None] = {}
        while self.engine.has_unfinished or len(self.requests) < len(self.jobs):
            lines |= self.step().lines
        return lines

    def interrupt(self, line: Line) -> bool:
        """Steps until one was interrupted before the line; False if none gets there."""
        return any(self.step(line).fired for _ in range(20))

    def check(self, expected: list[Completion]) -> None:
        finish_reasons = {request.finish_reason for request in self.requests}
        assert finish_reasons == {"length"}, [request.error for request in self.requests]
        for request in self.requests:
            job = next(i for i, (tokens, _) in enumerate(self.jobs) if tokens == request.prompt_token_ids)
            found = request.completion()
            assert found.token_ids == self.reported[request] == expected[job].token_ids
            assert found.logprobs == expected[job].logprobs
            assert found.prompt_logprobs == expected[job].prompt_logprobs
            assert self.logprobs[request] == list(expected[job].logprobs or [])


def interrupted_everywhere(
    make_engine,
    jobs: Jobs,
    every: int,
    files: tuple[str, ...] = LIBRARY,
    drop_graphs: Callable[[], None] | None = None,
    start: int | None = None,
) -> None:
    """Interrupts steps before every ``every``-th line that they run, goes on, and compares all tokens.

    Args:
        start: number of lines before the first of those; None: half of ``every``.
        drop_graphs: called where no step runs a line any more, because it runs only while a step is captured.
    """
    if drop_graphs is not None:
        Workload(make_engine(), jobs, files).run()  # lines that run once in a process, compiling kernels, do not count
    whole = Workload(make_engine(), jobs, files)
    lines = list(whole.run())[every // 2 if start is None else start :: every]
    expected = [request.completion() for request in whole.requests]
    broken = Workload(make_engine(), jobs, files)

    def interrupt(line: Line) -> bool:
        fired = broken.interrupt(line)
        if not fired and drop_graphs is not None:
            drop_graphs()
            fired = broken.interrupt(line)
        return fired

    fired = [interrupt(line) for line in lines]
    while broken.engine.has_unfinished:
        broken.step()
    broken.check(expected)
    assert sum(fired) > 0.8 * len(lines), "most lines run in every round"


FAKES: dict[str, Any] = {
    "v4": {"max_snapshots": 3},
    "v4 few pages": {"max_snapshots": 2, "pages": {ratio_group(4): 4, WINDOW: 12}},
    "v32": {"ratios": None, "max_snapshots": 3},
}


def fake_jobs() -> Jobs:
    first = [2 + i * 37 % 450 for i in range(200)]
    return [
        (first, greedy(6, logprobs=1)),
        (first[50:170], greedy(8, logprobs=2, prompt_logprobs=1)),
        (first[:140] + [9, 8, 7], greedy(3, logprobs=0)),
    ]


@pytest.mark.parametrize(
    ("fake", "every"), tiered([*product(FAKES, [11]), *product(FAKES, [1])], [*product(FAKES, [11])][:1])
)
def test_bookkeeping(fake, every):
    """Every page and row that is wrong, stale or missing changes a fake's tokens."""
    runner = FakeRunner.create(max_num_batched_tokens=90, **FAKES[fake])
    with pages_returned(runner):
        interrupted_everywhere(lambda: Engine(runner), fake_jobs(), every, (*LIBRARY, fake_runner.__file__))
        required(runner.prefixes).clear()
    assert len(runner.manager.free_snapshots) == runner.layout.max_snapshots


class SometimesPredictable(PredictableSource):
    """Some drafts are right, and most tokens depend on all that was read."""

    certainty = 5.0


class SometimesDrafted(DraftedSource):
    """The same with a DSpark drafter."""

    certainty = 9.0


FAMILIES = {
    "v4": (lambda: small_config([4, 16], mtp=1), SometimesPredictable),
    "v32": (lambda: small(num_nextn_predict_layers=1), SometimesPredictable),
    "v41": (shallow, SometimesDrafted),
}
MODELS = list(product(FAMILIES, [0, 2], [False, True]))
QUICK = [("v4", 2, True, 91, 30), ("v32", 0, False, 91, 30)]
# before every 7th line that a family's models have in common: each model takes a third of those
THIRDS = [(*model, 21, 3 + 7 * (at % 3)) for at, model in enumerate(MODELS)]


@pytest.mark.parametrize(("family", "drafts", "persistent", "every", "start"), tiered([*QUICK, *THIRDS], QUICK[:1]))
def test_models(family, drafts, persistent, every, start):
    """Layers, Engram, sampling, commit, speculation, and steps over persistent tensors, some of them launched early."""
    make_config, drafted = FAMILIES[family]
    config = make_config()
    runner = small_runner(
        config, (drafted if drafts else RandomSource)(config, 0), max_model_len=160, max_num_seqs=4,
        max_num_batched_tokens=61, max_snapshots=2, max_rollback=6,
    )  # fmt: skip
    poison_caches(runner)
    drawn = SamplingParams(temperature=0 if persistent else 0.8, max_tokens=5, seed=5, ignore_eos=True)
    first = prompt(config, 100, seed=1)
    jobs = [(first, greedy(5)), (prompt(config, 20, seed=2), drawn), (first[:66] + [5, 6, 7], greedy(2))]

    def make_engine() -> Engine:
        if persistent:
            shape = (runner.whole_model(), runner.layout, runner.device)
            runner.graphs = DecodeGraphs(*shape, batches=[2, 4], capture=False, engram=runner.tables)
        return Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)

    with pages_returned(runner):
        interrupted_everywhere(make_engine, jobs, every, start=start)
        required(runner.prefixes).clear()


GRAPHS = list(product(["v4", "v32"], [0, 2]))


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "drafts", "every"), [(*model, 23) for model in GRAPHS])
def test_captured_graphs(family, drafts, every, device):
    """The same on a GPU, where decode steps are captured, replayed and launched early; captures break off too.

    Without a GPU, test_models runs the same steps without a capture.
    """
    config = large().configs[family]
    assert config.num_nextn_predict_layers
    runner = ModelRunner.from_source(
        config, (SometimesPredictable if drafts else RandomSource)(config, 0), device=device, numerics="exact",
        dtype=torch.float32, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=61, max_snapshots=2,
        max_rollback=6, cuda_graphs=False, progress=False,
    )  # fmt: skip
    poison_caches(runner)
    first = prompt(config, 100, seed=1)
    jobs = [(first, greedy(5)), (prompt(config, 20, seed=2), greedy(5)), (first[:66] + [5, 6, 7], greedy(2))]

    def capture_anew() -> None:
        runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[2, 4])

    def make_engine() -> Engine:
        capture_anew()
        return Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)

    with pages_returned(runner):
        interrupted_everywhere(make_engine, jobs, every, drop_graphs=capture_anew)
        required(runner.prefixes).clear()


def test_a_step_that_no_rollback_takes_back():
    """The second part of a prompt, before each layer: the layers before have overwritten their state."""
    config = small_config([4, 16, 0])
    runner = small_runner(config, max_model_len=300, max_num_batched_tokens=61, max_rollback=4)
    tokens = prompt(config, 120)

    def generate(broken: int | None = None) -> Completion:
        engine, passes = Engine(runner), []

        def interrupt(module, args):
            passes.append(module)
            if broken is not None and passes.count(module) == 2:
                hook.remove()
                raise KeyboardInterrupt

        hook = runner.model.layers[str(broken or 0)].register_forward_pre_hook(interrupt)
        request = engine.add_request(tokens, greedy(4, prompt_logprobs=1))
        engine.step()
        if broken is not None:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert request.sequence.num_computed == 0
        finish(engine)
        hook.remove()
        return request.completion()

    with pages_returned(runner):
        expected = generate()
        for layer in range(3):
            found = generate(layer)
            assert found.token_ids == expected.token_ids
            assert required(found.prompt_logprobs).token_ids.tolist() == tokens[1:]
            np.testing.assert_allclose(
                required(found.prompt_logprobs).logprobs, required(expected.prompt_logprobs).logprobs, atol=1e-5
            )


def test_interrupted_again_while_it_makes_up(monkeypatch):
    """A step that breaks off, and before each line of what restores its requests an exception once more."""
    runner = FakeRunner.create(max_num_batched_tokens=90, max_snapshots=2)
    accept, jobs = NextToken.accept, fake_jobs()

    def interrupted(self, work, output):
        accept(self, work, output)
        raise Interrupted  # the tokens are computed, and no request has got them

    whole = Workload(Engine(runner), jobs)
    lines = whole.run()
    expected = [request.completion() for request in whole.requests]
    broken = Workload(Engine(runner), jobs)
    with monkeypatch.context() as patch:
        patch.setattr(NextToken, "accept", interrupted)
        restoring = [line for line in broken.step().lines if line not in lines]
    assert len(restoring) > 20
    fired = 0
    for line in restoring:
        with monkeypatch.context() as patch:
            patch.setattr(NextToken, "accept", interrupted)
            fired += broken.step(line).fired
        broken.step()
    assert fired > 20
    while broken.engine.has_unfinished:
        broken.step()
    broken.check(expected)
    required(runner.prefixes).clear()
    assert runner.manager.available_pages() == {group: n - 1 for group, n in runner.layout.pages.items()}
