"""Prompts of DeepSeek-V4.1: all rows in all layers, beside only those that results need, in one process.

    python scripts/bench_prompts.py --lengths 8192 32768 131072 --chunk 8192 --out FILE

The model has the dimensions and layers of a preset, without its n-gram memory and its drafter, and random weights. All
layers share one layer's routed experts, so that V4.1-Flash fits on a GPU of 80 GB; which experts tokens choose differs
by layer. Modes:

    full         every layer computes every row
    trailing     upper layers compute the rows that the result at the prompt's end needs (docs/v41.md)
    approximate  upper layers compute one window of rows

``error`` compares the logits of the last token with those of ``full``, relative; the last column says how many of the
tokens decoded after it are equal. ``rounding`` is the error of ``full`` itself, in chunks of three quarters of the
size: products of other sizes round otherwise. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli.info import environment
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.trailing import trailing_parts
from deepseek_attn.layers.weights import CheckpointModule, WeightSlot
from deepseek_attn.models.deepseek_v41 import DeepseekV41Block
from deepseek_attn.models.moe import Experts, MoE
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions
from deepseek_attn.runner.trailing import TrailingRows
from deepseek_attn.utils.files import write_text

WITHOUT = {"engram_layer_ids": None, "num_nextn_predict_layers": 0, "dspark_target_layer_ids": None}


class BorrowedExperts(CheckpointModule):
    """Routed experts that compute with the weights of another layer's; its own stay in the checkpoint."""

    def __init__(self, own: Experts, lender: Experts):
        super().__init__()
        for linear in own.projections:
            linear.experts = 0  # so that all of the checkpoint's are another rank's
        self._slots, self.forward = list(own.slots()), lender.forward

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        return iter(self._slots)


@contextmanager
def shared_experts():
    """Context in which all layers of a model that is built share the routed experts of the first one."""
    first: list[Experts] = []

    class Shared(MoE):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            first.append(self.experts)
            if len(first) > 1:
                self.add_module("experts", BorrowedExperts(first.pop(), first[0]))

    own = DeepseekV41Block.experts_class
    DeepseekV41Block.experts_class = Shared
    try:
        yield
    finally:
        DeepseekV41Block.experts_class = own


def make_runner(args: argparse.Namespace) -> ModelRunner:
    config = ModelConfig.from_preset(args.model).replace(**WITHOUT)
    with shared_experts():
        return ModelRunner.from_source(
            config, RepeatingSource(config), device=args.device, max_num_seqs=1, progress=False,
            max_num_batched_tokens=args.chunk, max_model_len=max(args.lengths) + args.tokens,
        )  # fmt: skip


def modes_of(runner: ModelRunner) -> dict[str, TrailingRows | None]:
    specs, exact = runner.backbone_layers, runner.trailing
    if exact is None:
        raise SystemExit("this model's layers compute all rows of prompts: choose a preset of V4.1")
    parts = trailing_parts(specs, exact.window, approximate=True)
    return {"full": None, "trailing": exact, "approximate": replace(exact, parts=parts, approximate=True)}


def compute(runner: ModelRunner, prompt: list[int], chunk: int, tokens: int) -> tuple[float, torch.Tensor, list[int]]:
    """Seconds of a prompt, logits of its last token, and the tokens decoded after it."""
    sequence, logits = runner.sequence(prompt), None
    synchronize(runner)
    started = time.perf_counter()
    while sequence.num_pending:
        n = min(chunk, sequence.num_pending)
        [logits] = runner.step([(sequence, n)], StepOptions(ends=(len(prompt),))).rows
    synchronize(runner)
    seconds, decoded = time.perf_counter() - started, []
    assert logits is not None
    rows = logits
    for _ in range(tokens):
        decoded.append(int(rows.argmax()))
        sequence.append(decoded[-1])
        [rows] = runner.step([(sequence, 1)]).rows
    sequence.free()
    return seconds, logits, decoded


def synchronize(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="v41_flash", help="a preset of V4.1 (default: v41_flash)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens of the prompts")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to decode after each prompt")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs, after one that is not, of the first length")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    args = parser.parse_args()
    started = time.perf_counter()
    runner = make_runner(args)
    loaded = time.perf_counter() - started
    modes, draw, found = modes_of(runner), random.Random(0), []
    rows = [part.reach + 1 for part in runner.trailing.parts] if runner.trailing else []
    print(f"{runner}, loaded in {loaded:.0f} s; rows of upper layers: {rows}")
    print(f"{'tokens':>8} {'mode':<12}{'s':>9}{'of full':>9}{'error':>10}{'rounding':>10}{'equal tokens':>14}")
    for length in args.lengths:
        prompt = [draw.randrange(runner.config.vocab_size) for _ in range(length)]
        for mode, trailing in modes.items():
            runner.trailing = trailing
            if length == args.lengths[0]:
                compute(runner, prompt, args.chunk, args.tokens)  # compiles
            runs = [compute(runner, prompt, args.chunk, args.tokens) for _ in range(args.repeats)]
            seconds, logits, tokens = statistics.median(run[0] for run in runs), *runs[-1][1:]
            rounding = None
            if mode == "full":
                expected, expected_tokens, whole = logits, tokens, seconds
                if length == args.lengths[0]:
                    chunked = compute(runner, prompt, args.chunk * 3 // 4, 0)[1]
                    rounding = float((chunked - logits).norm() / logits.norm())
            error = float((logits - expected).norm() / expected.norm())
            pairs = enumerate(zip(tokens, expected_tokens, strict=True))
            equal = next((i for i, (token, other) in pairs if token != other), len(tokens))
            found.append({
                "length": length, "mode": mode, "seconds": seconds, "of_full": seconds / whole, "error": error,
                "rounding": rounding, "equal_tokens": equal,
            })  # fmt: skip
            print(
                f"{length:>8} {mode:<12}{seconds:>9.3f}{seconds / whole:>9.3f}{error:>10.2e}"
                f"{'' if rounding is None else f'{rounding:.2e}':>10}{equal:>10} of {len(tokens)}",
                flush=True,
            )
    document = json.dumps({
        "command": "bench_prompts", "model": args.model, "chunk": args.chunk, "shared": "routed experts of layer 0",
        "numerics": runner.numerics.name, "load_seconds": loaded, "environment": environment(), "results": found,
    })  # fmt: skip
    if args.out:
        write_text(args.out, document + "\n")
    print(document)


if __name__ == "__main__":
    main()
