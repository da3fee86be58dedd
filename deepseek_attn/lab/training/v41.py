"""DeepSeek-V4.1 with gradients: entries and selections that layers share, and the n-gram memory as a parameter.

Differences from `forward` and `attention` follow `deepseek_attn.v41` and `layers.engram`, over whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.config.engram import EngramConfig
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.kernels.common.norm_rope import apply_rope, rms_norm
from deepseek_attn.kernels.engram import gate_streams, hash_rows
from deepseek_attn.kernels.indexer import index_query
from deepseek_attn.kernels.insert.reference import pool_windows
from deepseek_attn.lab.training.attention import (
    MixedPrecision,
    SharedEntries,
    TrainedAttention,
    VisibleKeys,
    WholeSequences,
    batched_index_scores,
    precision,
    selected,
)
from deepseek_attn.lab.training.forward import TrainedMoE
from deepseek_attn.layers.engram import Engram
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.weights import CheckpointModule, WeightSlot
from deepseek_attn.models.block import BuildContext
from deepseek_attn.models.deepseek_v41 import DeepseekV41, DeepseekV41Block
from deepseek_attn.v41.attention import DeepseekV41MLAAttention


class TrainedV41Attention(TrainedAttention, DeepseekV41MLAAttention):
    """V4.1's layer with gradients. Layers run in the model's order, as later layers read entries of earlier ones."""

    @property
    def trained_linears(self) -> list[Linear]:
        return self.input_linears[:2] + ([] if self.compressor is None else self.compressor.input_linears)

    def make_entries(self, projected: list[Tensor], step: WholeSequences) -> Tensor:
        spec, shared = self.spec, step.shared.setdefault(self.spec.index, SharedEntries())
        if self.compressor is not None and self.indexer is not None:
            latents = self.latents(projected, step)
            shared.entries = self.rotated(latents, step)
            shared.keys = self.rotated(self.indexer.keys(latents.detach()), step)
        entries = step.shared[spec.kv_source if spec.kv_source is not None else spec.index].entries
        assert entries is not None
        return entries

    def latents(self, projected: list[Tensor], step: WholeSequences) -> Tensor:
        """Latents ``[B, E, D]`` of all windows that are complete."""
        compressor, ratio = self.compressor, self.spec.ratio
        assert compressor is not None
        count = step.length // ratio
        windows = [step.rows(part)[:, : count * ratio].unflatten(1, (count, ratio)) for part in projected]
        if len(windows) == 1:
            return rms_norm(windows[0].squeeze(2), compressor.norm.eps, compressor.norm.weight)
        values, gates = windows
        absent = torch.zeros(ratio, 1, dtype=torch.bool, device=values.device)
        pooled = pool_windows(values, gates + compressor.ape, absent)
        return rms_norm(pooled, compressor.norm.eps, compressor.norm.weight)

    def rotated(self, rows: Tensor, step: WholeSequences) -> Tensor:
        """``rows [B, E, d]`` rotated by the first positions of their windows."""
        starts = (torch.arange(rows.shape[1], device=rows.device) * self.spec.ratio).repeat(step.batch)
        return apply_rope(rows.flatten(0, 1), self.rope.at(starts)).view_as(rows)

    def index_scores(self, x: Tensor, qr: Tensor, positions: Tensor, step: WholeSequences) -> Tensor:
        indexer, source = self.indexer, self.spec.kv_source
        assert indexer is not None
        assert source is not None
        keys = step.shared[source].keys
        assert keys is not None
        queries = index_query(indexer.query_rows(indexer.wq_b(qr), indexer.weights_proj(x), positions))
        return batched_index_scores(step.rows(queries.q), keys, step.rows(queries.weights))

    @torch.no_grad()
    def readable(
        self, q: Tensor, keys: list[VisibleKeys], entries: Tensor, visible: Tensor, scores: Tensor | None,
        step: WholeSequences,
    ) -> Tensor:  # fmt: skip
        """As the base class; without an indexer, the selection of ``spec.index_source``."""
        spec = self.spec
        if self.indexer is None:
            assert spec.index_source is not None
            chosen = step.shared[spec.index_source].readable
            assert chosen is not None
            return chosen
        if scores is not None and step.select == "learned":
            scores = self.limited(scores, visible, step)
        chosen = super().readable(q, keys, entries, visible, scores, step)
        step.shared[spec.index].readable = chosen
        return chosen

    def limited(self, scores: Tensor, visible: Tensor, step: WholeSequences) -> Tensor:
        """Keeps blocks of candidates if the layer is their source; else the scores with -inf outside of them."""
        spec, indexer = self.spec, self.indexer
        assert indexer is not None
        count = scores.shape[2]
        if spec.candidate_source is None or count <= indexer.num_blocks * indexer.block_size:
            return scores
        if spec.candidate_source == spec.index:
            step.shared[spec.index].candidates = kept_blocks(scores, visible, indexer.num_blocks, indexer.block_size)
            return scores
        kept = step.shared[spec.candidate_source].candidates
        assert kept is not None
        return scores.masked_fill(~kept, float("-inf"))


def kept_blocks(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """Bool ``[B, S, E]``: entries of the newest block, and of the blocks with the highest best visible scores.

    Args:
        blocks: number of blocks that are kept; size: entries of each.
    """
    batch, length, count = scores.shape
    total = -(-count // size)
    padded = F.pad(scores.masked_fill(~visible, float("-inf")), (0, total * size - count), value=float("-inf"))
    best = padded.unflatten(2, (total, size)).amax(-1)
    seen = -(-visible.sum(-1) // size)  # blocks with a visible entry, [B or 1, S]
    block = torch.arange(total, device=scores.device)
    best = best.masked_fill(block == seen.unsqueeze(-1) - 1, float("inf"))
    kept = selected(best, block < seen.unsqueeze(-1), blocks).expand(batch, length, total)
    return kept.repeat_interleave(size, dim=2)[:, :, :count]


class MemoryTable(CheckpointModule):
    """The rows of an n-gram memory as a parameter, float32 ``[rows, columns]``."""

    weight: Tensor

    def __init__(self, shape: tuple[int, int], device: torch.device):
        super().__init__(device)
        self.declare("weight", shape, torch.float32)


class TrainedEngram(MixedPrecision, Engram):
    """The n-gram memory with gradients to its table, which has to be small: `layers.engram` leaves it in files."""

    multipliers: Tensor
    primes: Tensor

    def __init__(self, engram: EngramConfig, context: BuildContext[DeepseekV41Config], spec: V41LayerSpec):
        config, device = context.config, context.device
        sizes = (config.hidden_size, config.hc_mult, config.rms_norm_eps)
        super().__init__(engram, spec.index, *sizes, context.numerics, context.dtype, device)
        self.embed, found = MemoryTable(self.table_shape, device), engram.hash_of(spec.index)
        for name, values in (("multipliers", found.multipliers), ("primes", found.primes)):
            numbers = torch.tensor(values, dtype=torch.int64, device=device)
            self.register_buffer(name, numbers, persistent=False)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from CheckpointModule.slots(self)

    def remembered(self, streams: Tensor, ngrams: Tensor) -> Tensor:
        """``streams [T, hc_mult, hidden_size]`` and ``ngrams`` int64 ``[T, n]`` -> new streams."""
        rows = self.embed.weight[hash_rows(ngrams, self.multipliers, self.primes)].flatten(1)
        with precision(streams.device, self.product_dtype):
            kv = self.wkv(rows.to(self.product_dtype))
        return gate_streams(streams, kv.to(streams.dtype), self.q_weight, self.k_weight, self.eps)


class TrainedV41Block(DeepseekV41Block):
    """A block with gradients."""

    attention_class = TrainedV41Attention
    experts_class = TrainedMoE

    def __init__(self, context: BuildContext[DeepseekV41Config], spec: V41LayerSpec, attention_only: bool = False):
        super().__init__(context, spec, attention_only)
        if self.engram is not None:
            self.engram = TrainedEngram(context.config.memory, context, spec)

    def add_memory(self, streams: Tensor, step: WholeSequences) -> Tensor:
        if not isinstance(self.engram, TrainedEngram):
            return streams
        assert step.ngrams is not None
        return self.engram.remembered(streams, step.ngrams)


class TrainedV41(DeepseekV41):
    """The model with gradients: the step of a call is `WholeSequences`."""

    block_class = TrainedV41Block
