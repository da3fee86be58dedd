"""The V4 attention layer over whole sequences, without caches: differentiable.

`TrainedAttention` is `DeepseekV4MLAAttention` with keys in plain tensors instead of caches: its linears, and the plain
torch of the ops that a layer calls. Ops that read pages cannot be differentiated, so that the softmax over a block of
queries (`softmax_block`) and the pooling of windows (`pool_windows`) are called from here as the ops call them. Shapes:
``B`` sequences of ``S`` tokens, ``H`` heads, ``D`` channels of a key, ``E`` compressed entries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.attention.indexer import Indexer
from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.kernels.attention.reference import softmax_block
from deepseek_attn.kernels.common.norm_rope import apply_rope, rms_norm
from deepseek_attn.kernels.indexer import index_query, index_scores, topk_indices
from deepseek_attn.kernels.insert import query_norm_rope
from deepseek_attn.kernels.insert.reference import pool_windows
from deepseek_attn.layers.linear import multi_linear


@dataclass
class WholeSequences:
    """The step of a model that computes sequences from their first token on.

    Attributes:
        batch, length: sequences, and tokens of each.
        select: read the entries that indexers select, as a running model does; otherwise all that are visible.
        index_losses: of the layers with an indexer, in order; layers append them.
        draft_keys: window keys of an MTP layer at each earlier draft step, to which the layer appends those of this
            one; None outside of draft steps.
    """

    batch: int
    length: int
    select: bool = True
    index_losses: list[Tensor] = field(default_factory=list)
    draft_keys: list[Tensor] | None = None

    def positions(self, device: torch.device) -> Tensor:
        """Int64 ``[B * S]``."""
        return torch.arange(self.length, device=device).repeat(self.batch)

    def rows(self, x: Tensor) -> Tensor:
        """``[B * S, ...]`` -> ``[B, S, ...]``."""
        return x.unflatten(0, (self.batch, self.length))


def precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Context of matrix products."""
    if dtype == torch.float32:
        return nullcontext()
    # without the cache of cast weights, which a captured graph must not keep
    return torch.autocast(device.type, dtype, cache_enabled=False)


class TrainedAttention(DeepseekV4MLAAttention):
    """The layer with gradients. Operations that V4 computes in float32 stay float32 under any ``product_dtype``.

    Attributes:
        product_dtype: of matrix products.
    """

    product_dtype = torch.float32

    def forward(self, x: Tensor, positions: Tensor, step: WholeSequences) -> Tensor:
        """Normed ``x [B * S, hidden_size]`` -> ``[B * S, hidden_size]``."""
        own = self.input_linears[: 2 if self.compressor is None else 4]
        with precision(x.device, self.product_dtype):
            x = x.to(self.product_dtype)
            qr, kv, *projected = multi_linear(x, own)
            qr = rms_norm(qr, self.eps, self.q_norm.weight)
            q = step.rows(query_norm_rope(self.raw_queries(self.wq_b(qr), positions)))
            kv = rms_norm(kv, self.eps, self.kv_norm.weight)
            kv = step.rows(apply_rope(kv, self.rope.at(positions)))
            if step.draft_keys is not None:
                keys = draft_keys([*step.draft_keys, kv], self.window_size)
                step.draft_keys.append(kv)
            else:
                keys = [window_keys(kv, self.window_size)]
            readable = scores = None
            if self.compressor is not None and step.length >= self.compress_ratio:
                entries = compressed(self.compressor, projected[0], projected[1], step)
                readable = visible_entries(step.length, self.compress_ratio, x.device)
                if self.indexer is not None:
                    scores = self.index_scores(self.indexer, x.detach(), qr.detach(), positions, step)
                    readable = selected(scores, readable, self.indexer.topk) if step.select else readable
                keys.append(entry_keys(entries, readable, self.window_size))
            o, shares = attend_in_blocks(q, keys, self.attn_sink, self.window_size, self.scale)
            if scores is not None and readable is not None:
                step.index_losses.append(index_loss(scores, shares[..., -scores.shape[2] :].sum(2), readable))
            return self.wo_b(self.wo_a.project(o.flatten(0, 1), positions, self.rope.cos_sin))

    def index_scores(self, indexer: Indexer, x: Tensor, qr: Tensor, positions: Tensor, step: WholeSequences) -> Tensor:
        """The indexer's scores ``[B, S, E]``."""
        values, gates, weights = multi_linear(x, self.input_linears[4:])
        keys = compressed(indexer.compressor, values, gates, step)
        queries = index_query(indexer.query_rows(indexer.wq_b(qr), weights, positions))
        sequences = zip(step.rows(queries.q), keys, step.rows(queries.weights), strict=True)
        return torch.stack([index_scores(q, k, w) for q, k, w in sequences])


def compressed(module: Compressor, values: Tensor, scores: Tensor, step: WholeSequences) -> Tensor:
    """Entries ``[B, S // ratio, head_dim]`` of all windows that are complete; there must be one.

    Args:
        values, scores: float32 ``[B * S, width]``, as in `Compressor.part`.
    """
    ratio, dim = module.spec.ratio, module.head_dim
    count = step.length // ratio
    values, scores = (step.rows(x)[:, : count * ratio].unflatten(1, (count, ratio)) for x in (values, scores))
    scores = scores + module.ape
    if module.spec.overlap:
        values, scores = (torch.cat([shifted(x[..., :dim]), x[..., dim:]], 2) for x in (values, scores))
    # the first window has no older half
    window, place = torch.arange(count, device=values.device), torch.arange(values.shape[2], device=values.device)
    absent = (window.unsqueeze(1) == 0) & (place < values.shape[2] - ratio)
    entries = rms_norm(pool_windows(values, scores, absent.unsqueeze(-1)), module.norm.eps, module.norm.weight)
    positions = (window * ratio).repeat(step.batch)
    return apply_rope(entries.flatten(0, 1), module.rope.at(positions)).view(step.batch, count, dim)


def shifted(rows: Tensor, count: int = 1) -> Tensor:
    """The row ``count`` before each, along dimension 1; zeros where there is none."""
    return torch.cat([torch.zeros_like(rows[:, :count]), rows[:, : max(0, rows.shape[1] - count)]], 1)


def visible_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """Bool ``[1, S, S // ratio]``: query t sees entry e once its window is complete, ``e < (t + 1) // ratio``."""
    closed = (torch.arange(length, device=device) + 1) // ratio
    return (torch.arange(length // ratio, device=device) < closed.unsqueeze(1)).unsqueeze(0)


def selected(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Bool ``[B, S, E]``: the ``topk`` visible entries of highest score. No gradient passes through the choice."""
    batch, length, count = scores.shape
    if topk >= count:
        return visible
    lens = visible.sum(-1).expand(batch, length).flatten()
    chosen = topk_indices(scores.detach().flatten(0, 1), lens, topk).long()
    marks = torch.zeros(batch * length, count + 1, dtype=torch.bool, device=scores.device)
    marks.scatter_(1, torch.where(chosen < 0, count, chosen), True)
    return marks[:, :count].view(batch, length, count)


def index_loss(scores: Tensor, mass: Tensor, readable: Tensor) -> Tensor:
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


class VisibleKeys(NamedTuple):
    """Keys, which are the values too, that blocks of ``window`` queries read.

    Attributes:
        rows: ``[B, blocks, K, D]``.
        visible: bool ``[B or 1, blocks, window, K]``.
    """

    rows: Tensor
    visible: Tensor


def in_blocks(rows: Tensor, window: int) -> Tensor:
    """``[B, S, ...]`` -> ``[B, blocks, window, ...]``, with zeros behind the sequences."""
    pad = -rows.shape[1] % window
    return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, pad)).unflatten(1, (-1, window))


def window_keys(kv: Tensor, window: int, first: int = 0, last: int | None = None) -> VisibleKeys:
    """The rows of ``kv [B, S, D]`` that lie ``first`` to ``last - 1`` (default: ``window - 1``) before each query.

    They are rows of the query's own block and of the block before it.
    """
    blocks = in_blocks(kv, window)
    mask = window_mask(blocks.shape[1], window, kv.device, first, window if last is None else last)
    return VisibleKeys(torch.cat([shifted(blocks), blocks], 2), mask.unsqueeze(0))


def window_mask(blocks: int, window: int, device: torch.device, first: int, last: int) -> Tensor:
    """Bool ``[blocks, window, 2 window]``: keys of the block before and its own, ``first`` to ``last - 1`` before."""
    query = torch.arange(window, device=device).unsqueeze(1)
    key = torch.arange(2 * window, device=device)
    before = query + window - key
    exists = (torch.arange(blocks, device=device) > 0).view(-1, 1, 1) | (key >= window)
    return (before >= first) & (before < last) & exists


def draft_keys(steps: list[Tensor], window: int) -> list[VisibleKeys]:
    """Keys of drafts that end at every row, at the last of some draft steps.

    At step d, row p belongs to the drafting that began at row p - d: rows up to there have the keys of step 0, and rows
    p - d + j after it those of step j, as in the window cache of a runner that drafts. Rows before row d belong to no
    drafting: their results are finite and mean nothing.

    Args:
        steps: keys ``[B, S, D]`` of each step.
    """
    newest = len(steps) - 1
    found = [window_keys(steps[0], window, newest)]
    ages = ((newest - j, kv) for j, kv in enumerate(steps) if j)
    return found + [window_keys(kv, window, age, age + 1) for age, kv in ages if age < window]


def entry_keys(entries: Tensor, readable: Tensor, window: int) -> VisibleKeys:
    """``entries [B, E, D]`` for every block; readable: bool ``[B or 1, S, E]``."""
    visible = in_blocks(readable, window)
    return VisibleKeys(entries.unsqueeze(1).expand(-1, visible.shape[1], -1, -1), visible)


def attend_in_blocks(
    q: Tensor, keys: list[VisibleKeys], sink: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One softmax over all ``keys`` and the sink.

    Args:
        q: ``[B, S, H, D]``; every query sees a key.

    Returns:
        ``[B, S, H, D]``, and the float32 share of attention that each key got, ``[B, S, H, K]``, without gradient.
    """
    batch, length, heads, dim = q.shape
    queries = in_blocks(q, window)
    blocks = queries.shape[1]
    rows = torch.cat([part.rows.to(q.dtype) for part in keys], 2).flatten(0, 1)
    visible = torch.cat([part.visible.expand(batch, -1, -1, -1) for part in keys], 3).flatten(0, 1)
    result = softmax_block(
        queries.view(batch * blocks, window * heads, dim).float() * scale, rows, visible.repeat_interleave(heads, 1),
        sink.repeat(window), dim, torch.float32,
    )  # fmt: skip
    shares = (result.weights * result.factor).detach()
    out, shares = (x.view(batch, blocks * window, heads, -1)[:, :length] for x in (result.out, shares))
    return out.to(q.dtype), shares
