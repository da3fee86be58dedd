"""The V4 attention layer over whole sequences, without caches: differentiable.

Parameters and formulas of `DeepseekV4MLAAttention`, with keys in plain tensors instead of caches. Shapes: ``B``
sequences of ``S`` tokens, ``H`` heads, ``D`` channels of a key, ``E`` compressed entries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.attention.indexer import Indexer
from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.kernels.common.norm_rope import rms_norm
from deepseek_attn.kernels.indexer import topk_indices
from deepseek_attn.layers.rope import apply_rope


class TrainedAttention(NamedTuple):
    """Result of an attention layer over whole sequences.

    Attributes:
        output: ``[B, S, hidden_size]``.
        index_loss: divergence of the indexer's softmax from attention, a scalar; None without an indexer.
    """

    output: torch.Tensor
    index_loss: torch.Tensor | None


def attend(
    attn: DeepseekV4MLAAttention, x: torch.Tensor, precision: AbstractContextManager, select: bool
) -> TrainedAttention:
    """Attention of ``x [B, S, hidden_size]``, normed.

    Args:
        precision: context for matrix products; operations that V4 computes in float32 are outside of it.
        select: read the entries that the indexer selects, as a running model does; otherwise all of them.
    """
    length = x.shape[1]
    entries = compressed(attn.compressor, x, precision) if attn.compressor else None
    rows = project(attn, x, precision)
    readable = scores = None
    if entries is not None:
        readable = visible_entries(length, attn.compress_ratio, x.device)
        if attn.indexer is not None:
            scores = index_scores(attn.indexer, x.detach(), rows.qr.detach(), rows.freqs_cis, precision)
            readable = selected(scores, readable, attn.indexer.topk) if select else readable
    window, sink = attn.window_size, attn.attn_sink
    o, mass = windowed_attention(rows.q, rows.kv, entries, readable, sink, window, attn.scale, precision)
    y = project_output(attn, o, rows.freqs_cis, precision)
    if scores is None or mass is None or readable is None:
        return TrainedAttention(y, None)
    return TrainedAttention(y, index_loss(scores, mass, readable))


def attend_drafts(
    attn: DeepseekV4MLAAttention, x: torch.Tensor, earlier: list[torch.Tensor], precision: AbstractContextManager
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one draft step of an MTP layer, for drafts that end at every row.

    At step d, row p belongs to the drafting that began at row p - d: rows up to there have the keys of step 0, and rows
    p - d + j after it those of step j, as in the window cache of a runner that drafts.

    Args:
        x: ``[B, S, hidden_size]``, normed inputs of this step.
        earlier: keys ``[B, S, D]`` of each step before it.

    Returns:
        ``[B, S, hidden_size]``, and the keys of this step. Rows before row d belong to no drafting: their values are
        finite and mean nothing.
    """
    rows = project(attn, x, precision)
    keys = [*earlier, rows.kv]
    own = None
    if earlier:
        newest = keys[:0:-1][: attn.window_size]
        own = torch.stack([kv if j == 0 else delayed(kv, j) for j, kv in enumerate(newest)], 2)
    o, _ = windowed_attention(
        rows.q, keys[0], None, None, attn.attn_sink, attn.window_size, attn.scale, precision, own, len(earlier)
    )
    return project_output(attn, o, rows.freqs_cis, precision), rows.kv


class TrainedProjections(NamedTuple):
    """Queries and keys of whole sequences.

    Attributes:
        q: ``[B, S, H, D]``; kv: ``[B, S, D]``; qr: ``[B, S, q_lora_rank]``, what the queries are made of.
        freqs_cis: the rotations of all rows, ``[B * S, ...]``.
    """

    q: torch.Tensor
    kv: torch.Tensor
    qr: torch.Tensor
    freqs_cis: torch.Tensor


def project(attn: DeepseekV4MLAAttention, x: torch.Tensor, precision: AbstractContextManager) -> TrainedProjections:
    """Queries and keys of ``x [B, S, hidden_size]``."""
    batch, length, _ = x.shape
    freqs_cis = attn.rope.at(torch.arange(length, device=x.device).repeat(batch))
    with precision:
        qr = rms_norm(F.linear(x, attn.wq_a.weight), attn.eps, attn.q_norm.weight)
        q = rms_norm(F.linear(qr, attn.wq_b.weight).view(batch * length, attn.num_heads, -1), attn.eps)
        q = apply_rope(q, freqs_cis).view(batch, length, attn.num_heads, -1)
        kv = rms_norm(F.linear(x, attn.wkv.weight), attn.eps, attn.kv_norm.weight)
        kv = apply_rope(kv.flatten(0, 1), freqs_cis).view(batch, length, -1)
    return TrainedProjections(q, kv, qr, freqs_cis)


def project_output(
    attn: DeepseekV4MLAAttention, o: torch.Tensor, freqs_cis: torch.Tensor, precision: AbstractContextManager
) -> torch.Tensor:
    """``o [B, S, H, D]`` of all heads -> ``[B, S, hidden_size]``."""
    batch, length = o.shape[:2]
    with precision:
        o = apply_rope(o.flatten(0, 1), freqs_cis, inverse=True).view(batch, length, attn.o_groups, -1)
        weight = attn.wo_a.weight.view(attn.o_groups, -1, o.shape[-1])
        z = torch.einsum("bsgi,goi->bsgo", o, weight)
        return F.linear(z.flatten(2), attn.wo_b.weight)


def compressed(module: Compressor, x: torch.Tensor, precision: AbstractContextManager) -> torch.Tensor | None:
    """Entries ``[B, S // ratio, head_dim]`` of all windows that are complete; None if there are none."""
    batch, length, _ = x.shape
    ratio, dim, count = module.spec.ratio, module.head_dim, length // module.spec.ratio
    if not count:
        return None
    with precision:
        values = F.linear(x[:, : count * ratio], module.wkv.weight).float()
        scores = F.linear(x[:, : count * ratio], module.wgate.weight).float()
    values = values.unflatten(1, (count, ratio))
    scores = scores.unflatten(1, (count, ratio)) + module.ape
    if module.spec.overlap:
        values = torch.cat([shifted(values[..., :dim], 0.0), values[..., dim:]], 2)
        scores = torch.cat([shifted(scores[..., :dim], float("-inf")), scores[..., dim:]], 2)
    pooled = (scores.softmax(2) * values).sum(2)
    with precision:
        entries = rms_norm(pooled, module.norm.eps, module.norm.weight).flatten(0, 1)
    positions = (torch.arange(count, device=x.device) * ratio).repeat(batch)
    return apply_rope(entries, module.rope.at(positions)).view(batch, count, dim)


def shifted(windows: torch.Tensor, first: float) -> torch.Tensor:
    """Each window's predecessor, along dimension 1; ``first`` everywhere in the one that has none."""
    return torch.cat([torch.full_like(windows[:, :1], first), windows[:, :-1]], 1)


def delayed(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The row ``count`` before each, along dimension 1; zeros where there is none."""
    return torch.cat([torch.zeros_like(rows[:, :count]), rows[:, : max(0, rows.shape[1] - count)]], 1)


def visible_entries(length: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Bool ``[1, S, S // ratio]``: query t sees entry e once its window is complete, ``e < (t + 1) // ratio``."""
    closed = (torch.arange(length, device=device) + 1) // ratio
    return (torch.arange(length // ratio, device=device) < closed.unsqueeze(1)).unsqueeze(0)


def index_scores(
    indexer: Indexer, x: torch.Tensor, qr: torch.Tensor, freqs_cis: torch.Tensor, precision: AbstractContextManager
) -> torch.Tensor:
    """The indexer's scores ``[B, S, E]``: ``sum_h weight[t, h] * relu(q[t, h] . key[e])``."""
    batch, length, _ = x.shape
    keys = compressed(indexer.compressor, x, precision)
    if keys is None:
        return torch.zeros(batch, length, 0, dtype=torch.float32, device=x.device)
    with precision:
        q = F.linear(qr, indexer.wq_b.weight).view(batch * length, indexer.heads, indexer.head_dim)
        q = apply_rope(q, freqs_cis).view(batch, length * indexer.heads, indexer.head_dim)
        weights = F.linear(x, indexer.weights_proj.weight) * indexer.scale
        products = (q @ keys.to(q.dtype).mT).relu().view(batch * length, indexer.heads, -1)
        return torch.bmm(weights.reshape(batch * length, 1, -1), products).view(batch, length, -1).float()


def selected(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Bool ``[B, S, E]``: the ``topk`` visible entries of highest score. No gradient passes through the choice."""
    batch, length, count = scores.shape
    if topk >= count:
        return visible
    lens = visible.sum(-1).expand(batch, length).flatten()
    chosen = topk_indices(scores.detach().flatten(0, 1), lens, topk).long()
    marks = torch.zeros(batch * length, count + 1, dtype=torch.bool, device=scores.device)
    marks.scatter_(1, torch.where(chosen < 0, count, chosen), True)
    return marks[:, :count].view(batch, length, count)


def index_loss(scores: torch.Tensor, mass: torch.Tensor, readable: torch.Tensor) -> torch.Tensor:
    """Mean divergence of the indexer's softmax from the attention that entries got, both over readable entries.

    Source: DeepSeek-V3.2 (section 2.1.1): attention summed over the heads and normalised is the target of the indexer.
    Neither the target nor the indexer's inputs pass a gradient on, so the language model's own loss is untouched.
    """
    readable = readable.expand_as(scores)
    target = mass.detach() / mass.detach().sum(-1, keepdim=True).clamp_min(1e-9)
    expected = scores.masked_fill(~readable, -1e9).log_softmax(-1)
    divergence = (target * (target.clamp_min(1e-9).log() - expected)).masked_fill(~readable, 0.0).sum(-1)
    several = readable.sum(-1) > 1
    return (divergence * several).sum() / several.sum().clamp_min(1)


def windowed_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    entries: torch.Tensor | None,
    readable: torch.Tensor | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    precision: AbstractContextManager,
    own: torch.Tensor | None = None,
    replaced: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One softmax over the window, the readable entries and the sink.

    Queries go in blocks of ``window``: a block's windows lie within itself and the block before it.

    Args:
        q: ``[B, S, H, D]``; kv: ``[B, S, D]``, keys and values; entries: ``[B, E, D]``, readable: bool ``[B, S, E]``.
        own: ``[B, S, n, D]``, keys and values that a query alone reads, in place of the newest ``replaced`` rows of its
            window; only without entries.

    Returns:
        ``[B, S, H, D]``, and the float32 attention that each entry got, summed over the heads, ``[B, S, E]``.
    """
    batch, length, heads, dim = q.shape
    pad = -length % window
    blocks = (length + pad) // window
    keys = F.pad(kv, (0, 0, 0, pad)).view(batch, blocks, window, dim)
    keys = torch.cat([shifted(keys, 0.0), keys], 2).flatten(0, 1)
    with precision:
        queries = F.pad(q, (0, 0, 0, 0, 0, pad)).view(batch * blocks, window * heads, dim)
        near = (queries @ keys.mT).view(batch, blocks, window, heads, 2 * window)
        near = near.masked_fill(~window_mask(blocks, window, q.device, replaced), float("-inf"))
        logits = [near.view(batch, -1, heads, 2 * window)[:, :length]]
        if entries is not None and readable is not None:
            far = (q.flatten(1, 2) @ entries.to(q.dtype).mT).view(batch, length, heads, -1)
            logits.append(far.masked_fill(~readable.unsqueeze(2), float("-inf")))
        if own is not None:
            logits.append(q @ own.mT)
    logits = [part.float() * scale for part in logits] + [sink.view(1, 1, heads, 1).expand(batch, length, heads, 1)]
    weights = torch.cat(logits, -1).softmax(-1)
    beside = own.shape[2] if own is not None else 0 if entries is None else entries.shape[1]
    near, far, _ = weights.split([2 * window, beside, 1], -1)
    with precision:
        rows = F.pad(near, (0, 0, 0, 0, 0, pad)).reshape(batch * blocks, window * heads, 2 * window)
        o = (rows.to(q.dtype) @ keys).view(batch, -1, heads, dim)[:, :length]
        if own is not None:
            return o + far.to(q.dtype) @ own, None
        if entries is None:
            return o, None
        o = o + (far.to(q.dtype).flatten(1, 2) @ entries.to(q.dtype)).view(batch, length, heads, dim)
    return o, far.sum(2)


def window_mask(blocks: int, window: int, device: torch.device, replaced: int = 0) -> torch.Tensor:
    """Bool ``[blocks, window, 1, 2 window]``: which keys of the block before and its own a query of a block sees.

    Args:
        replaced: the newest keys of each query's window that it does not see.
    """
    query = torch.arange(window, device=device).unsqueeze(1)
    key = torch.arange(2 * window, device=device)
    seen = (key > query) & (key <= query + window - replaced)
    exists = (torch.arange(blocks, device=device) > 0).view(-1, 1, 1) | (key >= window)
    return (seen & exists).unsqueeze(2)
