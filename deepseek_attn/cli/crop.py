"""``deepseek-attn crop``: a smaller checkpoint of some layers and experts."""

from __future__ import annotations

import argparse

from deepseek_attn.cli.options import HUB_ID, layer_numbers, names
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.sizes import show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write some layers and experts of a checkpoint as a checkpoint of the same format, for tests of layers: kept "
        "tensors byte for byte, router and hash tables over the kept experts, a config that fits, the tokenizer."
    )
    parser.add_argument("--model", required=True, metavar="DIR", help=f"checkpoint folder or {HUB_ID}")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write; must be absent or empty")
    parser.add_argument(
        "--layers",
        type=layer_numbers,
        metavar="LIST",
        help="backbone layers to keep, for instance 0,2,5-7 (default: all)",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="routed experts to keep in each layer (default: all); V3: in all groups",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="keep the first N tokens, without a tokenizer (default: all)"
    )
    parser.add_argument(
        "--without", type=names, default=[], metavar="LIST", help="parts to leave out: mtp, engram, vision"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a directory that an earlier crop wrote")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from deepseek_attn.checkpoint.crop import crop_checkpoint

    if args.layers is None and args.experts is None and args.vocab_size is None and not args.without:
        raise ValueError("nothing to crop: give --layers, --experts, --vocab-size or --without")
    options = {name: getattr(args, name) for name in ("layers", "experts", "vocab_size", "without", "overwrite")}
    crop = crop_checkpoint(args.model, args.out, **options)
    plan, config = crop.plan, crop.plan.config
    show(
        f"{crop.path}: {crop.tensors} tensors, {show_bytes(crop.nbytes)}; {len(plan.layers)} of "
        f"{config.num_hidden_layers} layers, {len(plan.experts)} of {config.n_routed_experts} experts"
    )
    for note in plan.notes:
        show(note)
