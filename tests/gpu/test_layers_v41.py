"""V4.1's layers with official numerics on a GPU: kernels against plain torch on the same steps, through NaN caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.session import LayerSession
from deepseek_attn.testing import poison_caches, relative_error
from tests.support.report import ON_CPU
from tests.support.v41_cases import tiny_for_kernels

CONFIG = tiny_for_kernels()
# new tokens of each sequence; 64 entries are selected, and candidates bind from 80 on
STEPS = [[300, 129, 2], [1, 1, 90], [1, 1, 1], [4, 1, 3], [200, 1, 65], [1, 1, 1]]
LAYER = 1e-1  # of the worst row: a sum in another order moves inputs of linears, keys and entries to other FP8 values
SHARED = 0.95  # least part of the selected entries that are the same


def outputs(
    backend: str, device: torch.device, layers: list[int], steps: list[list[int]]
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """Of each step: the layers' outputs, float32 ``[layers, T, hidden_size]``, and what they selected."""
    runner = ModelRunner.from_source(
        CONFIG, RandomSource(CONFIG, 0), layers=layers, attention_only=True, numerics="official", backend=backend,
        device=device, dtype="bfloat16", max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512, progress=False,
    )  # fmt: skip
    assert {layer.attn.backend_name for layer in runner.model.layers.values()} == {backend}
    poison_caches(runner)
    session = LayerSession(runner)
    sequences = [session.sequence() for _ in steps[0]]
    for step in steps:
        x = torch.randn(len(layers), sum(step), CONFIG.hidden_size).to(device, runner.dtype)
        yield session.run(x, dict(zip(sequences, step, strict=True))).float(), session.selected


@pytest.mark.parametrize("backend", ["triton", pytest.param("reference", marks=ON_CPU)])
def test_official_layers(report, machine, backend):
    layers, steps = list(range(CONFIG.num_hidden_layers)), STEPS
    if machine.type == "cpu":
        layers, steps = [4, 5], [[20, 3], [1, 1]]
    torch.manual_seed(0)
    expected = list(outputs("reference", machine, layers, steps))
    torch.manual_seed(0)
    got = outputs(backend, machine, layers, steps)
    for step, (y, selected), (y_expected, selected_expected) in zip(steps, got, expected, strict=True):
        for i, layer in enumerate(layers):
            same = torch.ones(sum(step), dtype=torch.bool, device=machine)
            if layer in selected:
                chosen, wanted = selected[layer], selected_expected[layer]
                same = (chosen == wanted).all(1)
                both = (chosen.unsqueeze(2) == wanted.unsqueeze(1)) & (chosen >= 0).unsqueeze(2)
                different = 1 - float(both.sum() / (wanted >= 0).sum().clamp(min=1))
                report.add(f"v41 official {backend} selected", f"layer {layer}, {step}", different, 1 - SHARED)
            assert same.any()
            error = relative_error(y[i][same], y_expected[i][same])
            report.add(f"v41 official {backend} layer", f"{CONFIG.layers[layer].kind} {layer}, {step}", error, LAYER)
    assert not report.failed
