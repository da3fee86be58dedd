"""Triton device code of `paged_index_scores`.

A program scores one split of a request's keys for a few tokens: a tile of keys is loaded once and multiplied with the
heads of each token in turn. Keys are the rows of a product and heads its columns, so that the sum over heads stays
within a quarter of a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepseek_attn.kernels.common.fp8 import decode_e4m3, decode_e8m0
from deepseek_attn.kernels.common.row_ops import begin

# Eight e2m1 values of a word become e4m3: the first four, then the others. The magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6
# times the power of two of their group are the bytes of two words; three bits of a value pick one, the fourth is the
# sign. The words of a power of two are those of 1 and, for each doubling, 8 in each byte but zero's.
E2M1_LOW, E2M1_LOW_STEP = 0x3C383000, 0x08080800
E2M1_HIGH, E2M1_HIGH_STEP = 0x4C484440, 0x08080808
E2M1_TO_E4M3 = """
{{
    .reg .b32 pick, shifted, signs;
    and.b32 pick, $2, 0x77777777;
    shl.b32 shifted, $2, 4;
    prmt.b32 $0, {low}, {high}, pick;
    prmt.b32 signs, shifted, $2, 0x5140;
    lop3.b32 $0, $0, signs, 0x80808080, 0xF8;
    shr.u32 pick, pick, 16;
    prmt.b32 $1, {low}, {high}, pick;
    prmt.b32 signs, shifted, $2, 0x7362;
    lop3.b32 $1, $1, signs, 0x80808080, 0xF8;
}}
"""
_LOW, _LOW_STEP = tl.constexpr(E2M1_LOW), tl.constexpr(E2M1_LOW_STEP)
_HIGH, _HIGH_STEP = tl.constexpr(E2M1_HIGH), tl.constexpr(E2M1_HIGH_STEP)
_TO_FP8 = tl.constexpr(E2M1_TO_E4M3.format(low="$3", high="$7"))  # four operands hold the same word for four bytes


@triton.jit
def _fp4_keys(packed, scales, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Two halves of the channels of e2m1 keys ``packed [N, n]`` (`_fp4_channels`), and one scale per key.

    ``scales``: four e8m0 bytes per key, in one int32. Values are relative to the largest scale of their key, times 64:
    e4m3 holds them exactly where scales differ by up to 2**11, and as zero where they differ by more.
    """
    n: tl.constexpr = packed.shape[1]
    byte = (scales[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    largest = tl.max(byte, 1)
    power = byte - largest[:, None] + 6
    if NATIVE_FP8:
        known = power > -6
        low = _of_groups(tl.where(known, _LOW + power * _LOW_STEP, 0), n)
        high = _of_groups(tl.where(known, _HIGH + power * _HIGH_STEP, 0), n)
        first, last = tl.inline_asm_elementwise(
            _TO_FP8,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, low, high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        first, last = first.to(tl.float8e4nv, bitcast=True), last.to(tl.float8e4nv, bitcast=True)
    else:
        power = _of_groups(power, n)
        first, last = _e2m1_to_fp16(packed, power), _e2m1_to_fp16(packed >> 4, power)
    return first.to(DTYPE), last.to(DTYPE), decode_e8m0(largest) * 0.015625


@triton.jit
def _of_groups(x, n: tl.constexpr):
    """``x [N, 4]`` repeated for the ``n / 4`` bytes of each group: ``[N, n]``."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (x.shape[0], 4, n // 4)), (x.shape[0], n))


@triton.jit
def _fp4_channels(DIM: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Where queries hold the channels of the two halves of `_fp4_keys`; theirs are the even ones, then the odd ones."""
    half = tl.arange(0, DIM // 2)
    if NATIVE_FP8:  # four of the eight values of a word
        first = half // 4 * 4 + half % 4 // 2 + half % 2 * (DIM // 2)
        return first, first + 2
    else:
        return half, half + DIM // 2


@triton.jit
def _e2m1_to_fp16(value, power):
    """The low halves of bytes times powers of two, in float16: its exponents are biased by 14 more than e2m1's."""
    value = value.to(tl.int16)
    number = (((value & 8) << 12) | ((value & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    return tl.where(power > -6, number * factor, 0.0)


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


@triton.jit(do_not_specialize=["T", "width", "skip"])
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    pool_ptr,
    block_table_ptr,
    token_to_req_ptr,
    num_visible_ptr,
    out_ptr,
    T,
    width,
    skip,
    page_stride,
    table_stride,
    out_stride,
    H: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    # request and length of each token; tokens that need no scores have length 0
    token = first_token + tl.arange(0, BLOCK_T)
    known = (tl.arange(0, BLOCK_T) < TOKENS) & (token < T)
    requests = tl.load(token_to_req_ptr + token, mask=known, other=-1)
    lens = tl.minimum(tl.load(num_visible_ptr + token, mask=known, other=0), width).to(tl.int32)
    lens = tl.where(lens > skip, lens, 0)

    head = tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    q = ()
    q_last = ()
    weights = ()
    for i in tl.static_range(TOKENS):
        inside = (head < H) & (first_token + i < T)
        weights += (tl.load(weights_ptr + (first_token + i) * H + head, mask=inside, other=0.0),)
        query = q_ptr + ((first_token + i) * H + head)[:, None] * DIM
        if KEY_FORMAT == "fp4":
            first_half, last_half = _fp4_channels(DIM, NATIVE_FP8)
            value = tl.load(query + first_half[None, :], mask=inside[:, None], other=0.0)
            q += (tl.trans(_operand(value, NATIVE_FP8, DTYPE)),)
            value = tl.load(query + last_half[None, :], mask=inside[:, None], other=0.0)
            q_last += (tl.trans(_operand(value, NATIVE_FP8, DTYPE)),)
        else:
            value = tl.load(query + channel[None, :], mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
            q += (tl.trans(_operand(value, NATIVE_FP8 or KEY_FORMAT == "plain", DTYPE)),)

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
        for tile in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(n, BLOCK_N)), num_stages=STAGES):
            entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(
                block_table_ptr + request.to(tl.int64) * table_stride + entry // PAGE, mask=entry < n, other=0
            )
            start = pool_ptr + page.to(tl.int64) * page_stride
            offset = entry % PAGE
            valid = (entry < n)[:, None]
            if KEY_FORMAT == "fp8":
                row = start + offset * DIM
                key = tl.load(row[:, None] + channel[None, :], mask=valid & (channel < DIM)[None, :], other=0.0)
                key = _operand(key, NATIVE_FP8, DTYPE)
                scale_ptr = (start + PAGE * DIM).to(tl.pointer_type(tl.float32)) + offset
                scale = tl.load(scale_ptr, mask=entry < n, other=0.0)
            elif KEY_FORMAT == "fp4":
                half = tl.arange(0, DIM // 2)
                row = start + offset * (DIM // 2)
                packed = tl.load(row[:, None] + half[None, :], mask=valid, other=0)
                scale_ptr = (start + PAGE * (DIM // 2)).to(tl.pointer_type(tl.int32)) + offset
                key, last, scale = _fp4_keys(packed, tl.load(scale_ptr, mask=entry < n, other=0), DTYPE, NATIVE_FP8)
            else:
                row = start + offset * DIM
                key = tl.load(row[:, None] + channel[None, :], mask=valid & (channel < DIM)[None, :], other=0.0)
                key = key.to(DTYPE)
            for i in tl.static_range(TOKENS):
                product = tl.dot(key, q[i], input_precision=PRECISION)
                if KEY_FORMAT == "fp4":
                    product = tl.dot(last, q_last[i], product)
                score = tl.sum(_relu(product) * weights[i][None, :], 1)
                if KEY_FORMAT != "plain":
                    score = score * scale
                tl.store(out_ptr + (first_token + i) * out_stride + entry, score, mask=entry < ends[i])
