"""Control flow shared by impls: decode queries read cache pages in place, prefill queries read gathered keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from deepseek_attn.cache.pools import Pool
from deepseek_attn.impls.base import AttentionLayer, SparseMLAAttentionImpl, selected_entries
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.prefill import PrefillChunk, gather_keys, merged_indices, plan_prefill_chunks
from deepseek_attn.impls.queries import AttentionQueries
from deepseek_attn.kernels.attention import PagedKeys, attend_raw_q
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.indices import compute_global_topk_indices_and_lens


class SplitAttentionImpl(SparseMLAAttentionImpl):
    """Splits decode from prefill, and prefill into chunks of requests that fit the workspace.

    A subclass attends over pages (`attend_pages`) and over gathered rows (`attend_rows`). If one call covers all
    tokens, it also allocates the output tensor; several calls write to rows of one tensor.

    Attributes:
        fused_records: cache records for which `kernels.attention.attend_raw_q` is at least as fast as `attend_pages`
            with the ops around it.
    """

    fused_records: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        """`sparse_attention_paged` with the layer's scale and sinks: over the window, then compressed entries.

        Args:
            q, output: ``[T, padded_heads, head_dim]`` with ``T`` at least 1.
            keys: of each part, ``record.gather(pool, entries, slots, dtype)`` gives the values in plain torch.

        Returns:
            ``output``; by default a new tensor of the same shape and dtype.
        """

    @classmethod
    @abstractmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        """`sparse_attention` with the layer's scale and sinks over rows of ``kv [N, head_dim]``.

        Args:
            indices: int32 ``[T, K]``; lens: int32 ``[T]``, the leading columns that count. The columns past them hold
                -1; in tests of impls without ``needs_masked_tails`` they hold anything. Rows without an index may
                hold anything.
            q, output: as in `attend_pages`, and so is the result.
        """

    @classmethod
    def fuses_query_norm_rope(cls, layer: AttentionLayer) -> bool:
        """True in steps that read only pages of `fused_records`, unless a subclass overrides `forward_mqa`.

        False with an observer, which needs heads that are not quantised. False in batch-invariant steps: the fused norm
        sums squares in another order than the norm of steps with a prefill.
        """
        step, pool = layer.step, layer.swa_cache
        if pool is None or pool.record.name not in cls.fused_records or step is None or step.observer is not None:
            return False
        inherited = cls.forward_mqa.__func__ is SplitAttentionImpl.forward_mqa.__func__
        pages_only = step.num_decode_tokens == len(step.positions)
        return inherited and pages_only and layer.takes_quantized_heads and not batch_invariant()

    @classmethod
    def attend_raw(cls, layer: AttentionLayer, queries: AttentionQueries) -> QuantizedRows:
        assert layer.step is not None  # a warm-up does not attend
        keys = cls._decode_keys(layer, layer.step)
        return attend_raw_q(queries.raw, keys, layer.scale, layer.attn_sink, layer.o_groups, queries.q)

    @classmethod
    def forward_mqa(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor | None = None
    ) -> Tensor:
        step, shape = layer.step, (*q.shape[:2], layer.value_dim)
        if output is not None and (output.shape != shape or output.dtype != q.dtype):
            raise ValueError(f"output must be {shape} {q.dtype}: got {tuple(output.shape)} {output.dtype}")
        if step is None:  # warm-up: reserves the largest workspace of any step of this layer
            layer.workspace.get(((layer.prefill_workspace_rows, layer.head_dim), q.dtype))
            return q.new_zeros(shape) if output is None else output.zero_()
        decodes = step.num_decode_tokens
        if decodes == len(q):
            return cls.attend_pages(layer, q, cls._decode_keys(layer, step), output)
        if not decodes:
            return cls._forward_prefill(layer, step, q, output)
        output = q.new_empty(shape) if output is None else output
        cls._forward_prefill(layer, step, q[decodes:], output[decodes:])
        cls.attend_pages(layer, q[:decodes], cls._decode_keys(layer, step), output[:decodes])
        return output

    @classmethod
    def _decode_keys(cls, layer: AttentionLayer, step: StepMetadata) -> list[PagedKeys]:
        """Keys of decode queries: in pages of the window, and in pages of entries."""
        keys = []
        if layer.swa_cache is not None and (swa := step.swa) is not None:
            keys.append(_paged_keys(layer.swa_cache, swa.decode_swa_indices.squeeze(1), swa.decode_swa_lens))
        if layer.kv_cache is not None:
            keys.append(_paged_keys(layer.kv_cache, *decode_topk(layer, step)))
        return keys

    @classmethod
    def _forward_prefill(cls, layer: AttentionLayer, step: StepMetadata, q: Tensor, output: Tensor | None) -> Tensor:
        """Prefill in chunks of requests; the requests of a chunk share the workspace."""
        seq_lens, gather_lens = step.prefill_seq_lens_cpu, step.prefill_gather_lens_cpu
        if not layer.window_size:
            gather_lens = torch.zeros_like(gather_lens)
        chunks = plan_prefill_chunks(seq_lens, gather_lens, layer.compress_ratio, layer.prefill_workspace_rows)
        if len(chunks) == 1:
            return cls._prefill_chunk(layer, step, chunks[0], slice(0, len(q)), q, output)
        output = q.new_empty(*q.shape[:2], layer.value_dim) if output is None else output
        query_starts = (step.query_start_loc_cpu[step.num_decodes :] - step.num_decode_tokens).tolist()
        for chunk in chunks:
            tokens = slice(query_starts[chunk.first], query_starts[chunk.last])
            if tokens.start < tokens.stop:
                cls._prefill_chunk(layer, step, chunk, tokens, q[tokens], output[tokens])
        return output

    @classmethod
    def _prefill_chunk(
        cls, layer: AttentionLayer, step: StepMetadata, chunk: PrefillChunk, rows: slice, q: Tensor, out: Tensor | None
    ) -> Tensor:
        """Gathers the keys of a chunk into the workspace and attends over them; ``rows``: its prefill tokens."""
        (kv,) = layer.workspace.get(((len(chunk), chunk.rows_per_request, layer.head_dim), q.dtype))
        gather_keys(layer, step, chunk, kv)
        return cls.attend_rows(layer, q, kv.view(-1, layer.head_dim), *merged_indices(layer, step, chunk, rows), out)


def _paged_keys(pool: Pool, indices: Tensor, lens: Tensor) -> PagedKeys:
    return PagedKeys(pool.record, pool.tensor, pool.entries, indices, lens)


def decode_topk(layer: AttentionLayer, step: StepMetadata) -> tuple[Tensor, Tensor]:
    """Slots ``[Dt, K]`` and counts ``[Dt]`` of the entries that decode queries read."""
    sparse, tokens = step.sparse[layer.compress_ratio], step.num_decode_tokens
    if layer.index_topk is None:
        return sparse.decode_entries
    if layer.decode_topk_slots is not None:
        counts = step.entry_counts(layer.compress_ratio, layer.index_topk)
        return layer.decode_topk_slots, counts.selected[:tokens]
    selected, requests = selected_entries(layer, 0, tokens), step.token_to_req_indices[:tokens]
    return compute_global_topk_indices_and_lens(
        selected, requests, sparse.block_table, sparse.block_size, step.is_valid_token[:tokens]
    )
