"""Launches of `linear_hopper` and `linear_few_hopper`: which products they support, and how.

`linear` and `grouped_linear` check arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.tiles import tiled
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.formats import quantizes_once
from deepseek_attn.kernels.linear.launch import FP8Product, Products, empty_partials, tile_weights
from deepseek_attn.kernels.linear.launch_config import (
    FEW_TOKENS,
    FewHopperConfig,
    HopperLaunchConfig,
    choose_few_hopper_config,
    choose_hopper_config,
)
from deepseek_attn.kernels.linear.linear_few_hopper import FewInput, FewTiling, linear_few_hopper_kernel
from deepseek_attn.kernels.linear.linear_hopper import linear_hopper_kernel
from deepseek_attn.kernels.linear.linear_hopper_products import Tiling
from deepseek_attn.kernels.linear.linear_hopper_weights import Weights

_BYTES = gl.NVMMASharedLayout(128, 8, 2)
_PLAIN = gl.NVMMASharedLayout(128, 16, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)
_MAX_FP8, _MAX_PLAIN = 3, 5  # weights per launch, at most
_OWN_BLOCKS = 16  # of a job whose input `linear_few_hopper` quantises, at most: a register holds one value
_DTYPES = (torch.bfloat16, torch.float16)


def fits_hopper(x: Tensor, products: Products, quantized: QuantizedRows | None, group_rows: int = 0) -> bool:
    """Whether `launch_hopper` supports these arguments, with ``group_rows`` weight rows per group (0: not grouped).

    It needs compute capability 9.0, a quantised input, outputs of 16 bits from FP8 weights (their sums have no more),
    plain weights of the dtype of x, weights of multiples of 64 rows, and 16-byte steps wherever TMA reads.
    """
    fp8, plain = products.fp8, products.plain
    if gpu(x.device).capability != (9, 0) or x.dtype not in _DTYPES or quantized is None or not quantizes_once(len(x)):
        return False
    if not fp8 or len(fp8) > _MAX_FP8 or len(plain) > _MAX_PLAIN or group_rows % 128:
        return False
    weights = [product.weight for product in (*fp8, *plain)]
    read = [quantized.values, quantized.scale.t(), *weights, *([x] if plain else ())]
    return (
        all(len(weight) % 64 == 0 for weight in weights)
        and all(product.out.dtype in _DTYPES for product in fp8)
        and all(product.weight.dtype == x.dtype for product in plain)
        and all(t.data_ptr() % 16 == 0 and t.stride(-2) * t.itemsize % 16 == 0 for t in read)
    )


def launch_hopper(
    x: Tensor,
    products: Products,
    quantized: QuantizedRows,
    *,
    groups: int = 1,
    quantized_output: QuantizedRows | None = None,
    config: HopperLaunchConfig | None = None,
) -> None:
    """Computes ``products`` of one input in one launch.

    Args:
        x: ``[M, K]``, read for plain weights.
        quantized: x quantised, ``[M, K]`` or ``[groups, M, K]``.
        groups: number of diagonal blocks of the FP8 weight, which is then the only one.
        quantized_output: also receives the output of the only FP8 weight, quantised.
    """
    fp8, plain = products.fp8, products.plain
    q, q_scale, _ = quantized
    M, K = q.shape[-2:]
    multiprocessors = gpu(x.device).multiprocessors
    stride = q.stride(0) // q.stride(1) if groups > 1 else 0
    if groups > 1:
        q = q.as_strided((stride * (groups - 1) + M, K), (q.stride(1), 1))
    elif q.dim() == 3:  # a rank with one of the groups
        q = q[0]
    sizes, plain_sizes = ([len(product.weight) for product in part] for part in (fp8, plain))
    if config is None:
        quantizes = quantized_output is not None
        config = choose_hopper_config(planned_rows(M), K, sum(sizes), sum(plain_sizes), multiprocessors, quantizes)
    tiling, plain_tiling = tile_weights(sizes, config.rows, groups), tile_weights(plain_sizes, config.rows)
    m_tiles = triton.cdiv(M, config.tokens)
    splits = _without_empty(K // 128, config.splits)
    plain_splits = _without_empty(triton.cdiv(K, 64), config.plain_splits)
    if (tiling.tiles + plain_tiling.tiles) * m_tiles * config.warpgroups > COUNTERS:
        splits = plain_splits = 1
    jobs = m_tiles * (tiling.tiles * splits + plain_tiling.tiles * plain_splits)
    registers = min(248, 65536 // (1 + config.spare) // (128 * config.warpgroups + 128)) // 8 * 8
    size = config.rows * config.tokens
    descs = [tiled(product.weight, config.rows, 128, _BYTES) for product in fp8]
    plain_descs = [tiled(product.weight, config.rows, 64, _PLAIN) for product in plain]
    linear_hopper_kernel[(min(jobs, multiprocessors),)](
        tiled(q, config.tokens, 128, _BYTES),
        tiled(q_scale.t(), 1, max(config.tokens, 32), _SCALES),
        tiled(x, config.tokens, 64, _PLAIN) if plain else None,
        *descs,
        *[None] * (_MAX_FP8 - len(descs)),
        *plain_descs,
        *[None] * (_MAX_PLAIN - len(plain_descs)),
        tuple(product.scale for product in fp8),
        tuple(product.out for product in fp8),
        tuple(product.out for product in plain),
        None if quantized_output is None else quantized_output.values,
        None if quantized_output is None else quantized_output.scale,
        empty_partials(x, tiling.tiles * m_tiles, splits, size),
        empty_partials(x, plain_tiling.tiles * m_tiles, plain_splits, size),
        counters_of(x.device) if max(splits, plain_splits) > 1 else q_scale,
        M,
        jobs,
        stride,
        0 if quantized_output is None else quantized_output.scale.stride(1),
        TILING=Tiling(
            K=K,
            ROWS=config.rows,
            TOKENS=config.tokens,
            PART_ROWS=config.warpgroup_rows,
            PART_TOKENS=config.warpgroup_tokens,
            ROW_STEP=config.warpgroup_rows % config.rows,
            TOKEN_STEP=config.warpgroup_tokens % config.tokens,
            WARPGROUPS=config.warpgroups,
            STAGES=config.stages,
            SCALES=max(config.tokens, 32),
        ),
        FP8=Weights(tiling.sizes, tiling.firsts, tiling.tiles, splits, tiling.group_rows),
        PLAIN=Weights(plain_tiling.sizes, plain_tiling.firsts, plain_tiling.tiles, plain_splits, 0),
        DTYPE=TRITON_DTYPES[x.dtype],
        POW2=quantized_output is None or quantized_output.pow2_scales,
        REGISTERS=min(240, (registers * (config.warpgroups + 1) - 40) // config.warpgroups // 8 * 8),
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )


def few_hopper_config(
    x: Tensor, weights: Sequence[Tensor], out_dtypes: Sequence[torch.dtype], quantized: bool, groups: int = 1
) -> FewHopperConfig | None:
    """The configuration of `launch_few_hopper` for FP8 ``weights`` with FP8 inputs; None where it is not the fastest.

    It needs compute capability 9.0, up to 16 tokens, outputs of 16 bits (sums have no more), weights of multiples of 64
    rows, in groups of multiples of 128, 16-byte addresses, and an input that is ``quantized`` before or jobs of few
    channels.
    """
    of_gpu, M, K = gpu(x.device), planned_rows(len(x)), weights[0].shape[1]
    if of_gpu.capability != (9, 0) or M > FEW_TOKENS or len(weights) > _MAX_FP8:
        return None
    if x.dtype not in _DTYPES or not all(dtype in _DTYPES for dtype in out_dtypes):
        return None
    multiple = 64 if groups == 1 else 128 * groups
    if any(len(weight) % multiple or weight.data_ptr() % 16 for weight in weights):
        return None
    config = choose_few_hopper_config(M, K, sum(map(len, weights)), of_gpu.multiprocessors)
    if config is None or (not quantized and triton.cdiv(K // 128, config.splits) > _OWN_BLOCKS):
        return None
    return config


def launch_few_hopper(
    x: Tensor,
    fp8: Sequence[FP8Product],
    quantized: QuantizedRows | None,
    config: FewHopperConfig,
    *,
    pow2_scales: bool,
    groups: int = 1,
    quantized_output: QuantizedRows | None = None,
) -> None:
    """Computes products of up to 16 tokens in one launch.

    Args:
        x: ``[M, K]``, read if it is not quantised yet.
        quantized: x quantised, ``[M, K]`` or ``[groups, M, K]``; needed with several groups or more than 8 tokens.
        groups, quantized_output: as in `launch_hopper`; with the latter, tiles have 128 rows.
    """
    M, K = len(x), fp8[0].weight.shape[1]
    if quantized is None:
        source = FewInput(x, x.stride(0), 0, x, 0)
    else:
        q, q_scale, _ = quantized
        source = FewInput(q, q.stride(-2), q.stride(0) if groups > 1 else 0, q_scale, q_scale.stride(1))
    tiling = tile_weights([len(product.weight) for product in fp8], config.rows, groups)
    blocks = K // 128
    splits = _without_empty(blocks, config.splits if tiling.tiles <= COUNTERS else 1)
    descs = [tiled(product.weight, config.rows, 128, _BYTES) for product in fp8]
    jobs, split_blocks = tiling.tiles * splits, triton.cdiv(blocks, splits)
    if blocks % config.stage_blocks or split_blocks % config.stage_blocks:
        raise ValueError(f"stages of {config.stage_blocks} blocks do not divide {blocks} blocks in {splits} splits")
    linear_few_hopper_kernel[(min(jobs, gpu(x.device).multiprocessors),)](
        source,
        *descs,
        *[None] * (_MAX_FP8 - len(descs)),
        tuple(product.scale for product in fp8),
        tuple(product.out for product in fp8),
        None if quantized_output is None else quantized_output.values,
        None if quantized_output is None else quantized_output.scale,
        empty_partials(x, tiling.tiles, splits, config.rows * config.tokens),
        counters_of(x.device) if splits > 1 else fp8[0].scale,
        M,
        jobs,
        0 if quantized_output is None else quantized_output.scale.stride(1),
        TILING=FewTiling(
            K=K,
            TOKENS=config.tokens,
            ROWS=config.rows,
            SPLIT_BLOCKS=split_blocks,
            INPUT_BLOCKS=triton.next_power_of_2(split_blocks),
            STAGES=config.stages,
            STAGE_BLOCKS=config.stage_blocks,
            STAGES_AT_ONCE=config.stages_at_once,
            QUANTIZED=quantized is not None,
        ),
        WEIGHTS=Weights(tiling.sizes, tiling.firsts, tiling.tiles, splits, tiling.group_rows),
        POW2=pow2_scales,
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=168,
        launch_pdl=True,
    )


def _without_empty(blocks: int, splits: int) -> int:
    """The number of splits of ``blocks`` none of which is empty, at most ``splits``."""
    return triton.cdiv(blocks, triton.cdiv(blocks, splits))
