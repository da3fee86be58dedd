"""Routed experts in Triton, from one token to thousands; no shape depends on the routing.

The device code is in `moe_kernels`; this file checks arguments and decides how the launches are cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, gpu, supports_pdl
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.moe.experts_triton import (
    combine_kernel,
    count_kernel,
    grouped_product_kernel,
    place_kernel,
    prepare_kernel,
    swiglu_kernel,
)
from deepseek_attn.kernels.moe.plan import Plan, Tiles, choose_plan, choose_tiles

Stack = tuple[Tensor, Tensor | None]
MAX_SLOTS = 64  # pairs up to which the product kernels group them by themselves
TOKENS = 8192  # of one pass: what lies between the products would take 6 GB for 65536 tokens of V4-Flash


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: Stack,
    w3: Stack,
    w2: Stack,
    limit: float,
    weigh_output: bool = False,
    fp8_input: bool = False,
    pow2: bool = True,
    add: Tensor | None = None,
    spread: int | None = None,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    """Same as `reference.moe.moe_experts`.

    Args:
        tiles: of the products with w1 and w3, and with w2; by default chosen from shapes alone.

    Notes:
        FP4 weights under scales from 2**-68 to 2**65 are exact; under larger ones they become infinite. FP8 products of
        one block of 128 channels are summed as the tensor cores do it: on compute capability 9.0 with about 14 bits.
    """
    format = _check(x, experts, weights, w1, w3, w2, add)
    T, D = x.shape
    if add is not None and add.stride(1) != 1:
        add = add.contiguous()
    out = torch.empty(T, D, dtype=torch.float32 if add is None else x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    capability = gpu(x.device).capability
    plan = choose_plan(format, x.dtype, fp8_input, pow2, capability)
    for start in range(0, T, TOKENS):
        part = slice(start, start + TOKENS)
        chunk = (x[part], experts[part], weights[part], w1, w3, w2)
        options = (limit, weigh_output, pow2, None if add is None else add[part], out[part])
        _run(*chunk, *options, plan, tiles, capability, spread)
    return out


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Same as `reference.moe.swiglu`."""
    if gate.shape != up.shape or not _on_gpu(gate):
        raise ValueError(f"gate and up must have one shape, on a GPU, got {tuple(gate.shape)} and {tuple(up.shape)}")
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if out.numel():
        early = supports_pdl(gate.device)
        block = 1024 if out.numel() > 1 << 18 else 256
        swiglu_kernel[(triton.cdiv(out.numel(), block),)](
            gate,
            up,
            out,
            float(limit),
            out.numel(),
            CLAMP=limit > 0,
            BLOCK=block,
            PDL=early,
            num_warps=block // 256,
            launch_pdl=early,
        )
    return out


def _run(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: Stack,
    w3: Stack,
    w2: Stack,
    limit: float,
    weigh_output: bool,
    pow2: bool,
    add: Tensor | None,
    out: Tensor,
    plan: Plan,
    tiles: tuple[Tiles, Tiles] | None,
    capability: tuple[int, int],
    spread: int | None = None,
) -> None:
    """All launches of one pass, into ``out [T, D]``."""
    (T, k), D, E = experts.shape, x.shape[1], len(w1[0])
    pairs, inner, early = T * k, w1[0].shape[1], capability[0] >= 9
    first, second = tiles or choose_tiles(pairs, spread or E, plan, capability)
    if first.pairs != second.pairs:
        raise ValueError(f"both products share one grouping of pairs, got tiles of {first.pairs} and {second.pairs}")
    groups = group_pairs(experts, E, first.pairs, early) if pairs > MAX_SLOTS else None
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, D, dtype=x.dtype, device=x.device)
    options = (experts, weights, groups, limit, plan, capability)
    _product(*_prepared(x, plan, pow2, early), w1, w3, hidden, k, not weigh_output, first, *options)
    _product(*_prepared(hidden, plan, pow2, early), w2, None, parts, 1, False, second, *options)
    block = 512 if T * D > 1 << 18 else 128
    combine_kernel[(T, triton.cdiv(D, block))](
        parts,
        experts,
        weights,
        parts if add is None else add,
        out,
        0 if add is None else add.stride(0),
        D=D,
        TOPK=k,
        TOPK_PADDED=triton.next_power_of_2(k),
        WEIGH=weigh_output,
        ADD=add is not None,
        BLOCK=block,
        PDL=early,
        num_warps=block // 128,
        launch_pdl=early,
    )


def _prepared(x: Tensor, plan: Plan, pow2: bool, early: bool) -> tuple[Tensor, Tensor | None]:
    """Inputs of a product ``[R, K]`` in the form that it reads, and their scales."""
    if not plan.prepares:
        return x, None
    R, K = x.shape
    values = torch.empty(R, K, dtype=plan.dtype, device=x.device)
    scale = torch.empty(R, triton.cdiv(K, 128), dtype=torch.float32, device=x.device) if plan.scaled else None
    block = min(triton.next_power_of_2(K), 512 if R * K < 1 << 18 else 1024)
    prepare_kernel[(R, triton.cdiv(K, block))](
        x,
        values,
        values if scale is None else scale,
        x.stride(0),
        K=K,
        BLOCK=block,
        QUANTIZE=plan.quantize,
        POW2=pow2,
        SCALED=plan.scaled,
        EVENS_FIRST=plan.format == "fp4",
        PDL=early,
        num_warps=max(1, block // 256),
        launch_pdl=early,
    )
    return values, scale


def group_pairs(experts: Tensor, count: int, tile: int, early: bool) -> tuple[Tensor, Tensor]:
    """Pairs of ``experts [T, k]`` in tiles that share an expert.

    Returns:
        (pairs int32 ``[tiles * tile]``, -1 where a tile is not full; expert of each tile int32, -1 for unused tiles).
        There are as many tiles as the worst routing needs.
    """
    pairs = experts.numel()
    full = min(pairs, count)
    tiles = full + (pairs - full) // tile
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    sorted_pairs = torch.empty(tiles * tile, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    block = min(triton.next_power_of_2(pairs), 4096)
    warps = max(1, min(8, block // 256))
    options = {"BLOCK": block, "PDL": early, "num_warps": warps, "launch_pdl": early}
    count_kernel[(count,)](experts, counts, pairs, **options)
    place_kernel[(count,)](
        experts,
        counts,
        sorted_pairs,
        tile_expert,
        pairs,
        tiles,
        E=count,
        E_PADDED=triton.next_power_of_2(count),
        TILE=tile,
        **options,
    )
    return sorted_pairs, tile_expert


def _product(
    x: Tensor,
    x_scale: Tensor | None,
    a: Stack,
    b: Stack | None,
    out: Tensor,
    k: int,
    weigh: bool,
    tiles: Tiles,
    experts: Tensor,
    weights: Tensor,
    groups: tuple[Tensor, Tensor] | None,
    limit: float,
    plan: Plan,
    capability: tuple[int, int],
) -> None:
    """Launches ``out[pair] = a[expert] x[pair // k]``, or ``swiglu`` of the products with a and b."""
    pairs, N = out.shape
    native, early = capability >= (8, 9), capability[0] >= 9
    sorted_pairs, tile_expert = (experts, experts) if groups is None else groups
    gated = b is not None
    a, a_scale = _operands(a, native)
    b, b_scale = _operands(b, native) if gated else (a, a_scale)
    count = pairs if groups is None else len(tile_expert)
    grouped_product_kernel[(triton.cdiv(2 * N if gated else N, tiles.rows), count)](
        x,
        x if x_scale is None else x_scale,
        a,
        b,
        a_scale,
        b_scale,
        out,
        experts,
        weights,
        sorted_pairs,
        tile_expert,
        pairs,
        x.stride(0),
        float(limit),
        N=N,
        K=x.shape[1],
        TOPK=k,
        FORMAT=plan.format,
        GATED=gated,
        CLAMP=limit > 0,
        WEIGH=weigh,
        X_SCALED=plan.scaled,
        NATIVE_FP8=native,
        DTYPE=TRITON_DTYPES.get(plan.dtype, tl.float8e4nv),
        PRECISION="tf32x3" if plan.dtype == torch.float32 else None,
        SLOTS=triton.next_power_of_2(pairs) if groups is None else 0,
        TILE=tiles.pairs,
        BLOCK_N=tiles.rows,
        BLOCK_K=tiles.channels,
        STAGES=tiles.stages,
        PDL=early,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=early,
    )


def _operands(stack: Stack, native: bool) -> tuple[Tensor, Tensor]:
    weight, scale = stack
    if weight.dtype == torch.float8_e4m3fn and not native:
        weight = weight.view(torch.uint8)
    return weight, weight if scale is None else scale


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _check(x: Tensor, experts: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, add: Tensor | None) -> str:
    """The format of the weights.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    if x.dim() != 2 or x.dtype not in FLOATS or not _on_gpu(x):
        raise ValueError(
            f"x must be [T, D] float32, bfloat16 or float16 on a GPU, got {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    if experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(x):
        raise ValueError(
            f"experts and weights must be [{len(x)}, k] for x {tuple(x.shape)}, got {tuple(experts.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if experts.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise ValueError(f"experts must be int32 or int64 and weights float32, got {experts.dtype}, {weights.dtype}")
    if add is not None and add.shape != x.shape:
        raise ValueError(f"add must be {tuple(x.shape)} like x, got {tuple(add.shape)}")
    E, inner, _ = w1[0].shape
    formats = [_check_stack(*w1, E, inner, x), _check_stack(*w3, E, inner, x), _check_stack(*w2, E, x.shape[1], x)]
    widths = [
        weight.shape[2] * (2 if name == "fp4" else 1) for name, (weight, _) in zip(formats, (w1, w3, w2), strict=True)
    ]
    if len(set(formats)) > 1 or widths != [x.shape[1], x.shape[1], inner]:
        raise ValueError(
            f"w1 and w3 must be [{E}, {inner}, {x.shape[1]}] and w2 [{E}, {x.shape[1]}, {inner}] in one format, got "
            f"{formats} with {widths} input channels"
        )
    return formats[0]


def _check_stack(weight: Tensor, scale: Tensor | None, E: int, rows: int, x: Tensor) -> str:
    if weight.dim() != 3 or weight.shape[:2] != (E, rows) or not weight.is_contiguous():
        raise ValueError(
            f"a stack of {E} experts with {rows} outputs must be contiguous [{E}, {rows}, in], got "
            f"{tuple(weight.shape)}, strides {weight.stride()}"
        )
    if scale is None:
        if weight.dtype != x.dtype:
            raise ValueError(f"a weight without scales must have the dtype of x, {x.dtype}, got {weight.dtype}")
        return "plain"
    width = weight.shape[2]
    if weight.dtype == torch.uint8:
        form, dtype, shape = "fp4", torch.uint8, (E, rows, width // 16)
        fits = width % 16 == 0
    else:
        form, dtype, shape = "fp8", torch.float32, (E, triton.cdiv(rows, 128), triton.cdiv(width, 128))
        fits = weight.dtype == torch.float8_e4m3fn
    if not fits or scale.dtype != dtype or scale.shape != shape or not scale.is_contiguous():
        raise ValueError(
            "a quantised stack is float8_e4m3fn [E, out, in] with float32 scales of its 128 x 128 blocks, or packed "
            f"FP4 uint8 [E, out, in / 2] with e8m0 bytes [E, out, in / 32], got {weight.dtype} {tuple(weight.shape)} "
            f"with {scale.dtype} {tuple(scale.shape)}"
        )
    return form
