"""Attention of each query over its own list of keys, with an optional sink; keys are also the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.gather_reference import GathersRows
from deepseek_attn.kernels.common.blocks import SCRATCH_BYTES, row_blocks, rows_per_block

WIDTH_STEP = 64
"""On the CPU a row is computed at its length rounded up to this many columns, not at the width of the index tensor."""

CPU_BLOCK_BYTES = 4 << 20
"""Gathered keys are read right after they are written: 406 ms in blocks of 4 MiB, 745 ms in blocks of 64 MiB
(1024 queries of 16 heads over up to 640 keys of 512 dims, one core)."""


@torch.no_grad()
def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    sink: Tensor | None = None,
    lens: Tensor | None = None,
    d_v: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends each query to the rows of ``kv`` that its index row names.

    With ``p = scale * q . k`` over the valid keys: ``lse = ln sum exp(p)`` and
    ``out = sum exp(p) v / (sum exp(p) + exp(sink))``, in float32.

    Args:
        q: ``[T, H, dk]``.
        kv: ``[N, dk]`` keys; the first ``d_v`` dims are the values.
        indices: integer ``[T, K]`` rows of ``kv``. Invalid: negative, ``>= N``, or in a column ``>= lens[t]``.
        scale: factor of the logits.
        sink: float32 ``[H]`` logit that takes weight but has no value, or None. +inf gives 0, -inf changes nothing.
        lens: integer ``[T]`` columns to look at, or None for all.
        d_v: value dims, or None for ``dk``.

    Returns:
        ``(out, lse)``: ``[T, H, d_v]`` in ``q.dtype`` and float32 ``[T, H]``, natural log, without the sink.

    Notes:
        A row named twice counts twice. A query without a valid key gets ``out = 0``, ``lse = +inf``. Rows that no
        valid index names have no effect, NaN included. Scratch stays within ``blocks.SCRATCH_BYTES`` as long as one
        query's keys and logits do.
    """
    _check_query(q, sink)
    if kv.dim() != 2 or kv.shape[1] != q.shape[2]:
        raise ValueError(f"kv must be [N, {q.shape[2]}] for q {tuple(q.shape)}, got {tuple(kv.shape)}")
    d_v = _value_dim(q, d_v)
    budget = SCRATCH_BYTES
    if kv.dtype != torch.float32 and kv.numel() * 4 <= budget // 2:
        kv = kv.float()
        budget -= kv.numel() * 4

    def fetch(rows: Tensor, valid: Tensor, out: Tensor) -> None:
        # Invalid columns read the row's first valid key again: finite unless that key is not, and their weight is 0.
        spare = rows.gather(1, valid.byte().argmax(1, keepdim=True))
        rows = torch.where(valid, rows, spare.clamp(0, kv.shape[0] - 1)).flatten()
        if kv.dtype == torch.float32 and out.is_contiguous():
            torch.index_select(kv, 0, rows, out=out.view(-1, kv.shape[1]))
        else:
            out.copy_(kv.index_select(0, rows).view(out.shape))

    return _attend(q, [_Source(indices, lens, kv.shape[0], fetch)], scale, sink, d_v, budget)


@torch.no_grad()
def sparse_attention_paged(
    q: Tensor,
    pools: Sequence[tuple[GathersRows, Tensor, int, Tensor, Tensor | None]],
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` over cache slots of several paged pools under one softmax.

    Args:
        q: ``[T, H, d]``.
        pools: ``(record, pool, n, indices, lens)`` each: byte layout, pages, entries per page, integer slots
            ``[T, K_i]`` and integer ``[T]`` columns to look at (or None). Keys are concatenated in this order.
        scale, sink, d_v: as in `sparse_attention`.

    Returns:
        ``(out, lse)`` as in `sparse_attention`.

    Notes:
        Slots of invalid columns are never read. The rest is as in `sparse_attention`.
    """
    _check_query(q, sink)
    d_v = _value_dim(q, d_v)
    sources = [
        _Source(indices, lens, pool.shape[0] * n, _paged_fetch(record, pool, n))
        for record, pool, n, indices, lens in pools
    ]
    # Decoding a record makes a few temporaries as large as the keys.
    return _attend(q, sources, scale, sink, d_v, SCRATCH_BYTES // 4)


def _paged_fetch(record: GathersRows, pool: Tensor, n: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def fetch(slots: Tensor, valid: Tensor, out: Tensor) -> None:
        out.copy_(record.gather(pool, n, slots.masked_fill(~valid, -1), torch.float32))

    return fetch


@dataclass(frozen=True)
class _Source:
    """Keys of one kv tensor or pool: ``fetch(rows int64 [r, w], valid [r, w], out float32 [r, w, d])`` reads them."""

    indices: Tensor
    lens: Tensor | None
    limit: int
    fetch: Callable[[Tensor, Tensor, Tensor], None]

    def select(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor]:
        """Indices int64 ``[rows, width]`` and their validity."""
        indices = self.indices[rows, :width].long()
        valid = (indices >= 0) & (indices < self.limit)
        if self.lens is not None:
            valid &= torch.arange(width, device=indices.device) < self.lens[rows].unsqueeze(1)
        return indices, valid


def _attend(
    q: Tensor, sources: list[_Source], scale: float, sink: Tensor | None, d_v: int, budget: int
) -> tuple[Tensor, Tensor]:
    T, H, d = q.shape
    for source in sources:
        _check_source(q, source)
    if T == 1 and q.device.type == "cpu":
        return _attend_one(q, sources, scale, sink, d_v)
    out = q.new_zeros(T, H, d_v)
    lse = torch.full((T, H), float("inf"), dtype=torch.float32, device=q.device)
    if q.device.type == "cpu":
        budget = min(budget, CPU_BLOCK_BYTES)
    for rows, widths in _width_groups(sources, T, q.device):
        width = sum(widths)
        per_block = min(len(rows), rows_per_block(4 * (width * (d + H) + H * (d + 2 * d_v)) + 32 * width, budget))
        keys = torch.empty(per_block, width, d, dtype=torch.float32, device=q.device)
        logits = torch.empty(per_block, H, width, dtype=torch.float32, device=q.device)
        for start, end in row_blocks(len(rows), per_block):
            # a slice where the group is all rows: indexing with a tensor copies
            block = slice(start, end) if len(rows) == T else rows[start:end]
            valid = _fetch(sources, block, widths, keys[: end - start])
            queries = q[block].float() * scale
            block_out, block_lse = _softmax_block(queries, keys[: end - start], valid, logits[: end - start], sink, d_v)
            out[block] = block_out.to(out.dtype)
            lse[block] = block_lse
    return out, lse


def _attend_one(
    q: Tensor, sources: list[_Source], scale: float, sink: Tensor | None, d_v: int
) -> tuple[Tensor, Tensor]:
    """`_attend` for a single query on a CPU: only its valid keys are fetched, so nothing needs masking.

    Decoding one request is bound by the number of small operations, and this takes half as many.
    """
    _, H, d = q.shape
    keys = []
    for source in sources:
        rows = source.indices[0] if source.lens is None else source.indices[0, : max(int(source.lens), 0)]
        rows = rows[(rows >= 0) & (rows < source.limit)].long()
        if len(rows):
            part = torch.empty(1, len(rows), d)
            source.fetch(rows[None], torch.ones(1, len(rows), dtype=torch.bool), part)
            keys.append(part[0])
    if not keys:
        return q.new_zeros(1, H, d_v), torch.full((1, H), float("inf"))
    keys = keys[0] if len(keys) == 1 else torch.cat(keys)
    logits = (q[0].float() * scale) @ keys.t()
    lse = logits.logsumexp(1)
    total = lse if sink is None else torch.logaddexp(lse, sink.float())
    out = (logits - total[:, None]).exp() @ keys[:, :d_v]
    return out.to(q.dtype)[None], lse[None]


def _width_groups(sources: list[_Source], T: int, device: torch.device) -> Iterator[tuple[Tensor, list[int]]]:
    """Rows that are computed together, with the columns taken of each source; rows without any column are left out.

    The grouping depends on each row's lengths alone. On a GPU all rows are one group: lengths would need a sync.
    """
    full = [0 if source.limit == 0 else source.indices.shape[1] for source in sources]
    rows = torch.arange(T, device=device)
    if T == 0 or sum(full) == 0:
        return
    if device.type != "cpu" or all(source.lens is None for source in sources):
        yield rows, full
        return
    widths = torch.tensor(full).repeat(T, 1)
    for i, source in enumerate(sources):
        if source.lens is not None:
            rounded = (source.lens.long().clamp(min=0) + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
            widths[:, i] = rounded.clamp(max=full[i])
    groups, group_of = widths.unique(dim=0, return_inverse=True)
    for g, group in enumerate(groups.tolist()):
        if sum(group) > 0:
            yield rows[group_of == g], group


def _fetch(sources: list[_Source], rows: Tensor | slice, widths: list[int], keys: Tensor) -> Tensor:
    """Fills ``keys [rows, sum(widths), d]`` and returns which columns are valid."""
    valid = torch.empty(keys.shape[:2], dtype=torch.bool, device=keys.device)
    left = 0
    for source, width in zip(sources, widths, strict=True):
        if width > 0:
            indices, ok = source.select(rows, width)
            source.fetch(indices, ok, keys[:, left : left + width])
            valid[:, left : left + width] = ok
        left += width
    return valid


def _softmax_block(
    q: Tensor, keys: Tensor, valid: Tensor, logits: Tensor, sink: Tensor | None, d_v: int
) -> tuple[Tensor, Tensor]:
    """Attention of scaled float32 ``q [r, H, d]`` over ``keys [r, W, d]``; ``logits [r, H, W]`` is scratch."""
    torch.bmm(q, keys.transpose(1, 2), out=logits)
    logits.masked_fill_(~valid[:, None], float("-inf"))
    peak = logits.amax(2, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(2, keepdim=True)
    lse = (peak + total.log()).squeeze(2)
    # exp(lse) / (exp(lse) + exp(sink)) is the share of the weight that the keys get.
    share = 1 / total if sink is None else torch.sigmoid(lse - sink.float())[:, :, None] / total
    out = torch.bmm(weights, keys[:, :, :d_v]).mul_(share)
    lonely = ~valid.any(1)
    return out.masked_fill_(lonely[:, None, None], 0), lse.masked_fill_(lonely[:, None], float("inf"))


def _check_query(q: Tensor, sink: Tensor | None) -> None:
    if q.dim() != 3:
        raise ValueError(f"q must be [T, H, d], got {tuple(q.shape)}")
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(f"sink must be [{q.shape[1]}], one logit per head, got {tuple(sink.shape)}")


def _value_dim(q: Tensor, d_v: int | None) -> int:
    d_v = q.shape[2] if d_v is None else d_v
    if not 0 < d_v <= q.shape[2]:
        raise ValueError(f"d_v must be in 1 .. {q.shape[2]}, got {d_v}")
    return d_v


def _check_source(q: Tensor, source: _Source) -> None:
    T = q.shape[0]
    if source.indices.dim() != 2 or source.indices.shape[0] != T:
        raise ValueError(f"indices must be [{T}, K] for q {tuple(q.shape)}, got {tuple(source.indices.shape)}")
    if source.lens is not None and source.lens.shape != (T,):
        raise ValueError(f"lens must be [{T}] for q {tuple(q.shape)}, got {tuple(source.lens.shape)}")
