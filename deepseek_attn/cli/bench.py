"""``deepseek-attn bench op|layer|model``: times of ops, attention layers and whole decode steps on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_attn.cli.options import add_numerics_options, check_output

if TYPE_CHECKING:
    import torch

    from deepseek_attn.bench.cases.case import OpCase
    from deepseek_attn.config.model import AnyConfig
    from deepseek_attn.runner.model_runner import ModelRunner


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time ops, layers and models",
        description="Time parts of a model on this machine, with random data. The last line is one JSON document.",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    op = what.add_parser(
        "op", help="single ops, compared with other implementations and with this machine's peak rates"
    )
    op.add_argument("--ops", type=names, metavar="LIST", help="op names or parts of them (default: all)")
    op.add_argument("--rows", type=names, metavar="LIST", help="parts of row labels (default: all)")
    op.set_defaults(run=run_ops)
    layer = what.add_parser("layer", help="one attention layer, from hidden states to the output projection")
    layer.add_argument("--layers", type=numbers, metavar="LIST", help="layer numbers (default: the first of each kind)")
    layer.add_argument(
        "--prefill", type=numbers, default=[], metavar="LIST", help="also time prefills of these lengths"
    )
    layer.add_argument(
        "--instances", type=int, default=1, metavar="N",
        help="layers of a kind that take turns, so that no call finds its weights in the L2 cache (default: 1)",
    )  # fmt: skip
    layer.add_argument("--backends", type=names, default=["auto"], metavar="LIST", help="default: auto")
    layer.set_defaults(run=run_layer)
    model = what.add_parser("model", help="one decode step of a model, from token ids to logits")
    model.add_argument("--layers", type=numbers, metavar="LIST", help="layer numbers (default: all)")
    model.add_argument("--experts", type=int, metavar="N", help="routed experts per layer (default: the model's)")
    model.add_argument("--backend", default="auto", help="default: auto")
    model.set_defaults(run=run_model)
    for part in (layer, model):
        part.add_argument("--model", default="tiny", metavar="NAME|FILE", help="preset or config.json (default: tiny)")
        part.add_argument(
            "--batch", type=numbers, default=[1, 8], metavar="LIST", help="batch sizes of decode steps (default: 1,8)"
        )
        part.add_argument(
            "--context", type=numbers, default=[1024], metavar="LIST", help="context lengths (default: 1024)"
        )
        part.add_argument("--graph", action="store_true", help="time replays of CUDA graphs")
        part.add_argument("--kernels", action="store_true", help="list the kernels with launches and times (GPU)")
        add_numerics_options(part)
    for part in (op, layer, model):
        part.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
        part.add_argument(
            "--repeats", type=int, default=20, help="runs per measurement, of which the median counts (default: 20)"
        )
        part.add_argument("--plot", type=Path, metavar="FILE", help="also draw the times (.svg, .png, .pdf)")


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write integers with commas between them") from None


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def run_ops(args: argparse.Namespace) -> None:
    from deepseek_attn.bench.ops import time_case
    from deepseek_attn.bench.timing import Table, ceilings
    from deepseek_attn.config.options import pick_device
    from deepseek_attn.kernels.common.dispatch import problem_on

    check_flags(args)
    device = pick_device(args.device)
    cases = list(op_cases(device))
    if not cases:
        raise ValueError(f"no op can be timed: {problem_on(device) or 'plain torch was asked for'}")
    wanted = [
        case
        for case in cases
        if (not args.ops or any(name in case.op for name in args.ops))
        and (not args.rows or any(part in case.label for part in args.rows))
    ]
    if not wanted:
        known = ", ".join(sorted({case.op for case in cases}))
        raise ValueError(f"no row matches --ops {args.ops} --rows {args.rows}; the ops are {known}")
    limits = ceilings(device) if device.type == "cuda" else None
    rows = []
    table = Table({
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


def op_cases(device: torch.device) -> Iterator[OpCase]:
    """The rows of the op benchmark that can run on ``device``, family by family."""
    from deepseek_attn.bench.cases import attention, cache_ops, hyper_connection, indexer, linears, moe

    for family in (attention, cache_ops, hyper_connection, indexer, linears, moe):
        yield from family.cases(device)


def run_layer(args: argparse.Namespace) -> None:
    import torch

    from deepseek_attn.bench.layer import fill_caches, time_layer
    from deepseek_attn.bench.timing import Table, ceilings, print_kernels
    from deepseek_attn.checkpoint.random import RepeatingSource
    from deepseek_attn.config.model import ModelConfig
    from deepseek_attn.config.options import pick_device
    from deepseek_attn.runner.model_runner import ModelRunner

    check_flags(args)
    device, config = pick_device(args.device), ModelConfig.from_pretrained(args.model)
    groups = [instances(config, layer, args.instances) for layer in args.layers or first_of_each_kind(config)]
    limits = ceilings(device) if device.type == "cuda" else None
    steps = [(batch, 1, context) for context in args.context for batch in args.batch]
    steps += [(1, n, max(context, n)) for context in args.context for n in args.prefill]
    rows = []
    table = Table({
        "layer": "<12", "kind": "<7", "backend": "<22", "mode": "<9", "tokens": ">7", "batch": ">6", "context": ">9",
        "us": ">11.1f", "10 %": ">11.1f", "90 %": ">11.1f", "floor": ">9.1f", "ratio": ">7.2f", "bound": ">7",
        "launches": ">10.0f",
    })  # fmt: skip
    for group in groups:
        source = RepeatingSource(config)
        for backend in args.backends:
            torch.manual_seed(0)
            runner = None  # its memory is free before the next one is made
            runner = ModelRunner.from_source(
                config, source, layers=group, attention_only=True, backend=backend,
                device=device, numerics=args.numerics, dtype=args.dtype, progress=False,
                max_model_len=max(context for _, _, context in steps),
                max_num_seqs=max(args.batch), max_num_batched_tokens=max([*args.batch, *args.prefill, 256]),
            )  # fmt: skip
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
    from deepseek_attn.bench.layer import fill_caches
    from deepseek_attn.bench.model import time_model
    from deepseek_attn.bench.timing import Table, print_kernels
    from deepseek_attn.config.model import ModelConfig
    from deepseek_attn.runner.model_runner import ModelRunner

    check_flags(args)
    config = ModelConfig.from_pretrained(args.model)
    if args.experts is not None:
        config = config.replace(n_routed_experts=args.experts)
    runner = ModelRunner.from_config(
        config, layers=args.layers, backend=args.backend, device=args.device, numerics=args.numerics, dtype=args.dtype,
        max_model_len=max(args.context), max_num_seqs=max(args.batch), max_num_batched_tokens=max(*args.batch, 256),
    )  # fmt: skip
    fill_caches(runner)
    rows = []
    table = Table({
        "batch": ">6", "context": ">9", "graph": ">7", "us": ">11.1f", "10 %": ">11.1f", "90 %": ">11.1f",
        "tokens/s": ">11.1f", "launches": ">10.0f",
    })  # fmt: skip
    for context in args.context:
        for batch in args.batch:
            timing = time_model(runner, batch, context, args.repeats, graph=args.graph, count_kernels=args.kernels)
            rows.append(timing.row())
            table.add(
                batch, context, "yes" if args.graph else "no", timing.microseconds, timing.low, timing.high,
                timing.tokens_per_second, timing.launches,
            )  # fmt: skip
            print_kernels(timing)
    run = {"layers": len(runner.backbone_layers), "experts": config.n_routed_experts, **settings(runner)}
    finish(args, {"benchmark": "model", "model": args.model, **run}, rows, ("graph", "context"))


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for sizes and files that would fail only after the timing, or under another option's name."""
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: at least 1 run")
    if getattr(args, "instances", 1) < 1:
        raise ValueError(f"--instances {args.instances}: at least 1 layer")
    for flag in ("batch", "context", "prefill"):
        if any(n < 1 for n in getattr(args, flag, [])):
            raise ValueError(f"--{flag} {','.join(map(str, getattr(args, flag)))}: numbers of at least 1")
    if args.plot:
        from deepseek_attn.bench.plots import check_picture

        check_output("--plot", args.plot)
        check_picture(args.plot)


def settings(runner: ModelRunner) -> dict[str, str]:
    return {
        "numerics": runner.numerics.name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
    }


def finish(args: argparse.Namespace, run: dict, rows: list[dict], series: tuple[str, ...]) -> None:
    """Prints the JSON line and, with ``--plot``, draws one bar per row, one colour per series."""
    from deepseek_attn.cli.info import collect

    if args.plot:
        from deepseek_attn.bench.plots import bar_chart

        bar_chart(args.plot, rows, series)
    facts = {key: value for key, value in collect().items() if "backends" not in key}
    print(json.dumps({**run, "rows": rows, "environment": facts}))


def instances(config: AnyConfig, layer: int, count: int) -> list[int]:
    """Layer ``layer`` and the next ones of its kind, ``count`` in all, or as many as there are."""
    if not 0 <= layer < len(config.layers):
        return [layer]  # the runner says that there is no such layer
    kind = config.layers[layer].kind
    return [layer, *(spec.index for spec in config.layers if spec.kind == kind and spec.index != layer)][:count]


def first_of_each_kind(config: AnyConfig) -> list[int]:
    """Numbers of the first layer of each kind of attention."""
    kinds: dict[str, int] = {}
    for spec in config.layers:
        kinds.setdefault(spec.kind, spec.index)
    return list(kinds.values())
