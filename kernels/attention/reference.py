"""The ops of `kernels.attention` in plain torch, on any device. Scratch is bounded: see `SCRATCH_BYTES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.attention.types import PagedKeys, RequestEntries
from deepseek_attn.kernels.common.blocks import SCRATCH_BYTES, row_blocks, rows_per_block, value_range
from deepseek_attn.kernels.common.checks import INTS, check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.norm_rope import freqs_cis_at, rotate_
from deepseek_attn.kernels.common.quant import QuantizedRows, empty_quantized_rows, quantize_fp8
from deepseek_attn.kernels.common.raw_queries import RawQueries, normed_queries
from deepseek_attn.utils.tape import reads_values, recording

WIDTH_STEP = 64
"""On the CPU a row is computed at its length rounded up to this many columns, not at the width of the index tensor."""

SHORT_STEP = 16
"""Then a block of rows of one `WIDTH_STEP` is computed at its longest row's length rounded up to this many columns."""

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
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernels.attention.sparse_attention` in float32 torch.

    With ``round_weights``, softmax weights relative to the largest are rounded to the dtype of ``q`` before they are
    multiplied with the values; their sum is not.
    """
    check_attention(q, indices, lens, sink)
    check("kv", kv, ("N", q.shape[2]))
    check("max_logits", max_logits, q.shape[:2], torch.float32, contiguous=True)
    d_v = value_dim(q, d_v)
    budget = SCRATCH_BYTES
    if kv.dtype != torch.float32 and kv.numel() * 4 <= budget // 2:
        kv = kv.float()
        budget -= kv.numel() * 4

    def fetch(rows: Tensor, valid: Tensor, fetched: Tensor) -> None:
        # Invalid columns read the row's first valid key again: finite unless that key is not, and their weight is 0.
        spare = rows.gather(1, valid.byte().argmax(1, keepdim=True))
        rows = torch.where(valid, rows, spare.clamp(0, kv.shape[0] - 1)).flatten()
        if kv.dtype == torch.float32 and fetched.is_contiguous():
            torch.index_select(kv, 0, rows, out=fetched.view(-1, kv.shape[1]))
        else:
            fetched.copy_(kv.index_select(0, rows).view(fetched.shape))

    def read(rows: Tensor) -> Tensor:
        return kv.index_select(0, rows).float()

    source = _Source(indices, lens, kv.shape[0], fetch, read)
    return _written(_attend(q, [source], scale, sink, d_v, budget, max_logits, round_weights), out)


@torch.no_grad()
def sparse_attention_paged(
    q: Tensor,
    keys: Sequence[PagedKeys],
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
    out: Tensor | None = None,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernels.attention.sparse_attention_paged` in float32 torch; ``round_weights``: see `sparse_attention`."""
    for part in keys:
        check_attention(q, part.indices, part.lens, sink)
    d_v = value_dim(q, d_v)
    sources = [_paged_source(part) for part in keys]
    # Decoding a record makes a few temporaries as large as the keys.
    result = _attend(q, sources, scale, sink, d_v, SCRATCH_BYTES // 4, round_weights=round_weights)
    return _written(result, out)


def _paged_source(keys: PagedKeys) -> _Source:
    dtype = torch.bfloat16 if keys.record.name == "fp8_v32" else torch.float32

    def fetch(slots: Tensor, valid: Tensor, fetched: Tensor) -> None:
        fetched.copy_(keys.record.gather(keys.pool, keys.entries, slots.masked_fill(~valid, -1), dtype))

    reader = keys.record.reader(keys.pool, keys.entries, dtype)
    read = reader if dtype == torch.float32 else lambda slots: reader(slots).float()
    return _Source(keys.indices, keys.lens, keys.pool.shape[0] * keys.entries, fetch, read, valid=recording())


def _written(result: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result ``(out, lse)``; a caller's ``out`` receives a copy and is returned in its place."""
    return result if out is None else (out.copy_(result[0]), result[1])


@dataclass(frozen=True)
class _Source:
    """Keys of one kv tensor or pool.

    ``fetch(rows int64 [r, w], valid [r, w], out float32 [r, w, d])`` writes keys to ``out``, or any finite values for
    invalid rows; ``read(rows int32 or int64 [n])`` returns the keys float32 ``[n, d]`` of valid rows. ``valid``: all
    rows within the lengths are.
    """

    indices: Tensor
    lens: Tensor | None
    limit: int
    fetch: Callable[[Tensor, Tensor, Tensor], None]
    read: Callable[[Tensor], Tensor]
    valid: bool = False

    def select(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor]:
        """Indices int64 ``[rows, width]`` and their validity."""
        indices = self.indices[rows, :width].long()
        valid = (indices >= 0) & (indices < self.limit)
        if self.lens is not None:
            valid &= torch.arange(width, device=indices.device) < self.lens[rows].unsqueeze(1)
        return indices, valid


def _attend(
    q: Tensor,
    sources: list[_Source],
    scale: float,
    sink: Tensor | None,
    d_v: int,
    budget: int,
    max_logits: Tensor | None = None,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    T, H, d = q.shape
    dtype = q.dtype if round_weights else torch.float32
    if T == 1 and q.device.type == "cpu" and dtype == torch.float32:
        out, lse = q.new_empty(1, H, d_v), torch.empty(H, 1, dtype=torch.float32, device="cpu")
        sinks = None if sink is None else sink.float().unsqueeze(1)
        _attend_one(q[0].float() * scale, sources, sinks, out[0], lse, max_logits)
        return out, lse.t()
    out = q.new_zeros(T, H, d_v)
    lse = torch.full((T, H), float("inf"), dtype=torch.float32, device=q.device)
    if max_logits is not None:
        max_logits.fill_(float("-inf"))
    if q.device.type == "cpu":
        budget = min(budget, CPU_BLOCK_BYTES)
    for rows, widths in _width_groups(sources, T, q.device):
        width, first = sum(widths), _first_if_consecutive(rows)
        per_block = min(len(rows), rows_per_block(4 * (width * (d + H) + H * (d + 2 * d_v)) + 32 * width, budget))
        scratch = torch.empty(per_block * width * d, dtype=torch.float32, device=q.device)
        for start, end in row_blocks(len(rows), per_block):
            # consecutive rows, such as a prompt's, are a slice: indexing with a tensor would copy
            block = rows[start:end] if first is None else slice(first + start, first + end)
            read = _widths_of_block(sources, block, widths)
            keys = scratch[: (end - start) * sum(read) * d].view(end - start, sum(read), d)
            valid = _fetch(sources, block, read, keys)
            result = softmax_block(q[block].float() * scale, keys, valid[:, None], sink, d_v, dtype)
            out[block] = result.out.to(out.dtype)
            lse[block] = result.lse
            if max_logits is not None:
                max_logits[block] = result.peak
    return out, lse


@reads_values
def _attend_one(
    q: Tensor, sources: list[_Source], sinks: Tensor | None, out: Tensor, lse: Tensor, max_logits: Tensor | None
) -> None:
    """`_attend` for a single query on a CPU: only its valid keys are fetched, so nothing needs masking.

    The number of small operations bounds the time of decoding one request; this function has half of them.

    Args:
        q: float32 ``[H, d]``, scaled; sinks: float32 ``[H, 1]``.
        out: ``[H, d_v]``; lse: ``[H, 1]``.
    """
    keys = []
    for source in sources:
        rows = source.indices[0] if source.lens is None else source.indices[0, : max(int(source.lens), 0)]
        least, most = (0, 0) if source.valid else value_range(rows)
        if least < 0 or most >= source.limit:
            rows = rows[(rows >= 0) & (rows < source.limit)]
        if rows.numel():
            keys.append(source.read(rows))
    if not keys:
        if max_logits is not None:
            max_logits.fill_(float("-inf"))
        out.zero_()
        lse.fill_(float("inf"))
        return
    keys = keys[0] if len(keys) == 1 else torch.cat(keys)
    logits = q @ keys.t()
    peak = logits.amax(1, keepdim=True)
    if max_logits is not None:
        max_logits.copy_(peak[:, 0])
    # logits.logsumexp(1), whose guard against infinite peaks takes as long as all of this
    torch.add((logits - peak).exp_().sum(1, keepdim=True).log_(), peak, out=lse)
    total = lse if sinks is None else torch.logaddexp(lse, sinks)
    out.copy_(logits.sub_(total).exp_() @ keys[:, : out.shape[1]])


def _width_groups(sources: list[_Source], T: int, device: torch.device) -> Iterator[tuple[Tensor, list[int]]]:
    """Queries that are computed together, with the columns of each source; queries without any column are left out.

    The grouping depends on each row's lengths alone. On a GPU all rows are one group: lengths would need a sync.
    """
    full = [0 if source.limit == 0 else source.indices.shape[1] for source in sources]
    rows = torch.arange(T, device=device)
    if T == 0 or sum(full) == 0:
        return
    if device.type != "cpu" or all(source.lens is None for source in sources):
        yield rows, full
        return
    widths = torch.tensor(full, dtype=torch.int64, device="cpu").repeat(T, 1)
    for i, source in enumerate(sources):
        if source.lens is not None:
            aligned = (source.lens.long().clamp(min=0) + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
            widths[:, i] = aligned.clamp(max=full[i])
    if torch.equal(widths, widths[:1].expand_as(widths)):  # the few rows of a decode step, as a rule
        groups, members = widths[:1], [rows]
    else:
        # the widths of a row as one number: `unique` takes 0.1 ms for 1024 numbers, and 5 ms for 1024 rows
        number = widths[:, 0]
        for column, most in zip(widths.unbind(1)[1:], full[1:], strict=True):
            number = number * (most + 1) + column
        found, group_of = number.unique(return_inverse=True)
        members = [rows[group_of == g] for g in range(len(found))]
        groups = widths[torch.stack([its_rows[0] for its_rows in members])]
    for group, its_rows in zip(groups.tolist(), members, strict=True):
        if sum(group) > 0:
            yield its_rows, group


def _widths_of_block(sources: list[_Source], rows: Tensor | slice, widths: list[int]) -> list[int]:
    """Columns of each source that a block of rows computes: the length of its longest row, if that is short."""
    lens = sources[0].lens
    if len(sources) > 1 or widths[0] > WIDTH_STEP or lens is None or lens.device.type != "cpu":
        return widths
    return [min(widths[0], -(-int(lens[rows].max()) // SHORT_STEP) * SHORT_STEP)]


def _first_if_consecutive(rows: Tensor) -> int | None:
    """The first of ascending row numbers on a CPU if none between the first and the last is missing."""
    if rows.device.type != "cpu":
        return None
    first = int(rows[0])
    return first if int(rows[-1]) - first == len(rows) - 1 else None


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


class BlockResult(NamedTuple):
    """Attention of a block of queries, all float32.

    Attributes:
        out: ``[r, H, d_v]``.
        lse: ``[r, H]``; peak: ``[r, H]``, the largest logit.
        weights: ``[r, H, W]``, relative to the largest; times factor ``[r, H, 1]``: the share of each key.
    """

    out: Tensor
    lse: Tensor
    peak: Tensor
    weights: Tensor
    factor: Tensor


def softmax_block(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor | None, d_v: int, dtype: torch.dtype
) -> BlockResult:
    """Attention of scaled float32 ``q [r, H, d]`` over ``keys [r, W, d]``; weights are rounded to ``dtype``.

    Differentiable where every query has a valid key.

    Args:
        valid: bool ``[r, H, W]`` or ``[r, 1, W]``.
    """
    logits = torch.bmm(q, keys.transpose(1, 2)).float().masked_fill_(~valid, float("-inf"))
    peak = logits.detach().amax(2, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(2, keepdim=True)
    lse = (peak + total.log()).squeeze(2)
    # exp(lse) / (exp(lse) + exp(sink)) is the part of the weight that the keys get.
    factor = 1 / total if sink is None else torch.sigmoid(lse - sink.float())[:, :, None] / total
    out = torch.bmm(weights.to(dtype).float(), keys[:, :, :d_v]).mul_(factor)
    lonely = ~valid.any(2)
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack the module
    # under vmap no branch can depend on values
    if lonely.device.type != "cpu" or functorch.is_batchedtensor(lonely) or lonely.any():
        out, lse = out.masked_fill_(lonely[:, :, None], 0), lse.masked_fill_(lonely, float("inf"))
    return BlockResult(out, lse, peak.squeeze(2), weights, factor)


def check_attention(q: Tensor, indices: Tensor, lens: Tensor | None, sink: Tensor | None) -> None:
    """Raises ValueError unless queries, lists of keys and sinks have the shapes and dtypes of `sparse_attention`."""
    check("q", q, ("T", "H", "d"), FLOATS)
    T, H, _ = q.shape
    check("indices", indices, (T, "K"), INTS)
    check("lens", lens, (T,), INTS)
    check("sink", sink, (H,), FLOATS)


def value_dim(q: Tensor, d_v: int | None) -> int:
    d_v = q.shape[2] if d_v is None else d_v
    if not 0 < d_v <= q.shape[2]:
        raise ValueError(f"d_v must be in 1 .. {q.shape[2]}, got {d_v}")
    return d_v


@torch.no_grad()
def attend_raw_q(
    raw_q: RawQueries, keys: Sequence[PagedKeys], scale: float, sink: Tensor | None, groups: int, q: Tensor | None
) -> QuantizedRows:
    """`kernels.attention.attend_raw_q` in torch."""
    if raw_q.padded_heads != raw_q.num_heads or raw_q.num_heads % groups:
        raise ValueError(
            f"{raw_q.num_heads} heads, padded to {raw_q.padded_heads}, in {groups} groups: groups must have the same "
            "number of heads, and none may be padding"
        )
    out, _ = sparse_attention_paged(normed_queries(raw_q) if q is None else q, keys, scale, sink)
    back = rotate_(out, freqs_cis_at(raw_q.cos_sin, raw_q.positions), inverse=True)
    values, scales = quantize_fp8(back.flatten(1), 128)
    rows = empty_quantized_rows(len(values), values.shape[1], values.device, groups=groups)
    rows.values.copy_(values.unflatten(1, (groups, -1)).transpose(0, 1))
    rows.scale.copy_(scales)
    return rows


@torch.no_grad()
def causal_attention(q: Tensor, kv: Tensor, scale: float, d_v: int | None = None) -> Tensor:
    """`kernels.attention.causal_attention`."""
    n, heads, dim = q.shape
    if kv.dim() != 2 or kv.shape[1] != dim or kv.shape[0] < n:
        raise ValueError(f"kv must be [N >= {n}, {dim}] for q {tuple(q.shape)}, got {tuple(kv.shape)}")
    d_v = dim if d_v is None else d_v
    out = q.new_empty(n, heads, d_v)
    keys, first = kv.float(), len(kv) - n
    column = torch.arange(len(kv), device=q.device)
    for start, end in row_blocks(n, rows_per_block(8 * heads * len(kv))):
        seen = first + end
        logits = (q[start:end].float().flatten(0, 1) @ keys[:seen].t()).mul_(scale).view(end - start, heads, seen)
        hidden = column[:seen] > (first + torch.arange(start, end, device=q.device)).unsqueeze(1)
        weights = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
        out[start:end] = (weights.flatten(0, 1) @ keys[:seen, :d_v]).view(end - start, heads, d_v).to(q.dtype)
    return out


def dequantize_and_gather_k_cache(out: Tensor, requests: RequestEntries, offset: int) -> None:
    """`kernels.attention.dequantize_and_gather_k_cache`; lengths are read on the host, once per call."""
    check_gather(out, requests)
    record, pool, block_size, block_table, seq_lens, gather_lens = requests
    (_, M, dim), lens = out.shape, seq_lens if gather_lens is None else gather_lens
    seq_list, len_list = seq_lens.tolist(), lens.tolist()
    _check_lengths(seq_list, len_list, M - offset, block_table.shape[1] * block_size)
    per_block = rows_per_block(dim * 16)
    for r, (seq_len, length) in enumerate(zip(seq_list, len_list, strict=True)):
        for start, end in row_blocks(length, per_block):
            pos = torch.arange(seq_len - length + start, seq_len - length + end, device=out.device)
            slots = block_table[r, pos // block_size].long() * block_size + pos % block_size
            out[r, offset + start : offset + end] = record.gather(pool, block_size, slots, out.dtype)


def check_gather(out: Tensor, requests: RequestEntries) -> None:
    """Raises ValueError unless a workspace, lengths and a block table are of the same requests."""
    check("out", out, ("b", "M", requests.record.dim), FLOATS, rows=True)
    check("seq_lens", requests.seq_lens, (len(out),))
    check("gather_lens", requests.gather_lens, (len(out),))
    check("block_table", requests.block_table, (len(out), "pages"), rows=True)


def _check_lengths(seq_lens: list[int], gather_lens: list[int], max_rows: int, table_entries: int) -> None:
    for r, (seq_len, length) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        if not 0 <= length <= seq_len:
            raise ValueError(f"request {r}: cannot gather {length} of {seq_len} entries")
        if length > max_rows:
            raise ValueError(f"request {r}: {length} entries do not fit in {max_rows} workspace rows")
        if seq_len > table_entries and length > 0:
            raise ValueError(f"request {r}: {seq_len} entries, but its block table covers {table_entries}")
