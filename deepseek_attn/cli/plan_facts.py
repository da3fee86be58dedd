"""Facts of ``deepseek-attn plan``: bytes of the KV caches, all memory of a GPU by part, predicted steps of ranks."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.cli.options import attention_options
from deepseek_attn.cli.warmup import check_drafts, read_headers
from deepseek_attn.config.defaults import DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_ROLLBACK
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for, usual_preset
from deepseek_attn.config.options import DTYPES, check_sizes, pick_device, pick_dtype
from deepseek_attn.estimates.experts import ExpertSizes, OtherWeights, cpu_prompt, cpu_steps, gpu_prompt, gpu_steps
from deepseek_attn.estimates.machines import H200, MACHINES, Machine
from deepseek_attn.estimates.prompts import LayerGroup, prompt_groups
from deepseek_attn.estimates.ranks import RankLayout, RankModel
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.dispatch import problem_on
from deepseek_attn.layers.expert_memory import DISK, GPU, HOST, ExpertMemory
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.split import check_split
from deepseek_attn.models.expert_rows import FILE_AREAS, HOST_AREAS
from deepseek_attn.runner.expert_files import FREE_SHARE
from deepseek_attn.runner.host_experts import STEP_BYTES, STEP_BYTES_PER_TOKEN
from deepseek_attn.runner.memory import RunnerMemory
from deepseek_attn.runner.planner import Plan, make_plan, sequences_that_fit, tokens_that_fit
from deepseek_attn.utils.device import available_memory, total_memory
from deepseek_attn.utils.sizes import show_bytes

logger = logging.getLogger(__name__)


class PlanFacts:
    """The model and limits of the flags, before anything is allocated.

    Attributes:
        on_gpu: a GPU was named, or this machine has one.
        gpu_problem: why the memory of this machine's GPU cannot be predicted; empty if it can, or if a GPU was named.
        length: longest sequence; limit: the longest that the model allows.
        dp_attention: the ranks use data-parallel attention.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.config, device = args, ModelConfig.from_pretrained(args.model), pick_device(args.device)
        self.on_gpu, self.dp_attention = args.gpu is not None or device.type == "cuda", args.layout == "dp"
        self.gpu_problem = "" if args.gpu is not None else problem_on(device)
        preset = args.numerics or usual_preset(self.on_gpu)
        self.numerics = numerics_for(self.config, preset, args.index_keys)
        self.dtype = pick_dtype(args.dtype or ("bfloat16" if self.on_gpu else None), device)
        self.limit = self.config.max_position_embeddings
        self.length = min(self.limit, DEFAULT_MAX_MODEL_LEN) if args.max_model_len is None else args.max_model_len
        sizes = (self.length, args.max_num_seqs, args.max_num_batched_tokens, 0, args.max_snapshots)
        check_sizes(self.config, None, *sizes)
        longest = self.limit if args.max_model_len is None else args.max_model_len
        for flag, tokens in (("context", args.context), ("prefill", args.prefill)):
            if tokens is not None and tokens > longest:
                raise ValueError(f"--{flag} {tokens}: a sequence has at most {longest} tokens (--max-model-len)")
        check_drafts(self.config, args.speculate, args.max_num_batched_tokens)
        self.memory = ExpertMemory(args.expert_memory, args.expert_cache_bytes)

    def collect(self) -> dict[str, Any]:
        """All facts that `plan` prints."""
        args, plan = self.args, self.plan(self.length, self.args.max_num_seqs, self.args.kv_cache_bytes)
        facts = {
            "numerics": self.numerics.name,
            "dtype": next(name for name, value in DTYPES.items() if value is self.dtype),
            "max_model_len": self.length,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "layers": [vars(layer) for layer in plan.layers],
            "fixed_per_sequence": plan.fixed,
            "per_token": plan.per_token,
            "shared": plan.shared,
            "snapshots": plan.snapshots,
            "capacity": plan.layout.capacity,
            "caches": plan.caches,
            "workspace": plan.workspace,
            "index_logits": plan.index_logits,
            "rope": plan.rope,
            "total": plan.total,
        }
        if self.on_gpu and self.gpu_problem:
            logger.warning("the memory of the GPU here is not predicted: %s", self.gpu_problem)
        memory_of = self.runner_memory() if self.on_gpu and not self.gpu_problem else None
        if memory_of is not None:
            facts["gpu"] = self.gpu_facts(memory_of(plan))
        if groups := self.prompt_groups():
            facts["prompt"] = {"tokens": self.prompt[0], "groups": [vars(group) for group in groups]}
        elif args.approximate_prefill:
            raise ValueError("--approximate-prefill is for DeepSeek-V4.1 without data-parallel attention; leave it out")
        if args.memory is not None:
            facts |= self.what_fits(memory_of)
        if args.gpu is not None:
            facts["ranks"] = self.rank_facts()
        sizes = ExpertSizes.of(self.config, self.numerics, self.dtype, args.ranks)
        if sizes is not None and args.device is not None:
            facts["experts"] = self.cpu_experts(sizes, plan)
        elif sizes is not None and "gpu" in facts:
            facts["experts"] = found = self.gpu_experts(sizes, facts["gpu"]["parts"])
            chosen = next(row for row in found["settings"] if row["memory"] == self.memory.kind)
            held = chosen["device_bytes"] - facts["gpu"]["total"] + sizes.total
            parts = facts["gpu"]["parts"]
            parts["weights"] -= sizes.total
            facts["gpu"] |= {
                "parts": {"weights": parts.pop("weights"), "experts": held} | parts,
                "total": chosen["device_bytes"], "fits": chosen["fits"],
            }  # fmt: skip
        return facts

    @property
    def prompt(self) -> tuple[int, int]:
        """Number of tokens of a prompt, and of each of its steps."""
        tokens = self.args.prefill or self.length
        return tokens, min(tokens, self.args.max_num_batched_tokens)

    @property
    def host_memory(self) -> int:
        """Bytes of the host."""
        return self.args.host_memory or available_memory()

    def gpu_experts(self, sizes: ExpertSizes, parts: dict[str, int]) -> dict[str, Any]:
        """Facts of each placement of routed experts for a model on GPUs.

        Args:
            parts: bytes of a GPU that holds all experts of one rank, by use.
        """
        args, machine, total = self.args, self.machine, sum(parts.values())
        ranks = min(args.ranks, args.gpus_per_host)
        free = machine.memory - (total - sizes.total)
        # a runner does not compute the memory of its steps: it reserves fixed amounts
        of_steps = sum(parts[name] for name in ("step", "graphs", "cublas", "allocator"))
        left = min(free, free + of_steps - STEP_BYTES - STEP_BYTES_PER_TOKEN * args.max_num_batched_tokens)
        layout = RankLayout(args.ranks, self.dp_attention, args.gpus_per_host)
        model = RankModel(self.config, self.numerics, self.dtype, layout, machine)
        bus = machine.rates["bus"]
        settings = [{
            "memory": GPU, "fits": total <= machine.memory, "problem": "", "device_bytes": total, "host_bytes": 0,
            "cached": sizes.experts, "hit_rate": 1.0, "rate": None, "steps": [], "prompt": None,
        }]  # fmt: skip
        for memory, areas, rate in ((HOST, HOST_AREAS, bus), (DISK, FILE_AREAS, min(bus, args.disk_rate))):
            budget = min(free, args.expert_cache_bytes or left)
            cached, held = sizes.on_gpu(budget, areas)
            ahead = memory == HOST
            copied = machine.rates["copy_engine"] if ahead else rate
            in_host = sizes.total * ranks if memory == HOST else 0
            problem = "too little memory of the GPU for one expert of each layer" if not cached else ""
            if in_host > self.host_memory:
                problem = "too little memory of the host"
            settings.append({
                "memory": memory, "fits": not problem, "problem": problem, "device_bytes": total - sizes.total + held,
                "host_bytes": in_host, "cached": cached, "hit_rate": cached / sizes.experts, "rate": rate,
                "steps": [
                    vars(step) | {"tokens_per_second": step.tokens_per_second}
                    for step in gpu_steps(model, sizes, args.batch, args.context or self.length, rate)
                    if cached
                ],
                "prompt": vars(gpu_prompt(model, sizes, cached, *self.prompt, copied, ahead)) if cached else None,
            })  # fmt: skip
        notes = [
            f"bus: PCI Express 5.0 x16 at {show_bytes(bus)}/s, disk at {show_bytes(args.disk_rate)}/s (--disk-rate; "
            "not measured); copies of a decode step precede the products of their layer (small steps start some before "
            "the routing, which is not counted as a gain); those of a prompt from host memory run ahead of the "
            f"products, at {show_bytes(machine.rates['copy_engine'])}/s"
        ]
        return self._expert_facts(sizes, machine.name, machine.memory, sizes.nbytes, settings, notes)

    def cpu_experts(self, sizes: ExpertSizes, plan: Plan) -> dict[str, Any]:
        """Facts of each placement of routed experts for a model on this machine's CPU."""
        args, memory = self.args, self.host_memory
        others = OtherWeights.of(self.config, self.numerics, self.dtype)
        base, one = others.nbytes + plan.total, sizes.layers * sizes.stored
        free = max(0, memory - base)
        size = args.expert_cache_bytes or int(free * FREE_SHARE)
        cached = min(sizes.experts, size // one)
        settings = []
        for kind, number, taken in ((GPU, sizes.experts, sizes.total), (DISK, cached, cached * one)):
            fits = base + taken <= memory and number > 0
            steps = cpu_steps(self.config, sizes, others, args.batch, args.disk_rate) if kind == DISK else ()
            settings.append({
                "memory": kind, "fits": fits, "problem": "" if fits else "too little memory", "device_bytes": 0,
                "host_bytes": base + taken, "cached": number, "hit_rate": number / sizes.experts,
                "rate": args.disk_rate,
                "steps": [vars(step) | {"tokens_per_second": step.tokens_per_second} for step in steps],
                "prompt": vars(cpu_prompt(self.config, sizes, others, number, *self.prompt, args.disk_rate))
                if kind == DISK and fits else None,
            })  # fmt: skip
        notes = [
            f"weights without routed experts: {show_bytes(others.nbytes)} in numerics {self.numerics.name}",
            "tokens/s: of one thread, which dequantises 420e6 values and multiplies 5e9 weights per second (measured "
            f"on a virtual core of 2.4 GHz); the disk at {show_bytes(args.disk_rate)}/s (--disk-rate) was not measured",
        ]
        stored = sizes.nbytes if not self.numerics.quantized_weights else sizes.stored
        return self._expert_facts(sizes, "a CPU", memory, stored, settings, notes)

    def _expert_facts(
        self,
        sizes: ExpertSizes,
        device: str,
        memory: int,
        nbytes: int,
        settings: list[dict[str, Any]],
        notes: list[str],
    ) -> dict[str, Any]:
        return {
            "device": device, "device_memory": memory, "host_memory": self.host_memory, "layers": sizes.layers,
            "experts": sizes.experts, "topk": sizes.topk, "expert_bytes": nbytes, "total": sizes.total,
            "settings": settings, "notes": notes,
        }  # fmt: skip

    def plan(self, max_model_len: int, max_num_seqs: int, kv_cache_bytes: int | None = None) -> Plan:
        """Bytes of the caches and of the workspace of a runner with these limits."""
        args, limits = self.args, (max_model_len, max_num_seqs, self.args.max_num_batched_tokens)
        return make_plan(
            self.config, self.numerics, self.dtype, *limits, max_snapshots=args.max_snapshots,
            kv_cache_bytes=kv_cache_bytes, attention=attention_options(args),
        )  # fmt: skip

    def prompt_groups(self) -> list[LayerGroup]:
        """V4.1: rows and work of a prompt by group of layers."""
        if self.dp_attention:
            return []
        sizes = self.prompt[0], DEFAULT_MAX_ROLLBACK
        return prompt_groups(self.config, self.numerics, self.dtype, *sizes, self.args.approximate_prefill)

    def what_fits(self, memory_of: Callable[[Plan], RunnerMemory] | None) -> dict[str, int]:
        """Number and length of sequences that fit in ``--memory``: all memory of a GPU, or caches and workspace."""
        memory, counted = self.args.memory, None
        if memory_of is not None:
            outside = sum(self.outside_allocator().values())

            def total(max_model_len: int, max_num_seqs: int) -> int:
                return memory_of(self.plan(max_model_len, max_num_seqs)).total + outside

            counted = total
        return {
            "memory": memory,
            "sequences_that_fit": sequences_that_fit(self.plan, memory, self.length, counted),
            "tokens_that_fit": tokens_that_fit(self.plan, memory, self.args.max_num_seqs, self.limit, counted),
        }

    @cached_property
    def machine(self) -> Machine:
        """The named GPU, or this machine's GPU, with the context and module bytes of an H200."""
        if self.args.gpu is not None:
            return MACHINES[self.args.gpu]
        device = torch.device("cuda")
        return replace(H200, name=torch.cuda.get_device_name(device), gpu=gpu(device), memory=total_memory(device))

    def runner_memory(self) -> Callable[[Plan], RunnerMemory]:
        """A function that predicts the memory of one rank of a runner from the limits of a plan."""
        args, config = self.args, self.config
        parallel = Parallel(0, args.ranks, self.dp_attention and args.ranks > 1)
        check_split(config, self.numerics, parallel)
        headers = read_headers(args.model)[1] if any(Path(args.model).glob("*.safetensors")) else None
        return lambda plan: RunnerMemory.of(
            config, plan.layout, headers, numerics=self.numerics, dtype=self.dtype, attention=attention_options(args),
            gpu=self.machine.gpu, num_drafts=args.speculate, parallel=parallel,
        )  # fmt: skip

    def outside_allocator(self) -> dict[str, int]:
        """Bytes on a GPU outside of PyTorch's allocator."""
        parts = {"context": self.machine.context, "modules": self.machine.modules}
        return parts | ({"nccl": self.machine.nccl_memory} if self.args.ranks > 1 else {})

    def gpu_facts(self, memory: RunnerMemory) -> dict[str, Any]:
        """Memory of a run on a GPU: parts that add up to the total."""
        parts = memory.parts() | self.outside_allocator()
        total = sum(parts.values())
        return {
            "name": self.machine.name, "memory": self.machine.memory, "parts": parts, "total": total,
            "fits": total <= self.machine.memory,
        }  # fmt: skip

    def rank_facts(self) -> dict[str, Any]:
        """Bytes that each rank sends in a step, and predicted step times."""
        args = self.args
        layout = RankLayout(args.ranks, self.dp_attention, args.gpus_per_host)
        model = RankModel(self.config, self.numerics, self.dtype, layout, self.machine)
        shapes = [(batch, 1, args.context or self.length) for batch in args.batch]
        shapes += [(1, args.prefill, args.prefill)] if args.prefill else []
        steps = []
        for batch, tokens, context in shapes:
            step = model.step(batch, tokens, context)
            total = step.shape.rows * (layout.ranks if self.dp_attention else 1)
            steps.append({
                "requests": total // tokens, "tokens": tokens, "context": context, "ms": step.microseconds / 1e3,
                "tokens_per_second": total / step.microseconds * 1e6, "stages_us": step.stages,
                "nvlink_bytes": sum(part.sent for part in step.collectives),
                "network_bytes": sum(part.network for part in step.collectives),
            })  # fmt: skip
        return {
            "gpu": self.machine.name, "ranks": layout.ranks, "layout": args.layout, "hosts": layout.hosts,
            "steps": steps, "sources": list(self.machine.sources),
        }  # fmt: skip
