"""Changes of pages that an exception breaks off, before any of their lines: nothing leaks and nothing is held twice."""

from __future__ import annotations

import gc

import pytest

from deepseek_attn.cache.layout import STATE, WINDOW
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.cache.prefix import BlockKeys, PrefixCache
from tests.cache.manager_cases import C4, advance, make_manager
from tests.support.interruptions import InterruptBefore


def check_accounts(manager, caches):
    """Pages and rows of snapshots are free, or held as the tables of ``caches`` say."""
    available = manager.available_pages()
    for group, pages in manager.layout.pages.items():
        held = [page for cache in caches for page in cache.tables[group] if page != NULL_PAGE]
        assert available[group] == pages - 1 - len(set(held)), group
        assert all(manager.references(group, page) == held.count(page) for page in set(held)), group
    carried = {cache.carried for cache in caches} - {None}
    assert len(manager.free_snapshots) == manager.layout.max_snapshots - len(carried)


def commit(manager, cache, n):
    with manager.all_or_nothing([(cache, n)]):
        manager.commit(cache, n)


def step(manager, caches, n):
    manager.reserve([(cache, n) for cache in caches])
    for cache in caches:
        commit(manager, cache, n)


def tokens(n: int) -> list[int]:
    return [i % 7 for i in range(n)]


CHANGES = {
    "reserve": lambda m, a, b, prefixes: m.reserve([(a, 100), (b, 3)]),
    "step": lambda m, a, b, prefixes: step(m, [a, b], 70),
    "truncate": lambda m, a, b, prefixes: m.truncate(a, a.num_tokens - 3),
    "truncate too far": lambda m, a, b, prefixes: m.truncate(a, 2),
    "fork": lambda m, a, b, prefixes: m.free(m.fork(a)),
    "free": lambda m, a, b, prefixes: m.free(a),
    "keep": lambda m, a, b, prefixes: prefixes.keep(a, BlockKeys(64).upto(tokens(192), 192)),
    "start": lambda m, a, b, prefixes: m.free(prefixes.start(prefixes.match(BlockKeys(64).upto(tokens(128), 128)))),
    "evict": lambda m, a, b, prefixes: prefixes.evict(),
}


def sequences(manager, prefixes):
    """Two sequences that share pages; the prefix cache keeps their beginning."""
    first = manager.create()
    step(manager, [first], 128)
    prefixes.keep(first, BlockKeys(64).upto(tokens(128), 128))
    step(manager, [first], 64)
    return first, manager.fork(first)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_breaks_off(change):
    """Before each of its lines; nothing is held twice or by nobody, and it can be repeated."""
    manager = make_manager(max_snapshots=2)
    prefixes = PrefixCache(manager)

    def interrupt(line):
        first, second = sequences(manager, prefixes)
        with InterruptBefore(line) as trace:
            CHANGES[change](manager, first, second, prefixes)
        check_accounts(manager, [first, second, *(entry.snapshot.cache for entry in prefixes._entries.values())])
        for cache in (first, second):
            manager.truncate(cache, min(cache.num_tokens, 192))
            assert cache.num_tokens in (0, 2, 189, 192)
            assert cache.num_tokens or not any(table for group, table in cache.tables.items() if group != STATE)
        if first.num_tokens == second.num_tokens == 192:
            CHANGES[change](manager, first, second, prefixes)
        manager.free(first)
        manager.free(second)
        prefixes.clear()
        check_accounts(manager, [])
        return trace

    lines = interrupt(None).lines
    assert len(lines) > 10
    fired = [interrupt(line).fired for line in lines]
    assert all(fired)


@pytest.mark.parametrize(("n", "left"), [(5, 128), (6, 0)], ids=["within the rollback", "beyond it"])
def test_a_step_that_breaks_off_takes_its_tokens_back(n, left):
    manager = make_manager()
    cache, other = manager.create(), manager.create()
    step(manager, [cache, other], 128)
    manager.reserve([(cache, n), (other, 1)])
    broken = manager.all_or_nothing([(cache, n), (other, 1)])
    broken.__enter__()
    manager.commit(other, 1)
    assert not broken.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (cache.num_tokens, other.num_tokens) == (left, 128)
    check_accounts(manager, [cache, other])
    if not left:
        assert cache.tables == {WINDOW: [], C4: [], STATE: []}
    advance(manager, cache, [1.0] * 9)  # it can go on


def test_pages_of_a_collected_sequence_come_back():
    manager = make_manager()
    cache, kept = manager.create(), manager.create()
    step(manager, [cache, kept], 30)
    del cache
    gc.collect()
    check_accounts(manager, [kept])
