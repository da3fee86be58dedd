"""Rows of the table of linear products, one by one: forced for an op, or read for a problem."""

from __future__ import annotations

import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.linear.plan import DECODE, HOPPER, PRODUCTS, TRITON
from deepseek_attn.kernels.linear.problem import (
    LinearDecodeTiles,
    LinearHopperTiles,
    LinearProblem,
    LinearTiles,
    LinearWeight,
)

KERNELS = {LinearTiles: TRITON, LinearHopperTiles: HOPPER, LinearDecodeTiles: DECODE}
ROUNDED = InputFormat(fp8=True)
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
H200 = GPU((9, 0), 132)


def forced(config):
    """In this context products are computed with ``config`` where its kernel supports them."""
    return forced_row(PRODUCTS, Row(ANY, KERNELS[type(config)], config))


def problem(M, K, fp8=(), plain=(), **options):
    """Of FP8 and plain weights of these rows, which reads an input that is quantised before."""
    weights = [LinearWeight(rows, FP8, BF16, ROUNDED) for rows in fp8]
    weights += [LinearWeight(rows, BF16, F32) for rows in plain]
    return LinearProblem(M, K, BF16, tuple(weights), **{"quantized": True, **options})


def config_of(kernel, wanted, gpu=H200):
    """The configuration of the first row of ``kernel`` that applies, or None."""
    rows = [row for row in PRODUCTS.rows if row.kernel == kernel and row.when(wanted, gpu)]
    return PRODUCTS.chosen(rows[0], wanted, gpu).config if rows and PRODUCTS.supports(rows[0], wanted, gpu) else None
