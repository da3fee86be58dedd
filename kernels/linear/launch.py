"""Launches of `linear_triton` and `quantize_triton`, shared by `linear` and `grouped_linear`, which check arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.invariance import batch_invariant, planned_rows
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP
from deepseek_attn.kernels.linear.launch_config import PLAIN_CHANNELS, LaunchConfig, choose_config
from deepseek_attn.kernels.linear.linear_triton import multi_linear_kernel
from deepseek_attn.kernels.linear.quantize_triton import quantize_input_kernel


class FP8Product(NamedTuple):
    """``out [M, N] = x weight^T`` with an FP8 ``weight [N, K]`` under block scales."""

    weight: Tensor
    scale: Tensor
    out: Tensor


class PlainProduct(NamedTuple):
    """``out [M, N] = x weight^T`` with a ``weight [N, K]`` of a float dtype."""

    weight: Tensor
    out: Tensor


class Products(NamedTuple):
    """Products that one launch computes from one input: FP8 weights of one kind, then plain weights of one kind.

    Attributes:
        fp8, plain: the products; weights and outputs of each list have the same dtypes.
        fp8_input: the FP8 weights' input is quantised to FP8; fp8_group: as in `Segment`.
    """

    fp8: Sequence[FP8Product]
    plain: Sequence[PlainProduct] = ()
    fp8_input: bool = True
    fp8_group: int = FP8_INPUT_GROUP

    @property
    def reads_fp8_once(self) -> bool:
        """There are FP8 weights, whose input may be quantised by a launch before: see `Segment.reads_fp8_once`."""
        return bool(self.fp8) and self.fp8_input and self.fp8_group == FP8_INPUT_GROUP


class DotPlan(NamedTuple):
    """Dtype and precision of a product.

    Attributes:
        dtype: of the factors.
        parts: values of that dtype which x is split into.
        precision: ``input_precision`` of `tl.dot`; None is the default.
    """

    dtype: tl.dtype
    parts: int = 1
    precision: str | None = None


def dot_plan(x: torch.dtype, weight: torch.dtype, fp8_input: bool, out: torch.dtype, native: bool) -> DotPlan:
    """`DotPlan` of an input and a weight of these dtypes; ``native``: the GPU multiplies e4m3 itself.

    No choice rounds the factors: float16 and bfloat16 hold e4m3, and three bfloat16 hold a float32. Sums of FP8
    products keep about 14 bits on compute capability 9.0, too few for a float32 output.
    """
    if weight == torch.float8_e4m3fn:
        if fp8_input:
            return DotPlan(tl.float8e4nv if native and out != torch.float32 else tl.float16)
        return DotPlan(tl.float16) if x == torch.float16 else DotPlan(tl.bfloat16, 1 if x == torch.bfloat16 else 3)
    if weight == x and x != torch.float32:
        return DotPlan(TRITON_DTYPES[x])
    if weight == torch.bfloat16 and x == torch.float32:
        return DotPlan(tl.bfloat16, 3)
    return DotPlan(tl.float32, 1, "tf32x3")


def launch_products(
    x: Tensor,
    products: Products,
    *,
    pow2_scales: bool,
    quantized: QuantizedRows | None = None,
    groups: int = 1,
    config: LaunchConfig | None = None,
) -> None:
    """Computes ``products`` of one input in one launch.

    Args:
        x: ``[M, groups * K]``.
        quantized: x quantised already, ``[M, K]`` or ``[groups, M, K]``; None: programs quantise as they read.
        groups: number of diagonal blocks of the FP8 weight, which is then the only one.
    """
    fp8, plain, fp8_input, fp8_group = products
    capability, multiprocessors = gpu(x.device)
    native, pdl = capability >= (8, 9), capability >= (9, 0)
    M, K = x.shape[0], x.shape[1] // groups
    sizes, plain_sizes = ([len(product.weight) for product in part] for part in (fp8, plain))
    if config is None:
        item = x.itemsize if quantized is None or not fp8_input else 1
        plain_item = max([x.itemsize] + [product.weight.itemsize for product in plain])
        rows = sum(sizes), sum(plain_sizes)
        config = choose_config(planned_rows(M), K, *rows, capability, multiprocessors, item, plain_item)
    mode = "plain" if not fp8_input else "quantize" if quantized is None else "quantized"
    dot = plain_dot = DotPlan(tl.float16)
    if fp8:
        dot = dot_plan(x.dtype, fp8[0].weight.dtype, fp8_input, fp8[0].out.dtype, native)
    if plain:
        plain_dot = dot_plan(x.dtype, plain[0].weight.dtype, False, plain[0].out.dtype, native)
    tiling, plain_tiling = tile_weights(sizes, config.rows, groups), tile_weights(plain_sizes, config.plain_rows)
    m_tiles = triton.cdiv(M, config.tokens)
    splits, plain_splits = config.splits, config.plain_splits
    if batch_invariant() or (tiling.tiles + plain_tiling.tiles) * m_tiles > COUNTERS:
        splits = plain_splits = 1
    q, q_scale = (x, x) if quantized is None else (fp8_view(quantized.values), quantized.scale)
    partials = empty_partials(x, tiling.tiles * m_tiles, splits, config.rows * config.tokens)
    plain_partials = empty_partials(x, plain_tiling.tiles * m_tiles, plain_splits, config.plain_rows * config.tokens)
    counters = counters_of(x.device) if max(splits, plain_splits) > 1 else x
    multi_linear_kernel[(m_tiles * (tiling.tiles * splits + plain_tiling.tiles * plain_splits),)](
        x,
        q,
        q_scale,
        tuple(fp8_view(product.weight) for product in fp8),
        tuple(product.scale for product in fp8),
        tuple(product.out for product in fp8),
        tuple(product.weight for product in plain),
        tuple(product.out for product in plain),
        partials,
        plain_partials,
        counters,
        M,
        x.stride(0),
        q.stride(-2),
        q_scale.stride(1),
        K,
        q.stride(0) if groups > 1 else 0,
        K // 128 * q_scale.stride(1),
        K=K,
        SIZES=tiling.sizes,
        FIRSTS=tiling.firsts,
        TILES=tiling.tiles,
        SPLITS=splits,
        PLAIN_SIZES=plain_tiling.sizes,
        PLAIN_FIRSTS=plain_tiling.firsts,
        PLAIN_TILES=plain_tiling.tiles,
        PLAIN_SPLITS=plain_splits,
        GROUP_ROWS=tiling.group_rows,
        INPUT=mode,
        POW2=pow2_scales,
        NATIVE_FP8=native,
        DTYPE=dot.dtype,
        PARTS=dot.parts,
        PRECISION=dot.precision,
        PLAIN_DTYPE=plain_dot.dtype,
        PLAIN_PARTS=plain_dot.parts,
        PLAIN_PRECISION=plain_dot.precision,
        BLOCK_M=config.tokens,
        BLOCK_N=config.rows,
        FP8_GROUP=fp8_group,
        PLAIN_BLOCK_N=config.plain_rows,
        PLAIN_BLOCK_K=PLAIN_CHANNELS,
        STAGES=config.stages,
        EARLY=config.prefetched_blocks,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )


class Rope(NamedTuple):
    """An inverse rotation of heads: ``positions [M]``, table ``cos_sin [positions, rope_dim]``, channels of a head."""

    positions: Tensor
    cos_sin: Tensor
    head_dim: int


def quantize_rows(x: Tensor, pow2_scales: bool, groups: int | None = None, rope: Rope | None = None) -> QuantizedRows:
    """``x [M, channels]``, rotated back by ``rope``, as FP8 in the memory of `empty_quantized_rows`."""
    quantized = empty_quantized_rows(*x.shape, x.device, pow2_scales, groups)
    _launch_quantize(x, quantized.values, quantized.scale.t(), pow2_scales, rope)
    return quantized


def rotate_rows(x: Tensor, rope: Rope) -> Tensor:
    """``x [M, channels]`` rotated back by ``rope``, in its dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_quantize(x, out, None, True, rope)
    return out


def _launch_quantize(x: Tensor, out: Tensor, scale: Tensor | None, pow2_scales: bool, rope: Rope | None) -> None:
    """Writes ``x [M, channels]`` to ``out [M, channels]`` or ``[groups, M, channels / groups]``.

    In its dtype; or as FP8, with ``scale [channels / 128, M]``.
    """
    if not len(x):
        return
    capability, (M, channels) = gpu(x.device).capability, x.shape
    if x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize):
        x = x.clone(memory_format=torch.contiguous_format)  # pairs of channels are read as one word
    positions, cos_sin, head_dim = rope or (x, x, 1)
    block_m, block_k, warps = (2, 256, 4) if planned_rows(M) <= 64 else (8, 512, 4) if rope is None else (4, 512, 2)
    block_k = min(block_k, max(128, triton.next_power_of_2(channels)))
    pdl = capability >= (9, 0)
    quantize_input_kernel[(triton.cdiv(M, block_m), triton.cdiv(channels, block_k))](
        x,
        out if scale is None else fp8_view(out),
        out if scale is None else scale,
        positions,
        cos_sin,
        M,
        x.stride(0),
        out.stride(-2),
        out.stride(0) if out.dim() == 3 else 0,
        0 if scale is None else scale.stride(0),
        K=channels,
        GROUP_K=out.shape[-1],
        QUANTIZE=scale is not None,
        POW2=pow2_scales,
        NATIVE_FP8=capability >= (8, 9),
        ROPE_DIM=0 if rope is None else cos_sin.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=warps,
        launch_pdl=pdl,
    )


class WeightTiles(NamedTuple):
    """Tiles of consecutive weights.

    Attributes:
        sizes, firsts: rows of each weight, and its first tile.
        tiles: number of all tiles.
        group_rows: rows of a diagonal block of the only weight; 0 for dense weights.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    tiles: int
    group_rows: int


def tile_weights(sizes: Sequence[int], rows: int, groups: int = 1) -> WeightTiles:
    """Tiles of ``rows`` rows over weights of ``sizes`` rows, or over each of the ``groups`` of one weight."""
    if groups > 1:
        group_rows = sizes[0] // groups
        return WeightTiles(tuple(sizes), (0,), groups * triton.cdiv(group_rows, rows), group_rows)
    firsts, tiles = [], 0
    for size in sizes:
        firsts.append(tiles)
        tiles += triton.cdiv(size, rows)
    return WeightTiles(tuple(sizes), tuple(firsts), tiles, 0)


def empty_partials(x: Tensor, tiles: int, splits: int, size: int) -> Tensor:
    """Scratch memory for the split-K partials of each tile; a single element where nothing is split."""
    return torch.empty(tiles * splits * size if splits > 1 else 1, dtype=torch.float32, device=x.device)
