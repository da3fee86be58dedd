"""The Engram ops in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.invariance import in_row_tiles
from deepseek_attn.kernels.common.quant import dequantize_fp8
from deepseek_attn.kernels.engram.types import SCALE_GROUP, TableRows

SMALLEST = 1e-6  # lower bound of the gate's radicand


def hash_rows(ngrams: Tensor, multipliers: Tensor, primes: Tensor) -> Tensor:
    """See `kernels.engram.hash_rows`."""
    longest = len(multipliers)
    if ngrams.dim() != 2 or ngrams.shape[1] != longest or primes.dim() != 2 or len(primes) != longest - 1:
        raise ValueError(
            "multipliers [N], n-grams [T, N] and primes [N - 1, heads] must have one N, got "
            f"{list(multipliers.shape)}, {list(ngrams.shape)} and {list(primes.shape)}"
        )
    if any(tensor.dtype != torch.int64 for tensor in (ngrams, multipliers, primes)):
        raise ValueError(
            f"n-grams, multipliers and primes must be int64, got {ngrams.dtype}, {multipliers.dtype} and {primes.dtype}"
        )
    products = ngrams * multipliers
    mixed, columns = products[:, 0], []
    for n in range(1, longest):
        mixed = mixed ^ products[:, n]
        columns.append(mixed.unsqueeze(-1) % primes[n - 1])
    starts = primes.flatten().cumsum(0) - primes.flatten()
    return torch.cat(columns, dim=1) + starts


def dequantize_rows(rows: TableRows, dtype: torch.dtype) -> Tensor:
    """See `kernels.engram.dequantize_rows`."""
    check_rows(rows)
    return dequantize_fp8(rows.values, rows.scales, SCALE_GROUP).to(dtype).flatten(1)


def gate_streams(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """See `kernels.engram.gate_streams`."""
    check_gate(streams, kv, q_weight, k_weight)
    m, dim = streams.shape[1:]
    x, key, value = streams.float(), kv[:, :-dim].unflatten(1, (m, dim)).float(), kv[:, None, -dim:].float()
    weighted = x * q_weight * k_weight * key
    sums = in_row_tiles(_row_sums, torch.stack((weighted, x.square(), key.square()), dim=-2))
    product, square, key_square = sums.unbind(-1)
    dot = product * torch.rsqrt(square / dim + eps) * torch.rsqrt(key_square / dim + eps) * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(SMALLEST).sqrt(), dot))
    return (x + gate.unsqueeze(-1) * value).to(streams.dtype)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(-1)


def check_rows(rows: TableRows) -> None:
    """ValueError unless rows are FP8 with a scale for each `SCALE_GROUP` columns."""
    *tokens, columns = rows.values.shape
    if rows.values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"FP8 values must be float8_e4m3fn, got {rows.values.dtype}: view raw bytes as float8_e4m3fn")
    if columns % SCALE_GROUP:
        raise ValueError(f"values need a scale for {SCALE_GROUP} columns, got {list(rows.values.shape)}")
    check("scales", rows.scales, (*tokens, columns // SCALE_GROUP), torch.uint8)


def check_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
    """ValueError unless the arguments of `gate_streams` fit."""
    check("streams", streams, ("T", "m", "D"), FLOATS)
    T, m, dim = streams.shape
    check("kv", kv, (T, (m + 1) * dim), streams.dtype)
    check("q_weight", q_weight, (m, dim), torch.float32)
    check("k_weight", k_weight, (m, dim), torch.float32)
