"""Routed experts in Triton, from one token to thousands; no shape depends on the routing.

Device code: `experts_triton`. A pair is a (token, expert) of the routing, numbered ``token * k + i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, gpu, on_gpu, supports_pdl
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.linear import FP8_INPUT_GROUP
from deepseek_attn.kernels.moe.experts_triton import (
    combine_kernel,
    count_kernel,
    grouped_product_kernel,
    place_kernel,
    prepare_kernel,
    swiglu_kernel,
)
from deepseek_attn.kernels.moe.launch_config import (
    HopperLaunchConfig,
    LaunchConfig,
    Operands,
    choose_config,
    choose_hopper_config,
    choose_operands,
)
from deepseek_attn.kernels.moe.launch_hopper import fits_hopper, launch_hopper
from deepseek_attn.kernels.moe.types import ExpertStack

MAX_SLOTS = 64  # pairs up to which the product kernels group them by themselves
TOKENS = 8192  # per pass: intermediate results of 65536 tokens of V4-Flash would need 6 GB


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    limit: float,
    weigh_output: bool = False,
    fp8_input: bool = False,
    pow2_scales: bool = True,
    add: Tensor | None = None,
    num_routed: int | None = None,
    add_ready: torch.cuda.Event | None = None,
    config: LaunchConfig | HopperLaunchConfig | None = None,
) -> Tensor:
    """See `deepseek_attn.kernels.moe.moe_experts`; ``config`` overrides the kernel and the tiling of the products."""
    weight_format = _check(x, experts, weights, w1, w3, w2, add)
    T, D = x.shape
    if add is not None and add.stride(1) != 1:
        add = add.contiguous()
    out = torch.empty(T, D, dtype=torch.float32 if add is None else x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    capability = gpu(x.device).capability
    operands = choose_operands(weight_format, x.dtype, fp8_input, pow2_scales, capability)
    hopper = fits_hopper(x, w1, w3, w2, fp8_input)
    routed = num_routed or len(w1.weight)
    for start in range(0, T, TOKENS):
        part = slice(start, start + TOKENS)
        x_part, ids, factors = x[part], experts[part], weights[part]
        chosen = config
        if chosen is None and hopper:
            chosen = choose_hopper_config(ids.numel(), routed, w1.is_fp4)
        if isinstance(chosen, HopperLaunchConfig):
            outputs = launch_hopper(x_part, ids, factors, w1, w3, w2, limit, weigh_output, pow2_scales, chosen)
        else:
            chosen = chosen or choose_config(ids.numel(), routed, operands, capability)
            count, group = len(w1.weight), w1.fp8_group
            products = GroupedProducts.of(ids, factors, count, limit, operands, chosen, capability, group)
            outputs = products.run(x_part, w1, w3, w2, weigh_output, pow2_scales)
        if add_ready is not None:
            add_ready.wait()
        combine(
            outputs, ids, factors, weigh_output, None if add is None else add[part], out[part], capability >= (9, 0)
        )
    return out


def combine(
    pair_outputs: Tensor, experts: Tensor, weights: Tensor, weigh: bool, add: Tensor | None, out: Tensor, pdl: bool
) -> None:
    """Adds the outputs ``[T * k, D]`` of each token's pairs, times their weights if ``weigh``, and ``add``."""
    (T, D), k = out.shape, experts.shape[1]
    block = 1024 if T * D > 1 << 22 else 512 if T * D > 1 << 18 else 128
    combine_kernel[(T, triton.cdiv(D, block))](
        pair_outputs,
        experts,
        weights,
        pair_outputs if add is None else add,
        out,
        0 if add is None else add.stride(0),
        D=D,
        TOPK=k,
        TOPK_PADDED=triton.next_power_of_2(k),
        WEIGH=weigh,
        ADD=add is not None,
        BLOCK=block,
        PDL=pdl,
        enable_fp_fusion=True,
        num_warps=min(4, block // 128),
        launch_pdl=pdl,
    )


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `deepseek_attn.kernels.moe.swiglu`."""
    if gate.shape != up.shape or not on_gpu(gate):
        raise ValueError(f"gate and up must have one shape, on a GPU, got {tuple(gate.shape)} and {tuple(up.shape)}")
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if out.numel():
        pdl = supports_pdl(gate.device)
        block = 1024 if out.numel() > 1 << 18 else 256
        swiglu_kernel[(triton.cdiv(out.numel(), block),)](
            gate,
            up,
            out,
            float(limit),
            out.numel(),
            CLAMP=limit > 0,
            BLOCK=block,
            PDL=pdl,
            enable_fp_fusion=True,
            num_warps=block // 256,
            launch_pdl=pdl,
        )
    return out


class PairTiles(NamedTuple):
    """Pairs in tiles that share an expert.

    Attributes:
        pairs: int32 ``[tiles * tile size]``, -1 where a tile is not full.
        expert: int32 ``[tiles]``, the expert of each tile; -1 for unused tiles.
    """

    pairs: Tensor
    expert: Tensor


def group_pairs(experts: Tensor, count: int, tile: int, pdl: bool) -> PairTiles:
    """Groups the pairs of ``experts [T, k]``, of ``count`` experts; there are tiles enough for any routing."""
    pairs = experts.numel()
    full = min(pairs, count)
    tiles = full + (pairs - full) // tile
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    sorted_pairs = torch.empty(tiles * tile, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    block = min(triton.next_power_of_2(pairs), 4096)
    warps = max(1, min(8, block // 256))
    options = {"BLOCK": block, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}
    count_kernel[(count,)](experts, counts, pairs, enable_fp_fusion=True, **options)
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
        enable_fp_fusion=True,
        **options,
    )
    return PairTiles(sorted_pairs, tile_expert)


@dataclass(frozen=True)
class GroupedProducts:
    """Both products of one pass over tokens, and their common arguments.

    Attributes:
        experts, weights: the routing, ``[T, k]``.
        tiles: pairs by expert; None for so few that the kernels group them.
        fp8_group: as in `ExpertStack`.
    """

    experts: Tensor
    weights: Tensor
    tiles: PairTiles | None
    limit: float
    operands: Operands
    config: LaunchConfig
    capability: tuple[int, int]
    fp8_group: int = FP8_INPUT_GROUP

    @classmethod
    def of(
        cls,
        experts: Tensor,
        weights: Tensor,
        count: int,
        limit: float,
        operands: Operands,
        config: LaunchConfig,
        capability: tuple[int, int],
        fp8_group: int = FP8_INPUT_GROUP,
    ) -> GroupedProducts:
        """Groups the pairs of a routing over ``count`` experts."""
        many = experts.numel() > MAX_SLOTS
        tiles = group_pairs(experts, count, config.pairs, capability >= (9, 0)) if many else None
        return cls(experts, weights, tiles, limit, operands, config, capability, fp8_group)

    def run(
        self,
        x: Tensor,
        w1: ExpertStack,
        w3: ExpertStack,
        w2: ExpertStack,
        weigh_output: bool,
        pow2_scales: bool,
    ) -> Tensor:
        """Launches everything from ``x [T, D]`` to the outputs of all pairs ``[T * k, D]``."""
        (T, D), k = x.shape, self.experts.shape[1]
        hidden = torch.empty(T * k, w1.weight.shape[1], dtype=x.dtype, device=x.device)
        pair_outputs = torch.empty(T * k, D, dtype=x.dtype, device=x.device)
        self._product(self._prepared(x, pow2_scales), w1, w3, hidden, k, not weigh_output)
        self._product(self._prepared(hidden, pow2_scales), w2, None, pair_outputs, 1, False)
        return pair_outputs

    def _prepared(self, x: Tensor, pow2_scales: bool) -> tuple[Tensor, Tensor | None]:
        """(inputs of a product ``[R, K]`` in the form that it reads, their scales)."""
        operands, pdl = self.operands, self.capability >= (9, 0)
        if not operands.needs_prepared_input:
            return x, None
        R, K = x.shape
        values = torch.empty(R, K, dtype=operands.dtype, device=x.device)
        scale_shape = R, triton.cdiv(K, self.fp8_group)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device) if operands.scaled else None
        block = min(triton.next_power_of_2(K), 512 if R * K < 1 << 18 else 1024)
        prepare_kernel[(R, triton.cdiv(K, block))](
            x,
            values,
            values if scale is None else scale,
            x.stride(0),
            K=K,
            BLOCK=block,
            QUANTIZE=operands.quantize,
            POW2=pow2_scales,
            SCALED=operands.scaled,
            EVENS_FIRST=operands.weights == "fp4",
            FP8_GROUP=self.fp8_group,
            PDL=pdl,
            enable_fp_fusion=True,
            num_warps=max(1, block // 256),
            launch_pdl=pdl,
        )
        return values, scale

    def _product(
        self,
        inputs: tuple[Tensor, Tensor | None],
        a: ExpertStack,
        b: ExpertStack | None,
        out: Tensor,
        k: int,
        weigh: bool,
    ) -> None:
        """Launches ``out[pair] = a[expert] x[pair // k]``, or ``swiglu`` of the products with a and b."""
        x, x_scale = inputs
        pairs, N = out.shape
        native, pdl = self.capability >= (8, 9), self.capability >= (9, 0)
        operands, config, tiles = self.operands, self.config, self.tiles or PairTiles(self.experts, self.experts)
        a_weight, a_scale = _arguments(a, native)
        b_weight, b_scale = _arguments(b or a, native)
        count = pairs if self.tiles is None else len(tiles.expert)
        grouped_product_kernel[(triton.cdiv(N if b is None else 2 * N, config.rows), count)](
            x,
            x if x_scale is None else x_scale,
            a_weight,
            b_weight,
            a_scale,
            b_scale,
            out,
            self.experts,
            self.weights,
            tiles.pairs,
            tiles.expert,
            pairs,
            x.stride(0),
            float(self.limit),
            N=N,
            K=x.shape[1],
            TOPK=k,
            FORMAT=operands.weights,
            GATED=b is not None,
            CLAMP=self.limit > 0,
            WEIGH=weigh,
            X_SCALED=operands.scaled,
            FP8_GROUP=self.fp8_group,
            NATIVE_FP8=native,
            DTYPE=TRITON_DTYPES.get(operands.dtype, tl.float8e4nv),
            PRECISION="tf32x3" if operands.dtype == torch.float32 else None,
            SLOTS=triton.next_power_of_2(pairs) if self.tiles is None else 0,
            TILE=config.pairs,
            BLOCK_N=config.rows,
            BLOCK_K=min(config.channels, self.fp8_group) if operands.weights == "fp8" else config.channels,
            STAGES=config.stages,
            PDL=pdl,
            enable_fp_fusion=True,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=pdl,
        )


def _arguments(stack: ExpertStack, native: bool) -> tuple[Tensor, Tensor]:
    """Weight and scale as kernels read them: FP8 as bytes where the GPU has none, the weight for a missing scale."""
    weight, scale = stack.weight, stack.scale
    if weight.dtype == torch.float8_e4m3fn and not native:
        weight = weight.view(torch.uint8)
    return weight, weight if scale is None else scale


def _check(
    x: Tensor, experts: Tensor, weights: Tensor, w1: ExpertStack, w3: ExpertStack, w2: ExpertStack, add: Tensor | None
) -> str:
    """The format of the weights.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    if x.dim() != 2 or x.dtype not in FLOATS or not on_gpu(x):
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
    E, inner, _ = w1.weight.shape
    formats = [_check_stack(w1, E, inner, x), _check_stack(w3, E, inner, x), _check_stack(w2, E, x.shape[1], x)]
    widths = [
        stack.weight.shape[2] * (2 if name == "fp4" else 1) for name, stack in zip(formats, (w1, w3, w2), strict=True)
    ]
    if len(set(formats)) > 1 or widths != [x.shape[1], x.shape[1], inner]:
        raise ValueError(
            f"w1 and w3 must be [{E}, {inner}, {x.shape[1]}] and w2 [{E}, {x.shape[1]}, {inner}] in one format, got "
            f"{formats} with {widths} input channels"
        )
    return formats[0]


def _check_stack(stack: ExpertStack, E: int, rows: int, x: Tensor) -> str:
    weight, scale, exponent, group = stack
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
        form, dtype, shape = "fp8", torch.float32, (E, triton.cdiv(rows, group), triton.cdiv(width, group))
        fits = weight.dtype == torch.float8_e4m3fn
    if not fits or scale.dtype != dtype or scale.shape != shape or not scale.is_contiguous():
        raise ValueError(
            f"a quantised stack is float8_e4m3fn [E, out, in] with float32 scales of its {group} x {group} blocks, or "
            "packed FP4 uint8 [E, out, in / 2] with e8m0 bytes [E, out, in / 32], got "
            f"{weight.dtype} {tuple(weight.shape)} with {scale.dtype} {tuple(scale.shape)}"
        )
    if exponent is not None and (exponent.shape, exponent.dtype, form) != ((E, rows), torch.uint8, "fp4"):
        raise ValueError(
            f"exponents of rows are uint8 [{E}, {rows}], for FP4, got {exponent.dtype} {tuple(exponent.shape)} for "
            f"{form}"
        )
    return form
