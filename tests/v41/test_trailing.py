"""Prompts of which upper layers compute the trailing rows alone: results are those of all rows, in any pieces.

Before each step NaN replaces every key that the caches of living sequences are not said to hold.
"""

from __future__ import annotations

import random
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.layout import WINDOW
from deepseek_attn.cache.snapshots import SnapshotStore
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.impls.prefill import merged_indices, plan_prefill_chunks
from deepseek_attn.runner.logprobs import ScoredRows
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import StepOptions
from deepseek_attn.testing import poison_caches
from tests.support.drafts import DraftedSource
from tests.support.small_models import assert_close, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped
from tests.support.v41_cases import TOLERANCE, assert_clear, make_runner, oracle_of, shallow, tiny

LENGTH = 72
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 128}


def schedule(ratios: list[int], kv: list[int], index: list[int], window: int, limited: int | None = None) -> dict:
    return {
        "num_hidden_layers": len(ratios), "compress_ratios": ratios, "kv_source_layer_ids": kv,
        "index_source_layer_ids": index, "sliding_window": window, "candidate_source_layer_id": limited,
        "candidate_topk_blocks": None if limited is None else 3, "candidate_block_size": None if limited is None else 4,
        "engram_layer_ids": None, "num_nextn_predict_layers": 0, "dspark_target_layer_ids": None,
    }  # fmt: skip


SCHEDULES = {
    "tiny": {},
    "one above": schedule([2, 1, 1], [0, 1], [0, 1], 13),
    "two above, pairs": schedule([2, 2, 2], [0], [0, 1], 8, 0),
    "five above": schedule([0, 1, 1, 1, 1, 1, 0], [1], [1, 3, 5], 5, 3),
    "none above": schedule([0, 2], [1], [1], 6),
    "no entries": schedule([0, 0, 0], [], [], 7),
    "windows of one token": schedule([1, 1, 1, 1], [0], [0, 2], 1),
}


def poison_missing(runner: ModelRunner) -> None:
    """Fills the windows with NaN but for the keys that sequences and snapshots hold by `SequenceCache.exact_from`."""
    caches = [cache for holder in runner.manager._holders.values() if (cache := holder()) is not None]
    tables = [torch.tensor(cache.tables[WINDOW], dtype=torch.int64) for cache in caches]
    for pool in runner.pools:
        if pool.spec.kind != "window":
            continue
        missing = torch.ones(len(pool.tensor), pool.entries, dtype=torch.bool)
        for cache, table in zip(caches, tables, strict=True):
            first = min(first_key(runner, pool.spec.layer, cache), cache.num_tokens)
            row = torch.arange(first, cache.num_tokens)
            missing[table[row // pool.entries], row % pool.entries] = False
        rows = pool.tensor[:, : pool.entries * pool.record.entry_bytes].unflatten(1, (pool.entries, -1))
        rows.masked_fill_(missing.unsqueeze(2), 0xFF)


def first_key(runner: ModelRunner, layer: str, cache) -> int:
    kind, number = layer.split(".")
    parts = [] if runner.trailing is None else [part for part in runner.trailing.parts if not part.queries_only]
    parts = [part for part in parts if kind == "mtp" or part.layer <= int(number)]
    return max(0, cache.exact_from - parts[-1].reach) if parts and cache.exact_from else 0


def strict(runner: ModelRunner) -> ModelRunner:
    """The runner, which poisons what is missing before every step; no row that a layer computes may read it."""
    step = runner.step
    for layer in runner.model.layers.values():
        layer.ffn.register_forward_pre_hook(assert_finite)

    def poisoned_step(*args):
        poison_missing(runner)
        return step(*args)

    untyped(runner).step = poisoned_step
    poison_caches(runner)
    return runner


def assert_finite(module, args) -> None:
    assert args[0].isfinite().all(), "a key that was not computed was read"


def full(runner: ModelRunner) -> ModelRunner:
    """The runner, whose layers compute all rows of prompts."""
    runner.trailing = None
    return runner


class Model:
    """A model of a schedule, a prompt, and what follows after each of its tokens by brute force."""

    def __init__(self, name: str):
        self.config = tiny(**SCHEDULES[name])
        self.source, self.tokens = RandomSource(self.config, 0), prompt(self.config, LENGTH, 0)
        oracle = oracle_of(self.config, self.source)
        self.reference = oracle(self.tokens).float()
        assert_clear(oracle)

    def runner(self, **options) -> ModelRunner:
        return strict(make_runner(self.config, self.source, **SIZES | options))


model_of = lru_cache(Model)


def start(runner: ModelRunner, tokens: list[int], chunk: int, end: int = 0) -> tuple[Sequence, torch.Tensor]:
    """A sequence with computed tokens, in chunks, and the logits of its last one."""
    sequence, rows = runner.sequence(tokens), None
    while sequence.num_pending:
        n = min(chunk, sequence.num_pending)
        [rows] = runner.step([(sequence, n)], StepOptions(ends=(end or len(tokens),))).rows
        assert len(rows) == (sequence.num_pending == 0 and not end)
    return sequence, required(rows)


def go_on(runner: ModelRunner, sequence: Sequence, tokens: list[int]) -> list[torch.Tensor]:
    """Logits after each of these tokens, decoded one by one."""
    found = []
    for token in tokens:
        sequence.append(token)
        found.append(runner.step([(sequence, 1)]).rows[0])
    return found


QUICK = [("two above, pairs", 0), ("five above", 3), ("no entries", 0), ("windows of one token", 0)]
CASES = [(name, back, "all") for name in SCHEDULES for back in (0, 3)]


@pytest.mark.parametrize(
    ("name", "rollback", "which"),
    tiered(
        CASES + [(*case, "edges") for case in QUICK],
        [(*case, "edges") for case in QUICK[1:3]],
        quick_on_gpu=[(*case, "edges") for case in QUICK],
    ),
)
def test_results_at_the_end_of_a_prompt_equal_brute_force(name, rollback, which):
    """Prompts of as many tokens as rows are needed, and around each window's edge; then a window of decodes."""
    model = model_of(name)
    runner = model.runner(max_rollback=rollback)
    window, rows = model.config.sliding_window, required(runner.trailing).rows
    edges = {rows + above * max(window - 1, 1) + more for above in (0, 1) for more in (-1, 0, 1)} | {64, 65}
    lengths = sorted(length for length in edges if 1 <= length <= LENGTH - 3)
    chunks = {length: (length, 17) if length < lengths[-1] else (length, 3, 19) for length in lengths}
    if which == "edges":
        chunks = {rows: (17,), rows + 1: (rows + 1,), lengths[-1]: (19,)}
    for length in list(chunks) if rollback == 0 else list(chunks)[-3:]:
        for chunk in chunks[length]:
            sequence, logits = start(runner, model.tokens[:length], chunk)
            decoded = go_on(runner, sequence, model.tokens[length : length + (window + 2 if length < 64 else 2)])
            found = torch.cat([logits, *decoded])
            assert_close(
                found, model.reference[length - 1 :][: len(found)], TOLERANCE, f"{length} in chunks of {chunk}"
            )
            sequence.free()


@exhaustive_on_cpu
@pytest.mark.parametrize(("length", "chunk"), tiered([(34, 34), (40, 9), (23, 9)], [(23, 9)]))
def test_bits_are_those_of_all_rows(length, chunk):
    """Where each row is computed by itself, not a bit differs, and neither does what is decoded after it."""
    model = model_of("five above")
    runners = model.runner(deterministic=True), full(model.runner(deterministic=True))
    found = []
    for runner in runners:
        sequence, logits = start(runner, model.tokens[:length], chunk)
        found.append(torch.cat([logits, *go_on(runner, sequence, model.tokens[length : length + 6])]))
    assert torch.equal(*found)


READERS = [(decodes, ratio) for decodes in (0, 1, 2) for ratio in (0, 1)]


@pytest.mark.parametrize(("decodes", "ratio"), tiered(READERS, [(0, 1), (1, 0), (2, 1)], quick_on_gpu=READERS))
def test_windows_begin_at_the_first_computed_key(ratio, decodes):
    """Rows that read pages, and rows that read gathered keys, behind entries or without any."""
    runner, window, topk = make_runner(tiny(), **SIZES), 8, 3
    requests = [(30, 5, 22), (64, 20, 41), (50, 9, 0)]  # length, new tokens, first key in the window
    lens, new, starts = (torch.tensor(part) for part in zip(*requests, strict=True))
    pages = {group: torch.arange(1, 7).view(3, 2).int() for group in runner.layout.pages}
    step = runner.builder.build(StepInput(new, lens, pages, num_decodes=decodes, window_starts=starts))
    chosen = torch.arange(topk, dtype=torch.int32).repeat(len(step.positions), 1)
    layer: Any = SimpleNamespace(
        compress_ratio=ratio, index_topk=topk if ratio else None, window_size=window, topk_indices_buffer=chosen
    )
    [chunk] = plan_prefill_chunks(step.prefill_seq_lens_cpu, step.prefill_gather_lens_cpu, ratio, 10**6)
    rows, counts = merged_indices(layer, step, chunk, slice(0, step.num_prefill_tokens))
    place = 0
    for request, (length, n, first) in enumerate(requests):
        for position in range(length - n, length):
            if request < decodes:
                slots, count = step.window.decode_swa_indices[place, 0], step.window.decode_swa_lens[place]
                read = {int(slot) - int(pages[WINDOW][request, 0]) * 64 for slot in slots[:count] if slot >= 0}
            else:
                base, row = (request - decodes) * chunk.rows_per_request, place - step.num_decode_tokens
                read = {int(index) - base for index in rows[row][: counts[row]] if index >= 0}
                if ratio:
                    assert set(range(topk)) <= read
                    read -= set(range(topk))
                gathered = int(step.prefill_gather_lens_cpu[request - decodes])
                read = {row - chunk.N + length - gathered for row in read}
            assert read == set(range(max(first, position - window + 1), position + 1)), (request, position)
            place += 1
    assert place == len(step.positions) == 34


def counted_rows(runner: ModelRunner) -> dict[str, int]:
    """Rows that each layer's experts compute from now on."""
    counts = dict.fromkeys(runner.model.layers, 0)
    for index, layer in runner.model.layers.items():

        def count(module, args, index=index):
            counts[index] += len(args[0])

        layer.ffn.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("chunk", tiered([200, 48, 5], [48]))
def test_upper_layers_compute_no_other_rows(chunk):
    """Layers 4 and 5 the rows that 21 keys before the first result need, layers 6 and 7 those of 14 keys."""
    config = tiny()
    runner = make_runner(config, max_rollback=0)
    counts = counted_rows(runner)
    start(runner, prompt(config, 200), chunk)
    assert list(counts.values()) == [200] * 4 + [22] * 2 + [15] * 2
    counts.update(dict.fromkeys(counts, 0))
    runner.score([prompt(config, 50)])
    assert set(counts.values()) == {50}


@exhaustive_on_cpu
def test_without_ends_every_step_has_results():
    model = model_of("five above")
    runner = model.runner()
    sequence, place = runner.sequence(model.tokens), 0
    for n in (40, 3, 1, 27, 1):
        [rows] = runner.step([(sequence, n)]).rows
        place += n
        assert_close(rows, model.reference[place - 1 :][:1], TOLERANCE)
    assert sequence.cache.exact_from == 71 - 16


@pytest.mark.parametrize("name", tiered(["two above, pairs", "tiny"], ["two above, pairs"], quick_on_gpu=["tiny"]))
def test_sequences_in_one_step(name):
    """Decodes beside prompts that begin, go on, end, are scored or are computed as a whole, with and without rows."""
    model, draw = model_of(name), random.Random(1)
    runner = model.runner(max_rollback=2)
    tokens = [model.tokens[:length] for length in (72, 61, 30, 72, 55, 44)]
    ends, sequences, place = [72, 61, 30, 72, 55, 44], [runner.sequence(part) for part in tokens], 0
    scored = (None, None, None, ScoredRows(0, 71, 0), None, None)
    while pending := [i for i, sequence in enumerate(sequences) if sequence.num_pending]:
        place += 1
        chosen = draw.sample(pending, draw.randint(1, len(pending)))
        batch = [(sequences[i], min(draw.choice([1, 9, 17, 40]), sequences[i].num_pending)) for i in chosen]
        options = StepOptions(ends=tuple(ends[i] for i in chosen), scored=tuple(scored[i] for i in chosen))
        output = runner.step(batch, options)
        for i, (sequence, _), rows in zip(chosen, batch, output.rows, strict=True):
            if not sequence.num_pending:
                assert_close(rows, model.reference[len(tokens[i]) - 1 :][:1], TOLERANCE)
                if ends[i] < LENGTH - 1:  # it goes on with decodes
                    ends[i] += 1
                    tokens[i] = model.tokens[: ends[i]]
                    sequence.append(tokens[i][-1])
            elif options.ends[chosen.index(i)] > sequence.num_computed:
                assert len(rows) == 0
    assert place > 15


def test_going_back_saving_and_forking(tmp_path):
    """As far back as max_rollback in place; further back the sequence is computed again, as everywhere."""
    model = model_of("five above")
    runner, tokens = model.runner(max_rollback=4), model.tokens
    sequence, _ = start(runner, tokens[:60], 23)
    for back in range(5):
        fork = sequence.fork()
        fork.truncate(60 - back)
        assert fork.num_computed == 60 - back
        found = torch.cat(go_on(runner, fork, tokens[60 - back : 62]))
        assert_close(found, model.reference[60 - back :][: len(found)], TOLERANCE, f"{back} tokens back")
        fork.free()
    sequence.save(tmp_path / "whole")
    loaded = runner.load_sequence(tmp_path / "whole")
    assert loaded.cache.exact_from == sequence.cache.exact_from == 56
    assert_close(torch.cat(go_on(runner, loaded, tokens[60:64])), model.reference[60:64], TOLERANCE)
    sequence.truncate(55)
    assert (sequence.num_computed, sequence.cache.exact_from) == (0, 0)


@exhaustive_on_cpu
@pytest.mark.parametrize("computed", tiered(range(1, 60, 3), [19, 49], quick_on_gpu=[40]))
def test_a_prompt_that_is_interrupted(computed, tmp_path):
    """Saved, loaded and forked within a prompt, where upper layers have no keys or some; the end stays the same."""
    model = model_of("five above")
    runner = model.runner(max_rollback=2)
    sequence = runner.sequence(model.tokens[:60])
    runner.step([(sequence, computed)], StepOptions(ends=(60,)))
    sequence.save(tmp_path / "part")
    for each in (sequence, runner.load_sequence(tmp_path / "part"), sequence.fork()):
        [rows] = runner.step([(each, 60 - computed)], StepOptions(ends=(60,))).rows
        assert_close(rows, model.reference[59:60], TOLERANCE)
        each.append(model.tokens[60])
        assert_close(runner.step([(each, 1)]).rows[0], model.reference[60:61], TOLERANCE)


def broken_head(model, states):
    raise RuntimeError("no head")


def test_a_step_that_fails_is_repeated(monkeypatch):
    model = model_of("five above")
    runner = model.runner(max_rollback=4)
    sequence = runner.sequence(model.tokens[:60])
    runner.step([(sequence, 45)], StepOptions(ends=(60,)))
    before = sequence.cache.exact_from
    for n in (3, 9):
        with monkeypatch.context() as patch:
            patch.setattr(type(runner.model), "logits", broken_head)
            with pytest.raises(RuntimeError, match="no head"):
                runner.step([(sequence, n)], StepOptions(ends=(60,)))
        kept = n <= 4
        assert (sequence.num_computed, sequence.cache.exact_from) == ((45, before) if kept else (0, 0))
    [rows] = runner.step([(sequence, 60)], StepOptions(ends=(60,))).rows
    assert_close(rows, model.reference[59:60], TOLERANCE)


def test_results_that_cannot_follow_are_refused():
    model = model_of("five above")
    runner = model.runner(max_rollback=0)
    sequence = runner.sequence(model.tokens[:60])
    runner.step([(sequence, 50)], StepOptions(ends=(60,)))
    with pytest.raises(ValueError, match="results at 55 tokens need keys of upper layers that were left out when the"):
        runner.step([(sequence, 5)])
    with pytest.raises(
        ValueError, match=r"StepOptions.ends: 54 of a sequence that has 55 tokens after the step and 60"
    ):
        runner.step([(sequence, 5)], StepOptions(ends=(54,)))
    with pytest.raises(ValueError, match=r"2 values for a batch of 1 sequences"):
        runner.step([(sequence, 5)], StepOptions(ends=(60, 60)))
    runner.manager.reserve([(sequence.cache, 1)])
    with pytest.raises(RuntimeError, match="upper layers of this sequence lack keys"):
        runner.step_metadata([sequence.cache], [1])
    [rows] = runner.step([(sequence, 10)], StepOptions(ends=(60,))).rows
    assert_close(rows, model.reference[59:60], TOLERANCE)


def test_allowed_tokens_beside_a_prompt_without_results():
    """A step in which the runner chooses tokens: one request has results and a mask, another has neither."""
    model = model_of("five above")
    runner = model.runner()
    first, second = runner.sequence(model.tokens), runner.sequence(model.tokens[:50])
    mask = bytearray(64)
    mask[3] = 0b100
    options = StepOptions(greedy=True, allowed=(None, bytes(mask)), ends=(72, 50), logprobs=(None, 1))
    output = runner.step([(first, 40), (second, 50)], options)
    assert required(output.tokens)() == [[], [26]]
    assert [part and part.token_ids.tolist() for part in required(output.logprobs)()] == [None, [26]]


# prefixes

LONG_SIZES: dict[str, Any] = {"max_model_len": 270, "max_num_seqs": 5, "max_num_batched_tokens": 256}


@lru_cache
def shared_prompts() -> list[list[int]]:
    """Prompts that share 140 tokens, with little or much after them."""
    config, beginning = shallow(), prompt(shallow(), 140, 3)
    ends = [prompt(config, length, 10 + i) for i, length in enumerate((5, 90, 30, 3, 60))]
    return [beginning + end for end in ends]


def generated(runner: ModelRunner, prompts: list[list[int]], one_by_one: bool = False, **options):
    engine, found = Engine(runner, decoder=options.pop("decoder", None)), []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, **options)
    for group in [[each] for each in prompts] if one_by_one else [prompts]:
        requests = [engine.add_request(each, params) for each in group]
        while engine.has_unfinished:
            engine.step()
        found += [request.completion() for request in requests]
    assert not any(completion.error for completion in found), found
    return engine, found


def assert_same(found, expected) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert abs(got.logprobs.logprobs - wanted.logprobs.logprobs).max() < 1e-4


@lru_cache
def expected_completions(count: int = 5):
    config = shallow()
    return generated(full(make_runner(config, **LONG_SIZES)), shared_prompts()[:count])[1]


@exhaustive_on_cpu
@pytest.mark.parametrize(
    ("budget", "one_by_one"), tiered([(b, o) for b in (256, 64, 50) for o in (True, False)], [(64, False)])
)
def test_prefixes(budget, one_by_one):
    """A snapshot without upper keys serves a prompt that goes on for long enough; others are computed up to one."""
    limits: dict[str, Any] = LONG_SIZES | {"max_num_batched_tokens": budget, "max_snapshots": 8}
    runner = strict(make_runner(shallow(), **limits))
    for _ in range(2):
        _, found = generated(runner, shared_prompts(), one_by_one)
        assert_same(found, expected_completions())
    assert all(completion.cached_tokens >= 64 for completion in found)


@pytest.mark.parametrize("more", tiered([1, 29, 30, 31], [29, 30]))
def test_a_snapshot_at_a_chunk_serves_long_prompts_only(more):
    """Behind the first chunk of 64 tokens upper layers have nothing; 30 rows of a prompt's end need something.

    A prompt that is too short is computed from its first token, and leaves a snapshot that serves the next one.
    """
    limits: dict[str, Any] = LONG_SIZES | {"max_num_batched_tokens": 64, "max_snapshots": 8}
    runner, tokens = strict(make_runner(shallow(), **limits)), prompt(shallow(), 200, 8)
    assert required(runner.trailing).rows == 30
    engine, _ = generated(runner, [tokens])
    assert 64 in [64 * len(keys) for keys in kept_prefixes(engine)]
    other = tokens[:64] + prompt(shallow(), more, 9)
    [expected] = generated(full(make_runner(shallow(), **{**limits, "max_snapshots": 0})), [other])[1]
    for cached in (64 if more >= 30 else 0, 64):
        [completion] = generated(runner, [other])[1]
        assert_same([completion], [expected])
        assert completion.cached_tokens == cached


def kept_prefixes(engine: Engine) -> list[list[bytes]]:
    return [entry.keys for entry in required(engine.prefixes)._entries.values()]


@exhaustive_on_cpu
@pytest.mark.parametrize("rollback", tiered([0, 16], [16]))
def test_resume_from_a_snapshot_at_every_distance(rollback):
    """Of the layers' keys behind a snapshot the first ones are missing, or all; each end that it serves is exact."""
    model = model_of("one above")
    runner = model.runner(max_rollback=rollback, max_snapshots=1)
    store, served = SnapshotStore(runner.manager), {}
    for end in (64, 66, 70, 72):
        sequence = runner.sequence(model.tokens[:end])
        runner.step([(sequence, 64)], StepOptions(ends=(end,)))
        snapshot = store.take(sequence.cache)
        sequence.free()
        for length in range(65, LENGTH + 1):
            served[end, length] = required(runner.trailing).serves(snapshot.cache, length)
            if served[end, length]:
                resumed = runner.sequence(model.tokens[:length], store.restore(snapshot))
                [rows] = runner.step([(resumed, length - 64)]).rows
                assert_close(rows, model.reference[length - 1 : length], TOLERANCE, f"{end}, {length}")
                resumed.free()
        store.drop(snapshot)
    assert all(served[64, length] for length in range(65, LENGTH + 1))
    assert [served[72, length] for length in range(70, LENGTH + 1)] == [False, False, True]


def test_preemption():
    """A request that waits again, within its prompt or after it, computes its prompt again."""
    config, (first, second, *_) = shallow(), shared_prompts()
    for steps in (1, 5):
        runner = strict(make_runner(config, **{**LONG_SIZES, "max_num_batched_tokens": 96}))
        engine = Engine(runner)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        requests = [engine.add_request(each, params) for each in (first, second)]
        for _ in range(steps):
            engine.step()
        engine.scheduler.preempt(engine.scheduler.running[-1], engine.last_step)
        while engine.has_unfinished:
            engine.step()
        assert sum(request.preemptions for request in requests) == 1
        assert_same([request.completion() for request in requests], expected_completions(2))


@pytest.mark.exhaustive
def test_several_completions_share_a_prompt():
    first = shared_prompts()[1]
    params = {"n": 3, "seed": 3, "temperature": 1.0}
    found = []
    for runner in (strict(make_runner(shallow(), **LONG_SIZES)), make_runner(shallow(), **LONG_SIZES)):
        if found:
            full(runner)
        engine = Engine(runner)
        request = engine.add_request(first, SamplingParams(max_tokens=6, ignore_eos=True, **params))
        while engine.has_unfinished:
            engine.step()
        found.append([each.token_ids for each in request.completion().outputs])
    assert found[0] == found[1]


def test_records_and_scores_beside_other_prompts():
    """A step in which something is recorded computes all of its rows, also of a prompt whose rows were left out."""
    config, prompts = shallow(), shared_prompts()
    runner = strict(make_runner(config, **{**LONG_SIZES, "max_num_batched_tokens": 128}))
    reference = full(make_runner(config, **LONG_SIZES))
    options = runner.record_options(routes=True, selections=True, hidden_states=[1, 3])
    expected, [records] = reference.score_records([prompts[3]], options)
    other = runner.sequence(prompts[1])
    runner.step([(other, 100)], StepOptions(ends=(len(prompts[1]),)))
    recorded, parts = runner.sequence(prompts[3]), []
    while recorded.num_pending:
        n = min(60, recorded.num_pending)
        step = StepOptions(ends=(len(prompts[1]), recorded.num_computed + n), record=(None, options), last=n)
        output = runner.step([(other, min(9, other.num_pending)), (recorded, n)], step)
        parts.append(required(output.records)[1])
        assert_close(output.rows[1], expected[0][recorded.num_computed - n : recorded.num_computed], 1e-4)
    for name, values in required(records).arrays.items():
        found = torch.cat([part.arrays[name] for part in parts])
        assert_close(found.flatten(1).float(), values.flatten(1).float(), 1e-4) if values.dim() > 1 else None
    [rows] = runner.step([(other, other.num_pending)]).rows
    assert_close(rows, reference.score([prompts[1]])[0][-1:], 1e-4)


@pytest.mark.exhaustive
def test_prompt_logprobs_take_all_rows():
    config, prompts = shallow(), shared_prompts()[:2]
    [first, second] = generated(strict(make_runner(config, **LONG_SIZES)), prompts, prompt_logprobs=0)[1]
    scored = full(make_runner(config, **LONG_SIZES)).score_logprobs(prompts)
    for completion, part in zip((first, second), scored, strict=True):
        assert abs(completion.prompt_logprobs.logprobs - part.logprobs).max() < 1e-4
    assert_same([first, second], expected_completions(2))


@pytest.mark.parametrize("snapshots", tiered([0, 8], [8]))
def test_drafts(snapshots):
    """DSpark's stages read streams of upper layers: the same drafts are made, and the same ones are accepted."""
    config, source = shallow(), DraftedSource(shallow(), 1)
    limits: dict[str, Any] = LONG_SIZES | {"max_snapshots": snapshots, "max_num_batched_tokens": 96}
    stats, found = [], []
    for make in (strict, full):
        runner = make(make_runner(config, source, **limits))
        engine, completions = generated(runner, shared_prompts()[:2], True, decoder=MTPSpeculation(runner, 4))
        stats.append((engine.stats.drafted, engine.stats.accepted))
        found.append(completions)
    assert_same(*found)
    assert stats[0] == stats[1]
    assert stats[0][1] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_requests_in_any_order(seed):
    """Prompts that share beginnings, arrive and are preempted at random, with snapshots, drafts and small steps."""
    draw, config, source = random.Random(seed), shallow(), DraftedSource(shallow(), 1)
    stems = [prompt(config, draw.randint(60, 150), 100 * seed + i) for i in range(2)]
    prompts = []
    for i in range(6):
        stem, more = draw.choice(stems), draw.choice([1, 20, 29, 30, 31, draw.randint(1, 90)])
        prompts.append(stem[: draw.choice([len(stem), draw.randint(1, len(stem))])] + prompt(config, more, 9000 + i))
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    params = [SamplingParams(**asked, prompt_logprobs=0 if draw.random() < 0.2 else None) for _ in prompts]
    limits: dict[str, Any] = {
        "max_model_len": 260,
        "max_num_batched_tokens": draw.choice([17, 64, 100]),
        "max_num_seqs": 4,
    }
    limits |= {"max_snapshots": draw.choice([0, 2, 8]), "max_rollback": draw.choice([1, 5, 16])}
    runner = strict(make_runner(config, source, **limits))
    speculates = limits["max_rollback"] > 1 and draw.random() < 0.5
    engine = Engine(runner, decoder=MTPSpeculation(runner, 4) if speculates else None)
    requests, waiting = {}, draw.sample(range(6), 6)
    while waiting or engine.has_unfinished:
        if waiting and draw.random() < 0.5:
            number = waiting.pop()
            requests[number] = engine.add_request(prompts[number], params[number])
        if engine.has_unfinished:
            engine.step()
        if len(engine.scheduler.running) > 1 and draw.random() < 0.15:
            engine.scheduler.preempt(draw.choice(engine.scheduler.running), engine.last_step)
    reference = full(make_runner(config, source, max_model_len=260))
    completions = [requests[i].completion() for i in range(6)]
    assert [completion.error for completion in completions] == [None] * 6
    texts = [tokens + completion.token_ids for tokens, completion in zip(prompts, completions, strict=True)]
    for tokens, completion, logits in zip(prompts, completions, reference.score(texts), strict=True):
        assert logits[len(tokens) - 1 : -1].argmax(-1).tolist() == completion.token_ids


@pytest.mark.exhaustive
@pytest.mark.parametrize("numerics", ["official", "serving"])
def test_quantised_numerics(numerics):
    """In deterministic steps the same bits; poisoned caches would show in them."""
    widths = {"hidden_size": 128, "q_lora_rank": 128, "num_attention_heads": 8, "o_lora_rank": 64}
    serving = tiny(num_hidden_layers=4, compress_ratios=[1, 1, 1, 1], kv_source_layer_ids=[0],
                   index_source_layer_ids=[0, 2], candidate_source_layer_id=None, moe_intermediate_size=128,
                   index_topk=8, sliding_window=5, engram_layer_ids=None, num_nextn_predict_layers=0,
                   dspark_target_layer_ids=None, **widths)  # fmt: skip
    config, length = (serving, 24) if numerics == "serving" else (tiny(num_hidden_layers=7), 42)
    source, tokens = RandomSource(config, 0), prompt(config, length + 4, 2)
    found = []
    for make in (lambda runner: runner, full):
        runner = make(make_runner(config, source, numerics=numerics, deterministic=True, max_rollback=2))
        poison_caches(runner)
        sequence, logits = start(runner, tokens[:length], length - 9)
        found.append(torch.cat([logits, *go_on(runner, sequence, tokens[length:])]))
        assert sequence.cache.exact_from == (length - 2 if runner.trailing else 0)
    assert torch.equal(*found)


# approximate prefill


def test_approximate_prefill_computes_one_window_of_rows():
    config = tiny()
    runner = make_runner(config, approximate_prefill=True, max_rollback=0)
    counts = counted_rows(runner)
    sequence, logits = start(strict(runner), prompt(config, 90), 61)
    assert list(counts.values()) == [90] * 4 + [8] * 4
    exact = make_runner(config).score([prompt(config, 90)])[0][-1:]
    error = float((logits - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.5
    go_on(runner, sequence, [3, 4, 5])
    short = make_runner(config, approximate_prefill=True).score([prompt(config, 30)])[0]
    assert_close(short, make_runner(config).score([prompt(config, 30)])[0], TOLERANCE)


@pytest.mark.exhaustive
def test_saved_sequences_of_approximate_prefill_are_others(tmp_path):
    config = tiny()
    sequence, _ = start(make_runner(config, approximate_prefill=True), prompt(config, 60), 60)
    sequence.save(tmp_path / "approximate")
    with pytest.raises(ValueError, match="it was saved with another numerics"):
        make_runner(config).load_sequence(tmp_path / "approximate")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (tiny(), {"deterministic": True}, "its logits depend on where a prompt ends"),
        (tiny(), {"attention_only": True}, "approximate_prefill=True is for DeepSeek-V4.1"),
    ],
)
def test_what_approximate_prefill_is_not_for(config, options, message):
    with pytest.raises(ValueError, match=message):
        make_runner(config, approximate_prefill=True, **options)
