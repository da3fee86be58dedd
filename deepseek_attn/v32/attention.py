"""DeepSeek-V3's latent attention in absorbed form, sparse behind an indexer (V3.2) or dense (V3, V3.1)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.attention.indexer import QueryProjections, query_linears
from deepseek_attn.cache.pools import CachePools, Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.impls.base import SparseMLAAttentionImpl, selected_entries
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.attention import causal_attention
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.common.quant import QuantizedRows, decode_e8m0
from deepseek_attn.kernels.indexer import IndexQueries, latent_queries
from deepseek_attn.kernels.insert import CacheRows, TokenRows, insert_latents
from deepseek_attn.kernels.latent import (
    LatentQueries,
    LatentWeight,
    ProjectedValues,
    absorb_queries,
    project_values,
)
from deepseek_attn.kernels.latent.types import WEIGHT_BLOCK
from deepseek_attn.layers.linear import Linear, empty_quantized, join_weights, multi_linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.utils.torch_state import in_own_torch_state
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.indexer import TokenIndexer

LATENT_NORM_EPS = 1e-6  # both latents' norms in DeepSeek's own code ignore the config's rms_norm_eps


class LatentProjections(NamedTuple):
    """Projections of the layer's input, in the order of `DeepseekV32MLAAttention.input_linears`.

    Attributes:
        qr: ``[T, q_lora_rank]``, the query latent; kv: ``[T, head_dim]``, the key latent, then the rotary key.
        index_k: ``[T, index_head_dim]``; index_weights: float32 ``[T, index_n_heads]``; None without an indexer.
    """

    qr: Tensor
    kv: Tensor
    index_k: Tensor | None = None
    index_weights: Tensor | None = None


class DeepseekV32MLAAttention(CheckpointModule):
    """Multi-head attention whose keys and values are projected from one latent per token, in absorbed form.

    Per head, a key is ``[W_UK latent ; k_pe]`` and a value ``W_UV latent``. Absorbed, ``W_UK`` is applied to the query
    and ``W_UV`` to the output, so that all heads share the cached row ``[latent ; k_pe]`` as their key. The layer is
    driven by ``impl`` as V4's is (`impls.base.AttentionLayer`): one entry per token, no window, no sinks.

    Attributes:
        prefix: the layer's name, for instance ``layers.2``.
        num_heads: heads of this rank; padded_heads: of the tensors handed to the impl.
        scale: softmax scale, YaRN's mscale included.
        W_UK: ``[num_heads, qk_nope_head_dim, kv_lora_rank]``, W_UV: ``[num_heads, v_head_dim, kv_lora_rank]``: the
            halves of ``wkv_b``, set by `process_weights_after_loading`; on a GPU FP8 where the checkpoint's are.
        input_linears: the projections of the layer's input, in the order of `LatentProjections`.
        kv_cache: the layer's rows, set by `bind_caches`.
        indexer, impl: None for a dense layer, which runs in plain torch.
        topk_indices_buffer: int32 ``[max_num_batched_tokens, index_topk]``, shared by all layers.
        step, decode_topk_slots: set by each call, as in V4's layer.
    """

    attn_sink: None = None
    o_groups = 1
    takes_quantized_heads = False
    swa_cache: None = None
    window_size = 0
    compress_ratio = 1
    W_UK: LatentWeight
    W_UV: LatentWeight
    kv_cache: Pool  # with pools and workspace, set by `bind_caches`
    pools: CachePools
    workspace: Workspace

    def __init__(
        self,
        config: DeepseekV32Config,
        spec: V32LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: type[SparseMLAAttentionImpl] | None,
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.parallel = parallel = parallel or Parallel.single()
        self.spec, self.rope, self.prefix, self.scale = spec, rope, spec.name, config.softmax_scale
        heads = config.num_attention_heads
        self.num_heads = heads // parallel.token_ranks
        self.head_dim, self.value_dim = config.head_dim, config.kv_lora_rank
        self.qk_rope_head_dim, self.qk_nope_head_dim = config.qk_rope_head_dim, config.qk_nope_head_dim
        self.v_head_dim, self.rounds_weights = config.v_head_dim, numerics.rounded_scores
        self.impl = impl if spec.has_indexer else None
        self.padded_heads = self.num_heads if self.impl is None else self.impl.padded_heads(self.num_heads)

        def linear(inputs: int, outputs: int, split: int | None = None) -> Linear:
            shard = None if split is None else parallel.token_shard(split, (outputs, inputs)[split])
            return Linear(inputs, outputs, numerics, dtype, device, shard=shard)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, device)
        self.wq_b = linear(config.q_lora_rank, heads * config.qk_head_dim, split=0)
        self.wkv_a = linear(config.hidden_size, self.head_dim)
        self.kv_norm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS, device)
        self.wkv_b = linear(config.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), split=0)
        self.wo = linear(heads * self.v_head_dim, config.hidden_size, split=1)
        self.indexer = TokenIndexer(config, rope, numerics, dtype, device) if spec.has_indexer else None
        self.input_linears = [self.wq_a, self.wkv_a]
        if self.indexer is not None:
            self.input_linears += [self.indexer.wk, self.indexer.weights_proj]
        self.index_topk = None if self.indexer is None else self.indexer.topk
        self.step: StepMetadata | None = None
        self.topk_indices_buffer: Tensor | None = None
        self.decode_topk_slots: Tensor | None = None
        self.prefill_workspace_rows = 0

    @property
    def backend_name(self) -> str:
        """Name of the impl; dense layers (no indexer) run in plain torch only."""
        return "reference" if self.impl is None else self.impl.name

    def process_weights_after_loading(self) -> None:
        """Takes ``W_UK`` and ``W_UV`` out of ``wkv_b``, and joins the weights of `input_linears`.

        Where Triton runs, a weight whose blocks belong to one head's half each stays FP8: half the bytes of a decode
        step. Any other is dequantised, as the layer's result for the identity matrix, whose rows FP8 keeps exactly.
        """
        wkv_b, weight, scale = self.wkv_b, self.wkv_b.weight.detach(), self.wkv_b.scale
        if scale is not None and runs_triton(weight) and self.keeps_fp8(weight):
            weight, scale = weight.contiguous(), decode_e8m0(scale.detach())
        elif scale is not None:
            with torch.no_grad():
                weight = wkv_b(torch.eye(wkv_b.in_features, dtype=torch.float32, device=weight.device)).t()
            scale = None
        self.W_UK, self.W_UV = self.halves(weight if scale is not None else weight.to(wkv_b.dtype).contiguous(), scale)
        wkv_b.drop()
        join_weights(self.input_linears)

    def keeps_fp8(self, weight: Tensor) -> bool:
        """Whether blocks of a quantised ``wkv_b`` are of one head's keys or values each."""
        sizes = (self.qk_nope_head_dim, self.v_head_dim, self.value_dim)
        return weight.dtype == torch.float8_e4m3fn and not any(size % WEIGHT_BLOCK for size in sizes)

    def halves(self, weight: Tensor, scale: Tensor | None) -> tuple[LatentWeight, LatentWeight]:
        """Views of ``wkv_b [num_heads * (nope + v_head_dim), kv_lora_rank]`` and of its scales: keys, values."""
        nope, rows = self.qk_nope_head_dim, weight.unflatten(0, (self.num_heads, -1))
        if scale is None:
            return LatentWeight(rows[:, :nope]), LatentWeight(rows[:, nope:])
        blocks, scales = nope // WEIGHT_BLOCK, scale.unflatten(0, (self.num_heads, -1))
        return LatentWeight(rows[:, :nope], scales[:, :blocks]), LatentWeight(rows[:, nope:], scales[:, blocks:])

    def bind_caches(
        self,
        pools: CachePools,
        workspace: Workspace,
        topk_indices_buffer: Tensor | None,
        prefill_workspace_rows: int,
    ) -> None:
        """Gives the layer its pools and the scratch memory it shares with other layers."""
        self.pools, self.workspace, self.prefill_workspace_rows = pools, workspace, prefill_workspace_rows
        self.kv_cache = pools[self.prefix, "latent"]
        if self.indexer is not None:
            self.indexer.bind(pools[self.prefix, "index"])
            self.topk_indices_buffer = topk_indices_buffer

    @traced("attention")
    @in_own_torch_state
    def forward(self, x: Tensor, positions: Tensor, step: StepMetadata) -> Tensor:
        """Attention of new tokens over all cached tokens of their requests, the new ones included.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of all requests, concatenated.
            positions: int64 ``[T]``.
            step: metadata of the batch.

        Returns:
            ``[T, hidden_size]`` in the dtype of ``x``.
        """
        if step.batch is not None:
            step.batch.begin(self.prefix, self.pools, x, positions)
        self.step = step
        with stage("project"):
            inputs = LatentProjections(*multi_linear(x, self.input_linears))
        linears = query_linears(self.wq_b, self.indexer, step)
        qr_fp8 = empty_quantized(inputs.qr, linears)
        qr = self.insert(inputs, positions, step, qr_fp8)
        with stage("project"):
            # without a name, projections are freed before attention takes memory: they are as large as the queries
            query, index_queries = self.queries(multi_linear(qr, linears, qr_fp8), inputs.index_weights, positions)
        if self.indexer is not None:
            selected = selected_entries(self, 0, len(step.positions))
            self.decode_topk_slots = self.indexer.select(index_queries, step, selected)
            if step.on_selection is not None:
                self.decode_topk_slots = step.on_selection(self.spec.index, selected, self.decode_topk_slots)
        with stage("attend"):
            if self.impl is None:
                latents = self.attend_to_all(query, step)
            else:
                latents = self.impl.forward_mqa(self, query, inputs.kv, positions)
        if step.observer is not None:
            step.observer(AttentionCall(self.prefix, query, inputs.kv, latents, index_queries))
        with stage("output"):
            values, values_fp8 = self.values(latents)
            (y,) = multi_linear(values, [self.wo], values_fp8)
        return self.parallel.sum(y)

    @traced("insert")
    def insert(
        self, inputs: LatentProjections, positions: Tensor, step: StepMetadata, qr_fp8: QuantizedRows | None
    ) -> Tensor:
        """Writes the new tokens to all caches. Returns the normed query latent, which ``qr_fp8`` receives in FP8."""
        slots, index = step.sparse[1].slot_mapping, None
        if self.indexer is not None and inputs.index_k is not None:
            index = self.indexer.key_rows(inputs.index_k, slots)
        tokens = TokenRows(
            qr=inputs.qr,
            kv=inputs.kv,
            q_weight=self.q_norm.weight,
            kv_weight=self.kv_norm.weight,
            eps=LATENT_NORM_EPS,
            cos_sin=self.rope.cos_sin,
            positions=positions,
            cache=CacheRows(self.kv_cache.record, self.kv_cache.tensor, self.kv_cache.entries, slots),
            qr_fp8=qr_fp8,
        )
        return insert_latents(tokens, index)

    def latent_queries(self, q: Tensor, positions: Tensor) -> LatentQueries:
        """Projected queries ``[T, num_heads * qk_head_dim]`` as the ops take them, padded to ``padded_heads``."""
        return LatentQueries(q, self.W_UK, self.rope.cos_sin, positions, self.padded_heads)

    def absorb(self, q: Tensor, positions: Tensor) -> Tensor:
        """Absorbed queries ``[T, padded_heads, head_dim]`` of ``q [T, num_heads * qk_head_dim]``, as projected."""
        return absorb_queries(self.latent_queries(q, positions))

    def queries(
        self, projections: list[Tensor], index_weights: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, IndexQueries | None]:
        """Absorbed queries, and the indexer's if it has to select."""
        projected = QueryProjections(*projections)
        if self.indexer is None or projected.index_q is None or index_weights is None:
            return self.absorb(projected.q, positions), None
        index = self.indexer.query_rows(projected.index_q, index_weights, positions)
        return latent_queries(self.latent_queries(projected.q, positions), index)

    def project_values(self, latents: Tensor) -> Tensor:
        """Values ``[T, num_heads * v_head_dim]`` of attended latents ``[T, padded_heads, kv_lora_rank]``."""
        return project_values(latents, self.W_UV).values

    def values(self, latents: Tensor) -> ProjectedValues:
        """`project_values`, quantised for ``wo`` where that takes FP8 inputs and costs no launch."""
        pow2_scales = self.wo.input_format.pow2_scales if self.wo.segment.reads_fp8 else None
        return project_values(latents, self.W_UV, pow2_scales)

    def attend_to_all(self, query: Tensor, step: StepMetadata) -> Tensor:
        """Attention over every token up to the query's own (V3): ``[T, heads, kv_lora_rank]``.

        Padding rows are at the end of their request.
        """
        outputs, table = [], step.sparse[1].block_table
        lengths, tokens = step.seq_lens_cpu.tolist(), step.is_valid_token.cpu()
        for request, (start, end) in enumerate(pairwise(step.query_start_loc_cpu.tolist())):
            padding = int((~tokens[start:end]).sum())
            keys = self.kv_cache.gather_request(table[request], lengths[request] - padding, query.dtype)
            keys = F.pad(keys, (0, 0, 0, padding))
            outputs.append(causal_attention(query[start:end], keys, self.scale, self.value_dim))
        return torch.cat(outputs)
