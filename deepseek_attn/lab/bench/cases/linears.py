"""Rows of V4's linear layers: projections that share a launch, the grouped projection, quantised inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.linear import Segment, grouped_linear, multi_linear, quantize_input
from deepseek_attn.lab.bench.cases.case import OpCase, v4_preset

FP8_INPUT = InputFormat(fp8=True)
TOKENS = (1, 8, 32, 128, 4096)


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    rows = []
    for preset in ("v4_flash", "v4_pro"):
        config, name = v4_preset(preset), preset.removeprefix("v4_")
        for M in TOKENS:
            rows += [_product(f"{name} {label} M={M}", M, *sizes) for label, sizes in _products(config).items()]
            rows.append(_grouped(f"{name} wo_a M={M}", M, config))
        rows.append(_quantize(f"{name} M=4096", 4096, config.hidden_size))
    return rows


def _products(config: DeepseekV4Base) -> dict[str, tuple[int, list[int], list[int]]]:
    """By name: input features, outputs of FP8 weights, outputs of BF16 weights with float32 results."""
    hidden, q_lora, head = config.hidden_size, config.q_lora_rank, config.head_dim
    index_heads, index_dim, inner = config.index_n_heads, config.index_head_dim, config.moe_intermediate_size
    queries = config.num_attention_heads * head
    return {
        "x, window only": (hidden, [q_lora, head], []),
        "x, C4A": (hidden, [q_lora, head], [2 * head] * 2 + [2 * index_dim] * 2 + [index_heads]),
        "x, C128A": (hidden, [q_lora, head], [head] * 2),
        "wq_b": (q_lora, [queries], []),
        "wq_b + indexer": (q_lora, [queries, index_heads * index_dim], []),
        "wo_b": (config.o_groups * config.o_lora_rank, [hidden], []),
        "shared w1 + w3": (hidden, [inner, inner], []),
        "shared w2": (inner, [hidden], []),
    }


def _product(label: str, M: int, K: int, fp8: list[int], plain: list[int]) -> OpCase:
    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        x = torch.randn(M, K, device=device, generator=g).bfloat16()
        segments = [Segment(*_fp8_weight(n, K, device, g), FP8_INPUT) for n in fp8]
        segments += [Segment(_plain_weight(n, K, device, g), out_dtype=torch.float32) for n in plain]
        return x, segments, [_plain_weight(n, K, device, g) for n in fp8]

    run = {
        "triton": lambda x, segments, _: multi_linear(x, segments),
        "torch bf16": lambda x, segments, dense: [
            F.linear(x, w) for w in (*dense, *(s.weight for s in segments[len(fp8) :]))
        ],
    }
    read = sum(fp8) * K + 2 * sum(plain) * K + 2 * M * K
    write = 2 * M * sum(fp8) + 4 * M * sum(plain)
    return OpCase("linear", label, make, run, read + write, 2 * M * K * (sum(fp8) + sum(plain)), "fp8")


def _grouped(label: str, M: int, config: DeepseekV4Base) -> OpCase:
    H, d, groups, rank = config.num_attention_heads, config.head_dim, config.o_groups, config.o_lora_rank
    K = H * d // groups

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        o = torch.randn(M, H, d, device=device, generator=g).bfloat16()
        weight, scale = _fp8_weight(groups * rank, K, device, g)
        table = torch.randn(1 << 16, config.qk_rope_head_dim, device=device, generator=g)
        positions = torch.randint(len(table), (M,), device=device, generator=g)
        return o, weight, scale, positions, table, _plain_weight(groups * rank, K, device, g)

    def torch_bf16(o, weight, scale, positions, table, dense):
        return torch.bmm(o.view(M, groups, K).transpose(0, 1), dense.view(groups, rank, K).transpose(1, 2))

    run = {
        "triton": lambda o, weight, scale, positions, table, _: grouped_linear(
            o, Segment(weight, scale, FP8_INPUT), groups, positions, table
        ),
        "torch bf16 product only": torch_bf16,
    }
    size = groups * rank * K + 2 * M * (H * d + groups * rank)
    return OpCase("grouped_linear", label, make, run, size, 2 * M * groups * rank * K, "fp8")


def _quantize(label: str, M: int, K: int) -> OpCase:
    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        return (torch.randn(M, K, device=device, generator=g).bfloat16(),)

    return OpCase("linear", f"quantize_input {label}", make, {"triton": quantize_input}, 3 * M * K + M * K // 32)


def _fp8_weight(n: int, k: int, device: torch.device, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, device=device, generator=g).to(torch.float8_e4m3fn)
    return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-8, device=device)


def _plain_weight(n: int, k: int, device: torch.device, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, k, device=device, generator=g).mul_(0.02).bfloat16()
