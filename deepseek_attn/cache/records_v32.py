"""Records of DeepSeek-V3.2's latent cache: plain entries and 656-byte FP8 entries, both contiguous per token.

Unlike V4's pages, a page is ``n`` consecutive whole entries without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deepseek_attn.cache.record import as_bytes, own_record
from deepseek_attn.cache.records import PlainRecord, Record
from deepseek_attn.kernels.common.quant import FP8_FLOOR, FP8_MAX, dequantize_fp8, quantize_fp8

LATENT_GROUP = 128
"""Latent values that share a scale."""

KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla")

_FLT_MIN = torch.finfo(torch.float32).tiny


class ScaleRule(NamedTuple):
    """Choice of a group's scale: arguments of `kernels.common.quant.quantize_fp8`.

    Attributes:
        floor: lower clamp of the group's largest magnitude; pow2: round the scale up to a power of two.
    """

    floor: float
    pow2: bool


@dataclass(frozen=True)
class Fp8DsMlaV32Record(Record):
    """FlashMLA's V3.2 record ``fp8_v32``: e4m3 latent, float32 scales, rope values in bf16. 656 bytes for 512 + 64.

    =====================================  =======================================================
    bytes of an entry (512 + 64)           content
    =====================================  =======================================================
    ``0 .. 511``                           512 e4m3 latent values
    ``512 + 4 j .. 512 + 4 j + 3``         scale of values ``128 j .. 128 j + 127``, float32 little endian
    ``528 .. 655``                         64 bf16 rope values, not quantised
    =====================================  =======================================================

    In general an entry is ``latent_dim + latent_dim / 32 + 2 * rope_dim`` bytes; pages have no padding. Values are
    rounded to bf16 first. Readers multiply by the stored float32, so entries of different scale rules can share a pool.

    Attributes:
        scale_rule: how a scale is chosen when writing. ``"raw"`` (serving's ``concat_and_cache_mla``):
            ``max(amax / 448, FLT_MIN)``. ``"pow2"`` (FlashMLA's tests, vLLM's fused writer): the power of two at or
            above ``max(amax / 448, 1e-4)``. ``"official"`` (DeepSeek-V3.2 inference/model.py): the power of two at or
            above ``max(amax, 1e-4) / 448``.

    Notes:
        Under "raw", a decoded value is a product with 24 + 4 significant bits: reading as bfloat16 rounds it.
    """

    latent_dim: int = 512
    rope_dim: int = 64
    scale_rule: str = "raw"
    name = "fp8_v32"

    _RULES: ClassVar[dict[str, ScaleRule]] = {
        "raw": ScaleRule(FP8_MAX * _FLT_MIN, False),
        "pow2": ScaleRule(FP8_MAX * 1e-4, True),
        "official": ScaleRule(FP8_FLOOR, True),
    }

    def __post_init__(self):
        if self.latent_dim < LATENT_GROUP or self.latent_dim % LATENT_GROUP or self.rope_dim < 0:
            got = f"latent_dim {self.latent_dim}, rope_dim {self.rope_dim}"
            raise ValueError(f"{self.name} needs latent_dim a positive multiple of 128 and rope_dim >= 0, got {got}")
        if self.scale_rule not in self._RULES:
            raise ValueError(f"unknown scale rule {self.scale_rule!r}: supported are {', '.join(self._RULES)}")

    @property
    def rule(self) -> ScaleRule:
        """The rule that ``scale_rule`` names."""
        return self._RULES[self.scale_rule]

    @property
    def nope_dim(self) -> int:
        return self.latent_dim

    @property
    def dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return (fp8_entry_bytes(self.latent_dim, self.rope_dim),)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        rows = rows.to(torch.bfloat16)
        q, scale = quantize_fp8(rows[:, : self.latent_dim], LATENT_GROUP, self.rule.floor, self.rule.pow2)
        return (torch.cat([as_bytes(q), as_bytes(scale), as_bytes(rows[:, self.latent_dim :])], dim=1),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        entry, scales_end = parts[0], self.latent_dim + self.latent_dim // LATENT_GROUP * 4
        scale = entry[:, self.latent_dim : scales_end].contiguous().view(torch.float32)
        out = torch.empty(entry.shape[0], self.dim, dtype=dtype, device=entry.device)
        q = entry[:, : self.latent_dim].view(torch.float8_e4m3fn)
        out[:, : self.latent_dim] = dequantize_fp8(q, scale, LATENT_GROUP)
        out[:, self.latent_dim :] = entry[:, scales_end:].contiguous().view(torch.bfloat16)
        return out


def fp8_entry_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of an `Fp8DsMlaV32Record` entry: 656 for 512 + 64."""
    return latent_dim + latent_dim // LATENT_GROUP * 4 + 2 * rope_dim


def make_v32_record(
    kv_cache_dtype: str,
    latent_dim: int = 512,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    scale_rule: str = "raw",
) -> Record:
    """The record of a ``kv_cache_dtype``; ``"auto"`` means plain entries of ``dtype``."""
    if kv_cache_dtype == "auto":
        return PlainRecord(latent_dim + rope_dim, dtype)
    if kv_cache_dtype == "bfloat16":
        return PlainRecord(latent_dim + rope_dim, torch.bfloat16)
    if kv_cache_dtype == "fp8_ds_mla":
        return Fp8DsMlaV32Record(latent_dim, rope_dim, scale_rule)
    supported = f"unknown kv_cache_dtype {kv_cache_dtype!r}: supported are {', '.join(KV_CACHE_DTYPES)}"
    return own_record(kv_cache_dtype, latent_dim, rope_dim, dtype, supported)
