"""Decode steps over persistent tensors: the same as ordinary steps, whatever joins, leaves, grows or is padding."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.graphs import DecodeGraphs, batch_sizes, length_bucket
from tests.support.oracle_transformers import TransformersOracle
from tests.support.small_models import assert_no_near_tie, prompt, two_layers
from tests.support.tiers import EXHAUSTIVE, tiered
from tests.support.typed import untyped

OPTIONS: dict[str, Any] = {"max_model_len": 700, "max_num_seqs": 5, "max_num_batched_tokens": 256}


def make_runner(device: torch.device, numerics: str, dtype: str) -> ModelRunner:
    config = two_layers() if device.type == "cpu" else "tiny_gpu"
    return ModelRunner.from_config(config, device=device, numerics=numerics, dtype=dtype, cuda_graphs=False, **OPTIONS)


@pytest.fixture
def runner(device) -> ModelRunner:
    return make_runner(device, "exact", "float32")


def random_ids(count: int, vocab: int) -> list[int]:
    return torch.randint(vocab, (count,)).tolist()


@lru_cache(maxsize=1)
def decided_texts(config: ModelConfig) -> list[list[int]]:
    """Five texts of 325 tokens; those of the tiny model leave no choice to rounding."""
    texts = [prompt(config, 325, seed) for seed in (0, 1, 3, 7, 8)]
    if config.vocab_size == two_layers().vocab_size:
        oracle = TransformersOracle(config, RandomSource(config, 0))
        for text in texts:
            assert_no_near_tie(oracle(text))
    return texts


def graphs_of(runner: ModelRunner) -> DecodeGraphs:
    return DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[2, 5])


def decode(runner: ModelRunner, graphs: DecodeGraphs, sequences: list, counts: list[int]) -> list[torch.Tensor]:
    """One step through ``graphs``, with pages reserved and committed as the runner does."""
    caches = [sequence.cache for sequence in sequences]
    runner.manager.reserve(list(zip(caches, counts, strict=True)))
    ids = [s.token_ids[s.num_computed : s.num_computed + n] for s, n in zip(sequences, counts, strict=True)]
    with torch.inference_mode():
        run = graphs.run(caches, ids)
        logits = run.logits()
    assert [token for tokens in run.wait_for_tokens() for token in tokens] == logits.argmax(-1).tolist()
    for cache, n in zip(caches, counts, strict=True):
        runner.manager.commit(cache, n)
    return list(logits.split(counts))


@pytest.mark.parametrize(
    "most", [pytest.param(1, id="one token", marks=EXHAUSTIVE), pytest.param(3, id="up to three tokens")]
)
def test_equals_ordinary_steps(runner, most):
    """Sequences of many lengths, over page borders; some leave, some join, batches change size."""
    lengths = (1, 62, 130, 255, 300)
    texts = [text[: n + 12] for n, text in zip(lengths, decided_texts(runner.config), strict=True)]
    expected = runner.score(texts)
    graphs = graphs_of(runner)
    sequences = [runner.sequence(text[:-12]) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        while sequence.num_pending:
            runner.step([(sequence, min(sequence.num_pending, 256))])
        sequence.token_ids.extend(text[-12:])
    generator = torch.Generator().manual_seed(most)
    while pending := [i for i, s in enumerate(sequences) if s.num_pending]:
        size = int(torch.randint(1, len(pending) + 1, (1,), generator=generator))
        chosen = [pending[i] for i in torch.randperm(len(pending), generator=generator)[:size].tolist()]
        counts = [
            min(sequences[i].num_pending, int(torch.randint(1, most + 1, (1,), generator=generator))) for i in chosen
        ]
        before = [sequences[i].num_computed for i in chosen]
        results = decode(runner, graphs, [sequences[i] for i in chosen], counts)
        for i, start, n, logits in zip(chosen, before, counts, results, strict=True):
            assert logits.shape[0] == n
            limit = 2e-5 if runner.device.type == "cpu" else 1e-3  # TF32 in three parts on a GPU
            wanted = expected[i][start : start + n]
            error = (logits.cpu() - wanted).abs().max() / wanted.abs().max()
            assert error < limit, f"sequence {i} at {start}"


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2], ids=["no drafts", "two drafts"])
@pytest.mark.parametrize("most", [1, 3], ids=["one token", "three tokens"])
def test_replays_equal_eager_steps(device, most, drafts):
    """The same bits, in the numerics that serve, with padded rows and lengths and tables that change.

    With drafts, also the inputs that a step leaves for the one after it.
    """
    runner = make_runner(device, "serving", "bfloat16")
    vocab = runner.config.vocab_size
    sequences = [runner.sequence(random_ids(n, vocab)) for n in (2, 61, 190, 253)]
    for sequence in sequences:
        runner.step([(sequence, sequence.num_pending)])
        sequence.token_ids.extend(random_ids(12, vocab))
    sizes = runner.whole_model(), runner.layout, device, [5]
    replayed, eager = DecodeGraphs(*sizes), DecodeGraphs(*sizes, capture=False)
    for chosen in ([0, 1, 2, 3], [3, 1], [2, 0, 3], [1]):
        counts = [1 + (i + most) % most for i in range(len(chosen))]
        caches = [sequences[i].cache for i in chosen]
        runner.manager.reserve([(cache, n + drafts) for cache, n in zip(caches, counts, strict=True)])
        ids = [sequences[i].token_ids[sequences[i].num_computed :][:n] for i, n in zip(chosen, counts, strict=True)]
        limits = [cache.num_tokens + n + drafts for cache, n in zip(caches, counts, strict=True)]
        found, left = [], []
        for steps in (eager, replayed):  # the second run writes what the first one wrote
            with torch.inference_mode():
                run = steps.run(caches, ids, num_drafts=drafts, limits=limits)
                found.append(run.logits())
                left.append(run.wait_for_next_inputs())
        assert found[0].isfinite().all()
        assert torch.equal(*found)
        assert left[0] == left[1]
        for cache, n in zip(caches, counts, strict=True):
            runner.manager.commit(cache, n)


def test_padded_rows_write_nothing(runner):
    sequence = runner.sequence(random_ids(131, runner.config.vocab_size))
    runner.step([(sequence, 130)])
    graphs = graphs_of(runner)
    step = graphs.step(StepSize(requests=5, rows_per_request=2, max_len=700))
    step.set_inputs([], [], [])
    before = [pool.tensor.clone() for pool in runner.pools]
    with torch.inference_mode():
        step.run()
    assert all(torch.equal(a, pool.tensor) for a, pool in zip(before, runner.pools, strict=True))
    assert len(decode(runner, graphs, [sequence], [1])[0]) == 1
    assert not all(torch.equal(a, pool.tensor) for a, pool in zip(before, runner.pools, strict=True))


def test_tables_follow_the_sequences(runner):
    tables = DeviceTables(runner.layout, runner.device)
    sequences = [runner.sequence(random_ids(n, runner.config.vocab_size)) for n in (200, 70, 650)]

    def check(sequences):
        rows = tables.rows([sequence.cache for sequence in sequences])
        assert len(set(rows)) == len(rows)
        assert tables.null_row not in rows
        for row, sequence in zip(rows, sequences, strict=True):
            for group, pages in sequence.cache.tables.items():
                assert tables.tables[group][row, : len(pages)].tolist() == pages

    for sequence in sequences:
        while sequence.num_pending:
            runner.step([(sequence, min(sequence.num_pending, 100))])
            check([sequence])
    check(sequences)
    sequences[0].truncate(190)
    fork = sequences[0].fork()
    for sequence in (fork, sequences[0]):
        sequence.append(3)
        runner.step([(sequence, 1)])
    check([fork, *sequences])
    sequences[1].free()
    sequences[1] = runner.sequence([1, 2, 3])
    runner.step([(sequences[1], 3)])
    check([sequences[2], sequences[1], fork])
    fork.free()
    many = [runner.sequence([4, 5]) for _ in range(2)]
    runner.step([(sequence, 2) for sequence in many])
    check([*many, sequences[2]])  # more sequences than rows were seen by now
    assert all((table[tables.null_row] == 0).all() for table in tables.tables.values())


def test_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(128)[-2:] == [96, 128]
    assert all(b - a <= 64 for limit in (33, 500) for a, b in pairwise(batch_sizes(limit)))
    assert [length_bucket(n, 1 << 20) for n in (1, 8192, 8193, 1 << 20)] == [8192, 8192, 32768, 1 << 20]
    assert length_bucket(100, 700) == 700


def test_padding_is_within_the_tokens_of_a_step():
    """Layers have scratch memory for ``max_num_batched_tokens`` rows, which may be fewer than there are sequences."""
    config = ModelConfig.from_preset("tiny")
    layout = make_layout(config, numerics_for(config, "exact"), torch.float32, 100, 9, 5, 16)
    graphs = DecodeGraphs(untyped(torch.nn.Module()), layout, torch.device("cpu"))
    assert graphs.batches == [1, 2, 4, 5]
    assert graphs.supports([1, 1, 1, 1, 1], 1)
    assert graphs.supports([3], 3)
    assert not graphs.supports([1, 3], 3)


FEW_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "vocab_size": 64}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "options", "reason"),
    [
        ("tiny_gpu", {}, "NVIDIA GPU"),
        ("tiny_gpu", {"backend": "reference"}, "plain torch"),
        ("tiny_gpu", {"attention_only": True}, "attention layers only"),
        ("tiny_v32", {}, "NVIDIA GPU"),
    ],
)
def test_where_steps_cannot_be_captured(preset, options, reason):
    sizes = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64, "layers": [1]}
    config = ModelConfig.from_preset(preset).replace(**FEW_EXPERTS)
    with pytest.raises(ValueError, match=f"cuda_graphs=True: .*{reason}"):
        ModelRunner.from_config(config, device="cpu", cuda_graphs=True, **sizes, **options)


def test_on_a_cpu_no_steps_are_captured():
    assert ModelRunner.from_config(two_layers(), device="cpu", layers=[1], **OPTIONS).graphs is None


@pytest.mark.parametrize(
    ("field", "value"), tiered([("index_head_dim", 64), ("index_topk", 4097)], [("index_topk", 4097)])
)
def test_an_indexer_without_kernels_is_not_captured(field, value):
    config = ModelConfig.from_preset("tiny_gpu").replace(**FEW_EXPERTS, **{field: value})
    with pytest.raises(ValueError, match=rf"cuda_graphs=True: .*{field} is {value}"):
        ModelRunner.from_config(config, device="cpu", cuda_graphs=True, layers=[1], **OPTIONS)
