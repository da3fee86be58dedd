"""A model on several GPUs, under torchrun: checked against one GPU on a few layers, then run at full depth.

    torchrun --nproc-per-node 4 scripts/bench_parallel.py --model v4_flash --batch 1,32

Weights are random, drawn on the GPUs in the formats of a published checkpoint. Every line of stdout is of rank 0; the
last one is the summary as JSON. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepseek_attn.bench.layer import fill_caches
from deepseek_attn.bench.model import time_model
from deepseek_attn.checkpoint.published import PublishedSource, StoredWeight
from deepseek_attn.checkpoint.recipes import DRAW, Recipe
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.kernels.linear import FP4_GROUP
from deepseek_attn.layers.parallel import Parallel, launched
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner

# Relative error of the logits. In bfloat16, sums over ranks are rounded once more, FP8 rounding of activations
# magnifies that, and an undecided router takes another expert; float32 shows whether the computation is the same.
LIMITS = {"bfloat16": 0.25, "float32": 1e-3}
CHECK_EXPERTS = 32  # per layer, so that float32 weights fit
FP4_RMS = 2.93  # of a value whose bits are random


class DeviceSource(PublishedSource):
    """A random checkpoint drawn on a GPU, the same on every rank; bytes of FP4 experts are drawn as they are stored."""

    def __init__(self, config: AnyConfig, device: torch.device):
        super().__init__(config)
        self.device = device

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        with self.device:
            return DRAW[recipe.kind].values(recipe, self._generator(name), self.config)

    def _make(self, name: str) -> StoredWeight:
        recipe = self._recipes[name]
        if self.stored_as(name) != "fp4":
            return super()._make(name)
        rows, columns = recipe.shape
        options = {"dtype": torch.uint8, "device": self.device}
        packed = torch.randint(256, (rows, columns // 2), generator=self._generator(name), **options)
        exponent = round(torch.tensor(columns**-0.5 * recipe.gain / FP4_RMS).log2().item())
        return StoredWeight(packed, torch.full((rows, columns // FP4_GROUP), 127 + exponent, **options))


class Bench:
    """The ranks, the options and what was found so far."""

    def __init__(self, args: argparse.Namespace, parallel: Parallel, device: torch.device):
        self.args, self.parallel, self.device = args, parallel, device
        self.config = ModelConfig.from_pretrained(args.model)
        self.source = DeviceSource(self.config, device)
        self.small = self.config.replace(n_routed_experts=min(CHECK_EXPERTS, self.config.n_routed_experts))
        self.found = {"model": args.model, "ranks": parallel.world, "device": str(device)}
        self.started, self.failed = time.perf_counter(), False
        self.full: ModelRunner | None = None

    def say(self, *words: object) -> None:
        if self.parallel.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s]", *words, flush=True)

    def do(self, name: str, step: Callable[[], dict]) -> None:
        """Runs one step; what it found, or the error, is printed and kept."""
        try:
            self.found[name] = step()
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.found[name] = {"error": f"{type(error).__name__}: {error}"}
        self.say(name, json.dumps(self.found[name]))

    def runner(self, source: DeviceSource, parallel: Parallel, **options) -> ModelRunner:
        limits = {"max_model_len": 4096, "max_num_seqs": max(*self.args.batch, 4), "max_num_batched_tokens": 2048}
        options = {"device": self.device, "numerics": "serving", "dtype": "bfloat16"} | limits | options
        return ModelRunner.from_source(source.config, source, parallel=parallel, progress=False, **options)

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(2, self.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def check(self, dtype: str = "bfloat16", dp_attention: bool = False, **options) -> dict:
        """Logits of a few layers with real widths: prompts, then token by token, against this GPU alone; worst rank.

        With data-parallel attention, each rank has another part of the prompts.
        """
        texts, layers = self.prompts([300, 40, 7, 129]), self.args.check_layers
        options = {"dtype": dtype, "layers": layers} | options
        source = DeviceSource(self.small, self.device)
        alone = self.runner(source, Parallel.single(), **options)
        expected = alone.score(texts), alone.score(texts[1:3], chunk_size=1)
        del alone
        ranks = Parallel(self.parallel.rank, self.parallel.world, dp_attention)
        runner = self.runner(source, ranks, **options)
        own = [range(4), range(2)]
        if dp_attention:
            own = [[i for i in part if i % ranks.world == ranks.rank] for part in own]
        got = (
            runner.score([texts[i] for i in own[0]]),
            runner.score([texts[1:3][i] for i in own[1]], chunk_size=1),
        )
        found = {"layers": layers, "experts": self.small.n_routed_experts, "dtype": dtype}
        for name, logits, right, mine in zip(("prompts", "steps"), got, expected, own, strict=True):
            facts = torch.zeros(3)
            if mine:
                a, b = torch.cat(logits), torch.cat([right[i] for i in mine])
                rows = (a - b).norm(dim=1) / b.norm(dim=1)
                other = (a.argmax(1) != b.argmax(1)).float()
                facts = torch.stack([(a - b).norm() / b.norm(), rows.median(), other.mean()])
            facts = facts.nan_to_num(nan=float("inf")).to(self.device)
            if ranks.world > 1:
                dist.all_reduce(facts, dist.ReduceOp.MAX)
            error, median, other = facts.tolist()
            self.failed |= error > LIMITS[dtype]
            found[name] = {"error": error, "median_error": median, "other_choices": other}
        return found

    def full_depth(self) -> dict:
        """Builds the whole model, then decodes."""
        device, cuda = self.device, self.device.type == "cuda"
        start = time.perf_counter()
        self.full = self.runner(self.source, self.parallel, cuda_graphs=False)
        if cuda:
            torch.cuda.synchronize(device)
        found = {"load_seconds": time.perf_counter() - start, "bytes_loaded": self.full.report.bytes}
        if cuda:
            found["weights_and_caches_gb"] = torch.cuda.memory_allocated(device) / 1e9
            found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        return found | {"layers": len(self.full.backbone_layers)}

    def decode(self, graph: bool) -> dict:
        """Decode steps of each batch size over random caches, sampling left out."""
        fill_caches(self.full)
        timings = [
            time_model(self.full, batch, self.args.context, self.args.repeats, graph=graph) for batch in self.args.batch
        ]
        return {
            str(timing.batch): {"ms": timing.microseconds / 1e3, "tokens_per_second": timing.tokens_per_second}
            for timing in timings
        }

    def generate(self, graph: bool) -> dict:
        """Requests through the engine: prompts, decode steps and sampling."""
        runner, args = self.full, self.args
        if graph:
            runner.graphs = DecodeGraphs(runner.model, runner.layout, runner.device)
        batch = max(args.batch)
        texts = self.prompts([args.prompt] * batch)
        engine = Engine(runner)
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        rates, outputs = [], []
        for _ in range(2):  # the first time compiles and captures
            start = time.perf_counter()
            requests = [engine.add_request(text, params, index=i) for i, text in enumerate(texts)]
            for _ in engine.run(requests):
                pass
            rates.append(batch * args.tokens / (time.perf_counter() - start))
            outputs = [list(request.completion().token_ids) for request in requests]
        agree = outputs == self.parallel.share(outputs)
        self.failed |= not agree
        return {
            "batch": batch,
            "prompt": args.prompt,
            "tokens": args.tokens,
            "tokens_per_second": rates,
            "agree": agree,
        }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="v4_flash", help="preset or config.json (default: v4_flash)")
    parser.add_argument("--check-layers", type=numbers, default=[0, 2, 3], help="layers of the check (default: 0,2,3)")
    parser.add_argument("--batch", type=numbers, default=[1, 32], help="decode batches (default: 1,32)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a timed step (default: 1024)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a generating prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--device", help="cpu or cuda (default: GPUs if there are any)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with launched(world, args.device, timeout_seconds=120) as (parallel, device):
        bench = Bench(args, parallel, device)
        bench.say("ranks", world, "on", device)
        bench.do("check", lambda: bench.check(cuda_graphs=False))
        bench.do("full_depth", bench.full_depth)
        graphs = device.type == "cuda"
        if graphs:
            bench.do("decode_graphs", lambda: bench.decode(graph=True))
            graphs = "error" not in bench.found["decode_graphs"]
        if not graphs:
            bench.do("decode_eager", lambda: bench.decode(graph=False))
        bench.do("generate", lambda: bench.generate(graph=graphs))
        bench.full = None
        exact = {"dtype": "float32", "numerics": "exact", "cuda_graphs": False}
        bench.do("check_float32", lambda: bench.check(**exact))
        bench.do("check_data_parallel", lambda: bench.check(dp_attention=True, **exact))
        if graphs:
            bench.do("check_graphs", lambda: bench.check(cuda_graphs=True))
        if parallel.rank == 0:
            print(json.dumps(bench.found), flush=True)
        parallel.share(None)  # nobody ends before the summary is out: torchrun would end all after a failure
        return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
