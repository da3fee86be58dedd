"""Whole V4 layers on a GPU, through hostile caches, with each impl: every query against float32 torch.

Beside the output of a layer: attention alone, the keys that the layer writes, and the entries that it selects.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from tests.gpu.conftest import on_backends
from tests.gpu.drive import (
    NAN_BYTE,
    PLAIN_LINEARS,
    SHORT,
    SHORT_FAR,
    Drive,
    Layers,
    Limits,
    Step,
    Watched,
    decodes,
    run_layers,
)
from tests.support.oracle_layer import Tokens, V4LayerOracle
from tests.support.report import Report
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import required, untyped

BACKENDS = ("flashmla", "triton", "mixed")
PLAIN = Limits(layer=1e-2)  # each linear, norm and rotation rounds to bf16
SERVING = Limits(layer=1e-1, keys=6e-2, selected=1e-1)  # the inputs of five linears are rounded to e4m3: 2.7e-2 each
TINY = ModelConfig.from_preset("tiny_gpu")


STEPS = [
    Step("prefill 700, 129, 2, 300", [700, 129, 2, 300]),
    Step("mixed", [1, 1, 1, 700]),
    decodes(1, 1, 1, 1),
    decodes(2, 2, 2, 2),
    decodes(3, 3, 3, 3),
    decodes(4, 4, 4, 4),
    decodes(3, 1, 4, 2),
    Step("drafts of 4 1 3 beside a prompt", [4, 1, 3, 150], threshold=4),
    Step("decode with padding", [1, 3, 2, 1], threshold=4, padding=(1, 4)),
    Step("padding beside a prompt", [1, 2, 2, 90], threshold=4, padding=(3,)),
]
FAR = [decodes(1, 1, 1, 1), decodes(4, 4, 4, 4), Step("mixed", [2, 1, 200, 3], threshold=3)]


def tiny(heads: int, topk: int = 64, **options) -> Layers:
    ratios = [0, 4, 128, 16, 4, 0]
    config = TINY.replace(num_attention_heads=heads, num_hidden_layers=5, compress_ratios=ratios, index_topk=topk)
    options = {"steps": STEPS, "far": {9001: FAR}, "numerics": PLAIN_LINEARS, "limits": PLAIN} | options
    return Layers("tiny_gpu", config, **{"layers": [0, 1, 2, 3], "max_model_len": 16_384} | options)


def published(preset: str, layers: list[int]) -> Layers:
    steps = [Step("prefill 600, 250", [600, 250]), Step("mixed", [1, 600]), decodes(1, 1), decodes(4, 2)]
    far = [decodes(1, 1), decodes(4, 4), Step("mixed", [1, 200])]
    sizes = {"max_model_len": 1 << 20, "max_num_batched_tokens": 1024, "source": RepeatingSource}
    limits = {"numerics": "serving", "limits": SERVING}
    config = ModelConfig.from_preset(preset)
    return Layers(preset, config, layers, steps, far={131_000: far, 1_048_300: far}, **limits, **sizes)


LAYERS = {f"tiny, {heads} heads, top-{k}": tiny(heads, k) for heads, k in ((8, 77), (32, 1), (64, 64), (128, 501))}
HUGE = {"layers": [1], "spread": 2200 << 20}  # C4A has a pool of each kind
LAYERS |= {f"pools of 2.2 GiB, {heads} heads": tiny(heads, 63, **HUGE) for heads in (8, 64, 128)}
LAYERS |= {"v4_flash": published("v4_flash", [0, 2, 3]), "v4_pro": published("v4_pro", [0, 2])}
SMALL = {
    "short": tiny(8, 7, steps=SHORT, far=SHORT_FAR, spread=1 << 20),
    "short serving": tiny(
        8, 7, steps=SHORT[:3], far={}, layers=[1], numerics="serving", limits=SERVING, source=RepeatingSource
    ),
}


@pytest.mark.gpu_memory(11)
@pytest.mark.parametrize(("backend", "name"), on_backends(BACKENDS, LAYERS, ["short serving"], ["short"]))
def test_layers(report, machine, backend, name, monkeypatch):
    run_layers((LAYERS | SMALL)[name], name, backend, machine, report, monkeypatch)
    assert not report.failed


# one thing wrong at a time: each must be found


@exhaustive_on_cpu
def test_mistakes_are_found(device, monkeypatch):
    """The oracle with one mistake finds the same in a right layer: one key, one entry, or positions."""

    drive = Drive.of(replace(SMALL["short"], layers=[1]), "wrong", "reference", device, Report())

    def found(**mistakes) -> set[str]:
        torch.manual_seed(0)
        drive.report = report = Report()
        drive.start(2)
        for name, mistake in mistakes.items():
            monkeypatch.setattr(V4LayerOracle, name, mistake)
        for step in (Step("prefill", [131, 9]), Step("mixed", [1, 20])):
            drive.step(step)
        monkeypatch.undo()
        return {case.section.split()[-1] for case in report if not case.passed}

    keys, rotate = V4LayerOracle.keys, V4LayerOracle.rotate

    def one_window_early(self, tokens, selected):
        """Of the last token alone; with 128 keys, one differs."""
        positions = tokens.positions.clone()
        positions[-1] -= 1
        return [keys(self, tokens._replace(positions=positions), selected)[0], *keys(self, tokens, selected)[1:]]

    def other_entry(self, tokens, selected):
        window, *entries = keys(self, tokens, selected)
        if self.spec.has_indexer:
            last = entries[0].slots[tokens.positions.argmax()]
            last[0] = last[1]  # twice, in place of another
        return [window, *entries]

    def later(self, x, positions, inverse=False):
        return rotate(self, x, positions + 1, inverse)

    assert found() == set()
    assert found(keys=one_window_early) == {"reference", "layer"}
    assert found(keys=other_entry) == {"reference", "layer"}
    assert "written" in found(rotate=later)


def test_poison_is_read_where_nothing_was_written(device):
    """A window whose last page was lost is NaN, and NaN fails."""
    report = Report()
    drive = Drive.of(replace(SMALL["short"], layers=[0]), "lost", "reference", device, report)
    drive.start(3, 300)
    required(drive.runner.pools.get("layers.0", "window")).tensor[drive.caches[0].tables["window"][-1]] = NAN_BYTE
    drive.step(Step("decode", [1, 1, 1]))
    assert {case.case.split(",")[1] for case in report if not case.passed} == {" SWA"}


# the whole model


ONE = TINY.replace(num_hidden_layers=1, num_hash_layers=0, compress_ratios=[4, 0])
PROMPTS = {"whole": (TINY, (900, 130, 1, 517), 129), "one layer": (ONE, (40, 3), 17)}


class InModel(Watched):
    """A `Watched` impl in a running model: the tokens are those of the step's metadata; ``errors`` of all calls."""

    errors: list[float]

    def attend(self, layer, queries, kv: Tensor, positions: Tensor) -> Tensor:
        step = layer.step
        tables = {group: table.long() for group, table in step.block_tables.items()}
        self.tokens = Tokens(positions, step.token_to_req_indices.long(), step.is_valid_token, tables)
        out = super().attend(layer, queries, kv, positions)
        self.errors.append(self.error)
        return out


@pytest.mark.parametrize(("backend", "name"), on_backends(BACKENDS, ["whole"], [], ["one layer"]))
def test_a_model_with_its_mtp_layer(report, machine, backend, name):
    """Prompts in chunks; each attention call of the backbone against float32 torch."""
    config, lengths, chunk = PROMPTS[name]
    source, errors = RandomSource(config, 0), []
    runner = ModelRunner.from_source(
        config, source, numerics="serving", backend=backend, max_model_len=4096, max_num_batched_tokens=600,
        device=machine, dtype="bfloat16", progress=False,
    )  # fmt: skip
    for index, block in runner.model.layers.items():
        watched = InModel(block.attn.impl, V4LayerOracle(runner, int(index), source), untyped(None))
        watched.errors, block.attn.impl = errors, watched
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    logits, drafts = runner.score_mtp(prompts, chunk)
    assert len(errors) >= len(runner.model.layers) * -(-max(lengths) // chunk)
    report.add(f"model {backend}", f"tiny_gpu with MTP, chunks of {chunk}: worst of {len(errors)} calls", max(errors))
    assert not report.failed
    assert all(bool(x.isfinite().all()) for x in logits + drafts)
