"""Attention by FlashMLA: FP8 pages for decode, bf16 rows for prefill, on Hopper and datacenter Blackwell GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.base import AttentionLayer, AttentionSpec, DeepseekV4SparseMLABackend
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention import PagedKeys


class FlashMLAKernels(SplitAttentionImpl):
    """Decode: the FP8 kernel over one or two pools, with sinks. Gathered rows and bf16 caches: the bf16 kernel.

    Notes:
        The decode kernel's schedule depends on shapes and lengths only: the first layer of each kind makes it once per
        step, in ``step.results.schedules``. A graph must be captured with empty results: the schedule is then
        part of the graph, and each replay computes it from the current lengths.
    """

    name = "flashmla"
    batch_dependence = "FlashMLA splits the keys of a query depending on the batch"
    needs_masked_tails = True  # of prefill, and of V3.2's decode kernel

    @classmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        usable, reason = flash_mla.supported(device, spec)
        if usable and spec is not None and spec.kv_record == "plain" and spec.qk_nope_head_dim is None:
            return False, (
                "its decode kernel reads fp8_ds_mla records and the KV record here is 'plain': numerics 'serving' and "
                "'official' store fp8_ds_mla"
            )
        return usable, reason

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        return flash_mla.padded_heads(num_heads)

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        step, first = layer.step, keys[0]
        assert step is not None  # warm-up: no attention
        if first.record.name == "plain":  # V3.2's bf16 cache: a slot is a row
            rows = first.pool.view(q.dtype).view(-1, layer.head_dim)
            return flash_mla.sparse_prefill(
                q, rows, first.indices, layer.scale, layer.attn_sink, first.lens, output, masked_tails=True
            )[0]
        kind = (layer.compress_ratio, layer.index_topk is not None)
        schedule = step.results.schedules.once(kind, flash_mla.new_schedule)
        if first.record.name == "fp8_v4":
            return flash_mla.sparse_decode(q, keys, layer.scale, layer.attn_sink, schedule, output)[0]
        # V3.2's kernel takes no lengths (rows end with -1), and groups the queries of a request
        queries = step.decode_query_len or len(q)
        pages = first._replace(indices=first.indices.unflatten(0, (-1, queries)), lens=None)
        out = None if output is None else output.unflatten(0, (-1, queries))
        q = q.unflatten(0, (-1, queries))
        return flash_mla.sparse_decode(q, [pages], layer.scale, layer.attn_sink, schedule, out)[0].flatten(0, 1)

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        scale, sink = layer.scale, layer.attn_sink
        return flash_mla.sparse_prefill(q, kv, indices, scale, sink, lens, output, masked_tails=True)[0]


class DeepseekV4FlashMLASparseImpl(FlashMLAKernels):
    """DeepSeek-V4 on FlashMLA."""

    backend_cls = DeepseekV4SparseMLABackend
