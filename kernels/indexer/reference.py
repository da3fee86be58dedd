"""Scores of the lightning indexer.

Queries of the lightning indexer as the scores take them: rotated, rounded, and every scale in the head weights.

Scores and their top-k together.

Exact top-k of index scores.

Everything that the projected query latent becomes: the layer's queries and those of its indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.common.blocks import row_blocks, rows_per_block
from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at
from deepseek_attn.kernels.common.quant import dequantize_fp4, hadamard, quantize_fp4, quantize_fp8
from deepseek_attn.kernels.insert.reference import query_norm_rope

GEMM_BYTES = 16 << 20
KEYS_PER_BLOCK = 4096


@torch.no_grad()
def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Returns ``sum_h weights[t, h] * relu(q[t, h] . k[n])``, computed in float32.

    Args:
        q: ``[T, heads, dim]`` indexer queries, any float dtype.
        k: ``[N, dim]`` indexer keys, shared by the heads.
        weights: ``[T, heads]`` head weights with every scale already in them.

    Returns:
        float32 ``[T, N]``; no column is masked.

    Notes:
        One matrix product per block of rows and keys; scratch is about ``GEMM_BYTES``, and one row of
        ``KEYS_PER_BLOCK`` keys at least.
    """
    if q.dim() != 3 or k.dim() != 2 or k.shape[1] != q.shape[2] or weights.shape != q.shape[:2]:
        raise ValueError(
            "need q [T, heads, dim], k [N, dim], weights [T, heads]: "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(weights.shape)}"
        )
    T, heads, dim = q.shape
    out = torch.zeros(T, k.shape[0], dtype=torch.float32, device=q.device)
    if heads == 0 or T == 0:
        return out
    for left, right in row_blocks(k.shape[0], KEYS_PER_BLOCK):
        keys = k[left:right].float().t()
        for start, end in row_blocks(T, rows_per_block(4 * heads * (right - left + dim), GEMM_BYTES)):
            products = (q[start:end].float().reshape(-1, dim) @ keys).relu_().view(end - start, heads, right - left)
            out[start:end, left:right] = torch.bmm(weights[start:end, None].float(), products)[:, 0]
    return out


@torch.no_grad()
def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    width: int | None = None,
    skip: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`index_scores` of each query and the first entries of its request, read from pages.

    Args:
        q: ``[T, heads, dim]`` as ``index_query`` makes them; weights: float32 ``[T, heads]``, every scale of q in them.
        record, pool, page_entries: the keys: entry format, uint8 ``[pages, bytes]``, entries per page.
        block_table: int32 ``[B, P]``; token_to_req: ``[T]``, a query's row of it.
        visible: ``[T]``, the entries that a query sees.
        width: columns of the result, by default ``P * page_entries``.
        skip: rows that see this many entries or fewer need no scores, as when a selection takes all of them anyway.
        out: like the result, to write to.

    Returns:
        float32 ``[T, width]``. Columns from ``visible[t]`` on, and all of a row without scores, are -inf.
    """
    width = block_table.shape[1] * page_entries if width is None else width
    out = torch.empty(q.shape[0], width, dtype=torch.float32, device=q.device) if out is None else out
    out.fill_(float("-inf"))
    lens = visible.clamp(max=width)
    lens = torch.where(lens > skip, lens, 0).tolist()
    for t, (request, n) in enumerate(zip(token_to_req.tolist(), lens, strict=True)):
        entries = torch.arange(n, device=q.device)
        slots = block_table[request].long()[entries // page_entries] * page_entries + entries % page_entries
        keys = record.gather(pool, page_entries, slots, torch.float32)
        keys = even_odd(keys) if record.name == "index_fp4" else keys
        out[t, :n] = index_scores(q[t : t + 1].float(), keys, weights[t : t + 1])[0]
    return out


FORMATS = ("plain", "fp8", "fp4")


@torch.no_grad()
def index_query(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    scale: float,
    fmt: str,
    rotate: bool = False,
    half_split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates indexer queries, rounds them as the keys are rounded and moves their scales to the head weights.

    Args:
        q: ``[T, heads * dim]``, the projected queries; weights: float32 ``[T, heads]``, the projected head weights.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: ``[T]``.
        scale: multiplies the weights.
        fmt: format of the keys: ``"plain"`` (queries keep their dtype), ``"fp8"`` (one power-of-two scale per head) or
            ``"fp4"`` (e2m1 values with a scale per 32).
        rotate: apply a Hadamard matrix before rounding.
        half_split: rotary pairs are ``(i, i + rope_dim / 2)`` of the first channels, as DeepSeek-V3.2 has them;
            otherwise ``(2 i, 2 i + 1)`` of the last ones.

    Returns:
        ``(q, weights)``: ``[T, heads, dim]``, float8_e4m3fn unless ``fmt`` is plain, and float32 ``[T, heads]``.

    Notes:
        FP4 values are held in e4m3 too, relative to the largest scale of their head, times 64. That is exact where the
        scales of a head differ by up to ``2**14``. Their even channels come first, then the odd ones, as the bytes of
        FP4 keys hold one of each.
    """
    if fmt not in FORMATS:
        raise ValueError(f"index keys are {', '.join(FORMATS)}, got {fmt!r}")
    T, heads = weights.shape
    freqs_cis = freqs_cis_at(cos_sin, positions)
    q = q.view(T, heads, -1)
    q = apply_rope_half_split(q, freqs_cis) if half_split else apply_rope(q, freqs_cis)
    if rotate:
        q = hadamard(q)
    weights = weights.float() * scale
    if fmt == "plain":
        return q, weights
    if fmt == "fp8":
        q, factor = quantize_fp8(q, q.shape[2])
        return q, weights * factor[..., 0]
    return _fp4_in_fp8(q, weights)


def apply_rope_half_split(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotates the pairs ``(i, i + n)`` of the first ``2 n`` channels: what the indexer of DeepSeek-V3.2 does.

    Args and result as in `norm_rope.apply_rope`; here the last ``d - 2 n`` channels pass through.
    """
    tokens, pairs = freqs_cis.shape
    freqs_cis = freqs_cis.view(tokens, *(1,) * (x.dim() - 2), pairs)
    out = x.clone()
    head = out[..., : 2 * pairs]
    rotated = torch.complex(*head.float().chunk(2, dim=-1)) * freqs_cis
    head.copy_(torch.cat([rotated.real, rotated.imag], dim=-1))
    return out


def _fp4_in_fp8(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = quantize_fp4(q)
    largest = scale.amax(-1, keepdim=True)
    values = dequantize_fp4(packed, scale / largest * 64)
    return even_odd(values).to(torch.float8_e4m3fn), weights * (largest[..., 0] / 64)


def even_odd(x: Tensor) -> Tensor:
    """The even channels of ``[..., d]``, then the odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def index_select(
    q: Tensor,
    weights: Tensor,
    record: Any,
    pool: Tensor,
    page_entries: int,
    block_table: Tensor,
    token_to_req: Tensor,
    visible: Tensor,
    k: int,
    width: int | None = None,
    out: Tensor | None = None,
    out_slots: Tensor | None = None,
) -> Tensor:
    """The ``k`` entries with the highest scores among the first ``visible[t]`` of each query's request.

    Args and result as in `paged_index_scores` and `topk_indices`: int32 ``[T, k]``, entries local to the request,
    ascending, then -1; ``width``: no query sees more entries.
    """
    keys = record, pool, page_entries, block_table
    scores = paged_index_scores(q, weights, *keys, token_to_req, visible, width, k)
    return topk_indices(scores, visible, k, out, block_table, token_to_req, page_entries, out_slots)


@torch.no_grad()
def topk_indices(
    scores: Tensor,
    lens: Tensor,
    k: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    token_to_req: Tensor | None = None,
    page_entries: int = 0,
    out_slots: Tensor | None = None,
) -> Tensor:
    """Columns of the ``k`` highest scores among the first ``lens[t]`` columns of each row.

    Args:
        scores: float ``[T, N]``; columns past the length may hold anything.
        lens: integer ``[T]`` valid prefix length, clamped to ``0 .. N``.
        k: columns to select.
        out: like the result, to write to.
        block_table: int32 ``[B, P]``; token_to_req: ``[T]``, a row's request; page_entries: columns per page.
        out_slots: int32 ``[T, k]``, filled with the slots of the selected columns and -1.

    Returns:
        int32 ``[T, k]``: the selected columns in ascending order, then -1. A row with ``lens <= k`` selects all of its
        columns.

    Notes:
        Ties: the smaller index. NaN counts as -inf; such columns are valid and fill a row only after every other valid
        column. A row depends on nothing but its own scores and length. Scratch is bounded by ``blocks.SCRATCH_BYTES``.
    """
    if scores.dim() != 2 or lens.shape != scores.shape[:1] or k < 0:
        raise ValueError(
            f"need scores [T, N], lens [T] and k >= 0: got {tuple(scores.shape)}, {tuple(lens.shape)}, k={k}"
        )
    selected = _topk(scores, lens.long().clamp(0, scores.shape[1]), k)
    if out is not None:
        selected = out.copy_(selected)
    if out_slots is not None:
        page = block_table[token_to_req.long()].gather(1, selected.clamp(min=0).long() // page_entries)
        out_slots.copy_(torch.where(selected >= 0, page * page_entries + selected % page_entries, -1))
    return selected


def _topk(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    T, N = scores.shape
    if k >= N:
        column = torch.arange(k, dtype=torch.int32, device=scores.device)
        return torch.where(column < lens[:, None], column, -1)
    out = torch.empty(T, k, dtype=torch.int32, device=scores.device)
    if k > 0:
        for start, end in row_blocks(T, rows_per_block(32 * N)):
            out[start:end] = _compact(_select(scores[start:end], lens[start:end], k), k)
    return out


def _select(scores: Tensor, lens: Tensor, k: int) -> Tensor:
    """Bool ``[rows, N]`` mask of the selected columns, ``0 < k < N``."""
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


def queries(heads: tuple, index: tuple) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Both ops in one call, for the same tokens.

    Args:
        heads: arguments of `query_norm_rope`; index: those of `index_query`.

    Returns:
        The result of each.

    Raises:
        ValueError: different numbers of tokens, or what either op refuses.
    """
    out, index_outs = query_norm_rope(*heads), index_query(*index)
    if len(out) != len(index_outs[0]):
        raise ValueError(f"queries of {len(out)} tokens, and of {len(index_outs[0])} for the indexer: must be the same")
    return out, index_outs
