"""Launch of `kernels.insert.norm_rope_insert` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from deepseek_attn.kernels.common.device import FLOATS, fp8_view, has_native_fp8, supports_pdl
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.row_ops import entry_constants, row_block
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.insert.norm_rope_triton import TokenArguments, TokenShape, norm_rope_insert_kernel
from deepseek_attn.kernels.insert.types import LatentAndKey, TokenRows

WARPS = 1
EARLY_ROWS = 256  # up to which the launch may begin early: with 4096 rows that costs 12.0 us instead of 9.6


class TokenLaunch(NamedTuple):
    """Arguments and constants of `insert_key` and `norm_latent`, and the outputs they write."""

    rows: TokenArguments
    shape: TokenShape
    outs: LatentAndKey


def norm_rope_insert(tokens: TokenRows, warps: int = WARPS) -> LatentAndKey:
    """See `kernels.insert.norm_rope_insert`; the order of sums depends on ``warps``, those of a program."""
    launch, num_tokens, device = token_launch(tokens), len(tokens.positions), tokens.kv.device
    if num_tokens:
        early = num_tokens <= EARLY_ROWS and supports_pdl(device)
        norm_rope_insert_kernel[(num_tokens, 2)](
            launch.rows,
            SHAPE=launch.shape,
            NATIVE_FP8=has_native_fp8(device),
            PDL=early,
            enable_fp_fusion=True,
            num_warps=warps,
            launch_pdl=early,
        )
    return launch.outs


def token_launch(tokens: TokenRows) -> TokenLaunch:
    """Checks the tensors and allocates outputs that are not given.

    Raises:
        ValueError: tensors that disagree or that the kernel does not support.
    """
    _check(tokens)
    qr, kv, cache = tokens.qr, tokens.kv, tokens.cache
    entry = entry_constants(cache.record, cache.pool, cache.page_entries)
    block = row_block(kv.shape[1], tokens.cos_sin)
    qr_out = torch.empty_like(qr, memory_format=torch.contiguous_format) if tokens.qr_out is None else tokens.qr_out
    kv_out = torch.empty_like(kv, memory_format=torch.contiguous_format) if tokens.kv_out is None else tokens.kv_out
    for name, x, out in (("qr_out", qr, qr_out), ("kv_out", kv, kv_out)):
        if out.shape != x.shape or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(f"{name} must be {tuple(x.shape)} {x.dtype}, got {tuple(out.shape)} {out.dtype}")
    rows = TokenArguments(
        kv, kv.stride(0), tokens.kv_weight, kv_out, kv_out.stride(0),
        qr, qr.stride(0), tokens.q_weight, qr_out, qr_out.stride(0),
        tokens.positions, tokens.cos_sin, tokens.cos_sin.shape[0], cache.slots, tokens.eps,
        cache.pool, cache.pool.stride(0),
    )  # fmt: skip
    fp8 = tokens.qr_fp8
    if fp8 is not None:
        rows = rows._replace(**quantized_arguments(fp8))
    shape = TokenShape(
        D=kv.shape[1],
        ROPE=tokens.cos_sin.shape[1],
        BLOCK=block,
        DTYPE=TRITON_DTYPES[kv.dtype],
        LORA=qr.shape[1],
        LORA_BLOCK=triton.next_power_of_2(qr.shape[1]),
        LORA_DTYPE=TRITON_DTYPES[qr.dtype],
        QUANTIZE=fp8 is not None,
        POW2=fp8 is not None and fp8.pow2_scales,
        **entry,
    )
    return TokenLaunch(rows, shape, LatentAndKey(qr_out, kv_out))


def quantized_arguments(buffers: QuantizedRows) -> dict[str, Any]:
    """Arguments of `norm_latent` for the latent's values and scales in FP8."""
    return {
        "fp8": fp8_view(buffers.values),
        "fp8_stride": buffers.values.stride(0),
        "fp8_scale": buffers.scale,
        "fp8_scale_stride": buffers.scale.stride(1),
    }


def _check(tokens: TokenRows) -> None:
    (T, lora), dim, slots = tokens.qr.shape, tokens.kv.shape[1], tokens.cache.slots
    for name, x, weight in (("qr", tokens.qr, tokens.q_weight), ("kv", tokens.kv, tokens.kv_weight)):
        if x.shape[0] != T or x.dtype not in FLOATS or x.stride(1) != 1 or weight.shape != x.shape[1:]:
            raise ValueError(
                f"{name} must be [{T}, d] float32, bfloat16 or float16 with contiguous rows and a weight of [d], got "
                f"{tuple(x.shape)} {x.dtype}, strides {x.stride()}, and a weight of {tuple(weight.shape)}"
            )
    if tokens.positions.shape != (T,) or slots.shape != (T,) or tokens.cache.record.dim != dim:
        raise ValueError(
            f"need {T} positions and slots and a record of {dim} values, got {tuple(tokens.positions.shape)}, "
            f"{tuple(slots.shape)} and {tokens.cache.record.dim}"
        )
    if tokens.qr_fp8 is not None:
        check_quantized(tokens.qr_fp8, T, lora)


def check_quantized(buffers: QuantizedRows, T: int, lora: int) -> None:
    """Raises ValueError unless ``buffers`` hold ``T`` query latents of ``lora`` channels, quantised."""
    q, scale = buffers.values, buffers.scale
    if lora % 128 or q.shape != (T, lora) or scale.shape != (T, lora // 128) or (T > 1 and scale.stride(0) != 1):
        raise ValueError(
            f"a quantised latent of {(T, lora)} needs a multiple of 128 channels and scales [{T}, "
            f"{lora // 128}] with stride 1 along the rows, got {tuple(q.shape)} and {tuple(scale.shape)} with "
            f"strides {scale.stride()}"
        )
