"""LayerSession: any batch in any order is each sequence alone; what it refuses, and what the low level refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.session import LayerSession
from deepseek_attn.testing import poison_caches, relative_error
from tests.support.tiers import tiered
from tests.support.typed import untyped

SIZES = {"max_model_len": 300, "max_num_seqs": 4, "max_num_batched_tokens": 200, "device": "cpu", "numerics": "exact"}
CONFIGS = {
    "V4": ModelConfig.from_preset("tiny"),
    "V3.2": ModelConfig.from_preset("tiny_v32"),
    "V3": ModelConfig.from_preset("tiny_v32").replace(model_type="deepseek_v3"),
}


def make_runner(family: str = "V4", layers: tuple[int, ...] = (1,), **options) -> ModelRunner:
    runner = ModelRunner.from_config(CONFIGS[family], layers=layers, attention_only=True, **SIZES | options)
    poison_caches(runner)
    return runner


made_once = lru_cache(make_runner)


def shared_runner(family: str = "V4") -> ModelRunner:
    """One runner for many tests; the sequences of earlier tests are freed."""
    runner = made_once(family)
    for holder in list(runner.manager._holders.values()):
        if (cache := holder()) is not None:
            runner.manager.free(cache)
    return runner


@pytest.fixture(params=tiered(CONFIGS, ["V4"]))
def session(request) -> LayerSession:
    return LayerSession(shared_runner(request.param))


def hidden(session: LayerSession, *length: int) -> torch.Tensor:
    return torch.randn(*length, session.runner.config.hidden_size)


def alone(session: LayerSession, x: torch.Tensor) -> torch.Tensor:
    """The outputs of one new sequence, in one step."""
    sequence = session.sequence()
    y = sequence.run(x)
    sequence.free()
    return y


@pytest.mark.parametrize(
    "layers", [pytest.param((1,), marks=pytest.mark.exhaustive), (0, 2, 1)], ids=["one_layer", "three_layers"]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_any_batch_in_any_order_is_each_sequence_alone(family, layers):
    """Prompts before decodes, chunks of every size; with several layers, hidden states of each."""
    session = LayerSession(make_runner(family, layers), decode_query_len=2)
    xs = [hidden(session, *[len(layers)][len(layers) == 1 :], n) for n in (150, 41, 67)]
    expected = [alone(session, x) for x in xs]
    sequences, outputs, selected = [session.sequence() for _ in xs], [[] for _ in xs], [[] for _ in xs]
    for counts in ({0: 70, 1: 30}, {1: 1, 2: 40, 0: 2}, {2: 20, 0: 71, 1: 2}, {0: 1, 2: 7, 1: 8}, {0: 6}):
        starts = {i: sequences[i].num_tokens for i in counts}
        x = torch.cat([xs[i][..., starts[i] : starts[i] + n, :] for i, n in counts.items()], dim=-2)
        y = session.run(x, {sequences[i]: n for i, n in counts.items()})
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, False)
        for i, part in zip(counts, y.split(list(counts.values()), dim=-2), strict=True):
            outputs[i].append(part)
        for chosen in list(session.selected.values())[:1]:
            for i, part in zip(counts, chosen.split(list(counts.values())), strict=True):
                selected[i].append(part)
    for sequence, parts, x, whole in zip(sequences, outputs, xs, expected, strict=True):
        assert sequence.num_tokens == x.shape[-2]
        assert relative_error(torch.cat(parts, dim=-2).flatten(0, -2), whole.flatten(0, -2)) < 1e-5
    for sequence, x, parts in zip(sequences, xs, selected, strict=True):
        sequence.free()
        session.sequence().run(x)
        for whole in list(session.selected.values())[:1]:
            assert torch.equal(torch.cat(parts).sort().values, whole.sort().values)


def test_forks_and_truncation_leave_no_trace(session):
    x, other = hidden(session, 150), hidden(session, 150)
    sequence = session.sequence()
    sequence.run(x[:100])
    fork = sequence.fork()
    sequence.run(other[100:109])
    sequence.truncate(100)
    y = torch.cat([sequence.run(x[100:101]), sequence.run(x[101:])])
    assert relative_error(y, alone(session, x)[100:]) < 1e-5
    y = fork.run(other[100:])
    assert relative_error(y, alone(session, torch.cat([x[:100], other[100:]]))[100:]) < 1e-5
    sequence.truncate(0)
    assert relative_error(sequence.run(x), alone(session, x)) < 1e-5
    before = session.runner.manager.available_pages()
    fork.free()
    sequence.free()
    assert all(n > before[group] for group, n in session.runner.manager.available_pages().items())


class Stop(BaseException):
    """As an interrupt: no ``Exception``."""


@pytest.mark.parametrize("where", ["layer", "commit"])
@pytest.mark.parametrize(("new", "lost"), [(16, False), (40, True)])
def test_a_failed_step_takes_its_tokens_back_or_loses_its_sequence(session, monkeypatch, where, new, lost):
    x, runner = hidden(session, 160), session.runner
    sequence, young = session.sequence(), session.sequence()
    sequence.run(x[:100])
    before = runner.manager.available_pages()
    expected = alone(session, x)
    with monkeypatch.context() as patched:
        commit = runner.manager.commit

        def commit_one(cache, n):
            if cache is young.cache:
                raise Stop
            commit(cache, n)

        layer = session.attention[1]
        target, name = (layer, "parallel") if where == "layer" else (runner.manager, "commit")

        def interrupted(y):
            raise Stop

        patched.setattr(target, name, SimpleNamespace(sum=interrupted) if where == "layer" else commit_one)
        with pytest.raises(Stop):
            session.run(torch.cat([hidden(session, new), hidden(session, 50)]), {sequence: new, young: 50})
    assert young.num_tokens == 0
    assert relative_error(young.run(x[:50]), expected[:50]) < 1e-5
    young.free()
    if lost and runner.config.model_type == "deepseek_v4":
        with pytest.raises(ValueError, match="was lost when a step of more than max_rollback tokens failed"):
            sequence.run(x[100:])
        return
    assert sequence.num_tokens == 100
    assert runner.manager.available_pages() == before
    assert relative_error(sequence.run(x[100:]), expected[100:]) < 1e-5


# what the session refuses

X_PROBLEMS: dict[str, Callable[[torch.Tensor], object]] = {
    "width": lambda x: x[:, 1:],
    "rows": lambda x: x[1:],
    "batch": lambda x: x[None],
    "float64": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "integers": torch.Tensor.long,
    "device": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "nested": lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
    "list": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "gradient": lambda x: x.clone().requires_grad_(),
}
X_MESSAGE = (
    r"x (is|requires) .*(layers take a dense tensor \[tokens, hidden_size\] = \[\d+, 256\]|deepseek_attn.training)"
)


@pytest.mark.parametrize("problem", X_PROBLEMS)
def test_hidden_states_of_another_kind(session, problem):
    """In our words, by the session and by a layer alone; nothing is changed by either."""
    sequence, x = session.sequence(), hidden(session, 5)
    wrong, manager = X_PROBLEMS[problem](x), session.runner.manager
    with pytest.raises(ValueError, match=X_MESSAGE):
        session.run(wrong, {sequence: 5})
    cache = manager.create()
    manager.reserve([(cache, 5)])
    step = session.runner.step_metadata([cache], [5])
    with pytest.raises(ValueError, match=X_MESSAGE):
        session.attention[1](wrong, step.positions, step)
    with torch.no_grad():
        found = session.attention[1](x, step.positions, step)
    assert torch.equal(sequence.run(x), found)


REFUSED: dict[str, tuple[Callable, str]] = {
    "no sequences": (lambda s, a: s.run(hidden(s, 0), {}), "at least one new token"),
    "no tokens": (lambda s, a: a.run(hidden(s, 0)), "at least one new token"),
    "negative": (lambda s, a: s.run(hidden(s, 1), {a: -1}), "-1 new tokens of a sequence: lengths are integers from 0"),
    "float": (lambda s, a: s.run(hidden(s, 1), {a: 1.0}), "1.0 new tokens of a sequence"),
    "bool": (lambda s, a: s.run(hidden(s, 1), {a: True}), "True new tokens of a sequence"),
    "list": (lambda s, a: s.run(hidden(s, 1), [(a, 1)]), "lengths is of type list: pass new tokens by sequence"),
    "no sequence": (lambda s, a: s.run(hidden(s, 1), {20: 1}), "20 is not a sequence of this session"),
    "other session": (lambda s, a: LayerSession(s.runner).run(hidden(s, 1), {a: 1}), "not a sequence of this session"),
    "too many tokens": (lambda s, a: a.run(hidden(s, 201)), "a step of 201 tokens in 1 sequences exceeds"),
    "too many sequences": (lambda s, a: s.run(hidden(s, 5), {s.sequence(): 1 for _ in range(5)}), "max_num_seqs=4"),
    "too long": (lambda s, a: a.run(hidden(s, 281)), "a sequence of 301 tokens exceeds max_model_len=300"),
    "truncate beyond": (lambda s, a: a.truncate(21), r"truncate\(21\) of a sequence of 20 tokens"),
    "truncate negative": (lambda s, a: a.truncate(-1), r"truncate\(-1\) of a sequence of 20 tokens"),
    "freed": (lambda s, a: (lambda b: (b.free(), b.run(hidden(s, 1))))(s.sequence()), "was freed: start a new one"),
    "fork freed": (lambda s, a: (lambda b: (b.free(), b.fork()))(s.sequence()), "was freed: start a new one"),
    "layer": (lambda s, a: LayerSession(s.runner, [1, 2]), r"this runner holds layers \[1\]"),
    "one layer": (lambda s, a: LayerSession(s.runner, untyped(1)), "layers: numbers of layers in a list are needed"),
    "runner": (lambda s, a: LayerSession(untyped("tiny")), "layers of a ModelRunner, not of a str"),
}


@pytest.mark.parametrize("misuse", REFUSED)
def test_misuse_of_the_session(misuse):
    session = LayerSession(shared_runner())
    sequence, x = session.sequence(), hidden(session, 40)
    expected = sequence.fork().run(x)
    sequence.run(x[:20])
    before = session.runner.manager.available_pages()
    call, message = REFUSED[misuse]
    with pytest.raises(ValueError, match=message):
        call(session, sequence)
    assert session.runner.manager.available_pages() == before
    assert relative_error(sequence.run(x[20:]), expected[20:]) < 1e-5


def test_further_back_than_the_caches_go():
    session = LayerSession(make_runner())
    sequence = session.sequence()
    sequence.run(hidden(session, 100))
    with pytest.raises(ValueError, match="its caches go back to 84, or to 0; for more, raise max_rollback"):
        sequence.truncate(83)
    sequence.truncate(84)
    assert sequence.num_tokens == 84


def test_too_few_pages_change_nothing(session):
    manager, sequences = session.runner.manager, [session.sequence() for _ in range(5)]
    for sequence in sequences[:4]:
        sequence.run(hidden(session, 190))
        sequence.run(hidden(session, 100))
    before = manager.available_pages()
    with pytest.raises(OutOfPages, match="free pages and this step needs"):
        session.run(hidden(session, 191), {sequences[4]: 190, sequences[0]: 1})
    assert manager.available_pages() == before
    assert [sequence.num_tokens for sequence in sequences] == [290] * 4 + [0]
    sequences[1].free()
    sequences[4].run(hidden(session, 190))


def test_pages_that_the_manager_changes_are_the_sequences(session):
    sequence, x = session.sequence(), hidden(session, 31)
    sequence.run(x[:30])
    session.runner.manager.free(sequence.cache)
    assert sequence.num_tokens == 0
    assert relative_error(sequence.run(x), alone(session, x)) < 1e-5


# what the low level refuses


class ByHand:
    """manager, step_metadata and layer, called one by one; ``cache`` holds 20 tokens."""

    def __init__(self, family: str):
        self.runner = shared_runner(family)
        self.manager, self.layer = self.runner.manager, self.runner.model.layers["1"]
        self.cache = self.manager.create()
        self.x = torch.randn(200, self.runner.config.hidden_size)
        self.whole(20)

    def metadata(self, n: int = 1):
        self.manager.reserve([(self.cache, n)])
        return self.runner.step_metadata([self.cache], [n])

    @torch.no_grad()
    def attend(self, step):
        return self.layer.attn(self.x[: len(step.positions)], step.positions, step)

    def whole(self, n: int = 1):
        y = self.attend(self.metadata(n))
        self.manager.commit(self.cache, n)
        return y


def by_hand(*calls: Callable[[ByHand], object]) -> Callable[[ByHand], None]:
    """Makes a step's metadata, does ``calls``, then computes the step."""

    def run(hand: ByHand) -> None:
        step = hand.metadata(3)
        for call in calls:
            call(hand)
        hand.attend(step)

    return run


CHANGED = "or other pages: it was committed, truncated, freed, forked or reserved again"
UNCOMMITTED = r"new tokens of this sequence were computed after 20 and not committed: call manager.commit\(cache, "
BY_HAND: dict[str, tuple[Callable[[ByHand], object], str]] = {
    "no reserve": (
        lambda h: h.runner.step_metadata([h.cache], [70]),
        "no pages for 70 new tokens after 20: call manager",
    ),
    "reserve of fewer": (
        lambda h: (h.manager.reserve([(h.cache, 1)]), h.runner.step_metadata([h.cache], [100])),
        "no pages for 100 new tokens after 20",
    ),
    "no commit": (lambda h: (h.attend(h.metadata()), h.metadata()), "1 " + UNCOMMITTED),
    "fork before commit": (lambda h: (h.attend(h.metadata()), h.manager.fork(h.cache)), "1 " + UNCOMMITTED),
    "no attend": (
        lambda h: (h.metadata(), h.manager.commit(h.cache, 1)),
        "layers have computed 0",
    ),
    "commit of fewer": (lambda h: (h.attend(h.metadata(3)), h.manager.commit(h.cache, 2)), "layers have computed 3"),
    "commit twice": (lambda h: (h.whole(), h.manager.commit(h.cache, 1)), "layers have computed 0"),
    "commit without pages": (lambda h: h.manager.commit(h.manager.create(), 1), "with pages reserved for 0"),
    "commit below zero": (lambda h: h.manager.commit(h.cache, -1), "commit of -1 tokens"),
    "step twice": (lambda h: (lambda s: (h.attend(s), h.attend(s)))(h.metadata()), "layers.1 has computed this step"),
    "committed": (by_hand(lambda h: h.attend(h.metadata(3)), lambda h: h.manager.commit(h.cache, 3)), CHANGED),
    "truncated": (by_hand(lambda h: h.manager.truncate(h.cache, 15)), CHANGED),
    "freed": (by_hand(lambda h: h.manager.free(h.cache)), CHANGED),
    "forked": (by_hand(lambda h: h.manager.fork(h.cache)), CHANGED),
    "reserved again": (by_hand(lambda h: h.manager.reserve([(h.cache, 200)])), CHANGED),
    "other positions": (lambda h: h.layer.attn(h.x[:1], torch.tensor([20]), h.metadata()), "pass step.positions"),
    "other runner's metadata": (lambda h: h.attend(ByHand("V3.2").metadata(5)), "another runner's than layers.1"),
    "other runner's sequence": (
        lambda h: h.runner.step_metadata([ByHand("V3.2").cache], [1]),
        "belongs to another runner's caches",
    ),
    "other manager": (
        lambda h: h.manager.free(ByHand("V3.2").cache),
        "belongs to another runner's caches",
    ),
    "a sequence twice": (lambda h: h.runner.step_metadata([h.cache] * 2, [1, 1]), "a sequence appears twice in a step"),
    "lengths": (lambda h: h.runner.step_metadata([h.cache], [1, 1]), "2 lengths with 2 new tokens in all, of 1 seq"),
    "negative length": (lambda h: h.runner.step_metadata([h.cache], [-1]), "-1 new tokens of a sequence"),
    "negative reserve": (lambda h: h.manager.reserve([(h.cache, -1)]), "reserve of -1 new tokens after 20"),
    "too long": (lambda h: h.manager.reserve([(h.cache, 281)]), "reserve of 281 new tokens after 20: a sequence has"),
    "padding": (
        lambda h: h.runner.step_metadata([h.cache], [1], torch.ones(2, dtype=torch.bool)),
        r"token_valid is \[2\] in torch.bool on cpu: it is bool \[1\] on the CPU",
    ),
}


@pytest.mark.parametrize("misuse", BY_HAND)
@pytest.mark.parametrize("family", tiered(["V4", "V3"], ["V4"]))
def test_misuse_of_the_low_level(family, misuse):
    call, message = BY_HAND[misuse]
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(ByHand(family))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_that_was_computed_can_be_dropped(family):
    """`truncate` takes an uncommitted step back, as far as a committed one; then the next is as if it had not been."""
    hand = ByHand(family)
    expected = hand.whole(5)
    hand.manager.truncate(hand.cache, 20)
    hand.x = hand.x.flip(0)
    hand.attend(hand.metadata(9))
    hand.x = hand.x.flip(0)
    assert hand.manager.truncate(hand.cache, 20) == 20
    assert torch.equal(hand.whole(5), expected)
    hand.attend(hand.metadata(100))
    assert hand.manager.truncate(hand.cache, 25) == (0 if family == "V4" else 25)


def test_steps_of_a_runner_are_not_watched():
    """Its own reserve, metadata and commit cannot be mixed up: no layer compares anything."""
    runner = ModelRunner.from_config("tiny", layers=[0, 1], device="cpu", max_model_len=64, max_num_seqs=2)
    runner.score([[1, 2, 3]], chunk_size=1)
    assert [block.attn.step.batch for block in runner.model.layers.values()] == [None, None]


@pytest.mark.parametrize("length", [-1, 1.5, "x", True])
def test_a_wrong_decode_query_len_is_refused(length):
    runner = ModelRunner.from_config("tiny", layers=[0], attention_only=True, max_model_len=64, device="cpu")
    for call in (LayerSession, lambda runner, _, length: runner.step_metadata([], [], None, length)):
        with pytest.raises(ValueError, match=f"decode_query_len={length!r}: must be an integer of at least 0, or None"):
            call(runner, None, length)
