"""Random arrivals, lengths, cancellations, failures and shortages: every output is right, and no page is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepseek_attn.cache.layout import STATE, WINDOW, ratio_group
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from tests.engine.fake_runner import BROKEN, NOT_FINITE, FakeRunner
from tests.engine.workload import check_pages
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import untyped

VARIANTS = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 37},
    "one_token": {"max_num_batched_tokens": 1, "max_model_len": 150},
    "prefixes": {"max_snapshots": 12},
    "few_snapshots": {"max_snapshots": 1, "max_num_batched_tokens": 300},
    "few_entries": {"pages": {ratio_group(4): 5, ratio_group(16): 4}},
    "few_window_pages": {"pages": {WINDOW: 7}},
    "few_states": {"pages": {STATE: 3}, "max_snapshots": 6},
    "all_short": {
        "pages": {ratio_group(4): 6, ratio_group(16): 5, WINDOW: 9}, "max_snapshots": 6, "max_num_batched_tokens": 130,
    },
    "overlap_and_128": {"ratios": (4, 128), "max_snapshots": 8, "window": 64, "max_num_batched_tokens": 200},
    "no_rollback": {"max_rollback": 0, "max_snapshots": 8},
    "window_only": {"ratios": (), "max_snapshots": 4, "window": 70},
    "v32": {"ratios": None},
    "v32_prefixes": {"ratios": None, "max_snapshots": 5},
    "v32_short": {"ratios": None, "max_snapshots": 5, "pages": {"tokens": 17}, "max_num_batched_tokens": 90},
}  # fmt: skip


class Fuzz:
    """Drives an engine at random and knows what each request must produce."""

    def __init__(self, seed: int, options: dict, most_new: int = 40, most_completions: int = 1):
        self.rng, self.most_new, self.most_completions = random.Random(seed), most_new, most_completions
        self.runner = FakeRunner.create(**options)
        self.engine = Engine(self.runner)
        self.longest = self.runner.layout.max_model_len - 1
        self.prefixes = [self.tokens(self.rng.randint(1, self.longest)) for _ in range(3)]
        self.requests, self.done = [], []

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(2, BROKEN) for _ in range(n)]

    def add(self) -> None:
        rng = self.rng
        length = rng.choice([rng.randint(1, 20), rng.randint(1, 200), rng.randint(1, self.longest)])
        prompt = self.tokens(length)
        if rng.random() < 0.5:
            prefix = rng.choice(self.prefixes)
            prompt = (prefix[: rng.choice([len(prefix), rng.randint(0, len(prefix))])] + prompt)[: self.longest]
        if self.done and rng.random() < 0.2:  # the next turn of a conversation
            prompt = (rng.choice(self.done) + prompt)[: self.longest]
        if rng.random() < 0.08:
            prompt[rng.randrange(len(prompt))] = rng.choice(untyped([BROKEN, NOT_FINITE, -1, 512, "x"]))
        if rng.random() < 0.03:
            prompt = rng.choice([[], [5] * (self.longest + 2)])
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, self.most_new), ignore_eos=True)
        if self.most_completions > 1:  # a fake model is certain of its tokens
            params = replace(params, temperature=0.01, n=rng.randint(1, self.most_completions))
        first = self.engine.add_request(prompt, params)
        self.requests += [(request, prompt, params) for request in first.group]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.3:
                self.add()
            if self.rng.random() < 0.05 and self.requests:
                self.engine.cancel(self.rng.choice(self.requests)[0])
            self.step()
        for _ in range(20000):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "the engine makes no progress"

    def step(self) -> None:
        for output in self.engine.step():
            if output.request.finish_reason == "length":
                self.done.append(list(output.request.sequence.token_ids))
        self.check_accounts()

    def check_accounts(self) -> None:
        """Pages in use are those that sequences and snapshots hold, and the statistics say so."""
        check_pages(self.engine)
        assert self.engine.last_step.pages == {
            group: (pages - 1 - self.runner.manager.available_pages()[group], pages - 1)
            for group, pages in self.runner.layout.pages.items()
        }

    def check_outputs(self) -> None:
        for request, prompt, params in self.requests:
            assert request.finished
            completion = request.completion()
            if request.finish_reason == "error":
                hopeless = not prompt or len(prompt) > self.longest + 1 or set(prompt) - set(range(2, BROKEN))
                assert hopeless or "pages" in request.error, request.error
                continue
            assert prompt[-1] != NOT_FINITE, "NaN logits were sampled"
            tokens = list(prompt)
            for token in completion.token_ids:
                assert token == self.runner.oracle(tokens)
                tokens.append(token)
            if request.finish_reason == "length":
                full = len(tokens) == self.runner.layout.max_model_len
                assert len(completion.token_ids) == params.max_tokens or full
            else:
                assert request.finish_reason == "abort"

    def check_nothing_is_left(self) -> None:
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
            assert len(self.runner.manager.free_snapshots) == self.runner.layout.max_snapshots
            assert not self.engine.prefixes._seen
        free = self.runner.manager.available_pages()
        assert free == {group: pages - 1 for group, pages in self.runner.layout.pages.items()}


@pytest.mark.parametrize("seed", tiered(range(2), [0]))
@pytest.mark.parametrize(
    "variant", tiered(VARIANTS, ["one_token", "few_window_pages", "v32_short"], quick_on_gpu=list(VARIANTS)[::2])
)
def test_random_workload(variant, seed):
    fuzz = Fuzz(seed, VARIANTS[variant])
    fuzz.run(45)
    fuzz.check_outputs()
    fuzz.check_nothing_is_left()
    reasons = fuzz.engine.stats.finished
    assert sum(reasons.values()) == len(fuzz.requests)
    assert reasons["length"] > 3


@exhaustive_on_cpu
@pytest.mark.parametrize("variant", tiered(["few_entries", "all_short", "v32_short"], ["few_entries"]))
def test_long_answers_outgrow_the_pools(variant):
    """Requests are admitted for what they are, and grow: some lose their caches and compute their tokens again."""
    fuzz = Fuzz(1, VARIANTS[variant], most_new=300)
    fuzz.run(40)
    fuzz.check_outputs()
    fuzz.check_nothing_is_left()
    assert fuzz.engine.stats.preempted > 0


@pytest.mark.parametrize("most", tiered([1, 20, 100], [1]))
@pytest.mark.parametrize("ratios", [(4, 16), pytest.param(None, marks=pytest.mark.exhaustive)], ids=["v4", "v32"])
def test_steps_that_run_out_of_memory(most, ratios):
    """Steps become smaller; what was half written does no harm."""
    fuzz = Fuzz(most, {"ratios": ratios, "max_snapshots": 4, "max_rollback": 5})
    fuzz.runner.max_tokens = most
    fuzz.run(30)
    fuzz.check_outputs()
    fuzz.check_nothing_is_left()
    assert fuzz.engine.scheduler.max_num_batched_tokens <= 2 * most  # larger steps are tried now and then


SHARING = (
    "roomy",
    "chunks",
    "one_token",
    "prefixes",
    "few_entries",
    "few_states",
    "all_short",
    "no_rollback",
    "v32_short",
)


@pytest.mark.parametrize("variant", tiered(SHARING, ["all_short"]))
def test_completions_of_one_prompt(variant):
    """They share its pages, as far as there are any, and are cancelled, preempted and evicted like others."""
    fuzz = Fuzz(3, VARIANTS[variant], most_completions=6)
    fuzz.run(60)
    fuzz.check_outputs()
    fuzz.check_nothing_is_left()
    assert sum(fuzz.engine.stats.finished.values()) == len(fuzz.requests)
    shared = [r for r, prompt, _ in fuzz.requests if r.first and r.cached_tokens == len(prompt) - 1 > 0]
    assert (len(shared) > 5) == (variant != "no_rollback")
