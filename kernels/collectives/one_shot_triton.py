"""Triton device code of the collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from deepseek_attn.kernels.collectives import types
from deepseek_attn.kernels.common.row_ops_triton import pdl_begin

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


class ExchangeWords(NamedTuple):
    """Runtime arguments of `exchange_kernel`.

    Attributes:
        x, out: int32 words that this rank sends, and words of the result.
        addresses, state: of the `PeerBuffers`. The state's upper half is the number of this exchange; the lower half
            counts the programs that have read the number. The last program to read it advances it.
        words: number sent to each rank; timeout_ms: of the `PeerBuffers`.
    """

    x: Any
    out: Any
    addresses: Any
    state: Any
    words: Any
    timeout_ms: Any


@dataclass(frozen=True)
class ExchangeConfig:
    """Constants of `exchange_kernel`.

    Attributes:
        WORLD: ranks; CAPACITY: words of a message at most.
        SCATTER: each rank is sent a different part of ``x``.
        BLOCK: words of a program to each rank.
    """

    WORLD: int
    CAPACITY: int
    SCATTER: bool
    BLOCK: int


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(args, rank, CONFIG: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr):
    """Program ``(block,)``: exchanges a block of the words that go to each rank, seen as int32.

    The words of all ranks are summed as values of ``DTYPE``; without a ``DTYPE`` they are stored, concatenated by rank.
    Numbers of exchanges are odd, so that fresh memory (zeros) holds no such number, and they differ in successive
    exchanges of a slot.
    """
    WORLD: tl.constexpr = CONFIG.WORLD
    CAPACITY: tl.constexpr = CONFIG.CAPACITY
    BLOCK: tl.constexpr = CONFIG.BLOCK
    words = args.words
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.arange(0, WORLD)
    buffers, receive_buffer = tl.load(args.addresses + source), tl.load(args.addresses + rank)
    pdl_begin(PDL)  # wait until the previous kernel has written x, and has counted its exchange
    if CONFIG.SCATTER:
        sent = tl.load(args.x + source[:, None] * words + word[None, :], mask=(word < words)[None, :], other=0)
    else:
        x = tl.load(args.x + word, mask=word < words, other=0)
        sent = tl.broadcast_to(x[None, :], (WORLD, BLOCK))
    ticket = tl.atomic_add(args.state, 1, sem="relaxed")
    # the last program to read the state sets the count to 0 and advances the number for the next exchange
    if ticket.to(tl.int32) == tl.num_programs(0) - 1:
        tl.atomic_add(args.state, (tl.full((), 1, tl.int64) << 32) - tl.num_programs(0), sem="relaxed")
    exchange = (ticket >> 32).to(tl.int32)
    number = exchange | 1
    # slots in turn: a rank may already send its next message while another still reads this one
    first = (exchange & (_SLOTS - 1)).to(tl.int64) * (WORLD * CAPACITY)
    there = buffers[:, None] + (first + rank * CAPACITY + word)[None, :] * _WORD_BYTES
    here = receive_buffer + (first + source[:, None] * CAPACITY + word[None, :]) * _WORD_BYTES
    send(there, sent, tl.full((WORLD, BLOCK), 0, tl.int32) + number)
    part, arrived = received(here)
    start = globaltimer()
    # wait until every word of every rank has come with the number of this exchange
    while tl.sum((arrived != number).to(tl.int32)) > 0:
        if globaltimer() - start > args.timeout_ms.to(tl.int64) * 1000000:
            # name one rank that is missing to the host, and end the context: no result may be read
            silent = tl.min(tl.where(arrived != number, source[:, None] + 1, WORLD + 1))
            tl.inline_asm_elementwise(
                _BREAK_OFF, "=r,l,r", [tl.load(args.addresses + WORLD), silent], dtype=tl.int32, is_pure=False, pack=1
            )
        part, arrived = received(here)
    if DTYPE is None:
        tl.store(args.out + source[:, None] * words + word[None, :], part, mask=(word < words)[None, :])
    else:
        tl.store(args.out + word, _sum_of_ranks(part, DTYPE), mask=word < words)


@triton.jit
def send(address, word, number):
    """Stores words with their numbers at the addresses."""
    tl.inline_asm_elementwise(_SEND, "=r,l,r,r", [address, word, number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def received(address):
    """(words, numbers that came with them) at the addresses."""
    return tl.inline_asm_elementwise(_RECEIVE, "=r,=r,l", [address], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def _sum_of_ranks(part, DTYPE: tl.constexpr):
    """Sum over the first dimension of words of one or two values."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return tl.sum(part.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    else:
        # two values of 16 bits in a word
        low = tl.sum(part.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), 0)
        high = tl.sum((part >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), 0)
        low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
