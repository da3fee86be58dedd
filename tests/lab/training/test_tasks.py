"""What the tasks ask is answerable from their tokens, only from far away, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.lab.training import AssociativeRecall, CopyAcross, Needle, TextTask, make_task, sample_text
from deepseek_attn.lab.training.task import BOS
from deepseek_attn.lab.training.tasks import MARK
from deepseek_attn.text.tokenizer_files import make_tokenizer

LENGTH, GAP = 120, 50


def drawn(task, seed=0, size=32):
    return task.batch(size, LENGTH, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["recall", "needle", "copy"])
def test_batches_have_the_shape_and_depend_on_the_seed_alone(name):
    task = make_task(name, 96, gap=GAP)
    tokens, mask = drawn(task)
    assert tokens.shape == mask.shape == (32, LENGTH + 1)
    assert tokens.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert (tokens[:, 0] == BOS).all()
    assert 0 <= tokens.min() <= tokens.max() < 96
    assert not mask[:, 0].any()
    assert torch.equal(tokens, drawn(task)[0])
    assert not torch.equal(tokens, drawn(task, seed=1)[0])


def test_symbols_are_keys_values_and_filler_apart():
    task = AssociativeRecall(96, GAP, symbols=7, pairs=5)
    assert (task.keys, task.values, task.filler) == (range(3, 10), range(10, 17), range(17, 96))
    tokens, mask = drawn(task)
    assert set(tokens[mask].tolist()) == set(task.values), "every value is asked for"


def test_every_recalled_value_is_that_of_its_key():
    tokens, mask = drawn(AssociativeRecall(96, GAP, pairs=5))
    for row, marks in zip(tokens.tolist(), mask.tolist(), strict=True):
        pairs = dict(zip(row[1:11:2], row[2:11:2], strict=True))
        assert len(pairs) == 5
        answers = [i for i, mark in enumerate(marks) if mark]
        assert len(answers) == 5
        assert {row[i - 1] for i in answers} == set(pairs)
        assert all(pairs[row[i - 1]] == row[i] for i in answers)
        assert answers[0] - 11 >= GAP
        # the filler between them answers nothing
        assert not set(row[11 : answers[0] - 1]) & set(pairs)


def test_the_needle_is_in_one_place_a_gap_before_the_question():
    tokens, mask = drawn(Needle(96, GAP))
    places = set()
    for row, marks in zip(tokens.tolist(), mask.tolist(), strict=True):
        first, second = (i for i, token in enumerate(row) if token == MARK)
        assert row[first : first + 3] == row[second:] == row[-3:]
        assert second - (first + 2) > GAP
        assert [i for i, mark in enumerate(marks) if mark] == [LENGTH]
        assert row.count(row[-2]) == 2, "the key is nowhere else"
        places.add(first)
    assert len(places) > 10


def test_the_copy_repeats_what_was_marked():
    tokens, mask = drawn(CopyAcross(96, GAP, length=7))
    assert torch.equal(tokens[:, 1:9], tokens[:, -8:])
    assert (tokens[:, 1] == MARK).all()
    assert torch.equal(mask.nonzero()[:, 1].view(32, 7), torch.arange(LENGTH - 6, LENGTH + 1).expand(32, 7))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_task("riddle", 96), "there are text, recall, needle, copy"),
        (lambda: make_task("needle", 6), "2 symbols or more"),
        (lambda: make_task("copy", 96, symbols=47), "beside those for keys and values"),
        (lambda: make_task("copy", 96, gap=0), "gap of at least 1"),
        (lambda: AssociativeRecall(96, GAP, pairs=40), "there are 12"),
        (lambda: drawn(CopyAcross(96, gap=100)), "sequences of 134 tokens are the shortest"),
        (lambda: TextTask([0, 99], 96), "not below vocab_size 96"),
        (lambda: drawn(TextTask(list(range(90)), 96)), "too few for sequences of 120"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_shortest_sequence_holds_the_task():
    task = CopyAcross(96, gap=100)
    assert task.batch(2, 134, torch.Generator()).tokens.shape == (2, 135)


def test_text_pieces_come_from_their_split():
    task = TextTask(list(range(1, 2001)), 3000)
    for split, low, high in (("train", 1, 1961), ("test", 1961, 2001)):
        tokens, mask = task.batch(64, 30, torch.Generator().manual_seed(0), split)
        assert (tokens[:, 0] == BOS).all()
        assert torch.equal(tokens[:, 2:] - tokens[:, 1:-1], torch.ones(64, 29, dtype=torch.int64))
        assert low <= tokens[:, 1:].min() <= tokens.max() < high
        assert mask[:, 1:].all()


def test_the_sample_text_is_readable_and_round_trips():
    text = sample_text()
    assert "It is a truth universally acknowledged" in text
    assert len(text) > 3_900_000
    task = TextTask.from_text(vocab_size=400, characters=20_000)
    assert task.tokenizer.decode(task.ids.tolist()) == text[:20_000]
    assert len(task.ids) < 15_000, "merges were learned"
    plain = TextTask.from_text("a few words", vocab_size=300, tokenizer=make_tokenizer(300))
    assert len(plain.ids) == 11
