"""The memory of a run beside its prediction: what can be tested without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.bench.engine import cut_config
from deepseek_attn.lab.bench.memory import Limits, measure_memory, peak_workload, storage_bytes
from deepseek_attn.runner import ModelRunner
from tests.support.typed import untyped

LIMITS = Limits(70, 3, 33)


@pytest.mark.exhaustive
def test_parts_are_compared(monkeypatch):
    """With counters of another device: a run on a CPU takes nothing of it."""
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, value in (
        ("memory_allocated", 10**9), ("max_memory_allocated", 3 * 10**9), ("max_memory_reserved", 4 * 10**9),
        ("mem_get_info", (2 * 10**9, 7 * 10**9)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    config = cut_config(ModelConfig.from_preset("tiny"), layers=2)
    compared = measure_memory(config, RepeatingSource(config), LIMITS, device="cpu")
    assert compared.predicted.keys() == compared.measured.keys()
    assert compared.predicted["caches"] == compared.measured["caches"] > 0
    row = compared.row()
    assert row["max_num_seqs"] == 3
    assert row["driver"] == sum(compared.measured.values()) == 5 * 10**9
    assert compared.measured["step"] == 2 * 10**9
    assert compared.measured["context"] == 10**9


def test_the_workload_reaches_the_limits():
    config = cut_config(ModelConfig.from_preset("tiny"), layers=1)
    with ModelRunner.from_config(config, device="cpu", **LIMITS._asdict()) as runner:
        lengths, batches, step = [0], [], runner.step

        def noted(batch, options):
            lengths.extend(sequence.num_computed + n for sequence, n in batch)
            batches.append((len(batch), sum(n for _, n in batch)))
            return step(batch, options)

        untyped(runner).step = noted
        assert sum(1 for _ in peak_workload(runner)) == len(batches)
    assert max(lengths) == 69  # the last token is never computed
    assert max(count for count, _ in batches) == 3
    assert max(tokens for _, tokens in batches) == 33


def test_views_share_a_storage():
    whole = torch.zeros(10, dtype=torch.int32)
    assert storage_bytes([whole, whole[3:], torch.zeros(1)]) == 44


def test_wrong_input(capsys, monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.commands.bench_runs.pick_device", lambda _: torch.device("cpu"))
    assert main(["bench", "memory"]) == 2
    assert "this machine has none" in capsys.readouterr().err
    monkeypatch.setattr("deepseek_attn.lab.commands.bench_runs.pick_device", lambda _: torch.device("cuda"))
    assert main(["bench", "memory", "--model", "tiny", "--layers", "3", "--limits", "1:2"]) == 2
    assert "--limits 1:2: write for instance" in capsys.readouterr().err
