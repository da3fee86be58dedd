"""Launches of `linear_hopper_kernels`: which products it takes and how they are cut. Arguments are checked before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.launch import empty_partials, first_tiles
from deepseek_attn.kernels.linear.linear_hopper import linear_hopper_kernel
from deepseek_attn.kernels.linear.tiles import QUANTIZE_ABOVE, HopperTiles, choose_hopper_tiles

_BYTES = gl.NVMMASharedLayout(128, 8, 2)
_PLAIN = gl.NVMMASharedLayout(128, 16, 2)
_SCALES = gl.NVMMASharedLayout(0, 32, 2)
_WEIGHTS, _PLAIN_WEIGHTS = 3, 5  # that a launch takes
_DTYPES = (torch.bfloat16, torch.float16)


def fits_hopper(
    x: Tensor,
    scaled: Sequence[tuple[Tensor, Tensor, Tensor]],
    plain: Sequence[tuple[Tensor, Tensor]],
    quantized: tuple[Tensor, Tensor] | None,
    group_rows: int = 0,
) -> bool:
    """Whether `launch_hopper` takes these arguments, with ``group_rows`` of a weight for each group.

    It needs compute capability 9.0, a rounded input, outputs of 16 bits from FP8 weights (their sums have no more),
    plain weights of the dtype of x, weights of multiples of 64 rows, and 16-byte steps wherever TMA reads.
    """
    if gpu(x.device).capability != (9, 0) or x.dtype not in _DTYPES or quantized is None or len(x) <= QUANTIZE_ABOVE:
        return False
    if not scaled or len(scaled) > _WEIGHTS or len(plain) > _PLAIN_WEIGHTS or group_rows % 128:
        return False
    q, q_scale = quantized
    read = [q, q_scale.t(), *(weight for weight, *_ in (*scaled, *plain)), *([x] if plain else ())]
    return (
        all(len(weight) % 64 == 0 for weight, *_ in (*scaled, *plain))
        and all(out.dtype in _DTYPES for *_, out in scaled)
        and all(weight.dtype == x.dtype for weight, _ in plain)
        and all(t.data_ptr() % 16 == 0 and t.stride(-2) * t.itemsize % 16 == 0 for t in read)
    )


def launch_hopper(
    x: Tensor,
    scaled: Sequence[tuple[Tensor, Tensor, Tensor]],
    plain: Sequence[tuple[Tensor, Tensor]],
    quantized: tuple[Tensor, Tensor],
    *,
    groups: int = 1,
    rounded: tuple[Tensor, Tensor] | None = None,
    pow2: bool = True,
    tiles: HopperTiles | None = None,
) -> None:
    """Products of one input with FP8 weights and with plain ones, in one launch.

    Args:
        x: ``[M, K]``, read for plain weights; scaled: (weight ``[N, K]``, scale, out ``[M, N]``); plain: (weight, out).
        quantized: x rounded, ``[M, K]`` or ``[groups, M, K]``, and its scales.
        groups: the one FP8 weight is block-diagonal in so many blocks.
        rounded: where the output of the one FP8 weight goes once more, as FP8 ``[M, N]`` and scales ``[M, N / 128]``.
        pow2: these scales are powers of two.
    """
    q, q_scale = quantized
    M, K = q.shape[-2:]
    processors = gpu(x.device).multiprocessors
    stride = q.stride(0) // q.stride(1) if groups > 1 else 0
    if groups > 1:
        q = q.as_strided((stride * (groups - 1) + M, K), (q.stride(1), 1))
    sizes, plain_sizes = (tuple(weight.shape[0] for weight, *_ in part) for part in (scaled, plain))
    if tiles is None:
        tiles = choose_hopper_tiles(M, K, sum(sizes), sum(plain_sizes), processors, rounded is not None)
    (firsts, count), (plain_firsts, plain_count) = (first_tiles(part, tiles.rows) for part in (sizes, plain_sizes))
    group_rows = sizes[0] // groups if groups > 1 else 0
    if groups > 1:
        count = groups * triton.cdiv(group_rows, tiles.rows)
    m_tiles = triton.cdiv(M, tiles.tokens)
    owners = tiles.rows // tiles.own_rows * (tiles.tokens // tiles.own_tokens)
    splits, plain_splits = _whole(K // 128, tiles.splits), _whole(triton.cdiv(K, 64), tiles.plain_splits)
    if (count + plain_count) * m_tiles * owners > COUNTERS:
        splits = plain_splits = 1
    jobs = m_tiles * (count * splits + plain_count * plain_splits)
    registers = min(248, 65536 // (1 + tiles.spare) // (128 * owners + 128)) // 8 * 8
    size = tiles.rows * tiles.tokens
    descs = [_tiled(weight, tiles.rows, 128, _BYTES) for weight, *_ in scaled]
    plain_descs = [_tiled(weight, tiles.rows, 64, _PLAIN) for weight, _ in plain]
    linear_hopper_kernel[(min(jobs, processors),)](
        _tiled(q, tiles.tokens, 128, _BYTES),
        _tiled(q_scale.t(), 1, max(tiles.tokens, 32), _SCALES),
        _tiled(x, tiles.tokens, 64, _PLAIN) if plain else None,
        *descs,
        *[None] * (_WEIGHTS - len(descs)),
        *plain_descs,
        *[None] * (_PLAIN_WEIGHTS - len(plain_descs)),
        tuple(scale for _, scale, _ in scaled),
        tuple(out for *_, out in scaled),
        tuple(out for _, out in plain),
        *(rounded or (None, None)),
        empty_partials(x, count * m_tiles, splits, size),
        empty_partials(x, plain_count * m_tiles, plain_splits, size),
        counters_of(x.device) if max(splits, plain_splits) > 1 else q_scale,
        M,
        jobs,
        stride,
        rounded[1].stride(1) if rounded else 0,
        CUT=(K, tiles.rows, tiles.tokens, tiles.own_rows, tiles.own_tokens, tiles.stages),
        SCALED=(sizes, firsts, count, splits, group_rows),
        PLAIN=(plain_sizes, plain_firsts, plain_count, plain_splits),
        DTYPE=TRITON_DTYPES[x.dtype],
        POW2=pow2,
        REGISTERS=min(240, (registers * (owners + 1) - 40) // owners // 8 * 8),
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )


def _whole(blocks: int, splits: int) -> int:
    """Shares of ``blocks`` none of which is empty, at most ``splits``."""
    return triton.cdiv(blocks, triton.cdiv(blocks, splits))


def _tiled(tensor: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
