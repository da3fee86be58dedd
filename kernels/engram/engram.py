"""Launches of the Engram ops in Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import has_native_fp8, supports_pdl
from deepseek_attn.kernels.engram.engram_triton import dequantize_kernel, gate_kernel
from deepseek_attn.kernels.engram.reference import SMALLEST, check_gate
from deepseek_attn.kernels.engram.types import SCALE_GROUP, TableRows

ROWS = 4  # of a program of `dequantize_kernel`


def dequantize_rows(rows: TableRows, dtype: torch.dtype) -> Tensor:
    """See `kernels.engram.dequantize_rows`."""
    values, scales = rows
    *tokens, columns = values.shape
    if values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"FP8 values must be float8_e4m3fn, got {values.dtype}: view raw bytes as float8_e4m3fn")
    if columns % SCALE_GROUP or scales.shape != (*tokens, columns // SCALE_GROUP) or scales.dtype != torch.uint8:
        raise ValueError(
            f"values {list(values.shape)} need scales uint8 {[*tokens, columns // SCALE_GROUP]}, one for {SCALE_GROUP} "
            f"columns, got {scales.dtype} {list(scales.shape)}"
        )
    values, scales, early = values.contiguous(), scales.contiguous(), supports_pdl(values.device)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if count := values.numel() // max(columns, 1):
        dequantize_kernel[(triton.cdiv(count, ROWS),)](
            values.view(torch.uint8),
            scales,
            out,
            count,
            COLUMNS=columns,
            GROUP=SCALE_GROUP,
            ROWS=ROWS,
            BLOCK=triton.next_power_of_2(columns),
            NATIVE_FP8=has_native_fp8(values.device),
            PDL=early,
            enable_fp_fusion=True,
            num_warps=2,
            launch_pdl=early,
        )
    return out.flatten(1)


def gate_streams(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """See `kernels.engram.gate_streams`."""
    check_gate(streams, kv, q_weight, k_weight)
    (T, m, D), early = streams.shape, supports_pdl(streams.device)
    streams, kv = streams.contiguous(), kv.contiguous()
    out = torch.empty_like(streams)
    if T:
        gate_kernel[(T, m)](
            streams,
            kv,
            q_weight.contiguous(),
            k_weight.contiguous(),
            out,
            kv.stride(0),
            eps,
            SMALLEST=SMALLEST,
            D=D,
            BLOCK=triton.next_power_of_2(D),
            M=m,
            PDL=early,
            enable_fp_fusion=True,
            num_warps=8 if D > 1024 else 4,
            launch_pdl=early,
        )
    return out
