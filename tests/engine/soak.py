"""A soak: one engine for very many steps, while everything happens that can; nothing may grow, slow down or go wrong.

    OMP_NUM_THREADS=1 python -m tests.engine.soak --model v4 --drafts 1 --steps 100000 --out FILE

Requests arrive, share prefixes, go on where others ended, are cancelled, preempted and refused; pages run short; steps
fail, are interrupted and run out of memory; ``on_step`` raises; beside the engine a sequence is forked, saved, loaded
and taken back. After every step each page has exactly the holders that it should have, and every request that ends has
the tokens that it has alone. Every thousand steps the process's memory, the objects that live, and the time of steps
are recorded.

The prompts of requests are drawn from a set whose answers are known. It changes slowly, so that prefixes are met again
and also die out.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.engine.stats import StepStats
from deepseek_attn.lab.bench.engine import cut_config
from deepseek_attn.models.block import Backbone
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.utils.device import resident_memory
from deepseek_attn.utils.files import write_text
from tests.engine.workload import cache_bytes, check_pages, use_buckets, worse_tokens
from tests.support.predictable import PredictableSource
from tests.support.small_models import small_config
from tests.support.typed import required, untyped

SETTLED = 0.1  # of the steps: caches and compiled kernels fill up in them
WORSE = 0.02  # of the tokens generated, at most, where numerics may choose others
MEMORY_GROWTH = 0.02  # at most, of the median of the last fifth over that of the first fifth after SETTLED
CLOSE = {"exact": 1e-3, "serving": 0.1}  # of the range of logits: on a GPU another token this close is no error


class Injected(RuntimeError):
    """An error that the soak raises itself."""


class CallbackFailed(Exception):
    """What ``on_step`` raises."""


@dataclass(frozen=True)
class Known:
    """A request and what it generates alone."""

    prompt: list[int]
    params: SamplingParams
    index: int
    tokens: list[int]


@dataclass
class Row:
    """What was measured over some steps.

    Attributes:
        step: number of steps so far.
        wall_us: median time of a step; cpu_us: processor time.
        probe_us: median processor time of a step of a fixed request in an engine of its own: what the machine gives.
        rss: resident bytes of the process; objects: Python objects that the garbage collector tracks; files: open ones.
        device_bytes, device_reserved, device_used: of a GPU, held by tensors, reserved by the allocator, and what its
            driver counts, kernels, graphs and other processes too; 0 on a CPU.
        tokens: computed per step.
    """

    step: int
    wall_us: int
    cpu_us: int
    probe_us: int
    rss: int
    objects: int
    files: int
    device_bytes: int
    device_reserved: int
    device_used: int
    tokens: float


class Faults:
    """Makes the next blocks of a model raise."""

    def __init__(self, model: Backbone):
        self.left: list[BaseException] = []
        self.wait = 0
        for block in model.layers.values():
            block.register_forward_pre_hook(self._before_block)

    def arm(self, wait: int, errors: list[BaseException]) -> None:
        """After ``wait`` blocks, each further one raises one of ``errors`` until there are none left."""
        self.wait, self.left = wait, errors

    def _before_block(self, module: torch.nn.Module, args: tuple) -> None:
        if self.left and self.wait:
            self.wait -= 1
        elif self.left:
            raise self.left.pop()


class Aside:
    """A sequence beside the engine's, which becomes the text that is known token by token, by every detour there is."""

    def __init__(self, sequence: Sequence, known: Known, file: Path, close: float):
        self.sequence, self.file, self.close = sequence, file, close
        self.text, self.prompt_length = known.prompt + known.tokens, len(known.prompt)

    def move(self, runner: ModelRunner, rng: random.Random) -> str:
        """One action, whose name is returned; "end" when the text is complete.

        Raises:
            OutOfPages: the engine holds too many; nothing was changed.
        """
        sequence, limit = self.sequence, runner.layout.max_rollback
        action = rng.random()
        if action < 0.03:
            sequence.save(self.file)
            sequence.free()
            self.sequence = runner.load_sequence(self.file)
            return "load"
        if action < 0.06 and len(sequence.token_ids) > 1:
            sequence.truncate(max(1, len(sequence.token_ids) - rng.randint(1, 2 * limit)))
            return "truncate"
        if action < 0.1:
            self.sequence = sequence.fork()
            sequence.free()
            return "fork"
        if not sequence.num_pending:
            if len(sequence.token_ids) == len(self.text) - 1:
                sequence.free()
                return "end"
            sequence.append(self.text[len(sequence.token_ids)])
        n = min(sequence.num_pending, runner.layout.max_num_batched_tokens)
        output = runner.step([(sequence, n)])
        if not sequence.num_pending and len(sequence.token_ids) >= self.prompt_length:
            row, token = required(output.logits)[0][-1].float(), self.text[len(sequence.token_ids)]
            if float((row.max() - row[token]) / (row.max() - row.mean())) > self.close:
                return "worse token"
        return "step"


class Soak:
    """An engine, what happens to it, and what must hold.

    Args:
        single: a runner of the same model for the requests alone.
        folder: for saved sequences.
        variety: number of requests whose answers are known at a time.

    Attributes:
        counts: how often what happened.
        rows: what was measured.
    """

    def __init__(
        self,
        runner: ModelRunner,
        single: ModelRunner,
        drafts: int,
        longest: int,
        seed: int,
        folder: Path,
        variety: int = 24,
    ):
        self.runner, self.single, self.longest, self.variety = runner, single, longest, variety
        self.close, self.may_differ = CLOSE[runner.numerics.name], runner.numerics.name != "exact"
        self.rng, self.file = random.Random(seed), folder / "sequence.safetensors"
        self.engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
        self.engine.on_step = self._on_step
        self.faults = Faults(runner.whole_model())
        self.counts: Counter[str] = Counter()
        self.rows: list[Row] = []
        self.live: dict[Request, Known] = {}
        self.aside: Aside | None = None
        self._indices = itertools.count()
        self._callback_raises = False
        self.known: list[Known] = []
        self._probe = Known(self._tokens(20), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), 0, [])

    def run(self, steps: int, per_row: int = 1000) -> Iterator[Row]:
        """Steps under churn; a row after every ``per_row`` of them."""
        self.known = [self._fresh() for _ in range(self.variety)]
        while self.counts["step"] < steps:
            wall, cpu = [], []
            tokens = self.engine.stats.prefill_tokens + self.engine.stats.decode_tokens
            for _ in range(min(per_row, steps - self.counts["step"])):
                self._churn()
                self._step(wall, cpu)
                self.check()
            tokens = self.engine.stats.prefill_tokens + self.engine.stats.decode_tokens - tokens
            self.rows.append(self._row(wall, cpu, tokens))
            yield self.rows[-1]

    def finish(self) -> None:
        """Ends all requests and checks that nothing is held."""
        while self.engine.has_unfinished:
            self._step([], [])
            self.check()
        if self.aside is not None:
            self.aside.sequence.free()
            self.aside = None
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        check_pages(self.engine)
        assert not self.live

    def _step(self, wall: list[float], cpu: list[float]) -> None:
        """One step, whose times are appended."""
        self.counts["step"] += 1
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        try:
            self.engine.step()
        except CallbackFailed:
            self.counts["on_step raised"] += 1
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        wall.append(time.perf_counter() - wall_before)
        cpu.append(time.process_time() - cpu_before)
        self.faults.arm(0, [])  # a step over CUDA graphs runs no block

    def _on_step(self, stats: StepStats) -> None:
        if self._callback_raises:
            self._callback_raises = False
            raise CallbackFailed

    def check(self) -> None:
        """Pages after a step, and the requests that have ended."""
        check_pages(self.engine, [self.aside.sequence.cache] if self.aside else ())
        for request in [request for request in self.live if request.finished]:
            known = self.live.pop(request)
            tokens = request.completion().token_ids
            self.counts[required(request.finish_reason)] += 1
            if request.finish_reason == "error":
                assert any(text in required(request.error) for text in ("Injected", "fake memory")), request.error
            elif tokens != (known.tokens[: len(tokens)] if request.finish_reason == "abort" else known.tokens):
                self._check_difference(request, known)

    def _check_difference(self, request: Request, known: Known) -> None:
        """Counts another text, and its tokens that are not as good as the best ones within rounding."""
        self.counts["other text"] += 1
        if known.params.greedy:
            self.counts["worse token"] += worse_tokens(self.single, [request], self.close)
        assert self.may_differ or (known.params.greedy and not self.counts["worse token"]), (
            "tokens of a text are not those of the request alone, nor as good"
        )

    def _churn(self) -> None:
        """What happens between two steps."""
        rng, engine = self.rng, self.engine
        room = len(engine.scheduler.waiting) < 3

        def chance(percent: float) -> bool:
            return rng.random() < percent / 100

        self._move_aside()
        if room and chance(40):
            known = rng.choice(self.known)
            self.live[engine.add_request(known.prompt, known.params, index=known.index)] = known
        if chance(2):
            vocab = self.runner.config.vocab_size
            prompt = rng.choice([[], [vocab], [3, -1], ["x"], [5] * (self.runner.layout.max_model_len + 1), 7])
            assert engine.add_request(untyped(prompt), SamplingParams(max_tokens=3)).finish_reason == "error"
            self.counts["refused"] += 1
        if self.live and chance(3):
            engine.cancel(rng.choice(list(self.live)))
        if engine.scheduler.running and chance(2):
            engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
            self.counts["preempted by hand"] += 1
        if chance(1):
            errors: list[BaseException] = [Injected("a block") for _ in range(rng.choice([1, 1, 2, 3]))]
            self.faults.arm(rng.randrange(len(self.runner.whole_model().layers)), errors)
        if chance(0.1):
            self.faults.arm(rng.randrange(len(self.runner.whole_model().layers)), [MemoryError("fake memory is full")])
        if chance(0.5):
            self.faults.arm(rng.randrange(len(self.runner.whole_model().layers)), [KeyboardInterrupt()])
        self._callback_raises = chance(0.5)
        if chance(0.5):
            self.known[rng.randrange(len(self.known))] = self._fresh()

    def _move_aside(self) -> None:
        if self.aside is None:
            if self.rng.random() < 0.02:
                self.aside = self._new_aside()
            return
        try:
            action = self.aside.move(self.runner, self.rng)
        except OutOfPages:
            self.aside.sequence.free()
            action = "out of pages"
        self.counts[f"aside: {action}"] += 1
        assert action != "worse token" or self.may_differ, "a sequence beside the engine's differs"
        if action in ("end", "out of pages"):
            self.aside = None

    def _new_aside(self) -> Aside | None:
        """A fork of a running greedy request, or a new sequence of a known one."""
        running = [r for r in self.engine.scheduler.running if r.params.greedy and r in self.live]
        if running and self.rng.random() < 0.7:
            request = self.rng.choice(running)
            sequence = request.sequence.fork()
            sequence.truncate(request.confirmed_length)
            return Aside(sequence, self.live[request], self.file, self.close)
        known = self.rng.choice([known for known in self.known if known.params.greedy])
        return Aside(self.runner.sequence(known.prompt), known, self.file, self.close)

    def _fresh(self) -> Known:
        """A new request, computed alone: one half are the next turn, or another end, of a known one."""
        rng = self.rng
        length = rng.choice([rng.randint(1, self.longest), int(self.longest ** rng.random())])
        prompt = self._tokens(length)
        if self.known and rng.random() < 0.5:
            before = rng.choice(self.known)
            whole = before.prompt + before.tokens
            prompt = (whole[: rng.choice([len(whole), rng.randint(1, len(whole))])] + prompt)[: self.longest]
        temperature = 0 if rng.random() < 0.8 else 0.8
        params = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 16), seed=7, ignore_eos=True)
        known = Known(prompt, params, next(self._indices), [])
        return Known(prompt, params, known.index, self._alone(known))

    def _alone(self, known: Known, cpu: list[float] | None = None) -> list[int]:
        """Tokens of a request in an engine of its own; the processor time of each step is appended to ``cpu``."""
        engine, cpu = Engine(self.single), [] if cpu is None else cpu
        request = engine.add_request(known.prompt, known.params, index=known.index)
        while engine.has_unfinished:
            before = time.process_time()
            engine.step()
            cpu.append(time.process_time() - before)
        assert request.finish_reason == "length", request.error
        return request.completion().token_ids

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(2, self.runner.config.vocab_size) for _ in range(n)]

    def _row(self, wall: list[float], cpu: list[float], tokens: int) -> Row:
        probe: list[float] = []
        for _ in range(3):
            self._alone(self._probe, probe)
        gc.collect()
        device = self.runner.device
        cuda = device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if cuda else (0, 0)
        return Row(
            self.counts["step"],
            *(round(statistics.median(times) * 1e6) for times in (wall, cpu, probe)),
            rss=resident_memory(),
            objects=len(gc.get_objects()),
            files=len(os.listdir("/proc/self/fd")),
            device_bytes=torch.cuda.memory_allocated(device) if cuda else 0,
            device_reserved=torch.cuda.memory_reserved(device) if cuda else 0,
            device_used=total - free,
            tokens=tokens / len(wall),
        )


def growth(values: Iterable[float]) -> float:
    """By how much the median of the last fifth exceeds that of the first fifth after `SETTLED`, relatively."""
    values = list(values)
    values = values[int(len(values) * SETTLED) :]
    part = max(1, len(values) // 5)
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    return last / first - 1 if first else float(last > 0)


def small_models() -> dict[str, AnyConfig]:
    """Models whose steps take milliseconds on a CPU and have every kind of cache."""
    widths = {
        "vocab_size": 96, "hidden_size": 64, "q_lora_rank": 32, "index_n_heads": 4, "moe_intermediate_size": 32,
        "max_position_embeddings": 4096, "quantization_config": None,
    }  # fmt: skip
    v4 = {"num_attention_heads": 1, "o_groups": 1, "o_lora_rank": 32, "num_experts_per_tok": 1, "n_routed_experts": 2}
    v32 = {
        "num_attention_heads": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 64,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    }  # fmt: skip
    return {
        "v4": small_config([4, 16], mtp=1, num_hash_layers=0, hc_sinkhorn_iters=2, **widths | v4),
        "v32": ModelConfig.from_preset("tiny_v32").replace(**widths | v32),
    }


def make_runners(
    config: AnyConfig, device: str, numerics: str, longest: int, seqs: int, chunk: int
) -> tuple[ModelRunner, ModelRunner]:
    """The engine's runner, whose pools hold two of ``seqs`` sequences at their longest, and one for single requests."""
    source = PredictableSource(config)
    dtype = torch.float32 if numerics == "exact" else torch.bfloat16
    common: dict[str, Any] = {"device": device, "numerics": numerics, "dtype": dtype, "progress": False}
    sizes: dict[str, Any] = {
        "max_model_len": longest + 32,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": chunk,
        "max_snapshots": 8,
    }
    limit = cache_bytes(config, numerics, dtype, 2 * sizes["max_model_len"], sizes)
    runner = ModelRunner.from_source(config, source, kv_cache_bytes=limit, **common, **sizes)
    single = ModelRunner.from_source(
        config, source, max_model_len=longest + 32, max_num_seqs=1, max_num_batched_tokens=chunk, **common
    )
    if runner.graphs is None and runner.device.type == "cpu":
        use_buckets(runner)
    return runner, single


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=required(__doc__).splitlines()[0])
    parser.add_argument("--model", default="v4", help="v4 or v32 (small ones), a preset or a config.json (default: v4)")
    parser.add_argument("--layers", type=int, help="keep this many layers of the model, and its MTP layer")
    parser.add_argument("--experts", type=int, help="routed experts per layer (default: the model's)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--numerics", default="exact", choices=list(CLOSE), help="default: exact")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens per request and step (default: none)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the engine (default: 2000)")
    parser.add_argument("--minutes", type=float, help="end after this time, whatever --steps says")
    parser.add_argument("--row", type=int, default=1000, help="steps between two measurements (default: 1000)")
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest prompt (default: 192)")
    parser.add_argument("--seqs", type=int, default=4, help="requests that run at the same time (default: 4)")
    parser.add_argument("--chunk", type=int, default=80, help="tokens of a step (default: 80)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file, written after every measurement")
    return parser.parse_args()


def summary(args: argparse.Namespace, soak: Soak, command: str) -> dict:
    names = (
        "rss",
        "objects",
        "files",
        "device_bytes",
        "device_reserved",
        "device_used",
        "wall_us",
        "cpu_us",
        "probe_us",
    )
    return {
        "benchmark": "soak",
        "command": command,
        "model": args.model,
        "layers": len(soak.runner.backbone_layers),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "growth": {name: growth([getattr(row, name) for row in soak.rows]) for name in names},
        "counts": dict(sorted(soak.counts.items())),
        "stats": {
            name: getattr(soak.engine.stats, name)
            for name in ("generated", "preempted", "evicted", "hit_rate", "acceptance_rate")
        },
        "rows": [asdict(row) for row in soak.rows],
    }


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # of the failures that are injected
    command = "python -m tests.engine.soak " + " ".join(sys.argv[1:])
    small = small_models()
    config = small[args.model] if args.model in small else ModelConfig.from_pretrained(args.model)
    config = cut_config(config, args.layers, args.experts)
    runner, single = make_runners(config, args.device, args.numerics, args.longest, args.seqs, args.chunk)
    until = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(runner, single, args.drafts, args.longest, args.seed, Path(folder))
        for row in soak.run(args.steps, args.row):
            print(json.dumps(asdict(row)), flush=True)
            if args.out:
                write_text(args.out, json.dumps(summary(args, soak, command), indent=1) + "\n")
            if time.monotonic() > until:
                break
        soak.finish()
    found = summary(args, soak, command)
    if args.out:
        write_text(args.out, json.dumps(found, indent=1) + "\n")
    del found["rows"]
    print(json.dumps(found))
    if soak.counts["worse token"] > WORSE * soak.engine.stats.generated:
        return 1
    return int(
        max(found["growth"][name] for name in ("rss", "objects", "files", "device_bytes", "device_used"))
        > MEMORY_GROWTH
    )


if __name__ == "__main__":
    raise SystemExit(main())
