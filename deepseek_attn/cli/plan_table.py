"""``deepseek-attn info --plans``: the kernels of a model's steps on a GPU, with the reason for each choice."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from deepseek_attn.cli.options import GPU_NAMES
from deepseek_attn.cli.terminal import show
from deepseek_attn.cli.warmup import read_headers
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.config.options import check_sizes, pick_dtype
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import NOT_MEASURED
from deepseek_attn.runner.step_plans import PlanLine, StepPlans, step_plans

WIDTH = 160
DECODE, PREFILL, OP, KERNEL = 15, 11, 34, 36  # widths of columns; the column of tiles has no fixed width


def show_plans(args: argparse.Namespace) -> None:
    """Prints the table, or one JSON document.

    Raises:
        ValueError: no GPU is named and this machine has no GPU, or the model does not support the sizes.
    """
    if args.gpu is None and not torch.cuda.is_available():
        raise ValueError(f"--plans: there is no GPU here: name one with --gpu {GPU_NAMES} or for instance 9.0:132")
    (config, headers), cuda = read_headers(args.plans), torch.device("cuda")
    batches, prefills = args.batch or [1, 8, 32, 128], args.prefill or []
    most = config.max_position_embeddings
    context = min(8192, most) if args.context is None else args.context
    for flag, lengths in (("--context", [context]), ("--prefill", prefills)):
        if max(lengths, default=0) > most:
            raise ValueError(f"{flag} {max(lengths)}: a sequence has at most {most} tokens")
    check_sizes(config, None, context, max(batches), max(*batches, *prefills, 256), 16)
    target, dtype = args.gpu or gpu(cuda), pick_dtype(args.dtype, cuda)
    numerics = numerics_for(config, args.numerics or "serving", args.index_keys)
    options = AttentionOptions(args.backend or "auto")
    chosen = {"numerics": numerics, "dtype": dtype, "attention": options, "gpu": target}
    try:
        plans = step_plans(config, headers, batches, context, prefills, **chosen)
    except NotImplementedError as error:  # warned by torch about ops whose result sizes depend on values
        raise ValueError(
            f"--plans {args.plans}: some ops of this model's steps run in plain torch with these options, and "
            f"cannot be run on tensors without memory ({str(error).partition(':')[0]})"
        ) from error
    facts = {
        "model": args.plans, "capability": list(target.capability), "multiprocessors": target.multiprocessors,
        "numerics": numerics.name, "dtype": str(dtype).removeprefix("torch."), "context": context,
        "batches": batches, "prefills": prefills,
    }  # fmt: skip
    if args.json:
        trailing = [vars(part) for part in plans.trailing]
        show(json.dumps(facts | {"layers": plans.layers, "trailing": trailing, "kernels": plans.as_json()}))
        return
    major, minor = target.capability
    show(
        f"{args.plans} on compute capability {major}.{minor} with {target.multiprocessors} multiprocessors, "
        f"{context} tokens of context; {numerics.name} numerics, {facts['dtype']}"
    )
    show(f"{'decode':<{DECODE}}{'prefill':<{PREFILL}}{'op':<{OP}}{'kernel':<{KERNEL}}tiles, splits")
    if rows := plans.trailing:
        counts = ", ".join(f"{part.reach:,} from layer {part.layer} on" for part in rows if not part.queries_only)
        text = f"prefill, for results at its end: rows before it that upper layers compute: {counts}"
        for line in textwrap.wrap(text, WIDTH):
            show(line)
    for line in table(plans):
        show(line)
    choices = {line for _, line in plans.counts if line.source}
    measured = sum(line.source != NOT_MEASURED for line in choices)
    show(f"\n{measured} of {len(choices)} choices are measured; sources are files in docs/data and keys of them")


def table(plans: StepPlans) -> Iterator[str]:
    """Lines of the table: one section per group of step parts that share kernels."""
    for parts, rows in plans.groups().items():
        title = "all layers" if set(parts) == set(plans.layers) and len(parts) > 1 else "; ".join(parts)
        yield from ("", *textwrap.wrap(title, WIDTH))
        for line, counts in rows:
            yield from row(line, counts, plans.steps)


def row(line: PlanLine, counts: Counter[str], steps: Sequence[str]) -> Iterator[str]:
    """The line of a kernel, then the reason for it."""
    sizes = ["", ""]
    for at, kind in enumerate(("decode ", "prefill ")):
        known = [step for step in steps if step.startswith(kind)]
        found = [step.removeprefix(kind) for step in known if counts[step]]
        sizes[at] = "all" if found and len(found) == len(known) > 1 else ",".join(found)
    times = max(counts.values())
    kernel = line.kernel + (f" x{times}" if times > 1 else "")
    cells = ((f"  {sizes[0]}", DECODE), (sizes[1], PREFILL), (line.op or "(no plan)", OP), (kernel, KERNEL))
    head = "".join(f"{text:<{width - 1}} " for text, width in cells)
    tiles = textwrap.wrap(f"{line.config} {line.derived}".strip(), WIDTH - len(head)) or [""]
    yield (head + tiles[0]).rstrip()
    for rest in tiles[1:]:
        yield " " * len(head) + rest
    if line.condition:
        indent = " " * (DECODE + PREFILL)
        yield from textwrap.wrap(
            f"because {line.condition}; source: {line.source}", WIDTH, initial_indent=indent, subsequent_indent=indent
        )
