"""Runs of ``deepseek-attn bench``: timings, printed as a table and as one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch

from deepseek_attn.checkpoint.hub import PretrainedSource
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.cli.info import environment
from deepseek_attn.cli.load_report import show_report
from deepseek_attn.cli.terminal import show
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import numerics_for, usual_preset
from deepseek_attn.config.options import pick_device, pick_dtype
from deepseek_attn.engine.structured import import_llguidance
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.dispatch import problem_on
from deepseek_attn.lab.bench.engine import (
    DecodingVariant,
    SetAcceptance,
    cut_config,
    random_prompts,
    text_prompts,
    time_engine,
)
from deepseek_attn.lab.bench.layer import fill_caches, time_layer
from deepseek_attn.lab.bench.memory import Limits, measure_memory
from deepseek_attn.lab.bench.model import time_model
from deepseek_attn.lab.bench.ops import op_cases, time_case
from deepseek_attn.lab.bench.plots import bar_chart
from deepseek_attn.lab.bench.structured import time_masks, wide_tokenizer
from deepseek_attn.lab.bench.timing import ceilings
from deepseek_attn.lab.bench.tune import FAMILIES, json_lines, tables_of, time_tables
from deepseek_attn.lab.commands.table import PrintedTable, print_kernels
from deepseek_attn.models.families import get_family
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer
from deepseek_attn.utils.clock import seconds_since
from deepseek_attn.utils.files import write_text
from deepseek_attn.utils.hub import HubModel


def run_ops(args: argparse.Namespace) -> None:
    """Times single ops: every implementation of each wanted row."""
    device = pick_device(args.device)
    cases = op_cases(device)
    if not cases:
        raise ValueError(f"no op can be timed: {problem_on(device) or 'plain torch was chosen'}")
    wanted = [
        case
        for case in cases
        if (not args.ops or any(name in case.op for name in args.ops))
        and (not args.rows or any(part in case.label for part in args.rows))
    ]
    if not wanted:
        known = ", ".join(sorted({case.op for case in cases}))
        raise ValueError(f"no row matches --ops {args.ops} --rows {args.rows}; the ops are {known}")
    limits = ceilings(device)
    rows = []
    table = PrintedTable({
        "op": "<26", "row": "<40", "ran": "<12", "us": ">11.1f", "10 %": ">10.1f", "90 %": ">10.1f", "GB/s": ">8.0f",
        "TFLOP/s": ">9.1f", "share": ">7.0%",
    })  # fmt: skip
    for case in wanted:
        for timing in time_case(case, device, args.repeats, limits):
            rows.append(timing.row())
            table.add(
                timing.op, timing.label, timing.implementation, timing.microseconds, timing.low, timing.high,
                timing.bytes_per_second / 1e9, timing.flops_per_second / 1e12, timing.share,
            )  # fmt: skip
    finish(args, {"benchmark": "op", "device": str(device), "ceilings": limits}, rows, ("op", "label"))


def run_layer(args: argparse.Namespace) -> None:
    """Times each chosen attention layer with each backend, at all sizes."""
    device, config = pick_device(args.device), ModelConfig.from_pretrained(args.model)
    groups = [instances(config, layer, args.instances) for layer in args.layers or first_of_each_kind(config)]
    numerics = numerics_for(config, args.numerics or usual_preset(device.type == "cuda"), args.index_keys)
    for backend in args.backends:  # before the first is timed
        get_family(config, numerics, pick_dtype(args.dtype, device), device, AttentionOptions(backend))
    if max(args.query_tokens) > min(args.context):
        raise ValueError(
            f"--query-tokens {max(args.query_tokens)}: --context {min(args.context)} must be at least as long"
        )
    limits = ceilings(device)
    sizes = product(args.context, args.query_tokens, args.batch)
    steps = [(batch, tokens, context) for context, tokens, batch in sizes]
    steps += [(1, n, max(context, n)) for context in args.context for n in args.prefill]
    rows = []
    table = PrintedTable({
        "layer": "<12", "kind": "<11", "backend": "<22", "mode": "<9", "tokens": ">7", "batch": ">6", "context": ">9",
        "us": ">11.1f", "10 %": ">11.1f", "90 %": ">11.1f", "floor": ">9.1f", "ratio": ">7.2f", "bound": ">7",
        "launches": ">10.0f",
    })  # fmt: skip
    for group in groups:
        source = RepeatingSource(config)
        for backend in args.backends:
            torch.manual_seed(0)
            runner = None  # free its memory before the next runner is made
            runner = ModelRunner.from_source(
                config, source, layers=config.with_sources(group), attention_only=True, backend=backend,
                device=device, numerics=args.numerics, index_keys=args.index_keys, dtype=args.dtype, progress=False,
                max_model_len=max(context for _, _, context in steps),
                max_num_seqs=max(args.batch),
                max_num_batched_tokens=max([max(args.batch) * max(args.query_tokens), *args.prefill, 256]),
            )  # fmt: skip
            runner.decode_query_len = max(args.query_tokens)
            fill_caches(runner)
            for batch, tokens, context in steps:
                timing = time_layer(
                    runner, group, batch, tokens, context, args.repeats, graph=args.graph, count_kernels=args.kernels,
                    rates=limits,
                )  # fmt: skip
                rows.append(timing.row())
                table.add(
                    timing.layer, timing.kind, timing.backend, timing.mode, tokens, batch, context,
                    timing.microseconds, timing.low, timing.high, timing.floor_us, timing.over_floor, timing.bound,
                    timing.launches,
                )  # fmt: skip
                print_kernels(timing)
    run = {"benchmark": "layer", "model": args.model, "ceilings": limits, **settings(runner)}
    finish(args, run, rows, ("kind", "backend", "context"))


def run_model(args: argparse.Namespace) -> None:
    """Times steps of a model and their stages, at all sizes."""
    config = ModelConfig.from_pretrained(args.model)
    if args.experts is not None:
        config = config.replace(n_routed_experts=args.experts)
    runner = ModelRunner.from_source(
        config, RepeatingSource(config), layers=args.layers, backend=args.backend, device=args.device,
        numerics=args.numerics, index_keys=args.index_keys, dtype=args.dtype, deterministic=args.deterministic,
        progress=False,
        max_model_len=max([*args.context, *args.prefill]), max_num_seqs=max(args.batch),
        max_num_batched_tokens=max([*args.batch, *args.prefill, 256]),
    )  # fmt: skip
    fill_caches(runner)
    limits = ceilings(runner.device)
    rows = []
    table = PrintedTable({
        "stage": "<27", "batch": ">6", "tokens": ">7", "context": ">9", "graph": ">7", "us": ">11.1f",
        "10 %": ">11.1f", "90 %": ">11.1f", "GB": ">9.3f", "TFLOP": ">9.4f", "floor": ">9.1f", "ratio": ">7.2f",
        "launches": ">10.0f", "tokens/s": ">11.1f",
    })  # fmt: skip
    ways = [True, False] if args.graph and args.eager else [args.graph]
    decodes = [(batch, 1, context) for context, batch in product(args.context, args.batch)]
    prefills = [(1, tokens, max(tokens, context)) for context, tokens in product(args.context, args.prefill)]
    for (batch, tokens, context), graph in product(dict.fromkeys(decodes + prefills), ways):
        timing = time_model(
            runner, batch, context, args.repeats, graph=graph, count_kernels=args.kernels, tokens=tokens, rates=limits
        )
        rows.append(timing.row())
        for name, stage in (*((each.stage, each) for each in timing.stages), ("step", timing)):
            is_step = stage is timing
            table.add(
                name, batch, tokens, context, "yes" if graph else "no",
                stage.microseconds, stage.low, stage.high, stage.work.total_bytes / 1e9, stage.work.total_flops / 1e12,
                stage.floor_us, stage.over_floor, stage.launches, timing.tokens_per_second if is_step else None,
            )  # fmt: skip
        print_kernels(timing)
    run = {"layers": len(runner.backbone_layers), "experts": config.n_routed_experts, **settings(runner)}
    finish(args, {"benchmark": "model", "model": args.model, "ceilings": limits, **run}, rows, ("graph", "context"))


def run_tune(args: argparse.Namespace) -> None:
    """Times the rows of launch tables side by side, in the stages of steps of a model."""
    families, started = FAMILIES if args.family == "all" else args.family.split(","), time.perf_counter()
    tables = [table for family in families for table in tables_of(family)]
    device = pick_device(None)
    if device.type != "cuda":
        raise ValueError("bench tune times kernels on a GPU; this machine has none: info --plans shows their tables")
    config = ModelConfig.from_pretrained(args.model)
    if args.experts is not None:
        config = config.replace(n_routed_experts=args.experts)
    runner = ModelRunner.from_source(
        config, RepeatingSource(config), layers=config.with_sources(args.layers or first_of_each_kind(config)),
        device=device, numerics=args.numerics, index_keys=args.index_keys, dtype=args.dtype, progress=False,
        max_model_len=max([*args.context, *args.prefill]), max_num_seqs=max(args.batch), compile_ahead=False,
        max_num_batched_tokens=max([*args.batch, *args.prefill, 256]),
    )  # fmt: skip
    fill_caches(runner)
    run = {"command": f"deepseek-attn {' '.join(sys.argv[1:])}", "gpu": torch.cuda.get_device_name(device)}
    run |= {"date": time.strftime("%Y-%m-%d"), "benchmark": "tune", "model": args.model, **settings(runner)}
    run |= {"layers": len(runner.backbone_layers), "environment": environment()}
    printed = PrintedTable({
        "table": "<28", "kernel": "<34", "condition": "<40", "batch": ">6", "tokens": ">7", "context": ">9",
        "us": ">10.1f", "taken": ">7", "ratio": ">7.3f",
    })  # fmt: skip
    sizes = [(batch, 1, context) for context, batch in product(args.context, args.batch)]
    sizes += [(1, tokens, max(tokens, context)) for context, tokens in product(args.context, args.prefill)]
    found: dict[str, list[dict]] = {table.name: [] for table in tables}
    for timing in time_tables(runner, tables, sizes, args.repeats, args.nearest):
        found[timing.table].append(timing.row())
        for row in (timing.taken, *timing.others):
            taken = ("loses" if timing.loses else "yes") if row is timing.taken else ""
            printed.add(
                timing.table, row.kernel, row.when, timing.batch, timing.tokens, timing.context, row.microseconds,
                taken, timing.ratio(row),
            )  # fmt: skip
        if args.out is not None:  # rewritten after every problem, so that an interrupted run keeps its measurements
            write_text(args.out, json_lines(run | {name: rows for name, rows in found.items() if rows}))
        if args.minutes is not None and seconds_since(started) > 60 * args.minutes:
            break
    show(json.dumps(run | {name: rows for name, rows in found.items() if rows}))


def run_engine(args: argparse.Namespace) -> None:
    """Times greedy decoding of an engine in each of the ways, at all batch sizes."""
    if args.structured:
        import_llguidance()  # report a missing extra before the model is loaded
    if args.acceptance and (problem := problem_on(pick_device(args.device))):
        raise ValueError(f"--acceptance needs steps that are CUDA graphs: {problem}")
    checkpoint = checkpoint_to_time(args)
    config = ModelConfig.from_pretrained(args.model) if checkpoint is None else PretrainedSource(checkpoint).config
    if args.drafts is None:
        args.drafts = [1, 2, 3] if config.mtp_layers or config.dspark else [0]
    drafts = [n for n in args.drafts if n > 0]
    if args.acceptance and not drafts:
        raise ValueError("--acceptance: there are no drafts to accept; give --drafts")
    runner = engine_runner(args, checkpoint)
    show_report(runner, args)
    rates = args.acceptance or [None]
    variants = [DecodingVariant(), *(DecodingVariant(n, acceptance=rate) for n, rate in product(drafts, rates))]
    if args.logprobs is not None:
        variants.append(DecodingVariant(logprobs=args.logprobs))
    if args.structured:
        variants.append(DecodingVariant(structured=True))
    if args.eager and runner.graphs is not None:
        variants.append(DecodingVariant(graphs=False))
    rows = []
    table = PrintedTable({
        "batch": ">6", "drafts": ">8", "set": ">6.0%", "with": ">13", "graph": ">7", "tokens/s": ">11.1f",
        "ratio": ">7.2f", "step us": ">11.1f", "tokens/step": ">13.2f", "breaks even": ">13.2f",
        "accepted": ">10.0%", "pays from": ">11.0%", "host": ">7.1%", "prompt tok/s": ">14.0f",
    })  # fmt: skip
    own = Tokenizer(runner.directory) if runner.directory and (runner.directory / TOKENIZER_FILE).is_file() else None
    vocab = runner.config.vocab_size
    acceptance = SetAcceptance(runner, max(drafts)) if args.acceptance and drafts else None
    with (
        wide_tokenizer(vocab) if args.structured and own is None else nullcontext(own) as tokenizer,
        acceptance.installed() if acceptance else nullcontext(),
    ):
        for batch in args.batch:
            prompts = text_prompts(own, batch, args.prompt) if own else random_prompts(vocab, batch, args.prompt)
            timings = time_engine(runner, list(prompts), variants, args.tokens, args.repeats, tokenizer, acceptance)
            for timing in timings:
                rows.append(timing.row())
                logprobs = "" if timing.logprobs is None else f"{timing.logprobs} logprobs"
                table.add(
                    batch, timing.drafts, timing.acceptance, "structure" if timing.structured else logprobs,
                    "yes" if timing.graphs else "no", timing.tokens_per_second, timing.speedup, timing.step_us,
                    timing.tokens_per_step, timing.break_even_tokens_per_step, timing.acceptance_rate,
                    timing.break_even_acceptance, timing.host_share, timing.prompt_tokens_per_second,
                )  # fmt: skip
    run = {
        "benchmark": "engine", "model": args.model or "small", "layers": len(runner.backbone_layers),
        "experts": runner.config.n_routed_experts, "prompt": args.prompt, "tokens": args.tokens, **settings(runner),
    }  # fmt: skip
    finish(args, run, rows, ("drafts",))


def run_structured(args: argparse.Namespace) -> None:
    """Times the masks of structured output, for each kind of structure."""
    device, rows = pick_device(args.device), []
    table = PrintedTable({
        "structure": "<12", "tokens": ">7", "allowed": ">9.1%", "compile ms": ">12.1f", "mask us": ">10.1f",
        "10 %": ">9.1f", "90 %": ">9.1f", "apply us": ">10.1f",
    })  # fmt: skip
    with nullcontext(Tokenizer(args.model)) if args.model else wide_tokenizer(args.vocab) as tokenizer:
        tokenizer.check_ids(args.vocab)
        for timing in time_masks(tokenizer, args.vocab, args.tokens, device):
            rows.append(timing.row())
            table.add(
                timing.structure, timing.tokens, timing.allowed, timing.compile_ms, timing.microseconds, timing.low,
                timing.high, timing.apply_us,
            )  # fmt: skip
    finish(args, {"benchmark": "structured", "vocab": args.vocab, "device": str(device)}, rows, ())


def run_memory(args: argparse.Namespace) -> None:
    """Measures the memory of runs at each combination of limits, and prints it beside the prediction."""
    device = pick_device(None)
    if device.type != "cuda":
        raise ValueError("bench memory measures a GPU; this machine has none: plan --gpu h100 (or h200) predicts")
    config = cut_config(ModelConfig.from_pretrained(args.model), args.layers, args.experts)
    try:
        runs = [Limits(*map(int, text.split(":"))) for text in args.limits]
    except (TypeError, ValueError):
        raise ValueError(f"--limits {','.join(args.limits)}: write for instance 16384:8:2048,8192:64:8192") from None
    source, rows = RepeatingSource(config), []
    table = PrintedTable(
        {"limits": "<18", "part": "<12", "predicted MB": ">13.1f", "measured MB": ">13.1f", "off": ">8.1%"}
    )
    for limits in runs:
        compared = measure_memory(config, source, limits, device=device, compile_ahead=True)
        rows.append(compared.row())
        pairs = {name: (value, compared.measured[name]) for name, value in compared.predicted.items()}
        pairs["driver"] = sum(compared.predicted.values()), sum(compared.measured.values())
        for name, (predicted, measured) in pairs.items():
            off = predicted / measured - 1 if measured else None
            table.add(":".join(map(str, limits)), name, predicted / 1e6, measured / 1e6, off)
    run = {"layers": len(config.layers), "experts": config.n_routed_experts, "device": str(device)}
    finish(args, {"benchmark": "memory", "model": args.model, **run}, rows, ())


def checkpoint_to_time(args: argparse.Namespace) -> str | Path | None:
    """Folder or hub id of the checkpoint; None for a preset or a config.json, which gets random weights."""
    if args.model is not None and not Path(args.model).is_dir() and HubModel.parse(args.model) is None:
        return None
    if args.layers is not None or args.experts is not None:
        raise ValueError("--layers and --experts cut a preset or a config.json (--model NAME), not a checkpoint")
    return default_checkpoint() if args.model is None else args.model


def engine_runner(args: argparse.Namespace, checkpoint: str | Path | None) -> ModelRunner:
    """The runner of a checkpoint, or of a config with random weights. Its caches are sized to the requests."""
    options = {
        "device": args.device, "numerics": args.numerics, "index_keys": args.index_keys, "dtype": args.dtype,
        "backend": args.backend, "deterministic": args.deterministic,
        "max_model_len": args.prompt + args.tokens + max(args.drafts), "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": max(2048, max(args.batch) * (1 + max(args.drafts))),
        "expected_drafts": max(args.drafts),
    }  # fmt: skip
    if checkpoint is not None:
        return ModelRunner.from_pretrained(checkpoint, **options)
    config = cut_config(ModelConfig.from_pretrained(args.model), args.layers, args.experts)
    return ModelRunner.from_source(config, RepeatingSource(config), progress=False, **options)


def settings(runner: ModelRunner) -> dict[str, str | bool]:
    return {
        "deterministic": runner.deterministic,
        "numerics": runner.numerics.name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
    }


def finish(args: argparse.Namespace, run: dict, rows: list[dict], series: tuple[str, ...]) -> None:
    """Prints the JSON line and, with ``--plot``, draws one bar per row, one colour per series."""
    if args.plot:
        bar_chart(args.plot, rows, series)
    show(json.dumps({**run, "rows": rows, "environment": environment()}))


def instances(config: AnyConfig, layer: int, count: int) -> list[int]:
    """Layer ``layer`` and up to ``count - 1`` other layers of the same kind with the same sources."""
    if not 0 <= layer < len(config.layers):
        return [layer]  # the runner raises the error for an unknown layer
    first = config.layers[layer]
    alike = (spec for spec in config.layers if (spec.kind, spec.sources) == (first.kind, first.sources))
    return [layer, *(spec.index for spec in alike if spec.index != layer)][:count]


def first_of_each_kind(config: AnyConfig) -> list[int]:
    """Numbers of the first layer of each kind of attention."""
    kinds: dict[str, int] = {}
    for spec in config.layers:
        kinds.setdefault(spec.kind, spec.index)
    return list(kinds.values())
