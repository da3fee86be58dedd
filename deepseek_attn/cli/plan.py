"""``deepseek-attn plan``: bytes of the KV caches, without allocating them."""

from __future__ import annotations

import argparse
import json

from deepseek_attn.cli.options import HUB_ID, add_limits, add_numerics_options, add_prefill_options, memory_size
from deepseek_attn.utils.sizes import show_bytes


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="KV cache bytes per layer, sequence and token",
        description="KV cache bytes: fixed per sequence, marginal per token, and what fits in a given memory.",
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
        help="memory for caches and workspace, for instance 80GB: prints what fits",
    )  # fmt: skip
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
    from deepseek_attn.impls.options import AttentionOptions
    from deepseek_attn.runner import planner

    config, device = ModelConfig.from_pretrained(args.model), pick_device(None)
    numerics = numerics_for(config, args.numerics or ("serving" if device.type == "cuda" else "exact"))
    dtype = pick_dtype(args.dtype, device)
    limit = config.max_position_embeddings
    length = min(limit, DEFAULT_MAX_MODEL_LEN) if args.max_model_len is None else args.max_model_len
    check_sizes(config, None, length, args.max_num_seqs, args.max_num_batched_tokens, 0, args.max_snapshots)

    def plan_for(max_model_len: int, max_num_seqs: int, kv_cache_bytes: int | None = None) -> planner.Plan:
        limits = (max_model_len, max_num_seqs, args.max_num_batched_tokens)
        return planner.make_plan(
            config, numerics, dtype, *limits, max_snapshots=args.max_snapshots, kv_cache_bytes=kv_cache_bytes,
            attention=AttentionOptions(fp8_mode=args.fp8_mode, prefill_workspace_rows=args.prefill_workspace_rows),
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
    if args.memory is not None:
        memory = facts["memory"] = args.memory
        facts["sequences_that_fit"] = planner.sequences_that_fit(plan_for, memory, length)
        facts["tokens_that_fit"] = planner.tokens_that_fit(plan_for, memory, args.max_num_seqs, limit)
    return facts


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
    if "memory" in facts:
        lines += [
            "",
            f"in {show_bytes(facts['memory'])} of caches and workspace fit:",
            f"  {facts['sequences_that_fit']} sequences of {facts['max_model_len']} tokens, or",
            f"  {facts['max_num_seqs']} sequences of {facts['tokens_that_fit']} tokens (at most what the model allows)",
        ]
    return "\n".join(lines)
