"""``deepseek-attn inspect``: an HTML page of the attention weights of a prompt's tokens."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from deepseek_attn.cli.generate import default_checkpoint, read_prompt
from deepseek_attn.cli.load_report import add_report_option, show_report
from deepseek_attn.cli.options import (
    HUB_ID,
    add_attention_options,
    add_numerics_options,
    layer_numbers,
    numbers,
    runner_options,
)
from deepseek_attn.cli.terminal import show
from deepseek_attn.config.defaults import DEFAULT_TOP_READS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a page, and its numbers as JSON, that show which keys the tokens of a prompt read: the attention of "
        "each layer and head to the sink, the window and compressed entries, and the indexers' choices."
    )
    parser.add_argument(
        "--model", metavar="DIR|ID", help=f"checkpoint directory or {HUB_ID} (default: the small one in the package)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=str, help="text; `-`, or no prompt with piped input, reads standard input")
    source.add_argument("--token-ids", type=numbers, metavar="IDS", help="comma-separated token ids instead of text")
    parser.add_argument("--out", required=True, metavar="FILE", help="HTML file to write")
    parser.add_argument("--json", metavar="FILE", help="JSON file to write (default: the name of --out, with .json)")
    parser.add_argument(
        "--queries",
        metavar="LIST",
        help="positions of the tokens to record, such as 0,100-149; --queries=-1 is the last one "
        "(default: all, or the last ones of a long prompt)",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=DEFAULT_TOP_READS,
        metavar="N",
        help=f"tokens and entries kept per query, layer and head (default: {DEFAULT_TOP_READS})",
    )
    parser.add_argument(
        "--layers",
        type=layer_numbers,
        metavar="LIST",
        help="inspect only these layers, for instance 0,1,5-7 (default: all)",
    )
    group = parser.add_argument_group("running")
    group.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add_numerics_options(group)
    add_attention_options(group)
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=1024, metavar="N", help="new tokens per step (default: 1024)"
    )
    add_report_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from deepseek_attn.checkpoint.hub import PretrainedSource
    from deepseek_attn.lab.inspect import inspect_attention, token_texts, write_page
    from deepseek_attn.lab.inspect.inspection import choose_reads
    from deepseek_attn.lab.inspect.records import MADE_BY
    from deepseek_attn.runner.model_runner import ModelRunner
    from deepseek_attn.runner.sequence import TokenLimits
    from deepseek_attn.text.tokenizer import TOKENIZER_FILE, Tokenizer
    from deepseek_attn.utils.files import check_output, check_replaceable

    out = Path(args.out)
    check_output(out, "--out")
    if args.json is None and out.exists() and not out.is_file():
        raise ValueError(
            f"--out {out}: it is not a regular file, so the numbers need a file name of their own: pass --json FILE"
        )
    json_path = Path(args.json) if args.json else out.with_suffix(".json")
    check_output(json_path, "--json")
    if args.json is None:  # a default name, not given by the user
        check_replaceable(json_path, MADE_BY)
    if os.path.realpath(out) == os.path.realpath(json_path):
        raise ValueError(
            f"--out {out}: the JSON is written to {json_path}; name an .html file, or another one by --json"
        )
    ranges, options = parse_positions(args.queries), runner_options(args)
    prompt, model = read_prompt(args), args.model or default_checkpoint()
    source = PretrainedSource(model)
    config, tokenizer = source.config, None
    if (source.directory / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer(source.directory)
        tokenizer.check_ids(config.vocab_size)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{source.directory} has no tokenizer.json: give the prompt by --token-ids")
        prompt = tokenizer.encode_prompt(prompt, config.max_position_embeddings)
    TokenLimits.of(config, len(prompt)).checked(prompt)
    options.update(max_model_len=len(prompt), max_num_seqs=1, max_snapshots=0)
    queries = None if ranges is None else expand(ranges, len(prompt))
    # report wrong choices before the weights are loaded
    choice = choose_reads(config, config.layers, len(prompt), queries, args.top, args.layers)
    runner = ModelRunner.from_pretrained(model, **options)
    show_report(runner, args)
    found = inspect_attention(
        runner, prompt, queries=choice.queries, top=choice.top, layers=choice.layers, progress=True
    )
    text = None if tokenizer is None else token_texts(tokenizer, prompt)
    write_page(found, out, json_path, text, f"What tokens read in {Path(model).name}")
    show(f"{len(found.queries)} of {len(prompt)} tokens, {len(found.layers)} layers -> {out}, {json_path}")


def parse_positions(text: str | None) -> list[range] | None:
    """``0,100-149,-1`` -> ranges of positions; ValueError for anything else."""
    if text is None:
        return None
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?[0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last or (match is not None and match[2] and first < 0):
            raise ValueError(
                f"--queries {text!r:.80}: write positions and ranges with commas between them: 0,100-149,-1"
            )
        ranges.append(range(first, last + 1))
    return ranges


def expand(ranges: list[range], length: int) -> list[int]:
    """The positions of ``ranges``; ValueError for a position outside a prompt of ``length`` tokens."""
    for positions in ranges:
        if not -length <= positions.start <= positions[-1] < length:
            outside = positions.start if positions.start < -length else positions[-1]
            raise ValueError(f"--queries: {outside} is not a position of a prompt of {length} tokens")
    return [position for positions in ranges for position in positions]
