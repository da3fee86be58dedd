"""Launches of the kernels of `linear_kernels`, shared by `linear` and `grouped_linear`; arguments are checked there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.counters import COUNTERS, counters_of
from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear.linear_triton import multi_linear_kernel
from deepseek_attn.kernels.linear.quantize_triton import quantize_input_kernel
from deepseek_attn.kernels.linear.tiles import Tiles, choose_tiles

_ROWS = 4  # cuBLAS's block-scaled product takes multiples of so many rows


def dot_plan(x: torch.dtype, weight: torch.dtype, fp8_input: bool, out: torch.dtype, native: bool) -> tuple:
    """(dtype of the factors, parts that x is cut into, precision) of a product.

    Every choice multiplies without rounding: float16 and bfloat16 hold e4m3, and three bfloat16 hold a float32. Sums of
    FP8 products keep about 14 bits on compute capability 9.0, too few for a float32 output.
    """
    if weight == torch.float8_e4m3fn:
        if fp8_input:
            return (tl.float8e4nv if native and out != torch.float32 else tl.float16), 1, None
        return (tl.float16, 1, None) if x == torch.float16 else (tl.bfloat16, 1 if x == torch.bfloat16 else 3, None)
    if weight == x and x != torch.float32:
        return TRITON_DTYPES[x], 1, None
    if weight == torch.bfloat16 and x == torch.float32:
        return tl.bfloat16, 3, None
    return tl.float32, 1, "tf32x3"


def launch_products(
    x: Tensor,
    scaled: Sequence[tuple[Tensor, Tensor, Tensor]],
    plain: Sequence[tuple[Tensor, Tensor]],
    *,
    fp8_input: bool,
    pow2: bool,
    quantized: tuple[Tensor, Tensor] | None = None,
    groups: int = 1,
    tiles: Tiles | None = None,
) -> None:
    """Computes products of one input with FP8 weights and with plain ones, all of either kind alike, in one launch.

    Args:
        x: ``[M, groups * K]``; scaled: (weight ``[N, K]``, scale, out ``[M, N]``); plain: (weight, out).
        fp8_input: the FP8 weights' input is rounded.
        quantized: it is already: (``[groups, M, K]`` or ``[M, K]``, scales).
        groups: the one FP8 weight is block-diagonal in so many blocks.
    """
    capability, processors = gpu(x.device)
    native = capability >= (8, 9)
    M, K = x.shape[0], x.shape[1] // groups
    if tiles is None:
        rows, plain_rows = (sum(len(weight) for weight, *_ in part) for part in (scaled, plain))
        item = x.itemsize if quantized is None or not fp8_input else 1
        plain_item = max([x.itemsize] + [weight.itemsize for weight, _ in plain])
        tiles = choose_tiles(M, K, rows, plain_rows, capability, processors, item, plain_item)
    mode = "plain" if not fp8_input else "quantize" if quantized is None else "quantized"
    dtype, parts, precision = tl.float16, 1, None
    plain_dtype, plain_parts, plain_precision = tl.float16, 1, None
    if scaled:
        dtype, parts, precision = dot_plan(x.dtype, scaled[0][0].dtype, fp8_input, scaled[0][2].dtype, native)
    if plain:
        plan = dot_plan(x.dtype, plain[0][0].dtype, False, plain[0][1].dtype, native)
        plain_dtype, plain_parts, plain_precision = plan
    group_rows = scaled[0][0].shape[0] // groups if groups > 1 else 0
    sizes = tuple(weight.shape[0] for weight, *_ in scaled)
    firsts, count = first_tiles(sizes, tiles.rows)
    if groups > 1:
        count = groups * triton.cdiv(group_rows, tiles.rows)
    plain_sizes = tuple(weight.shape[0] for weight, _ in plain)
    plain_firsts, plain_count = first_tiles(plain_sizes, tiles.plain_rows)
    m_tiles = triton.cdiv(M, tiles.tokens)
    splits, plain_splits = tiles.splits, tiles.plain_splits
    if (count + plain_count) * m_tiles > COUNTERS:
        splits = plain_splits = 1
    q, q_scale = (x, x) if quantized is None else quantized
    if quantized is not None:
        q = fp8_view(q)
    part = empty_partials(x, count * m_tiles, splits, tiles.rows * tiles.tokens)
    plain_part = empty_partials(x, plain_count * m_tiles, plain_splits, tiles.plain_rows * tiles.tokens)
    counters = counters_of(x.device) if max(splits, plain_splits) > 1 else x
    multi_linear_kernel[(m_tiles * (count * splits + plain_count * plain_splits),)](
        x,
        q,
        q_scale,
        tuple(fp8_view(weight) for weight, _, _ in scaled),
        tuple(scale for _, scale, _ in scaled),
        tuple(out for *_, out in scaled),
        tuple(weight for weight, _ in plain),
        tuple(out for _, out in plain),
        part,
        plain_part,
        counters,
        M,
        x.stride(0),
        q.stride(-2),
        q_scale.stride(1),
        K,
        q.stride(0) if groups > 1 else 0,
        K // 128 * q_scale.stride(1),
        K=K,
        SIZES=sizes,
        FIRSTS=firsts,
        TILES=count,
        SPLITS=splits,
        PLAIN_SIZES=plain_sizes,
        PLAIN_FIRSTS=plain_firsts,
        PLAIN_TILES=plain_count,
        PLAIN_SPLITS=plain_splits,
        GROUP_ROWS=group_rows,
        INPUT=mode,
        POW2=pow2,
        NATIVE_FP8=native,
        DTYPE=dtype,
        PARTS=parts,
        PRECISION=precision,
        PLAIN_DTYPE=plain_dtype,
        PLAIN_PARTS=plain_parts,
        PLAIN_PRECISION=plain_precision,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.rows,
        PLAIN_BLOCK_N=tiles.plain_rows,
        PLAIN_BLOCK_K=tiles.plain_channels,
        STAGES=tiles.stages,
        EARLY=tiles.early,
        PDL=capability[0] >= 9,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=capability[0] >= 9,
    )


def quantize(
    x: Tensor, groups: int, pow2: bool, rope: tuple[Tensor, Tensor, int] | None = None, fp8: bool = True
) -> tuple[Tensor, Tensor]:
    """``x [M, groups * K]``, rotated back by ``rope``, as ``[groups, M, K]``: FP8 and its scales, or the dtype of x.

    Scales are float32 ``[M, groups * K / 128]`` with strides 1 and M rounded up: there is room for `whole_rows`.
    """
    capability = gpu(x.device).capability
    M, channels = x.shape
    out, scale = empty_quantized_rows(M, channels, groups, x.device, torch.float8_e4m3fn if fp8 else x.dtype)
    if M == 0:
        return out, scale.t()
    if x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize):
        x = x.clone(memory_format=torch.contiguous_format)  # pairs of channels are read as one word
    positions, cos_sin, head_dim = rope or (x, x, 1)
    block_m, block_k, warps = (2, 256, 4) if M <= 64 else (8, 512, 4) if rope is None else (4, 512, 2)
    block_k = min(block_k, max(128, triton.next_power_of_2(channels)))
    early = capability[0] >= 9
    quantize_input_kernel[(triton.cdiv(M, block_m), triton.cdiv(channels, block_k))](
        x,
        fp8_view(out) if fp8 else out,
        scale,
        positions,
        cos_sin,
        M,
        x.stride(0),
        out.stride(1),
        out.stride(0),
        scale.stride(0),
        K=channels,
        GROUP_K=channels // groups,
        QUANTIZE=fp8,
        POW2=pow2,
        NATIVE_FP8=capability >= (8, 9),
        ROPE_DIM=0 if rope is None else cos_sin.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        PDL=early,
        num_warps=warps,
        launch_pdl=early,
    )
    return out, scale.t()


def empty_quantized_rows(
    M: int, channels: int, groups: int, device: torch.device, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """``[groups, M, channels / groups]`` and for FP8 the scales ``[channels / 128, M]``, with room for `whole_rows`."""
    rows = triton.cdiv(M, _ROWS) * _ROWS
    out = torch.empty(groups, rows, channels // groups, dtype=dtype, device=device)
    scales = channels // 128 if dtype == torch.float8_e4m3fn else 0
    return out[:, :M], torch.empty(scales, rows, dtype=torch.float32, device=device)[:, :M]


def whole_rows(q: Tensor, q_scale: Tensor) -> tuple[Tensor, Tensor]:
    """``q [M, K]`` and its scales with more rows, up to what cuBLAS takes; what these hold is of no account.

    The rows behind the tensors are used where they are, as `quantize` leaves them.
    """
    extra = -len(q) % _ROWS
    if not extra:
        return q, q_scale
    rows, K, groups = len(q) + extra, q.shape[1], q_scale.shape[1]
    fits = q_scale.stride(1) == rows and q.is_contiguous()
    if fits and _room(q, rows * K) and _room(q_scale, rows * groups):
        return q.as_strided((rows, K), (K, 1)), q_scale.as_strided((rows, groups), (1, rows))
    padded = torch.zeros(rows, K, dtype=torch.uint8, device=q.device).view(q.dtype)
    padded[: len(q)] = q
    return padded, torch.nn.functional.pad(q_scale.t(), (0, extra)).t()


def _room(tensor: Tensor, size: int) -> bool:
    """Whether ``size`` elements from the first of ``tensor`` on lie in its storage."""
    return tensor.storage_offset() + size <= tensor.untyped_storage().nbytes() // tensor.itemsize


def first_tiles(sizes: Sequence[int], rows: int) -> tuple[tuple[int, ...], int]:
    """The first tile of each weight, and the number of all."""
    firsts, count = [], 0
    for size in sizes:
        firsts.append(count)
        count += triton.cdiv(size, rows)
    return tuple(firsts), count


def empty_partials(x: Tensor, tiles: int, splits: int, size: int) -> Tensor:
    """Room for the shares of each tile, where there are several."""
    return torch.empty(tiles * splits * size if splits > 1 else 1, dtype=torch.float32, device=x.device)
