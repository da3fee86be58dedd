"""Whole V4 layers on a GPU, through their caches: attention against the reference impl in float32 on the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import PRESETS, Numerics
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.workspace import Workspace
from tests.gpu.report import on_cpu_too, relative

LAYER_LIMIT = 6e-3  # output of a whole layer with plain bf16 linears, the attention impl exchanged
# The same with FP8 linears: attention that differs by 2e-3 falls on other sides of e4m3's steps (9 % wide) for 3 % of
# the values, twice: sqrt(2 * 0.03) * 0.09.
FP8_LAYER_LIMIT = 3e-2
PLAIN_LINEARS = replace(PRESETS["exact"], kv_record="fp8_ds_mla", index_record="fp8")
TINY = ModelConfig.from_preset("tiny_gpu")


class Beside:
    """An impl that also runs the reference, in float32, on the same queries and caches."""

    def __init__(self, impl: type):
        self.impl, self.errors = impl, []

    def forward_mqa(self, layer, q, kv, positions) -> Tensor:
        output = self.impl.forward_mqa(layer, q, kv, positions, torch.full_like(q, float("nan")))
        own = self.impl.forward_mqa(layer, q, kv, positions)
        if not torch.equal(own, output):
            raise AssertionError(f"{self.impl.name}: the result depends on where it is written")
        expected = torch.full_like(output, float("nan"), dtype=torch.float32)
        Reference.forward_mqa(layer, q.float(), kv, positions, expected)
        self.errors.append(relative(output[:, : layer.num_heads], expected[:, : layer.num_heads]))
        return own


class Reference:
    """The reference impl, given queries with padding heads, and scratch of its own."""

    @staticmethod
    def forward_mqa(layer, q, kv, positions, output=None) -> Tensor:
        output = torch.full_like(q, float("nan")) if output is None else output
        workspace, layer.workspace = layer.workspace, Workspace(q.device)
        heads = slice(layer.num_heads)
        output[:, heads] = DeepseekV4ReferenceSparseImpl.forward_mqa(layer, q[:, heads], kv, positions)
        layer.workspace = workspace
        return output


@torch.no_grad()
def run_step(runner: ModelRunner, rows: list[tuple], impl, seed: int) -> list[Tensor]:
    """Every layer on random hidden states of one step; the caches advance."""
    runner.manager.reserve([(sequence.cache, n) for sequence, n in rows])
    meta = runner.step_metadata([sequence.cache for sequence, _ in rows], [n for _, n in rows])
    outputs = []
    for index, layer in enumerate(attention_layers(runner.model)):
        torch.manual_seed(seed + index)
        x = torch.randn(len(meta.positions), runner.config.hidden_size, device=runner.device).to(runner.dtype)
        layer.impl = impl
        outputs.append(layer(x, meta.positions, meta))
    return outputs


def both_impls(runner: ModelRunner, rows: list[tuple], impl, seed: int) -> tuple[list[float], list[float]]:
    """Attention errors and whole-layer differences per layer, for one step from the same caches."""
    before = [pool.tensor.clone() for pool in runner.pools]
    beside = Beside(impl)
    got = run_step(runner, rows, beside, seed)
    for pool, content in zip(runner.pools, before, strict=True):
        pool.tensor.copy_(content)
    expected = run_step(runner, rows, Reference, seed)
    for sequence, n in rows:
        runner.manager.commit(sequence.cache, n)
    return beside.errors, [relative(a, b) for a, b in zip(got, expected, strict=True)]


def teleport(runner: ModelRunner, sequences: list, length: int) -> None:
    """Makes the caches look as if ``length`` tokens were computed: pages handed out, every pool filled at random."""
    chunk = runner.layout.max_num_batched_tokens // 2
    for sequence in sequences:
        while sequence.cache.num_tokens < length:
            n = min(chunk, length - sequence.cache.num_tokens)
            runner.manager.reserve([(sequence.cache, n)])
            runner.manager.commit(sequence.cache, n)
    for pool in runner.pools:
        if pool.record is None:
            pool.tensor.normal_()
            continue
        slots = torch.arange(pool.tensor.shape[0] * pool.entries, device=runner.device)
        for part in slots.split(1 << 17):
            pool.insert(part, torch.randn(len(part), pool.record.dim, device=runner.device))


def layer_runs(
    runner: ModelRunner, contexts: list[int], prefill: list[int], decodes: int
) -> Iterator[tuple[str, list]]:
    """(name, rows) of the steps to run: ragged prefill, a mixed step, decodes; then the same at long contexts."""
    sequences = [runner.sequence([0]) for _ in prefill]
    yield f"prefill {prefill}", list(zip(sequences, prefill, strict=True))
    yield "mixed", [(s, n) for s, n in zip(sequences, [1] * (len(prefill) - 1) + [prefill[0]], strict=True)]
    for _ in range(decodes):
        yield "decode", [(s, 1) for s in sequences]
    for context in contexts:
        teleport(runner, sequences, context)
        yield f"decode at {context}", [(s, 1) for s in sequences]
        yield f"mixed at {context}", [(s, n) for s, n in zip(sequences, [1] * (len(prefill) - 1) + [200], strict=True)]


@dataclass(frozen=True)
class Layers:
    """Layers of a model, and the steps that they run.

    Attributes:
        prefill: new tokens per request of a first step; contexts: lengths after which steps run once more.
    """

    section: str
    config: ModelConfig
    layers: list[int]
    numerics: str | Numerics
    prefill: list[int]
    contexts: list[int] = field(default_factory=list)
    decodes: int = 1
    max_model_len: int = 4096
    max_num_batched_tokens: int = 1200


def tiny(heads: int, **changes) -> Layers:
    ratios = [0, 4, 128, 16, 4, 0]
    config = TINY.replace(num_attention_heads=heads, num_hidden_layers=5, compress_ratios=ratios, index_topk=64)
    steps = {"prefill": [700, 129, 2, 300], "decodes": 3} | changes
    return Layers("tiny_gpu", config, [0, 1, 2, 3], PLAIN_LINEARS, **steps)


def published(preset: str, layers: list[int]) -> Layers:
    sizes = {"max_model_len": 1 << 20, "max_num_batched_tokens": 1024}
    config = ModelConfig.from_preset(preset)
    return Layers(preset, config, layers, "serving", [600, 250], [131_000, 1_048_300], **sizes)


LAYERS = {f"tiny, {heads} heads": tiny(heads) for heads in (8, 64, 128)}
LAYERS |= {"v4_flash": published("v4_flash", [0, 2, 3]), "v4_pro": published("v4_pro", [0, 2])}
LAYERS["short"] = tiny(8, prefill=[30, 9], decodes=1)


@pytest.mark.parametrize("name", on_cpu_too(LAYERS, ["short"]))
def test_layers(report, checked, name):
    case = LAYERS[name]
    runner = ModelRunner.from_config(
        case.config, layers=case.layers, attention_only=True, device=checked, dtype="bfloat16", numerics=case.numerics,
        backend=backend(checked), max_num_seqs=len(case.prefill), max_rollback=4, max_model_len=case.max_model_len,
        max_num_batched_tokens=case.max_num_batched_tokens,
    )  # fmt: skip
    layers = attention_layers(runner.model)
    impl = layers[0].impl
    limit = FP8_LAYER_LIMIT if runner.numerics.fp8_activations else LAYER_LIMIT
    for step, (what, rows) in enumerate(layer_runs(runner, case.contexts, case.prefill, case.decodes)):
        errors, whole = both_impls(runner, rows, impl, 100 * step)
        for layer, error, difference in zip(layers, errors, whole, strict=True):
            label = f"{layer.spec.kind} {layer.num_heads} heads, {what}"
            report.add(case.section, label, error)
            report.add(case.section, label + ", whole layer", difference, limit)
    assert not report.failed


def backend(device: torch.device) -> str:
    return "flashmla" if device.type == "cuda" else "reference"


ONE = TINY.replace(num_hidden_layers=1, num_hash_layers=0, compress_ratios=[4, 0])
PROMPTS = [(TINY, (900, 130, 1, 517), 129), (ONE, (40, 3), 17)]


@pytest.mark.parametrize(("config", "lengths", "chunk"), on_cpu_too(PROMPTS, PROMPTS[1:]), ids=["whole", "one layer"])
def test_a_model_with_its_mtp_layer(report, checked, config, lengths, chunk):
    """Prompts in chunks; beside each attention call, the reference."""
    options = {"max_model_len": 4096, "max_num_batched_tokens": 600, "device": checked, "dtype": "bfloat16"}
    runner = ModelRunner.from_config(config, numerics="serving", backend=backend(checked), **options)
    layers = attention_layers(runner.model)
    beside = Beside(layers[0].impl)
    for layer in layers:
        layer.impl = beside
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    logits, drafts = runner.score_mtp(prompts, chunk)
    worst = f"tiny_gpu with MTP, chunks of {chunk}: worst of {len(beside.errors)} calls"
    report.add("model", worst, max(beside.errors))
    assert not report.failed
    assert all(bool(x.isfinite().all()) for x in logits + drafts)
