"""Side by side with fastllm on a CPU: one request at a time, its prompt and the tokens decoded after it.

    python scripts/bench_fastllm.py [--python PYTHON] [--model DIR] [--prompt 1024] [--decode 64] [--threads 1]

PYTHON is an interpreter with the packages ftllm, pillow and transformers. Each program runs in a process of its own,
which is stopped while the other computes: fastllm has a thread, on a core of its choice, that spins between requests.
Both continue the same random tokens greedily, after a round that is not timed.
fastllm loads the weights as float16, deepseek-attn computes in float32. Before the timing, the logits after prompts of
several lengths are compared: ours in float32, ours with the FP8 inputs of the published implementation (`official`
numerics), and fastllm's. Greedy texts part where two tokens are nearly as likely, so the number of tokens before the
first difference, printed after the timing, says less. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

LENGTHS = (1, 2, 8, 64, 200, 400, 700, 1000)  # of prompts after which logits are compared
Serve = Callable[[list[int], int], tuple[float, float, list[int]]]
"""Of a prompt and a number of new tokens: seconds to the first one, seconds per token after it, the tokens."""
Logits = Callable[[list[int]], list[list[float]]]
"""Of a prompt: the logits after it, once per way of computing them."""


def load_fastllm(args: argparse.Namespace) -> tuple[Serve, Logits]:
    import ctypes

    from ftllm import llm  # pyright: ignore[reportMissingImports]  # pip install ftllm

    llm.set_cpu_threads(args.threads)
    model, lib = llm.model(args.model, dtype="float16"), llm.fastllm_lib
    model.set_save_history(False)  # else a prompt's prefix is not computed again
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    false, true, one, first_one = ctypes.c_bool(False), ctypes.c_bool(True), ctypes.c_float(1), ctypes.c_int(1)
    greedy = false, one, first_one, one, one  # of the likeliest token alone

    def launch(prompt: list[int], count: int, logits: ctypes.c_bool) -> int:
        ids, sizes = (ctypes.c_int * len(prompt))(*prompt), (ctypes.c_int(count), ctypes.c_int(0))
        stops = model.stop_token_ctypes(None)
        return lib.launch_response_llm_model(model.model, len(prompt), ids, *sizes, *greedy, logits, *stops)

    def logits(prompt: list[int]) -> list[list[float]]:
        found, rest = ((ctypes.c_float * (4 * vocab))() for _ in range(2))
        request = launch(prompt, 1, true)
        ended = lib.fetch_response_logits_llm_model(model.model, request, found)
        while ended != -1:
            ended = lib.fetch_response_logits_llm_model(model.model, request, rest)
        return [list(found[:vocab])]

    def serve(prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        start, first, tokens = time.perf_counter(), 0.0, []
        request = launch(prompt, count, false)
        while (token := lib.fetch_response_llm_model(model.model, request)) > -1:
            first = first or time.perf_counter()
            tokens.append(token)
        return first - start, (time.perf_counter() - first) / max(1, len(tokens) - 1), tokens

    return serve, logits


def load_ours(args: argparse.Namespace) -> tuple[Serve, Logits]:
    import torch

    from deepseek_attn import ModelRunner
    from deepseek_attn.runner.step import StepOptions

    torch.set_num_threads(args.threads)
    longest = max(args.prompt + args.decode, *LENGTHS)
    options = {"device": "cpu", "max_model_len": longest, "max_num_batched_tokens": args.prompt, "progress": False}
    runner = ModelRunner.from_pretrained(args.model, **options)

    def logits(prompt: list[int]) -> list[list[float]]:
        ways = runner, ModelRunner.from_pretrained(args.model, numerics="official", **options)
        return [way.score([prompt])[0][-1].tolist() for way in ways]

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

    return serve, logits


PROGRAMS = {"fastllm": (load_fastllm, "ftllm"), "deepseek-attn": (load_ours, "deepseek-attn")}


def work(args: argparse.Namespace) -> None:
    """Answers requests, JSON lists of standard input, on a copy of standard output: programs print there too."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load, package = PROGRAMS[args.work]
    serve, logits = load(args)
    try:
        installed = version(package)
    except PackageNotFoundError:  # unpacked, not installed
        installed = "unknown"
    print(json.dumps(installed), file=replies, flush=True)
    for line in sys.stdin:
        prompt, count = json.loads(line)
        print(json.dumps(serve(prompt, count) if count else logits(prompt)), file=replies, flush=True)


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

    def serve(self, prompt: list[int], count: int):
        """The reply of `Serve`, or of `Logits` for no new tokens."""
        self.process.send_signal(signal.SIGCONT)
        stdin = self.pipe(self.process.stdin)
        stdin.write(json.dumps([prompt, count]) + "\n")
        stdin.flush()
        reply = self.reply()
        self.process.send_signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.pipe(self.process.stdin).close()
        self.process.wait()


def distances(workers: list[Worker], prompt: list[int]) -> dict[str, tuple[float, bool]]:
    """How far logits after a prompt are from ours in float32, as a share of the norm, and whether the argmax agrees."""
    (theirs,), (exact, official) = (worker.serve(prompt, 0) for worker in workers)

    def far(other: list[float]) -> tuple[float, bool]:
        norm = math.dist(exact, [0.0] * len(exact))
        return round(math.dist(exact, other) / norm, 4), exact.index(max(exact)) == other.index(max(other))

    return {"fastllm": far(theirs), "official": far(official)}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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

    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model}: there is no config.json")
    if shutil.which(args.python) is None:
        parser.error(f"--python {args.python}: there is no such program")
    vocab, draw = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"], random.Random(0)
    workers = [Worker(name, args.python if name == "fastllm" else sys.executable, args) for name in PROGRAMS]
    for worker in workers:
        atexit.register(worker.close)
    compared = [distances(workers, [draw.randrange(3, vocab) for _ in range(length)]) for length in LENGTHS]
    print("logits after a prompt, distance to ours in float32 (share of the norm) and the same first choice:")
    for length, row in zip(LENGTHS, compared, strict=True):
        print(f"{length:>6} tokens" + "".join(f"{n:>16} {far:.4f} {same!s:>5}" for n, (far, same) in row.items()))
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
        "logits": [{"tokens": length} | row for length, row in zip(LENGTHS, compared, strict=True)],
        "versions": {worker.name: worker.version for worker in workers}, "machine": platform.platform(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
