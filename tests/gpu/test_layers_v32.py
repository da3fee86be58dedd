"""Whole V3.2 layers on a GPU, through hostile caches, with each impl: every query against float32 torch.

Layers have V3.2's heads and random weights. 656-byte entries written on the GPU are compared with those written on
the CPU, byte for byte.
"""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.cache.records_v32 import make_v32_record
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.config.model import ModelConfig
from tests.gpu.conftest import on_backends
from tests.gpu.drive import PLAIN_LINEARS, SHORT, SHORT_FAR, Drive, Layers, Limits, Step, decodes, run_layers
from tests.support.oracle_layer import V32LayerOracle
from tests.support.report import Report

BACKENDS = ("flashmla", "triton", "mixed")
PLAIN = Limits(layer=1.5e-2)  # each linear, norm and rotation rounds to bf16
SERVING = Limits(layer=2e-1, keys=7e-2, selected=1e-1)  # the inputs of linears are rounded to e4m3: 2.7e-2 each
V32 = ModelConfig.from_preset("v32").replace(num_hidden_layers=1, first_k_dense_replace=1)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["raw", "pow2", "official"])
def test_entries_are_the_bytes_of_a_cpu(report, device, rule):
    rows = torch.randn(3000, 576) * torch.logspace(-6, 4, 3000).unsqueeze(1)
    slots = torch.randperm(64 * 64)[:3000]
    record = make_v32_record("fp8_ds_mla", 512, 64, torch.bfloat16, scale_rule=rule)
    pools = []
    for place in (torch.device("cpu"), device):
        pool = record.allocate(64, 64, place).fill_(0xFF)
        record.insert(pool, 64, slots.to(place), rows.to(place))
        pools.append(pool.cpu())
    different = float((pools[0] != pools[1]).sum())
    report.add("v32 layers", f"656-byte entries, {rule} scales: bytes that differ", different, 0.0)
    assert not report.failed


STEPS = [
    Step("prefill 3, 1025, 64, 1", [3, 1025, 64, 1]),
    Step("mixed", [1, 1, 1, 600]),
    decodes(1, 1, 1, 1),
    decodes(2, 2, 2, 2),
    decodes(3, 3, 3, 3),
    decodes(4, 4, 4, 4),
    decodes(3, 1, 4, 2),
    Step("drafts of 4 1 3 beside a prompt", [4, 1, 3, 150], threshold=4),
    Step("decode with padding", [1, 3, 2, 1], threshold=4, padding=(1, 4)),
    Step("padding beside a prompt", [1, 2, 2, 90], threshold=4, padding=(3,)),
]
FAR = [decodes(1, 1, 1, 1), decodes(4, 4, 4, 4), Step("mixed", [1, 63, 700, 2000], threshold=4)]


def layers(heads: int, topk: int = 2048, hidden: int = 2048, **options) -> Layers:
    config = V32.replace(num_attention_heads=heads, index_topk=topk, hidden_size=hidden)
    options = {"numerics": PLAIN_LINEARS, "limits": PLAIN, "far": {1501: FAR, 70_001: FAR}} | options
    sizes = {"max_model_len": 81_920, "max_num_batched_tokens": 4096, "source": RepeatingSource}
    return Layers("v32", config, [0], STEPS, **sizes | options)


SERVED = {"numerics": "serving", "limits": SERVING}
CASES = {f"{heads} heads, top-{k}": layers(heads, k) for heads, k in ((8, 333), (16, 2048), (64, 2047), (128, 2048))}
CASES |= {f"{heads} heads, bf16 cache": layers(heads, numerics="exact") for heads in (16, 128)}
CASES |= {f"{heads} heads, pools of 2.2 GiB": layers(heads, 777, spread=2200 << 20) for heads in (16, 128)}
CASES |= {"as served": layers(128, hidden=7168, **SERVED)}


def short(**options) -> Layers:
    config = ModelConfig.from_preset("tiny_v32").replace(num_hidden_layers=1, first_k_dense_replace=1, index_topk=13)
    options = {"numerics": PLAIN_LINEARS, "limits": PLAIN} | options
    return Layers("v32", config, [0], SHORT, max_model_len=2048, far=SHORT_FAR, **options)


SMALL = {
    "short": short(spread=1 << 20),
    "short, bf16 cache": short(numerics="exact"),
    "short serving": short(source=RepeatingSource, **SERVED),
}


@pytest.mark.gpu_memory(11)
@pytest.mark.parametrize(("backend", "name"), on_backends(BACKENDS, CASES, SMALL))
def test_layers(report, machine, backend, name, monkeypatch):
    run_layers((CASES | SMALL)[name], name, backend, machine, report, monkeypatch)
    assert not report.failed


def test_mistakes_are_found(device, monkeypatch):
    """The oracle with one mistake finds the same in a right layer: one token of one query, or positions."""

    def found(**mistakes) -> set[str]:
        torch.manual_seed(0)
        report = Report()
        drive = Drive.of(short(), "wrong", "reference", device, report)
        drive.start(3)
        for name, mistake in mistakes.items():
            monkeypatch.setattr(V32LayerOracle, name, mistake)
        for step in SHORT[:3]:
            drive.step(step)
        monkeypatch.undo()
        return {case.section.split()[-1] for case in report if not case.passed}

    call, rotate = V32LayerOracle.__call__, V32LayerOracle.rotate

    def other_token(self, x, tokens, selected):
        selected = selected.clone()
        selected[-1, 0] = (selected[-1, 0] + 1) % tokens.positions[-1]
        return call(self, x, tokens, selected)

    def later(self, x, positions, inverse=False):
        return rotate(self, x, positions + 1, inverse)

    assert found() == set()
    assert found(__call__=other_token) == {"layer"}
    assert "written" in found(rotate=later)
