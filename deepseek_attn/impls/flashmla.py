"""The FlashMLA impl: FP8 pages for decode, bf16 rows for prefill, on Hopper and datacenter Blackwell GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.base import AttentionLayer, AttentionSpec
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.kernels.attention import PagedKeys


class DeepseekV4FlashMLASparseImpl(SplitAttentionImpl):
    """Decode: one FP8 kernel over window and compressed pools, with sinks. Prefill: gather, merge, bf16 kernel.

    Notes:
        The decode kernel's schedule depends on shapes and lengths only: the first layer of each kind makes it once per
        step, in ``step.swa.tile_scheds``. A graph must be captured with an empty ``tile_scheds``: the schedule is then
        part of the graph, and a replay makes it from its own lengths.
    """

    name = "flashmla"

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        usable, reason = flash_mla.supported(device, spec)
        if usable and spec is not None and spec.kv_record != "fp8_v4":
            return False, (
                f"its decode kernel reads fp8_ds_mla records and the KV record here is {spec.kv_record!r}: numerics "
                "'serving' and 'official' store fp8_ds_mla"
            )
        return usable, reason

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        return flash_mla.padded_heads(num_heads)

    @classmethod
    def attend_pages(cls, layer: AttentionLayer, q: Tensor, keys: list[PagedKeys], output: Tensor | None) -> Tensor:
        assert layer.step is not None  # a warm-up does not attend
        schedules, kind = layer.step.swa.tile_scheds, (layer.compress_ratio, layer.index_topk is not None)
        if kind not in schedules:
            schedules[kind] = flash_mla.new_schedule()
        return flash_mla.sparse_decode(q, keys, layer.scale, layer.attn_sink, schedules[kind], output)[0]

    @classmethod
    def attend_rows(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
    ) -> Tensor:
        scale, sink = layer.scale, layer.attn_sink
        return flash_mla.sparse_prefill(q, kv, indices, scale, sink, lens, output, masked_tails=True)[0]
