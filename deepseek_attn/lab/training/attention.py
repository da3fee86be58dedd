"""The V4 attention layer over whole sequences, without caches: differentiable.

`TrainedAttention` is `DeepseekV4MLAAttention` with keys in plain tensors instead of caches: its linears, and the plain
torch of the ops that a layer calls. Ops that read pages cannot be differentiated, so that the softmax over a block of
queries (`softmax_block`) and the pooling of windows (`pool_windows`) are called from here as the ops call them. Shapes:
``B`` sequences of ``S`` tokens, ``H`` heads, ``D`` channels of a key, ``E`` compressed entries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.kernels.attention.reference import softmax_block
from deepseek_attn.kernels.common.norm_rope import apply_rope, rms_norm
from deepseek_attn.kernels.indexer import index_query
from deepseek_attn.kernels.indexer.reference import best_columns
from deepseek_attn.kernels.insert import query_norm_rope
from deepseek_attn.kernels.insert.reference import pool_windows
from deepseek_attn.layers.linear import Linear, multi_linear


@dataclass
class WholeSequences:
    """The step of a model that computes sequences from their first token on.

    Attributes:
        batch, length: sequences, and tokens of each; device: of the model.
        select: which entries a query reads in layers with an indexer: ``all`` visible ones, or the top-k of the
            indexer's scores (``learned``, as a running model does), of the layer's own attention over all visible
            entries (``oracle``), or of a hash (``random``).
        trains_index: layers with an indexer append to ``index_losses``, in order.
        noise: int64 ``[B, S]``, a number that depends on each token and those before it; only read if ``random``.
        draft_keys: window keys of an MTP layer at each earlier draft step; the layer appends the keys of the current
            step. None outside of draft steps.
        observer: called with each layer's `Reading`; None: no layer computes one.
        shared: V4.1's shared entries and selections, by the number of the layer that made them.
        ngrams: int64 ``[B * S, n]``, each token, the one before it and so on, for V4.1's n-gram memory.
    """

    batch: int
    length: int
    device: torch.device
    select: str = "learned"
    trains_index: bool = True
    noise: Tensor | None = None
    index_losses: list[Tensor] = field(default_factory=list)
    draft_keys: list[Tensor] | None = None
    observer: Callable[[Reading], None] | None = None
    shared: dict[int, SharedEntries] = field(default_factory=dict)
    ngrams: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
        """Int64 ``[B * S]``."""
        return torch.arange(self.length, device=self.device).repeat(self.batch)

    def trailing_at(self, layer: int) -> None:
        """Every layer computes every row; see `StepMetadata.trailing_at`."""

    def rows(self, x: Tensor) -> Tensor:
        """``[B * S, ...]`` -> ``[B, S, ...]``."""
        return x.unflatten(0, (self.batch, self.length))


@dataclass
class SharedEntries:
    """Entries and selections that a layer of V4.1 makes for later layers.

    Attributes:
        entries: ``[B, E, D]``; keys: index keys ``[B, E, d]``, without gradient to the entries. None unless the layer
            owns them.
        readable: bool ``[B or 1, S, E]``, its selection; candidates: bool ``[B, S, E]``, entries of the blocks that it
            keeps; None where nothing is limited.
    """

    entries: Tensor | None = None
    keys: Tensor | None = None
    readable: Tensor | None = None
    candidates: Tensor | None = None


class Reading(NamedTuple):
    """Entries that the queries of a layer read, for an observer.

    Attributes:
        layer: number of the layer.
        dense: float32 ``[B, S, S]``, attention over all tokens up to the query, sum of the heads.
        mass: float32 ``[B, S, E]``, attention over the window and all visible entries, sum of the heads, of entries.
        visible, read: bool ``[B, S, E]``. Without entries, E is 0.
    """

    layer: int
    dense: Tensor
    mass: Tensor
    visible: Tensor
    read: Tensor


def precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Context of matrix products."""
    if dtype == torch.float32:
        return nullcontext()
    # without the cache of cast weights, which a captured graph must not keep
    return torch.autocast(device.type, dtype, cache_enabled=False)


class MixedPrecision:
    """Modules whose matrix products are in ``product_dtype``, with float32 weights."""

    product_dtype: torch.dtype = torch.float32


class TrainedAttention(MixedPrecision, DeepseekV4MLAAttention):
    """The layer with gradients. Operations that V4 computes in float32 stay float32 under any ``product_dtype``."""

    def forward(self, x: Tensor, positions: Tensor, step: WholeSequences) -> Tensor:
        """Normed ``x [B * S, hidden_size]`` -> ``[B * S, hidden_size]``."""
        with precision(x.device, self.product_dtype):
            x = x.to(self.product_dtype)
            qr, kv, *projected = multi_linear(x, self.trained_linears)
            qr = rms_norm(qr, self.eps, self.q_norm.weight)
            q = step.rows(query_norm_rope(self.raw_queries(self.wq_b(qr), positions)))
            kv = rms_norm(kv, self.eps, self.kv_norm.weight)
            kv = step.rows(apply_rope(kv, self.rope.at(positions)))
            window = min(self.window_size, step.length)
            if step.draft_keys is not None:
                keys = draft_keys([*step.draft_keys, kv], window)
                step.draft_keys.append(kv)
            else:
                keys = [window_keys(kv, window)]
            found = scores = None
            if self.compress_ratio and step.length >= self.compress_ratio:
                entries = self.make_entries(projected, step)
                visible = visible_entries(step.length, self.compress_ratio, x.device)
                if self.indexer is not None and (step.trains_index or step.select == "learned"):
                    scores = self.index_scores(x.detach(), qr.detach(), positions, step)
                found = Entries(entries, visible, self.readable(q, keys, entries, visible, scores, step))
                keys.append(entry_keys(entries, found.readable, window))
            if step.observer is not None and step.draft_keys is None:
                step.observer(self.reading(q, kv, keys[:1], found, step))
            o, shares = attend_in_blocks(q, keys, self.attn_sink, window, self.scale)
            if step.trains_index and scores is not None and found is not None:
                step.index_losses.append(index_loss(scores, shares[..., -scores.shape[2] :].sum(2), found.readable))
            return self.wo_b(self.wo_a.project(o.flatten(0, 1), positions, self.rope.cos_sin))

    @property
    def trained_linears(self) -> list[Linear]:
        """The projections of the layer's input that gradients of the language model's loss pass through."""
        return self.input_linears[: 2 if self.compressor is None else 4]

    def make_entries(self, projected: list[Tensor], step: WholeSequences) -> Tensor:
        """The entries ``[B, E, D]`` that the layer reads, from the results of `trained_linears` but the first two."""
        assert self.compressor is not None
        return compressed(self.compressor, projected[0], projected[1], step)

    @torch.no_grad()
    def readable(
        self, q: Tensor, keys: list[VisibleKeys], entries: Tensor, visible: Tensor, scores: Tensor | None,
        step: WholeSequences,
    ) -> Tensor:  # fmt: skip
        """Bool ``[B or 1, S, E]``: the entries that each query reads. No gradient passes through the choice."""
        topk = self.index_topk
        if topk is None or step.select == "all" or topk >= visible.shape[2]:
            return visible
        if step.select == "oracle":
            scores = self.entry_mass(q, keys, entries, visible)
        elif step.select == "random":
            scores = hashed_scores(step, self.spec.index, visible.shape[2])
        assert scores is not None
        return selected(scores, visible, topk)

    def entry_mass(self, q: Tensor, keys: list[VisibleKeys], entries: Tensor, visible: Tensor) -> Tensor:
        """Share of attention over the window and all ``visible`` entries that each entry gets.

        Float32 ``[B, S, E]``, the sum of the heads.
        """
        window = keys[0].visible.shape[2]
        everything = [*keys, entry_keys(entries, visible, window)]
        _, shares = attend_in_blocks(q, everything, self.attn_sink, window, self.scale)
        return shares[..., -visible.shape[2] :].sum(2)

    @torch.no_grad()
    def reading(
        self, q: Tensor, kv: Tensor, keys: list[VisibleKeys], found: Entries | None, step: WholeSequences
    ) -> Reading:
        """The layer's `Reading` of ``keys``, of its window, and of the entries that it ``found``."""
        length = step.length
        _, dense = attend_in_blocks(q, [window_keys(kv, length)], self.attn_sink, length, self.scale)
        if found is None:
            nothing = dense.new_zeros(step.batch, length, 0)
            return Reading(self.spec.index, dense[..., -length:].sum(2), nothing, nothing.bool(), nothing.bool())
        mass = self.entry_mass(q, keys, found.entries, found.visible)
        visible, read = (marks.expand_as(mass) for marks in (found.visible, found.readable))
        return Reading(self.spec.index, dense[..., -length:].sum(2), mass, visible, read)

    def index_scores(self, x: Tensor, qr: Tensor, positions: Tensor, step: WholeSequences) -> Tensor:
        """The indexer's scores ``[B, S, E]``; x, qr: without gradient."""
        indexer = self.indexer
        assert indexer is not None
        values, gates, weights = multi_linear(x, self.input_linears[4:])
        keys = compressed(indexer.compressor, values, gates, step)
        queries = index_query(indexer.query_rows(indexer.wq_b(qr), weights, positions))
        return batched_index_scores(step.rows(queries.q), keys, step.rows(queries.weights))


class Entries(NamedTuple):
    """Compressed entries ``[B, E, D]``; bool ``[B or 1, S, E]`` twice: visible to a query, and selected by it."""

    entries: Tensor
    visible: Tensor
    readable: Tensor


def hashed_scores(step: WholeSequences, layer: int, count: int) -> Tensor:
    """Float32 ``[B, S, count]`` in [0, 1): of a query's prefix, the layer and the entry, and nothing else."""
    assert step.noise is not None
    entry = torch.arange(count, device=step.noise.device)
    mixed = step.noise.unsqueeze(2) + mix_bits(entry + (layer + 1) * 1_000_003)
    return (mix_bits(mixed) & 0xFFFFFF).float() / float(1 << 24)


def mix_bits(x: Tensor) -> Tensor:
    """An int64 hash of int64 numbers."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


def batched_index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The op `index_scores` for a batch of sequences; the number of launches does not depend on the batch.

    Args:
        q: ``[B, S, heads, d]``; keys: ``[B, E, d]``; weights: ``[B, S, heads]``.

    Returns:
        Float32 ``[B, S, E]``.
    """
    batch, length, heads, dim = q.shape
    products = torch.bmm(q.float().reshape(batch, length * heads, dim), keys.float().transpose(1, 2)).relu()
    products = products.view(batch * length, heads, keys.shape[1])
    return torch.bmm(weights.float().reshape(batch * length, 1, heads), products).view(batch, length, -1)


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
    """Shifts rows down by ``count`` along dimension 1 and fills with zeros."""
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
    return best_columns(scores.detach().flatten(0, 1), lens, topk).view(batch, length, count)


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
    if blocks.shape[1] == 1:  # nothing comes before the only block
        return VisibleKeys(blocks, mask[:, :, window:].unsqueeze(0))
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
