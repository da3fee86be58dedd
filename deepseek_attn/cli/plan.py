"""``deepseek-attn plan``: predicts KV cache bytes, without allocating them, and on GPUs all memory and step times."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepseek_attn.cli.options import (
    HUB_ID,
    add_expert_options,
    add_limits,
    add_numerics_options,
    add_prefill_options,
    add_trailing_option,
    memory_size,
    numbers,
)
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.sizes import show_bytes

DISK_RATE = 3e9  # bytes/s of large reads of an NVMe disk; not measured
RANK_FLAGS: dict[str, Any] = {
    "ranks": 1, "layout": "tp", "gpus_per_host": 8, "batch": [1, 32, 128], "context": None, "prefill": None,
}  # fmt: skip
"""Flags that predict steps on the GPUs of ``--gpu``, with their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "KV cache bytes: fixed per sequence, marginal per token, and the sizes that fit in a given memory. With --gpu, "
        "or on a machine with a GPU, also all memory of a run on it, by part. With --gpu also the bytes that a rank "
        "sends in a step, and step times predicted from measurements."
    )
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="DIR|ID|NAME",
        help=f"checkpoint directory, config.json, {HUB_ID} or preset (default: tiny)",
    )
    add_numerics_options(parser)
    add_limits(parser)
    add_prefill_options(parser)
    add_trailing_option(parser)
    parser.add_argument(
        "--device", choices=["cpu"], help="predict for this machine's CPU and memory, even if it has a GPU"
    )
    add_expert_options(parser)
    parser.add_argument(
        "--host-memory", type=memory_size, metavar="BYTES",
        help="host memory, for a CPU or for routed experts outside of a GPU (default: free memory of this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--disk-rate", type=memory_size, default=DISK_RATE, metavar="BYTES",
        help="bytes per second that the disk reads in large blocks (default: 3GB)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=memory_size, metavar="BYTES",
        help="memory of a GPU, or on a CPU for caches and workspace, for instance 80GB: prints the sizes that fit",
    )  # fmt: skip
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="drafts per step (default: 0)")
    ranks = parser.add_argument_group("ranks (docs/parallel.md)")
    ranks.add_argument(
        "--gpu",
        choices=["h100", "h200"],
        help="predict for this GPU, with 80 GB (SXM) or 141 GB (default: this machine's GPU)",
    )
    ranks.add_argument("--ranks", type=int, metavar="N", help="GPUs that share the model (default: 1)")
    ranks.add_argument(
        "--layout", choices=["tp", "dp"],
        help="tp: all ranks have the same tokens; dp: data-parallel attention (default: tp)",
    )  # fmt: skip
    ranks.add_argument("--gpus-per-host", type=int, metavar="N", help="GPUs that NVLink joins (default: 8)")
    ranks.add_argument(
        "--batch", type=numbers, metavar="LIST",
        help="requests of a decode step, all ranks together (default: 1,32,128)",
    )  # fmt: skip
    ranks.add_argument("--context", type=int, metavar="N", help="tokens of each request (default: max_model_len)")
    ranks.add_argument("--prefill", type=int, metavar="N", help="also predict a step of one prompt of N tokens")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.set_defaults(run=run, **RANK_FLAGS)


def run(args: argparse.Namespace) -> None:
    known = () if args.device is None else ("batch", "prefill")
    given = [name for name, default in RANK_FLAGS.items() if getattr(args, name) != default and name not in known]
    if given and args.gpu is None:
        raise ValueError(f"--{given[0].replace('_', '-')}: name the GPUs with --gpu h100 or h200")
    if args.gpu is not None and args.device is not None:
        raise ValueError("--gpu and --device cpu: choose one")
    from deepseek_attn.cli.plan_facts import PlanFacts  # imports torch

    facts = PlanFacts(args).collect()
    show(json.dumps(facts) if args.json else table(facts))


def table(facts: dict) -> str:
    lines = [
        f"numerics {facts['numerics']}, dtype {facts['dtype']}, {facts['max_num_seqs']} sequences of up to "
        f"{facts['max_model_len']} tokens, {facts['max_num_batched_tokens']} new tokens per step",
        "",
        f"{'layer':<12}{'kind':<12}{'fixed per sequence':>20}{'per token':>14}{'index keys of it':>20}",
    ]
    for layer in facts["layers"]:
        lines.append(
            f"{layer['name']:<12}{layer['kind']:<12}{show_bytes(layer['fixed']):>20}"
            f"{show_bytes(layer['per_token']):>14}{show_bytes(layer['index_per_token']):>20}"
        )
    lines.append(f"{'sum':<24}{show_bytes(facts['fixed_per_sequence']):>20}{show_bytes(facts['per_token']):>14}")
    lines.append("")
    names = {
        "caches": "all caches (exact)",
        "shared": "  shared part: null pages, window pages of a step",
        "snapshots": "  prefix cache part",
        "workspace": "workspace: gathered keys, top-k indices",
        "index_logits": "index scores, peak",
        "rope": "RoPE tables",
        "total": "total without weights",
    }
    lines += [f"{label:<52}{show_bytes(facts[key]):>10}{facts[key]:>18,} B" for key, label in names.items()]
    if facts["capacity"] is not None:
        lines.append(f"{'tokens that the caches hold, over all sequences':<62}{facts['capacity']:>18,}")
    if "gpu" in facts:
        lines += gpu_table(facts["gpu"])
    if "prompt" in facts:
        lines += prompt_table(facts["prompt"])
    if "memory" in facts:
        lines += [
            "",
            f"in {show_bytes(facts['memory'])} of {'a GPU' if 'gpu' in facts else 'caches and workspace'} fit:",
            f"  {facts['sequences_that_fit']} sequences of {facts['max_model_len']} tokens, or",
            f"  {facts['max_num_seqs']} sequences of {facts['tokens_that_fit']} tokens (at most what the model allows)",
        ]
    if "ranks" in facts:
        lines += rank_table(facts["ranks"])
    if "experts" in facts:
        lines += expert_table(facts["experts"])
    return "\n".join(lines)


PARTS = {
    "weights": "weights",
    "experts": "routed experts on the GPU",
    "caches": "caches",
    "buffers": "workspace, selected entries, RoPE tables",
    "graphs": "CUDA graphs of decode steps, once all are captured",
    "step": "activations of the largest step",
    "cublas": "workspace of cuBLAS",
    "allocator": "gaps between blocks of PyTorch's allocator",
    "context": "CUDA context",
    "modules": "loaded kernels",
    "nccl": "NCCL",
}


def gpu_table(facts: dict) -> list[str]:
    """Lines about the memory of a GPU by part."""
    lines = ["", f"each {facts['name']}, at the peak:"]
    rows = [(PARTS[name], value) for name, value in facts["parts"].items()] + [("total", facts["total"])]
    lines += [f"  {label:<50}{show_bytes(value):>10}{value:>18,} B" for label, value in rows]
    if not facts["fits"]:
        lines.append(f"  does not fit: the GPU has {show_bytes(facts['memory'])}")
    return lines


SETTINGS = {
    "gpu": "all on the device",
    "host": "in pinned host memory",
    "disk": "in the checkpoint's files",
}


def expert_table(facts: dict) -> list[str]:
    """Lines about routed experts, one per placement."""
    lines = [
        "",
        f"routed experts: {facts['layers']} layers of {facts['experts']}, {show_bytes(facts['expert_bytes'])} each on "
        f"{facts['device']}, {show_bytes(facts['total'])} in all; a token needs {facts['topk']} of each layer",
        f"{'--expert-memory':<17}{'fits':<6}{'of device':>11}{'of host':>11}{'on device':>12}{'hits*':>7}",
    ]
    for row in facts["settings"]:
        cached = f"{row['cached']}/{facts['experts']}"
        lines.append(
            f"{row['memory']:<17}{'yes' if row['fits'] else 'no':<6}{show_bytes(row['device_bytes']):>11}"
            f"{show_bytes(row['host_bytes']):>11}{cached:>12}{row['hit_rate']:>7.0%}  {SETTINGS[row['memory']]}"
            + (f"; {row['problem']}" if row["problem"] else "")
        )
    lines.append(f"(device: {show_bytes(facts['device_memory'])}, host: {show_bytes(facts['host_memory'])})")
    lines.append("* expected of a routing that chooses evenly: the part of a layer's experts that is on the device")
    for row in facts["settings"]:
        if row["prompt"]:
            prompt = row["prompt"]
            lines.append(
                f"a prompt of {prompt['tokens']:,} tokens with --expert-memory {row['memory']}: "
                f"{prompt['seconds']:.3g} s ({prompt['chunks']} steps, {show_bytes(prompt['moved'])} copied or read)"
            )
    for row in facts["settings"]:
        if row["steps"]:
            what = "read from disk" if row["memory"] == "disk" else "over the bus"
            lines += ["", f"decode with --expert-memory {row['memory']} at {show_bytes(row['rate'])}/s {what}:"]
            lines.append("".join(f"{name:>14}" for name in ("requests", "hit rate", "bytes/step", "tokens/s")))
            lines += [
                f"{step['requests']:>14}{step['hit_rate']:>14.0%}{show_bytes(step['moved']):>14}"
                f"{step['tokens_per_second']:>14.3g}"
                for step in row["steps"]
            ]
    return [*lines, "", *facts["notes"]]


def prompt_table(facts: dict) -> list[str]:
    """Lines about the prompt rows that each group of layers computes."""
    lines = ["", f"a prompt of {facts['tokens']:,} tokens, for results at its end (docs/v41.md):"]
    lines.append(f"  {'layers':<10}{'rows':>10}{'TFLOP':>10}{'of all rows':>14}{'bytes':>12}")
    for group in facts["groups"]:
        lines.append(
            f"  {group['first']:>3} - {group['last']:<4}{group['rows']:>10,}{group['flops'] / 1e12:>10.1f}"
            f"{group['flops'] / group['all_flops']:>14.0%}{show_bytes(group['bytes']):>12}"
        )
    return lines


def rank_table(facts: dict) -> list[str]:
    """Lines about steps with several ranks."""
    lines = ["", f"{facts['ranks']} x {facts['gpu']}, layout {facts['layout']}, hosts {facts['hosts']}:"]
    head = ("requests", "new tokens", "context", "ms", "tokens/s", "NVLink", "network", "communication")
    lines.append("  ".join(f"{name:>11}" for name in head))
    for step in facts["steps"]:
        share = step["stages_us"]["communication"] / step["ms"] / 1e3
        cells = (
            step["requests"], step["requests"] * step["tokens"], step["context"], f"{step['ms']:.2f}",
            f"{step['tokens_per_second']:.0f}", show_bytes(step["nvlink_bytes"]), show_bytes(step["network_bytes"]),
            f"{share:.0%}",
        )  # fmt: skip
        lines.append("  ".join(f"{cell!s:>11}" for cell in cells))
    lines += ["", "NVLink, network: bytes that a GPU sends in a step. Measured at:"]
    return lines + [f"  {source}" for source in facts["sources"]]
