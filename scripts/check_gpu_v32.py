"""DeepSeek-V3.2 on a GPU: FlashMLA as the backend of whole layers against float32 torch on the same cached bytes.

    python scripts/check_gpu_v32.py --out h200_v32_check.json

Layers have V3.2's dimensions and random weights. Every step runs the layer once; inside it, the backend's attention and
the plain-torch kernels read the same caches and the same selected indices. 656-byte entries written on the GPU are
compared with those written on the CPU, byte for byte. The last line is one JSON document; exit status 1 if anything is
outside its limit.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
from gpu_checks import LIMIT, relative

from deepseek_attn.bench.layer import fill_caches, past
from deepseek_attn.cache.records_v32 import make_v32_record
from deepseek_attn.cli.info import collect
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.options import pick_device
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.v32.backends.kernels import get_kernels

CACHES = {"fp8": "serving", "bf16": "exact"}


def check_bytes(device: torch.device) -> list[dict]:
    """Entries written on the GPU equal those written on the CPU, for each writer's rule of scales."""
    rows = torch.randn(3000, 576) * torch.logspace(-6, 4, 3000).unsqueeze(1)
    slots = torch.randperm(64 * 64)[:3000]
    cases = []
    for rule in ("raw", "pow2", "official"):
        record = make_v32_record("fp8_ds_mla", 512, 64, torch.bfloat16, scale_rule=rule)
        pools = []
        for place in ("cpu", device):
            pool = record.allocate(64, 64, place).fill_(0xFF)
            record.insert(pool, 64, slots.to(place), rows.to(place))
            pools.append(pool.cpu())
        cases.append(
            {
                "case": f"656-byte entries, {rule} scales: bytes that differ",
                "error": int((pools[0] != pools[1]).sum()),
                "limit": 0,
            }
        )
    return cases


def check_layer(device: torch.device, cache: str, heads: int, context: int, backend: str = "flashmla") -> list[dict]:
    """Prefill in ragged batches, a mixed step and decode, after ``context`` tokens."""
    config = ModelConfig.from_preset("v32").replace(
        num_attention_heads=heads, num_hidden_layers=1, first_k_dense_replace=1
    )
    torch.manual_seed(heads + context)
    runner = ModelRunner.from_config(
        config, layers=[0], attention_only=True, device=device, dtype="bfloat16", numerics=CACHES[cache],
        backend=backend, max_model_len=max(context + 4096, 8192), max_num_seqs=8, max_num_batched_tokens=4096,
    )  # fmt: skip
    fill_caches(runner)
    block = runner.model.layers["0"]
    impl = block.attn.impl
    reference = copy.copy(impl)
    reference.kernels = get_kernels("reference", device)
    errors: list[float] = []
    attend = impl.forward_mqa

    def both(query, kv_cache, meta, layer):
        out, lse = attend(query, kv_cache, meta, layer)
        expected, _ = reference.forward_mqa(query.float(), kv_cache, meta, layer)
        errors.append(relative(out, expected))
        return out, lse

    impl.forward_mqa = both
    steps = {
        "decode of 8": [(context, 1)] * 8,
        "prefill 1, 63, 700, 2000": [(context, n) for n in (1, 63, 700, 2000)],
        "decode and prefill mixed": [(context, 1), (37, 1), (context, 130), (0, 65), (5, 300)],
        "from nothing": [(0, 3), (0, 1025)],
    }
    cases = []
    for name, requests in steps.items():
        requests = sorted(requests, key=lambda request: request[1] > 1)
        caches = [past(runner, length) for length, _ in requests]
        lens = [n for _, n in requests]
        runner.manager.reserve(list(zip(caches, lens, strict=True)))
        step = runner.step_metadata(caches, lens)
        x = torch.randn(sum(lens), config.hidden_size, device=device).to(runner.dtype)
        errors.clear()
        with torch.no_grad():
            out = block.attend(x, step)
        error = errors[0] if bool(out.isfinite().all()) else float("inf")
        cases.append(
            {"case": f"{cache} cache, {heads} heads, context {context}, {name}", "error": error, "limit": LIMIT}
        )
        for item in caches:
            runner.manager.free(item)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the cases as JSON")
    args = parser.parse_args()
    try:
        device = pick_device("cuda")
        get_kernels("flashmla", device)
    except ValueError as error:
        parser.error(str(error))
    cases = check_bytes(device)
    for cache in CACHES:
        for heads in (16, 64, 128):
            for context in (1500, 70000):
                cases += check_layer(device, cache, heads, context)
                torch.cuda.empty_cache()
    for case in cases:
        case["passed"] = case["error"] <= case["limit"]
        print(f"{case['case']:75} {case['error']:9.2e} {'' if case['passed'] else 'FAILED'}")
    failed = [case["case"] for case in cases if not case["passed"]]
    worst = max(case["error"] for case in cases if case["limit"])
    report = {
        "check": "v32",
        "cases": len(cases),
        "failed": failed,
        "worst_relative_error": worst,
        "environment": collect(),
    }
    if args.out:
        Path(args.out).write_text(json.dumps({**report, "all": cases}, indent=1) + "\n")
    print(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
