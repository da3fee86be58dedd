"""``deepseek-attn bench layer``: times of one attention layer on this machine."""

from __future__ import annotations

import argparse
import json

from deepseek_attn.cli.options import add_numerics_options


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("bench", help="time an attention layer", description="Time parts of a model.")
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    layer = what.add_parser(
        "layer",
        help="one attention layer, from hidden states to the output projection",
        description="Time attention layers with random weights and caches. The last line is one JSON document.",
    )
    layer.add_argument("--model", default="tiny", metavar="NAME|FILE", help="preset or config.json (default: tiny)")
    layer.add_argument("--layers", type=numbers, metavar="LIST", help="layer numbers (default: the first of each kind)")
    layer.add_argument("--batch", type=numbers, default=[1, 8], metavar="LIST", help="decode batches (default: 1,8)")
    layer.add_argument("--context", type=numbers, default=[1024], metavar="LIST", help="lengths (default: 1024)")
    layer.add_argument("--prefill", type=int, default=0, metavar="N", help="also N new tokens of one sequence")
    layer.add_argument("--backends", type=names, default=["auto"], metavar="LIST", help="default: auto")
    layer.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add_numerics_options(layer)
    layer.add_argument("--repeats", type=int, default=20, help="runs of each; the median counts (default: 20)")
    layer.set_defaults(run=run_layer)


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write integers with commas between them") from None


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def run_layer(args: argparse.Namespace) -> None:
    import torch

    from deepseek_attn.bench import fill_caches, time_layer
    from deepseek_attn.cli.info import collect
    from deepseek_attn.config import ModelConfig
    from deepseek_attn.runner import ModelRunner

    if args.repeats < 1 or args.prefill < 0:
        raise ValueError(f"--repeats {args.repeats}, --prefill {args.prefill}: at least 1 run, and no negative length")
    config = ModelConfig.from_pretrained(args.model)
    layers = args.layers or first_of_each_kind(config)
    steps = [(batch, 1, context) for context in args.context for batch in args.batch]
    if args.prefill:
        steps += [(1, args.prefill, max(context, args.prefill)) for context in args.context]
    rows = []
    head = f"{'layer':<12}{'kind':<7}{'backend':<22}{'mode':<9}{'batch':>6}{'context':>9}"
    print(f"{head}{'ms':>10}{'10 %':>10}{'90 %':>10}")
    for layer in layers:
        for backend in args.backends:
            torch.manual_seed(0)
            runner = ModelRunner.from_config(
                config, layers=[layer], attention_only=True, backend=backend,
                device=args.device, numerics=args.numerics, dtype=args.dtype,
                max_model_len=max(context for _, _, context in steps),
                max_num_seqs=max(args.batch), max_num_batched_tokens=max(max(args.batch), args.prefill, 256),
            )  # fmt: skip
            fill_caches(runner)
            for batch, tokens, context in steps:
                timing = time_layer(runner, layer, batch, tokens, context, args.repeats)
                rows.append(timing.row())
                print(
                    f"{timing.layer:<12}{timing.kind:<7}{timing.backend:<22}{timing.mode:<9}{batch:>6}{context:>9}"
                    f"{timing.milliseconds:>10.3f}{timing.low:>10.3f}{timing.high:>10.3f}",
                    flush=True,
                )
    facts = {key: value for key, value in collect().items() if "backends" not in key}
    run = {
        "numerics": runner.numerics.name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
    }
    print(json.dumps({"benchmark": "layer", "model": args.model, **run, "rows": rows, "environment": facts}))


def first_of_each_kind(config) -> list[int]:
    """The first layer of each kind of attention."""
    kinds: dict[str, int] = {}
    for spec in config.layers:
        kinds.setdefault(spec.kind, spec.index)
    return list(kinds.values())
