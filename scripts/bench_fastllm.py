"""Side by side with fastllm on a CPU: one request at a time, its prompt and the tokens decoded after it.

    python scripts/bench_fastllm.py [--python PYTHON] [--model DIR] [--prompt 1024] [--decode 64] [--threads 1]

PYTHON is an interpreter with the packages ftllm, pillow and transformers. Each program runs in a process of its own
and waits while the other computes; both continue the same random tokens greedily, after a round that is not timed.
fastllm loads the weights as float16, deepseek-attn computes in float32. How many greedy tokens agree before the first
difference is printed: few show that results differ, though not which is right. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

Serve = Callable[[list[int], int], tuple[float, float, list[int]]]
"""Of a prompt and a number of new tokens: seconds to the first one, seconds per token after it, the tokens."""


def load_fastllm(args: argparse.Namespace) -> Serve:
    import ctypes

    from ftllm import llm  # pyright: ignore[reportMissingImports]  # pip install ftllm

    llm.set_cpu_threads(args.threads)
    model, lib = llm.model(args.model, dtype="float16"), llm.fastllm_lib
    model.set_save_history(False)  # else a prompt's prefix is not computed again
    false, one, first_one = ctypes.c_bool(False), ctypes.c_float(1), ctypes.c_int(1)
    sampling = false, one, first_one, one, one, false  # of the likeliest token alone: greedy

    def serve(prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        start, first, tokens = time.perf_counter(), 0.0, []
        ids = (ctypes.c_int * len(prompt))(*prompt)
        sizes = ctypes.c_int(count), ctypes.c_int(0)
        request = lib.launch_response_llm_model(
            model.model, len(prompt), ids, *sizes, *sampling, *model.stop_token_ctypes(None)
        )
        while (token := lib.fetch_response_llm_model(model.model, request)) > -1:
            first = first or time.perf_counter()
            tokens.append(token)
        return first - start, (time.perf_counter() - first) / max(1, len(tokens) - 1), tokens

    return serve


def load_ours(args: argparse.Namespace) -> Serve:
    import torch

    from deepseek_attn import ModelRunner
    from deepseek_attn.runner.step import StepOptions

    torch.set_num_threads(args.threads)
    runner = ModelRunner.from_pretrained(
        args.model, device="cpu", max_model_len=args.prompt + args.decode, max_num_batched_tokens=args.prompt,
        progress=False,
    )  # fmt: skip

    def serve(prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        sequence, first, tokens = runner.sequence(prompt), 0.0, []
        start = time.perf_counter()
        for i in range(count):
            chosen = runner.step([(sequence, 1 if i else len(prompt))], StepOptions(greedy=True)).tokens
            assert chosen is not None
            tokens.append(chosen()[0][0])
            first = first or time.perf_counter()
            sequence.append(tokens[-1])
        end = time.perf_counter()
        sequence.free()
        return first - start, (end - first) / max(1, count - 1), tokens

    return serve


PROGRAMS = {"fastllm": (load_fastllm, "ftllm"), "deepseek-attn": (load_ours, "deepseek-attn")}


def work(args: argparse.Namespace) -> None:
    """Answers requests, JSON lists of standard input, on a copy of standard output: programs print there too."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load, package = PROGRAMS[args.work]
    serve = load(args)
    try:
        installed = version(package)
    except PackageNotFoundError:  # unpacked, not installed
        installed = "unknown"
    print(json.dumps(installed), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(*json.loads(line))), file=replies, flush=True)


class Worker:
    """A process with one of the programs."""

    def __init__(self, name: str, python: str, args: argparse.Namespace):
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        sizes = [f"--{key}={getattr(args, key)}" for key in ("model", "prompt", "decode", "threads")]
        self.process = subprocess.Popen(
            [python, __file__, "--work", name, *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)},
        )  # fmt: skip
        self.version = self.reply()

    def pipe(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def reply(self):
        line = self.pipe(self.process.stdout).readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self.log.read()[-2000:]}")
        return json.loads(line)

    def serve(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        stdin = self.pipe(self.process.stdin)
        stdin.write(json.dumps([prompt, count]) + "\n")
        stdin.flush()
        return self.reply()

    def close(self) -> None:
        self.pipe(self.process.stdin).close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has fastllm (default: this one)")
    parser.add_argument(
        "--model", default=str(Path(__file__).parents[1] / "deepseek_attn/data/small"),
        help="checkpoint directory (default: the one in the package)",
    )  # fmt: skip
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens after it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds; the median counts")
    parser.add_argument("--work", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return

    vocab, draw = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"], random.Random(0)
    workers = [Worker(name, args.python if name == "fastllm" else sys.executable, args) for name in PROGRAMS]
    times: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
    agreed = []
    for number in range(args.repeats + 1):
        prompt = [draw.randrange(3, vocab) for _ in range(args.prompt)]
        replies = {worker.name: worker.serve(prompt, args.decode) for worker in workers}
        theirs, ours = (replies[name][2] for name in PROGRAMS)
        pairs = enumerate(zip(theirs, ours, strict=False))
        agreed.append(next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours))))
        for name, (prefill, decode, _) in replies.items() if number else ():
            times[name].append((prefill, decode))
    for worker in workers:
        worker.close()

    seconds = {
        name: dict(zip(("prefill", "decode"), map(statistics.median, zip(*rows, strict=True)), strict=True))
        for name, rows in times.items()
    }
    ratio = {phase: seconds["deepseek-attn"][phase] / seconds["fastllm"][phase] for phase in ("prefill", "decode")}
    print(f"{'':<16}{f'prefill {args.prompt}':>16}{'tokens/s':>12}{'decode a token':>18}{'tokens/s':>12}")
    for name, found in seconds.items():
        prefill, decode = found["prefill"], found["decode"]
        rates = args.prompt / prefill, 1 / decode
        print(f"{name:<16}{prefill * 1e3:>13.1f} ms{rates[0]:>12.0f}{decode * 1e3:>15.2f} ms{rates[1]:>12.1f}")
    print(f"{'ratio':<16}{ratio['prefill']:>16.2f}{ratio['decode']:>30.2f}   (below 1: we are faster)")
    print(f"greedy tokens that agree before the first difference, of {args.decode}: {agreed}")
    sizes = {name: getattr(args, name) for name in ("prompt", "decode", "threads", "repeats")}
    print(json.dumps({
        "benchmark": "fastllm-cpu", "seconds": seconds, "ratio": ratio, **sizes, "agreed": agreed,
        "versions": {worker.name: worker.version for worker in workers}, "machine": platform.platform(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
