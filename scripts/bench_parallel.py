"""A model on several GPUs, under torchrun: checked against one GPU on a few layers, then timed at full depth.

    torchrun --nproc-per-node 2 scripts/bench_parallel.py --model v4_flash --batch 1,32,128 --context 8192 --out FILE

Weights are random, drawn on the GPUs in the formats of a published checkpoint. Steps:

    sums         an all-reduce by size, in CUDA graphs: by NCCL, and by writing into each other's memory
    check        logits of a few layers against one GPU, in bfloat16
    prefill      a step of one long prompt; with data-parallel attention, of one on each rank
    decode       a decode step: as it is, with all messages through NCCL, with communication left out, and eagerly
    generate     requests through the engine
    drafts       requests of ``--context`` tokens through the engine, with and without drafts, which are right by lot;
                 only in ``tp``
    check_exact  logits in float32, and with CUDA graphs

All steps except the first run in each layout: ``tp``, in which all ranks have the same tokens, and ``dp``,
data-parallel attention, in which the ranks divide a batch; experts are split in both. Steps at full depth have the
prediction of ``plan`` beside them, on machines that it knows. Rank 0 prints a row of JSON per figure and writes all
rows to ``--out``. An error ends all ranks: the failed rank prints its step and message as a row, and writes the
traceback beside ``--out``. The exit status is 1 after an error or a failed check.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.checkpoint.published import PublishedSource, StoredWeight
from deepseek_attn.checkpoint.recipes import DRAW, Recipe
from deepseek_attn.cli.options import fractions, numbers
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.estimates.machines import MACHINES
from deepseek_attn.estimates.ranks import RankLayout, RankModel
from deepseek_attn.kernels.collectives import all_reduce
from deepseek_attn.kernels.common.quant import FP4_GROUP
from deepseek_attn.lab.bench.engine import DecodingVariant, SetAcceptance, time_engine
from deepseek_attn.lab.bench.layer import fill_caches, reserved_sequences
from deepseek_attn.lab.bench.model import decode_step
from deepseek_attn.lab.bench.timing import time_calls, time_graph, time_until_done
from deepseek_attn.layers.parallel import Parallel, StepNeeds, launched
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.files import write_text

STEPS = ("sums", "check", "prefill", "decode", "generate", "drafts", "check_exact")
LAYOUTS = ("tp", "dp")
WAYS = ("as it is", "NCCL", "left out", "eager")
CHECK_LENGTHS = (300, 40, 7, 129)
SUM_ROWS = (1, 8, 32, 64, 128, 256, 2048, 8192)
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
    """The ranks, the options and the results so far."""

    def __init__(self, args: argparse.Namespace, parallel: Parallel, device: torch.device):
        self.args, self.ranks, self.device, self.cuda = args, parallel, device, device.type == "cuda"
        self.config = ModelConfig.from_pretrained(args.model)
        self.source = DeviceSource(self.config, device)
        self.small = self.config.replace(n_routed_experts=min(CHECK_EXPERTS, self.config.n_routed_experts))
        self.started, self.failed, self.step = time.perf_counter(), False, "start"
        name = torch.cuda.get_device_name(device) if self.cuda else "cpu"
        self.found = {
            "model": args.model,
            "ranks": parallel.world,
            "device": name,
            "torch": torch.__version__,
            "rows": [],
        }
        self.say(sums="through peers" if parallel.peers else "NCCL" if self.cuda else "Gloo")

    def say(self, **facts: object) -> None:
        """Prints and keeps a row, on rank 0."""
        if self.ranks.rank:
            return
        row = {"step": self.step, "after_s": round(time.perf_counter() - self.started, 1)} | facts
        self.found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if self.args.out:
            write_text(self.args.out, json.dumps(self.found) + "\n")

    def fail(self, error: BaseException) -> None:
        """Reports the step in which this rank failed, and the error."""
        row = {"step": self.step, "rank": self.ranks.rank, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), flush=True)
        if self.args.out:
            trace = "".join(traceback.format_exception(error))
            write_text(self.args.out.with_suffix(f".rank{self.ranks.rank}.txt"), f"{json.dumps(row)}\n{trace}")

    def run(self) -> None:
        """All requested steps, in the order of `STEPS`."""
        steps = self.args.steps
        if "sums" in steps and self.cuda and self.ranks.world > 1:
            self.step = "sums"
            self.sums()
        for layout in self.args.layouts:
            if "check" in steps:
                self.step = "check"
                self.check(layout, cuda_graphs=False)
            if {"decode", "prefill", "generate", *(["drafts"] if layout == "tp" else [])} & set(steps):
                self.full_depth(layout)
            if "check_exact" in steps:
                self.step = "check_exact"
                self.check(layout, dtype="float32", numerics="exact", cuda_graphs=False)
                if self.cuda:
                    self.check(layout, cuda_graphs=True)

    def parallel(self, layout: str) -> Parallel:
        """The ranks in a layout."""
        ranks = self.ranks
        return Parallel(ranks.rank, ranks.world, layout == "dp", peers=ranks.peers)

    def predicted_ms(self, runner: ModelRunner, batch: int, tokens: int, context: int) -> dict[str, float]:
        """The time that ``plan`` predicts for a step of all ranks, as a fact of a row; none for unknown machines."""
        machine = next((m for m in MACHINES.values() if m.name in self.found["device"].lower()), None)
        if machine is None:
            return {}
        layout = RankLayout(self.ranks.world, runner.parallel.dp_attention)
        model = RankModel(self.config, runner.numerics, runner.dtype, layout, machine)
        return {"predicted_ms": model.step(batch, tokens, context).microseconds / 1e3}

    def runner(self, source: DeviceSource, parallel: Parallel, lengths: list[int], **options: Any) -> ModelRunner:
        limits: dict[str, Any] = {
            "max_model_len": max(lengths),
            "max_num_seqs": max(*(own_part(batch, parallel) for batch in self.args.batch), len(CHECK_LENGTHS)),
            "max_num_batched_tokens": max(2048, self.args.prefill),
        }
        options = {"device": self.device, "numerics": "serving", "dtype": "bfloat16"} | limits | options
        return ModelRunner.from_source(source.config, source, parallel=parallel, progress=False, **options)

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(2, self.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def sums(self) -> None:
        """An all-reduce of hidden states, many in a graph."""
        peers = self.ranks.peers
        for rows in SUM_ROWS:
            x = torch.ones(rows, self.config.hidden_size, dtype=torch.bfloat16, device=self.device)
            ways = {"NCCL": partial(dist.all_reduce, x)}
            if peers and peers.buffers.holds(x.nbytes):
                ways["peers"] = partial(all_reduce, x, peers.buffers)
            for way, call in ways.items():
                self.say(rows=rows, bytes=x.nbytes, sums=way, us=statistics.median(time_graph([call] * 20)))

    def check(self, layout: str, dtype: str = "bfloat16", **options) -> None:
        """Logits of a few layers with real widths: prompts, then token by token, against this GPU alone; worst rank.

        With data-parallel attention, each rank has another part of the prompts.
        """
        texts, layers, lengths = self.prompts(list(CHECK_LENGTHS)), self.args.check_layers, [max(CHECK_LENGTHS)]
        options = {"dtype": dtype, "layers": layers} | options
        source = DeviceSource(self.small, self.device)
        alone = self.runner(source, Parallel.single(), lengths, **options)
        expected = alone.score(texts), alone.score(texts[1:3], chunk_size=1)
        del alone
        ranks = self.parallel(layout)
        runner = self.runner(source, ranks, lengths, **options)
        own = [range(4), range(2)]
        if layout == "dp":
            own = [[i for i in part if i % ranks.world == ranks.rank] for part in own]
        got = (
            runner.score([texts[i] for i in own[0]]),
            runner.score([texts[1:3][i] for i in own[1]], chunk_size=1),
        )
        found = {"layout": layout, "layers": layers, "experts": self.small.n_routed_experts, "dtype": dtype}
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
        self.say(**found, cuda_graphs=options["cuda_graphs"])

    def full_depth(self, layout: str) -> None:
        """Builds the whole model, and runs the steps that need it."""
        self.step, parallel, args = "load", self.parallel(layout), self.args
        start = time.perf_counter()
        more = args.tokens + max(args.drafts)
        longest = max(args.context + more * ("drafts" in args.steps), args.prompt + more, args.prefill)
        drafts = max(args.drafts) if "drafts" in args.steps and layout == "tp" else 0
        runner = self.runner(self.source, parallel, [longest], expected_drafts=drafts)
        facts = {"layout": layout, "layers": len(runner.backbone_layers), "bytes_loaded": runner.report.bytes}
        if self.cuda:
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            facts |= {
                "weights_and_caches_gb": torch.cuda.memory_allocated(self.device) / 1e9,
                "peak_gb": torch.cuda.max_memory_allocated(self.device) / 1e9,
                "driver_gb": (total - free) / 1e9,
            }
        self.say(**facts, load_seconds=time.perf_counter() - start)
        if runner.compilation is not None:  # of rank 0, if DEEPSEEK_ATTN_COMPILE_AHEAD=1: it takes processors
            runner.compilation.wait()
            self.say(compiled=len(runner.compilation.done))
        self.ranks.share(None)
        if "prefill" in args.steps and args.prefill:
            self.step = "prefill"
            self.prefill(runner, layout)
        if "decode" in args.steps:
            self.step = "decode"
            self.decode(runner, layout)
        if "generate" in args.steps:
            self.step = "generate"
            self.generate(runner, layout)
        if "drafts" in args.steps and layout == "tp":
            self.step = "drafts"
            self.drafts(runner)
        runner.close()
        del runner
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def decode(self, runner: ModelRunner, layout: str) -> None:
        """Decode steps of each batch size over random caches, sampling left out."""
        fill_caches(runner)
        parallel, world = runner.parallel, self.ranks.world
        peers = parallel.peers
        context, sizes = self.args.context, dict.fromkeys(own_part(batch, parallel) for batch in self.args.batch)
        missing = {"NCCL": peers is None, "left out": world == 1, "eager": runner.graph_problem != ""}
        ways = [way for way in self.args.ways if not missing.get(way)]
        for batch in sizes:
            with reserved_sequences(runner, batch, 1, context) as caches:
                for way in ways:
                    parallel.peers = None if way == "NCCL" else peers
                    with left_out(parallel) if way == "left out" else nullcontext():
                        times = self.step_times(runner, caches, way != "eager" and not runner.graph_problem)
                    total = batch * (world if parallel.dp_attention else 1)
                    ms = statistics.median(times) / 1e3
                    facts = {"sums": way, "ms": ms, "tokens_per_second": total / ms * 1e3}
                    facts |= self.predicted_ms(runner, total, 1, context) if way == "as it is" else {}
                    self.say(layout=layout, batch=total, context=context, **facts)
        parallel.peers = peers

    @torch.inference_mode()
    def step_times(self, runner: ModelRunner, caches: list[SequenceCache], graph: bool) -> list[float]:
        """Microseconds of decode steps of some requests of each rank, as a CUDA graph or not.

        With data-parallel attention, ranks agree on the size before each step, as they do in a run.
        """
        needs = StepNeeds(len(caches), self.args.context)

        def run(_: int) -> None:
            runner.parallel.agree(needs, self.device)
            step()

        with runner.op_settings():
            runner.parallel.step_rows = len(caches)
            step = decode_step(runner, caches, self.args.context, graph)
            agrees = runner.parallel.dp_attention
            return time_calls(run if agrees else lambda _: step(), self.device, self.args.repeats)

    def prefill(self, runner: ModelRunner, layout: str) -> None:
        """A step of one prompt from its first token on; the first time compiles."""
        tokens = self.prompts([self.args.prefill])[0]
        times = []
        for _ in range(4):
            sequence = runner.sequence(tokens)
            try:
                step = partial(runner.step, [(sequence, len(tokens))])
                times.append(time_until_done(step, self.device))
            finally:
                sequence.free()
        total = len(tokens) * (self.ranks.world if layout == "dp" else 1)
        ms = statistics.median(times[1:]) / 1e3
        self.say(
            layout=layout, tokens=total, ms=ms, first_ms=times[0] / 1e3, tokens_per_second=total / ms * 1e3,
            **self.predicted_ms(runner, 1, len(tokens), len(tokens)),
        )  # fmt: skip

    def generate(self, runner: ModelRunner, layout: str) -> None:
        """Requests through the engine: prompts, decode steps and sampling."""
        args, batch = self.args, own_part(max(self.args.batch), runner.parallel)
        texts = self.prompts([args.prompt] * batch)
        engine = Engine(runner)
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        rates, outputs = [], []
        total = batch * (self.ranks.world if layout == "dp" else 1)
        for _ in range(2):  # the first time compiles and captures
            start = time.perf_counter()
            requests = [engine.add_request(text, params, index=i) for i, text in enumerate(texts)]
            for _ in engine.run(requests):
                pass
            rates.append(total * args.tokens / (time.perf_counter() - start))
            outputs = [list(request.completion().token_ids) for request in requests]
        runner.wait_for_ranks()
        agree = outputs == self.ranks.share(outputs)  # with data-parallel attention they have the same prompts
        self.failed |= not agree and layout == "tp"
        self.say(
            layout=layout, batch=total, prompt=args.prompt, tokens=args.tokens, tokens_per_second=rates, agree=agree
        )

    def drafts(self, runner: ModelRunner) -> None:
        """Requests through the engine, way after way; on a CPU there are no CUDA graphs and nothing to time.

        All tokens of a request but the last count as computed; the caches hold random entries. A run ends with its
        first request.
        """
        args = self.args
        if runner.graphs is None:
            self.say(left_out=runner.graph_problem)
            return
        fill_caches(runner)
        acceptance = SetAcceptance(runner, max(args.drafts))
        ways = [(n, rate) for n in args.drafts for rate in args.acceptance]
        variants = [DecodingVariant(), *(DecodingVariant(n, acceptance=rate) for n, rate in ways)]
        kept = ("drafts", "acceptance", "tokens_per_second", "speedup", "step_us", "tokens_per_step", "device_us")
        with acceptance.installed():
            for batch in args.batch:
                texts = self.prompts([args.context] * batch)
                options: dict[str, Any] = {"rounds": 1, "acceptance": acceptance, "computed": True}
                rate = None  # without drafts
                for variant in variants:
                    row = time_engine(runner, texts, [variant], args.tokens, **options)[0].row()
                    rate = rate or row["tokens_per_second"]
                    row["speedup"] = row["tokens_per_second"] / rate
                    self.say(layout="tp", batch=batch, context=args.context, **{name: row[name] for name in kept})


def own_part(batch: int, parallel: Parallel) -> int:
    """Requests of one rank."""
    return max(1, batch // parallel.world) if parallel.dp_attention else batch


@contextmanager
def left_out(parallel: Parallel) -> Iterator[None]:
    """Ranks compute without each other, on tensors of the same shapes: results are wrong."""

    def gather_tokens(x: torch.Tensor) -> torch.Tensor:
        others = range(1, parallel.world if parallel.dp_attention else 1)
        return torch.cat([x, *(x.roll(i, -1) for i in others)])  # other hidden states choose other experts

    kept = {"sum", "gather_columns", "gather_tokens", "sum_experts", "agree"}
    parallel.sum = lambda x: x
    parallel.gather_columns = lambda x: x.repeat(1, parallel.token_ranks)
    parallel.gather_tokens = gather_tokens
    parallel.sum_experts = lambda y, rows: y[:rows]
    parallel.agree = lambda step, device: step
    try:
        yield
    finally:
        for name in kept:
            delattr(parallel, name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="v4_flash", help="preset or config.json (default: v4_flash)")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=list(STEPS), help="default: all")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS), help="default: tp,dp")
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), default=list(WAYS),
        help=f"of decode steps (default: all, which are {', '.join(WAYS)})",
    )  # fmt: skip
    parser.add_argument("--check-layers", type=numbers, default=[0, 2, 3], help="layers of the check (default: 0,2,3)")
    parser.add_argument("--batch", type=numbers, default=[1, 32], help="decode batches of all ranks (default: 1,32)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a timed step (default: 1024)")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a timed prompt (default: 2048)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a generating prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--drafts", type=numbers, default=[1, 2, 3], help="per step and request (default: 1,2,3)")
    parser.add_argument(
        "--acceptance", type=fractions, default=[0.7],
        help="probabilities that a draft is right if those before are, each in turn (default: 0.7)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--device", help="cpu or cuda (default: GPUs if there are any)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of all rows")
    args = parser.parse_args()
    for given, known in ((args.steps, STEPS), (args.layouts, LAYOUTS), (args.ways, WAYS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not among {', '.join(known)}")
    return args


def main() -> int:
    args = parse()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with launched(world, args.device, timeout_seconds=120) as (parallel, device):
        bench = Bench(args, parallel, device)
        try:
            bench.run()
        except BaseException as error:
            bench.fail(error)
            raise
        parallel.share(None)  # nobody ends before the rows are out: torchrun would end all after a failure
        return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
