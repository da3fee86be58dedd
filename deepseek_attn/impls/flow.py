"""The flow that impls share: decode rows read the pages, prefill rows read keys gathered into the workspace."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_attn.cache.pools import Pool
from deepseek_attn.impls.base import DeepseekV4SparseMLAAttentionImpl
from deepseek_attn.kernels.reference.gather import dequantize_and_gather_k_cache
from deepseek_attn.kernels.reference.indices import combine_topk_swa_indices, compute_global_topk_indices_and_lens

if TYPE_CHECKING:
    from deepseek_attn.attention import DeepseekV4MLAAttention


@dataclass(frozen=True)
class PagedKeys:
    """Keys that each of ``T`` queries reads from one pool.

    Attributes:
        indices: int32 ``[T, K]`` slots, -1 for none; lens: int32 ``[T]`` columns to look at.
    """

    pool: Pool
    indices: torch.Tensor
    lens: torch.Tensor

    def as_source(self) -> tuple:
        """``(record, pool, n, indices, lens)``, as `sparse_attention_paged` takes it."""
        return self.pool.record, self.pool.tensor, self.pool.entries, self.indices, self.lens


class SplitAttentionImpl(DeepseekV4SparseMLAAttentionImpl):
    """Splits decode from prefill, chunks prefill to the workspace, merges window and compressed keys.

    A subclass says how to attend: over pages (`attend_pages`) and over gathered rows (`attend_rows`). It may also
    replace the three ops below with faster ones of the same signature.
    """

    gather = staticmethod(dequantize_and_gather_k_cache)
    merge_indices = staticmethod(combine_topk_swa_indices)
    global_indices = staticmethod(compute_global_topk_indices_and_lens)

    @classmethod
    @abstractmethod
    def attend_pages(
        cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, sources: list[PagedKeys], output: torch.Tensor
    ) -> None:
        """One softmax, with the layer's sinks, over the keys of all ``sources``: the window, then compressed entries.

        Args:
            q, output: ``[T, padded_heads, head_dim]`` with ``T`` at least 1. A query without any key gets zeros.
        """

    @classmethod
    @abstractmethod
    def attend_rows(
        cls,
        layer: DeepseekV4MLAAttention,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lens: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """The same over rows of ``kv [N, head_dim]``: ``indices`` int32 ``[T, K]`` of which ``lens [T]`` count.

        Indices past a row's length may name any row; rows that no valid index names hold anything.
        """

    @classmethod
    def forward_mqa(cls, layer, q, kv, positions, output) -> None:
        if output.shape != q.shape or output.dtype != q.dtype:
            raise ValueError(
                f"output must be like q, {tuple(q.shape)} {q.dtype}: got {tuple(output.shape)} {output.dtype}"
            )
        if layer.step is None:
            cls._reserve(layer, q.dtype)
            output.zero_()
            return
        swa = layer.step.swa
        decode = swa.num_decode_tokens
        if swa.num_prefill_tokens:
            cls._forward_prefill(layer, q[decode:], output[decode:])
        if decode:
            cls._forward_decode(layer, q[:decode], output[:decode])

    @classmethod
    def _reserve(cls, layer: DeepseekV4MLAAttention, dtype: torch.dtype) -> None:
        """Warm-up: the largest workspace any step of this layer can need."""
        layer.workspace.get(((cls.PREFILL_CHUNK_SIZE, layer.workspace_rows(), layer.head_dim), dtype))

    @classmethod
    def _forward_decode(cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, output: torch.Tensor) -> None:
        """One softmax over the window's pages and the compressed pages, straight from the pools."""
        swa = layer.step.swa
        sources = [PagedKeys(layer.swa_cache, swa.decode_swa_indices.squeeze(1), swa.decode_swa_lens)]
        if layer.compress_ratio:
            sources.append(PagedKeys(layer.kv_cache, *cls._decode_topk(layer)))
        cls.attend_pages(layer, q, sources, output)

    @classmethod
    def _decode_topk(cls, layer: DeepseekV4MLAAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots ``[Dt, K]`` and counts ``[Dt]`` of the compressed entries that decode queries read."""
        swa, meta = layer.step.swa, layer.step.sparse[layer.compress_ratio]
        if layer.indexer is None:
            return meta.c128a_global_decode_topk_indices.squeeze(1), meta.c128a_decode_topk_lens
        tokens = swa.num_decode_tokens
        if layer.decode_topk_slots is not None:
            return layer.decode_topk_slots, layer.step.selected_of(layer.compress_ratio, layer.indexer.topk)[:tokens]
        return cls.global_indices(
            layer.topk_indices_buffer[:tokens],
            swa.token_to_req_indices[:tokens],
            meta.block_table,
            meta.block_size,
            swa.is_valid_token[:tokens],
        )

    @classmethod
    def _forward_prefill(cls, layer: DeepseekV4MLAAttention, q: torch.Tensor, output: torch.Tensor) -> None:
        """Gathers keys into the workspace, as many requests at once as fit, and attends over their rows."""
        swa, ratio = layer.step.swa, layer.compress_ratio
        topk = cls._prefill_topk(layer)
        starts = (swa.query_start_loc_cpu[swa.num_decodes :] - swa.num_decode_tokens).tolist()
        capacity = cls.PREFILL_CHUNK_SIZE * layer.workspace_rows()
        for chunk in plan_prefill_chunks(swa.prefill_seq_lens_cpu, swa.prefill_gather_lens_cpu, ratio, capacity):
            requests = slice(chunk.first, chunk.last)
            batch = slice(swa.num_decodes + chunk.first, swa.num_decodes + chunk.last)
            rows = slice(starts[chunk.first], starts[chunk.last])
            if rows.start == rows.stop:
                continue
            shape = (chunk.last - chunk.first, chunk.N + chunk.window_rows, layer.head_dim)
            (kv,) = layer.workspace.get((shape, q.dtype))
            cls._gather(layer, kv, requests, batch, chunk.N)
            indices, lens = cls.merge_indices(
                topk[rows],
                swa.query_start_loc[batch.start : batch.stop + 1],
                swa.prefill_seq_lens[requests],
                swa.prefill_gather_lens[requests],
                layer.window_size,
                ratio,
                topk.shape[1],
                shape[1],
                chunk.N,
            )
            lens = torch.where(swa.is_valid_token[swa.num_decode_tokens :][rows], lens, 0)
            cls.attend_rows(layer, q[rows], kv.view(-1, layer.head_dim), indices, lens, output[rows])

    @classmethod
    def _prefill_topk(cls, layer: DeepseekV4MLAAttention) -> torch.Tensor:
        """Entries ``[Rt, K]``, local to their request, that prefill queries read; ``K`` is 0 for window-only layers."""
        swa = layer.step.swa
        if not layer.compress_ratio:
            return torch.empty(swa.num_prefill_tokens, 0, dtype=torch.int32, device=swa.slot_mapping.device)
        if layer.indexer is None:
            return layer.step.sparse[layer.compress_ratio].c128a_prefill_topk_indices
        first = swa.num_decode_tokens
        return layer.topk_indices_buffer[first : first + swa.num_prefill_tokens]

    @classmethod
    def _gather(cls, layer: DeepseekV4MLAAttention, kv: torch.Tensor, requests: slice, batch: slice, N: int) -> None:
        """Rows [0, N) of each request: its compressed entries; rows from N on: the end of its window cache."""
        swa, pool = layer.step.swa, layer.swa_cache
        seq_lens, gather_lens = swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]
        if layer.compress_ratio:
            meta, entries = layer.step.sparse[layer.compress_ratio], layer.kv_cache
            cls.gather(
                kv,
                entries.record,
                entries.tensor,
                seq_lens // layer.compress_ratio,
                None,
                meta.block_table[batch],
                meta.block_size,
                0,
            )
        cls.gather(kv, pool.record, pool.tensor, seq_lens, gather_lens, swa.block_table[batch], swa.block_size, N)


@dataclass(frozen=True)
class PrefillChunk:
    """Prefill requests ``first`` to ``last`` (exclusive) share the workspace.

    Attributes:
        N: rows for compressed entries per request; window_rows: rows for window keys behind them.
    """

    first: int
    last: int
    N: int
    window_rows: int


def plan_prefill_chunks(
    seq_lens: torch.Tensor, gather_lens: torch.Tensor, ratio: int, capacity: int
) -> list[PrefillChunk]:
    """Groups consecutive requests so that ``requests * (N + window_rows)`` stays within ``capacity`` rows.

    ``N`` and ``window_rows`` are the largest of the group, so short requests are not sized by ``max_model_len``. A
    request alone always fits the reserved workspace.
    """
    chunks: list[PrefillChunk] = []
    for index, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        alone = PrefillChunk(index, index + 1, seq_len // ratio if ratio else 0, gather_len)
        if chunks:
            last = chunks[-1]
            merged = PrefillChunk(last.first, index + 1, max(last.N, alone.N), max(last.window_rows, alone.window_rows))
            if (merged.last - merged.first) * (merged.N + merged.window_rows) <= capacity:
                chunks[-1] = merged
                continue
        chunks.append(alone)
    return chunks
