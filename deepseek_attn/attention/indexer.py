"""The lightning indexer: which cached entries a query reads."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.common.norm_rope import apply_rope_half_split
from deepseek_attn.kernels.common.quant import fake_quant_fp4, fake_quant_fp8, hadamard
from deepseek_attn.kernels.indexer import (
    TRITON_HEAD_DIM,
    IndexQueries,
    IndexQueryRows,
    PagedIndexKeys,
    index_query,
    index_scores,
    index_select,
    topk_indices,
)
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.rope import RotaryTable, apply_rope
from deepseek_attn.layers.weights import CheckpointModule

SCORE_BYTES = 64 << 20
"""Most bytes of float32 scores that plain torch holds at a time: a chunk is scored in blocks of queries."""


def queries_per_block(num_entries: int) -> int:
    """Queries that plain torch scores at once against ``num_entries`` keys, within `SCORE_BYTES`; at least one."""
    return max(1, SCORE_BYTES // (4 * max(num_entries, 1)))


class IndexedStep(Protocol):
    """What the indexers of all models read of a step."""

    positions: Tensor

    def freqs_cis_of(self, rope: RotaryTable) -> Tensor: ...


Step = TypeVar("Step", bound=IndexedStep)


class LightningIndexer(CheckpointModule, Generic[Step]):
    """Scores cached keys with small heads of its own and selects the best ``index_topk`` of them for each query.

    ``score[t, e] = sum_h weight[t, h] * relu(q[t, h] . key[e])``, over the entries that query ``t`` may see. All
    attention heads share the selection; the scores are used for nothing else. Subclasses define what a key is.

    Attributes:
        half_split: RoPE rotates the pairs ``(i, i + n)`` of the first channels, not ``(2 i, 2 i + 1)`` of the last.
    """

    half_split = False

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
        self.weights_proj = Linear(config.hidden_size, self.heads, numerics, dtype, device, out_float32=True)
        self.scale = self.head_dim**-0.5 * self.heads**-0.5

    def uses_triton(self, x: Tensor) -> bool:
        """Whether Triton kernels do everything after the projections for tensors like ``x``, or plain torch does."""
        return runs_triton(x) and self.head_dim == TRITON_HEAD_DIM

    def query_rows(self, index_q: Tensor, weights: Tensor, positions: Tensor) -> IndexQueryRows:
        """Argument of the op `index_query`: projected ``index_q [T, heads * head_dim]`` and ``weights [T, heads]``."""
        return IndexQueryRows(
            index_q,
            weights,
            self.rope.cos_sin,
            positions,
            self.scale,
            key_format=self.numerics.index_record,
            hadamard=self.numerics.index_hadamard,
            half_split=self.half_split,
        )

    def select_topk(
        self,
        index_q: Tensor,
        weights: Tensor,
        step: Step,
        out: Tensor,
        out_slots: Tensor | None = None,
        queries: IndexQueries | None = None,
    ) -> None:
        """Writes the selected entries of each query to ``out``. The keys of new tokens must be in the cache.

        Args:
            index_q: ``[T, heads * head_dim]``, projected by ``wq_b``; weights: float32 ``[T, heads]``, projected.
            out: int32 ``[T, index_topk]``: entries local to the request, ascending, then -1.
            out_slots: int32 ``[Dt, index_topk]``, with Triton only: the cache slots that decode tokens select.
            queries: the result of the op `index_query`, where the caller has it already.
        """
        if self.uses_triton(index_q):
            self.select_in_triton(
                queries or index_query(self.query_rows(index_q, weights, step.positions)), step, out, out_slots
            )
        else:
            q = self.rounded_queries(index_q, step.freqs_cis_of(self.rope))
            self.select_in_torch(q, weights * self.scale, step, out)

    @abstractmethod
    def select_in_triton(self, queries: IndexQueries, step: Step, out: Tensor, out_slots: Tensor | None) -> None:
        """`select_topk` by the op `index_select`: nothing waits for the GPU, launches depend on shapes alone."""

    @abstractmethod
    def select_in_torch(self, q: Tensor, weights: Tensor, step: Step, out: Tensor) -> None:
        """`select_topk` in plain torch.

        Args:
            q: ``[T, heads, head_dim]``, of `rounded_queries`; weights: float32 ``[T, heads]``, scaled.
        """

    def rounded_queries(self, index_q: Tensor, freqs_cis: Tensor) -> Tensor:
        """Queries ``[T, heads, head_dim]`` after RoPE and Hadamard matrix, quantised and dequantised."""
        rotate = apply_rope_half_split if self.half_split else apply_rope
        q = rotate(index_q.unflatten(-1, (self.heads, self.head_dim)), freqs_cis)
        if self.numerics.index_hadamard:
            q = hadamard(q)
        if self.numerics.index_record == "fp4":
            return fake_quant_fp4(q)
        if self.numerics.index_record == "fp8":
            return fake_quant_fp8(q, self.head_dim)
        return q

    def select_by_request(
        self,
        q: Tensor,
        weights: Tensor,
        num_visible: Tensor,
        query_starts: list[int],
        num_entries: list[int],
        pool: Pool,
        block_table: Tensor,
        out: Tensor,
    ) -> None:
        """Scores request by request, in blocks of queries, and writes the selection to ``out``, in plain torch.

        Args:
            q, weights: those of `select_in_torch`; num_visible: ``[T]``, entries that a query may see.
            query_starts: first token of each request, and the end; num_entries: entries in the cache, by request.
            pool, block_table: the keys.
        """
        for request, (start, end) in enumerate(pairwise(query_starts)):
            keys = request_entries(pool, block_table[request], num_entries[request], q.dtype)
            block = queries_per_block(len(keys))
            for first in range(start, end, block):
                rows = slice(first, min(first + block, end))
                scores = index_scores(q[rows], keys, weights[rows])
                out[rows] = topk_indices(scores, num_visible[rows], self.topk)


def select_all(num_visible: Tensor, out: Tensor) -> None:
    """Selects every entry: the first ``num_visible [T]`` ones of each query into ``out [T, index_topk]``, then -1."""
    column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    out.copy_(torch.where(column < num_visible.unsqueeze(1), column, -1))


def request_entries(pool: Pool, pages: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first ``count`` entries ``[count, dim]`` of the request with these pages."""
    entries = torch.arange(count, device=pages.device)
    slots = pages.long()[entries // pool.entries] * pool.entries + entries % pool.entries
    return pool.gather(slots, dtype)


class Indexer(LightningIndexer[StepMetadata]):
    """The indexer of DeepSeek-V4: keys are compressed entries, made by a compressor of its own."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, rope, numerics, dtype, device)
        self.spec = spec
        self.compressor = Compressor(
            config, spec, self.head_dim, rope, numerics, dtype, device, rotate=numerics.index_hadamard
        )

    def needs_topk(self, step: StepMetadata) -> bool:
        """Whether a query may see more entries than are selected; with Triton decided without lengths on the CPU."""
        if self.uses_triton(step.positions):
            return self.table_entries(step) > self.topk
        return max(self.num_entries(step)) > self.topk

    def table_entries(self, step: StepMetadata) -> int:
        """Entries that fit the pages of the block table, and so the most that a request can have."""
        meta = step.sparse[self.spec.ratio]
        return meta.block_table.shape[1] * meta.block_size

    def num_entries(self, step: StepMetadata) -> list[int]:
        """Entries that each request has in the cache."""
        meta = step.sparse[self.spec.ratio]
        return (meta.seq_lens_cpu // meta.ratio).tolist()

    def select_in_triton(
        self, queries: IndexQueries, step: StepMetadata, out: Tensor, out_slots: Tensor | None
    ) -> None:
        """Decodes, then prefills: columns of the scores are bounded by the block table, or by the longest prefill."""
        meta, swa, pool = step.sparse[self.spec.ratio], step.swa, self.compressor.pool
        num_visible = step.visible_of(self.spec.ratio)

        def select(rows: slice, block_table: Tensor, width: int, slots: Tensor | None) -> None:
            if rows.start < rows.stop:
                requests = swa.token_to_req_indices[rows]
                keys = PagedIndexKeys(pool.record, pool.tensor, pool.entries, block_table, requests)
                selected = IndexQueries(queries.q[rows], queries.weights[rows])
                index_select(selected, keys, num_visible[rows], self.topk, width, out[rows], slots)

        decodes, tokens = swa.num_decode_tokens, len(queries.q)
        select(slice(0, decodes), meta.block_table[: swa.num_decodes], self.table_entries(step), out_slots)
        longest = int(swa.prefill_seq_lens_cpu.max()) // meta.ratio if swa.num_prefills else 0
        select(slice(decodes, tokens), meta.block_table, longest, None)

    def select_in_torch(self, q: Tensor, weights: Tensor, step: StepMetadata, out: Tensor) -> None:
        meta, starts = step.sparse[self.spec.ratio], step.swa.query_start_loc_cpu.tolist()
        num_visible = step.visible_of(self.spec.ratio)
        self.select_by_request(
            q, weights, num_visible, starts, self.num_entries(step), self.compressor.pool, meta.block_table, out
        )
