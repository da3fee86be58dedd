"""Launches of the Engram ops in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.plans import RowsProblem, cdiv
from deepseek_attn.kernels.engram.engram_triton import EngramGate, engram_dequantize_kernel, engram_gate_kernel
from deepseek_attn.kernels.engram.plan import GATES, ROWS, TABLE_ROWS
from deepseek_attn.kernels.engram.reference import SMALLEST, check_gate, check_rows
from deepseek_attn.kernels.engram.types import TableRows


def dequantize_rows(rows: TableRows, dtype: torch.dtype) -> Tensor:
    """See `kernels.engram.dequantize_rows`."""
    check_rows(rows)
    values, scales, columns = rows.values.contiguous(), rows.scales.contiguous(), rows.values.shape[-1]
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if count := values.numel() // max(columns, 1):
        plan = ROWS.plan(RowsProblem(count, columns), gpu(values.device))
        engram_dequantize_kernel[(cdiv(count, TABLE_ROWS),)](
            *(values.view(torch.uint8), scales, out, count),
            COLUMNS=columns,
            ROWS=TABLE_ROWS,
            BLOCK=plan.config.size,
            NATIVE_FP8=plan.native_fp8,
            **plan.options,
        )
    return out.flatten(1)


def gate_streams(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """See `kernels.engram.gate_streams`."""
    check_gate(streams, kv, q_weight, k_weight)
    streams, kv = streams.contiguous(), kv.contiguous()
    (T, m, D), out = streams.shape, torch.empty_like(streams)
    if T:
        plan = GATES.plan(RowsProblem(T * m, D), gpu(streams.device))
        gate = EngramGate(streams, kv, q_weight.contiguous(), k_weight.contiguous(), out, kv.stride(0), eps)
        engram_gate_kernel[(T, m)](gate, SMALLEST=SMALLEST, D=D, BLOCK=plan.config.size, M=m, **plan.options)
    return out
