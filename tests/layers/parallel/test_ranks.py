"""Several processes on the CPU (Gloo) that run one model together, against one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.loader import OTHER_RANK
from deepseek_attn.layers.parallel import Parallel
from tests.layers.parallel import cases
from tests.support.small_models import assert_close
from tests.support.tiers import tiered

# Sums over ranks add up in another order, so float32 results differ in their last bits, and layers amplify that.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = cases.v4_config()
    return write_checkpoint(RandomSource(config, 4), config, tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint) -> dict:
    return cases.everything(checkpoint, Parallel.single())


@pytest.fixture(scope="module", params=tiered([2, 4], [2]))
def ranks(request, checkpoint, tmp_path_factory) -> list[dict]:
    """What each of 2 or 4 tensor-parallel ranks computed."""
    return run_ranks(request.param, "tp", checkpoint, tmp_path_factory.mktemp("ranks"))


def run_ranks(world: int, mode: str, checkpoint: Path, results: Path) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.layers.parallel.cases", str(world), mode, str(checkpoint), str(results)]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[3],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [torch.load(results / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("what", ["logits", "drafts", "steps"])
def test_logits(ranks, alone, family, what):
    for rank in ranks:
        for got, expected in zip(rank[family][what], alone[family][what], strict=True):
            assert_close(got, expected, TOLERANCE)


def test_logits_of_quantised_weights(ranks, alone):
    """FP8 and FP4 weights stay what they are; roundings of activations to FP8 magnify the last bits."""
    for got, expected in zip(ranks[-1]["serving"]["logits"], alone["serving"]["logits"], strict=True):
        assert (got - expected).norm() <= 0.05 * expected.norm()


def test_all_ranks_have_the_same_bits(ranks):
    for rank in ranks[1:]:
        for family in cases.CONFIGS:
            for got, expected in zip(rank[family]["logits"], ranks[0][family]["logits"], strict=True):
                assert torch.equal(got, expected)
        assert rank["texts"] == ranks[0]["texts"]


@pytest.mark.parametrize("what", ["greedy", "seeded", "speculated"])
def test_generated_tokens(ranks, alone, what):
    assert ranks[0]["texts"][what] == alone["texts"][what]


def test_a_rank_reads_its_share(ranks, alone):
    total = alone["loads"]["bytes"]
    assert alone["loads"]["read"] == total
    names = set(alone["loads"]["loaded"])
    for rank in ranks:
        loads = rank["loads"]
        others = loads["ignored"].pop(OTHER_RANK)
        assert loads["ignored"] == alone["loads"]["ignored"]
        assert set(loads["loaded"]) | set(others) == names
        assert not set(loads["loaded"]) & set(others)
        assert loads["read"] == loads["bytes"] < 0.75 * total
        experts = [name for name in names if ".experts." in name]
        assert len(others) == len(experts) * (len(ranks) - 1) // len(ranks)
    kept = [name for rank in ranks for name in rank["loads"]["loaded"] if ".experts." in name]
    assert sorted(kept) == sorted(name for name in names if ".experts." in name)


@pytest.mark.parametrize("world", tiered([2, 4], [2]))
def test_data_parallel_attention(world, checkpoint, tmp_path):
    single = Parallel.single()
    ranks = run_ranks(world, "dp", checkpoint, tmp_path)
    everyone = cases.LLM(checkpoint, parallel=single, **cases.LIMITS)
    texts = cases.prompts(everyone.runner.config, range(20, 20 + 13 * world, 13))
    params = cases.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    expected = [list(done.token_ids) for done in everyone.generate(texts, params)]
    for number, rank in enumerate(ranks):
        assert rank["own"]["texts"] == [expected[:number], expected[number:][:2]] * 2
        assert rank["own"]["steps"] == ranks[0]["own"]["steps"] != []
        assert not rank["own"]["mtp"]
    (got,) = ranks[1]["own"]["scored"]
    assert_close(got, everyone.runner.score(texts[:1])[0], TOLERANCE)
