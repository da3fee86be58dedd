"""Launch of `kernels.insert.insert_latents` in Triton."""

from __future__ import annotations

import struct

import torch
import triton
from torch import Tensor

from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record, ScaleRule
from deepseek_attn.kernels.common.device import FLOATS, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.records import check_pool
from deepseek_attn.kernels.common.row_ops import entry_constants, row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.latents_triton import (
    IndexKeyArguments,
    IndexKeyShape,
    LatentArguments,
    LatentShape,
    insert_latents_kernel,
)
from deepseek_attn.kernels.insert.norm_rope import EARLY_ROWS, check_quantized, quantized_arguments
from deepseek_attn.kernels.insert.types import CacheRows, IndexKeyRows, LatentTokens

WARPS = 2
"""Of a program. The same for any number of tokens: the order of a row's sum depends on it."""


def insert_latents(tokens: LatentTokens) -> Tensor:
    """See `kernels.insert.insert_latents`."""
    _check(tokens)
    qr, kv, cache, cos_sin, fp8 = tokens.qr, tokens.kv, tokens.cache, tokens.cos_sin, tokens.qr_fp8
    (T, lora), rank, rope = qr.shape, len(tokens.kv_weight), cos_sin.shape[1]
    rope_block = row_block(rope, cos_sin)
    record = cache.record
    quantized = isinstance(record, Fp8DsMlaV32Record)
    if not quantized and record.name != "plain":
        raise ValueError(f"latents are stored in plain or fp8_v32 records, got {record.name!r}")
    check_pool(record, cache.pool, cache.page_entries, 4 if quantized else record.dtype.itemsize)
    rule = record.rule if quantized else ScaleRule(0.0, False)
    out = torch.empty_like(qr, memory_format=torch.contiguous_format) if tokens.qr_out is None else tokens.qr_out
    if out.shape != qr.shape or out.dtype != qr.dtype or out.stride(1) != 1:
        raise ValueError(f"qr_out must be {tuple(qr.shape)} {qr.dtype}, got {tuple(out.shape)} {out.dtype}")
    rows = LatentArguments(
        kv, kv.stride(0), tokens.kv_weight, qr, qr.stride(0), tokens.q_weight, out, out.stride(0),
        tokens.positions, cos_sin, cos_sin.shape[0], cache.slots, tokens.eps, cache.pool, cache.pool.stride(0),
    )  # fmt: skip
    if fp8 is not None:
        rows = rows._replace(**quantized_arguments(fp8))
    shape = LatentShape(
        LATENT=rank,
        LATENT_BLOCK=max(128, triton.next_power_of_2(rank)),
        ROPE=rope,
        ROPE_BLOCK=rope_block,
        DTYPE=TRITON_DTYPES[kv.dtype],
        N=cache.page_entries,
        FP8=quantized,
        SCALE_POW2=rule.pow2,
        SCALE_FLOOR=struct.unpack("<i", struct.pack("<f", rule.floor))[0],
        PLAIN=TRITON_DTYPES[torch.bfloat16 if quantized else record.dtype],
        LORA=lora,
        LORA_BLOCK=triton.next_power_of_2(lora),
        LORA_DTYPE=TRITON_DTYPES[qr.dtype],
        QUANTIZE=fp8 is not None,
        POW2=fp8 is not None and fp8.pow2_scales,
    )
    index, index_shape = (None, None) if tokens.index is None else _index_key(tokens.index, T, rope)
    if T:
        early = T <= EARLY_ROWS and supports_pdl(qr.device)
        insert_latents_kernel[(T, 2 if index is None else 3)](
            rows,
            index,
            SHAPE=shape,
            INDEX_SHAPE=index_shape,
            NATIVE_FP8=has_native_fp8(qr.device),
            PDL=early,
            enable_fp_fusion=True,
            num_warps=WARPS,
            launch_pdl=early,
        )
    return out


def _index_key(index: IndexKeyRows, T: int, rope: int) -> tuple[IndexKeyArguments, IndexKeyShape]:
    """Checks the tensors of the index keys; their arguments and constants."""
    k, cache = index.k, index.cache
    _check_rows("index.k", k, T, index.weight)
    dim = k.shape[1]
    if index.bias.shape != (dim,) or rope > dim or rope % 2:
        raise ValueError(
            f"index keys of {dim} channels need a bias of [{dim}] and up to {dim} rotated channels, got "
            f"{tuple(index.bias.shape)} and {rope}"
        )
    block = triton.next_power_of_2(dim)
    if index.hadamard and block != dim:
        raise ValueError(f"a Hadamard matrix needs a power of two of channels, got index keys of {dim}")
    _check_slots("index keys", cache, T, dim)
    arguments = IndexKeyArguments(
        k, k.stride(0), index.weight, index.bias, index.eps, cache.slots, cache.pool, cache.pool.stride(0)
    )
    constants = entry_constants(cache.record, cache.pool, cache.page_entries)
    stages = dim.bit_length() - 1 if index.hadamard else 0
    return arguments, IndexKeyShape(D=dim, BLOCK=block, STAGES=stages, DTYPE=TRITON_DTYPES[k.dtype], **constants)


def _check(tokens: LatentTokens) -> None:
    (T, lora), rank = tokens.qr.shape, len(tokens.kv_weight)
    _check_rows("qr", tokens.qr, T, tokens.q_weight)
    _check_rows("kv", tokens.kv[:, :rank], T, tokens.kv_weight)
    if tokens.positions.shape != (T,) or tokens.kv.shape[1] != rank + tokens.cos_sin.shape[1]:
        raise ValueError(
            f"need {T} positions and kv of {rank} + {tokens.cos_sin.shape[1]} channels, got "
            f"{tuple(tokens.positions.shape)} and {tuple(tokens.kv.shape)}"
        )
    _check_slots("latents", tokens.cache, T, tokens.kv.shape[1])
    if tokens.qr_fp8 is not None:
        check_quantized(tokens.qr_fp8, T, lora)


def _check_rows(name: str, x: Tensor, T: int, weight: Tensor) -> None:
    if x.shape[0] != T or x.dtype not in FLOATS or x.stride(1) != 1 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"{name} must be [{T}, d] float32, bfloat16 or float16 with contiguous rows and a weight of [d], got "
            f"{tuple(x.shape)} {x.dtype}, strides {x.stride()}, and a weight of {tuple(weight.shape)}"
        )


def _check_slots(name: str, cache: CacheRows, T: int, dim: int) -> None:
    if cache.slots.shape != (T,) or cache.record.dim != dim:
        raise ValueError(
            f"{name} need {T} slots and a record of {dim} values, got {tuple(cache.slots.shape)} and {cache.record.dim}"
        )
