"""Triton device code of `insert_latents`: one program per row that a token adds to a V3.2 layer.

The order of a row's sums does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8_triton import group_scales, quantize_e4m3, scaled
from deepseek_attn.kernels.common.row_ops_triton import (
    hadamard_rows,
    normed_rows,
    pdl_begin,
    rotated_rows,
    round_to,
    row_block,
    row_cos_sin,
    row_weight,
    store_rows,
)
from deepseek_attn.kernels.insert.norm_rope_triton import load_row, norm_query_latent


@dataclass(frozen=True)
class KeyLatentShape:
    """Constants of `insert_key_latent`.

    Attributes:
        LATENT, ROPE: channels of a key latent and of its rotary key.
        N: entries of a page.
        FP8: entries are ``fp8_v32`` records; SCALE_POW2, SCALE_FLOOR: their scale rule, as in `group_scales`.
        PLAIN: dtype of other entries.
    """

    LATENT: int
    ROPE: int
    N: int
    FP8: bool
    SCALE_POW2: bool
    SCALE_FLOOR: int
    PLAIN: Any


@triton.jit
def insert_key_latent(t, rows, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Norm of the latent of token ``t``, rotation of its rotary key, and the cache write of both.

    A row of `KeyArguments` is the latent, then the rotary key.
    """
    LATENT: tl.constexpr = SHAPE.LATENT
    BLOCK: tl.constexpr = max(128, triton.next_power_of_2(LATENT))
    ROPE: tl.constexpr = SHAPE.ROPE
    ROPE_BLOCK: tl.constexpr = row_block(ROPE)
    DTYPE: tl.constexpr = rows.rows.dtype.element_ty
    PLAIN: tl.constexpr = SHAPE.PLAIN
    one = tl.arange(0, 1)
    # all loads are issued before the first result is needed
    position = tl.load(rows.positions + t + one)
    slot = tl.load(rows.slots + t + one).to(tl.int64)
    row = rows.rows + t * rows.stride
    x = load_row(row, LATENT, BLOCK)
    pe = load_row(row + LATENT, ROPE, ROPE_BLOCK)
    weight = row_weight(rows.weight, LATENT, BLOCK)
    freqs_cis = row_cos_sin(position, rows.cos_sin, rows.max_positions, ROPE, ROPE, ROPE_BLOCK)
    latent = normed_rows(x, weight, rows.eps, LATENT, DTYPE)
    pe = rotated_rows(pe, freqs_cis, ROPE, ROPE, DTYPE)

    used = (slot >= 0)[:, None]
    page = (rows.pool + (slot // SHAPE.N) * rows.page_stride)[:, None]
    entry = (slot % SHAPE.N)[:, None]
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    if SHAPE.FP8:
        # an entry: the latent in FP8, a float32 scale per 128 of its channels, the rotary key in bfloat16
        GROUPS: tl.constexpr = BLOCK // 128
        SCALES_END: tl.constexpr = LATENT + LATENT // 32
        start = page + entry * (SCALES_END + 2 * ROPE)
        groups = tl.reshape(round_to(latent, tl.bfloat16), (GROUPS, 128))
        # on the bits, a NaN is larger than every number: the scale of its group becomes NaN
        amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        scale, factor = group_scales(amax, SHAPE.SCALE_POW2, SHAPE.SCALE_FLOOR)
        value = scaled(groups, tl.broadcast_to(factor[:, None], (GROUPS, 128)), SHAPE.SCALE_POW2)
        group = tl.arange(0, GROUPS)[:, None]
        channel = group * 128 + tl.arange(0, 128)[None, :]
        tl.store(start + channel, quantize_e4m3(value, NATIVE_FP8), mask=used & (channel < LATENT))
        scales = (start + LATENT).to(tl.pointer_type(tl.float32)) + group
        tl.store(scales, scale[:, None], mask=used & (group < LATENT // 128))
        tail = (start + SCALES_END).to(tl.pointer_type(tl.bfloat16))
        tl.store(tail + rope, round_to(pe, tl.bfloat16).to(tl.bfloat16), mask=used & (rope < ROPE))
    else:
        # an entry: latent and rotary key, both of the record's dtype
        start = page.to(tl.pointer_type(PLAIN)) + entry * (LATENT + ROPE)
        channel = tl.arange(0, BLOCK)[None, :]
        tl.store(start + channel, round_to(latent, PLAIN).to(PLAIN), mask=used & (channel < LATENT))
        tl.store(start + LATENT + rope, round_to(pe, PLAIN).to(PLAIN), mask=used & (rope < ROPE))


@triton.jit
def insert_index_key(t, index, SHAPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Layer norm, half-split rotation, Hadamard matrix and cache write of the index key of token ``t``.

    The arguments are `KeyArguments` and `EntryFormat`.
    """
    D: tl.constexpr = SHAPE.D
    ROPE: tl.constexpr = SHAPE.ROPE
    BLOCK: tl.constexpr = triton.next_power_of_2(D)
    DTYPE: tl.constexpr = index.rows.dtype.element_ty
    HALF: tl.constexpr = ROPE // 2
    one = tl.arange(0, 1)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    rotary = channel < ROPE
    second = channel >= HALF
    # another thread holds the partner channel of a RoPE pair: load and normalise it here once more
    partner = tl.where(second, channel - HALF, channel + HALF)
    # all loads are issued before the first result is needed
    row = index.rows + t * index.stride
    x = tl.load(row + channel, mask=inside, other=0).to(tl.float32)
    other = tl.load(row + partner, mask=rotary, other=0).to(tl.float32)
    position = tl.load(index.positions + t + one)
    slot = tl.load(index.slots + t + one).to(tl.int64)
    weight, bias = row_weight(index.weight, D, BLOCK), row_weight(index.bias, D, BLOCK)
    other_weight = tl.load(index.weight + partner, mask=rotary, other=0)
    other_bias = tl.load(index.bias + partner, mask=rotary, other=0)
    known = rotary & (position >= 0) & (position < index.max_positions)
    table = index.cos_sin + position.to(tl.int64) * ROPE + channel % HALF
    cos = tl.load(table, mask=known, other=1)
    sin = tl.load(table + HALF, mask=known, other=0)

    # channels of the padding are 0 in x and must not count in the variance
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / D + index.eps)
    y = round_to(centred * factor * weight + bias, DTYPE)
    other = round_to((other - mean) * factor * other_weight + other_bias, DTYPE)
    # the first channel of a pair becomes a cos - b sin, the second b cos + a sin
    rotated = y * cos + tl.where(second, other, -other) * sin
    y = round_to(tl.where(rotary, rotated, y), DTYPE)[None, :]
    if SHAPE.HADAMARD:
        y = hadamard_rows(y, BLOCK, DTYPE)
    store_rows(y, slot, index.pool, index.page_stride, SHAPE, NATIVE_FP8)


@triton.jit
def insert_latents_kernel(
    rows, query, index, SHAPE: tl.constexpr, QUERY_SHAPE: tl.constexpr, INDEX_SHAPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid ``(tokens, 2 or 3)``: the cached row, the query latent and, with ``INDEX_SHAPE``, the index key."""
    pdl_begin(PDL)  # wait until the previous kernel has written all three
    t = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    if kind == 0:
        insert_key_latent(t, rows, SHAPE, NATIVE_FP8)
    elif kind == 1:
        norm_query_latent(t, query, QUERY_SHAPE, NATIVE_FP8)
    else:
        if INDEX_SHAPE is not None:
            insert_index_key(t, index, INDEX_SHAPE, NATIVE_FP8)
