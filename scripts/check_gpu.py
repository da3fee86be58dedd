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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepseek_attn import flash_mla
from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.config import ModelConfig
from deepseek_attn.impls import get_impl
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.kernels.reference.sparse_attention import sparse_attention, sparse_attention_paged
from deepseek_attn.models.block import attention_layers
from deepseek_attn.numerics import PRESETS
from deepseek_attn.runner import ModelRunner
from deepseek_attn.workspace import Workspace

LIMIT = 4e-3  # relative to float32; the kernels round weights and output to bf16
LSE_LIMIT = 1e-4
LAYER_LIMIT = 6e-3  # output of a whole layer with plain bf16 linears, the attention impl exchanged
# The same with FP8 linears: attention that differs by 2e-3 falls on other sides of e4m3's steps (9 % wide) for 3 % of
# the values, twice: sqrt(2 * 0.03) * 0.09.
FP8_LAYER_LIMIT = 3e-2
PLAIN_LINEARS = replace(PRESETS["exact"], kv_record="fp8_ds_mla", index_record="fp8")
RECORD = Fp8DsMlaRecord(448, 64)
INF = float("inf")


@dataclass
class Report:
    """Results, printed as they come."""

    cases: list[dict] = field(default_factory=list)

    def add(self, section: str, case: str, error: float, limit: float = LIMIT) -> None:
        passed = error <= limit  # False for NaN
        self.cases.append({"section": section, "case": case, "error": error, "limit": limit, "passed": passed})
        print(f"{section:8} {case:58} {error:9.2e} {'' if passed else 'FAILED'}", flush=True)

    def compare(self, section: str, case: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        self.add(section, case, relative(got[0], expected[0]))
        finite = expected[1].isfinite()
        same = bool((got[1].isfinite() == finite).all())
        worst = (got[1] - expected[1])[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        self.add(section, case + " lse", float(worst) if same else INF, LSE_LIMIT)

    def summary(self) -> dict:
        worst: dict[str, float] = {}
        for case in self.cases:
            if case["limit"] == LIMIT:
                worst[case["section"]] = max(worst.get(case["section"], 0.0), case["error"])
        failed = [f"{c['section']}: {c['case']}" for c in self.cases if not c["passed"]]
        return {"cases": len(self.cases), "failed": failed, "worst_relative_error": worst}


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


# --- the decode kernel over 584-byte pages written by the torch record ---


def make_pages(T: int, K: int, n: int, pages: int, device, stride: int = 1, lens: bool = True) -> flash_mla.Pages:
    """A NaN pool with about 2T + 600 live slots, the very last among them; index rows have holes and, past their
    length, a slot of NaN. Row 0 sees nothing."""
    size, dead = RECORD.page_bytes(n), pages * n // 2
    pool = torch.full((pages, size * stride), 0xFF, dtype=torch.uint8, device=device)[:, :size]
    live = torch.randint(pages * n, (2 * T + 600,), device=device)
    live[0] = pages * n - 1
    live = live[live != dead].unique()
    RECORD.insert(pool, n, live, torch.randn(len(live), 512, device=device) * 2)
    indices = live[torch.randint(len(live), (T, K), device=device)].int()
    indices[:, -1:] = live[-1].int()
    indices[:, 2::5] = -1
    counts = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
    counts[0], counts[-1] = 0, K
    if not lens:
        indices[0] = -1
        return flash_mla.Pages(pool, n, indices, None)
    past = torch.arange(K, device=device) >= counts[:, None]
    return flash_mla.Pages(pool, n, indices.masked_fill(past, dead), counts)


def paged_reference(q: Tensor, pages: list[flash_mla.Pages], scale: float, sink: Tensor | None):
    pools = [(RECORD, page.pool, page.entries, page.indices, page.lens) for page in pages]
    return sparse_attention_paged(q.float(), pools, scale, sink)


def check_decode(report: Report, device, quick: bool) -> None:
    scale = 512**-0.5
    cases: list[tuple[str, int, int, list[tuple]]] = []
    window = (128, 64, 99)
    for heads in (1, 8, 16, 32, 64, 100, 128):
        cases.append((f"window, {heads} heads", heads, 9, [window]))
    for heads in (8, 64, 128):
        for K in (1, 7, 64, 100, 192, 512, 513, 1024):
            cases.append((f"window + {K} entries, {heads} heads", heads, 9, [window, (K, 64, 301)]))
    cases += [
        ("window + 8192 entries in pages of 32, 128 heads", 128, 4, [window, (8192, 32, 999)]),
        ("window + 8192 entries in pages of 32, 64 heads", 64, 4, [window, (8192, 32, 999)]),
        ("window + entries in pages of 2, 64 heads", 64, 5, [window, (192, 2, 2999)]),
        ("window + entries in pages of 1, 16 heads", 16, 5, [window, (192, 1, 4999)]),
        ("pools of strided pages, 64 heads", 64, 9, [(*window, 3), (512, 64, 301, 5)]),
        ("257 queries, 64 heads", 64, 257, [window, (512, 64, 301)]),
        ("no lengths, 64 heads", 64, 9, [(*window, 1, False), (512, 64, 301, 1, False)]),
    ]
    big = 999 if quick else 61_000
    name = f"pools of {big} pages ({big * 37440 / 2**30:.1f} GiB), 64 heads"
    cases.append((name, 64, 9, [(128, 64, big), (512, 64, big)]))
    for name, heads, T, pools in cases[:: 7 if quick else 1]:
        pages = [make_pages(T, *pool[:3], device, *pool[3:]) for pool in pools]
        q, sink = torch.randn(T, heads, 512, device=device).bfloat16(), torch.randn(heads, device=device) * 2
        out = torch.full((T, heads, 512), float("nan"), device=device).bfloat16()
        got = flash_mla.sparse_decode(q, pages, scale, sink, out=out)
        report.compare("decode", name, got, paged_reference(q, pages, scale, sink))
        report.add("decode", name + " lonely row", float(got[0][0].float().abs().max()), 0.0)
        del pages
    check_decode_contracts(report, device, scale)


def check_decode_contracts(report: Report, device, scale: float) -> None:
    pages = [make_pages(33, 128, 64, 99, device), make_pages(33, 512, 64, 301, device)]
    q, sink = torch.randn(33, 64, 512, device=device).bfloat16(), torch.randn(64, device=device)
    sink[:3] = torch.tensor([INF, -INF, 50.0])
    schedule = flash_mla.new_schedule()
    first, lse = flash_mla.sparse_decode(q, pages, scale, sink, schedule)
    report.compare("decode", "sinks +inf, -inf, 50", (first, lse), paged_reference(q, pages, scale, sink))
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, scale, sink, schedule)[0]) for _ in range(50))
    report.add("decode", "50 launches on one plan are bit-identical", float(not same), 0.0)
    same = all(torch.equal(first, flash_mla.sparse_decode(q, pages, scale, sink)[0]) for _ in range(10))
    report.add("decode", "fresh plans are bit-identical", float(not same), 0.0)
    # rows of three queries share a length, so their indices must name live slots all along
    pages = [flash_mla.Pages(p.pool, p.entries, live_indices(p), p.lens[::3].repeat_interleave(3)) for p in pages]
    rows = [flash_mla.Pages(p.pool, p.entries, p.indices.view(11, 3, -1), p.lens[::3].contiguous()) for p in pages]
    got = [x.flatten(0, 1) for x in flash_mla.sparse_decode(q.view(11, 3, 64, 512), rows, scale, sink)]
    report.compare("decode", "3 queries per row", got, paged_reference(q, pages, scale, sink))
    if torch.device(device).type == "cuda":
        check_graph(report, q, pages, scale, sink)


def live_indices(page: flash_mla.Pages) -> Tensor:
    """New indices in the shape of the old ones. The last row's length is its width, so all it names is live or -1."""
    row = page.indices[-1]
    return row[torch.randint(len(row), page.indices.shape, device=row.device)]


def check_graph(report: Report, q: Tensor, pages: list[flash_mla.Pages], scale: float, sink: Tensor) -> None:
    """Capture with a new plan, replay with other lengths, indices and queries."""
    flash_mla.sparse_decode(q, pages, scale, sink)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_mla.sparse_decode(q, pages, scale, sink, flash_mla.new_schedule())
    for round_ in range(3):
        for page in pages:
            page.lens.copy_(torch.randint(0, page.indices.shape[1] + 1, page.lens.shape, device=q.device))
            page.lens[round_] = 0
            page.indices.copy_(live_indices(page))
        q.normal_()
        graph.replay()
        report.compare("decode", f"graph replay {round_}", got, paged_reference(q, pages, scale, sink))


# --- the prefill kernel over a bf16 workspace, and V3.2's 656-byte pages ---


def check_prefill(report: Report, device, quick: bool) -> None:
    for dim, section in ((512, "prefill"), (576, "v32")):
        for heads in (8, 64, 128) if not quick else (8,):
            for K in (1, 7, 64, 100, 128, 192, 513, 640, 1152, 8320) if not quick else (7,):
                T = 65 if K > 2000 else 213
                q, kv = (
                    torch.randn(T, heads, dim, device=device).bfloat16(),
                    torch.randn(9001, dim, device=device).bfloat16(),
                )
                kv[1::2] = float("nan")
                indices = torch.randint(4500, (T, K), device=device, dtype=torch.int32) * 2
                indices[:, 2::5] = torch.where(indices[:, 2::5] % 4 == 0, -1, 9001)
                lens = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
                lens[0] = 0
                junk = torch.where(torch.arange(K, device=device) >= lens[:, None], 1, indices).int()
                sink = torch.randn(heads, device=device) if dim == 512 else None
                got = flash_mla.sparse_prefill(q, kv, junk, dim**-0.5, sink, lens)
                expected = sparse_attention(q.float(), kv, indices, dim**-0.5, sink, lens, 512)
                report.compare(section, f"sparse_fwd d {dim}, {K} keys, {heads} heads", got, expected)


def v32_pool(pages: int, n: int, live: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """656-byte entries at ``live`` (512 e4m3, 4 float32 scales, 64 bf16), NaN elsewhere; and the keys read from them.

    The kernel multiplies in bf16: it rounds a scale that is no power of two, and the product, to bf16.
    """
    device = live.device
    latent, rope = torch.randn(len(live), 4, 128, device=device), torch.randn(len(live), 64, device=device).bfloat16()
    scales = latent.abs().amax(2) / 448
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if pow2 else scales
    values = (latent / scales[..., None]).to(torch.float8_e4m3fn)
    read = (values.float() * scales.bfloat16().float()[..., None]).bfloat16().float()
    keys = torch.full((pages * n, 576), float("nan"), device=device)
    keys[live] = torch.cat([read.flatten(1), rope.float()], 1)
    pool = torch.full((pages * n, 656), 0xFF, dtype=torch.uint8, device=device)
    pool[live] = torch.cat([values.flatten(1).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], 1)
    return pool.view(pages, n * 656), keys


def check_v32(report: Report, device, quick: bool) -> None:
    live = torch.randperm(199 * 64, device=device)[:5000]
    shapes = ((16, 100, 5), (64, 64, 9), (128, 2048, 33), (128, 1, 3))[: 1 if quick else None]
    for pow2, (heads, K, T) in [(pow2, shape) for pow2 in (True, False) for shape in shapes]:
        pool, keys = v32_pool(199, 64, live, pow2)
        q = torch.randn(T, heads, 576, device=device).bfloat16()
        indices = live[torch.randint(len(live), (T, K), device=device)].int()
        lens = torch.randint(0, K + 1, (T,), device=device, dtype=torch.int32)
        lens[0] = 0
        expected = sparse_attention(q.float(), keys, indices, 0.1352, None, lens, 512)
        got = flash_mla.sparse_decode(q, [flash_mla.Pages(pool, 64, indices, lens)], 0.1352)
        name = f"656 B pages, {'power-of-two' if pow2 else 'raw'} scales, {K} keys, {heads} heads"
        report.compare("v32", name, got, expected)
        masked = torch.where(torch.arange(K, device=device) < lens[:, None], indices, -1)
        got = flash_mla.sparse_decode(q[None], [flash_mla.Pages(pool, 64, masked[None])], 0.1352)
        report.compare("v32", name + ", one row", [x[0] for x in got], expected)


# --- whole layers through their caches ---


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
    def forward_mqa(layer, q, kv, positions, output) -> None:
        heads = output[:, : layer.num_heads].clone()
        workspace, layer.workspace = layer.workspace, Workspace(q.device)
        DeepseekV4ReferenceSparseImpl.forward_mqa(layer, q[:, : layer.num_heads], kv, positions, heads)
        layer.workspace = workspace
        output[:, : layer.num_heads] = heads


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
    parser.add_argument("--skip", action="append", default=[], help="kernels, layers; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few small cases of each kind")
    options = parser.parse_args(arguments)
    get_impl(options.backend, options.device)
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
