"""Seconds from the start of a process to its first tokens, and the steps of a steady workload after a warm-up.

    python scripts/bench_cold_start.py --out FILE

Each row is a process of its own. Models: ``v4_flash``, its shapes with fewer layers and experts and random weights, and
``small``, the checkpoint of the package. Kernel caches:

    launched    empty; kernels are compiled one by one, as they are launched
    ahead       empty; kernels are compiled ahead, in processes of their own
    filled      the caches that the process of `ahead` has written

Stages are in seconds since the process was started. The steady workloads follow `ModelRunner.warm_up`: requests that
decode together, prompts of one length, and requests of random lengths that come and go.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("v4_flash", "small")
CACHES = ("launched", "ahead", "filled")


class Process:
    """Runs in the started process; prints its row as one line of JSON."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.row: dict[str, Any] = {"stages": {}}
        self.mark("python")
        from deepseek_attn import LLM, Engine, ModelRunner  # noqa: F401

        self.mark("import deepseek_attn, and torch")
        import torch

        from deepseek_attn.runner.ahead.recording import kernel_loads

        self.torch = torch
        self.mark("import triton")
        with kernel_loads() as loads:
            self.loads = loads
            self.run()
        print(json.dumps(self.row))

    def mark(self, stage: str) -> None:
        self.row["stages"][stage] = round(time.monotonic() - self.args.started, 3)

    def run(self) -> None:
        engine = self.engine()
        runner = engine.runner
        self.mark("model")
        self.first_tokens(engine)
        self.row |= {"loaded": len(self.loads), "compiled": sum(not load.cached for load in self.loads)}
        if runner.compilation is not None:
            runner.compilation.wait()
            self.row |= {"found": len(runner.compilation.found), "failed": runner.compilation.failed}
        self.mark("all kernels compiled")
        if not self.args.steady:
            return
        runner.warm_up()
        self.mark("warm-up")
        rng, batch = random.Random(0), runner.layout.max_num_seqs
        longest = min(runner.layout.max_model_len // 2, 8192)
        arriving = [(int(longest ** rng.random()), rng.randrange(4, 60)) for _ in range(60)]
        self.row["steady"] = {
            "decode": self.workload(engine, [[(longest // 40 + 1, 300)] * batch]),
            "prompts": self.workload(engine, [[(min(777, longest), 1)]] * 40),
            "mixed": self.workload(engine, [arriving], arrivals=rng),
        }

    def engine(self):
        """The engine of the model."""
        from deepseek_attn import LLM, Engine, ModelConfig, ModelRunner

        if self.args.child == "small":
            from deepseek_attn.cli.generate import default_checkpoint

            return LLM(default_checkpoint()).engine
        from deepseek_attn.checkpoint.random import RepeatingSource
        from deepseek_attn.lab.bench.engine import cut_config

        config = cut_config(ModelConfig.from_preset(self.args.child), self.args.layers, self.args.experts)
        return Engine(
            ModelRunner.from_source(
                config,
                RepeatingSource(config),
                max_model_len=16384,
                compile_ahead=os.environ["DEEPSEEK_ATTN_COMPILE_AHEAD"] != "0",
                progress=False,
            )
        )

    def add(self, engine, length: int, tokens: int, token: int = 5):
        from deepseek_attn import SamplingParams

        ids = [token + i % 500 for i in range(length)]
        return engine.add_request(ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def first_tokens(self, engine) -> None:
        """Marks the first two tokens after a prompt, and the eighth."""
        request = self.add(engine, min(self.args.prompt, engine.runner.layout.max_model_len - 8), 8)
        names = {1: "first token", 2: "second token", 8: "eighth token"}
        while engine.has_unfinished:
            engine.step()
            if name := names.pop(len(request.completion().token_ids), None):
                self.mark(name)

    def workload(self, engine, batches: list[list[tuple[int, int]]], arrivals: random.Random | None = None) -> dict:
        """Times of the steps of requests ``(prompt, tokens)``, a batch at a time or as they arrive, by kind of step."""
        before, times = len(self.loads), {"decode": [], "prompt": []}
        for number, batch in enumerate(batches):
            waiting = list(batch)
            while waiting or engine.has_unfinished:
                while waiting and (arrivals is None or arrivals.random() < 0.2):
                    self.add(engine, *waiting.pop(), token=5 + number)
                if not engine.has_unfinished:
                    continue
                start = time.perf_counter()
                engine.step()
                if engine.runner.device.type == "cuda":
                    self.torch.cuda.synchronize()
                times["prompt" if engine.last_step.prefills else "decode"].append(time.perf_counter() - start)
        new = self.loads[before:]
        return {"kernels_loaded": len(new), "kernels_compiled": [load.name for load in new if not load.cached]} | {
            kind: {"steps": len(t), "median_ms": 1e3 * statistics.median(t), "most_ms": 1e3 * max(t)}
            for kind, t in times.items()
            if t
        }


def started(model: str, cache: str, folder: Path, args: argparse.Namespace) -> dict:
    """The row of a process that is started here."""
    command = [sys.executable, __file__, "--child", model, "--started", repr(time.monotonic())]
    for name in ("layers", "experts", "prompt", "steady"):
        command += [f"--{name}", str(int(getattr(args, name)))]
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder),
        "DEEPSEEK_ATTN_COMPILE_AHEAD": str(int(cache != "launched")),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are timed with bytecode, as after an installation
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {"model": model, "cache": cache, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="default: both")
    parser.add_argument("--caches", nargs="+", default=list(CACHES[1:]), choices=CACHES, help="default: ahead filled")
    parser.add_argument("--layers", type=int, default=6, help="of v4_flash (default: 6)")
    parser.add_argument("--experts", type=int, default=32, help="of v4_flash (default: 32)")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of the first prompt (default: 3000)")
    parser.add_argument("--steady", type=int, default=1, help="0 leaves the warm-up and what follows it out")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        Process(args)
        return
    rows = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            for cache in args.caches:
                rows.append(
                    started(model, cache, Path(folder) / ("launched" if cache == "launched" else "ahead"), args)
                )
                stages = "  ".join(f"{name} {seconds:.1f}" for name, seconds in rows[-1]["stages"].items())
                print(f"{model}, {cache}: {stages}", flush=True)
                if args.out:  # after every row, so that an interrupted run keeps its rows
                    from deepseek_attn.utils.files import write_text

                    command = f"python scripts/bench_cold_start.py {' '.join(sys.argv[1:])}".strip()
                    write_text(args.out, json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
