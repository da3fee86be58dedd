"""What must not matter: how a prompt is cut into steps, what else is in the batch, what memory held before.

Exact numerics are compared within a tolerance where steps have other shapes (matrix products then round differently),
and bit for bit where shapes are equal. Quantised numerics are compared bit for bit, or by what one rounding can do.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from deepseek_attn.cache.layout import WINDOW
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config import ModelConfig
from deepseek_attn.runner import ModelRunner, Sequence, StepOptions
from tests.support.invariance_cases import (
    COMPRESSED,
    KINDS,
    MIXED,
    NUMERICS,
    OTHERS,
    SAME,
    advance,
    fresh,
    pages_returned,
    shared_runner,
)
from tests.support.oracle_dense import DenseOracle
from tests.support.small_models import (
    assert_close,
    assert_no_near_tie,
    experts_by_token,
    prompt,
    small_config,
    small_runner,
)
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import of_type

# how a prompt is cut into steps


@lru_cache(maxsize=1)
def two_prompts(ratio: int) -> list[list[int]]:
    """Two prompts of 262 tokens that leave no choice to rounding."""
    config = of_type(shared_runner((ratio, ratio)).config, ModelConfig)
    oracle = DenseOracle(config, RandomSource(config, 0))
    prompts = [prompt(config, 262, seed) for seed in (1, 2)]
    for tokens in prompts:
        assert_no_near_tie(oracle(tokens))
    return prompts


SHORT = (1, 2, 3, 4, 125, 126, 127, 128, 129, 130, 131, 132)
LONG = (5, 63, 64, 65, 259, 260, 261, 262)


@lru_cache(maxsize=1)
def whole_prefills(ratio: int) -> dict[int, torch.Tensor]:
    """Logits of each length, each computed alone, in one step."""
    runner, prompts = shared_runner((ratio, ratio)), two_prompts(ratio)
    return {n: runner.score([prompts[i % 2][:n]])[0] for i, n in enumerate(SHORT + LONG)}


CHUNKS = [(ratio, size) for ratio in COMPRESSED for size in (1, 3, 7, 63, 64, 65, 128, 129, None)]
CHUNKS += [(ratio, size) for ratio in OTHERS for size in (7, 64, 129, None)] + [(0, 1), (16, 1)]


QUICK = [(4, 3)]


@exhaustive_on_cpu
@pytest.mark.parametrize(("ratio", "chunk_size"), tiered(CHUNKS, QUICK), ids=str)
def test_any_chunking_equals_one_prefill(ratio, chunk_size):
    """A ragged batch in chunks; None is the batch in one step."""
    runner, prompts, expected = shared_runner((ratio, ratio)), two_prompts(ratio), whole_prefills(ratio)
    lengths = SHORT if chunk_size in (1, 3) else SHORT + LONG
    with pages_returned(runner):
        scores = runner.score([prompts[i % 2][:n] for i, n in enumerate(lengths)], chunk_size)
    for n, logits in zip(lengths, scores, strict=True):
        assert_close(logits, expected[n], what=f"{n} tokens in chunks of {chunk_size}")


@pytest.mark.parametrize("split", tiered([1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 130, 131], [5, 127]))
def test_mixed_layers_split_anywhere(split):
    runner = shared_runner(MIXED)
    tokens = prompt(runner.config, 140, seed=2)
    expected = fresh(runner, tokens, [140])
    with pages_returned(runner):
        assert_close(fresh(runner, tokens, [split, 140 - split]), expected)
        assert_close(fresh(runner, tokens, [split, 1, 139 - split]), expected, what="with one token in between")


@pytest.mark.exhaustive
def test_chunks_cut_by_the_token_budget():
    config = small_config(list(MIXED))
    source = RandomSource(config, 0)
    prompts = [prompt(config, n, seed) for seed, n in enumerate([130, 3, 77, 4, 140])]
    expected = [small_runner(config, source).score([tokens])[0] for tokens in prompts]
    runner = small_runner(config, source, max_num_batched_tokens=50, max_num_seqs=3, max_model_len=140)
    with pages_returned(runner):
        scores = runner.score(prompts)
    for logits, reference in zip(scores, expected, strict=True):
        assert_close(logits, reference)


@exhaustive_on_cpu
@pytest.mark.parametrize("chunk_size", tiered([1, 7, 64, 129], [7]))
def test_mtp_logits_in_chunks(chunk_size):
    runner = shared_runner((0, 4), mtp=1)
    prompts = [prompt(runner.config, n, seed=n) for n in (140, 2, 65)]
    with pages_returned(runner):
        logits, drafts = runner.score_mtp(prompts, chunk_size)
    for i, tokens in enumerate(prompts):
        (whole,), (whole_drafts,) = runner.score_mtp([tokens])
        assert_close(logits[i], whole)
        assert_close(drafts[i], whole_drafts, what="MTP")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ratio", "numerics"), [(ratio, numerics) for ratio in (0, 4, 128) for numerics in ("official", "serving")]
)
def test_quantised_layer_token_by_token(ratio, numerics):
    """One layer only: where a rounding falls the other way, deeper random layers would amplify it."""
    runner = shared_runner((ratio,), numerics)
    tokens = prompt(runner.config, 140 if ratio == 128 else 70)
    whole = runner.score([tokens])[0]
    one_by_one = runner.score([tokens], chunk_size=1)[0]
    assert torch.cosine_similarity(one_by_one, whole, dim=1).median() > 0.9999


class CacheWrites:
    """What is handed to the pools' records, beside what they make of it."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
        self.runner, self.rows = runner, {}
        specs = {pool.tensor.data_ptr(): pool.spec for pool in runner.pools if pool.spec.record is not None}
        for pool in runner.pools:
            if pool.spec.record is not None:
                self.rows[pool.spec] = torch.zeros(len(pool.tensor) * pool.entries, pool.record.dim)
        for kind in {type(pool.record) for pool in runner.pools if pool.spec.record is not None}:
            original = kind.insert

            def insert(record, pool, n, slots, rows, original=original):
                original(record, pool, n, slots, rows)
                self.rows[specs[pool.data_ptr()]][slots[slots >= 0]] = rows[slots >= 0].float()

            monkeypatch.setattr(kind, "insert", insert)

    def of(self, sequence: Sequence) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By kind of pool of the only layer: (rows handed in, stored bytes) of each entry; states have no bytes."""
        found = {}
        for pool in self.runner.pools:
            pages = torch.tensor(sequence.cache.tables[pool.spec.group])
            if pool.spec.record is None:
                found[pool.spec.kind] = pool.tensor[pages].flatten(0, 1), torch.empty(0)
                continue
            ratio = 1 if pool.spec.group == WINDOW else int(pool.spec.group.removeprefix("ratio"))
            entries = torch.arange(sequence.num_computed // ratio)
            page, offset = pages[entries // pool.entries], entries % pool.entries
            page, offset = page[page > 0], offset[page > 0]
            stored = [area[page, offset] for area in pool.record._views(pool.tensor, pool.entries)]
            stored, rows = torch.cat(stored, dim=1), self.rows[pool.spec][page * pool.entries + offset]
            assert torch.equal(stored, torch.cat(pool.record.encode(rows), dim=1))
            found[pool.spec.kind] = rows, stored
        return found


POOLS = {0: {"window"}, 4: {"window", "compressed", "state", "index", "index_state"}}
CUTS = {
    "sevens": [7] * 20 + [2],
    "decodes": [100] + [1] * 42,
    "pages": [64, 64, 14],
    "edges": [127, 1, 1, 13],
}


LAYERS = [(ratio, numerics) for ratio in COMPRESSED for numerics in NUMERICS]


@exhaustive_on_cpu
@pytest.mark.parametrize(
    ("ratio", "numerics"),
    tiered(
        [*LAYERS, *((ratio, "serving") for ratio in OTHERS)],
        [(4, "official")],
    ),
)
def test_caches_do_not_depend_on_chunks(ratio, numerics, monkeypatch):
    """A first layer's cache inputs depend on tokens alone, and stored bytes on nothing but their own input row."""

    def linear(x, weight, bias=None):
        return (x.double() @ weight.double().T).to(x.dtype)  # a row's bits do not depend on the number of rows

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    runner = shared_runner((ratio,), numerics)
    writes, tokens, found = CacheWrites(runner, monkeypatch), prompt(runner.config, 142, seed=3), {}
    for cut, sizes in {"whole": [142], **CUTS}.items():
        sequence = runner.sequence(tokens)
        advance(runner, sequence, sizes)
        found[cut] = writes.of(sequence)
        sequence.free()
    assert set(found["whole"]) == POOLS.get(ratio, {"window", "compressed", "state"})
    for kind, (rows, stored) in found["whole"].items():
        assert len(rows)
        for cut in CUTS:
            other_rows, other_stored = found[cut][kind]
            assert_close(other_rows, rows, SAME, f"{kind} in {cut}")
            if numerics != "exact":  # one rounding in thousands may fall the other way
                assert (other_stored != stored).float().sum() <= 1e-3 * stored.numel(), f"{kind} in {cut}"


# what comes later


@pytest.mark.parametrize(
    ("ratio", "numerics"),
    tiered(
        [*LAYERS, *((ratio, "exact") for ratio in OTHERS)],
        [(0, "exact")],
    ),
)
@experts_by_token()
def test_later_tokens_change_no_earlier_bit(ratio, numerics):
    runner = shared_runner((ratio, ratio), numerics)
    length = 2 * ratio + 6 if ratio == 128 else 70
    tokens = prompt(runner.config, length)
    expected = runner.score([tokens])[0]
    edges = {edge + delta for edge in (ratio, 2 * ratio, 64) for delta in (-2, -1, 0, 1)}
    for t in sorted(t for t in edges | {1, length - 1} if 0 < t < length):
        changed = tokens[:t] + [(token + 1) % runner.config.vocab_size for token in tokens[t:]]
        logits = runner.score([changed])[0]
        assert torch.equal(logits[:t], expected[:t]), f"tokens from {t} on changed earlier logits"
        assert not torch.equal(logits[t], expected[t])
        one = tokens[:t] + [(tokens[t] + 1) % runner.config.vocab_size] + tokens[t + 1 :]
        assert torch.equal(runner.score([one])[0][:t], expected[:t]), f"token {t} changed earlier logits"


# what memory held before


def poison(runner: ModelRunner, live: tuple[Sequence, ...] = ()) -> None:
    """NaN into every page that no live sequence holds (the null page included) and into all scratch memory."""
    for pool in runner.pools:
        kept = {page for sequence in live for page in sequence.cache.tables[pool.spec.group]} - {0}
        free = [page for page in range(len(pool.tensor)) if page not in kept]
        pool.tensor[free] = float("nan") if pool.tensor.is_floating_point() else 0xFF
    runner.workspace._buffer.fill_(0xFF)
    model = runner.whole_model()
    for block in [*model.layers.values(), *model.mtp.values()]:
        if block.attn.topk_indices_buffer is not None:
            block.attn.topk_indices_buffer.fill_(2**31 - 1)


SIZES = [61, 1, 1, 1, 66, 1, 1, 1, 1, 1, 5]  # prefill, decode, both again; crosses 64 and 128


@pytest.mark.parametrize("numerics", tiered(NUMERICS, ["official"]))
def test_poisoned_memory_changes_nothing(numerics):
    runner = shared_runner(KINDS[numerics], numerics)
    tokens, other = prompt(runner.config, sum(SIZES)), prompt(runner.config, 150, seed=1)
    clean = fresh(runner, tokens, SIZES)
    assert clean.isfinite().all()
    poison(runner)
    assert torch.equal(fresh(runner, tokens, SIZES), clean)
    poison(runner)
    fresh(runner, other, [150])
    assert torch.equal(fresh(runner, tokens, SIZES), clean), "in the pages of another sequence"
    sequence, parts = runner.sequence(tokens), []
    for n in SIZES:
        poison(runner, (sequence,))
        parts.append(advance(runner, sequence, [n]))
    sequence.free()
    assert torch.equal(torch.cat(parts), clean), "poisoned between steps"
    for pool in runner.pools:
        pool.tensor.zero_()


@pytest.mark.exhaustive
@pytest.mark.parametrize("numerics", NUMERICS)
def test_poisoned_batch_and_mtp(numerics):
    """Prefills, chunks, and decodes of several lengths in one step, where short rows have columns to spare."""
    runner = shared_runner((0, 4), numerics, mtp=1)
    prompts = [prompt(runner.config, n, seed=n) for n in (3, 90, 1, 66)]
    work = [(prompts, None), (prompts, 30), ([tokens[:5] for tokens in prompts], 1)]
    clean = [torch.cat(rows) for batch, chunk_size in work for rows in runner.score_mtp(batch, chunk_size)]
    poison(runner)
    again = [torch.cat(rows) for batch, chunk_size in work for rows in runner.score_mtp(batch, chunk_size)]
    for pool in runner.pools:
        pool.tensor.zero_()
    for expected, actual in zip(clean, again, strict=True):
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("numerics", NUMERICS)
def test_reused_slots(numerics):
    runner = shared_runner(KINDS[numerics], numerics)
    a, b = prompt(runner.config, sum(SIZES)), prompt(runner.config, 300, seed=1)
    with pages_returned(runner):
        first = fresh(runner, a, SIZES)
        for n in (2, 131, 300):
            fresh(runner, b[:n], [n])
            assert torch.equal(fresh(runner, a, SIZES), first), f"after another sequence of {n} tokens"


# the rest of the batch


@pytest.mark.parametrize("numerics", tiered(NUMERICS, ["official"]))
def test_rows_in_another_order(numerics):
    runner = shared_runner(KINDS[numerics], numerics)
    prompts = [prompt(runner.config, n, seed=n) for n in (130, 5, 3, 64, 4)]
    expected = runner.score(prompts)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        for i, logits in zip(order, runner.score([prompts[i] for i in order]), strict=True):
            if numerics == "exact":
                assert_close(logits, expected[i], SAME)
            else:
                assert torch.cosine_similarity(logits, expected[i], dim=1).median() > 0.9999


def test_ragged_batch_equals_each_alone():
    runner = shared_runner(MIXED)
    prompts = [prompt(runner.config, n, seed=n) for n in (3, 4, 5, 130)]
    for tokens, logits in zip(prompts, runner.score(prompts), strict=True):
        assert_close(logits, runner.score([tokens])[0], SAME)


@exhaustive_on_cpu
def test_rows_reordered_between_steps():
    """Decodes and prefills mixed, in another order and another company in each step."""
    runner = shared_runner(MIXED)
    prompts = [prompt(runner.config, 150, seed) for seed in range(4)]
    sequences = [runner.sequence(tokens) for tokens in prompts]
    plan = [
        [(0, 63), (1, 3), (2, 120)],
        [(2, 1), (0, 1), (1, 60)],
        [(3, 130), (1, 1), (2, 5), (0, 64)],
        [(0, 1), (3, 1), (2, 1), (1, 1)],
        [(1, 1), (2, 1), (3, 1), (0, 1)],
        [(3, 2), (0, 1), (1, 66)],
        [(2, 1), (1, 1)],
        [(1, 1), (3, 1), (2, 1), (0, 1)],
    ]
    outputs = [[] for _ in sequences]
    with pages_returned(runner):
        for batch in plan:
            logits = runner.step([(sequences[i], n) for i, n in batch], StepOptions(all_logits=True)).rows
            for (i, _), rows in zip(batch, logits, strict=True):
                outputs[i].append(rows)
        for sequence in sequences:
            sequence.free()
    for tokens, parts in zip(prompts, outputs, strict=True):
        rows = torch.cat(parts)
        assert_close(rows, runner.score([tokens])[0][: len(rows)], SAME)


def test_last_logits_only():
    runner = shared_runner(MIXED)
    sequences = [runner.sequence(prompt(runner.config, n, seed=n)) for n in (5, 1, 130)]
    out = runner.step([(s, s.num_pending) for s in sequences]).rows
    assert [tuple(rows.shape) for rows in out] == [(1, runner.config.vocab_size)] * 3
    for sequence, rows in zip(sequences, out, strict=True):
        assert_close(rows, runner.score([sequence.token_ids])[0][-1:], SAME)
        sequence.free()
