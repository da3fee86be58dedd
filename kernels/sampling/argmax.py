"""Greedy tokens in Triton, one launch reduces blocks of each row, a second one reduces the blocks; right drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_attn.kernels.sampling.reference import INVALID_TOKEN
from deepseek_attn.kernels.sampling.types import AcceptedDrafts

BLOCK = 1024  # logits per program


def greedy_tokens(logits: Tensor, invalid_token: int = INVALID_TOKEN) -> Tensor:
    """See `deepseek_attn.kernels.sampling.greedy_tokens`."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits must be float32 [T, vocab], got {logits.dtype} {list(logits.shape)}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block_kernel[(blocks, rows)](
            logits, peaks, places, logits.stride(0), vocab, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=4
        )
        width = triton.next_power_of_2(blocks)
        row_kernel[(rows,)](
            peaks, places, tokens, blocks, NONE=invalid_token, WIDTH=width, enable_fp_fusion=True, num_warps=4
        )
    return tokens


def accept_drafts(token_ids: Tensor, chosen: Tensor, starts: Tensor, ends: Tensor, verify: bool) -> AcceptedDrafts:
    """See `deepseek_attn.kernels.sampling.accept_drafts`."""
    requests = len(starts)
    out = AcceptedDrafts(*(torch.empty_like(starts) for _ in range(3)))
    if requests:
        rows = len(chosen) // requests
        width = triton.next_power_of_2(rows)
        accept_kernel[(requests,)](
            token_ids,
            chosen,
            starts,
            ends,
            out,
            ROWS=rows,
            WIDTH=width,
            VERIFY=verify,
            enable_fp_fusion=True,
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["starts", "ends"])
def accept_kernel(token_ids, chosen, starts, ends, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, VERIFY: tl.constexpr):
    """The newest token of a request."""
    request = tl.program_id(0)
    start = tl.load(starts + request)
    count = tl.minimum(tl.maximum(tl.load(ends + request) - start - 1, 0), ROWS - 1)
    first, row = request.to(tl.int64) * ROWS, tl.arange(0, WIDTH)
    last = count
    if VERIFY:
        draft = row < count
        same = tl.load(token_ids + first + row + 1, mask=draft, other=0) == tl.load(
            chosen + first + row, mask=draft, other=0
        )
        last = tl.min(tl.where(draft & same, WIDTH, row)).to(tl.int64)
    tl.store(out.last_rows + request, first + last)
    tl.store(out.next_ids + request, tl.maximum(tl.load(chosen + first + last), 0))
    tl.store(out.next_starts + request, start + last + 1)


@triton.jit
def block_kernel(logits, peaks, places, row_stride, vocab, BLOCK: tl.constexpr):
    """Maximum of a block of a row, and its first place."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # NaN breaks a row as infinity does
    peak = tl.max(x)
    place = tl.min(tl.where(x == peak, column, vocab))
    at = row * tl.num_programs(0) + block
    tl.store(peaks + at, peak)
    tl.store(places + at, place)


@triton.jit
def row_kernel(peaks, places, tokens, blocks, NONE: tl.constexpr, WIDTH: tl.constexpr):
    """Token of a row from the maxima of its blocks; ``NONE`` for a row whose maximum is not finite."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    inside = block < blocks
    x = tl.load(peaks + row * blocks + block, mask=inside, other=float("-inf"))
    place = tl.load(places + row * blocks + block, mask=inside, other=2147483647)
    peak = tl.max(x)
    token = tl.min(tl.where(x == peak, place, 2147483647))
    sound = (peak < float("inf")) & (peak > float("-inf"))
    tl.store(tokens + row, tl.where(sound, token, NONE).to(tl.int64))
