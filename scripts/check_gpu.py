"""Attention on a GPU against float32 torch: FlashMLA's kernels on hostile inputs, and whole layers through the caches.

    python scripts/check_gpu.py --out h200_attention_check.json

The last line of stdout is the summary as JSON; the exit status is 1 if anything is outside its limit. Every case draws
random data, fills what nothing may read with NaN, and compares with float32 torch on the same cached bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_checks import Report, relative
from gpu_checks_flashmla import check_decode, check_prefill, check_v32
from torch import Tensor

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import PRESETS
from deepseek_attn.config.options import pick_device
from deepseek_attn.impls import flash_mla, get_impl
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.workspace import Workspace

LAYER_LIMIT = 6e-3  # output of a whole layer with plain bf16 linears, the attention impl exchanged
# The same with FP8 linears: attention that differs by 2e-3 falls on other sides of e4m3's steps (9 % wide) for 3 % of
# the values, twice: sqrt(2 * 0.03) * 0.09.
FP8_LAYER_LIMIT = 3e-2
PLAIN_LINEARS = replace(PRESETS["exact"], kv_record="fp8_ds_mla", index_record="fp8")


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


def check_layers(
    report: Report, section: str, config: ModelConfig, layers: list[int], numerics, device, backend, runs: dict, **sizes
) -> None:
    started = time.time()
    torch.manual_seed(0)
    options = {"max_num_seqs": len(runs["prefill"]), "max_rollback": 4} | sizes
    options |= {"device": device, "dtype": "bfloat16", "numerics": numerics, "backend": backend}
    runner = ModelRunner.from_config(config, layers=layers, attention_only=True, **options)
    impl = attention_layers(runner.model)[0].impl
    limit = FP8_LAYER_LIMIT if runner.numerics.fp8_activations else LAYER_LIMIT
    print(f"{section}: {impl.name}, {len(layers)} layers loaded in {time.time() - started:.0f} s", flush=True)
    for step, (name, rows) in enumerate(layer_runs(runner, **runs)):
        errors, whole = both_impls(runner, rows, impl, 100 * step)
        for layer, error, difference in zip(attention_layers(runner.model), errors, whole, strict=True):
            label = f"{layer.spec.kind} {layer.num_heads} heads, {name}"
            report.add(section, label, error)
            report.add(section, label + ", whole layer", difference, limit)


def check_models(report: Report, device, backend, quick: bool) -> None:
    tiny = ModelConfig.from_preset("tiny_gpu")
    runs = {"contexts": [], "prefill": [700, 129, 2, 300] if not quick else [30, 9], "decodes": 3}
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": 1200}
    for heads in (8, 64, 128) if not quick else (8,):
        config = tiny.replace(
            num_attention_heads=heads, num_hidden_layers=5, compress_ratios=[0, 4, 128, 16, 4, 0], index_topk=64
        )
        check_layers(report, "tiny_gpu", config, [0, 1, 2, 3], PLAIN_LINEARS, device, backend, runs, **sizes)
    check_model(report, tiny, device, backend, quick)
    if quick:
        return
    runs = {"contexts": [131_000, 1_048_300], "prefill": [600, 250], "decodes": 1}
    sizes = {"max_model_len": 1 << 20, "max_num_batched_tokens": 1024}
    for preset, layers in (("v4_flash", [0, 2, 3]), ("v4_pro", [0, 2])):
        check_layers(report, preset, ModelConfig.from_preset(preset), layers, "serving", device, backend, runs, **sizes)


def check_model(report: Report, config: ModelConfig, device, backend, quick: bool) -> None:
    """A whole model with its MTP layer, prompts in chunks; beside each attention call, the reference."""
    options = {"max_model_len": 4096, "max_num_batched_tokens": 600, "device": device, "dtype": "bfloat16"}
    runner = ModelRunner.from_config(config, numerics="serving", backend=backend, **options)
    layers = attention_layers(runner.model)
    beside = Beside(layers[0].impl)
    for layer in layers:
        layer.impl = beside
    lengths, chunk = ((40, 3), 17) if quick else ((900, 130, 1, 517), 129)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    logits, drafts = runner.score_mtp(prompts, chunk)
    report.add(
        "model", f"tiny_gpu with MTP, chunks of {chunk}: worst of {len(beside.errors)} calls", max(beside.errors)
    )
    report.add("model", "logits are finite", float(not all(bool(x.isfinite().all()) for x in logits + drafts)), 0.0)


def machine(device) -> dict:
    found = flash_mla.flavour()
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device)
    return {"device": name, "torch": torch.__version__, "flash_mla": f"{found.name} {found.version}"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file for all results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="flashmla", help="the impl that whole layers run (default: flashmla)")
    parser.add_argument(
        "--skip", action="append", default=[], choices=("kernels", "layers"), help="a part to leave out; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="a few small cases of each kind")
    options = parser.parse_args(arguments)
    try:
        get_impl(options.backend, pick_device(options.device))
    except ValueError as error:
        parser.error(str(error))
    report, started = Report(), time.time()
    torch.manual_seed(0)
    if "kernels" not in options.skip:
        check_decode(report, options.device, options.quick)
        check_prefill(report, options.device, options.quick)
        check_v32(report, options.device, options.quick)
    if "layers" not in options.skip:
        check_models(report, options.device, options.backend, options.quick)
    summary = machine(options.device) | report.summary() | {"seconds": round(time.time() - started, 1)}
    if options.out:
        command = " ".join(["python scripts/check_gpu.py", *(arguments or sys.argv[1:])]).replace(options.out, "FILE")
        with open(options.out, "w") as file:
            rows = ",\n".join("  " + json.dumps(case) for case in report.cases)
            file.write(
                f'{{"command": {json.dumps(command)},\n"summary": {json.dumps(summary)},\n"cases": [\n{rows}\n]}}\n'
            )
    print(json.dumps(summary))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
