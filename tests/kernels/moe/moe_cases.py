"""Random routed experts in every format of their weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepseek_attn.kernels.moe.types import ExpertStack

FORMATS = ("fp4", "fp8", "plain")


class Case(NamedTuple):
    """Arguments of ``moe_experts``."""

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    w1: ExpertStack
    w3: ExpertStack
    w2: ExpertStack

    def of(self, tokens):
        return self._replace(x=self.x[tokens], experts=self.experts[tokens], weights=self.weights[tokens])


def stack(experts, rows, width, fmt, dtype=torch.bfloat16, device=None, group=128):
    """One projection; scales differ from row to row, block to block and expert to expert."""
    if fmt == "fp4":
        packed = torch.randint(256, (experts, rows, width // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(119, 123, (experts, rows, width // 32), dtype=torch.uint8, device=device)
        return ExpertStack(packed, scale, scale.amax(-1))
    values = torch.randn(experts, rows, width, device=device)
    if fmt == "plain":
        return ExpertStack((values * width**-0.5 * 2).to(dtype))
    grid = (experts, -(-rows // group), -(-width // group))
    dense = (values * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ExpertStack(dense, torch.rand(grid, device=device) * 1e-3 + 1e-4)


def make_case(tokens, hidden, inner, experts, k, fmt, dtype=torch.bfloat16, device=None, group=128):
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    stacks = [stack(experts, *size, fmt, dtype, device, group) for size in sizes]
    chosen = torch.rand(tokens, experts, device=device).topk(k).indices
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    return Case(x, chosen, torch.rand(tokens, k, device=device) + 0.1, *stacks)
