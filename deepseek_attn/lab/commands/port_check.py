"""``deepseek-attn port-check``: compares another implementation's results with golden results of small models."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepseek_attn.cli.options import HUB_ID, layer_numbers
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.sizes import show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare another implementation with golden results of small models, op by op: lists the fixtures, writes them "
        "as safetensors files beside checkpoints of their models, or compares a file of results with one of them. Exit "
        "code 1: an op differs, and the first one is named."
    )
    parser.add_argument(
        "fixtures", nargs="*", metavar="FIXTURE", help="name that --list shows, or a file that --write wrote"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the fixtures, or the ops of the named fixtures")
    what.add_argument("--write", metavar="DIR", help="write the named fixtures (default: all) to a directory")
    what.add_argument("--outputs", metavar="FILE", help="safetensors file with results by name of op")
    parser.add_argument(
        "--numerics",
        choices=("float32", "official", "official_float32"),
        default="float32",
        help="of --outputs: float32; official: bfloat16 with DeepSeek's quantised inputs and caches; official_float32, "
        "of whole models: these quantisers and float32 between them (default: float32)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help=f"with --write: fixtures of this checkpoint's layers instead; folder or {HUB_ID}",
    )
    parser.add_argument(
        "--layers", type=layer_numbers, metavar="LIST", help="attention layers of --model, for instance 0,2,5-7"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.layers is None) or (args.model and not args.write):
        raise ValueError("--model goes with --layers and --write DIR")
    if args.list:
        return _list(args.fixtures)
    if args.write:
        return _write(args)
    return _compare(args)


def _list(fixtures: list[str]) -> int:
    from deepseek_attn.testing import golden
    from deepseek_attn.testing.golden_compare import about

    for name in fixtures or golden.names():
        if not fixtures:
            show(f"{name:<24}{golden.CASES[name].about}")
            continue
        fixture = golden.load(name)
        show(f"{fixture.name}: {fixture.about}, of deepseek-attn {fixture.version}")
        for op in dict.fromkeys(op for ops in fixture.results.values() for op in ops):
            limits = [fixture.tolerance(op, numerics) for numerics, ops in fixture.results.items() if op in ops]
            show(f"  {op:<28}{' / '.join(f'{limit:.0e}' for limit in limits):<16}{about(op)}")
    return 0


def _write(args: argparse.Namespace) -> int:
    from deepseek_attn.testing import golden

    if args.model is None:
        written = golden.write(args.write, args.fixtures)
    else:
        from deepseek_attn.checkpoint.hub import PretrainedSource
        from deepseek_attn.utils.files import appearing

        if args.fixtures:
            raise ValueError("--model: its layers are named by --layers, not as fixtures")
        fixtures = {}
        for layer in args.layers:
            with PretrainedSource(args.model) as source:
                source.layers, source.attention_only = source.config.with_sources([layer]), True
                fixtures[layer] = golden.of_checkpoint(source.config, source, layer)
        names = [f"layer_{layer}.safetensors" for layer in fixtures]
        with appearing(Path(args.write), directory=True, into=True) as folder:
            for name, fixture in zip(names, fixtures.values(), strict=True):
                fixture.save(folder / name)
        written = [Path(args.write) / name for name in names]
    for path in written:
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        show(f"{path}: {show_bytes(size)}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from deepseek_attn.testing import golden

    if len(args.fixtures) != 1:
        raise ValueError("--outputs FILE is compared with one fixture: name it")
    fixture = golden.load(args.fixtures[0])
    if args.numerics not in fixture.results:
        raise ValueError(f"--numerics {args.numerics}: {fixture.name} has {', '.join(fixture.results)}")
    results = golden.differences(fixture, golden.read_outputs(args.outputs), args.numerics)
    show(f"{'op':<30}{'difference':>12}{'allowed':>10}")
    for result in results:
        verdict = "ok" if result.passed else "differs"
        show(f"{result.op:<30}{result.difference:>12.1e}{result.tolerance:>10.0e}  {verdict}")
    missing = [op for op in fixture.results[args.numerics] if op not in {result.op for result in results}]
    if missing:
        show(f"not given: {', '.join(missing)}")
    wrong = [result for result in results if not result.passed]
    if wrong:
        show(f"first op that differs: {wrong[0]}")
    return 1 if wrong else 0
