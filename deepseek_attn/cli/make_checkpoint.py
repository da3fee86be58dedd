"""``deepseek-attn make-checkpoint``: random weights in exactly the published format."""

from __future__ import annotations

import argparse

from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.sizes import show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint with random weights: shards, index, config and tokenizer."
    parser.add_argument("--config", default="tiny", metavar="NAME|FILE", help="preset or config.json (default: tiny)")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write; must be absent or empty")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--shards", type=int, metavar="N", help="number of shards (default: by size, at least 2)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from deepseek_attn.checkpoint.random import RandomSource
    from deepseek_attn.checkpoint.write import write_checkpoint
    from deepseek_attn.config.model import ModelConfig

    config = ModelConfig.from_pretrained(args.config)
    source = RandomSource(config, args.seed)
    path = write_checkpoint(source, config, args.out, num_shards=args.shards)
    entries = source.entries()
    show(
        f"{path}: {len(entries)} tensors, {show_bytes(sum(info.nbytes for info in entries.values()))}, seed {args.seed}"
    )
