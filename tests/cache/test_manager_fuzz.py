"""Random operations on several sequences against a plain model of what their caches must hold."""

import random
from dataclasses import dataclass, field

import pytest

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    WINDOW_PAGE,
    ratio_group,
)
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE
from tests.cache.manager_cases import (
    NAN,
    compute,
    floats,
    make_manager,
    read,
    ring,
    used,
)
from tests.support.tiers import tiered


@dataclass
class Twin:
    """A sequence and what its caches must hold: the value of every token so far, and the longest length reached."""

    cache: SequenceCache
    values: list[int] = field(default_factory=list)
    longest: int = 0


class Fuzz:
    """Random operations on several sequences; after each of them everything reachable is compared with the twins."""

    def __init__(self, seed, **options):
        self.rng, self.manager = random.Random(seed), make_manager(**options)
        self.layout, self.twins, self.next_value = self.manager.layout, [], 0

    def run(self, operations):
        weights = {"step": 12, "create": 2, "fork": 3, "truncate": 4, "free": 1}
        for _ in range(operations):
            name = self.rng.choices(list(weights), list(weights.values()))[0]
            getattr(self, name)()
            self.poison_free_pages()
            for twin in self.twins:
                self.check(twin)
            self.check_accounts()
        for twin in self.twins:
            self.manager.free(twin.cache)
        assert not any(used(self.manager).values())

    def create(self):
        if len(self.twins) < self.layout.max_num_seqs:
            self.twins.append(Twin(self.manager.create()))

    def fork(self):
        if self.twins and len(self.twins) < self.layout.max_num_seqs:
            twin = self.rng.choice(self.twins)
            self.twins.append(Twin(self.manager.fork(twin.cache), list(twin.values), twin.longest))

    def free(self):
        if self.twins:
            self.manager.free(self.twins.pop(self.rng.randrange(len(self.twins))).cache)

    def truncate(self):
        if not self.twins:
            return
        twin = self.rng.choice(self.twins)
        length = max(0, len(twin.values) - self.rng.choice([0, 1, 2, 4, 5, 6, 50]))
        reachable = length >= max(0, twin.longest - self.layout.max_rollback)
        kept = self.manager.truncate(twin.cache, length)
        assert kept == (length if reachable else 0)
        del twin.values[kept:]
        if not reachable:
            twin.longest = 0

    def step(self):
        """Some sequences get some new tokens; must always fit."""
        if not self.twins:
            return
        left, batch = self.layout.max_num_batched_tokens, []
        for twin in self.rng.sample(self.twins, self.rng.randint(1, len(self.twins))):
            room = self.layout.max_model_len - len(twin.values)
            n = min(room, left, self.rng.choice([1, 1, 1, 2, 3, 4, 17, 64, 130]))
            if n:
                batch.append((twin, n))
                left -= n
        self.manager.reserve([(twin.cache, n) for twin, n in batch])
        for twin, n in batch:
            values = list(range(self.next_value, self.next_value + n))
            self.next_value += n
            compute(self.manager, twin.cache, values)
            twin.values += values
            twin.longest = max(twin.longest, len(twin.values))

    def poison_free_pages(self):
        for pool in self.manager.pools:
            held = {page for twin in self.twins for page in twin.cache.tables[pool.spec.group]} - {NULL_PAGE}
            free = [page for page in range(len(pool.tensor)) if page not in held]
            floats(pool)[free] = NAN

    def check(self, twin):
        """All that a later token can read, from the furthest rollback on."""
        cache, values = twin.cache, twin.values
        low = max(0, twin.longest - self.layout.max_rollback)
        assert (cache.num_tokens, cache.low_water) == (len(values), low)
        first = max(0, low - self.layout.window + 1)
        assert [read(self.manager, cache, WINDOW, p) for p in range(first, len(values))] == values[first:]
        first_live = max(0, low - self.layout.window + 1) // WINDOW_PAGE
        pages = cache.tables[WINDOW]
        assert [p == NULL_PAGE for p in pages] == [i < first_live for i in range(len(pages))]
        for group, live in self.manager.live_pages(len(values), low).items():
            assert NULL_PAGE not in [cache.tables[group][page] for page in live]
        for ratio in self.layout.ratios:
            entries = [read(self.manager, cache, ratio_group(ratio), e) for e in range(len(values) // ratio)]
            assert entries == values[ratio - 1 :: ratio]
        rows = ring(self.manager)
        first = max(0, low - (rows - self.layout.max_rollback) + 1)
        assert [read(self.manager, cache, STATE, p % rows) for p in range(first, len(values))] == values[first:]

    def check_accounts(self):
        for group, count in used(self.manager).items():
            held = {page for twin in self.twins for page in twin.cache.tables[group]} - {NULL_PAGE}
            assert len(held) == count
            if group != WINDOW:
                assert all(NULL_PAGE not in twin.cache.tables[group] for twin in self.twins)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 13, "max_rollback": 5, "ratios": (4,)},
        {"window": 70, "max_rollback": 0, "ratios": (4,), "max_num_seqs": 4},
        {"window": 64, "max_rollback": 5, "ratios": (16,), "max_model_len": 1100, "max_num_batched_tokens": 300},
    ],
    ids=["C4A_window13", "C4A_no_rollback", "C16A_window64"],
)
@pytest.mark.parametrize(("seed", "operations"), tiered([(0, 100), (1, 300)], [(0, 100)]))
def test_random_operations(seed, operations, options):
    Fuzz(seed, **options).run(operations)
