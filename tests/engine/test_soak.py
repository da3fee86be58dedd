"""The soak of `soak`, short: what takes days to go wrong is a row of small things that go wrong within a step."""

from __future__ import annotations

import logging

import pytest

from deepseek_attn.lab.bench.engine import cut_config
from tests.engine.soak import Soak, growth, make_runners, small_models
from tests.support.typed import untyped

CASES = [("v4", 1, 50), ("v32", 0, 50), ("v4", 2, 700), ("v32", 1, 510)]


@pytest.fixture(autouse=True)
def quiet():
    """Failures are injected: their tracebacks are not wanted."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def make(folder, model: str, drafts: int, layers: int | None = None) -> Soak:
    config = cut_config(small_models()[model], layers)
    return Soak(*make_runners(config, "cpu", "exact", 96, 4, 48), drafts, 96, 1, folder, variety=6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "drafts", "steps"), CASES)
def test_every_request_is_right_and_every_page_has_its_holders(tmp_path, model, drafts, steps):
    soak = make(tmp_path, model, drafts, 1 if steps < 100 else None)
    for _ in soak.run(steps, per_row=steps // 2):
        pass
    soak.finish()
    counts, stats = soak.counts, soak.engine.stats
    assert counts["length"] > steps // 10
    assert len(soak.rows) == 2
    if steps > 500:
        events = ["abort", "error", "refused", "preempted by hand", "on_step raised", "interrupted", "aside: load"]
        assert [event for event in [*events, "aside: end", "aside: fork", "aside: truncate"] if not counts[event]] == []
        assert stats.cached_tokens > 0
        assert stats.evicted > 0 or model == "v32"  # whose snapshots share their pages, and are fewer
        assert bool(stats.accepted) == bool(drafts)
        assert soak.engine.scheduler.max_num_batched_tokens >= 12  # 48, halved now and then


@pytest.mark.exhaustive
def test_what_is_wrong_is_noticed(tmp_path):
    """A page that nobody holds, then caches that change between two steps."""
    soak = make(tmp_path, "v32", 0, 1)
    allocator = soak.runner.manager._allocators["tokens"]
    page = allocator.allocate()
    with pytest.raises(AssertionError, match="tokens"):
        next(soak.run(9, per_row=9))
    allocator.release(page)
    untyped(soak.engine).on_step = lambda stats: [pool.tensor.zero_() for pool in soak.runner.pools]
    with pytest.raises(AssertionError, match=r"not those of the request alone|differs"):
        next(soak.run(99, per_row=99))


def test_growth_is_that_of_the_last_part_over_the_first_that_is_settled():
    assert growth([50.0] + [100.0] * 9) == 0
    assert growth([50.0] + [100.0] * 7 + [103.0, 103.0]) == pytest.approx(0.03)
    assert growth([0, 0, 0]) == 0
    assert growth([0] * 9 + [1]) == 1
