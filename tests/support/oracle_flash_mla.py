"""FlashMLA's contracts one query at a time in float64, on caches whose bytes are decoded by their published layouts.

Random caches hold keys where a query may read and NaN bytes everywhere else: entries that no index names, those named
only behind the lengths, the bytes between pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INF, NAN_BYTE, HUGE = float("inf"), 0xFF, 2**31 - 1
ENTRY_BYTES = {512: 584, 576: 656}


class Shape(NamedTuple):
    """Keys of ``b`` requests of ``s_q`` queries in one paged cache, with the names of FlashMLA's tests.

    Attributes:
        s_k: tokens of a request, or their mean where ``is_varlen``; block_size: entries of a page.
        zero_seqlen_k: about half of the requests have no token; all_invalid: every index is -1.
        topk_length: rows of indices count up to random lengths.
        gap: bytes between pages.
    """

    s_k: int
    topk: int
    block_size: int = 64
    is_varlen: bool = True
    topk_length: bool = False
    zero_seqlen_k: bool = False
    all_invalid: bool = False
    gap: int = 0


class Pool(NamedTuple):
    """``k_cache`` uint8 ``[pages, n, 1, bytes]``, ``indices [b, s_q, topk]`` and ``topk_length [b]`` or None."""

    k_cache: Tensor
    indices: Tensor
    topk_length: Tensor | None


def request_lengths(b: int, s_q: int, s_k: int, is_varlen: bool, zero_seqlen_k: bool) -> Tensor:
    lengths = torch.full((b,), s_k)
    if is_varlen:
        lengths = (s_k + torch.randn(b) * s_k / 2).long().clamp(min=s_q)
    return torch.where(torch.randn(b) > 0, 0, lengths) if zero_seqlen_k else lengths


def random_tables(lengths: Tensor, n: int) -> Tensor:
    """Pages of each request, ``[b, blocks]``, in random order."""
    blocks = max(1, -(-int(lengths.max()) // n)) if len(lengths) else 1
    return torch.randperm(len(lengths) * blocks).view(-1, blocks)


def random_selection(lengths: Tensor, topk: int) -> Tensor:
    """``[rows, topk]`` distinct positions below each row's length in random order, then -1."""
    width = max(int(lengths.max()), topk) if len(lengths) else topk
    score = torch.rand(len(lengths), width).masked_fill(torch.arange(width) >= lengths[:, None], -1)
    positions = score.topk(topk, dim=1).indices
    return torch.where(positions < lengths[:, None], positions, -1)


def random_pool(
    b: int, s_q: int, d_qk: int, shape: Shape, device: torch.device, pow2: bool = True, tame: bool = False
) -> Pool:
    """A random cache and indices into it.

    Args:
        pow2: V3.2's scales are powers of two.
        tame: only what FlashMLA takes: no -1 among the first indices of a row, no index outside the cache behind the
            lengths, pages whose distance suits tensor maps.
    """
    n, size = shape.block_size, ENTRY_BYTES[d_qk]
    lengths = request_lengths(b, s_q, shape.s_k, shape.is_varlen, shape.zero_seqlen_k)
    tables = random_tables(lengths, n)
    positions = random_selection(lengths.repeat_interleave(s_q), shape.topk).view(b, s_q, shape.topk)
    page = tables[torch.arange(b)[:, None, None], positions.clamp(min=0) // n]
    slots = torch.where(positions < 0, -1, page * n + positions.clamp(min=0) % n)
    if shape.all_invalid:
        slots[:] = -1
    elif not tame:
        slots[:, :, 3::7] = -1
    topk_length, past = None, torch.zeros(b, 1, shape.topk, dtype=torch.bool)
    if shape.topk_length:
        topk_length = torch.randint(shape.topk + 1, (b,))
        past = torch.arange(shape.topk) >= topk_length[:, None, None]
    used = slots[~past.expand_as(slots) & (slots >= 0)].unique()
    stride, row = n * size + shape.gap, 576 if d_qk == 512 else 656
    stride = -(-stride // row) * row if tame else stride
    memory = torch.full((tables.numel() + 1, stride), NAN_BYTE, dtype=torch.uint8)
    write_entries(memory, n, used, d_qk, pow2)
    if topk_length is not None:
        dead = tables.numel() * n  # an entry of the last page, which no request has
        junk = torch.full((shape.topk,), dead)
        if not tame:
            junk[1::3], junk[2::3] = HUGE, -5
        slots = torch.where(past, junk, slots)
        topk_length = topk_length.int().to(device)
    memory = memory.to(device)
    k_cache = memory.as_strided((len(memory), n, 1, size), (stride, size, size, 1))
    return Pool(k_cache, slots.int().to(device), topk_length)


def write_entries(memory: Tensor, n: int, slots: Tensor, d_qk: int, pow2: bool) -> None:
    """Random entries at ``slots`` of pages of bytes: values up to about 2."""
    count, page, offset = len(slots), slots // n, slots % n
    rope = torch.randn(count, 64).bfloat16().view(torch.uint8)
    values = torch.randint(0, 256, (count, d_qk - 64), dtype=torch.uint8)
    values[values % 128 == 127] = 0  # NaN

    def put(start: Tensor, content: Tensor) -> None:
        memory[page[:, None], start[:, None] + torch.arange(content.shape[1])] = content

    if d_qk == 512:
        put(offset * 576, torch.cat([values, rope], 1))
        put(n * 576 + offset * 8, torch.randint(115, 120, (count, 7), dtype=torch.uint8))
    else:
        scales = torch.exp2(torch.randint(-12, -7, (count, 4))) if pow2 else torch.rand(count, 4) * 4e-3
        put(offset * 656, torch.cat([values, scales.float().view(torch.uint8), rope], 1))


# decoding


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _little_endian(content: Tensor, size: int) -> Tensor:
    """int32 from groups of ``size`` bytes."""
    parts = content.unflatten(-1, (-1, size)).int()
    return torch.stack([parts[..., i] << (8 * i) for i in range(size)]).sum(0, dtype=torch.int32)


def keys_at(k_cache: Tensor, slots: Tensor) -> Tensor:
    """Float64 keys ``[len(slots), d_qk]``, from the bytes of the cache's storage."""
    n, size, device = k_cache.shape[1], k_cache.shape[3], k_cache.device
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(k_cache.untyped_storage())
    page, offset = slots // n * k_cache.stride(0) + int(k_cache.storage_offset()), slots % n

    def read(start: Tensor, count: int) -> Tensor:
        return memory[start[:, None] + torch.arange(count, device=device)]

    table = torch.tensor([_e4m3(byte) for byte in range(256)], dtype=torch.float64, device=device)
    if size == 584:
        row = read(page + offset * 576, 576)
        scales = torch.exp2(read(page + n * 576 + offset * 8, 7).double() - 127).repeat_interleave(64, 1)
        values, rope = table[row[:, :448].long()] * scales, row[:, 448:]
    else:
        row = read(page + offset * 656, 656)
        scales = _little_endian(row[:, 512:528], 4).view(torch.float32).double().repeat_interleave(128, 1)
        # keys are multiplied in bfloat16
        values, rope = (table[row[:, :512].long()] * scales).float().bfloat16().double(), row[:, 528:]
    return torch.cat([values, (_little_endian(rope, 2) << 16).view(torch.float32).double()], 1)


class Expected(NamedTuple):
    """Float64 ``out [..., h, 512]``, ``lse [..., h]`` and ``max_logits [..., h]`` of queries ``[..., h, d]``."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor


def attend_one(q: Tensor, keys: Tensor, scale: float, sink: Tensor | None = None) -> Expected:
    """One query ``[h, d]`` over all of ``keys [n, d]``."""
    if not len(keys):
        return Expected(
            q.new_zeros(len(q), 512, dtype=torch.float64),
            q.new_full((len(q),), INF, dtype=torch.float64),
            q.new_full((len(q),), -INF, dtype=torch.float64),
        )
    logits = q.double() @ keys.T * scale
    lse = logits.logsumexp(1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    return Expected((logits - total[:, None]).exp() @ keys[:, :512], lse, logits.amax(1))


def stacked(results: list[Expected]) -> Expected:
    return Expected(*(torch.stack(part) for part in zip(*results, strict=True)))


def sparse_decode(q: Tensor, pools: list[Pool], scale: float, sink: Tensor | None) -> Expected:
    """Queries ``[b, s_q, h, d]``, as rows ``[b * s_q, ...]``."""
    b, s_q = q.shape[:2]
    lens = [None if pool.topk_length is None else pool.topk_length.tolist() for pool in pools]
    found = []
    for i in range(b):
        for j in range(s_q):
            keys = []
            for pool, counts in zip(pools, lens, strict=True):
                row = pool.indices[i, j] if counts is None else pool.indices[i, j, : counts[i]]
                keys.append(keys_at(pool.k_cache, row[row != -1].long()))
            found.append(attend_one(q[i, j], torch.cat(keys), scale, sink))
    return stacked(found)


def random_sink(heads: int, device: torch.device) -> Tensor:
    """Of three heads about one has +inf and one -inf."""
    sink, kind = torch.randn(heads), torch.randn(heads)
    sink[kind > 0.5], sink[kind < -0.5] = INF, -INF
    return sink.to(device)


def spread_out(tensor: Tensor) -> Tensor:
    """The same values with gaps of NaN (of HUGE, for integers) along every dimension but inside the last one."""
    sizes = [size + (128 if i == tensor.dim() - 1 else 1) for i, size in enumerate(tensor.shape)]
    fill = float("nan") if tensor.is_floating_point() else HUGE
    larger = torch.full(sizes, fill, dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


def column(values: Tensor | None) -> Tensor | None:
    """The same values as a column between others."""
    return None if values is None else torch.stack([values + 1, values, values - 1], 1)[:, 1]
