"""Side by side with transformers on one tiny checkpoint, float32, CPU: prefill, then decode after it.

    python scripts/bench_transformers.py [--prompt 1024] [--decode 64] [--repeats 5]

Both sides run the same weights in the same process, in turn. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from inspect import signature

import torch
import transformers

from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.checkpoint import RandomSource, hf_state_dict
from deepseek_attn.config.model import AnyConfig


def transformers_model(config: AnyConfig, source: RandomSource) -> torch.nn.Module:
    values = config.to_dict()
    values.pop("quantization_config", None)
    values.pop("expert_dtype", None)
    values["attn_implementation"] = "eager"
    hf_config = transformers.DeepseekV4Config(**values)
    model = transformers.DeepseekV4ForCausalLM(hf_config).float().eval()
    model.load_state_dict(hf_state_dict(source))
    return model


@torch.inference_mode()
def time_transformers(model: torch.nn.Module, tokens: list[int], prompt: int) -> tuple[float, float, torch.Tensor]:
    ids = torch.tensor([tokens])
    start = time.perf_counter()
    out = model(ids[:, :prompt], use_cache=True, logits_to_keep=1)
    prefill = time.perf_counter() - start
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before 5.24
    start = time.perf_counter()
    for i in range(prompt, len(tokens)):
        out = model(ids[:, i : i + 1], **{name: out.past_key_values}, use_cache=True)
    return prefill, time.perf_counter() - start, out.logits[0, -1]


def time_ours(runner: ModelRunner, tokens: list[int], prompt: int) -> tuple[float, float, torch.Tensor]:
    sequence = runner.sequence(tokens[:prompt])
    start = time.perf_counter()
    out = runner.step([(sequence, prompt)])
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for token in tokens[prompt:]:
        sequence.append(token)
        out = runner.step([(sequence, 1)])
    decode = time.perf_counter() - start
    sequence.free()
    return prefill, decode, out.rows[0][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens to prefill")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode after them")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side; the median counts")
    args = parser.parse_args()

    config = ModelConfig.from_preset("tiny")
    source = RandomSource(config, seed=0)
    reference = transformers_model(config, source)
    runner = ModelRunner.from_source(
        config,
        source,
        device="cpu",
        dtype="float32",
        numerics="exact",
        max_num_batched_tokens=args.prompt,
        progress=False,
    )
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (args.prompt + args.decode,)).tolist()
    sides = {
        "transformers": lambda: time_transformers(reference, tokens, args.prompt),
        "deepseek-attn": lambda: time_ours(runner, tokens, args.prompt),
    }
    times = {name: [] for name in sides}
    last = {}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            prefill, decode, last[name] = side()
            if repeat:  # the first round warms up
                times[name].append((prefill, decode))
    difference = (last["transformers"] - last["deepseek-attn"]).abs().max() / last["transformers"].abs().max()
    result = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    ratios = [a / b for a, b in zip(result["deepseek-attn"], result["transformers"], strict=True)]
    print(f"{'':<16}{f'prefill {args.prompt}':>16}{f'decode {args.decode}':>16}")
    for name, (prefill, decode) in result.items():
        print(f"{name:<16}{prefill * 1e3:>13.1f} ms{decode * 1e3:>13.1f} ms")
    print(f"{'ratio':<16}{ratios[0]:>16.2f}{ratios[1]:>16.2f}   (below 1: we are faster)")
    print(f"last logits differ by {difference:.1e} of their largest")
    report = {
        "benchmark": "transformers-cpu",
        "seconds": {name: {"prefill": p, "decode": d} for name, (p, d) in result.items()},
        "ratio": {"prefill": ratios[0], "decode": ratios[1]},
        "prompt": args.prompt,
        "decode": args.decode,
        "repeats": args.repeats,
        "difference": float(difference),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.platform(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
