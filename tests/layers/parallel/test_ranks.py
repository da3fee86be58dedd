"""Several processes on the CPU (Gloo) that run one model together, against one process."""

from __future__ import annotations

import multiprocessing
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.checkpoint.selection import OTHER_RANK
from deepseek_attn.layers import parallel
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.split import splits_widths
from tests.layers.parallel import cases
from tests.support.once import made_once
from tests.support.small_models import assert_close
from tests.support.tiers import EXHAUSTIVE, ON_GPU, tiered
from tests.support.typed import required, untyped

pytestmark = [] if ON_GPU else [EXHAUSTIVE]  # processes that import torch
# Sums over ranks add up in another order, so float32 results differ in their last bits, and layers amplify that.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return made_once("checkpoints", cases.write_checkpoints, tmp_path_factory)


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory) -> dict:
    def compute(folder: Path) -> None:
        torch.save(cases.everything(checkpoints, Parallel.single()), folder / "0.pt")

    return torch.load(made_once("alone", compute, tmp_path_factory) / "0.pt")


@pytest.fixture(scope="module", params=tiered([2, 4], [2]))
def ranks(request, checkpoints, tmp_path_factory) -> list[dict]:
    """What each of 2 or 4 tensor-parallel ranks computed."""
    world = request.param
    made = made_once(f"ranks-{world}", lambda folder: run_ranks(world, checkpoints, folder), tmp_path_factory)
    return [torch.load(made / f"{rank}.pt") for rank in range(world)]


def run_ranks(world: int, checkpoints: Path, results: Path) -> None:
    """Runs this many processes, each of which writes what it computed to ``results``; torch is imported once."""
    with socket.socket() as free, socket.socket() as second:
        free.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = free.getsockname()[1], second.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", cases.__name__])
    arguments = world, ports, checkpoints, results
    processes = [context.Process(target=cases.run_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=900)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world


@pytest.mark.parametrize("family", list(cases.CONFIGS))
@pytest.mark.parametrize("what", ["logits", "drafts", "steps"])
def test_logits(ranks, alone, family, what):
    for rank in ranks:
        for got, expected in zip(rank[family][what], alone[family][what], strict=True):
            assert_close(got, expected, TOLERANCE)


@pytest.mark.parametrize("family", list(cases.CONFIGS))
def test_results_at_the_end_of_a_prompt(ranks, family):
    """Ranks leave out the same rows of it, if any: those of the first chunk in V4.1's upper layers."""
    for rank in ranks:
        first, last = rank[family]["steps"][1:]
        assert len(first) == 0
        assert_close(last, rank[family]["logits"][0][-1:], TOLERANCE)


@pytest.mark.parametrize("family", list(cases.CONFIGS))
def test_each_rank_has_the_records_of_all_experts(ranks, alone, family):
    for rank in ranks:
        records, expected = rank[family]["records"], alone[family]["records"]
        assert records["difference"] == 0
        assert torch.equal(records["experts"], expected["experts"])
        assert torch.equal(records["selections"], expected["selections"])
        weights = records["expert_weights"].flatten(1), expected["expert_weights"].flatten(1)
        assert_close(*weights, TOLERANCE)


@pytest.mark.parametrize("family", list(cases.CONFIGS))
def test_experts_from_the_checkpoint(ranks, alone, family):
    """Each rank keeps some of its own experts, or parts of some; the bits are those with all of them resident."""
    whole = splits_widths(cases.CONFIGS[family](), len(ranks))
    for rank in (alone, *ranks):
        slots, experts = rank[family]["experts"]
        assert slots < experts == alone[family]["experts"][1] // (1 if rank is alone or whole else len(ranks))
        assert torch.equal(rank[family]["disk"][0], rank[family]["steps"][0])


@pytest.mark.parametrize("family", list(cases.CONFIGS))
def test_experts_in_rows(ranks, alone, family):
    """The same of experts in rows, of which each rank predicts its own."""
    for rank in (alone, *ranks):
        assert torch.equal(rank[family]["host"][0], rank[family]["steps"][0])
    assert sum(alone[family]["guesses"]) > 0 or family == "v32"  # rows for one expert hold all of its two layers


def test_logits_of_quantised_weights(ranks, alone):
    """FP8 and FP4 weights stay what they are; roundings of activations to FP8 magnify the last bits."""
    for got, expected in zip(ranks[-1]["serving"], alone["serving"], strict=True):
        assert (got - expected).norm() <= 0.05 * expected.norm()


def test_all_ranks_have_the_same_bits(ranks):
    for rank in ranks[1:]:
        for family in cases.CONFIGS:
            for got, expected in zip(rank[family]["logits"], ranks[0][family]["logits"], strict=True):
                assert torch.equal(got, expected)
            assert rank[family]["logprobs"] == ranks[0][family]["logprobs"]
        assert rank["texts_of"] == ranks[0]["texts_of"]


@pytest.mark.parametrize("family", list(cases.CONFIGS))
def test_logprobs(ranks, alone, family):
    """Ranks split the vocabulary."""
    for got, expected in zip(ranks[0][family]["logprobs"], alone[family]["logprobs"], strict=True):
        assert_same_logprobs(got, expected)
    for got, expected in zip(ranks[0][family]["logprobs"], ranks[0][family]["logits"], strict=True):
        log_softmax = expected[:-1].double().log_softmax(-1)
        own = log_softmax.gather(1, torch.tensor(got["token_ids"])[:, None])[:, 0]
        assert_close(torch.tensor(got["logprobs"])[None], own[None], TOLERANCE)


def assert_same_logprobs(got: dict, expected: dict) -> None:
    assert got["token_ids"] == expected["token_ids"]
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(expected[name]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", cases.CHECKPOINTS)
def test_generated_logprobs(ranks, alone, family):
    found, expected = (texts["texts_of"][family]["logprobs"] for texts in (ranks[0], alone))
    for got, part in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert_same_logprobs(got, part)


@pytest.mark.parametrize("family", cases.CHECKPOINTS)
def test_generated_tokens(ranks, alone, family):
    found, expected = ({**texts["texts_of"][family], "fresh": None, "logprobs": None} for texts in (ranks[0], alone))
    assert found == expected
    assert expected["speculated"] == expected["greedy"]
    assert (expected["accepted"] > 0) == (family == "v41")  # whose random weights make likely drafts


@pytest.mark.parametrize("family", cases.CHECKPOINTS)
def test_a_rank_reads_its_share(ranks, alone, family):
    expected = alone["loads"][family]
    total, names = expected["bytes"], set(expected["loaded"])
    assert expected["read"] == total
    for rank in ranks:
        loads = rank["loads"][family]
        others = loads["ignored"].pop(OTHER_RANK, ())
        assert loads["ignored"] == expected["ignored"]
        assert set(loads["loaded"]) | set(others) == names
        assert not set(loads["loaded"]) & set(others)
        assert loads["read"] == loads["bytes"] < 0.75 * total
    kept = Counter(name for rank in ranks for name in rank["loads"][family]["loaded"] if ".experts." in name)
    times = len(ranks) if splits_widths(cases.CONFIGS[family](), len(ranks)) else 1
    assert kept == {name: times for name in names if ".experts." in name}


def test_data_parallel_attention(ranks, checkpoints):
    world = len(ranks)
    everyone = cases.LLM(checkpoints / cases.DATA_PARALLEL[world], parallel=Parallel.single(), **cases.LIMITS)
    texts = cases.prompts(everyone.runner.config, range(20, 20 + 13 * world, 13))
    done = everyone.generate(texts, cases.OWN, return_routes=True, return_selections=True)
    expected = [list(completion.token_ids) for completion in done]
    own = [rank["own_requests"] for rank in ranks]
    for number, rank in enumerate(own):
        assert rank["texts"] == [expected[:number], expected[number:][:2]] * 2
        assert rank["steps"] == own[0]["steps"] != []
        assert not rank["mtp"]
        for found, completion in zip(rank["records"], done[:number], strict=True):
            assert torch.equal(found["experts"], required(required(completion.records).experts))
            assert torch.equal(found["selections"], required(required(completion.records).selections))
    (got,) = own[1]["scored"]
    assert_close(got, everyone.runner.score(texts[:1])[0], TOLERANCE)
    (got,) = own[1]["logprobs"]
    assert_same_logprobs(got, everyone.runner.score_logprobs(texts[:1])[0].to_dict())


def test_small_messages_of_data_parallel_attention(monkeypatch):
    """Through the ranks' own memory while what goes to one rank is small; tokens are filled up before."""
    sizes, holds = [], SimpleNamespace(holds=lambda size: size <= 4 * 8 * 4)
    ranks = Parallel(1, 2, dp_attention=True, step_rows=4, peers=untyped(SimpleNamespace(buffers=holds)))

    def exchange(op, x, rows):
        sizes.append((op, x.shape[0]))
        return torch.ones(rows, x.shape[1])

    monkeypatch.setattr(parallel, "all_gather", lambda x, peers: exchange("gather", x, 8))
    monkeypatch.setattr(parallel, "reduce_scatter", lambda x, peers: exchange("scatter", x, 4))
    monkeypatch.setattr(Parallel, "_exchange", lambda *_: sizes.append(("torch", 0)))
    for width in (8, 9):
        assert ranks.gather_tokens(torch.zeros(3, width)).shape == (8, width)
        assert ranks.sum_experts(torch.zeros(8, width), 3).shape == (3, width)
    assert sizes == [("gather", 4), ("scatter", 8), ("torch", 0), ("torch", 0)]
