"""Rows of the mixture of experts: the router, and the routed experts of V4 (FP4) and V3.2 (FP8)."""

from __future__ import annotations

from functools import cache

import torch

from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.moe import moe_experts, moe_route, reference
from deepseek_attn.kernels.moe.types import ExpertGroups, ExpertsCall, ExpertStack, Router
from deepseek_attn.lab.bench.cases.case import OpCase

TOKENS = (1, 8, 32, 128, 512, 4096, 8192)


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    rows = []
    for preset, weights in (("v4_flash", "fp4"), ("v4_pro", "fp4"), ("v32", "fp8")):
        config = ModelConfig.from_pretrained(preset)
        for T in TOKENS:
            rows.append(_router(f"{preset} T={T}", T, config))
            rows.append(experts_case(f"{preset} {weights} T={T}", T, config, weights))
    return rows


def _router(label: str, T: int, config: AnyConfig) -> OpCase:
    E, D, k = config.n_routed_experts, config.hidden_size, config.num_experts_per_tok
    groups = ExpertGroups(getattr(config, "n_group", 1), getattr(config, "topk_group", 1))
    options = (k, config.scoring_func, config.routed_scaling_factor, config.normalizes_weights)

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        x, weight, bias = (torch.randn(*shape, device=device, generator=g) for shape in ((T, D), (E, D), (E,)))
        return x.bfloat16(), (weight * D**-0.5).bfloat16(), bias * 0.1

    run = {
        "triton": lambda x, weight, bias: moe_route(x, Router(weight, *options, bias, groups)),
        "torch": lambda x, weight, bias: reference.moe_route(x, Router(weight, *options, bias, groups)),
    }
    return OpCase("moe_route", label, make, run, bytes=2 * E * D + 2 * T * D + 12 * T * k, flops=2 * T * E * D)


def experts_case(label: str, T: int, config: AnyConfig, weights: str) -> OpCase:
    """The routed experts of ``T`` tokens, with random ``weights`` in "fp4" or "fp8" and random routing."""
    E, D, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    k = config.num_experts_per_tok

    def make(device: torch.device, seed: int) -> tuple:
        stacks = (
            _stack(E, inner, D, weights, device),
            _stack(E, inner, D, weights, device, 1),
            _stack(E, D, inner, weights, device),
        )
        g = torch.Generator(device).manual_seed(seed)
        x = torch.randn(T, D, device=device, generator=g).bfloat16()
        scores = torch.rand(T, E, device=device, generator=g).topk(k)
        return x, scores.indices, scores.values, *stacks

    options = {"limit": config.swiglu_limit, "weigh_output": weights == "fp8", "input_format": InputFormat(fp8=True)}
    run = {"triton": lambda *args: moe_experts(ExpertsCall(*args, **options))}
    used = E * (1 - (1 - k / E) ** T)  # experts that some token chose, on average
    one = 3 * D * inner * (17 / 32 if weights == "fp4" else 1)
    size, flops = int(used * one) + 6 * T * D, 6 * T * k * D * inner
    return OpCase("moe_experts", label, make, run, bytes=size, flops=flops, unit="fp8")


@cache
def _stack(experts: int, rows: int, width: int, weights: str, device: torch.device, number: int = 0) -> ExpertStack:
    """One projection of all experts. The rows share them: they take 3 GB in V4-Flash, far more than the L2."""
    g = torch.Generator(device).manual_seed(number)
    if weights == "fp4":
        packed = torch.randint(256, (experts, rows, width // 2), dtype=torch.uint8, device=device, generator=g)
        scale_shape = (experts, rows, width // 32)
        scale = torch.randint(118, 123, scale_shape, dtype=torch.uint8, device=device, generator=g)
        return ExpertStack(packed, scale, scale.amax(-1))
    dense = torch.empty(experts, rows, width, dtype=torch.float8_e4m3fn, device=device)
    for expert in dense:
        expert.copy_(torch.randn(rows, width, device=device, generator=g).mul_(60).clamp_(-448, 448))
    grid = (experts, -(-rows // 128), -(-width // 128))
    return ExpertStack(dense, torch.rand(grid, device=device, generator=g) * 4e-4 + 1e-4)
