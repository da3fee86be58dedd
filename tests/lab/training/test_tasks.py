"""What the tasks ask is answerable from their tokens, only from where they say, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.lab.training import AssociativeRecall, CopyAcross, TextTask, make_task, sample_text
from deepseek_attn.lab.training.task import BOS, generator_of
from deepseek_attn.lab.training.tasks import MARK, SYNTHETIC
from deepseek_attn.text.tokenizer_files import make_tokenizer
from tests.support.typed import required

LENGTH, GAP = 120, 30
OPTIONS = {"common_words": {"common": 3, "often": 7, "seldom": 2}, "frequent_words": {"words": 40}}


def task_of(name, **options):
    return make_task(name, 96, **OPTIONS.get(name, {}) | {"gap": GAP} | options)


def drawn(task, seed=0, size=32, difficulty=1.0, length=LENGTH):
    return task.batch(size, length, generator_of(seed, 0), difficulty=difficulty)


def rows(batch):
    """(tokens, places of answers, answers, places of their sources) of each sequence."""
    for tokens, mask, targets, sources in zip(*(part.tolist() for part in batch), strict=True):
        places = [place for place, counts in enumerate(mask) if counts]
        yield tokens, places, [targets[place] for place in places], [sources[place] for place in places]


@pytest.mark.parametrize("difficulty", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_batches_have_the_shape_and_depend_on_the_seed_alone(name, difficulty):
    task = task_of(name)
    batch = drawn(task, difficulty=difficulty)
    for part, dtype in zip(batch, (torch.int64, torch.bool, torch.int64, torch.int64), strict=True):
        assert part.shape == (32, LENGTH + 1)
        assert part.dtype == dtype
    tokens, mask, targets, _ = batch
    assert (tokens[:, 0] == BOS).all()
    assert 0 <= tokens.min() <= tokens.max() < 96
    assert not mask[:, 0].any()
    assert mask.any(1).all()
    assert torch.equal(targets[~mask], tokens[~mask])
    assert all(map(torch.equal, batch, drawn(task, difficulty=difficulty)))
    assert not torch.equal(tokens, drawn(task, seed=1, difficulty=difficulty).tokens)


@pytest.mark.parametrize("name", [name for name in SYNTHETIC if not name.endswith("words")])
def test_an_answer_is_read_at_its_source_a_gap_before_the_question(name):
    for length in (LENGTH, 4 * LENGTH):
        for tokens, places, answers, sources in rows(drawn(task_of(name), length=length)):
            assert [tokens[source] for source in sources] == answers
            assert max(sources) + GAP < min(places)


def test_questions_are_about_pairs_and_their_answers_are_not_written():
    for questions in (0, 9):
        for tokens, places, answers, _ in rows(drawn(AssociativeRecall(96, GAP, pairs=5, questions=questions))):
            pairs = dict(zip(tokens[1:11:2], tokens[2:11:2], strict=True))
            assert len(pairs) == 5
            assert len(places) == (questions or 5)
            assert [pairs[tokens[place - 1]] for place in places] == answers
            assert {tokens[place - 1] for place in places} == set(pairs) or questions
            assert not set(tokens[11:]) & set(pairs.values())


def test_distances_of_questions_follow_a_power_law():
    batch = drawn(AssociativeRecall(96, 0, pairs=2), size=256, length=1000)
    places = batch.mask.nonzero()[:, 1].float()
    assert places.median() < 150
    assert places.max() > 900


def test_a_curriculum_begins_with_few_pairs_and_near_questions():
    batch = drawn(AssociativeRecall(96, 0, pairs=8), difficulty=0.25)
    assert len(set(batch.tokens[0, 1:5:2].tolist())) == 2
    assert batch.mask.nonzero()[:, 1].max() <= 5 + 0.25 * LENGTH


def test_needles_are_at_every_depth():
    batch = drawn(task_of("needle"), size=256)
    for tokens, places, _, sources in rows(batch):
        assert tokens[sources[0] - 2 : sources[0] + 1] == tokens[-3:]
        assert places == [LENGTH]
    depths = batch.sources.max(1).values
    assert depths.min() < 8
    assert depths.max() > LENGTH - GAP - 12


def test_the_copy_repeats_what_was_marked():
    tokens, mask, *_ = drawn(CopyAcross(96, GAP, length=7))
    assert torch.equal(tokens[:, 1:9], tokens[:, -8:])
    assert (tokens[:, 1] == MARK).all()
    assert torch.equal(mask.nonzero()[:, 1].view(32, 7), torch.arange(LENGTH - 6, LENGTH + 1).expand(32, 7))


def test_variables_of_the_chain_that_begins_with_the_value():
    for tokens, places, answers, _ in rows(drawn(task_of("variables", chains=2, hops=2))):
        facts = [place for place, token in enumerate(tokens) if token == MARK]
        read = {tokens[place + 2]: tokens[place + 1] for place in facts[:-1]}
        assert len(read) == 6
        chain, value = [], tokens[facts[-1] + 1]
        while value in read:
            value = read[value]
            chain.append(value)
        assert chain == answers == [tokens[place] for place in places]


def test_the_common_words_are_the_most_frequent_ones():
    for tokens, places, answers, _ in rows(drawn(task_of("common_words"))):
        counts = {token: tokens[: places[0]].count(token) for token in range(15, 27)}
        assert answers == sorted(token for token, count in counts.items() if count == 7)
        assert sorted(counts.values())[-4] == 2


def test_the_frequent_words_come_in_order():
    for tokens, places, answers, _ in rows(drawn(task_of("frequent_words"))):
        counts = {token: tokens[: places[0]].count(token) for token in range(15, 27)}
        assert sum(counts.values()) == 40
        assert answers == sorted(counts, key=lambda token: (-counts[token], token))[:3]


@pytest.mark.parametrize(
    ("name", "chance"), [("recall", 1 / 12), ("needle", 1 / 12), ("copy", 1 / 12), ("variables", 1 / 12)]
)
def test_chance_is_one_of_the_symbols(name, chance):
    assert task_of(name).chance(LENGTH) == pytest.approx(chance, abs=0.02)


def test_chance_knows_the_order_of_answers():
    """The lowest of three of twelve words is the first one in a quarter of the sequences."""
    assert required(task_of("common_words").chance(LENGTH)) > 0.15
    assert TextTask(list(range(1, 90)), 96).chance(10) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_task("riddle", 96), "there are text, recall, needle, copy"),
        (lambda: make_task("needle", 6), "2 symbols or more"),
        (lambda: make_task("copy", 96, symbols=47), "beside those for keys and values"),
        (lambda: make_task("copy", 96, gap=-1), "gap of at least 0"),
        (lambda: make_task("copy", 96, length=0), "length is 0"),
        (lambda: make_task("variables", 96, chains=4, hops=3), "is 16: there are 12"),
        (lambda: make_task("common_words", 96, often=2, seldom=2), "often must be the larger"),
        (lambda: make_task("frequent_words", 96, words=2), "at least 3 are needed"),
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
        tokens, mask, targets, _ = task.batch(64, 30, torch.Generator().manual_seed(0), split)
        assert (tokens[:, 0] == BOS).all()
        assert torch.equal(tokens[:, 2:] - tokens[:, 1:-1], torch.ones(64, 29, dtype=torch.int64))
        assert low <= tokens[:, 1:].min() <= tokens.max() < high
        assert mask[:, 1:].all()
        assert torch.equal(targets, tokens)


def test_the_sample_text_is_readable_and_round_trips():
    text = sample_text()
    assert "It is a truth universally acknowledged" in text
    assert len(text) > 3_900_000
    task = TextTask.from_text(vocab_size=400, characters=20_000)
    assert required(task.tokenizer).decode(task.ids.tolist()) == text[:20_000]
    assert len(task.ids) < 15_000, "merges were learned"
    plain = TextTask.from_text("a few words", vocab_size=300, tokenizer=make_tokenizer(300))
    assert len(plain.ids) == 11
