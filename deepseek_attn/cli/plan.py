"""``deepseek-attn plan``: bytes of the KV caches, without allocating them; all memory and step times on GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_attn.cli.options import (
    HUB_ID,
    add_limits,
    add_numerics_options,
    add_prefill_options,
    attention_options,
    memory_size,
    numbers,
)
from deepseek_attn.utils.sizes import show_bytes

if TYPE_CHECKING:
    import torch

    from deepseek_attn.bench.machines import Machine
    from deepseek_attn.bench.ranks import RankModel
    from deepseek_attn.config.model import AnyConfig
    from deepseek_attn.config.numerics import Numerics
    from deepseek_attn.runner.memory import RunnerMemory
    from deepseek_attn.runner.planner import Plan

LAYOUTS = {"tp": False, "dp": True}  # whether attention is data-parallel


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="KV cache bytes per layer, sequence and token; memory and step times on GPUs",
        description="KV cache bytes: fixed per sequence, marginal per token, and what fits in a given memory. With "
        "--gpu, or where there is a GPU, also all memory that a run takes on it, by part. With --gpu also what a rank "
        "sends in a step, and how long steps take, predicted from measurements.",
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
    parser.add_argument(
        "--memory", type=memory_size, metavar="BYTES",
        help="memory of a GPU, or on a CPU for caches and workspace, for instance 80GB: prints what fits",
    )  # fmt: skip
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="drafts per step (default: 0)")
    ranks = parser.add_argument_group("ranks (docs/parallel.md)")
    ranks.add_argument("--gpu", choices=["h200"], help="predict for this GPU (default: the memory of the one here)")
    ranks.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)")
    ranks.add_argument(
        "--layout", choices=list(LAYOUTS), default="tp",
        help="tp: all ranks have the same tokens; dp: data-parallel attention (default: tp)",
    )  # fmt: skip
    ranks.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="GPUs that NVLink joins (default: 8)")
    ranks.add_argument(
        "--batch", type=numbers, default=[1, 32, 128], metavar="LIST",
        help="requests of a decode step, all ranks together (default: 1,32,128)",
    )  # fmt: skip
    ranks.add_argument("--context", type=int, metavar="N", help="tokens of each request (default: max_model_len)")
    ranks.add_argument("--prefill", type=int, metavar="N", help="also predict a step of one prompt of N tokens")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    facts = collect(args)
    print(json.dumps(facts) if args.json else table(facts))


def collect(args: argparse.Namespace) -> dict:
    """Everything that `plan` prints."""
    from deepseek_attn.config.defaults import DEFAULT_MAX_MODEL_LEN
    from deepseek_attn.config.model import ModelConfig
    from deepseek_attn.config.numerics import numerics_for
    from deepseek_attn.config.options import DTYPES, check_sizes, pick_device, pick_dtype
    from deepseek_attn.runner import planner

    config, device = ModelConfig.from_pretrained(args.model), pick_device(None)
    on_gpu = args.gpu is not None or device.type == "cuda"
    numerics = numerics_for(config, args.numerics or ("serving" if on_gpu else "exact"))
    dtype = pick_dtype(args.dtype or ("bfloat16" if on_gpu else None), device)
    limit = config.max_position_embeddings
    length = min(limit, DEFAULT_MAX_MODEL_LEN) if args.max_model_len is None else args.max_model_len
    check_sizes(config, None, length, args.max_num_seqs, args.max_num_batched_tokens, 0, args.max_snapshots)

    def plan_for(max_model_len: int, max_num_seqs: int, kv_cache_bytes: int | None = None) -> planner.Plan:
        limits = (max_model_len, max_num_seqs, args.max_num_batched_tokens)
        return planner.make_plan(
            config, numerics, dtype, *limits, max_snapshots=args.max_snapshots, kv_cache_bytes=kv_cache_bytes,
            attention=attention_options(args),
        )  # fmt: skip

    plan = plan_for(length, args.max_num_seqs, args.kv_cache_bytes)
    facts = {
        "numerics": numerics.name,
        "dtype": next(name for name, value in DTYPES.items() if value is dtype),
        "max_model_len": length,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "layers": [vars(layer) for layer in plan.layers],
        "fixed_per_sequence": plan.fixed,
        "per_token": plan.per_token,
        "shared": plan.shared,
        "snapshots": plan.snapshots,
        "capacity": plan.layout.capacity,
        "caches": plan.caches,
        "workspace": plan.workspace,
        "index_logits": plan.index_logits,
        "rope": plan.rope,
        "total": plan.total,
    }
    memory_for = gpu_memory(args, config, numerics, dtype) if on_gpu else None
    if memory_for is not None:
        facts["gpu"] = gpu_facts(args, memory_for(plan))
    if args.memory is not None:
        total_for = None
        if memory_for is not None:
            outside = sum(outside_allocator(args).values())

            def total_for(max_model_len: int, max_num_seqs: int) -> int:
                return memory_for(plan_for(max_model_len, max_num_seqs)).total + outside

        memory = facts["memory"] = args.memory
        facts["sequences_that_fit"] = planner.sequences_that_fit(plan_for, memory, length, total_for=total_for)
        facts["tokens_that_fit"] = planner.tokens_that_fit(plan_for, memory, args.max_num_seqs, limit, total_for)
    if args.gpu is not None:
        facts["ranks"] = rank_facts(args, config, numerics, dtype, plan)
    elif args.ranks != 1:
        raise ValueError("--ranks: say of which GPUs, --gpu h200")
    return facts


def gpu_memory(
    args: argparse.Namespace, config: AnyConfig, numerics: Numerics, dtype: torch.dtype
) -> Callable[[Plan], RunnerMemory]:
    """A function that counts the memory of one rank of a runner with the limits of a plan."""
    from deepseek_attn.cli.warmup import read_headers
    from deepseek_attn.layers.parallel import Parallel
    from deepseek_attn.layers.split import check_split
    from deepseek_attn.runner.memory import RunnerMemory

    parallel = Parallel(0, args.ranks, LAYOUTS[args.layout] and args.ranks > 1)
    check_split(config, numerics, parallel)
    if not 0 <= args.speculate < min(16, args.max_num_batched_tokens):
        raise ValueError(f"--speculate {args.speculate}: supported are 0 to 15 drafts, and fewer than tokens of a step")
    if args.speculate and not config.mtp_layers:
        raise ValueError(f"--speculate {args.speculate}: the model has no MTP layer")
    if config.dspark is not None and args.speculate > config.dspark.dspark_block_size:
        most = config.dspark.dspark_block_size
        raise ValueError(f"--speculate {args.speculate}: dspark_block_size {most} is the most that DSpark drafts")
    headers = read_headers(args.model)[1] if any(Path(args.model).glob("*.safetensors")) else None

    def count(plan: Plan) -> RunnerMemory:
        return RunnerMemory.of(
            config, plan.layout, headers, numerics=numerics, dtype=dtype, attention=attention_options(args),
            gpu=machine_of(args).gpu, num_drafts=args.speculate, parallel=parallel,
        )  # fmt: skip

    return count


def machine_of(args: argparse.Namespace) -> Machine:
    """The GPU that was named, or the one here, whose context and kernels are taken to be as large."""
    import torch

    from deepseek_attn.bench.machines import H200, MACHINES
    from deepseek_attn.kernels.common.device import gpu
    from deepseek_attn.utils.device import total_memory

    if args.gpu is not None:
        return MACHINES[args.gpu]
    device = torch.device("cuda")
    return replace(H200, name=torch.cuda.get_device_name(device), gpu=gpu(device), memory=total_memory(device))


def outside_allocator(args: argparse.Namespace) -> dict[str, int]:
    """Bytes on a GPU that PyTorch's allocator does not know of."""
    machine = machine_of(args)
    parts = {"context": machine.context, "modules": machine.modules}
    return parts | ({"nccl": machine.nccl_memory} if args.ranks > 1 else {})


def gpu_facts(args: argparse.Namespace, memory: RunnerMemory) -> dict[str, Any]:
    """All memory that a run takes on a GPU: parts that add up to the total."""
    machine, parts = machine_of(args), memory.parts() | outside_allocator(args)
    total = sum(parts.values())
    return {
        "name": machine.name, "memory": machine.memory, "parts": parts, "total": total,
        "fits": total <= machine.memory,
    }  # fmt: skip


def rank_model(args: argparse.Namespace, config: AnyConfig, numerics: Numerics, dtype: torch.dtype) -> RankModel:
    """The model on the ranks that the flags describe."""
    from deepseek_attn.bench.ranks import RankLayout, RankModel

    layout = RankLayout(args.ranks, LAYOUTS[args.layout], args.gpus_per_host)
    return RankModel(config, numerics, dtype, layout, machine_of(args))


def rank_facts(
    args: argparse.Namespace, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, plan: Plan
) -> dict[str, Any]:
    """Bytes that one of several ranks sends in a step, and predicted times of steps."""
    if min(args.ranks, args.gpus_per_host, *args.batch, args.context or 1, args.prefill or 1) < 1:
        raise ValueError("--ranks, --gpus-per-host, --batch, --context and --prefill are positive numbers")
    dp_attention, length = LAYOUTS[args.layout], plan.layout.max_model_len
    model = rank_model(args, config, numerics, dtype)
    layout = model.layout
    shapes = [(batch, 1, min(args.context or length, config.max_position_embeddings)) for batch in args.batch]
    shapes += [(1, args.prefill, args.prefill)] if args.prefill else []
    steps = []
    for batch, tokens, context in shapes:
        step = model.step(batch, tokens, context)
        total = step.shape.rows * (layout.ranks if dp_attention else 1)
        steps.append({
            "requests": total // tokens, "tokens": tokens, "context": context, "ms": step.microseconds / 1e3,
            "tokens_per_second": total / step.microseconds * 1e6, "stages_us": step.stages,
            "nvlink_bytes": sum(part.sent for part in step.collectives),
            "network_bytes": sum(part.network for part in step.collectives),
        })  # fmt: skip
    return {
        "gpu": model.machine.name, "ranks": layout.ranks, "layout": args.layout, "hosts": layout.hosts,
        "steps": steps, "sources": list(model.machine.sources),
    }  # fmt: skip


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
    if "memory" in facts:
        lines += [
            "",
            f"in {show_bytes(facts['memory'])} of {'a GPU' if 'gpu' in facts else 'caches and workspace'} fit:",
            f"  {facts['sequences_that_fit']} sequences of {facts['max_model_len']} tokens, or",
            f"  {facts['max_num_seqs']} sequences of {facts['tokens_that_fit']} tokens (at most what the model allows)",
        ]
    if "ranks" in facts:
        lines += rank_table(facts["ranks"])
    return "\n".join(lines)


PARTS = {
    "weights": "weights",
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
    """Lines about all memory of a GPU."""
    lines = ["", f"each {facts['name']}, at the peak:"]
    rows = [(PARTS[name], value) for name, value in facts["parts"].items()] + [("total", facts["total"])]
    lines += [f"  {label:<50}{show_bytes(value):>10}{value:>18,} B" for label, value in rows]
    if not facts["fits"]:
        lines.append(f"  does not fit: the GPU has {show_bytes(facts['memory'])}")
    return lines


def rank_table(facts: dict) -> list[str]:
    """Lines about steps of ranks."""
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
