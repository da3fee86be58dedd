"""``deepseek-attn bench``: times of ops, layers, steps, decoding and structured output; memory of a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepseek_attn.cli.load_report import add_report_option
from deepseek_attn.cli.options import (
    HUB_ID,
    add_deterministic_option,
    add_numerics_options,
    fractions,
    layer_numbers,
    names,
    numbers,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time parts of a model on this machine, with random data. The last line is one JSON document."
    parser.set_defaults(run=run)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    op = what.add_parser(
        "op", help="single ops, compared with other implementations and with this machine's peak rates"
    )
    op.add_argument("--ops", type=names, metavar="LIST", help="op names or parts of them (default: all)")
    op.add_argument("--rows", type=names, metavar="LIST", help="parts of row labels (default: all)")
    layer = what.add_parser("layer", help="one attention layer, from hidden states to the output projection")
    add_layers_option(layer, "the first of each kind")
    layer.add_argument(
        "--query-tokens", type=numbers, default=[1], metavar="LIST",
        help="new tokens of a request in a decode step: 1 and the drafts (default: 1)",
    )  # fmt: skip
    layer.add_argument(
        "--instances", type=int, default=1, metavar="N",
        help="layers of a kind that alternate, so that no call finds its weights in the L2 cache (default: 1)",
    )  # fmt: skip
    layer.add_argument("--backends", type=names, default=["auto"], metavar="LIST", help="default: auto")
    model = what.add_parser("model", help="steps of a model, from token ids to logits, and their stages")
    add_layers_option(model, "all")
    model.add_argument("--experts", type=int, metavar="N", help="routed experts per layer (default: the model's)")
    model.add_argument("--backend", default="auto", help="default: auto")
    model.add_argument("--eager", action="store_true", help="with --graph: time the same steps without graphs, too")
    add_deterministic_option(model)
    add_tune_parser(what)
    add_engine_parser(what)
    add_structured_parser(what)
    add_memory_parser(what)
    for part in (layer, model):
        part.add_argument(
            "--model", default="tiny", metavar="NAME|FILE|ID", help=f"preset, config.json or {HUB_ID} (default: tiny)"
        )
        part.add_argument(
            "--batch", type=numbers, default=[1, 8], metavar="LIST", help="batch sizes of decode steps (default: 1,8)"
        )
        part.add_argument(
            "--context", type=numbers, default=[1024], metavar="LIST", help="context lengths (default: 1024)"
        )
        part.add_argument(
            "--prefill", type=numbers, default=[], metavar="LIST", help="also time prefills of these lengths"
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


def add_layers_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--layers", type=layer_numbers, metavar="LIST", help=f"layer numbers, such as 0,5-7 (default: {default})"
    )


def add_tune_parser(what: argparse._SubParsersAction) -> None:
    tune = what.add_parser(
        "tune",
        help="the rows of kernels' launch tables side by side on this GPU, in steps of a model: data for plan.py",
    )
    tune.add_argument(
        "family", metavar="FAMILY", help="families of kernels, or tables of them: linear,moe.combine; or all"
    )
    tune.add_argument(
        "--model",
        default="v4_flash",
        metavar="NAME|FILE|ID",
        help=f"preset, config.json or {HUB_ID} (default: v4_flash)",
    )
    add_layers_option(tune, "the first of each kind")
    tune.add_argument("--experts", type=int, metavar="N", help="routed experts per layer (default: the model's)")
    tune.add_argument(
        "--batch", type=numbers, default=[1, 8, 32, 128], metavar="LIST",
        help="batch sizes of decode steps (default: 1,8,32,128)",
    )  # fmt: skip
    tune.add_argument("--context", type=numbers, default=[8192], metavar="LIST", help="context lengths (default: 8192)")
    tune.add_argument(
        "--prefill", type=numbers, default=[512, 8192], metavar="LIST", help="lengths of prefills (default: 512,8192)"
    )
    tune.add_argument(
        "--nearest", type=int, metavar="N", help="only the N rows before and after the selected row (default: all)"
    )
    tune.add_argument(
        "--minutes", type=float, metavar="N", help="time no further problem after N minutes (default: time all)"
    )
    tune.add_argument("--repeats", type=int, default=20, help="rounds of replays of each row (default: 20)")
    tune.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the JSON document to FILE, after each measured problem"
    )
    add_numerics_options(tune)
    tune.set_defaults(plot=None)


def add_engine_parser(what: argparse._SubParsersAction) -> None:
    engine = what.add_parser(
        "engine", help="greedy decoding with and without drafts, log-probabilities and structured output, alternately"
    )
    engine.add_argument(
        "--model", metavar="DIR|ID|NAME|FILE",
        help=f"checkpoint directory or {HUB_ID}, or a preset or config.json to fill with random weights (default: the "
        "small checkpoint in the package)",
    )  # fmt: skip
    engine.add_argument("--layers", type=int, metavar="N", help="first N layers of a preset or config.json")
    engine.add_argument("--experts", type=int, metavar="N", help="routed experts per layer of a preset or config.json")
    engine.add_argument("--backend", default="auto", help="default: auto")
    engine.add_argument(
        "--batch", type=numbers, default=[1, 8, 32], metavar="LIST", help="requests at a time (default: 1,8,32)"
    )
    engine.add_argument(
        "--drafts", type=numbers, metavar="LIST",
        help="numbers of drafts per step, compared with no drafts (default: 1,2,3, or 0 where nothing drafts)",
    )  # fmt: skip
    engine.add_argument(
        "--acceptance", type=fractions, metavar="LIST",
        help="accept drafts at random with each of these probabilities if all earlier ones are accepted (default: "
        "compare them with the model's tokens); needs CUDA graphs",
    )  # fmt: skip
    engine.add_argument(
        "--logprobs", type=int, metavar="K", help="also with log-probabilities of each token and the K likeliest"
    )
    engine.add_argument("--structured", action="store_true", help="also with a JSON schema for the text")
    engine.add_argument("--eager", action="store_true", help="also time steps without their CUDA graphs")
    add_deterministic_option(engine)
    engine.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens of a prompt (default: 64)")
    engine.add_argument("--tokens", type=int, default=128, metavar="N", help="new tokens of a request (default: 128)")
    engine.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    engine.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed runs per variant, after a warm-up (default: 3)",
    )
    add_numerics_options(engine)
    add_report_option(engine)
    engine.set_defaults(plot=None)


def add_structured_parser(what: argparse._SubParsersAction) -> None:
    structured = what.add_parser(
        "structured", help="cost of structured output per token: the mask on the host, applying it on the device"
    )
    structured.add_argument(
        "--model", metavar="DIR", help="folder with a tokenizer.json (default: pieces of the sample text)"
    )
    structured.add_argument(
        "--vocab", type=int, default=129280, metavar="N", help="tokens of the model's vocabulary (default: 129280)"
    )
    structured.add_argument("--tokens", type=int, default=300, metavar="N", help="tokens of a text (default: 300)")
    structured.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    structured.set_defaults(plot=None)


def add_memory_parser(what: argparse._SubParsersAction) -> None:
    memory = what.add_parser("memory", help="peak memory of a GPU in a run, by part: predicted by `plan`, and measured")
    memory.add_argument(
        "--model", default="v4_flash", metavar="NAME|FILE|ID",
        help=f"preset, config.json or {HUB_ID}, filled with random weights (default: v4_flash)",
    )  # fmt: skip
    memory.add_argument("--layers", type=int, default=6, metavar="N", help="first N layers (default: 6)")
    memory.add_argument("--experts", type=int, default=64, metavar="N", help="routed experts (default: 64)")
    memory.add_argument(
        "--limits", type=names, default=["16384:8:2048", "65536:4:4096", "8192:64:8192"], metavar="LIST",
        help="max_model_len:max_num_seqs:max_num_batched_tokens of each run "
        "(default: 16384:8:2048,65536:4:4096,8192:64:8192)",
    )  # fmt: skip
    memory.set_defaults(plot=None)


def run(args: argparse.Namespace) -> None:
    """Checks the flags before torch is imported, then runs the chosen benchmark."""
    check_flags(args)
    from deepseek_attn.lab.commands import bench_runs as runs  # imports torch

    commands = {
        "op": runs.run_ops, "layer": runs.run_layer, "model": runs.run_model, "engine": runs.run_engine,
        "memory": runs.run_memory, "tune": runs.run_tune, "structured": runs.run_structured,
    }  # fmt: skip
    commands[args.what](args)


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for files that would fail only after the timing."""
    from deepseek_attn.utils.files import check_output

    if args.what == "tune" and args.out:
        check_output(args.out, "--out")
    if args.plot:
        from deepseek_attn.lab.bench.plots import check_picture

        check_output(args.plot, "--plot")
        check_picture(args.plot)
