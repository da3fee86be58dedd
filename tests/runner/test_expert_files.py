"""Routed experts that are read as steps need them: the same bits as all resident, whatever the cache holds."""

import ctypes
import gc
import threading
from concurrent.futures import Future
from functools import cache

import pytest
import torch

from deepseek_attn import LLM, ModelRunner, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.kernels.moe import uses
from deepseek_attn.layers import expert_files
from deepseek_attn.layers.expert_files import ExpertFileCache
from deepseek_attn.layers.expert_memory import ExpertStats
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.runner.expert_files import FREE_SHARE
from deepseek_attn.utils.device import resident_memory
from tests.support import v32_cases, v41_cases
from tests.support.interruptions import InterruptBefore
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

LENGTHS = (23, 1, 5)


def v4():
    return small_config([0, 4], mtp=1, n_routed_experts=8, vocab_size=300)


FAMILIES = {
    "v4": lambda: (v4(), small_runner),
    "v32": lambda: (v32_cases.small(num_nextn_predict_layers=1), v32_cases.make_runner),
    "v41": lambda: (v41_cases.shallow(), v41_cases.make_runner),
}


class KeptSource(RandomSource):
    """Draws each tensor once."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = cache(super().read)


def one_of_each(source: CheckpointSource) -> int:
    """Bytes of one expert of every layer."""
    return sum(info.nbytes for name, info in source.entries().items() if ".experts.0." in name)


def caches(runner) -> list[ExpertFileCache]:
    return [module.opened_cache for module in runner.model.modules() if isinstance(module, ExpertLinear)]


def formats(config) -> list[tuple[str, str]]:
    stored = ["fp8", "bf16"] if config.model_type == "deepseek_v32" else ["fp4", "fp8", "bf16"]
    return [(numerics, dtype) for numerics in ("exact", "official") for dtype in stored]


QUICK = [("v4", "official", "fp4")]
CASES = [(family, *case) for family, make in FAMILIES.items() for case in formats(make()[0])]


@pytest.mark.parametrize(("family", "numerics", "stored"), tiered(CASES, QUICK))
def test_same_bits_with_any_cache(family, numerics, stored):
    """Prompts in chunks of a batch, and single tokens; caches of 1 slot, of fewer than a token needs, of all."""
    config, make = FAMILIES[family]()
    config = config if stored == "bf16" or config.expert_dtype == stored else config.replace(expert_dtype=stored)
    source = KeptSource(config, 1, stored)
    texts, one = [prompt(config, length, length) for length in LENGTHS], one_of_each(source)
    expected = make(config, source, numerics=numerics)
    chunked, single = expected.score(texts, chunk_size=7), expected.score(texts[2:], chunk_size=1)
    for slots in (1, config.num_experts_per_tok + 1, config.n_routed_experts):
        with make(
            config, source, numerics=numerics, expert_memory="disk", expert_cache_bytes=one * slots + 7
        ) as runner:
            assert runner.expert_files.slots == slots
            for left, right in zip(chunked, runner.score(texts, chunk_size=7), strict=True):
                assert torch.equal(left, right)
            assert torch.equal(single[0], runner.score(texts[2:], chunk_size=1)[0])
            assert all(len(cache.held) <= slots for cache in caches(runner))
            stats = runner.expert_files.stats
            if slots == config.n_routed_experts:  # each expert was read once, and only if a token chose it
                read = sum(cache._weights[expert].nbytes for cache in caches(runner) for expert in cache.held)
                assert stats.bytes_read == read
            assert stats.misses >= sum(len(cache.held) for cache in caches(runner)) // 3
            assert stats.hits > 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(RandomSource(v4(), 1), v4(), tmp_path_factory.mktemp("experts") / "ckpt", num_shards=3)


LIMITS = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "progress": False}


def on_disk(directory, slots: int, **options):
    size = slots * one_of_each(RandomSource(v4(), 1))
    return LLM(directory, expert_memory="disk", expert_cache_bytes=size, **LIMITS | options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("speculate", [0, 2])
def test_texts_are_the_same(directory, speculate):
    """From files, in batches with chunked prompts and the prefix cache; with drafts, whose layer has experts too."""
    shared = prompt(v4(), 70)
    prompts = [shared + [1, 2], shared + [3], prompt(v4(), 9, 1), shared + [1, 5]]
    params = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
    options, texts = {"speculate": speculate, "max_snapshots": 3}, []
    for llm in (LLM(directory, **LIMITS | options), on_disk(directory, 3, **options)):
        with llm:
            texts.append([done.token_ids for _ in range(2) for done in llm.generate(prompts, params)])
            assert llm.engine.stats.cached_tokens > 0
    assert texts[0] == texts[1]


def test_what_else_a_runner_does(directory, tmp_path):
    """Saved sequences go from one memory to the other; records and replays are the same; nothing counts as loaded."""
    resident, runner = LLM(directory, **LIMITS).runner, on_disk(directory, 2).runner
    assert resident.fingerprint() == runner.fingerprint()
    options = runner.record_options(routes=True)
    text = prompt(v4(), 40)
    left, [records] = resident.score_records([text], options)
    right, [same] = runner.score_records([text], options)
    assert torch.equal(left[0], right[0])
    assert all(
        torch.equal(required(records).arrays[name], required(same).arrays[name]) for name in required(records).arrays
    )
    assert torch.equal(runner.score([text], replay=[records])[0], left[0])
    kept = {name for name in runner.report.by_row if ".experts." in name}
    assert kept == {name for name in resident.report.loaded if ".experts." in name}
    assert not any(".experts." in name for name in runner.report.loaded)
    threads = [vars(found.cpu_threads) for found in (resident, runner)]
    assert threads[0] == threads[1]  # the number of threads moves the last bits


def test_default_cache_is_a_part_of_the_free_memory(monkeypatch):
    source = RandomSource(v4(), 1)
    monkeypatch.setattr("deepseek_attn.runner.build.available_memory", lambda: 10**9)
    monkeypatch.setattr(
        "deepseek_attn.runner.expert_files.available_memory", lambda: 3 * one_of_each(source) / FREE_SHARE
    )
    runner = small_runner(v4(), source, expert_memory="disk")
    assert (required(runner.expert_files).slots, required(runner.expert_files).experts) == (3, 8)
    assert required(runner.expert_files).nbytes == 3 * one_of_each(source)


def test_refused_before_anything_is_read(monkeypatch):
    source, least = RandomSource(v4(), 1), one_of_each(RandomSource(v4(), 1))
    monkeypatch.setattr(source, "read", lambda name: pytest.fail("a tensor was read"))
    with pytest.raises(
        ValueError, match=f"expert_cache_bytes={least - 1}: one expert of each of 3 layers has {least:,}"
    ):
        small_runner(v4(), source, expert_memory="disk", expert_cache_bytes=least - 1)


def test_experts_of_two_formats():
    """All experts of a layer have one format, as where they are loaded."""
    source = RandomSource(v4(), 1, "fp8")
    entries, plain = source.entries(), RandomSource(v4(), 1, "bf16").entries()
    name = "layers.1.ffn.experts.5.w3"
    entries[f"{name}.weight"] = plain[f"{name}.weight"]
    del entries[f"{name}.scale"]
    with pytest.raises(ValueError, match="expert 5 has a BF16 weight, other experts of the layer F8_E4M3"):
        small_runner(v4(), source, expert_memory="disk")


def test_checkpoint_that_changes_while_it_is_used(tmp_path):
    config = v4()
    path = write_checkpoint(RandomSource(config, 1), config, tmp_path / "ckpt", num_shards=2)
    llm = on_disk(path, 8)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    expected = llm.generate([[1, 2, 3]], params)[0].token_ids
    shards = sorted(path.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    with open(shards[0], "r+b") as file:
        file.truncate(len(whole) // 8)
    failed = llm.generate([[4, 5, 6, 7]], params)[0]
    assert failed.finish_reason == "error"
    shards[0].write_bytes(whole)
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == expected
    assert llm.generate([[4, 5, 6, 7]], params)[0].finish_reason == "length"  # no failed read was kept
    llm.close()


def test_an_interrupted_step_leaves_nothing_behind(directory):
    """Before every line of the cache: the step is computed again, with the same result."""
    text = prompt(v4(), 20)
    runner = on_disk(directory, 2).runner
    expected = runner.score([text])[0]
    with InterruptBefore(files=(expert_files.__file__,)) as seen:
        runner.score([text])
    assert len(seen.lines) > 20
    for line in list(seen.lines)[1::4]:
        with InterruptBefore(line, files=(expert_files.__file__,)):
            runner.score([text])
        assert all(len(cache.held) <= 2 for cache in caches(runner))
        assert torch.equal(runner.score([text])[0], expected)


def test_closing_ends_the_threads(directory):
    before = threading.active_count()
    llm = on_disk(directory, 2)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert threading.active_count() > before
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("experts")]
    llm.close()
    for thread in readers:
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        _ = llm.runner.expert_files
    llm = on_disk(directory, 2)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("experts")]
    del llm
    for thread in readers:
        thread.join(20)
        assert not thread.is_alive()


class ManualReaders:
    """Reads that are done at once, in the order in which they are begun."""

    def __init__(self):
        self.stats, self.begun = ExpertStats(), []

    def read(self, weight):
        self.begun.append(weight)
        future = Future()
        future.set_result((torch.full((1,), float(weight)), None))
        return future


def step(cache, readers, needed) -> tuple[int, list[int]]:
    """(hits, experts that were read) of a step that uses ``needed``."""
    readers.begun.clear()
    hits = cache.begin(dict.fromkeys(needed, 1))
    for expert in needed:
        assert cache.get(expert, lambda *pair: pair)[0] == expert
        assert cache.get(expert, lambda *pair: pair)[0] == expert
        assert len(cache.held) <= cache.slots
    cache.end()
    return hits, list(readers.begun)


def test_least_used_experts_are_evicted_first():
    readers = ManualReaders()
    cache = ExpertFileCache(untyped({number: number for number in range(8)}), 3, untyped(readers))
    assert step(cache, readers, [2, 5, 7]) == (0, [2, 5, 7])
    assert step(cache, readers, [2, 5]) == (2, [])
    assert step(cache, readers, [2, 3]) == (1, [3])  # in the place of 7, used once
    assert cache.held == [2, 3, 5]
    assert step(cache, readers, [0]) == (0, [0])  # 3 was used once, later than 5, which was used twice
    assert cache.held == [0, 2, 5]
    assert step(cache, readers, [1]) == (0, [1])
    assert cache.held == [1, 2, 5]


def test_uses_are_counted_as_on_a_gpu():
    """By the numbers of `count_expert_uses`, whose room this one cannot import."""
    counts, expected = dict.fromkeys(range(3), 0), [0, 0, 0]
    for tokens in ({0: 1}, {0: 300, 2: 2}, {}, {1: 7, 2: 255}):
        expert_files.count_uses(counts, tokens)
        seen = [min(tokens.get(expert, 0), uses.MAX_TOKENS) for expert in range(3)]
        pairs = zip(expected, seen, strict=True)
        expected = [before - (before >> uses.DECAY) + uses.USE * added for before, added in pairs]
    assert list(counts.values()) == expected


def test_equal_counts_evict_the_lowest_number():
    readers = ManualReaders()
    cache = ExpertFileCache(untyped({number: number for number in range(8)}), 3, untyped(readers))
    step(cache, readers, [1, 4, 6])
    step(cache, readers, [5])
    assert cache.held == [4, 5, 6]


def test_a_step_that_needs_more_than_there_are_slots_reads_each_once():
    readers = ManualReaders()
    cache = ExpertFileCache(untyped({number: number for number in range(8)}), 4, untyped(readers))
    assert step(cache, readers, list(range(8))) == (0, list(range(8)))
    assert cache.held == [4, 5, 6, 7]
    hits, read = step(cache, readers, list(range(8)))
    assert hits == 4
    assert len(read) == len(set(read)) < 8  # some of those in memory are still there when their turn comes
    assert set(read) >= {0, 1, 2, 3}


@pytest.mark.exhaustive
def test_memory_is_bounded(tmp_path):
    """Steps that read 200 MB of experts: a cache of 6 MB takes that much less memory than one of all experts."""
    if not resident_memory():
        pytest.skip("needs /proc")
    changes = {"n_routed_experts": 64, "vocab_size": 300, "moe_intermediate_size": 4096, "hidden_size": 256}
    config = small_config([0, 4], **changes)
    source = RepeatingSource(config)
    total = sum(info.nbytes for name, info in source.entries().items() if ".experts." in name)
    path = write_checkpoint(source, config, tmp_path / "ckpt", num_shards=3)
    del source
    one, taken = one_of_each(RandomSource(config, 0)), []
    for slots in (2, 64):
        options = {"expert_memory": "disk", "expert_cache_bytes": slots * one}
        with ModelRunner.from_pretrained(path, numerics="official", **LIMITS | options) as runner:
            for seed in range(2):
                runner.score([prompt(config, 60, seed)])
            assert required(runner.expert_files).stats.bytes_read > 0.7 * total
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests freed does not count
            taken.append(resident_memory())
    assert taken[1] - taken[0] > total // 2
