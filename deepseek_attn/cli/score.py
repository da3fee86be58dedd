"""``deepseek-attn score``: teacher-forced logits or log-probabilities of token-id lists, to a safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_attn.cli.load_report import add_report_option, show_report
from deepseek_attn.cli.options import HUB_ID, add_runner_options, layer_numbers, runner_options
from deepseek_attn.cli.records import check_replay, replay_file
from deepseek_attn.cli.terminal import show
from deepseek_attn.utils.garbage import without_collections
from deepseek_attn.utils.json_files import read_json

if TYPE_CHECKING:
    import torch

    from deepseek_attn.runner.logprobs import TokenLogprobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = 'Write the logits of given tokens: tensor "i" is float32 [len_i, vocab] for the i-th list.'
    parser.add_argument("--model", required=True, metavar="DIR|ID", help=f"checkpoint directory or {HUB_ID}")
    parser.add_argument("--token-ids", required=True, metavar="FILE", help="JSON: a list of token-id lists")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write")
    parser.add_argument(
        "--records",
        metavar="DIR",
        help="also write the experts and selected entries of list i to i.safetensors in this folder",
    )
    parser.add_argument(
        "--replay",
        metavar="DIR|FILE",
        help="compute with the experts and entries of --records in this folder, or of a single list in this file",
    )
    parser.add_argument(
        "--chunk-size", type=int, metavar="N", help="new tokens per sequence and step (1: token by token)"
    )
    parser.add_argument(
        "--mtp",
        action="store_true",
        help='also write the MTP logits "i.mtp" [len_i - 1, vocab]; row t has also seen token t + 1',
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="instead of logits, of each token but the first: its log-probability and rank, and the K most likely "
        'tokens in its place: "i.logprobs", "i.ranks", "i.top_ids" and "i.top_logprobs" [len_i - 1 (, K)]',
    )
    parser.add_argument(
        "--layers", type=layer_numbers, metavar="LIST", help="run only these backbone layers, for instance 0,1,5-7"
    )
    add_runner_options(parser)
    add_report_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    with without_collections():  # the first import of torch
        from deepseek_attn.checkpoint.hub import PretrainedSource
        from deepseek_attn.runner.model_runner import ModelRunner
        from deepseek_attn.runner.replay import Replay
        from deepseek_attn.runner.sequence import TokenLimits
        from deepseek_attn.runner.token_records import ChoosingLayers, TokenRecords, record_path
    from deepseek_attn.utils.files import check_output, write_tensors

    if args.mtp and (args.records is not None or args.replay is not None):
        raise ValueError("--mtp: the MTP layer's choices are not recorded; run it without --records and --replay")
    if args.logprobs is not None and args.records is not None:
        raise ValueError("--records beside --logprobs: run score twice, once with each")
    if args.mtp and args.layers:
        raise ValueError(
            "--mtp needs the whole model: the MTP layer reads the hidden states of the last layer; drop --layers"
        )
    if args.logprobs is not None and args.mtp:
        raise ValueError("--mtp writes logits, --logprobs log-probabilities instead of logits: give one of them")
    out = Path(args.out)
    check_output(out, "--out")
    options = runner_options(args)
    prompts = read_token_lists(Path(args.token_ids))
    if args.records is not None:
        record_path(args.records, "0")
    check_replay(args.replay, f"{len(prompts)} lists need" if len(prompts) > 1 else None)
    replay = (
        None if args.replay is None else [TokenRecords.load(replay_file(args.replay, i)) for i in range(len(prompts))]
    )
    source = PretrainedSource(args.model, args.layers)
    limits = TokenLimits.of(source.config, args.max_model_len)
    choosing = ChoosingLayers.of_config(source.config, args.layers)
    for i, ids in enumerate(prompts):
        try:
            limits.checked(ids)
            if replay is not None:
                Replay.create(replay[i], choosing, ids)
        except ValueError as error:
            raise ValueError(f"--token-ids {args.token_ids}: list {i}: {error}") from None
    if args.mtp and source.config.dspark is not None:
        raise ValueError("--mtp: the drafter is DSpark, which has no logits of single tokens")
    with source:
        runner = ModelRunner.from_source(
            source.config, source, layers=args.layers, expected_drafts=int(args.mtp), **options
        )
    show_report(runner, args)
    total = f"{len(prompts)} sequences, {sum(map(len, prompts))} tokens -> {out}"
    if args.logprobs is not None:
        scored = runner.score_logprobs(prompts, args.logprobs, args.chunk_size, replay=replay, progress=True)
        write_tensors(out, logprobs_tensors(scored))
        show(total)
        return
    drafts = []
    if args.mtp:
        logits, drafts = runner.score_mtp(prompts, args.chunk_size, progress=True)
    elif args.records is not None:
        record = runner.record_options(routes=True, selections=any(spec.has_indexer for spec in runner.config.layers))
        logits, _ = runner.score_records(
            prompts, record, args.chunk_size, directory=args.records, replay=replay, progress=True
        )
    else:
        logits = runner.score(prompts, args.chunk_size, replay=replay, progress=True)
    tensors = {str(i): rows for i, rows in enumerate(logits)}
    tensors |= {f"{i}.mtp": rows for i, rows in enumerate(drafts)}
    write_tensors(out, tensors)
    show(total)


def logprobs_tensors(texts: list[TokenLogprobs]) -> dict[str, torch.Tensor]:
    """Tensors of the file by name: ``0.logprobs``, ``0.ranks``, ... for list 0."""
    import torch

    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return {f"{i}.{name}": torch.from_numpy(getattr(text, name)) for i, text in enumerate(texts) for name in names}


def read_token_lists(path: Path) -> list[list[int]]:
    """The token-id lists of a JSON file; each must be a non-empty list of integers."""
    try:
        lists = read_json(path, f"--token-ids {path}", max_bytes=None)
    except OSError as error:
        raise ValueError(f"--token-ids {path}: {error.strerror}") from None
    if not isinstance(lists, list) or not lists or not all(isinstance(ids, list) for ids in lists):
        raise ValueError(
            f"--token-ids {path}: expected a non-empty list of token-id lists, such as [[0, 17, 5], [0, 8]]"
        )
    for i, ids in enumerate(lists):
        wrong = [token for token in ids if not isinstance(token, int) or isinstance(token, bool)]
        if wrong or not ids:
            reason = (
                f"{wrong[0]!r} is not an integer" if wrong else "it is empty, and a sequence needs at least one token"
            )
            raise ValueError(f"--token-ids {path}: list {i}: {reason}")
    return lists
