"""Formats of DeepSeek-V4.1's cache entries: FP8 window keys and FP4 compressed entries, rotated channels included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record, as_bytes
from deepseek_attn.cache.records import make_kv_record
from deepseek_attn.kernels.common.quant import (
    NVFP4_GROUP,
    dequantize_fp8,
    dequantize_nvfp4,
    encode_e8m0,
    quantize_fp8,
    quantize_nvfp4,
)

FP8_GROUP = 32  # channels that share a scale


@dataclass(frozen=True)
class Fp8V41Record(Record):
    """V4.1's FP8 key, ``fp8_v41``: e4m3 values with an e8m0 scale per 32. 528 bytes for 512 channels.

    ===========================================  ====================================================
    bytes of a page (512 channels)               content
    ===========================================  ====================================================
    ``i * 512 .. i * 512 + 511``                 entry i: 512 e4m3 values
    ``n * 512 + i * 16 + g``                     entry i: e8m0 byte of values ``32 g .. 32 g + 31``
    ===========================================  ====================================================

    Rows are rounded to bf16 first. A scale is ``2**ceil(log2(max(amax, 1e-4) / 448))``. bf16 holds every decoded value
    exactly. Source: DeepSeek-V4.1 ``inference/kernel.py`` (``act_quant``, groups of 32).
    """

    dim: int = 512
    name = "fp8_v41"

    def __post_init__(self):
        if self.dim < FP8_GROUP or self.dim % FP8_GROUP:
            raise ValueError(f"fp8_v41 needs a dim that is a positive multiple of {FP8_GROUP}, got {self.dim}")

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim, self.dim // FP8_GROUP)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        q, scale = quantize_fp8(rows.to(torch.bfloat16), FP8_GROUP)
        return as_bytes(q), encode_e8m0(scale)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return dequantize_fp8(parts[0].contiguous().view(torch.float8_e4m3fn), parts[1], FP8_GROUP).to(dtype)


@dataclass(frozen=True)
class Fp4V41Record(Record):
    """V4.1's FP4 compressed entry, ``fp4_v41``: e2m1 values with an e4m3 scale per 16. 288 bytes for 512 channels.

    ===========================================  ==========================================================
    bytes of a page (512 channels)               content
    ===========================================  ==========================================================
    ``i * 256 .. i * 256 + 255``                 entry i: 512 e2m1 values, the even one in the low nibble
    ``n * 256 + i * 32 + g``                     entry i: e4m3 scale of values ``16 g .. 16 g + 15``
    ===========================================  ==========================================================

    Rows are rounded to bf16 first. A scale is ``max(amax, 6 * 2**-9) / 6`` rounded to e4m3, no power of two; decoded
    values are rounded to bf16. Source: DeepSeek-V4.1 ``inference/kernel.py``.
    """

    dim: int = 512
    name = "fp4_v41"

    def __post_init__(self):
        if self.dim < NVFP4_GROUP or self.dim % NVFP4_GROUP:
            raise ValueError(f"fp4_v41 needs a dim that is a positive multiple of {NVFP4_GROUP}, got {self.dim}")

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (self.dim // 2, self.dim // NVFP4_GROUP)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        packed, scale = quantize_nvfp4(rows.to(torch.bfloat16))
        return packed, as_bytes(scale)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        scale = parts[1].contiguous().view(torch.float8_e4m3fn)
        return dequantize_nvfp4(parts[0], scale).to(torch.bfloat16).to(dtype)


def make_v41_records(kind: str, nope_dim: int, rope_dim: int, dtype: torch.dtype) -> tuple[Record, Record]:
    """(record of window keys, record of compressed entries): different for ``fp8_fp4``, else one `make_kv_record`."""
    if kind == "fp8_fp4":
        return Fp8V41Record(nope_dim + rope_dim), Fp4V41Record(nope_dim + rope_dim)
    record = make_kv_record(kind, nope_dim, rope_dim, dtype)
    return record, record
