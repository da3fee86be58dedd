"""Triton device code of `moe_experts`: rows are grouped by expert, each group times its expert's weights.

A pair is a (token, expert) of the routing, numbered ``token * k + i``; with expert -1, it adds nothing. A program of
the product computes ``W x^T`` for a tile of weight rows and a tile of pairs that share an expert. The weight is the
left factor: Hopper's tensor cores need at least 64 rows on the left, and only 8 on the right, which holds an expert's
few pairs.

FP4 weights become bfloat16 by moving bits, their scale (a power of two) multiplied in: both exact, so the products sum
up over all channels without rescaling. A byte holds an even and an odd channel; instead of interleaving them, even and
odd channels are separate products, and inputs are stored evens first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3, quantize_groups
from deepseek_attn.kernels.moe.problem import ExpertTiles

FP4_BIAS = 64  # FP4 weights are held as 2**-64 of their value, which keeps them in the range of bfloat16
_FP4_FACTOR = tl.constexpr(2.0**FP4_BIAS)

# A nibble, times 2**12 + 2**6: its sign is bit 15 of a bfloat16 and its other three bits are bits 8 .. 6, which makes
# 2**-126 of its value; then times a factor. With bytes 1 and 2 swapped, pairs come out in the order of the bytes.
_UNPACK = tl.constexpr("""
{
    .reg .b32 w, t, z;
    mov.b32 z, 0x80008000;
    prmt.b32 w, $4, 0, 0x3120;
    and.b32 t, w, 0x000F000F;
    mul.lo.u32 t, t, 4160;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $0, t, $5, z;
    and.b32 t, w, 0x00F000F0;
    mul.lo.u32 t, t, 260;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $2, t, $5, z;
    shr.u32 w, w, 8;
    and.b32 t, w, 0x000F000F;
    mul.lo.u32 t, t, 4160;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $1, t, $6, z;
    and.b32 t, w, 0x00F000F0;
    mul.lo.u32 t, t, 260;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $3, t, $6, z;
}
""")


class ProductInput(NamedTuple):
    """Inputs of a product.

    Attributes:
        data: ``[R, K]`` with ``stride`` between rows; FP4 stacks read all even channels first.
        scale: float32 ``[R, ceil(K / group)]`` of e4m3 values; otherwise None.
    """

    data: Any
    scale: Any
    stride: Any


class StackPointers(NamedTuple):
    """A stack as kernels read it: `ExpertStack.weight` and ``scale``; e4m3 as bytes where the GPU has no FP8."""

    weight: Any
    scale: Any


class PairRouting(NamedTuple):
    """Pairs of a pass, and their tiles.

    Attributes:
        experts: ``[T, k]``, -1 for experts of other ranks; weights: float32 ``[T, k]``.
        sorted: int32 ``[tiles * TILE]``, the pairs of each tile, -1 where it is not full.
        tile_row: int32 ``[tiles]``, the row of the stacks with the expert of each tile, -1 for unused tiles. Both None
            with ``SLOTS``.
        slots: int32 ``[E]``, the row of the stacks with each expert; None: expert e is in row e.
    """

    experts: Any
    weights: Any
    sorted: Any
    tile_row: Any
    slots: Any


@dataclass(frozen=True)
class GroupedProduct:
    """Constants of `grouped_product_kernel`.

    Attributes:
        N, K: output channels and channels of the product; TOPK: pairs of a row of the input.
        FORMAT: of the stacks, ``plain``, ``fp8`` or ``fp4``.
        GATED: ``swiglu`` of the products with two stacks; CLAMP: with a limit; WEIGH: times the pair's weight.
        FP8_GROUP: channels of an FP8 input, and rows and channels of an FP8 weight, that share a scale.
        DTYPE: of both factors; NATIVE_FP8, PDL: as in `GPU`.
        SLOTS: 0, or a power of two from the number of pairs on: programs group the pairs themselves.
        TILES: `ExpertTiles`.
    """

    N: int
    K: int
    TOPK: int
    FORMAT: str
    GATED: bool
    CLAMP: bool
    WEIGH: bool
    FP8_GROUP: int
    DTYPE: Any
    SLOTS: int
    TILES: ExpertTiles
    NATIVE_FP8: bool
    PDL: bool


@triton.jit
def unpack_fp4(w, scale):
    """(even, odd) channels as bfloat16 ``[n, bytes]``, 2**-64 of their value, of packed ``w [n, bytes]``.

    ``scale``: e8m0 bytes ``[n, bytes / 16]``. Exact for scales from 2**-68 to 2**65; larger ones become infinite.
    """
    ROWS: tl.constexpr = w.shape[0]
    BYTES: tl.constexpr = w.shape[1]
    bits = (tl.minimum(scale.to(tl.int32), 193) + 62) << 7  # 2**(byte - 127 + 126 - 64)
    factor = tl.broadcast_to(bits.to(tl.int16)[:, :, None], (ROWS, BYTES // 16, 16))
    factor = tl.reshape(factor, (ROWS, BYTES)).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,=&r,=&r,r,r,r", [w, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def prepare_inputs_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    POW2: tl.constexpr,
    EVENS_FIRST: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Converts inputs of a product ``[R, K]``: quantised to FP8 per ``FP8_GROUP`` channels, even channels first.

    Values in float32 are rounded and written in the dtype of ``out_ptr``; with ``scale_ptr``, e4m3 values and their
    float32 scales ``[R, K / FP8_GROUP]`` are written instead.
    """
    SCALED: tl.constexpr = scale_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    channel = start + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()  # until the previous kernel has written x
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + channel, mask=channel < K, other=0)
    if QUANTIZE:
        groups = tl.reshape(x.to(tl.float32), (BLOCK // FP8_GROUP, FP8_GROUP))
        values, scale = quantize_groups(groups, POW2, SCALED, tl.float8e4nv if SCALED else tl.float32)
        if SCALED:
            group = start // FP8_GROUP + tl.arange(0, BLOCK // FP8_GROUP)
            tl.store(scale_ptr + row * (K // FP8_GROUP) + group, scale, mask=group < K // FP8_GROUP)
        else:
            # the rounding alone: the product reads the values under their scales
            values = (values * scale[:, None]).to(x_ptr.dtype.element_ty)
        x = tl.reshape(values, (BLOCK,))
    x = x.to(out_ptr.dtype.element_ty)
    if EVENS_FIRST:
        # both nibbles of a weight byte are multiplied apart: even channels go to the first half of the row
        even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
        half = start // 2 + tl.arange(0, BLOCK // 2)
        tl.store(out_ptr + row * K + half, even, mask=half < K // 2)
        tl.store(out_ptr + row * K + K // 2 + half, odd, mask=half < K // 2)
    else:
        tl.store(out_ptr + row * K + channel, x, mask=channel < K)


@triton.jit(do_not_specialize=["pairs"])
def count_pairs_kernel(experts_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Pairs of each expert: ``counts [E]``."""
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()  # until the router has written the experts
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        total += (tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def place_pairs_kernel(
    experts_ptr,
    counts_ptr,
    sorted_ptr,
    tile_row_ptr,
    slots_ptr,
    pairs,
    tiles,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Assigns whole tiles of ``TILE`` slots to each expert, filled with its pairs in order, then -1.

    ``tile_row [tiles]``: the row of the stacks with the expert of each tile, -1 for unused ones; see `PairRouting`.
    """
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()  # until the pairs of every expert are counted
        gdc_launch_dependents()
    # tiles of earlier experts come first
    other = tl.arange(0, triton.next_power_of_2(E))
    needed = (tl.load(counts_ptr + other, mask=other < E, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(other < expert, needed, 0), 0)
    expert_tiles = tl.sum(tl.where(other == expert, needed, 0), 0)
    stack_row = expert if slots_ptr is None else tl.load(slots_ptr + expert)
    for start in tl.range(0, expert_tiles, 32):
        tile = start + tl.arange(0, 32)
        tl.store(tile_row_ptr + first + tile, stack_row, mask=tile < expert_tiles)
    if expert == E - 1:
        # the program of the last expert marks all tiles behind its own as unused
        for start in tl.range(first + expert_tiles, tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(tile_row_ptr + tile, -1, mask=tile < tiles)
    next_slot = first * TILE
    if expert_tiles > 0:
        for start in tl.range(0, pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            is_of_expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == expert
            # in order of pairs, so that the grouping is the same in every run
            rank = tl.cumsum(is_of_expert.to(tl.int32), 0) - 1
            tl.store(sorted_ptr + next_slot + rank, pair, mask=is_of_expert)
            next_slot += tl.sum(is_of_expert.to(tl.int32), 0)
        rest = next_slot + tl.arange(0, TILE)
        tl.store(sorted_ptr + rest, -1, mask=rest < (first + expert_tiles) * TILE)


@triton.jit
def _tile_of(routing, tile, pairs, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """(row of the stacks with its expert or -1, pairs ``[TILE]`` or -1) of a tile.

    With ``SLOTS``, there is a tile for each pair: if the earlier pairs of the pair's expert fill whole tiles, it holds
    the next ``TILE`` pairs of that expert, else nothing. This suits few pairs and needs no earlier grouping launch.
    """
    if SLOTS == 0:
        stack_row = tl.load(routing.tile_row + tile).to(tl.int32)
        pairs_of_tile = routing.sorted + tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pair_of_row = tl.load(pairs_of_tile, mask=stack_row >= 0, other=-1)
    else:
        # every program compares all pairs with all: cheaper than a launch for up to 64 of them
        pair = tl.arange(0, SLOTS)
        chosen = tl.load(routing.experts + pair, mask=pair < pairs, other=-1).to(tl.int32)
        expert = tl.load(routing.experts + tile).to(tl.int32)
        same = chosen == expert
        earlier = tl.sum((same & (pair < tile)).to(tl.int32), 0)
        rank = tl.sum((same[None, :] & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
        wanted = earlier + tl.arange(0, TILE)
        in_tile = same[:, None] & (rank[:, None] == wanted[None, :])
        pair_of_row = tl.max(tl.where(in_tile, pair[:, None], -1), 0)
        # the tile of another pair holds this one, unless it begins a tile of its expert
        expert = tl.where(earlier % TILE == 0, expert, -1)
        stack_row = expert
        if routing.slots is not None:
            stack_row = tl.load(routing.slots + expert, mask=expert >= 0, other=-1)
    return stack_row, pair_of_row


@triton.jit
def gated(gate, up, limit, CLAMP: tl.constexpr):
    """``silu(gate) * up`` of float32 values; NaN stays NaN."""
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["size"])
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, limit, size, CLAMP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out = silu(gate) * up`` of ``size`` values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()  # until the products have written gate and up
        gdc_launch_dependents()
    gate = tl.load(gate_ptr + at, mask=at < size, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < size, other=0).to(tl.float32)
    tl.store(out_ptr + at, gated(gate, up, limit, CLAMP).to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["pairs"])
def grouped_product_kernel(x, a, b, out_ptr, routing, pairs, limit, PRODUCT: tl.constexpr):
    """``out[pair] = W[expert] x[pair // TOPK]``, rows of ``N``.

    Args:
        x: `ProductInput`; a, b: `StackPointers`, ``b`` None for one stack; routing: `PairRouting`.
        out_ptr: ``[pairs, N]``; limit: clamp of ``swiglu``.
        PRODUCT: `GroupedProduct`. ``GATED``: a tile alternates rows of both stacks, and ``out = swiglu(a x, b x)``.
    """
    N: tl.constexpr = PRODUCT.N
    K: tl.constexpr = PRODUCT.K
    FORMAT: tl.constexpr = PRODUCT.FORMAT
    GATED: tl.constexpr = PRODUCT.GATED
    FP8_GROUP: tl.constexpr = PRODUCT.FP8_GROUP
    DTYPE: tl.constexpr = PRODUCT.DTYPE
    PRECISION: tl.constexpr = "tf32x3" if DTYPE == tl.float32 else None  # noqa: SIM300
    TILE: tl.constexpr = PRODUCT.TILES.pairs
    BLOCK_N: tl.constexpr = PRODUCT.TILES.rows
    # a round's channels share the scales of FP8 factors
    BLOCK_K: tl.constexpr = min(PRODUCT.TILES.channels, FP8_GROUP) if FORMAT == "fp8" else PRODUCT.TILES.channels
    STAGES: tl.constexpr = PRODUCT.TILES.stages
    if PRODUCT.PDL:
        gdc_wait()  # until the previous kernel has written the inputs and tiles
        gdc_launch_dependents()
    stack_row, pair = _tile_of(routing, tl.program_id(1), pairs, TILE, PRODUCT.SLOTS)
    if stack_row < 0:
        return
    lane = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(lane // 2 if GATED else lane, N - 1)
    weight_row = stack_row.to(tl.int64) * N + row
    a_row = a.weight
    scale_base = a.scale
    if GATED:
        a_row = tl.where(lane % 2 == 1, b.weight, a.weight)
        if a.scale is not None:
            scale_base = tl.where(lane % 2 == 1, b.scale, a.scale)
    known = pair >= 0
    token = tl.where(known, pair // PRODUCT.TOPK, 0).to(tl.int64)
    x_row = x.data + token * x.stride
    acc = tl.zeros((BLOCK_N, TILE), tl.float32)
    if FORMAT == "fp4":
        BYTES: tl.constexpr = K // 2
        STEP: tl.constexpr = BLOCK_K // 2
        w_row = a_row + weight_row * BYTES
        s_row = scale_base + weight_row * (BYTES // 16)
        # Triton loads the next STAGES - 1 rounds while this one is multiplied
        for start in tl.range(0, BYTES, STEP, num_stages=STAGES):
            column = start + tl.arange(0, STEP)
            group = start // 16 + tl.arange(0, STEP // 16)
            if BYTES % STEP == 0:
                w = tl.load(w_row[:, None] + column[None, :])
                scale = tl.load(s_row[:, None] + group[None, :])
                inside = known[:, None]
            else:
                w = tl.load(w_row[:, None] + column[None, :], mask=(column < BYTES)[None, :], other=0)
                scale = tl.load(s_row[:, None] + group[None, :], mask=(group < BYTES // 16)[None, :], other=0)
                inside = known[:, None] & (column < BYTES)[None, :]
            even, odd = unpack_fp4(w, scale)
            # channels of the input are stored evens first: both halves are contiguous
            x_even = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0)
            x_odd = tl.load(x_row[:, None] + (BYTES + column)[None, :], mask=inside, other=0)
            # a separate sum: the tensor cores must be done with these registers before the next tile is unpacked
            product = tl.dot(even.to(DTYPE), tl.trans(x_even.to(DTYPE)), input_precision=PRECISION)
            acc += tl.dot(odd.to(DTYPE), tl.trans(x_odd.to(DTYPE)), product, input_precision=PRECISION)
        acc *= _FP4_FACTOR
    else:
        w_row = a_row + weight_row * K
        ROWS: tl.constexpr = (N + FP8_GROUP - 1) // FP8_GROUP
        GROUPS: tl.constexpr = (K + FP8_GROUP - 1) // FP8_GROUP
        if FORMAT == "fp8":
            s_row = scale_base + (stack_row.to(tl.int64) * ROWS + row // FP8_GROUP) * GROUPS
        # Triton loads the next STAGES - 1 rounds while this one is multiplied
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK_K)
            if K % BLOCK_K == 0:
                w = tl.load(w_row[:, None] + column[None, :])
                values = tl.load(x_row[:, None] + column[None, :], mask=known[:, None], other=0.0)
            else:
                w = tl.load(w_row[:, None] + column[None, :], mask=(column < K)[None, :], other=0.0)
                inside = known[:, None] & (column < K)[None, :]
                values = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0)
            if FORMAT == "fp8":
                if x.scale is None:
                    w = decode_e4m3(w, PRODUCT.NATIVE_FP8, DTYPE)
                    values = values.to(DTYPE)
                # BLOCK_K channels are at most a group: each round's product has one scale a row
                product = tl.dot(w, tl.trans(values), input_precision=PRECISION)
                factor = tl.load(s_row + start // FP8_GROUP)[:, None]
                if x.scale is not None:
                    x_scale = tl.load(x.scale + token * GROUPS + start // FP8_GROUP, mask=known, other=0)
                    factor = factor * x_scale[None, :]
                acc += product * factor
            elif DTYPE == tl.float32:  # noqa: SIM300
                acc += tl.dot(w, tl.trans(values), input_precision=PRECISION)  # a separate sum, for the reason above
            else:
                acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    known = pair >= 0
    out_row = out_ptr + tl.where(known, pair, 0).to(tl.int64) * N
    if GATED:
        # rows of both stacks alternate: neighbours are the gate and the up projection of one channel
        pieces = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, TILE)), (0, 2, 1))
        gate, up = tl.split(pieces.to(out_ptr.dtype.element_ty).to(tl.float32))
        value = gated(gate, up, limit, PRODUCT.CLAMP)
        if PRODUCT.WEIGH:
            value *= tl.load(routing.weights + pair, mask=known, other=0)[None, :]
        channel = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        value = acc
        channel = lane
    inside = (channel < N)[:, None] & known[None, :]
    tl.store(out_row[None, :] + channel[:, None], value.to(out_ptr.dtype.element_ty), mask=inside)


class CombinedPairs(NamedTuple):
    """Runtime arguments of `moe_combine_kernel`.

    Attributes:
        pair_outputs: ``[T * k, D]``; experts, weights: ``[T, k]``.
        add: ``[T, D]`` with ``add_stride`` between rows, or None; out: ``[T, D]``.
    """

    pair_outputs: Any
    experts: Any
    weights: Any
    add: Any
    out: Any
    add_stride: Any


@triton.jit
def moe_combine_kernel(
    pairs,
    D: tl.constexpr,
    TOPK: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[t] = sum over pairs of t, in order of expert, of pair_outputs[pair] [* weight]``, plus ``add``."""
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    if PDL:
        gdc_wait()  # until the second product has written the outputs of the pairs
        gdc_launch_dependents()
    i = tl.arange(0, triton.next_power_of_2(TOPK))
    expert = tl.load(pairs.experts + t * TOPK + i, mask=i < TOPK, other=1 << 30).to(tl.int32)
    # the rank of each pair in the order of experts: the sum does not depend on the order of choices
    earlier = (expert[None, :] < expert[:, None]) | ((expert[None, :] == expert[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(earlier.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for position in tl.static_range(TOPK):
        pair = t * TOPK + tl.sum(tl.where(rank == position, i, 0), 0)
        is_local = tl.sum(tl.where(rank == position, expert, 0), 0) >= 0
        part = tl.load(pairs.pair_outputs + pair * D + channel, mask=inside & is_local, other=0).to(tl.float32)
        if WEIGH:
            part *= tl.load(pairs.weights + pair, mask=is_local, other=0)
        total += part
    if pairs.add is not None:
        total += tl.load(pairs.add + t * pairs.add_stride + channel, mask=inside, other=0).to(tl.float32)
    tl.store(pairs.out + t * D + channel, total.to(pairs.out.dtype.element_ty), mask=inside)
