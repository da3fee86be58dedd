"""Sequences that go back, and forks: as if the other tokens had never been."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.runner import StepOptions
from tests.support.invariance_cases import (
    KINDS,
    MIXED,
    NUMERICS,
    SAME,
    advance,
    extend,
    fresh,
    pages_returned,
    shared_runner,
)
from tests.support.small_models import assert_close, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [1, 56, 74, 118, 184], ids=lambda start: f"from{start}")
def test_truncate_to_every_length(start):
    """One sequence per length: decode 16 tokens past ``start``, go back, continue with other tokens.

    From 74 the first window page (tokens 0 to 63) is out of reach at length 90, but not after going back to 74.
    """
    runner = shared_runner(MIXED)
    rollback = runner.layout.max_rollback
    tokens = prompt(runner.config, start + rollback, seed=4)
    lengths = range(start, start + rollback + 1)
    suffixes = [prompt(runner.config, 6, seed=100 + n) for n in lengths]
    with pages_returned(runner):
        sequences = [runner.sequence(tokens) for _ in lengths]
        runner.step([(s, start) for s in sequences])
        for _ in range(rollback):
            runner.step([(s, 1) for s in sequences])
        for sequence, n, suffix in zip(sequences, lengths, suffixes, strict=True):
            sequence.truncate(n)
            assert sequence.num_computed == n, "within the rollback nothing is computed again"
            extend(sequence, suffix)
        steps = [runner.step([(s, k) for s in sequences], StepOptions(all_logits=True)).logits for k in (1, 1, 1, 3)]
        for sequence in sequences:
            sequence.free()
    expected = runner.score([tokens[:n] + suffix for n, suffix in zip(lengths, suffixes, strict=True)])
    for i, n in enumerate(lengths):
        assert_close(torch.cat([required(step)[i] for step in steps]), expected[i][n:], SAME, f"truncated to {n}")


@pytest.mark.parametrize(
    ("length", "numerics"),
    tiered(
        [(n, "exact") for n in (120, 123, 127, 128, 129, 135)] + [(n, q) for n in (127, 130) for q in NUMERICS[1:]],
        [(127, "official")],
    ),
)
def test_truncate_bit_for_bit(length, numerics):
    """The same steps with and without a detour that is taken back."""
    runner = shared_runner(KINDS[numerics], numerics)
    tokens, suffix = prompt(runner.config, 136, seed=4), prompt(runner.config, 12, seed=5)
    start = min(length - 3, 125)
    expected = fresh(runner, tokens[:length] + suffix, [start] + [1] * (length - start) + [1] * 10 + [2])
    sequence = runner.sequence(tokens)
    advance(runner, sequence, [start] + [1] * (136 - start))
    sequence.truncate(length)
    extend(sequence, suffix[:4])
    logits = [advance(runner, sequence, [1] * 4)]
    sequence.truncate(length + 2)  # once more, over what has just been written
    extend(sequence, suffix[2:])
    logits = [logits[0][:2], advance(runner, sequence, [1] * 8 + [2])]
    sequence.free()
    assert torch.equal(torch.cat(logits), expected[length:])


@pytest.mark.parametrize("length", tiered([0, 1, 60, 119], [60]))
def test_truncate_beyond_the_rollback(length):
    runner = shared_runner(MIXED)
    tokens, suffix = prompt(runner.config, 136, seed=4), prompt(runner.config, 9, seed=5)
    with pages_returned(runner):
        sizes = [length + 3, 1, 1, 1, 3]
        expected = fresh(runner, tokens[:length] + suffix, sizes)
        sequence = runner.sequence(tokens)
        advance(runner, sequence, [136])
        sequence.truncate(length)
        assert sequence.num_computed == 0
        extend(sequence, suffix)
        assert torch.equal(advance(runner, sequence, sizes), expected)
        sequence.free()


def test_truncate_pending_tokens():
    runner = shared_runner(MIXED)
    tokens = prompt(runner.config, 80)
    sequence = runner.sequence(tokens)
    parts = [advance(runner, sequence, [70])]
    sequence.truncate(75)
    assert (sequence.num_computed, sequence.num_pending) == (70, 5)
    extend(sequence, tokens[75:])
    parts.append(advance(runner, sequence, [10]))
    sequence.free()
    assert torch.equal(torch.cat(parts), fresh(runner, tokens, [70, 10]))


def test_a_step_that_breaks_off():
    """In the last layer: the step's tokens do not count, and sequences whose state it has overwritten start again."""
    runner = shared_runner(MIXED)
    rollback = runner.layout.max_rollback
    sizes = {"within": rollback, "beyond": rollback + 1}
    tokens = prompt(runner.config, 150, seed=4)
    expected = fresh(runner, tokens, [101, 49])[101:]

    def interrupt(module, args):
        raise KeyboardInterrupt

    with pages_returned(runner):
        sequences = {name: runner.sequence(tokens) for name in sizes}
        runner.step([(sequence, 101) for sequence in sequences.values()])
        last = runner.model.layers[str(len(MIXED) - 1)]
        with last.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            runner.step([(sequences[name], n) for name, n in sizes.items()])
        assert {name: s.num_computed for name, s in sequences.items()} == {"within": 101, "beyond": 0}
        advance(runner, sequences["beyond"], [101])
        for name, sequence in sequences.items():
            assert_close(advance(runner, sequence, [49]), expected, SAME, name)
            sequence.free()


FORKS = [(n, "exact") for n in (1, 3, 4, 5, 63, 64, 65, 127, 128, 130, 255)]
FORKS += [(n, numerics) for n in (3, 64, 130) for numerics in ("official", "serving")]


QUICK = [(130, "official")]


@exhaustive_on_cpu
@pytest.mark.parametrize(("length", "numerics"), tiered(FORKS, QUICK))
def test_fork(length, numerics):
    """Parent and child continue with different tokens, in turns; a grandchild outlives both."""
    runner = shared_runner(KINDS[numerics], numerics)
    tokens = prompt(runner.config, length, seed=6)
    suffixes = [prompt(runner.config, 7, seed=7 + i) for i in range(3)]
    steps = [1, 1, 1, 1, 3]
    expected = [fresh(runner, tokens + suffix, [length, *steps])[length:] for suffix in suffixes]
    with pages_returned(runner):
        parent = runner.sequence(tokens)
        advance(runner, parent, [length])
        child = parent.fork()
        grandchild = child.fork()
        for sequence, suffix in zip((parent, child, grandchild), suffixes, strict=True):
            extend(sequence, suffix)
        rows = [[], []]
        for n in steps:
            rows[0].append(advance(runner, parent, [n]))
            rows[1].append(advance(runner, child, [n]))
        parent.free()
        child.free()
        rows.append([advance(runner, grandchild, steps)])
        grandchild.free()
    for actual, reference in zip(rows, expected, strict=True):
        assert torch.equal(torch.cat(actual), reference)


def test_fork_in_one_batch():
    """Parent and children write in the same step."""
    runner = shared_runner(MIXED)
    tokens = prompt(runner.config, 126, seed=6)
    suffixes = [prompt(runner.config, 5, seed=7 + i) for i in range(3)]
    with pages_returned(runner):
        parent = runner.sequence(tokens)
        advance(runner, parent, [126])
        family = [parent, parent.fork(), parent.fork()]
        for sequence, suffix in zip(family, suffixes, strict=True):
            extend(sequence, suffix)
        rows = [runner.step([(s, n) for s in family], StepOptions(all_logits=True)).logits for n in (1, 1, 1, 2)]
        for sequence in family:
            sequence.free()
    for i, suffix in enumerate(suffixes):
        expected = runner.score([tokens + suffix])[0][126:]
        assert_close(torch.cat([required(step)[i] for step in rows]), expected, SAME)


@exhaustive_on_cpu
def test_truncated_fork_leaves_its_parent_alone():
    runner = shared_runner(MIXED)
    tokens, suffix = prompt(runner.config, 150, seed=6), prompt(runner.config, 20, seed=7)
    sizes = [120] + [1] * 12
    expected = fresh(runner, tokens[:140], sizes + [1] * 8)[132:]
    expected_fork = fresh(runner, tokens[:125] + suffix[:8], [*sizes[:6], *[1] * 8])[125:]
    with pages_returned(runner):
        parent = runner.sequence(tokens)
        advance(runner, parent, sizes)
        child = parent.fork()
        child.truncate(125)
        extend(child, suffix)
        rows = advance(runner, child, [1] * 8)
        assert torch.equal(rows, expected_fork)
        assert torch.equal(advance(runner, parent, [1] * 8), expected)
        parent.free()
        child.free()
