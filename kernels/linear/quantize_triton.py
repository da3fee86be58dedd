"""Triton kernel that quantises or rounds the input of FP8 linears, and first rotates attention's output back.

Channels are read in pairs, as words of twice the size: a rotation then needs no value of another thread, and all loads
and stores are 16 bytes wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8_triton import quantize_pairs, round_pairs
from deepseek_attn.kernels.common.row_ops_triton import pdl_begin, rotated_back
from deepseek_attn.kernels.linear.problem import QuantizeTiles


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The two values of ``DTYPE`` in a word, float32."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        first, second = word.to(tl.int16).to(DTYPE, bitcast=True), (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _word(first, second, DTYPE: tl.constexpr):
    """Two values of ``DTYPE``, given as float32, in a word."""
    if DTYPE == tl.float32:  # noqa: SIM300
        low, high = first.to(tl.int32, bitcast=True).to(tl.int64), second.to(tl.int32, bitcast=True).to(tl.int64)
        return (low & 0xFFFFFFFF) | (high << 32)
    else:
        low, high = first.to(DTYPE).to(tl.int16, bitcast=True), second.to(DTYPE).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


class QuantizeInputs(NamedTuple):
    """Runtime arguments of `quantize_input_kernel`.

    Attributes:
        x: ``[M, K]`` of a float dtype; x_stride: elements from a row to the next, even.
        out: ``[K / GROUP_K, M, GROUP_K]``, FP8 or of a float dtype; out_stride, out_group_stride: of its dimensions.
        scale: float32 ``[K / GROUP, scale_stride]``, a row per ``GROUP`` channels, or None.
        positions: ``[M]``; those below 0 are not rotated. None without a rotation.
        cos_sin: float32 ``[positions, ROPE_DIM]`` for the last channels of a head, or None.
    """

    x: Any
    out: Any
    scale: Any
    positions: Any
    cos_sin: Any
    x_stride: Any
    out_stride: Any
    out_group_stride: Any
    scale_stride: Any


@dataclass(frozen=True)
class QuantizeConstants:
    """Constants of a launch of `quantize_input_kernel`.

    Attributes:
        K: channels of a row; GROUP_K: of a group of the output.
        GROUP: channels that share a scale; 0 if the output is rotated only. POW2: scales are powers of two.
        ROPE_DIM: rotated channels of a head, 0 for no rotation; HEAD_DIM: channels of a head.
        TILES: `QuantizeTiles`.
        NATIVE_FP8, PDL: as in `GPU`.
    """

    K: int
    GROUP_K: int
    GROUP: int
    POW2: bool
    ROPE_DIM: int
    HEAD_DIM: int
    TILES: QuantizeTiles
    NATIVE_FP8: bool
    PDL: bool


@triton.jit(do_not_specialize=["M"])
def quantize_input_kernel(rows, M, CONSTANTS: tl.constexpr):
    """A tile of ``M`` rows (`QuantizeInputs`), rotated back if ``ROPE_DIM``.

    With ``rows.scale`` quantised to FP8; without, rounded to FP8 values times their scales, unless ``GROUP`` is 0.
    """
    K: tl.constexpr = CONSTANTS.K
    GROUP_K: tl.constexpr = CONSTANTS.GROUP_K
    GROUP: tl.constexpr = CONSTANTS.GROUP
    POW2: tl.constexpr = CONSTANTS.POW2
    ROPE_DIM: tl.constexpr = CONSTANTS.ROPE_DIM
    HEAD_DIM: tl.constexpr = CONSTANTS.HEAD_DIM
    BLOCK_M: tl.constexpr = CONSTANTS.TILES.rows
    PAIRS: tl.constexpr = CONSTANTS.TILES.channels // 2
    DTYPE: tl.constexpr = rows.x.dtype.element_ty
    WORD: tl.constexpr = tl.int64 if DTYPE == tl.float32 else tl.int32  # noqa: SIM300
    OUT: tl.constexpr = rows.out.dtype.element_ty
    OUT_WORD: tl.constexpr = tl.int64 if OUT == tl.float32 else tl.int32  # noqa: SIM300
    pdl_begin(CONSTANTS.PDL)  # wait until the previous kernel has written x
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = (row < M)[:, None] & (pair < K // 2)[None, :]
    token = row.to(tl.int64)
    # the channels 2i and 2i + 1 as one word, two float32 tiles then
    words = rows.x.to(tl.pointer_type(WORD)) + token[:, None] * (rows.x_stride // 2) + pair[None, :]
    first, second = _halves(tl.load(words, mask=inside, other=0), DTYPE)
    if ROPE_DIM > 0:
        position = tl.load(rows.positions + token, mask=row < M, other=0)[:, None]
        rotary_pair = (pair % (HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2)[None, :]
        rotated = (position >= 0) & (rotary_pair >= 0)
        table = rows.cos_sin + position * ROPE_DIM + rotary_pair
        # other channels are rotated by an angle of 0
        cos = tl.load(table, mask=rotated, other=1.0)
        sin = tl.load(table + ROPE_DIM // 2, mask=rotated, other=0.0)
        first, second = rotated_back(first, second, cos, sin, DTYPE)
    # where the pairs of this tile go, in words: a group of the output is far from the next
    group_word = (pair // (GROUP_K // 2)).to(tl.int64)[None, :] * (rows.out_group_stride // 2)
    out_word = group_word + token[:, None] * (rows.out_stride // 2) + (pair % (GROUP_K // 2))[None, :]
    if rows.scale is not None:
        # two bytes are a word; scales are stored in rows of groups, as cuBLAS reads them
        GROUPS: tl.constexpr = CONSTANTS.TILES.channels // GROUP
        codes, scale = quantize_pairs(first, second, POW2, CONSTANTS.NATIVE_FP8, GROUP // 2)
        tl.store(rows.out.to(tl.pointer_type(tl.int16)) + out_word, codes, mask=inside)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        target = rows.scale + group[None, :].to(tl.int64) * rows.scale_stride + token[:, None]
        tl.store(target, scale, mask=(row < M)[:, None] & (group < K // GROUP)[None, :])
    else:
        if GROUP > 0:
            first, second = round_pairs(first, second, GROUP, POW2, CONSTANTS.NATIVE_FP8)
        tl.store(rows.out.to(tl.pointer_type(OUT_WORD)) + out_word, _word(first, second, OUT), mask=inside)
