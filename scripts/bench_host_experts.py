"""Experts in pinned host memory: rates of copies, steps of experts alone and of a whole model, beside the bus's limit.

    python scripts/bench_host_experts.py --parts copies,in_place,experts,model --out FILE

* ``copies``: bytes per second of one cudaMemcpy, and of the kernel that reads host memory, by its programs and warps.
* ``in_place``: products of one layer that read all weights from host memory, beside products of experts that are
  copied first, and of experts in the GPU's memory.
* ``experts``: the routed experts of all layers of a model as one CUDA graph, with random tokens and routings.
* ``model``: a whole model with random weights, decode steps as CUDA graphs and a prompt, and its memory beside that
  which ``deepseek-attn plan`` predicts. Routers are computed, and then replaced by the same random routings. ``--soak``
  repeats decode steps under routings that shift every few seconds, and compares the logits of a text meanwhile. How
  well a router predicts the next layer's is a property of trained weights: ``--shares`` sets which part of the
  predicted experts are those of the routing. The others are drawn by the same law. Predictions two layers ahead keep
  the same share of these predictions, so that its square is right. The prediction is computed all the same. "router":
  random tokens, whose routings and predictions are those of the routers, with random weights.

Routings are uniform, or follow Zipf's law with exponent 1 over the experts of each layer in an order of its own; each
step draws anew. The limit of the bus is the bytes of the experts that a step copied over the rate of cudaMemcpy.
``--host-layers`` layers of weights in host memory are shared by all layers; each has its own rows on the GPU. The last
line on standard output is one JSON document; ``--out`` keeps it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_attn import ModelConfig
from deepseek_attn.checkpoint import loader
from deepseek_attn.checkpoint.random import RepeatingSource
from deepseek_attn.cli import plan as plan_command
from deepseek_attn.cli.info import environment
from deepseek_attn.cli.options import memory_size, numbers
from deepseek_attn.cli.plan_facts import PlanFacts
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, Row, forced_row
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.moe import fetch_experts, moe_experts, plan
from deepseek_attn.kernels.moe.types import ExpertsCall, ExpertStack, expert_parts
from deepseek_attn.lab.bench.layer import reserved_sequences
from deepseek_attn.layers.weights import parameter
from deepseek_attn.models.expert_rows import Stacks
from deepseek_attn.models.host_experts import AHEAD_LOAD, LayerExperts
from deepseek_attn.models.host_rows import ExpertRows
from deepseek_attn.models.moe import Experts, Gate, MoE
from deepseek_attn.runner import ModelRunner, build
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.host_experts import give_rows, predict_experts
from deepseek_attn.utils.device import peak_memory, pinned_empty, resident_memory
from deepseek_attn.utils.files import write_text

GPU_ROOM = 6 << 30  # left free beside the rows of the experts alone
COPY_SIZES = [(8, 4), (16, 4), (32, 4), (64, 4), (132, 4), (264, 4), (8, 16), (16, 16), (32, 8), (64, 8)]
STEPS, SECONDS = 150, 2.5  # of a routing before it is timed, and as often while it is timed
SETTLING = 400  # steps after which the residents have followed a routing: counts of use halve in 44
SHIFT_SECONDS = 5.0  # of a routing of the soak
SOAK_SHARE = 0.8  # of the soak's predictions that are right


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog=Path(__file__).name, description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default="v4_flash", help="a preset (default: v4_flash)")
    parser.add_argument("--parts", default="copies,experts,model")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--host-layers", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-bytes", type=memory_size, help="bytes of rows on the GPU; default: all that is free")
    parser.add_argument("--gpu", default="h200", help="whose memory `plan` predicts (default: h200)")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument(
        "--shares", type=shares, default=[0.0, 0.5, 0.8, 1.0], help="right parts of predictions; 'none': none is made"
    )
    parser.add_argument(
        "--in-a-row", type=int, default=4, help="steps launched before one is waited for, as engines do (default: 4)"
    )
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--soak-batch", type=int, default=4, help="requests of the soak's steps (default: 4)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    config = ModelConfig.from_pretrained(args.model)
    if device.type == "cuda" and {"experts", "in_place"} & set(args.parts.split(",")):
        begin = time.perf_counter()
        compile_kernels(config, [*args.batches, args.prompt])
        say(f"compiled the kernels of experts in {time.perf_counter() - begin:.1f} s")
    found: dict[str, Any] = {"config": args.model}
    with suppress(Exception):
        found["environment"] = environment()
    bench = Bench(config, device, args)
    for part in args.parts.split(","):
        begin = time.perf_counter()
        try:
            found[part] = getattr(bench, part)()
        except Exception as error:  # the other parts may work
            traceback.print_exc()
            found[part] = bench.before_soak | {"error": f"{type(error).__name__}: {error}"[:500]}
        say(f"{part} took {time.perf_counter() - begin:.1f} s")
    text = json.dumps(found, default=str)
    if args.out is not None:
        write_text(args.out, text + "\n")
    print(text, flush=True)
    sys.exit(any("error" in found[part] for part in args.parts.split(",")))


def shares(text: str) -> list[float]:
    return [] if text == "none" else [float(part) for part in text.split(",")]


def say(text: str) -> None:
    print(text, flush=True)


def compile_kernels(config: Any, tokens: list[int]) -> None:
    """Compiles the kernels of experts alone, in processes, before this one uses the GPU."""
    from deepseek_attn.runner.ahead.pool import compile_all
    from deepseek_attn.runner.ahead.recording import recorded_launches

    E, D, inner, k = (
        config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    )  # fmt: skip
    meta = torch.device("meta")

    def stack(rows: int, width: int) -> ExpertStack:
        shapes = (E, rows, width // 2), (E, rows, width // 32), (E, rows)
        return ExpertStack(*(torch.empty(shape, dtype=torch.uint8, device=meta) for shape in shapes))

    stacks = stack(inner, D), stack(inner, D), stack(D, inner)
    with recorded_launches(GPU((9, 0), 132)) as launches:
        layer = ExpertRows.of([stacks, stacks], meta, None).layers[0]
        for T in tokens:
            ids, weights = torch.empty(T, k, dtype=torch.int64, device=meta), torch.empty(T, k, device=meta)
            x = torch.empty(T, D, dtype=torch.bfloat16, device=meta)
            found, options = layer.find(ids), (config.swiglu_limit, False, InputFormat(True))
            moe_experts(ExpertsCall(x, ids, weights, *layer.stacks, *options, slots=found))
            moe_experts(ExpertsCall(x, ids, weights, *stacks, *options))
        variants = list(launches.variants.values())
    compile_all(variants, max(1, (os.cpu_count() or 2) - 2), lambda **event: None)


class Bench:
    """All parts; each part frees its memory.

    Attributes:
        rate: bytes per second of cudaMemcpy from pinned memory, once measured.
        before_soak: results of a model whose soak has begun; calls: of `steps` so far.
    """

    def __init__(self, config: Any, device: torch.device, args: argparse.Namespace):
        self.config, self.device, self.args = config, device, args
        self.rate: float | None = None
        self.before_soak: dict[str, Any] = {}
        self.source: Tensor | None = None  # of `memcpy_rate`
        self.calls = 0
        self.rows: ExpertRows | None = None

    # --- copies ---

    def copies(self) -> dict[str, Any]:
        """Rates of copies from pinned memory."""
        rates: dict[str, Any] = {"memcpy": self.memcpy_rate()}
        E, D, inner = 32, self.config.hidden_size, self.config.moe_intermediate_size
        host = self.host_layer(E, D, inner)
        state = ExpertRows.of([host], self.device, None).layers[0].state
        nbytes = (E - 1) * sum(part[0].nbytes for part in expert_parts(host))
        every = torch.arange(E, device=self.device).view(1, E)  # of which one is cached
        for programs, warps in COPY_SIZES if self.device.type == "cuda" else []:
            with forced_row(plan.COPIES, Row(ANY, "copy_experts_kernel", LaunchBlock(programs, warps))):
                seconds = self.timed(lambda: fetch_experts(state, every), 3)
            for part, rows in zip(expert_parts(host), expert_parts(state.device), strict=True):
                found = rows[state.found[E - 1]].cpu().view(torch.uint8)
                assert torch.equal(found, part[E - 1].view(torch.uint8)), "copied bytes differ"
            rates[f"{programs} programs of {warps} warps"] = nbytes / seconds
            say(f"  kernel, {programs:3} programs of {warps:2} warps: {nbytes / seconds / 1e9:6.2f} GB/s")
        return rates

    def memcpy_rate(self, again: bool = False) -> float:
        """Bytes per second of cudaMemcpy; measured once, or ``again``: other programs may use the bus."""
        if self.rate is None or again:
            if self.source is None:
                self.source = self.pinned((1 << 27,), torch.uint8)
            source, target = self.source, torch.empty_like(self.source, device=self.device)
            rate = source.nbytes / self.timed(lambda: target.copy_(source, non_blocking=True), 5)
            if self.rate is None:
                say(f"  cudaMemcpy: {rate / 1e9:.2f} GB/s")
                self.rate = rate
            return rate
        return self.rate

    # --- products that read host memory ---

    @torch.inference_mode()
    def in_place(self) -> dict[str, Any]:
        """Seconds of the products of one layer, by where they read weights, and bytes per second of those outside."""
        config, device, layers = self.config, self.device, 16
        E, k = config.n_routed_experts, config.num_experts_per_tok
        D, inner = config.hidden_size, config.moe_intermediate_size
        host = self.host_layer(E, D, inner)
        nbytes = sum(part[0].nbytes for part in expert_parts(host))
        state = ExpertRows.of([host], device, None).layers[0].state
        resident = _moved(host, lambda part: part.to(device))
        mapped = _moved(host, in_address_space)
        results: dict[str, Any] = {}
        for T in self.args.batches:
            x = torch.randn(T, D, device=device).to(torch.bfloat16)
            weights, options = torch.rand(T, k, device=device), (config.swiglu_limit, False, InputFormat(True))
            drawn = [next(self.routings("uniform", 1, T, k, E, seed))[0] for seed in range(layers)]
            needed = sum(len(ids.unique()) for ids in drawn)

            def on(
                stacks: Stacks, x: Tensor = x, drawn: Any = drawn, weights: Any = weights, o: Any = options
            ) -> Tensor:
                return torch.stack([moe_experts(ExpertsCall(x, ids, weights, *stacks, *o)) for ids in drawn])

            def copied(x: Tensor = x, drawn: Any = drawn, weights: Any = weights, o: Any = options) -> None:
                for ids in drawn:
                    for held in (state.row, state.owner):
                        held.fill_(-1)
                    found = fetch_experts(state, ids)
                    moe_experts(ExpertsCall(x, ids, weights, *state.device, *o, slots=found))

            seconds = {
                "in GPU memory": self.timed(lambda: on(resident), 5), "copied first": self.timed(copied, 5),
                "in place": self.timed(lambda: on(mapped), 5),
            }  # fmt: skip
            assert torch.equal(on(resident), on(mapped)), "products from host memory differ"
            results[f"batch {T}"] = {name: {"seconds": value / layers} for name, value in seconds.items()}
            for name in ("copied first", "in place"):
                results[f"batch {T}"][name]["rate"] = rate = needed * nbytes / seconds[name]
                say(f"  batch {T:2}, {name:12}: {seconds[name] / layers * 1e6:7.0f} us a layer, {rate / 1e9:.1f} GB/s")
        return results

    # --- memory ---

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pinned(shape, dtype) if self.device.type == "cuda" else torch.zeros(shape, dtype=dtype, device="cpu")

    def host_layer(self, E: int, D: int, inner: int) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
        """One layer of random FP4 experts in pinned memory."""

        def random(shape: tuple[int, ...], low: int, high: int) -> Tensor:
            made = torch.randint(low, high, shape, dtype=torch.uint8, device=self.device)
            return self.pinned(shape, torch.uint8).copy_(made)

        def stack(rows: int, width: int) -> ExpertStack:
            weight, scale = random((E, rows, width // 2), 0, 256), random((E, rows, width // 32), 118, 123)
            return ExpertStack(weight, scale, self.pinned((E, rows), torch.uint8).copy_(scale.amax(-1)))

        return stack(inner, D), stack(inner, D), stack(D, inner)

    def timed(self, call: Callable[[], object], repeats: int) -> float:
        """Median seconds of a call, after one."""
        call()
        times = []
        for _ in range(repeats):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def free(self) -> None:
        """Gives memory of earlier parts back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- routings ---

    def routings(
        self, kind: str, layers: int, T: int, topk: int, E: int, seed: int = 1, law: int | None = None
    ) -> Iterator[Tensor]:
        """Expert ids ``[layers, T, topk]`` of one step after the other, on the device; law: seed of Zipf's order."""
        weight = 1 / torch.arange(1, E + 1, device=self.device, dtype=torch.float32)
        ordering = torch.Generator(self.device).manual_seed(seed if law is None else law)
        order = torch.rand(layers, E, device=self.device, generator=ordering).argsort(1)
        generator = torch.Generator(self.device).manual_seed(1000 + seed)
        log_weight = weight.log()[order] if kind == "zipf" else torch.zeros(layers, E, device=self.device)
        while True:
            # the largest of log-probabilities with Gumbel noise: drawn without replacement
            uniform = torch.rand(layers, T, E, device=self.device, generator=generator).clamp_(min=1e-9)
            yield (log_weight[:, None] - (-uniform.log()).log()).topk(topk, -1).indices

    def draws(self, rows: ExpertRows, ids: Tensor, kind: str, guessed: Sequence[Tensor] = ()) -> Draw:
        """A function that draws ``ids [layers, T, topk]``, which steps read, and what modes with a share predict.

        ``guessed``: one layer ahead, then two.
        """
        (layers, T, topk), E = ids.shape, len(rows.layers[0].state.row)
        self.calls += 1  # the residents know the routings of earlier calls
        drawn, others = (self.routings(kind, layers, T, topk, E, 2 * self.calls + i, 1) for i in (0, 1))
        if kind == "zipf" and self.device.type == "cuda":
            self.settle(rows, layers, drawn)

        def draw(mode: Mode, again: bool) -> Callable[[], object]:
            routing = ids.clone() if again else next(drawn)
            guesses, share = [routing], 1.0 if again or mode.share is None else mode.share
            for _ in guessed:
                is_right = torch.rand(ids.shape, device=ids.device) < share
                guesses.append(torch.where(is_right, guesses[-1], next(others)))

            def set_inputs() -> None:
                for target, source in zip((ids, *guessed), guesses, strict=True):
                    target.copy_(source)

            return set_inputs

        return draw

    def steps(self, rows: ExpertRows, layers: int, modes: Sequence[Mode], draw: Draw) -> list[dict[str, Any]]:
        """Means of steps: seconds, experts copied, share of needed experts already on the GPU.

        The modes and cudaMemcpy take turns, ``--in-a-row`` steps at a time: a bus that others use is the same for all.
        """
        totals, in_a_row = [layer.state.totals for layer in rows.layers[:layers]], self.args.in_a_row

        def step(mode: Mode, again: bool = False) -> float:
            inputs = [draw(mode, again) for _ in range(in_a_row)]
            self.synchronize()
            begin = time.perf_counter()
            for set_inputs in inputs:
                set_inputs()
                mode.run()
            self.synchronize()
            return (time.perf_counter() - begin) / in_a_row

        seconds = self.args.seconds * len(modes)
        deadline, number = time.perf_counter() + seconds, 0
        while number < STEPS and time.perf_counter() < deadline:
            for mode in modes:
                step(mode)
            number += in_a_row
        times: list[list[float]] = [[] for _ in modes]
        counts = torch.zeros(len(modes), 4, dtype=torch.int64, device=self.device)
        rates: list[float] = []
        deadline = time.perf_counter() + seconds
        while (done := len(times[0]) * in_a_row) < 5 or (done < STEPS and time.perf_counter() < deadline):
            for i, mode in enumerate(modes):
                before = torch.stack(totals).sum(0)
                times[i].append(step(mode))
                counts[i] += torch.stack(totals).sum(0) - before
            rates.append(self.memcpy_rate(again=True))
        self.rate = statistics.mean(rates)
        results: list[dict[str, Any]] = []
        for mode, taken, count in zip(modes, times, (counts / (len(times[0]) * in_a_row)).tolist(), strict=True):
            needed, fetched, ahead, dropped = count
            # the same routing again: all experts are there, or in rows of the call
            there = statistics.median([step(mode, True) for _ in range(6)][1:])
            results.append({
                "seconds": statistics.mean(taken), "median_seconds": statistics.median(taken),
                "steps": len(taken) * in_a_row, "steps_before": number, "in_a_row": in_a_row,
                "copied": fetched + ahead, "needed": needed, "hit_rate": 1 - (fetched + ahead) / needed,
                "seconds_all_there": there, "memcpy_rate": self.rate,
            } | ({} if mode.share is None else {"share": mode.share, "ahead": ahead, "dropped": dropped}))  # fmt: skip
        return results

    def settle(self, rows: ExpertRows, layers: int, drawn: Iterator[Tensor]) -> None:
        """Lets cached experts follow a routing for `SETTLING` steps that copy nothing, then copies what rows lack."""
        from deepseek_attn.kernels.moe import launch

        copy_parts = launch._copy_parts
        launch._copy_parts = lambda *args: None
        try:
            for _ in range(SETTLING):
                for layer, ids in zip(rows.layers[:layers], next(drawn), strict=True):
                    fetch_experts(layer.state, ids.contiguous())
        finally:
            launch._copy_parts = copy_parts
        for layer in rows.layers[:layers]:
            state = layer.state
            parts = list(zip(expert_parts(state.device), expert_parts(state.host), strict=True))
            for row, expert in enumerate(state.owner.tolist(), state.first):
                for target, source in parts:
                    target[row].copy_(source[expert], non_blocking=True)
        self.synchronize()

    def with_limit(self, result: dict[str, Any], experts: float, nbytes: int) -> dict[str, Any]:
        """A result with the seconds that the bus takes for this number of experts, and the ratio to them.

        ``over_limit``: to the bus, or to the step with all experts there, whichever takes longer.
        """
        bus, seconds = experts * nbytes / self.memcpy_rate(), result["seconds"]
        limit = max(bus, result["seconds_all_there"])
        return result | {
            "bus_seconds": bus, "over_bus": seconds / bus if bus else None, "over_limit": seconds / limit,
        }  # fmt: skip

    def report(self, what: str, result: dict[str, Any], tokens: int) -> None:
        ratio = result["over_bus"]
        ahead = ""
        if "ahead" in result:
            part = result["ahead"] / max(result["copied"], 1e-9)
            ahead = f"; {part:.3f} of the copies predicted, {result['dropped']:.1f} others dropped"
        say(
            f"  {what}: {result['seconds'] * 1e3:8.2f} ms, {tokens / result['seconds']:8.1f} tokens/s; "
            f"bus {result['bus_seconds'] * 1e3:8.2f} ms, ratio {f'{ratio:.3f}' if ratio else '-'}; "
            f"hit rate {result.get('hit_rate', 0):.3f}; all there {result['seconds_all_there'] * 1e3:.2f} ms, "
            f"ratio to the longer {result['over_limit']:.3f}; "
            f"{result.get('steps_before', 0)} + {result.get('steps', 0)} steps{ahead}"
        )

    # --- experts alone ---

    @torch.inference_mode()
    def experts(self) -> dict[str, Any]:
        """The experts of all layers, as a CUDA graph."""
        config, device = self.config, self.device
        E, D, k = config.n_routed_experts, config.hidden_size, config.num_experts_per_tok
        layers, limit = len(config.layers), config.swiglu_limit
        self.memcpy_rate()
        self.free()
        hosts = [self.host_layer(E, D, config.moe_intermediate_size) for _ in range(self.args.host_layers)]
        say(f"  {len(hosts)} layers of experts in host memory")
        budget = self.args.cache_bytes or torch.cuda.mem_get_info()[0] - GPU_ROOM
        rows = ExpertRows.of([hosts[i % len(hosts)] for i in range(layers)], device, budget)
        nbytes = sum(part[0].nbytes for part in expert_parts(hosts[0]))
        say(f"  {rows.cached} of {E} experts of each layer in {rows.nbytes / 1e9:.1f} GB")
        results: dict[str, Any] = {"cached": rows.cached, "expert_bytes": nbytes, "row_bytes": rows.nbytes}

        def compute(x: Tensor, ids: Tensor, weights: Tensor) -> None:
            rows.begin(ids[0, :, 0], ids.shape[2])
            for number, layer in enumerate(rows.layers):
                found = layer.find(ids[number])
                options = limit, False, InputFormat(True)
                moe_experts(ExpertsCall(x, ids[number], weights, *layer.stacks, *options, slots=found))
                layer.release()
            rows.end()

        for T in self.args.batches:
            x = torch.randn(T, D, device=device).bfloat16() if device.type == "cuda" else torch.randn(T, D)
            ids = next(self.routings("uniform", layers, T, k, E))
            weights = torch.rand(T, k, device=device)
            run = self.graph(lambda x=x, ids=ids, weights=weights: compute(x, ids, weights))
            for kind in ("uniform", "zipf"):
                (result,) = self.steps(rows, layers, [Mode(run)], self.draws(rows, ids, kind))
                results[f"{kind}, batch {T}"] = result = self.with_limit(result, result["copied"], nbytes)
                self.report(f"{kind:7} batch {T:2}", result, T)
        T = self.args.prompt
        x = torch.randn(T, D, device=device).bfloat16() if device.type == "cuda" else torch.randn(T, D)
        ids, weights = next(self.routings("uniform", layers, T, k, E)), torch.rand(T, k, device=device)
        self.prompt(results, lambda: compute(x, ids, weights), layers * (E - rows.cached), nbytes)
        return results

    def prompt(self, results: dict[str, Any], call: Callable[[], object], experts: int, nbytes: int) -> None:
        """Times a prompt, which copies this number of experts, and again without copies."""
        T, seconds = self.args.prompt, self.timed(call, 3)
        with no_copies():
            there = self.timed(call, 3)
        result = self.with_limit({"seconds": seconds, "seconds_all_there": there}, experts, nbytes)
        results[f"prompt of {T}"] = result
        self.report(f"prompt of {T}", result, T)

    def graph(self, call: Callable[[], object]) -> Callable[[], object]:
        call()
        if self.device.type != "cuda":
            return call
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    # --- a whole model ---

    def model(self) -> dict[str, Any]:
        """Decode steps and a prompt of a whole model."""
        self.memcpy_rate()
        self.free()
        config, T = self.config, self.args.prompt
        soaking = [self.args.soak_batch + 1] if self.args.soak else []  # it scores a text beside its steps
        sequences = max([*self.args.batches, *soaking])
        options = {"max_model_len": 2 * T, "max_num_seqs": sequences, "max_num_batched_tokens": T}
        memory = {} if self.device.type != "cuda" else {
            "expert_memory": "host", "expert_cache_bytes": self.args.cache_bytes, "compile_ahead": True
        }  # fmt: skip
        predicted = self.predicted(options)
        begin = time.perf_counter()
        E, D, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        hosts = [self.host_layer(E, D, inner) for _ in range(self.args.host_layers)]
        self.free()
        say(f"  {len(hosts)} layers of experts made in {time.perf_counter() - begin:.1f} s")
        with shared_experts(hosts), given_routings() as given:
            runner = ModelRunner.from_source(
                config, RepeatingSource(config), device=self.device, progress=False, **options, **memory
            )
            with runner:
                loaded = time.perf_counter() - begin
                say(f"  {runner}, loaded in {loaded:.1f} s")
                results = self.time_model(runner, given) | {"load_seconds": loaded}
                if self.args.soak:
                    self.before_soak = results
                    if self.args.out is not None:  # in case the soak is cut off
                        write_text(self.args.out, json.dumps({"config": self.args.model, "model": results}) + "\n")
                    results["soak"] = self.soak(runner, given)
                return results | self.memory(predicted)

    def predicted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Bytes of GPU and host that ``deepseek-attn plan`` predicts for a runner with these options."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        plan_command.add_arguments(parser)
        flags = ["--model", self.args.model, "--gpu", self.args.gpu, "--expert-memory", "host", "--host-memory", "9TB"]
        flags += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        flags += [f"--expert-cache-bytes={self.args.cache_bytes}"] if self.args.cache_bytes else []
        facts = PlanFacts(parser.parse_args(flags)).collect()
        host = next(row for row in facts["experts"]["settings"] if row["memory"] == "host")
        return {"gpu": facts["gpu"]["total"], "parts": facts["gpu"]["parts"], "host": host["host_bytes"]}

    def memory(self, predicted: dict[str, Any]) -> dict[str, Any]:
        """Peaks of this process beside the predictions; of host memory also the part that is shared here."""
        layers = len(self.config.layers) + len(self.config.mtp_layers)
        found: dict[str, Any] = {"predicted": predicted, "peak_host_bytes": peak_memory()}
        host = predicted["host"]
        shared = host * self.args.host_layers / layers
        say(
            f"  host memory: {peak_memory() / 1e9:.1f} GB at most; predicted {host / 1e9:.1f} GB of experts, "
            f"{shared / 1e9:.1f} GB if {self.args.host_layers} of {layers} layers hold them"
        )
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            found |= {
                "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
                "reserved_gpu_bytes": torch.cuda.max_memory_reserved(), "used_gpu_bytes": total - free,
            }  # fmt: skip
            say(
                f"  GPU memory: {found['peak_gpu_bytes'] / 1e9:.1f} GB allocated at most, "
                f"{(total - free) / 1e9:.1f} of {total / 1e9:.1f} used; predicted {predicted['gpu'] / 1e9:.1f}"
            )
        return found

    def rows_of(self, runner: ModelRunner) -> ExpertRows:
        """Rows of the model's experts."""
        if self.rows is None:
            self.rows = runner.expert_rows or rows_on_cpu(runner)
        return self.rows

    def time_model(self, runner: ModelRunner, given: Given) -> dict[str, Any]:
        config, T, rows = self.config, self.args.prompt, self.rows_of(runner)
        layers = len(config.layers)
        E, k = config.n_routed_experts, config.num_experts_per_tok
        nbytes = sum(part[0].nbytes for part in expert_parts(rows.layers[0].state.host))
        say(f"  {rows.cached} of {E} experts of each layer in {rows.nbytes / 1e9:.1f} GB")
        results: dict[str, Any] = {"cached": rows.cached, "expert_bytes": nbytes, "row_bytes": rows.nbytes}

        def prompt() -> None:
            sequence = runner.sequence([7 * i % config.vocab_size for i in range(T)])
            try:
                runner.step([(sequence, T)])
            finally:
                runner.manager.free(sequence.cache)

        begin = time.perf_counter()
        prompt()
        self.synchronize()
        say(f"  first prompt, with kernels that are compiled meanwhile: {time.perf_counter() - begin:.1f} s")
        self.prompt(results, prompt, layers * (E - rows.cached), nbytes)
        if self.args.shares:
            text = [7 * i % config.vocab_size for i in range(16)]
            results["router"], results["router_early"] = given.accuracy(runner, text)
            say(
                f"  predictions of the router, random weights: {results['router']:.3f} of a token's experts are right, "
                f"{results['router_early']:.3f} two layers ahead"
            )
        for batch in self.args.batches:
            ids = next(self.routings("uniform", layers, batch, k, E))
            guessed = ids.clone(), ids.clone()
            given.routings[batch], given.guesses[batch], given.early[batch] = map(list, (ids, *guessed))

            def time_modes(kind: str, modes: list[Mode], draw: Draw, batch: int = batch) -> None:
                found = self.steps(rows, layers, modes, draw)
                for mode, result in zip(modes, found, strict=True):
                    name = f"{kind}, batch {batch}" + ("" if mode.share is None else f", ahead {mode.share}")
                    results[name] = result = self.with_limit(result, result["copied"], nbytes)
                    self.report(f"{name:28}", result, batch)

            enabled = [False, *([True] if self.args.shares else [])]
            with (
                decode_steps(runner, batch, T + 1, rows, enabled) as steps,
                runner.op_settings(),
                torch.inference_mode(),
            ):
                modes = [Mode(steps[0].run), *(Mode(steps[1].run, share) for share in self.args.shares)]
                for kind in ("uniform", "zipf"):
                    time_modes(kind, modes, self.draws(rows, ids, kind, guessed))
            del given.routings[batch], given.guesses[batch], given.early[batch]
            if not self.args.shares:
                continue
            with (
                decode_steps(runner, batch, T + 1, rows, enabled) as steps,
                runner.op_settings(),
                torch.inference_mode(),
            ):

                def draw_tokens(
                    mode: Mode, again: bool, steps: list[TimedStep] = steps, batch: int = batch
                ) -> Callable[[], object]:
                    tokens = torch.randint(config.vocab_size, (batch, 1), device="cpu").tolist()
                    return lambda: None if again else [step.set_tokens(tokens) for step in steps]

                modes = [Mode(steps[0].run), Mode(steps[1].run, round(results["router"], 3))]
                time_modes("router", modes, draw_tokens)
        return results

    def soak(self, runner: ModelRunner, given: Given) -> dict[str, Any]:
        """Decode steps under routings that shift; between them the logits of a text and of a step, and the memory.

        With ``--out``, each routing is a line of a file beside it, so that a run that is cut off leaves its rounds.
        """
        config, T, batch = self.config, min(300, self.args.prompt), self.args.soak_batch
        E, k, layers = config.n_routed_experts, config.num_experts_per_tok, len(config.layers)
        text = [7 * i % config.vocab_size for i in range(T)]

        chunk = 2 if batch == 1 else 1  # its routers' own experts: those of steps of ``batch`` tokens are given

        def logits() -> list[Tensor]:
            """Of prompts that copy all experts ahead, and of few tokens that fetch what they need."""
            rows = *runner.score([text]), *runner.score([text[:6]], chunk_size=chunk)
            return [row.view(torch.int32) for row in rows]

        expected, ids = logits(), next(self.routings("uniform", layers, batch, k, E))
        guessed, early, fixed = ids.clone(), ids.clone(), ids.clone()
        given.routings[batch], given.guesses[batch], given.early[batch] = map(list, (ids, guessed, early))
        rounds: list[dict[str, Any]] = []
        begin = time.perf_counter()
        with decode_steps(runner, batch, len(text), self.rows_of(runner), [True]) as (step,):

            def take(routing: Tensor) -> None:
                with torch.inference_mode():
                    ids.copy_(routing)
                    right = ids
                    for guess in (guessed, early):
                        is_right = torch.rand(ids.shape, device=ids.device) < SOAK_SHARE
                        right = guess.copy_(torch.where(is_right, right, (right + 1) % E))
                    step.run()
                self.synchronize()

            take(fixed)
            of_step = step.logits().clone()
            while not rounds or time.perf_counter() - begin < 60 * self.args.soak:
                drawn, steps = self.routings("zipf", layers, batch, k, E, 100 + len(rounds)), 0
                shift = time.perf_counter() + min(SHIFT_SECONDS, 30 * self.args.soak)
                while not steps or time.perf_counter() < shift:
                    take(next(drawn))
                    steps += 1
                take(fixed)
                same_step = torch.equal(step.logits().view(torch.uint8), of_step.view(torch.uint8))
                same = all(map(torch.equal, expected, logits()))
                rounds.append(
                    {"seconds": time.perf_counter() - begin, "steps": steps, "same": same, "same_step": same_step}
                    | self.own_memory()
                )
                if self.args.out is not None:
                    with open(self.args.out.with_suffix(".soak.jsonl"), "a", encoding="utf-8") as file:
                        file.write(json.dumps(rounds[-1]) + "\n")
        del given.routings[batch], given.guesses[batch], given.early[batch]
        finite = all(bool(row.view(torch.float32).isfinite().all()) for row in expected)
        stats = runner.expert_rows.stats if runner.expert_rows is not None else None
        result = {
            "minutes": rounds[-1]["seconds"] / 60, "routings": len(rounds),
            "steps": sum(row["steps"] for row in rounds),
            "same_logits": all(row["same"] and row["same_step"] for row in rounds), "finite": finite,
        } | {
            name: [rounds[0][name], rounds[-1][name]] for name in rounds[0] if name.endswith("_bytes")
        } | {
            "hit_rate": stats.hit_rate if stats else None, "bytes_read": stats.bytes_read if stats else None,
            "ahead": stats.ahead if stats else None, "dropped": stats.dropped if stats else None,
        }  # fmt: skip
        say(f"  soak: {result}")
        return result

    def own_memory(self) -> dict[str, int]:
        """Bytes that this process holds, whatever other programs do."""
        found = {"host_bytes": resident_memory(), "peak_host_bytes": peak_memory()}
        if self.device.type == "cuda":
            found |= {
                "allocated_gpu_bytes": torch.cuda.memory_allocated(), "reserved_gpu_bytes": torch.cuda.memory_reserved()
            }  # fmt: skip
        return found


class TimedStep(NamedTuple):
    """A decode step: a call, one that sets its tokens ``[[token], ...]``, and one that returns its last logits."""

    run: Callable[[], object]
    set_tokens: Callable[[list[list[int]]], None]
    logits: Callable[[], Tensor]


@contextmanager
def decode_steps(
    runner: ModelRunner, batch: int, context: int, rows: ExpertRows, ahead: Sequence[bool]
) -> Iterator[list[TimedStep]]:
    """Decode steps of this number of requests, as CUDA graphs where there can be one; ``ahead``: which ones predict."""
    made: list[TimedStep] = []
    with reserved_sequences(runner, batch, 1, context) as caches:
        for enabled in ahead:
            with runner.op_settings(), torch.inference_mode(), copies_ahead(rows, enabled):
                steps = DecodeGraphs(
                    runner.whole_model(), runner.layout, runner.device, batches=[batch], engram=runner.tables
                )
                step = steps.step(steps.size_for([1] * batch, context))
                places = [cache.num_tokens for cache in caches], steps.tables.rows(caches)

                def set_tokens(tokens: list[list[int]], step: Any = step, places: Any = places) -> None:
                    step.set_inputs(tokens, *places)

                set_tokens([[(7 * i) % runner.config.vocab_size] for i in range(batch)])
            run = step.run if step.graph is not None else _eager(step.run, rows, enabled)
            made.append(TimedStep(run, set_tokens, lambda step=step: step.logits))
        yield made


def _eager(run: Callable[[], object], rows: ExpertRows, ahead: bool) -> Callable[[], object]:
    def call() -> None:
        with copies_ahead(rows, ahead):
            run()

    return call


def _moved(stacks: Stacks, move: Callable[[Tensor], Tensor]) -> Stacks:
    """Stacks of other tensors."""
    w1, w3, w2 = (
        ExpertStack(move(weight), *(None if part is None else move(part) for part in others))
        for weight, *others in stacks
    )
    return w1, w3, w2


class _HostBytes:
    """Pinned memory under the interface of arrays in a GPU's memory: it has one address for both."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


def in_address_space(tensor: Tensor) -> Tensor:
    """A tensor of bytes in pinned memory as a CUDA tensor, whose kernels read it over the bus."""
    return torch.as_tensor(_HostBytes(tensor), device="cuda")


@contextmanager
def no_copies() -> Iterator[None]:
    """Prompts read rows of other experts in this context instead of copying theirs."""
    copy = LayerExperts._copy_missing

    def leave_out(self: LayerExperts) -> None:
        row = self.state.row
        self.state.found.copy_(torch.where(row < 0, self.state.staged, row))

    LayerExperts._copy_missing = leave_out
    try:
        yield
    finally:
        LayerExperts._copy_missing = copy


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Pinned memory as the library allocates it, or torch's where the driver locks no memory of others."""
    try:
        return pinned_empty(shape, dtype)
    except Exception as error:
        say(f"  pinned_empty failed ({error}): memory of torch's allocator instead")
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


@contextmanager
def shared_experts(hosts: Sequence[Stacks]) -> Iterator[None]:
    """The layers of a model that is built in this context have these experts in turn; a checkpoint's are not read.

    Nothing checks that host memory holds them all.
    """
    load, hold, available = loader._load, build.hold_experts, build.available_memory

    def load_others(slot: Any, source: Any, name: str) -> bool:
        return ".ffn.experts." not in name and load(slot, source, name)

    def share_and_hold(model: Any, *options: Any) -> ExpertRows | None:
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        for number, layer in enumerate(layers):
            for linear, stack in zip(layer.projections, hosts[number % len(hosts)], strict=True):
                linear.weight, linear.exponent = parameter(stack.weight), stack.exponent
                linear.scale = None if stack.scale is None else parameter(stack.scale)
        return hold(model, *options)

    loader._load, build.hold_experts, build.available_memory = load_others, share_and_hold, lambda: 1 << 50
    try:
        yield
    finally:
        loader._load, build.hold_experts, build.available_memory = load, hold, available


class Mode(NamedTuple):
    """Steps to time: a call, and the share of their predictions that is right; None: they predict nothing."""

    run: Callable[[], object]
    share: float | None = None


Draw = Callable[[Mode, bool], Callable[[], object]]
"""Draws the inputs of a step of a mode, or takes the last ones ``again`` and predicts all; returns what sets them."""


@dataclass
class Given:
    """Experts that replace those of routers, by the number of tokens: int64 ``[T, k]`` of each layer.

    Attributes:
        routings, guesses, early: of routers, of their predictions, and of those two layers ahead.
        made: while predictions are recorded: (kind, gate, experts) of predictions and of routings, as they come.
        current: number of the layer that computes.
    """

    routings: dict[int, list[Tensor]] = field(default_factory=dict)
    guesses: dict[int, list[Tensor]] = field(default_factory=dict)
    early: dict[int, list[Tensor]] = field(default_factory=dict)
    made: list[tuple[str, Gate, Tensor]] | None = None
    current: int = 0

    def accuracy(self, runner: ModelRunner, text: list[int]) -> tuple[float, float]:
        """Share of the experts of a text's tokens that routers predict, one layer and two layers ahead."""
        self.made = []
        runner.score([text])
        right, needed = {"guess": 0, "early": 0}, {"guess": 0, "early": 0}
        predicted: dict[tuple[str, int], Tensor] = {}
        for kind, gate, experts in self.made:
            if kind in right:
                predicted[kind, id(gate)] = experts
                continue
            for name in right:
                if (guess := predicted.pop((name, id(gate)), None)) is not None:
                    right[name] += int((guess[:, :, None] == experts[:, None]).any(1).sum())
                    needed[name] += experts.numel()
        self.made = None
        return right["guess"] / max(1, needed["guess"]), right["early"] / max(1, needed["early"])


@contextmanager
def given_routings() -> Iterator[Given]:
    """Routers return given experts in this context."""
    given = Given()
    forward, lookup, predict, compute = Gate.forward, Gate.lookup, Gate.predict, MoE.forward
    numbers_of: dict[int, int] = {}

    def number_of(gate: Gate) -> int:
        return numbers_of.setdefault(id(gate), len(numbers_of))

    def chosen(gate: Gate, experts: Tensor, others: dict[int, list[Tensor]]) -> Tensor:
        number = number_of(gate)
        layers = others.get(len(experts))
        return experts if layers is None or number >= len(layers) else layers[number]

    def replaced(self: Gate, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        experts, weights = forward(self, x, token_ids)
        if given.made is not None:
            given.made.append(("routing", self, experts))
        return chosen(self, experts, given.routings), weights

    def guessed(self: Gate, x: Tensor) -> Tensor:
        experts = forward(self, x, x.new_empty(0, dtype=torch.int64))[0]
        is_early = number_of(self) == given.current + 2
        if given.made is not None:
            given.made.append(("early" if is_early else "guess", self, experts))
        return chosen(self, experts, given.early if is_early else given.guesses)

    def computed(self: MoE, x: Tensor, token_ids: Tensor, hidden: Any = None) -> Tensor:
        given.current = number_of(self.gate)
        return compute(self, x, token_ids, hidden)

    Gate.forward, Gate.predict, MoE.forward = replaced, guessed, computed
    Gate.lookup = lambda self, token_ids: chosen(self, lookup(self, token_ids), given.routings)
    try:
        yield given
    finally:
        Gate.forward, Gate.lookup, Gate.predict, MoE.forward = forward, lookup, predict, compute


@contextmanager
def copies_ahead(rows: ExpertRows, enabled: bool) -> Iterator[None]:
    """Without ``enabled``, steps that are captured in this context predict nothing."""
    kept = [layer.next_layer for layer in rows.layers]
    for layer, following in zip(rows.layers, kept, strict=True):
        layer.next_layer = following if enabled else None
    try:
        yield
    finally:
        for layer, following in zip(rows.layers, kept, strict=True):
            layer.next_layer = following


def rows_on_cpu(runner: ModelRunner) -> ExpertRows:
    """Rows for a dry run without a GPU."""
    layers = [module for module in runner.model.layers.modules() if isinstance(module, MoE)]
    rows = ExpertRows.of([layer.experts.stacks() for layer in layers], runner.device, None)
    give_rows(layers, (), rows)
    predict_experts(runner.whole_model(), AHEAD_LOAD)
    rows.watch(runner.model, runner.config.num_experts_per_tok)
    return rows


if __name__ == "__main__":
    main()
