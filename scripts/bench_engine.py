"""The engine on a GPU: decode throughput against the device time of its steps, prefix reuse, speculation, graphs.

    python scripts/bench_engine.py --layers 8 --out docs/data/h200_engine.json

The model has the real dimensions of a preset, fewer layers, random weights (experts of one shape share their values)
and its MTP layer. Host overhead is the share of a decode step that is not the replay of its CUDA graph. With random
weights the MTP layer guesses at chance, so the speculation row shows what speculation costs, not what it saves.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from importlib import resources
from pathlib import Path

import torch

from deepseek_attn.bench_model import time_model
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli.info import collect
from deepseek_attn.config import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner

SETTLED = 8  # first decode steps, which capture graphs, do not count


def cut_config(preset: str, layers: int, experts: int | None) -> ModelConfig:
    """A preset with its first ``layers`` layers, its MTP layer, and perhaps fewer experts."""
    raw = json.loads(resources.files("deepseek_attn.configs").joinpath(f"{preset}.json").read_text())
    raw["compress_ratios"] = raw["compress_ratios"][:layers] + raw["compress_ratios"][-1:]
    raw["num_hidden_layers"] = layers
    raw["n_routed_experts"] = experts or raw["n_routed_experts"]
    return ModelConfig.from_dict(raw, f"{preset}, {layers} layers")


def random_prompts(count: int, shared: int, own: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts that begin with the same ``shared`` tokens and have ``own`` tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(2, vocab, (shared,), generator=generator).tolist()
    return [prefix + torch.randint(2, vocab, (own,), generator=generator).tolist() for _ in range(count)]


def run_engine(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict:
    """Runs prompts to their end; times of the whole, of the prompts, and of steps that only decode."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    started, first, decodes = time.perf_counter(), None, []
    before = engine.stats.cached_tokens, engine.stats.queried_tokens
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished:
        engine.step()
        stats = engine.last_step
        if stats.prefills:
            first = time.perf_counter() - started
        elif stats.decodes == len(prompts):
            decodes.append((stats.seconds, stats.generated))
    broken = [request.error for request in requests if request.error]
    if broken:
        raise RuntimeError(f"{len(broken)} requests failed, the first with: {broken[0]}")
    steady = decodes[SETTLED:] or decodes
    cached, queried = engine.stats.cached_tokens - before[0], engine.stats.queried_tokens - before[1]
    return {
        "seconds": time.perf_counter() - started,
        "prompt_seconds": first,
        "prompt_tokens_per_second": sum(map(len, prompts)) / first,
        "decode_step_us": statistics.median(seconds for seconds, _ in steady) * 1e6,
        "decode_tokens_per_second": sum(n for _, n in steady) / sum(seconds for seconds, _ in steady),
        "hit_rate": cached / queried if queried else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v4_flash")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, help="default: the preset's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt (default: 2048)")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of each (default: 64)")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    config = cut_config(args.preset, args.layers, args.experts)
    runner = ModelRunner.from_source(
        config, RepeatingSource(config), device=args.device, max_model_len=args.prompt + args.tokens + 64,
        max_num_seqs=max(args.batch), max_num_batched_tokens=4096, max_snapshots=8,
    )  # fmt: skip
    graphs, prefixes = runner.graphs, runner.prefixes
    rows = []
    columns = ("step us", "device us", "host", "tokens/s", "prompt tok/s", "hits")
    print(f"{'mode':<14}{'batch':>6}" + "".join(f"{name:>13}" for name in columns))
    for batch in args.batch:
        device_us = None
        if graphs is not None:
            device_us = time_model(runner, batch, args.prompt + args.tokens // 2, graph=True).microseconds
        for mode in ("eager", "graphs", "prefixes", "speculation"):
            runner.graphs = None if mode == "eager" else graphs
            runner.prefixes = prefixes if mode == "prefixes" else None
            decoder = MTPSpeculation(runner) if mode == "speculation" else None
            engine = Engine(runner, decoder=decoder)
            shared = args.prompt * 7 // 8 if mode == "prefixes" else 0
            prompts = random_prompts(batch, shared, args.prompt - shared, config.vocab_size, batch)
            if mode == "prefixes":  # a first request leaves what the others share
                for warm in random_prompts(2, shared, 64, config.vocab_size, batch):
                    run_engine(engine, [warm], 2)
            row = {"mode": mode, "batch": batch, **run_engine(engine, prompts, args.tokens), "device_us": device_us}
            exact = mode in ("graphs", "prefixes") and device_us
            row["host_share"] = 1 - device_us / row["decode_step_us"] if exact else None
            row["acceptance"] = engine.stats.acceptance_rate if decoder else None
            rows.append(row)
            host = "" if row["host_share"] is None else f"{row['host_share']:.1%}"
            values = (
                f"{row['decode_step_us']:.0f}", f"{device_us or 0:.0f}", host, f"{row['decode_tokens_per_second']:.0f}",
                f"{row['prompt_tokens_per_second']:.0f}", f"{row['hit_rate']:.0%}",
            )  # fmt: skip
            print(f"{mode:<14}{batch:>6}" + "".join(f"{value:>13}" for value in values), flush=True)
            gc.collect()
    result = {
        "benchmark": "engine",
        "preset": args.preset,
        "layers": args.layers,
        "experts": config.n_routed_experts,
        "prompt": args.prompt,
        "rows": rows,
        "memory_bytes": torch.cuda.max_memory_allocated() if runner.device.type == "cuda" else None,
        "graph_bytes": graphs.nbytes if graphs else None,
        "environment": {key: value for key, value in collect().items() if "backends" not in key},
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
