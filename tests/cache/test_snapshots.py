"""Snapshots and the prefix cache: going on from one equals having computed it all."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.cache.layout import STATE, WINDOW
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.prefix import BlockKeys, PrefixCache
from deepseek_attn.cache.snapshots import SnapshotStore
from deepseek_attn.runner import ModelRunner
from tests.cache.runner_cases import compute, poison_free_pages, runner_of
from tests.support.small_models import assert_close, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered

CASES = [
    (family, "exact", blocks) for family in ("mixed", "overlap", "window", "odd", "v32", "v41") for blocks in (1, 3)
]
CASES += [
    ("mixed", "official", 3),
    ("mixed", "serving", 1),
    ("mixed", "serving", 3),
    ("overlap", "serving", 1),
    ("window", "serving", 1),
]
CASES += [("v32", "official", 1), ("v41", "official", 3)]
QUICK = [("mixed", "serving", 1), ("odd", "exact", 1)]


@exhaustive_on_cpu
@pytest.mark.parametrize("past", tiered([0, 2], [2]))
@pytest.mark.parametrize(("family", "numerics", "blocks"), tiered(CASES, QUICK))
def test_going_on_from_a_snapshot(family, blocks, numerics, past):
    """Bit for bit, MTP included, in poisoned memory, and after the snapshot's donor has gone on and ended.

    The snapshot is taken at the edge, or ``past`` steps later.
    """
    runner = runner_of(family, numerics)
    length = blocks * runner.layout.snapshot_block
    before = runner.manager.available_pages()
    tokens = prompt(runner.config, length + 1)
    suffixes = [tokens[length:] + prompt(runner.config, 20, seed=seed) for seed in (1, 2)]
    sizes = (7, 1, 1, 11)
    cold = []
    for suffix in suffixes:
        sequence = runner.sequence(tokens[:length] + suffix)
        compute(runner, sequence, length)
        cold.append(compute(runner, sequence, *sizes))
        sequence.free()
    store = SnapshotStore(runner.manager)
    donor = runner.sequence(tokens[:length] + suffixes[0])
    compute(runner, donor, length)
    after = [compute(runner, donor, *sizes[:past])] if past else []
    snapshot = store.take(donor.cache, length)
    assert torch.equal(torch.cat([*after, compute(runner, donor, *sizes[past:])]), cold[0])
    donor.free()
    poison_free_pages(runner, [snapshot.cache])
    for suffix, expected in zip((suffixes[1], suffixes[0]), (cold[1], cold[0]), strict=True):
        sequence = runner.sequence(tokens[:length] + suffix, store.restore(snapshot))
        assert sequence.num_computed == length
        assert torch.equal(compute(runner, sequence, *sizes), expected)
        sequence.free()
    store.drop(snapshot)
    assert runner.manager.available_pages() == before
    for pool in runner.pools:
        pool.tensor.zero_()


def test_ratios_without_a_common_multiple():
    """Blocks stay short; the rows of windows that are open at their edges are kept."""
    runner = runner_of("odd")
    assert runner.layout.snapshot_block == 64
    carried = {(pool.spec.layer, pool.spec.carry) for pool in runner.pools if pool.spec.kind == "state"}
    assert carried == {("layers.0", 6), ("layers.1", 5), ("layers.2", 7)}
    assert {pool.spec.carry for pool in runner_of("mixed").pools} == {0, 4}


def test_a_snapshot_holds_the_window_tail_and_no_state_page():
    runner = runner_of("mixed")
    store, block = SnapshotStore(runner.manager), runner.layout.snapshot_block
    assert block == 128
    sequence = runner.sequence(prompt(runner.config, 4 * block))
    compute(runner, sequence, 4 * block, mtp=False)
    snapshot = store.take(sequence.cache)
    held = runner.manager.held_pages(snapshot.cache)
    assert (held[WINDOW], held[STATE]) == (1, 0)  # a window of 20 tokens, within one page
    sequence.free()
    assert sum(runner.manager.available_pages()[g] for g in (STATE,)) == runner.layout.pages[STATE] - 1
    store.drop(snapshot)


def test_restored_sequences_roll_back_no_further_than_the_snapshot():
    runner = runner_of("mixed")
    store, tokens = SnapshotStore(runner.manager), prompt(runner.config, 140)
    sequence = runner.sequence(tokens)
    compute(runner, sequence, 128, mtp=False)
    snapshot = store.take(sequence.cache)
    expected = compute(runner, sequence, 2, 10, mtp=False)[2:]
    again = runner.sequence(tokens, store.restore(snapshot))
    compute(runner, again, 2, 10, mtp=False)
    again.truncate(130)
    assert again.num_computed == 130
    again.token_ids += tokens[130:]
    assert torch.equal(compute(runner, again, 10, mtp=False), expected)
    again.truncate(127)
    assert again.num_computed == 0
    sequence.free()
    store.drop(snapshot)


@pytest.mark.parametrize("length", [1, 64, 127, 129])
def test_no_snapshot_inside_a_block(length):
    runner = runner_of("mixed")
    sequence = runner.sequence(prompt(runner.config, length))
    compute(runner, sequence, length, mtp=False)
    with pytest.raises(ValueError, match="multiple of 128"):
        SnapshotStore(runner.manager).take(sequence.cache)
    sequence.free()


def test_no_snapshot_behind_a_window():
    runner = runner_of("mixed")
    sequence = runner.sequence(prompt(runner.config, 256))
    compute(runner, sequence, 256, mtp=False)
    with pytest.raises(ValueError, match="from 240 tokens on"):
        SnapshotStore(runner.manager).take(sequence.cache, 128)
    sequence.free()


def test_restore_without_a_state_page_changes_nothing():
    runner = runner_of("mixed")
    store, family = SnapshotStore(runner.manager), []
    sequence = runner.sequence(prompt(runner.config, 128))
    compute(runner, sequence, 128, mtp=False)
    snapshot = store.take(sequence.cache)
    family = [runner.sequence([5]) for _ in range(3)]
    runner.step([(other, 1) for other in family])
    before = runner.manager.available_pages()
    with pytest.raises(OutOfPages, match="state pool"):
        store.restore(snapshot)
    assert runner.manager.available_pages() == before
    for other in [sequence, *family]:
        other.free()
    store.drop(snapshot)


# keys and the prefix cache


def test_keys_name_prefixes():
    tokens = list(range(100, 120))
    keys = BlockKeys(4).upto(tokens, 20)
    assert len(keys) == 5
    assert len(set(keys)) == 5
    changed = [*tokens[:9], 0, *tokens[10:]]
    other = BlockKeys(4).upto(changed, 20)
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, True, False, False, False]
    growing, chain = tokens[:3], BlockKeys(4)
    for token in tokens[3:]:
        growing.append(token)
        assert chain.upto(growing, len(growing)) == keys[: len(growing) // 4]


def test_keys_with_lookahead_depend_on_the_next_token():
    tokens = list(range(100, 113))
    keys = BlockKeys(4, lookahead=1).upto(tokens, 13)
    assert len(keys) == 3
    assert len(BlockKeys(4, lookahead=1).upto(tokens[:12], 12)) == 2, "the next token is not known yet"
    other = BlockKeys(4, lookahead=1).upto([*tokens[:8], 0, *tokens[9:]], 13)
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, False, False]


def keep(runner: ModelRunner, cache: PrefixCache, tokens: list[int], chunk: int) -> None:
    """Computes tokens chunk by chunk and offers each length."""
    sequence, keys = runner.sequence(tokens), BlockKeys(runner.layout.snapshot_block)
    while sequence.num_pending:
        compute(runner, sequence, min(chunk, sequence.num_pending), mtp=False)
        if not sequence.num_computed % runner.layout.snapshot_block:
            cache.keep(sequence.cache, keys.upto(tokens, sequence.num_computed))
    sequence.free()


def test_longest_prefix_and_what_was_seen():
    runner = runner_of("mixed")
    before, cache = runner.manager.available_pages(), PrefixCache(runner.manager)
    tokens, block = prompt(runner.config, 512), 128
    keep(runner, cache, tokens, 2 * block)  # snapshots at 256 and 512 tokens
    keys = BlockKeys(block)

    def match(changed_at: int):
        other = [*tokens[:changed_at], (tokens[changed_at] + 1) % 96, *tokens[changed_at + 1 :]]
        return cache.match(BlockKeys(block).upto(other, 511))

    full = cache.match(keys.upto(tokens, 511))
    assert (full.length, full.seen) == (256, 384), "at least one token is left to compute"
    assert [(match(t).length, match(t).seen) for t in (100, 128, 255, 256, 400)] == [
        (0, 0), (0, 128), (0, 128), (256, 256), (256, 384),
    ]  # fmt: skip
    cache.clear()
    assert (cache.match(keys.upto(tokens, 512)).seen, len(cache)) == (0, 0)
    assert runner.manager.available_pages() == before


def test_least_recently_used_goes_first():
    runner = runner_of("mixed", max_snapshots=2)
    cache = PrefixCache(runner.manager)
    prompts = [prompt(runner.config, 129, seed=seed) for seed in range(3)]
    for tokens in prompts[:2]:
        keep(runner, cache, tokens, 128)
    assert cache.match(BlockKeys(128).upto(prompts[0], 128)).length == 128
    keep(runner, cache, prompts[2], 128)
    assert [cache.match(BlockKeys(128).upto(tokens, 128)).length for tokens in prompts] == [128, 0, 128]
    cache.clear()


@pytest.mark.exhaustive
def test_where_all_tokens_are_kept_any_block_can_be_reused():
    runner = runner_of("v32")
    cache, tokens = PrefixCache(runner.manager), prompt(runner.config, 200)
    keep(runner, cache, tokens, 64)
    assert len(cache) == 1, "a longer snapshot contains the shorter ones"
    for seen in (64, 130, 199):
        other = [*tokens[:seen], (tokens[seen] + 1) % 96, *tokens[seen + 1 :]]
        match = cache.match(BlockKeys(64).upto(other, 199))
        assert match.length == seen // 64 * 64
        sequence = runner.sequence(other, cache.start(match))
        rest = compute(runner, sequence, sequence.num_pending, mtp=False)
        cold = runner.sequence(other)
        compute(runner, cold, match.length, mtp=False)
        assert_close(rest, compute(runner, cold, cold.num_pending, mtp=False))
        sequence.free()
        cold.free()
    cache.clear()


def test_reclaimable_pages_are_those_that_only_snapshots_hold():
    runner = runner_of("mixed")
    before, cache = runner.manager.available_pages(), PrefixCache(runner.manager)
    tokens = prompt(runner.config, 384)
    keep(runner, cache, tokens, 128)
    free = runner.manager.available_pages()
    assert cache.reclaimable() == {group: before[group] - free[group] for group in before}
    match = cache.match(BlockKeys(128).upto(tokens, 383))
    sequence = runner.sequence(tokens, cache.start(match))
    held = sum(runner.manager.held_pages(sequence.cache).values()) - 1  # the state page is its own
    assert sum(cache.reclaimable().values()) == sum(before.values()) - sum(free.values()) - held
    sequence.free()
    cache.clear()
