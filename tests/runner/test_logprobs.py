"""Log-probabilities of tokens: against plain Python, float64 and transformers, and their bits in any company."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.runner import ModelRunner, StepOptions, logprobs
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.logprobs import MAX_TOP, ScoredRows, TokenLogprobs, packed_logprobs
from tests.support import v32_cases
from tests.support.oracle_transformers import TransformersOracle
from tests.support.oracle_v32 import TransformersV32Oracle
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered

LENGTHS = (1, 2, 17, 31)


def expected_row(row: list[float], token: int, top: int) -> list[float]:
    """Log-probability, rank, ids and log-probabilities of the likeliest, from the definitions."""
    peak = max(row)
    log_sum = peak + math.log(math.fsum(math.exp(x - peak) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    rank = 1 + sum(x > row[token] for x in row)
    return [row[token] - log_sum, rank, *order, *(row[i] - log_sum for i in order)]


@pytest.mark.parametrize(("vocab", "top"), [*product([1, 3, 129, 4097], [0, 1, 5, 200])])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_rows_follow_the_definitions(vocab, top, ties):
    logits = torch.randn(7, vocab) * torch.tensor([[0.0, 1e-3, 1.0, 1.0, 5.0, 30.0, 300.0]]).T
    if ties:  # -0.0 too
        logits = (logits / 2).round()
    tokens = torch.randint(vocab, (7,))
    found = packed_logprobs(logits, tokens, top)
    expected = [expected_row(row, token, top) for row, token in zip(logits.tolist(), tokens.tolist(), strict=True)]
    k = min(top, vocab)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(found[:, 1 : 2 + k], expected[:, 1 : 2 + k])  # ranks and ids
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=4e-14)


def test_a_row_has_the_same_bits_in_any_company(monkeypatch):
    """Other rows, other places, other strides, other blocks."""
    vocab, top = 12_929, 6
    logits, tokens = torch.randn(33, vocab) * 4, torch.randint(vocab, (33,))
    alone = torch.cat([packed_logprobs(logits[i : i + 1].clone(), tokens[i : i + 1], top) for i in range(33)])
    assert torch.equal(packed_logprobs(logits, tokens, top), alone)
    assert torch.equal(packed_logprobs(logits[5:], tokens[5:], top), alone[5:])
    assert torch.equal(packed_logprobs(logits.T.contiguous().T, tokens, top), alone)
    assert torch.equal(packed_logprobs(logits, tokens, 9)[:, :2], alone[:, :2])
    monkeypatch.setattr(logprobs, "ELEMENTS_PER_BLOCK", 4 * vocab)
    assert torch.equal(packed_logprobs(logits, tokens, top), alone)


def test_the_sum_does_not_depend_on_the_order_of_tokens():
    """Logits of all magnitudes, of whose exponentials plain float64 sums differ with the order."""
    logits = torch.randn(90, 12_929) * 3
    order = torch.randperm(12_929)
    token = int(order[17])
    found = packed_logprobs(logits, torch.full((90,), token), 0)
    assert torch.equal(packed_logprobs(logits[:, order], torch.full((90,), 17), 0), found)
    exact = [math.log(math.fsum(math.exp(x) for x in row)) for row in logits[:9].double().tolist()]
    np.testing.assert_allclose(found[:9, 0], logits[:9, token].double().numpy() - exact, atol=4e-15, rtol=0)


def test_too_large_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="over 262145 tokens: supported are vocabularies of up to 262144"):
        packed_logprobs(torch.zeros(1, (1 << 18) + 1), torch.zeros(1, dtype=torch.int64), 0)


FAMILIES = {
    "v4": (lambda: small_config([4, 128, 0]), small_runner, TransformersOracle),
    "v32": (v32_cases.small, v32_cases.make_runner, TransformersV32Oracle),
    "v3": (lambda: v32_cases.small("deepseek_v3"), v32_cases.make_runner, TransformersV32Oracle),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(family):
    make_config, make_runner, oracle = FAMILIES[family]
    config = make_config()
    source = RandomSource(config, 0)
    runner, tokens = make_runner(config, source), prompt(config, 140, seed=3)
    logits = oracle(config, source)(tokens)
    logits = (logits if isinstance(logits, torch.Tensor) else logits.logits)[:-1].double()
    expected = logits.log_softmax(-1)
    (found,) = runner.score_logprobs([tokens], top=4)
    assert found.token_ids.tolist() == tokens[1:]
    own = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logprobs, own, atol=2e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.topk(4).values.numpy(), atol=2e-5)
    close = (logits - logits.gather(1, torch.tensor(tokens[1:])[:, None])).abs() < 1e-4
    ranks = 1 + (expected > expected.gather(1, torch.tensor(tokens[1:])[:, None])).sum(1).numpy()
    assert (abs(found.ranks - ranks) < close.sum(1).numpy()).all()  # none, but for logits that round to each other


@pytest.fixture(scope="module")
def deterministic() -> ModelRunner:
    return small_runner(small_config([4, 0]), deterministic=True, max_num_batched_tokens=200)


def after(logits: torch.Tensor, tokens: list[int], top: int) -> TokenLogprobs:
    """Log-probabilities of the tokens after the rows of logits, one each."""
    return TokenLogprobs.of(tokens, packed_logprobs(logits, torch.tensor(tokens), top).numpy(), top)


@exhaustive_on_cpu
@pytest.mark.parametrize("chunk_size", tiered([None, 7, 1], [7]))
def test_scores_are_those_of_the_logits(deterministic, chunk_size, monkeypatch):
    """Bit for bit, in blocks of a few rows too, which cross the borders of prompts."""
    texts = [prompt(deterministic.config, n, n) for n in LENGTHS]
    expected = [after(logits[:-1], text[1:], 3) for logits, text in zip(deterministic.score(texts), texts, strict=True)]
    assert deterministic.score_logprobs(texts, 3, chunk_size) == expected
    rows, logits = [], deterministic.model.logits
    monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", 5 * deterministic.config.vocab_size)
    monkeypatch.setattr(deterministic.model, "logits", lambda states: (rows.append(len(states)), logits(states))[1])
    assert deterministic.score_logprobs(texts, 3, chunk_size) == expected
    assert max(rows) <= 5


def test_token_logprobs():
    texts = TokenLogprobs(
        np.array([5, 7]), np.array([-0.5, -1.5]), np.array([1, 3]),
        np.array([[5, 2], [1, 2]]), np.array([[-0.5, -2.0], [-0.1, -0.2]]),
    )  # fmt: skip
    assert len(texts) == 2
    assert list(texts) == [(5, -0.5, 1, {5: -0.5, 2: -2.0}), (7, -1.5, 3, {1: -0.1, 2: -0.2})]
    assert texts[1:] == TokenLogprobs.join([texts[:0], texts[1:]], 2) != texts
    assert texts[-1].token_id == 7
    assert TokenLogprobs.join([], 2) == texts[:0]
    assert texts.to_dict() == {
        "token_ids": [5, 7], "logprobs": [-0.5, -1.5], "ranks": [1, 3],
        "top_ids": [[5, 2], [1, 2]], "top_logprobs": [[-0.5, -2.0], [-0.1, -0.2]],
    }  # fmt: skip


@pytest.mark.parametrize("graphs", tiered([False, True], [True]))
def test_a_step_in_any_order(deterministic, graphs, monkeypatch):
    """A prompt before decodes, which the step computes first; each sequence with log-probabilities of its own."""
    config, texts = deterministic.config, []
    for i, (computed, n) in enumerate([(3, 9), (7, 1), (5, 1), (0, 1)]):
        sequence = deterministic.sequence(prompt(config, computed + n + 2 * (i != 2), i))
        if computed:
            deterministic.step([(sequence, computed)])
        texts.append((sequence, n))
    if graphs:
        shape = (deterministic.model, deterministic.layout, deterministic.device)
        monkeypatch.setattr(deterministic, "graphs", DecodeGraphs(*shape, batches=[4], capture=False))
        del texts[0]
    scored = [ScoredRows(0, 9, 1), ScoredRows(0, 99, 2), None, ScoredRows(0, 9, 0)][-len(texts) :]
    options = StepOptions(greedy=True, logprobs=(2, None, 0, 3)[-len(texts) :], scored=tuple(scored))
    starts = [sequence.num_computed for sequence, _ in texts]
    output = deterministic.step(texts, options)
    results = zip(
        texts, starts, scored, options.logprobs, output.scored, output.logprobs(), output.tokens(), strict=True
    )
    for (sequence, n), start, wanted, top, known, chosen, tokens in results:
        (logits,) = deterministic.score([sequence.token_ids])
        assert (known is None) == (wanted is None)
        if wanted is not None:
            end = min(start + n, wanted.end, len(sequence.token_ids) - 1)
            expected = after(logits[start:end], sequence.token_ids[start + 1 : end + 1], wanted.top)
            assert_same(known, expected, exact=not graphs)
        assert (chosen is None) == (top is None)
        if top is not None:
            assert_same(chosen, after(logits[start + n - 1 : start + n], tokens, top), exact=not graphs)
        sequence.free()


def assert_same(found: TokenLogprobs, expected: TokenLogprobs, exact: bool) -> None:
    """To the bit, or as two float32 programs agree."""
    assert found == expected or not exact
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


@pytest.mark.parametrize("top", [-1, MAX_TOP + 1, True, 1.0, "2"])
def test_a_number_of_alternatives_that_is_refused(deterministic, top):
    with pytest.raises(
        ValueError, match=rf"^top={top!r}: must be an integer from 0 .* to {MAX_TOP}; .*ModelRunner.score"
    ):
        deterministic.score_logprobs([[1, 2]], top)


def test_random_rows_of_many_ties():
    """Few values, many tokens: the lowest columns of those that are equal to the smallest value listed."""
    rng = random.Random(5)
    for _ in range(50):
        vocab, top = rng.randint(1, 90), rng.randint(1, 40)
        row = [float(rng.randint(0, 3)) for _ in range(vocab)]
        found = packed_logprobs(torch.tensor([row]), torch.tensor([0]), top)[0].tolist()
        k = min(top, vocab)
        assert found[2 : 2 + k] == sorted(range(vocab), key=lambda i: (-row[i], i))[:k]
