"""The indexer's ops in plain torch; `kernels.indexer` has their contracts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.norm_rope import apply_rope, apply_rope_half_split, freqs_cis_at
from deepseek_attn.kernels.common.quant import dequantize_fp4, hadamard, quantize_fp4, quantize_fp8
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.indexer.types import (
    KEY_FORMATS,
    SCORE_BYTES,
    CandidateBlocks,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
)
from deepseek_attn.kernels.insert.reference import query_norm_rope
from deepseek_attn.kernels.latent.reference import absorb_queries
from deepseek_attn.kernels.latent.types import LatentQueries
from deepseek_attn.utils.tape import reads_values

GEMM_BYTES = 16 << 20
KEYS_PER_BLOCK = 4096
CAUSAL_ROWS = 128
"""On a CPU this many queries of a prefill are scored together, against the entries that the last of them sees."""


def index_query(rows: IndexQueryRows) -> IndexQueries:
    """`kernels.indexer.index_query` in plain torch."""
    check_index_rows(rows)
    heads = rows.weights.shape[1]
    freqs_cis = freqs_cis_at(rows.cos_sin, rows.positions)
    q = rows.q.view(len(rows.q), heads, rows.q.shape[1] // heads)
    q = apply_rope_half_split(q, freqs_cis) if rows.half_split else apply_rope(q, freqs_cis)
    if rows.hadamard:
        q = hadamard(q)
    weights = rows.weights.float() * rows.scale
    if rows.key_format == "plain":
        return IndexQueries(q, weights, rows.score_dtype)
    if rows.key_format == "fp8":
        q, factor = quantize_fp8(q, q.shape[2])
        return IndexQueries(q, weights * factor[..., 0], rows.score_dtype)
    return IndexQueries(*_fp4_in_fp8(q, weights), rows.score_dtype)


def check_index_rows(rows: IndexQueryRows) -> None:
    """Raises ValueError unless the projections of an indexer fit each other, the table and a format of keys."""
    check("weights", rows.weights, ("T", "heads"), FLOATS, rows=True)
    check("q", rows.q, (len(rows.weights), "heads * dim"), FLOATS, rows=True)
    check("positions", rows.positions, (len(rows.weights),))
    check("cos_sin", rows.cos_sin, ("positions", "rope_dim"), torch.float32, contiguous=True)
    (heads, width), rope_dim = (rows.weights.shape[1], rows.q.shape[1]), rows.cos_sin.shape[1]
    if width % max(1, heads) or rope_dim * heads > width:
        raise ValueError(f"q of {width} channels for {heads} heads, of which {rope_dim} rotate: must be heads * dim")
    if rows.key_format not in KEY_FORMATS.values():
        raise ValueError(f"index keys are {', '.join(KEY_FORMATS.values())}, got {rows.key_format!r}")


def queries(raw_q: RawQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.queries` in plain torch, op by op."""
    out, index_queries = query_norm_rope(raw_q), index_query(index)
    check_tokens(len(out), index)
    return out, index_queries


def check_tokens(tokens: int, index: IndexQueryRows) -> None:
    """Raises ValueError unless the indexer has queries of the same number of tokens."""
    if len(index.q) != tokens:
        raise ValueError(f"queries of {tokens} tokens, and of {len(index.q)} for the indexer: must be the same")


def latent_queries(queries: LatentQueries, index: IndexQueryRows) -> tuple[Tensor, IndexQueries]:
    """`kernels.indexer.latent_queries` in plain torch, op by op."""
    out, index_queries = absorb_queries(queries), index_query(index)
    check_tokens(len(out), index)
    return out, index_queries


def _fp4_in_fp8(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = quantize_fp4(q)
    largest = scale.amax(-1, keepdim=True)
    values = dequantize_fp4(packed, scale / largest * 64)
    return even_odd(values).to(torch.float8_e4m3fn), weights * (largest[..., 0] / 64)


def even_odd(x: Tensor) -> Tensor:
    """The even channels of ``[..., d]``, then the odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`kernels.indexer.index_scores` in plain torch."""
    if q.dim() != 3 or k.dim() != 2 or k.shape[1] != q.shape[2] or weights.shape != q.shape[:2]:
        raise ValueError(
            "need q [T, heads, dim], k [N, dim], weights [T, heads]: "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(weights.shape)}"
        )
    T, heads, dim = q.shape
    one_block = 0 < len(k) <= KEYS_PER_BLOCK and q.device.type == "cpu" and dtype == torch.float32
    if T == 1 and heads and one_block:  # as below
        return torch.bmm(weights.float().unsqueeze(0), (q.float() @ k.float().t()).relu_())[0]
    out = torch.zeros(T, k.shape[0], dtype=torch.float32, device=q.device)
    if heads == 0 or T == 0:
        return out
    for left, right in row_blocks(k.shape[0], KEYS_PER_BLOCK):
        keys = k[left:right].float().t()
        for start, end in row_blocks(T, rows_per_block(4 * heads * (right - left + dim), GEMM_BYTES)):
            products = (q[start:end].float().reshape(-1, dim) @ keys).relu_().view(end - start, heads, right - left)
            if dtype == torch.float32:
                out[start:end, left:right] = torch.bmm(weights[start:end, None].float(), products)[:, 0]
            else:
                weighted = products.to(dtype).float().mul_(weights[start:end, :, None]).to(dtype)
                out[start:end, left:right] = weighted.float().sum(1).to(dtype)
    return out


@torch.no_grad()
def paged_index_scores(
    queries: IndexQueries, keys: PagedIndexKeys, num_visible: Tensor, width: int | None = None
) -> Tensor:
    """`kernels.indexer.paged_index_scores` in plain torch: keys are gathered once per request, scored by query."""
    width = keys.block_table.shape[1] * keys.entries if width is None else width
    q = queries.q
    out = torch.full((len(q), width), float("-inf"), dtype=torch.float32, device=q.device)
    lens = num_visible.clamp(max=width).tolist()
    for request, first, stop in _request_runs(keys.token_to_req):
        entries = _gather_keys(keys, _entry_slots(keys, request, max(lens[first:stop])))
        for t in range(first, stop):
            out[t, : lens[t]] = _scores_of(queries.of(slice(t, t + 1)), entries[: lens[t]])[0]
    return out


def _scores_of(queries: IndexQueries, entries: Tensor) -> Tensor:
    return index_scores(queries.q.float(), entries, queries.weights, queries.score_dtype)


def _request_runs(token_to_req: Tensor) -> Iterator[tuple[int, int, int]]:
    """(request, first token, last token + 1) of each run of tokens of one request."""
    if len(token_to_req) == 1:
        yield int(token_to_req), 0, 1
        return
    requests, counts = token_to_req.unique_consecutive(return_counts=True)
    first = 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        yield request, first, first + count
        first += count


@reads_values
def index_select(
    queries: IndexQueries,
    keys: PagedIndexKeys,
    num_visible: Tensor,
    k: int,
    width: int | None = None,
    out: Tensor | None = None,
    out_slots: Tensor | None = None,
    candidates: CandidateBlocks | None = None,
) -> Tensor:
    """`kernels.indexer.index_select` in plain torch: the keys of a request are gathered once for all its queries."""
    q = queries.q
    out = torch.empty(len(q), k, dtype=torch.int32, device=q.device) if out is None else out
    causal = q.device.type == "cpu" and candidates is None
    if causal and len(q) == 1 and _index_select_of_one(queries, keys, int(num_visible), k, out, out_slots):
        return out  # a decode step on a CPU is bound by the number of small operations
    for request, first, stop in _request_runs(keys.token_to_req):
        most = max(int(num_visible[first:stop].max()), 0)
        # otherwise every entry is selected
        entries = _gather_keys(keys, _entry_slots(keys, request, most)) if most > k else None
        per_block = rows_per_block(4 * max(most, 1), SCORE_BYTES)
        per_block = min(per_block, CAUSAL_ROWS) if causal else per_block
        for start, end in row_blocks(stop - first, per_block):
            tokens = slice(first + start, first + end)
            visible = max(int(num_visible[tokens].max()), 0) if causal else most
            if entries is None or visible <= k:
                scores = torch.zeros(end - start, visible, device=q.device, dtype=torch.float32)
            else:
                scores = _scores_of(queries.of(tokens), entries[:visible])
            if candidates is not None:
                scores = _limit(scores, num_visible[tokens], candidates._replace(kept=candidates.kept[tokens]))
            block_keys = keys._replace(token_to_req=keys.token_to_req[tokens])
            slots = None if out_slots is None else out_slots[tokens]
            topk_indices(scores, num_visible[tokens], k, out[tokens], block_keys, slots)
    return out


def _limit(scores: Tensor, num_visible: Tensor, blocks: CandidateBlocks) -> Tensor:
    """Fills ``blocks.kept`` from ``scores [T, N]``; or returns the scores with -inf outside of the kept blocks."""
    size, (tokens, entries) = blocks.size, scores.shape
    count = -(-entries // size)
    if not blocks.fill:
        kept = torch.zeros(tokens, count + 1, dtype=torch.bool, device=scores.device)
        kept.scatter_(1, torch.where(blocks.kept < 0, count, blocks.kept).long(), True)
        return scores.masked_fill(~kept[:, :count].repeat_interleave(size, dim=1)[:, :entries], float("-inf"))
    lens = num_visible.clamp(0, entries).unsqueeze(1).long()
    hidden = torch.arange(entries, device=scores.device) >= lens
    padded = F.pad(scores.masked_fill(hidden, float("-inf")), (0, count * size - entries), value=float("-inf"))
    best = padded.unflatten(1, (count, size)).amax(-1)
    newest = torch.arange(count, device=scores.device) == (lens - 1) // size
    best = best.masked_fill(newest, float("inf"))
    topk_indices(best, -(-lens[:, 0] // size), blocks.kept.shape[1], blocks.kept)
    return scores


def _index_select_of_one(
    queries: IndexQueries, keys: PagedIndexKeys, visible: int, k: int, out: Tensor, out_slots: Tensor | None
) -> bool:
    """`index_select` of one token, with half the number of torch operations.

    Returns False and writes nothing if the selection needs `topk_indices`.
    """
    slots = _entry_slots(keys, int(keys.token_to_req), max(visible, 0))
    if visible > k > 0:
        columns = _topk_of_one(_scores_of(queries, _gather_keys(keys, slots))[0], k)
    else:
        columns = torch.arange(min(len(slots), k), dtype=torch.int64, device="cpu")
    if columns is None:
        return False
    out[0, : len(columns)] = columns
    if out_slots is not None:
        out_slots[0, : len(columns)] = slots.index_select(0, columns)
    for rest in (out, out_slots) if len(columns) < k else ():
        if rest is not None:
            rest[0, len(columns) :] = -1
    return True


def _entry_slots(keys: PagedIndexKeys, request: int, count: int) -> Tensor:
    """Slots int64 ``[count]`` of the first entries of a request."""
    pages = keys.block_table[request, : -(-count // keys.entries)].long().unsqueeze(1)
    return (pages * keys.entries + torch.arange(keys.entries, device=pages.device)).flatten()[:count]


def _gather_keys(keys: PagedIndexKeys, slots: Tensor) -> Tensor:
    """Float32 keys at these slots, channels in the order of the queries."""
    found = keys.record.reader(keys.pool, keys.entries, torch.float32)(slots)
    return even_odd(found) if keys.record.name == "index_fp4" else found


@torch.no_grad()
def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    keys: PagedIndexKeys | None = None,
    out_slots: Tensor | None = None,
) -> Tensor:
    """`kernels.indexer.topk_indices` in plain torch; scratch is bounded by ``blocks.SCRATCH_BYTES``."""
    if scores.dim() != 2 or lens.shape != scores.shape[:1] or k < 0:
        raise ValueError(
            f"need scores [T, N], lens [T] and k >= 0: got {tuple(scores.shape)}, {tuple(lens.shape)}, k={k}"
        )
    selected = _topk(scores, lens.long().clamp(0, scores.shape[1]), k)
    if out is not None:
        selected = out.copy_(selected)
    if out_slots is not None:
        if keys is None:
            raise ValueError("out_slots need keys: a block_table, token_to_req and entries per page")
        page = keys.block_table[keys.token_to_req.long()].gather(1, selected.clamp(min=0).long() // keys.entries)
        out_slots.copy_(torch.where(selected >= 0, page * keys.entries + selected % keys.entries, -1))
    return selected


def _topk(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    T, N = scores.shape
    if k >= N:
        column = torch.arange(k, dtype=torch.int32, device=scores.device)
        return torch.where(column < lens[:, None], column, -1)
    out = torch.empty(T, k, dtype=torch.int32, device=scores.device)
    if k > 0:
        for start, end in row_blocks(T, rows_per_block(32 * N)):
            out[start:end] = _compact(best_columns(scores[start:end], lens[start:end], k), k)
    return out


def _topk_of_one(scores: Tensor, k: int) -> Tensor | None:
    """The ``k`` best of more scores, ascending; None if there are ties for the last place or NaN."""
    chosen = (scores >= scores.topk(k, sorted=False).values.min()).nonzero()
    return chosen[:, 0] if len(chosen) == k else None


def best_columns(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    """Bool ``[rows, N]``: the columns that `topk_indices` selects, ``0 < k < N``."""
    valid = torch.arange(scores.shape[1], device=scores.device) < lens[:, None]
    scores = scores.masked_fill(~valid | scores.isnan(), float("-inf"))
    threshold = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > threshold
    missing = k - above.sum(1, keepdim=True)
    tied = (scores == threshold) & valid
    return above | (tied & (tied.cumsum(1, dtype=torch.int32) <= missing))


def _compact(selected: Tensor, k: int) -> Tensor:
    """int32 ``[rows, k]`` columns where ``selected`` (at most ``k`` per row) is set, ascending, then -1."""
    rows, N = selected.shape
    place = selected.cumsum(1) - 1
    place = place.masked_fill_(~selected, k)
    column = torch.arange(N, dtype=torch.int32, device=selected.device).expand(rows, N)
    out = torch.full((rows, k + 1), -1, dtype=torch.int32, device=selected.device)
    return out.scatter_(1, place, column)[:, :k]
