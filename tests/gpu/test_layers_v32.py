"""V3.2 layers on a GPU: the backend's attention against float32 torch on the same cached bytes and selected indices.

Layers have V3.2's dimensions and random weights. 656-byte entries written on the GPU are compared with those written on
the CPU, byte for byte.
"""

from __future__ import annotations

import copy

import pytest
import torch

from deepseek_attn.bench.layer import fill_caches, past
from deepseek_attn.cache.records_v32 import make_v32_record
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.v32.backends.kernels import get_kernels
from tests.gpu.report import INF, on_cpu_too, relative

CACHES = {"fp8": "serving", "bf16": "exact"}


V32 = ModelConfig.from_preset("v32").replace(num_hidden_layers=1, first_k_dense_replace=1)


@pytest.mark.parametrize("rule", ["raw", "pow2", "official"])
def test_entries_are_the_bytes_of_a_cpu(report, device, rule):
    if device.type == "cpu":
        pytest.skip("both would be written on the CPU")
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


STEPS = {
    "decode of 8": [(None, 1)] * 8,
    "prefill 1, 63, 700, 2000": [(None, 1), (None, 63), (None, 700), (None, 2000)],
    "decode and prefill mixed": [(None, 1), (37, 1), (None, 130), (0, 65), (5, 300)],
    "from nothing": [(0, 3), (0, 1025)],
}  # (computed tokens, None for the context of the case; new tokens)
SHORT = {"decode": [(None, 1)] * 3, "mixed": [(None, 1), (3, 1), (0, 9), (5, 30)]}
CASES = [(cache, heads, context) for cache in CACHES for heads in (16, 64, 128) for context in (1500, 70000)]
SMALL = [(cache, 4, 40) for cache in CACHES]


@pytest.mark.parametrize(("cache", "heads", "context"), on_cpu_too(CASES + SMALL, SMALL))
def test_layers(report, checked, cache, heads, context):
    """Decode, ragged prefill and mixed steps after ``context`` tokens."""
    small = heads == 4
    config = (ModelConfig.from_preset("tiny_v32") if small else V32).replace(num_attention_heads=heads)
    runner = ModelRunner.from_config(
        config, layers=[0], attention_only=True, device=checked, dtype="bfloat16", numerics=CACHES[cache],
        backend="flashmla" if checked.type == "cuda" and not small else "reference",
        max_model_len=256 if small else max(context + 4096, 8192), max_num_seqs=8, max_num_batched_tokens=4096,
    )  # fmt: skip
    fill_caches(runner)
    block = runner.model.layers["0"]
    errors = beside_reference(block.attn.impl, checked)
    for name, requests in (SHORT if small else STEPS).items():
        requests = sorted(requests, key=lambda request: request[1] > 1)
        caches = [past(runner, context if length is None else length) for length, _ in requests]
        lens = [n for _, n in requests]
        runner.manager.reserve(list(zip(caches, lens, strict=True)))
        step = runner.step_metadata(caches, lens)
        x = torch.randn(sum(lens), config.hidden_size, device=checked).to(runner.dtype)
        with torch.no_grad():
            out = block.attend(x, step)
        error = errors.pop() if bool(out.isfinite().all()) else INF
        report.add("v32 layers", f"{cache} cache, {heads} heads, context {context}, {name}", error)
        for item in caches:
            runner.manager.free(item)
    assert not report.failed


def beside_reference(impl, device: torch.device) -> list[float]:
    """Errors of the calls of ``impl`` from now on, against the torch kernels on float32 queries."""
    errors: list[float] = []
    reference, attend = copy.copy(impl), impl.forward_mqa
    reference.kernels = get_kernels("reference", device)

    def both(query, kv_cache, meta, layer):
        out, lse = attend(query, kv_cache, meta, layer)
        expected, _ = reference.forward_mqa(query.float(), kv_cache, meta, layer)
        errors.append(relative(out, expected))
        return out, lse

    impl.forward_mqa = both
    return errors
