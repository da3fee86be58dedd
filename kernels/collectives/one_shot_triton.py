"""Triton device code of the collectives."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from deepseek_attn.kernels.collectives import types
from deepseek_attn.kernels.common.row_ops import begin

_WORD_BYTES = tl.constexpr(types.WORD_BYTES)
_SLOTS = tl.constexpr(types.SLOTS)

# A word and its number are one access of 64 bits, so that they arrive together.
_SEND = tl.constexpr("""
{
    .reg .b64 both;
    mov.b64 both, {$2, $3};
    st.relaxed.sys.global.b64 [$1], both;
    mov.b32 $0, 0;
}
""")
_RECEIVE = tl.constexpr("""
{
    .reg .b64 both;
    ld.relaxed.sys.global.b64 both, [$2];
    mov.b64 {$0, $1}, both;
}
""")
_BREAK_OFF = tl.constexpr("""
    st.relaxed.sys.global.b32 [$1], $2;
    fence.sc.sys;
    trap;
    mov.b32 $0, 0;
""")


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(
    x_ptr,
    out_ptr,
    addresses_ptr,
    state_ptr,
    words,
    rank,
    timeout_ms,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    SCATTER: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exchanges a block of the ``words`` that go to each rank, seen as int32.

    With ``SCATTER``, ``x`` has other words for each rank. The words of all ranks are summed as values of ``DTYPE``;
    without one they are all stored, one rank's behind the other's.

    ``state``: number of this exchange in the upper half, programs that have read it in the lower one; the last of them
    counts on. Numbers are odd, so that fresh memory has none of them, and differ in
    successive exchanges of a slot.
    """
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.arange(0, WORLD)
    buffers, own = tl.load(addresses_ptr + source), tl.load(addresses_ptr + rank)
    begin(PDL)
    if SCATTER:
        sent = tl.load(x_ptr + source[:, None] * words + word[None, :], mask=(word < words)[None, :], other=0)
    else:
        x = tl.load(x_ptr + word, mask=word < words, other=0)
        sent = tl.broadcast_to(x[None, :], (WORLD, BLOCK))
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed")
    if ticket.to(tl.int32) == tl.num_programs(0) - 1:
        tl.atomic_add(state_ptr, (tl.full((), 1, tl.int64) << 32) - tl.num_programs(0), sem="relaxed")
    exchange = (ticket >> 32).to(tl.int32)
    number = exchange | 1
    first = (exchange & (_SLOTS - 1)).to(tl.int64) * (WORLD * CAPACITY)
    there = buffers[:, None] + (first + rank * CAPACITY + word)[None, :] * _WORD_BYTES
    here = own + (first + source[:, None] * CAPACITY + word[None, :]) * _WORD_BYTES
    send(there, sent, tl.full((WORLD, BLOCK), 0, tl.int32) + number)
    part, arrived = received(here)
    start = globaltimer()
    while tl.sum((arrived != number).to(tl.int32)) > 0:
        if globaltimer() - start > timeout_ms.to(tl.int64) * 1000000:
            silent = tl.min(tl.where(arrived != number, source[:, None] + 1, WORLD + 1))
            tl.inline_asm_elementwise(
                _BREAK_OFF, "=r,l,r", [tl.load(addresses_ptr + WORLD), silent], dtype=tl.int32, is_pure=False, pack=1
            )
        part, arrived = received(here)
    if DTYPE is None:
        tl.store(out_ptr + source[:, None] * words + word[None, :], part, mask=(word < words)[None, :])
    else:
        tl.store(out_ptr + word, summed(part, DTYPE), mask=word < words)


@triton.jit
def send(address, word, number):
    """Stores words with their numbers at the addresses."""
    tl.inline_asm_elementwise(_SEND, "=r,l,r,r", [address, word, number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def received(address):
    """(words, numbers that came with them) at the addresses."""
    return tl.inline_asm_elementwise(_RECEIVE, "=r,=r,l", [address], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def summed(part, DTYPE: tl.constexpr):
    """Sum over the first dimension of words of one or two values."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return tl.sum(part.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    else:
        low = tl.sum(part.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), 0)
        high = tl.sum((part >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), 0)
        low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
