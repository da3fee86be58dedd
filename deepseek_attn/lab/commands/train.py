"""``deepseek-attn train``: a small model from scratch, on text or on a long-range task."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_attn.cli.options import read_text
from deepseek_attn.cli.terminal import say, show

if TYPE_CHECKING:
    from tqdm.auto import tqdm

    from deepseek_attn.config.model import AnyConfig
    from deepseek_attn.lab.training.task import Task

STATE = ".training-state"  # suffix of the checkpoint directory's name
SYNTHETIC = ("recall", "needle", "copy", "variables", "common_words", "frequent_words")
FACTS_FILE = "training.json"  # file beside the checkpoint that describes its training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a small model and write it as a checkpoint. The last line is one JSON document."
    parser.add_argument("--config", default="small", metavar="NAME|FILE", help="preset or config.json (default: small)")
    parser.add_argument("--out", metavar="DIR", help="checkpoint directory to write; must be absent or empty")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 text to train on (default: the sample text)")
    what.add_argument("--task", choices=SYNTHETIC, help="train on a synthetic task instead of text")
    parser.add_argument(
        "--gap", type=int, default=64, help="tokens between a task's facts and its question (default: 64)"
    )
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: 600)")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step (default: 32)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens per sequence (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")
    parser.add_argument("--lr", type=float, default=0.004, help="peak learning rate (default: 0.004)")
    parser.add_argument("--weight-decay", type=float, default=1.0, help="weight decay of the matrices (default: 1.0)")
    parser.add_argument(
        "--mtp-steps", type=int, metavar="N", help="steps of the MTP layer, after the backbone's (default: --steps)"
    )
    parser.add_argument("--mtp-lr", type=float, metavar="LR", help="the MTP layer's learning rate (default: --lr)")
    parser.add_argument("--mtp-depth", type=int, metavar="N", help="drafts that it learns to make (default: 3)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="end the training, learning rate schedule included, within this time",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the interrupted training with the same options and --out"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    from deepseek_attn.checkpoint.write import check_new_directory
    from deepseek_attn.config.model import ModelConfig
    from deepseek_attn.config.options import pick_device
    from deepseek_attn.lab.training import MtpTraining, TextTask, make_task, save_checkpoint, train
    from deepseek_attn.lab.training.settings import check
    from deepseek_attn.lab.training.state import TrainingState

    if args.resume and not args.out:
        raise ValueError("--resume goes on from the state beside --out: name that folder")
    if args.resume and (facts := read_facts(Path(args.out))):
        say(f"{args.out} is complete")
        show(facts)
        return
    if args.out:
        check_new_directory(args.out)
    pick_device(args.device)
    config = ModelConfig.from_pretrained(args.config)
    mtp = MtpTraining(**mtp_options(args, config)).filled(args.steps, args.lr, args.weight_decay)
    sizes = {name: getattr(args, name) for name in ("steps", "batch", "seq_len", "seed", "lr", "weight_decay")}
    checked = {name: value for name, value in sizes.items() if name != "seed"}
    config = check(config, **checked, budget_s=args.budget, mtp=mtp)  # before a text is read
    if args.task:
        task = make_task(args.task, config.vocab_size, gap=args.gap)
    else:
        text = "\n\n".join(read_text("--text", file) for file in args.text) if args.text else None
        task = TextTask.from_text(text, vocab_size=config.vocab_size)
        say(f"text: {len(task.ids)} tokens, {len(task.parts['test'])} of them held out")
    state = None
    if args.out:
        made_of = {"config": config.to_dict(), "task": task_key(task), "mtp": asdict(mtp), "budget": args.budget}
        state = TrainingState(f"{os.path.normpath(args.out)}{STATE}", made_of | sizes, resume=args.resume)
    total = args.steps + (mtp.steps if config.mtp_layers else 0)
    with tqdm(total=total, unit="step", disable=None, dynamic_ncols=True) as bar:
        progress = partial(show_step, bar, args.steps)
        options = {"device": args.device, "budget_s": args.budget, "mtp": mtp, "progress": progress, "state": state}
        try:
            result = train(config, task, **sizes, **options)
        except KeyboardInterrupt:
            if state is not None and state.path.exists():
                say(f"\nstopped; the same command with --resume goes on from {state.path}")
            raise
    facts = {"config": args.config, "task": task.name} | sizes | {"steps": result.steps}
    facts |= {"seconds": round(result.seconds, 1), "tokens_per_second": round(result.tokens_per_second)}
    facts |= {"test": result.metrics, "losses": rounded(result.losses)}
    if result.mtp:
        record = {"steps": result.mtp.done, "seconds": round(result.mtp.seconds, 1)}
        facts["mtp"] = asdict(mtp) | record | {"losses": rounded(result.mtp.losses)}
    if args.out:
        tokenizer = getattr(task, "tokenizer", None)
        save_checkpoint(result.model, config, args.out, tokenizer, {FACTS_FILE: json.dumps(facts) + "\n"})
    if state is not None:
        state.remove()
    show(json.dumps(facts))


def read_facts(directory: Path) -> str | None:
    """The facts that `train` printed last for this checkpoint; None if it did not write the folder."""
    path = directory / FACTS_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def task_key(task: Task) -> str:
    """Identifies a task together with everything its batches depend on."""
    facts = {name: value for name, value in vars(task).items() if isinstance(value, (int, str, range))}
    ids = getattr(task, "ids", None)
    digest = "" if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return f"{task.name} {sorted(facts.items())} {digest}"


def mtp_options(args: argparse.Namespace, config: AnyConfig) -> dict[str, Any]:
    """The flags of the MTP layer's training that were given."""
    flags = {"steps": args.mtp_steps, "lr": args.mtp_lr, "depth": args.mtp_depth}
    given = {name: value for name, value in flags.items() if value is not None}
    if given and not config.num_nextn_predict_layers:
        names = ", ".join(f"--mtp-{name}" for name in given)
        raise ValueError(f"{names} need a config with an MTP layer: num_nextn_predict_layers is 0")
    return given


def rounded(losses: Sequence[tuple[int, *tuple[float, ...]]]) -> list[tuple[int, float]]:
    return [(step, round(loss, 4)) for step, loss, *_ in losses]


def show_step(bar: tqdm, steps: int, step: int, loss: float) -> None:
    """Advances the bar, or without a terminal prints a line. Steps above ``steps`` train the MTP layer."""
    what = f"step {step} of {steps}" if step <= steps else f"MTP step {step - steps}"
    bar.set_description(f"{'training' if step <= steps else 'MTP layer'}, loss {loss:.3f}", refresh=False)
    bar.update(step - bar.n)
    if bar.disable:
        say(f"{what}: loss {loss:.3f}")
