"""``deepseek-attn info``: this machine, versions, the attention impls that run here, kernels of a model's steps."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

from deepseek_attn.cli.options import GPU_NAMES, HUB_ID, add_numerics_options, gpu_facts, numbers
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "sgl-flash-mla",
    "flash-mla",
    "flashinfer-python",
)


ATTENTION_DEFAULTS = (
    "Attention options of ModelRunner, LLM and the commands, with their defaults:",
    "  backend=auto                 the first impl below that runs; decode_backend and prefill_backend: of one phase",
    "  fp8_mode=auto                separate: keys of prefill requests are gathered to rows of the model's dtype;",
    "                               mixed: prefill reads cache pages in place, as decode does. auto is separate, and",
    "                               mixed for V3.2 with fewer than 32 heads per rank or a cache that is not FP8",
    "  prefill_workspace_rows=None  rows for gathered keys: 4 requests of max_model_len (fewer with max_num_seqs)",
    "  cuda_graphs=None             decode steps are CUDA graphs where every op of a step has a kernel (V4.1: True)",
    "  deterministic=False          True: the bits of a row's logits do not depend on the rest of the batch; for the",
    "                               impls triton and reference (auto picks between these), prefill reads pages",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "This machine, installed versions, and which attention impls run here and why. With --plans, for "
        "each op of a model's steps: kernel, tiles, splits, and the row of the launch table that chose it. It needs no "
        "GPU and no weights."
    )
    plans = parser.add_argument_group("kernels of a model (docs/gpu.md)")
    plans.add_argument("--plans", metavar="MODEL", help=f"checkpoint directory, config.json, {HUB_ID} or preset")
    plans.add_argument(
        "--gpu", type=gpu_facts, metavar="GPU",
        help=f"{GPU_NAMES}, or compute capability and multiprocessors, for instance 9.0:132 (default: this machine's)",
    )  # fmt: skip
    plans.add_argument("--batch", type=numbers, metavar="LIST", help="sequences of decode steps (default: 1,8,32,128)")
    plans.add_argument("--context", type=int, metavar="N", help="tokens of each sequence (default: 8192)")
    plans.add_argument("--prefill", type=numbers, metavar="LIST", help="also steps of one prompt, by length")
    add_numerics_options(plans)
    plans.add_argument("--backend", metavar="BACKEND", help="attention impl of these steps (default: auto)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.set_defaults(run=run)


PLAN_FLAGS = ("gpu", "batch", "context", "prefill", "numerics", "index_keys", "dtype", "backend")
"""Flags of ``--plans``."""


def run(args: argparse.Namespace) -> None:
    if args.plans is not None:
        from deepseek_attn.kernels.common.dispatch import need_triton

        need_triton("listing the kernels of a model")
        from deepseek_attn.cli.plan_table import show_plans  # imports triton

        show_plans(args)
        return
    for name in PLAN_FLAGS:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: name the model with --plans MODEL")
    facts = collect()
    if args.json:
        show(json.dumps(facts))
        return
    machine = facts["machine"]
    show(f"machine   {machine['platform']}, {machine['cpus']} CPUs, Python {machine['python']}")
    for index, gpu in enumerate(facts["gpus"]):
        show(f"GPU {index}     {gpu['name']}, {gpu['memory'] / 1e9:.0f} GB, sm_{gpu['capability']}")
    if not facts["gpus"]:
        show("GPU       none")
    for name, version in facts["packages"].items():
        show(f"{name:<18}{version or 'not installed'}")
    show()
    for line in ATTENTION_DEFAULTS:
        show(line)
    for title, key in (("DeepSeek-V4", "backends"), ("DeepSeek-V3.2", "v32_backends")):
        show(f"\n{title} attention on {facts['device']} (auto picks the first that runs):")
        for backend in facts[key]:
            show(f"  {backend['name']:<12}{'yes' if backend['usable'] else 'no':<5}{backend['reason']}")


def collect() -> dict:
    """All facts that `info` prints."""
    import torch

    from deepseek_attn.config.options import pick_device
    from deepseek_attn.impls import describe_impls
    from deepseek_attn.v32.backends import SPARSE_MLA_IMPLS

    device = pick_device(None)
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "gpus": [{"name": g.name, "memory": g.total_memory, "capability": f"{g.major}{g.minor}"} for g in gpus],
        "packages": {"deepseek-attn": __version__, **{name: version(name) for name in PACKAGES}},
        "device": str(device),
        "backends": [impl._asdict() for impl in describe_impls(device)],
        "v32_backends": [impl._asdict() for impl in describe_impls(device, impls=SPARSE_MLA_IMPLS)],
    }


def environment() -> dict:
    """The part of `collect` that a benchmark's record keeps: all but the impls."""
    return {key: value for key, value in collect().items() if "backends" not in key}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
