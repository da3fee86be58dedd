"""The engine on a GPU: decode throughput against the device time of its steps, prefix reuse, speculation, graphs.

    python scripts/bench_engine.py --layers 8 --experts 128 --batch 1 32 --prompt 1024 --tokens 40 --out FILE

The model has the real dimensions of a preset, fewer layers, random weights (experts of one shape share their values)
and its MTP layer. Modes:

    eager        no CUDA graphs
    waiting      graphs; a step starts when the tokens of the one before it have been read
    graphs       graphs; a step starts before the tokens of the one before it have been read, as engines do by default
    prefixes     the same, and 7 of 8 prompt tokens come from the prefix cache
    speculation  graphs, drafts of the MTP layer: with random weights they are rarely accepted, so this is their cost

``deepseek-attn bench engine`` times drafts in more detail, and ``bench model`` the stages of a step.

Device time is the time of the steps that the engine ran while all requests decoded: after the run their CUDA graphs are
replayed back to back. Host overhead is the remaining share of the engine's time for these steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli.info import environment
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.decoding import NextToken
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.lab.bench.engine import cut_config, random_prompts, run_engine
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.files import write_text

MODES = ("eager", "waiting", "graphs", "prefixes", "speculation")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompts_of(runner: ModelRunner, count: int, shared: int, own: int, seed: int) -> list[list[int]]:
    """Random prompts that begin with the same ``shared`` tokens and have ``own`` tokens of their own."""
    prefix, *tails = random_prompts(runner.config.vocab_size, count + 1, shared + own, seed)
    return [prefix[:shared] + tail[:own] for tail in tails]


def timed(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[dict, list[list[int]]]:
    """Times of the prompts and of steady steps, in which all decode, and the tokens of each request."""
    before = engine.stats.cached_tokens, engine.stats.queried_tokens
    run = run_engine(engine, prompts, greedy(max_tokens))
    cached, queried = engine.stats.cached_tokens - before[0], engine.stats.queried_tokens - before[1]
    steps, device = len(run.step_seconds), run.device_seconds
    wall = sum(run.step_seconds)
    return {
        "prompt_seconds": run.prompt_seconds,
        "prompt_tokens_per_second": sum(map(len, prompts)) / run.prompt_seconds,
        "steps": steps,
        "step_us": run.step_us,
        "median_step_us": statistics.median(run.step_seconds) * 1e6,
        "device_us": None if device is None else device / steps * 1e6,
        "host_share": None if device is None else 1 - device / wall,
        "decode_tokens_per_second": run.generated / run.seconds,
        "hit_rate": cached / queried if queried else 0.0,
    }, run.tokens


class Waiting(NextToken):
    """Launches no step before the tokens of the one before it have been read."""

    def next_step(self, work, runner) -> list:
        return []


def row_of(runner: ModelRunner, mode: str, batch: int, args: argparse.Namespace) -> tuple[dict, list[list[int]]]:
    """One row of the result, and the tokens of its requests; see the top for the modes."""
    decoder = {"waiting": Waiting, "speculation": lambda: MTPSpeculation(runner, args.drafts)}.get(mode, NextToken)()
    engine = Engine(runner, decoder=decoder)
    shared = args.prompt * 7 // 8 if mode == "prefixes" else 0
    prompts = prompts_of(runner, batch, shared, args.prompt - shared, batch)
    for warm in prompts_of(runner, 2, shared, 64, batch) if shared else []:  # they fill the prefix cache
        run_engine(engine, [warm], greedy(4))
    if mode != "eager":  # graphs of all sizes that come up
        run_engine(engine, prompts_of(runner, batch, 0, args.prompt, batch + 1), greedy(16))
    times, tokens = timed(engine, prompts, 16 if mode == "eager" else args.tokens)
    acceptance = engine.stats.acceptance_rate if mode == "speculation" else None
    return {"mode": mode, "batch": batch, **times, "acceptance": acceptance}, tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="v4_flash")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, help="default: the preset's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt (default: 2048)")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of each (default: 64)")
    parser.add_argument("--drafts", type=int, default=1, help="per step and request, in speculation (default: 1)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: all of them")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    started, config = time.perf_counter(), cut_config(ModelConfig.from_preset(args.preset), args.layers, args.experts)
    runner = ModelRunner.from_source(
        config, RepeatingSource(config), device=args.device, max_model_len=args.prompt + args.tokens + 64,
        max_num_seqs=max(args.batch), max_num_batched_tokens=4096, max_snapshots=8,
    )  # fmt: skip
    if runner.graphs is not None:  # no more sizes than are measured
        runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=args.batch)
    print(f"{time.perf_counter() - started:.0f} s to make the model", flush=True)
    graphs, prefixes = runner.graphs, runner.prefixes
    rows = []
    result = {
        "benchmark": "engine",
        "preset": args.preset,
        "layers": args.layers,
        "experts": config.n_routed_experts,
        "prompt": args.prompt,
        "drafts": args.drafts,
        "rows": rows,
        "environment": environment(),
    }
    columns = ("step us", "device us", "host", "tokens/s", "prompt tok/s", "hits")
    print(f"{'mode':<14}{'batch':>6}" + "".join(f"{name:>13}" for name in columns))
    for batch in args.batch:
        for mode in args.modes:
            runner.graphs = None if mode == "eager" else graphs
            runner.prefixes = prefixes if mode == "prefixes" else None
            row, tokens = row_of(runner, mode, batch, args)
            if mode == "waiting":
                waited = tokens
            elif mode in ("graphs", "speculation") and "waiting" in args.modes:
                row["same_as_waiting"] = sum(a == b for a, b in zip(tokens, waited, strict=True))
            if prefixes is not None:
                prefixes.clear()
            runner.decode_query_len = 1  # of an engine without speculation
            rows.append(row)
            host = "" if row["host_share"] is None else f"{row['host_share']:.1%}"
            values = (
                f"{row['step_us']:.0f}", f"{row['device_us'] or 0:.0f}", host, f"{row['decode_tokens_per_second']:.0f}",
                f"{row['prompt_tokens_per_second']:.0f}", f"{row['hit_rate']:.0%}",
            )  # fmt: skip
            print(f"{mode:<14}{batch:>6}" + "".join(f"{value:>13}" for value in values), flush=True)
            gc.collect()
            if runner.device.type == "cuda":
                result["memory_bytes"] = torch.cuda.max_memory_allocated()
            if graphs is not None:
                result["graph_bytes"] = graphs.nbytes
            if args.out:  # after every row, so that an interrupted run keeps its rows
                write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
