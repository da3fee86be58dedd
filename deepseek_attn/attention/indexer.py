"""The lightning indexer: which cached entries a query reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.cache.pools import Pool
from deepseek_attn.cache.record import RECORD_KINDS
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.indexer import (
    CandidateBlocks,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
    index_select,
)
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule
from deepseek_attn.utils.tracing import traced

SCORE_COLUMNS = 16  # a prefill has scores in multiples of this: aligned rows, so one kernel for every length


class QueryProjections(NamedTuple):
    """Projections of the query latent, in the order of `query_linears`.

    Attributes:
        q: ``[T, outputs of wq_b]``, the attention queries of the rank's heads.
        index_q: ``[T, index_n_heads * index_head_dim]``; None unless the indexer has to select.
    """

    q: Tensor
    index_q: Tensor | None = None


class LightningIndexer(CheckpointModule):
    """Scores cached keys with small heads of its own and selects the best ``index_topk`` of them for each query.

    ``score[t, e] = sum_h weight[t, h] * relu(q[t, h] . key[e])``, over the entries that query ``t`` may see. All
    attention heads share the selection; the scores have no other use. Subclasses define the keys.

    Attributes:
        half_split: RoPE rotates the pairs ``(i, i + n)`` of the first channels, not ``(2 i, 2 i + 1)`` of the last.
        ratio: tokens per key; pool: the layer's cached keys.
    """

    half_split = False
    ratio: int
    pool: Pool

    def __init__(
        self,
        config: AnyConfig,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device)
        heads, head_dim, topk = config.index_n_heads, config.index_head_dim, config.index_topk
        if heads is None or head_dim is None or topk is None:
            raise ValueError("an indexer needs a config with index_n_heads, index_head_dim and index_topk")
        self.rope, self.numerics = rope, numerics
        self.heads, self.head_dim, self.topk = heads, head_dim, topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.head_dim, numerics, dtype, device)
        self.score_dtype = dtype if numerics.rounded_scores else torch.float32
        out_float32 = not numerics.rounded_scores
        self.weights_proj = Linear(config.hidden_size, self.heads, numerics, dtype, device, out_float32=out_float32)
        self.scale = self.head_dim**-0.5 * self.heads**-0.5

    def bind(self, pool: Pool, state: Pool | None = None) -> None:
        """Sets the pool of the keys; ``state``: of projections that keys are pooled from."""
        self.pool = pool

    def query_rows(self, index_q: Tensor, weights: Tensor, positions: Tensor) -> IndexQueryRows:
        """Argument of the op `index_query`: projected ``index_q [T, heads * head_dim]`` and ``weights [T, heads]``."""
        scale = self.scale
        if self.numerics.rounded_scores:
            weights, scale = weights * scale, 1.0  # a product in the dtype of the weights
        return IndexQueryRows(
            index_q,
            weights,
            self.rope.cos_sin,
            positions,
            scale,
            key_format=record if (record := self.numerics.index_record) in RECORD_KINDS else "plain",
            hadamard=self.numerics.index_hadamard,
            half_split=self.half_split,
            score_dtype=self.score_dtype,
        )

    def needs_topk(self, step: StepMetadata) -> bool:
        """Whether a selection is needed: the block table's pages hold more entries than are selected."""
        return self.table_entries(step) > self.topk

    def candidates(self, step: StepMetadata, tokens: slice) -> CandidateBlocks | None:
        """Blocks of entries to which the selection of these tokens is limited; None: it is not."""
        return None

    def table_entries(self, step: StepMetadata) -> int:
        """Number of entries that fit the pages of the block table: the maximum of a request."""
        meta = step.sparse[self.ratio]
        return meta.block_table.shape[1] * meta.block_size

    @traced("select")
    def select(self, queries: IndexQueries | None, step: StepMetadata, out: Tensor) -> Tensor | None:
        """Writes the entries that each query reads to ``out``. The keys of new tokens must be in the cache.

        Decodes, then prefills: the width of their scores is bounded by the block table, or by the longest prefill.

        Args:
            queries: index queries of all tokens; None if `needs_topk` is false: every visible entry is selected.
            out: int32 ``[T, index_topk]``: entries local to the request, ascending, then -1.

        Returns:
            int32 ``[Dt, index_topk]``, slots of the decode tokens' selected entries; None without index queries.
        """
        meta, pool, num_visible = step.sparse[self.ratio], self.pool, step.entry_counts(self.ratio, self.topk).visible
        if queries is None:
            select_all(num_visible, out)
            return None
        out_slots = out.new_empty(step.num_decode_tokens, out.shape[1])

        def select(tokens: slice, block_table: Tensor, width: int, slots: Tensor | None) -> None:
            if tokens.start < tokens.stop:
                requests = step.token_to_req_indices[tokens]
                keys = PagedIndexKeys(pool.record, pool.tensor, pool.entries, block_table, requests)
                blocks = self.candidates(step, tokens)
                index_select(
                    queries.of(tokens), keys, num_visible[tokens], self.topk, width, out[tokens], slots, blocks
                )

        decodes, num_tokens = step.num_decode_tokens, len(queries.q)
        select(slice(0, decodes), meta.block_table[: step.num_decodes], self.table_entries(step), out_slots)
        longest = int(step.prefill_seq_lens_cpu.max()) // meta.ratio if step.num_prefills else 0
        width = max(1, -(-longest // SCORE_COLUMNS)) * SCORE_COLUMNS
        select(slice(decodes, num_tokens), meta.block_table, width, None)
        return out_slots


def query_linears(wq_b: Linear, indexer: LightningIndexer | None, step: StepMetadata) -> list[Linear]:
    """Projections of the query latent: queries, and index queries unless the indexer selects every entry."""
    if indexer is not None and indexer.needs_topk(step):
        return [wq_b, indexer.wq_b]
    return [wq_b]


def select_all(num_visible: Tensor, out: Tensor) -> None:
    """Writes entries 0 .. ``num_visible[t]`` - 1 of each query to ``out [T, index_topk]``, then -1."""
    column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    out.copy_(torch.where(column < num_visible.unsqueeze(1), column, -1))


class Indexer(LightningIndexer):
    """The indexer of DeepSeek-V4: keys are compressed entries, made by a compressor of its own."""

    def __init__(
        self,
        config: DeepseekV4Base,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, rope, numerics, dtype, device)
        self.ratio = spec.ratio
        self.compressor = Compressor(
            config, spec, self.head_dim, rope, numerics, dtype, device, rotate=numerics.index_hadamard
        )

    def bind(self, pool: Pool, state: Pool | None = None) -> None:
        super().bind(pool)
        self.compressor.bind(pool, state)
