"""Pages of sequences: no leaks, copy on write, freeing of the window."""

import random

import pytest
import torch

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    WINDOW_PAGE,
    ratio_group,
    window_pages_per_sequence,
)
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE, OutOfPages, PageAllocator
from tests.cache.manager_cases import (
    C4,
    C16,
    advance,
    compute,
    floats,
    make_manager,
    read,
    ring,
    used,
)

# PageAllocator


def test_allocator_hands_out_every_page_but_the_null_page_once():
    allocator = PageAllocator(7)
    assert sorted(allocator.allocate() for _ in range(6)) == [1, 2, 3, 4, 5, 6]
    assert allocator.available == 0


def test_allocator_frees_a_page_with_its_last_reference():
    allocator = PageAllocator(2)
    page = allocator.allocate()
    allocator.share(page)
    allocator.share(page)
    assert allocator.references(page) == 3
    allocator.release(page)
    allocator.release(page)
    assert (allocator.available, allocator.references(page)) == (0, 1)
    allocator.release(page)
    assert allocator.available == 1
    assert allocator.allocate() == page
    assert allocator.references(page) == 1


def test_allocator_refuses_a_double_release():
    allocator = PageAllocator(2)
    page = allocator.allocate()
    allocator.release(page)
    with pytest.raises(KeyError):
        allocator.release(page)
    assert allocator.available == 1


def test_allocator_takes_no_memory_for_pages_that_were_never_held():
    allocator = PageAllocator(10**15)  # of a plan
    allocator.recount([3, 3])
    assert allocator.available == 10**15 - 2
    assert [allocator.allocate() for _ in range(4)] == [1, 2, 4, 5]
    allocator.release(2)
    assert (allocator.allocate(), allocator.available) == (2, 10**15 - 6)


# reserve, commit, free


@pytest.mark.parametrize(
    ("tokens", "window", "c4", "c16"),
    [
        (1, 1, 0, 0),
        (3, 1, 0, 0),
        (4, 1, 1, 0),
        (15, 1, 1, 0),
        (16, 1, 1, 1),
        (64, 1, 1, 1),
        (65, 2, 1, 1),
        (256, 4, 1, 1),
        (259, 5, 1, 1),
        (260, 5, 2, 1),
        (512, 8, 2, 1),
        (528, 9, 3, 2),
    ],
)
def test_reserve_takes_the_pages_that_are_written(tokens, window, c4, c16):
    manager = make_manager(max_num_batched_tokens=600, ratios=(4, 16))
    cache = manager.create()
    manager.reserve([(cache, tokens)])
    assert used(manager) == {WINDOW: window, STATE: 1, C4: c4, C16: c16}
    manager.free(cache)
    assert used(manager) == {WINDOW: 0, STATE: 0, C4: 0, C16: 0}
    assert cache == SequenceCache(tables={WINDOW: [], STATE: [], C4: [], C16: []})


def test_reserve_twice_takes_nothing_more():
    manager = make_manager()
    cache = manager.create()
    manager.reserve([(cache, 70)])
    tables = {group: list(table) for group, table in cache.tables.items()}
    manager.reserve([(cache, 66)])
    assert cache.tables == tables


def test_a_window_only_model_has_one_group():
    manager = make_manager(ratios=())
    cache = manager.create()
    advance(manager, cache, range(70))
    assert list(cache.tables) == [WINDOW]
    assert read(manager, cache, WINDOW, 69) == 69


def test_a_freed_sequence_starts_over():
    manager = make_manager()
    cache = manager.create()
    advance(manager, cache, range(100))
    manager.free(cache)
    advance(manager, cache, range(500, 503))
    assert (cache.num_tokens, cache.low_water) == (3, 0)
    assert [read(manager, cache, WINDOW, i) for i in range(3)] == [500, 501, 502]


# block_table


def test_block_tables_are_padded_with_the_null_page():
    manager = make_manager()
    caches = [manager.create() for _ in range(3)]
    for cache, n in zip(caches, (65, 1, 0), strict=True):
        if n:
            advance(manager, cache, range(n))
    table = manager.block_table(caches, WINDOW)
    assert table.dtype == torch.int32
    assert table.tolist() == [caches[0].tables[WINDOW], [*caches[1].tables[WINDOW], 0], [0, 0]]
    assert manager.block_table(caches[1:], C4).tolist() == [[0], [0]]


# window freeing


@pytest.mark.parametrize(
    ("window", "rollback", "tokens", "dead"),
    [
        (4, 0, 66, 0),  # the next query, at 66, reads 63..66
        (4, 0, 67, 1),
        (4, 5, 71, 0),
        (4, 5, 72, 1),
        (4, 0, 130, 1),
        (4, 0, 131, 2),
        (1, 0, 64, 1),
        (64, 0, 126, 0),
        (64, 0, 127, 1),
        (128, 16, 206, 0),
        (128, 16, 207, 1),
    ],
)
@pytest.mark.parametrize("chunk", [1, 50, 300], ids=lambda n: f"chunk{n}")
def test_commit_frees_window_pages_that_nothing_can_reach(window, rollback, tokens, dead, chunk):
    manager = make_manager(window=window, max_rollback=rollback, max_num_batched_tokens=300)
    cache = manager.create()
    for start in range(0, tokens, chunk):
        advance(manager, cache, range(start, min(start + chunk, tokens)))
    pages = cache.tables[WINDOW]
    assert len(pages) == -(-tokens // WINDOW_PAGE)
    assert [page == NULL_PAGE for page in pages] == [i < dead for i in range(len(pages))]
    assert used(manager)[WINDOW] == len(pages) - dead
    first = max(cache.low_water - window + 1, 0)
    assert [read(manager, cache, WINDOW, i) for i in range(first, tokens)] == list(range(first, tokens))


def test_low_water_follows_the_longest_length_and_never_falls():
    manager = make_manager(max_rollback=5)
    cache = manager.create()
    marks = []
    for action, n in [("add", 3), ("add", 4), ("cut", 4), ("add", 1), ("add", 6), ("cut", 6), ("add", 9)]:
        if action == "add":
            advance(manager, cache, range(n))
        else:
            assert manager.truncate(cache, n) == n
        marks.append((cache.num_tokens, cache.low_water))
    assert marks == [(3, 0), (7, 2), (4, 2), (5, 2), (11, 6), (6, 6), (15, 10)]


@pytest.mark.parametrize("tokens", [1, 3, 4, 63, 64, 255, 256, 259, 260, 300, 520])
def test_pages_needed_are_those_that_a_sequence_holds(tokens):
    """What admission counts with; of the window, what a sequence holds at most."""
    manager = make_manager(ratios=(4, 16), max_num_batched_tokens=600)
    cache = manager.create()
    advance(manager, cache, range(tokens))
    needed, held = manager.pages_needed(tokens), manager.held_pages(cache)
    assert held == used(manager)
    assert {group: needed[group] for group in (STATE, C4, C16)} == {group: held[group] for group in (STATE, C4, C16)}
    assert held[WINDOW] <= needed[WINDOW] <= window_pages_per_sequence(13, 5)
    manager.free(cache)


# truncate


@pytest.mark.parametrize("n", [-1, 11], ids=["negative", "beyond"])
def test_truncate_refuses_a_length_outside_what_is_computed(n):
    manager = make_manager()
    cache = manager.create()
    advance(manager, cache, range(10))
    with pytest.raises(ValueError, match=rf"truncate\({n}\) of a sequence with 10"):
        manager.truncate(cache, n)
    assert cache.num_tokens == 10


def test_truncate_within_the_rollback_keeps_what_later_tokens_read():
    manager = make_manager(window=13, max_rollback=5)
    cache = manager.create()
    advance(manager, cache, range(131))
    assert manager.truncate(cache, 126) == 126
    assert cache.tables[WINDOW][2:] == []
    assert [read(manager, cache, WINDOW, i) for i in range(126 - 12, 126)] == list(range(114, 126))
    rows = range(126 - 8 + 1, 126)  # an overlapping entry that closes at 126 reads 8 tokens
    assert [read(manager, cache, STATE, i % ring(manager)) for i in rows] == list(rows)


def test_truncate_further_back_forgets_everything():
    manager = make_manager(max_rollback=5)
    cache = manager.create()
    advance(manager, cache, range(131))
    assert manager.truncate(cache, 125) == 0
    assert (cache.num_tokens, cache.low_water) == (0, 0)
    assert not any(used(manager).values())


def test_truncate_to_the_present_length_changes_nothing():
    manager = make_manager()
    cache = manager.create()
    advance(manager, cache, range(90))
    before = {group: list(table) for group, table in cache.tables.items()}
    assert manager.truncate(cache, 90) == 90
    assert cache.tables == before


def test_truncate_within_a_page_needs_no_other_look():
    """Drafts that are taken back: tables on the device stay as they are, and the pages are known to be there."""
    manager = make_manager(window=64, max_rollback=5)
    cache = manager.create()
    advance(manager, cache, range(70))
    manager.reserve([(cache, 3)])
    manager.commit(cache, 3)
    version, owned_to = cache.version, cache.owned_to
    manager.truncate(cache, 71)
    assert (cache.version, cache.owned_to) == (version, owned_to)
    assert owned_to >= 73
    manager.truncate(cache, 70 - 6)  # further back than this sequence was looked at, and over the border of a page
    assert cache.version > version
    assert cache.owned_to == 0


@pytest.mark.parametrize("ratio", [3, 4])
def test_what_a_truncation_reopens_may_be_shared(ratio):
    """A fork owns the pages from where it wrote on, not those before."""
    manager = make_manager(window=64, max_rollback=5, ratios=(ratio,), max_num_batched_tokens=300)
    parent = manager.create()
    advance(manager, parent, range(1000, 1257))
    fork = manager.fork(parent)
    advance(manager, fork, [7])
    manager.truncate(fork, 253)
    advance(manager, fork, range(2000, 2010))
    for i in range(250, 257):
        assert read(manager, parent, WINDOW, i) == 1000 + i
        assert read(manager, fork, WINDOW, i) == (1000 + i if i < 253 else 2000 + i - 253)
    assert fork.tables[ratio_group(ratio)][0] != parent.tables[ratio_group(ratio)][0]


# fork


@pytest.mark.parametrize("length", [1, 3, 4, 63, 64, 65, 127, 130, 255, 256, 257])
@pytest.mark.parametrize("writer", ["child", "parent"])
def test_a_fork_never_sees_what_the_other_writes(length, writer):
    manager = make_manager(window=64, max_rollback=5, max_num_batched_tokens=300)
    parent = manager.create()
    advance(manager, parent, range(1000, 1000 + length))
    child = manager.fork(parent)
    assert child.tables == parent.tables
    assert child.tables[WINDOW] is not parent.tables[WINDOW]
    first, second = (child, parent) if writer == "child" else (parent, child)
    advance(manager, first, range(2000, 2070))
    advance(manager, second, range(3000, 3070))
    for cache, own in ((first, 2000), (second, 3000)):
        values = [*range(1000, 1000 + length), *range(own, own + 70)]
        low = max(cache.low_water - 63, 0)
        assert [read(manager, cache, WINDOW, i) for i in range(low, len(values))] == values[low:]
        assert [read(manager, cache, C4, e) for e in range(len(values) // 4)] == values[3::4]
    for cache in (first, second):
        manager.free(cache)
    assert not any(used(manager).values())


def test_a_fork_shares_pages_until_one_of_the_two_writes_to_them():
    manager = make_manager(window=200, max_num_batched_tokens=300)
    parent = manager.create()
    advance(manager, parent, range(130))
    before = used(manager)
    child = manager.fork(parent)
    assert used(manager) == before
    advance(manager, child, [7, 8])
    # written: the third window page, the state, and the page of the entry that closes at position 131
    assert used(manager) == {group: pages + 1 for group, pages in before.items()}
    assert child.tables[WINDOW][:2] == parent.tables[WINDOW][:2]
    advance(manager, parent, [9, 10])
    assert used(manager) == {group: pages + 1 for group, pages in before.items()}


def test_a_shared_page_that_a_truncation_reopens_is_copied():
    manager = make_manager(window=64)
    parent = manager.create()
    advance(manager, parent, range(100))
    child = manager.fork(parent)
    manager.truncate(child, 97)
    advance(manager, child, [5, 6, 7])
    assert [read(manager, parent, WINDOW, i) for i in range(95, 100)] == [95, 96, 97, 98, 99]
    assert [read(manager, child, WINDOW, i) for i in range(95, 100)] == [95, 96, 5, 6, 7]
    assert (read(manager, parent, C4, 24), read(manager, child, C4, 24)) == (99, 7)


@pytest.mark.parametrize("forks", [2, 3])
def test_forks_that_fill_the_pools_can_all_write_in_one_step(forks):
    """Of the sequences that share a page, all but one need a copy."""
    manager = make_manager(max_num_seqs=forks)
    family = [manager.create()]
    advance(manager, family[0], range(101))
    family += [manager.fork(family[0]) for _ in range(forks - 1)]
    manager.reserve([(cache, 3) for cache in family])
    assert used(manager)[STATE] == forks
    for i, cache in enumerate(family):
        compute(manager, cache, [10 * i, 10 * i + 1, 10 * i + 2])
    for i, cache in enumerate(family):
        values = [*range(96, 101), 10 * i, 10 * i + 1, 10 * i + 2]
        assert [read(manager, cache, WINDOW, p) for p in range(96, 104)] == values
        assert read(manager, cache, STATE, 102 % ring(manager)) == 10 * i + 1
        assert read(manager, cache, C4, 25) == 10 * i + 2


def test_reserve_copies_every_pool_of_the_group():
    manager = make_manager(ratios=(4, 16))
    parent = manager.create()
    manager.reserve([(parent, 17)])
    assert {pool.spec.group for pool in manager.pools} == set(parent.tables)
    for i, pool in enumerate(manager.pools):
        floats(pool)[parent.tables[pool.spec.group][0]] = i
    manager.commit(parent, 17)
    child = manager.fork(parent)
    manager.reserve([(child, 15)])
    for i, pool in enumerate(manager.pools):
        page = child.tables[pool.spec.group][0]
        assert page != parent.tables[pool.spec.group][0]
        assert floats(pool)[page].eq(i).all()


# OutOfPages


@pytest.mark.parametrize("group", [WINDOW, STATE, C4, C16])
def test_out_of_pages_changes_nothing_and_names_the_pool(group):
    manager = make_manager(ratios=(4, 16))
    first, second = manager.create(), manager.create()
    advance(manager, first, range(70))
    hog = manager._allocators[group]
    while hog.available:
        hog.allocate()
    before = ({g: list(t) for g, t in first.tables.items()}, manager.available_pages())
    with pytest.raises(OutOfPages, match=rf"the {group} pool has 0 free pages and this step needs \d"):
        manager.reserve([(first, 1), (second, 150)])
    assert ({g: list(t) for g, t in first.tables.items()}, manager.available_pages()) == before
    assert second.tables == {WINDOW: [], STATE: [], C4: [], C16: []}
    assert read(manager, first, WINDOW, 69) == 69


def test_out_of_pages_counts_copies():
    manager = make_manager()
    parent = manager.create()
    advance(manager, parent, range(10))
    child = manager.fork(parent)
    hog = manager._allocators[STATE]
    while hog.available:
        hog.allocate()
    with pytest.raises(OutOfPages, match="needs 1"):
        manager.reserve([(child, 1)])
    assert child.tables == parent.tables
    manager.free(child)
    advance(manager, parent, [3])


@pytest.mark.parametrize(
    ("window", "rollback", "seqs", "budget"),
    [(13, 5, 3, 150), (128, 16, 2, 64), (64, 0, 4, 1), (65, 63, 2, 65), (1, 0, 3, 7), (129, 1, 1, 600)],
    ids=lambda value: str(value),
)
def test_pools_never_run_out_within_what_the_layout_promises(window, rollback, seqs, budget):
    """All sequences at full length, in chunks that share the token budget in uneven ways."""
    manager = make_manager(window, 400, seqs, budget, rollback, ratios=(4, 16))
    rng = random.Random(f"{window}{rollback}{seqs}{budget}")
    caches = [manager.create() for _ in range(seqs)]
    while pending := [c for c in caches if c.num_tokens < 400]:
        left, batch = budget, []
        for cache in rng.sample(pending, len(pending)):
            n = min(400 - cache.num_tokens, left, rng.choice([1, 2, 63, 64, 65, budget]))
            if n:
                batch.append((cache, n))
                left -= n
        manager.reserve(batch)
        for cache, n in batch:
            manager.commit(cache, n)
    for cache in caches:
        assert manager.truncate(cache, 400 - rollback) == 400 - rollback
    for cache in caches:
        manager.free(cache)
    assert not any(used(manager).values())
