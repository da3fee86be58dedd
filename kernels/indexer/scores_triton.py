"""Triton device code of `paged_index_scores`.

A program scores one split of a request's keys for a few tokens: a tile of keys is loaded once and multiplied with the
heads of each token in turn. Keys are the rows of a product and heads its columns, so that the sum over heads stays
within a quarter of a warp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8_triton import decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops_triton import pdl_begin


class ScoreRows(NamedTuple):
    """Runtime arguments of every kernel of scores.

    Attributes:
        q: ``[T, H, DIM]`` contiguous, e4m3 (bytes where the GPU has no FP8) or floats; weights: float32 ``[T, H]``.
        pool: pages of keys; page_stride: elements between them.
        out: float32 rows of scores; out_stride: between them.
    """

    q: Any
    weights: Any
    pool: Any
    out: Any
    page_stride: Any
    out_stride: Any


@dataclass(frozen=True)
class ScoresShape:
    """Constants of `index_scores_kernel` and `candidate_scores_kernel`.

    Attributes:
        H, DIM, PAGE: heads, channels of a head, entries of a page; KEY_FORMAT: ``fp8``, ``fp4`` or ``plain``.
        NATIVE_FP8: the GPU converts e4m3; DTYPE: of products; SCORE_DTYPE: to which scores are rounded.
        TOKENS: of a program; KEYS: of a tile; STAGES: tiles in flight.
    """

    H: int
    DIM: int
    PAGE: int
    KEY_FORMAT: str
    NATIVE_FP8: bool
    DTYPE: tl.dtype
    SCORE_DTYPE: tl.dtype
    TOKENS: int
    KEYS: int
    STAGES: int


# Converts four e2m1 values, in the low halves of four bytes, to e4m3. A byte for each holds 8 times the number that is
# added to its exponent: 48 for the same value, 0 for zero. For a value c without sign: (c << 2) + byte, but
# c = 1 (0.5) has no mantissa and c = 0 no exponent.
_E2M1_TO_E4M3 = tl.constexpr("""
{{
    .reg .b32 c, sign, one, two, mask;
    shr.u32 c, $2, {shift};
    and.b32 sign, c, 0x08080808;
    shl.b32 sign, sign, 4;
    add.u32 mask, $3, 0x78787878;
    shr.u32 mask, mask, 7;
    and.b32 mask, mask, 0x01010101;
    mul.lo.u32 mask, mask, 7;
    and.b32 c, c, mask;
    add.u32 one, c, 0x07070707;
    and.b32 one, one, 0x08080808;
    add.u32 two, c, 0x06060606;
    and.b32 two, two, 0x08080808;
    shr.u32 mask, one, 3;
    mul.lo.u32 mask, mask, 255;
    and.b32 mask, mask, $3;
    shl.b32 c, c, 2;
    add.u32 c, c, mask;
    xor.b32 one, one, two;
    shr.u32 one, one, 1;
    sub.u32 c, c, one;
    or.b32 {out}, c, sign;
}}
""")
_UNPACK = tl.constexpr(_E2M1_TO_E4M3.value.format(shift=0, out="$0") + _E2M1_TO_E4M3.value.format(shift=4, out="$1"))


@triton.jit
def _fp4_keys(packed, scales, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Even and odd channels of e2m1 keys ``packed [N, n]``, and one scale per key.

    ``scales``: four e8m0 bytes per key, in one int32. Values are relative to the largest scale of their key, times 64:
    e4m3 holds them exactly where scales differ by up to 2**11, and as zero where they differ by more.
    """
    N: tl.constexpr = packed.shape[0]
    n: tl.constexpr = packed.shape[1]
    # the scale of each group of 32 channels, relative to the largest of the key
    byte = (scales[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    largest = tl.max(byte, 1)
    shift = byte - largest[:, None] + 12  # 6 of it for 64, 6 to rebias e2m1's exponents to e4m3's
    shift = tl.broadcast_to(tl.where(shift > 0, 8 * shift, 0)[:, :, None], (N, 4, n // 4))
    shift = tl.reshape(shift, (N, n)).to(tl.uint8)
    if NATIVE_FP8:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=&r,=&r,r,r", [packed, shift], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
        low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    else:
        low, high = _e2m1_to_fp16(packed, shift), _e2m1_to_fp16(packed >> 4, shift)
    return low.to(DTYPE), high.to(DTYPE), decode_e8m0(largest) * 0.015625


@triton.jit
def _e2m1_to_fp16(value, shift):
    """The same in float16 without assembler: its exponents are biased by 14 more than e2m1's, e4m3's by 6."""
    value = value.to(tl.int16)
    number = (((value & 8) << 12) | ((value & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    factor = ((shift.to(tl.int32) // 8 - 6 + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    return tl.where(shift == 0, 0.0, number * factor)


@triton.jit
def _operand(value, IS_NUMBER: tl.constexpr, DTYPE: tl.constexpr):
    """An operand of a product as ``DTYPE``, from numbers or, where the GPU has no FP8, from e4m3 bytes."""
    if IS_NUMBER:
        return value.to(DTYPE)
    else:
        return decode_e4m3(value, False, DTYPE)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def query_operands(query, inside, channel, SHAPE: tl.constexpr):
    """The heads at pointers ``query [H, 1]`` as columns of a product; for FP4 keys even channels, and odd ones.

    ``channel``: ``[BLOCK_D]``, at least ``DIM``.
    """
    DIM: tl.constexpr = SHAPE.DIM
    DTYPE: tl.constexpr = SHAPE.DTYPE
    NATIVE_FP8: tl.constexpr = SHAPE.NATIVE_FP8
    KEY_FORMAT: tl.constexpr = SHAPE.KEY_FORMAT
    if KEY_FORMAT == "fp4":
        # `index_query` stores the even channels first, then the odd ones
        half = tl.arange(0, DIM // 2)
        even = query + half[None, :]
        mask = inside[:, None]
        q = tl.trans(_operand(tl.load(even, mask=mask, other=0.0), NATIVE_FP8, DTYPE))
        return q, tl.trans(_operand(tl.load(even + DIM // 2, mask=mask, other=0.0), NATIVE_FP8, DTYPE))
    else:
        value = tl.load(query + channel[None, :], mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
        q = tl.trans(_operand(value, NATIVE_FP8 or KEY_FORMAT == "plain", DTYPE))
        return q, q


@triton.jit
def key_operands(start, offset, inside, channel, SHAPE: tl.constexpr):
    """Keys at ``offset`` of the pages at ``start`` as rows of a product, as `query_operands`; and their scales.

    A page holds all of its keys, then a scale of 4 bytes for each.
    """
    DIM: tl.constexpr = SHAPE.DIM
    DTYPE: tl.constexpr = SHAPE.DTYPE
    NATIVE_FP8: tl.constexpr = SHAPE.NATIVE_FP8
    KEY_FORMAT: tl.constexpr = SHAPE.KEY_FORMAT
    valid = inside[:, None]
    if KEY_FORMAT == "fp4":
        half = tl.arange(0, DIM // 2)
        row = start + offset * (DIM // 2)
        packed = tl.load(row[:, None] + half[None, :], mask=valid, other=0)
        scale_ptr = (start + SHAPE.PAGE * (DIM // 2)).to(tl.pointer_type(tl.int32)) + offset
        key, odd, scale = _fp4_keys(packed, tl.load(scale_ptr, mask=inside, other=0), DTYPE, NATIVE_FP8)
        return key, odd, scale
    else:
        row = start + offset * DIM
        key = tl.load(row[:, None] + channel[None, :], mask=valid & (channel < DIM)[None, :], other=0.0)
        if KEY_FORMAT == "fp8":
            key = _operand(key, NATIVE_FP8, DTYPE)
            scale_ptr = (start + SHAPE.PAGE * DIM).to(tl.pointer_type(tl.float32)) + offset
            scale = tl.load(scale_ptr, mask=inside, other=0.0)
            return key, key, scale
        else:
            key = key.to(DTYPE)
            return key, key, 1.0


@triton.jit
def score_keys(key, odd, scale, q, q_odd, weights, SHAPE: tl.constexpr):
    """Scores of keys by the heads of one query, both as operands.

    Products, weighted products and sums are rounded to ``SCORE_DTYPE``; scales are powers of two, so that it makes no
    difference that they are multiplied in later.
    """
    SCORE_DTYPE: tl.constexpr = SHAPE.SCORE_DTYPE
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == SHAPE.DTYPE else None
    product = tl.dot(key, q, input_precision=PRECISION)
    # FP4: even and odd channels are operands of their own, and sums of one product
    if SHAPE.KEY_FORMAT == "fp4":
        product = tl.dot(odd, q_odd, product)
    weighted = _relu(product).to(SCORE_DTYPE).to(tl.float32) * weights[None, :]
    score = tl.sum(weighted.to(SCORE_DTYPE).to(tl.float32), 1).to(SCORE_DTYPE).to(tl.float32)
    if SHAPE.KEY_FORMAT != "plain":
        score = score * scale
    return score


@triton.jit(
    do_not_specialize=["block_table_ptr", "token_to_req_ptr", "num_visible_ptr", "T", "width", "skip", "table_stride"]
)
def index_scores_kernel(
    rows,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    T,
    width,
    skip,
    table_stride,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program ``(i, j)``: split ``j`` of the keys, for tokens ``i * TOKENS`` on; ``rows`` are `ScoreRows`."""
    H: tl.constexpr = SHAPE.H
    PAGE: tl.constexpr = SHAPE.PAGE
    TOKENS: tl.constexpr = SHAPE.TOKENS
    BLOCK_T: tl.constexpr = triton.next_power_of_2(TOKENS)
    BLOCK_N: tl.constexpr = SHAPE.KEYS
    STAGES: tl.constexpr = SHAPE.STAGES
    pdl_begin(PDL)  # wait until the previous kernel has written the queries
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    # request and length of each token; tokens that need no scores have length 0
    token = first_token + tl.arange(0, BLOCK_T)
    known = (tl.arange(0, BLOCK_T) < TOKENS) & (token < T)
    requests = tl.load(token_to_req_ptr + token, mask=known, other=-1)
    lens = tl.minimum(tl.load(num_visible_ptr + token, mask=known, other=0), width).to(tl.int32)
    lens = tl.where(lens > skip, lens, 0)

    # heads and weights of all tokens stay in registers for every tile
    # products have at least 16 columns, and FP8 at least 32 terms
    head = tl.arange(0, max(16, triton.next_power_of_2(H)))
    channel = tl.arange(0, max(32, triton.next_power_of_2(SHAPE.DIM)))
    q = ()
    q_odd = ()
    weights = ()
    for i in tl.static_range(TOKENS):
        inside = (head < H) & (first_token + i < T)
        weights += (tl.load(rows.weights + (first_token + i) * H + head, mask=inside, other=0.0),)
        query = rows.q + ((first_token + i) * H + head)[:, None] * SHAPE.DIM
        operands = query_operands(query, inside, channel, SHAPE)
        q += (operands[0],)
        q_odd += (operands[1],)

    for lead in range(TOKENS):
        # one request after another: the tokens that share it are scored together; mostly there is one
        request = tl.sum(tl.where(tl.arange(0, BLOCK_T) == lead, requests, 0), 0)
        earlier = (requests == request) & (tl.arange(0, BLOCK_T) < lead)
        n = tl.max(tl.where(requests == request, lens, 0), 0)
        n = tl.where(tl.max(earlier.to(tl.int32), 0) == 0, n, 0)
        ends = ()
        for i in tl.static_range(TOKENS):
            ends += (tl.max(tl.where((tl.arange(0, BLOCK_T) == i) & (requests == request), lens, 0), 0),)
        tiles = tl.cdiv(tl.cdiv(n, BLOCK_N), splits)
        # keys of the next STAGES - 1 tiles are copied to shared memory meanwhile
        for tile in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(n, BLOCK_N)), num_stages=STAGES):
            entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(
                block_table_ptr + request.to(tl.int64) * table_stride + entry // PAGE, mask=entry < n, other=0
            )
            start = rows.pool + page.to(tl.int64) * rows.page_stride
            key, odd, scale = key_operands(start, entry % PAGE, entry < n, channel, SHAPE)
            # a tile is multiplied with the heads of one token after another, and stored up to the token's own end
            for i in tl.static_range(TOKENS):
                score = score_keys(key, odd, scale, q[i], q_odd[i], weights[i], SHAPE)
                tl.store(rows.out + (first_token + i) * rows.out_stride + entry, score, mask=entry < ends[i])
