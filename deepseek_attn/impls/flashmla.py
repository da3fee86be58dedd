"""The FlashMLA impl: FP8 pages for decode, bf16 rows for prefill, on Hopper and datacenter Blackwell GPUs."""

from __future__ import annotations

import torch

from deepseek_attn.impls import flash_mla, ops
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl


class DeepseekV4FlashMLASparseImpl(SplitAttentionImpl):
    """Decode: one FP8 kernel over window and compressed pools, with sinks. Prefill: gather, merge, bf16 kernel.

    Notes:
        The plan of the decode kernel depends on shapes and lengths only, so it is made once per step by the first layer
        of each kind and kept in ``step.swa.tile_scheds``. To capture a graph, start with an empty ``tile_scheds``: the
        plan is then part of the graph, and a replay plans from the lengths it finds.
    """

    name = "flashmla"
    gather = staticmethod(ops.dequantize_and_gather_k_cache)
    merge_indices = staticmethod(ops.combine_topk_swa_indices)
    global_indices = staticmethod(ops.compute_global_topk_indices_and_lens)

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        usable, reason = flash_mla.supported(device, spec)
        if usable and spec is not None and spec.kv_record != "fp8_ds_mla":
            return False, (
                f"its decode kernel reads fp8_ds_mla records and the KV record here is {spec.kv_record!r}: numerics "
                "'serving' and 'official' store fp8_ds_mla"
            )
        return usable, reason

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        return flash_mla.padded_heads(num_heads)

    @classmethod
    def attend_pages(cls, layer, q, sources, output) -> torch.Tensor:
        schedules = layer.step.swa.tile_scheds
        kind = (layer.compress_ratio, layer.indexer is not None)
        if kind not in schedules:
            schedules[kind] = flash_mla.new_schedule()
        pages = [flash_mla.Pages(s.pool.tensor, s.pool.entries, s.indices, s.lens) for s in sources]
        return flash_mla.sparse_decode(q, pages, layer.scale, layer.attn_sink, schedules[kind], output)[0]

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output) -> torch.Tensor:
        return flash_mla.sparse_prefill(q, kv, indices, layer.scale, layer.attn_sink, lens, output, no_tails=True)[0]
