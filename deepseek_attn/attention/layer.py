"""The V4 attention layer: project, insert into the caches, select entries, attend, project the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.attention.compressor import Compressor
from deepseek_attn.attention.indexer import Indexer, QueryProjections, query_linears
from deepseek_attn.cache.pools import CachePools, Pool
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.impls.base import SparseMLAAttentionImpl, selected_entries
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.queries import AttentionQueries
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.indexer import IndexQueries, queries
from deepseek_attn.kernels.insert import (
    CacheRows,
    CompressPart,
    LatentAndKey,
    RawQueries,
    TokenRows,
    insert_tokens,
)
from deepseek_attn.kernels.linear.formats import FP8_INPUT_GROUP
from deepseek_attn.layers.linear import GroupedLinear, Linear, empty_quantized, join_weights, multi_linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm, Shard
from deepseek_attn.utils.torch_state import in_own_torch_state
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.utils.workspace import Workspace


class InputProjections(NamedTuple):
    """Projections of the layer's input.

    Attributes:
        qr: ``[T, q_lora_rank]``, the query latent; kv: ``[T, head_dim]``, the key, which is also the value.
        compressors: the layer's compressor and its indexer's, each with its values and gate scores; may be empty.
        index_weights: float32 ``[T, index_n_heads]``; None without an indexer.
    """

    qr: Tensor
    kv: Tensor
    compressors: list[CompressPart]
    index_weights: Tensor | None


@dataclass
class LayerQueries(AttentionQueries):
    """Queries of attention and of the indexer.

    Attributes:
        index: the indexer's queries; None without an indexer, or if it selects every entry.
    """

    index: IndexQueries | None = None


class DeepseekV4MLAAttention(CheckpointModule):
    """Multi-query attention with one shared key/value vector per token, over a window and compressed entries.

    The layer owns its caches: ``swa_cache`` (the last ``sliding_window`` tokens) and, for a compress ratio above 0,
    ``kv_cache`` (one entry per ``ratio`` tokens). It fills them, then hands the queries to ``impl.attend``.

    Attributes:
        prefix: the layer's name in the checkpoint, for instance ``layers.2``.
        compress_ratio: tokens per compressed entry; 0 for a layer that reads the window only.
        window_size: keys in the sliding window, the query's own included.
        scale: softmax scale, ``head_dim ** -0.5`` (YaRN does not change it).
        rounds_weights: see `AttentionLayer`.
        num_heads, o_groups: heads and output groups of this rank; keys and indexers are the same on all ranks.
        attn_sink: float32 ``[heads]``, a logit per head that joins the softmax denominator only.
        padded_heads: heads of the tensors handed to the impl.
        compressors: the layer's own, then its indexer's; input_linears: the projections of the layer's input, in the
            order in which `project` takes their results.
        topk_indices_buffer: int32 ``[max_num_batched_tokens, index_topk]``, entries that the indexer selected; None
            without one.
        prefill_workspace_rows: rows of gathered keys that the workspace holds; 0 if prefill reads pages in place.
        takes_quantized_heads: see `AttentionLayer`; set by `process_weights_after_loading`.
        step: metadata of the running step; None while warming up. This, ``decode_topk_slots`` and the content of
            ``topk_indices_buffer`` are all that a call sets; impls read them (`impls.base.AttentionLayer`).
        decode_topk_slots: int32 ``[Dt, index_topk]``, slots of the entries that decode tokens selected; None if only
            ``topk_indices_buffer`` is filled.
    """

    attn_sink: Tensor
    swa_cache: Pool  # with pools and workspace, set by `bind_caches`
    pools: CachePools
    workspace: Workspace

    def __init__(
        self,
        config: DeepseekV4Base,
        spec: LayerSpec,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: type[SparseMLAAttentionImpl],
        parallel: Parallel | None = None,
    ):
        super().__init__(device)
        self.spec, self.rope, self.impl = spec, rope, impl
        self.parallel = parallel = parallel or Parallel.single()
        self.prefix, self.compress_ratio = spec.name, spec.ratio
        heads, groups, ranks = config.num_attention_heads, config.o_groups, parallel.token_ranks
        self.num_heads, self.o_groups = heads // ranks, groups // ranks
        self.head_dim, self.value_dim, self.eps = config.head_dim, config.head_dim, config.rms_norm_eps
        self.window_size, self.scale = config.sliding_window, config.softmax_scale
        self.rounds_weights = numerics.rounded_scores
        self.padded_heads = impl.padded_heads(self.num_heads)
        width, shard = heads * self.head_dim, parallel.token_shard

        def linear(inputs: int, outputs: int, shard: Shard | None = None) -> Linear:
            return Linear(inputs, outputs, numerics, dtype, device, shard=shard)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps, device)
        self.wq_b = linear(config.q_lora_rank, width, shard(0, width))
        self.wkv = linear(config.hidden_size, self.head_dim)
        self.kv_norm = RMSNorm(self.head_dim, self.eps, device)
        inner = groups * config.o_lora_rank
        self.wo_a = GroupedLinear(groups, width // groups, config.o_lora_rank, numerics, dtype, device, shard(0, inner))
        self.wo_b = linear(inner, config.hidden_size, shard(1, inner))
        self.declare("attn_sink", (heads,), torch.float32, shard=shard(0, heads))
        self.input_linears = [self.wq_a, self.wkv]
        self.make_entry_modules(config, rope, numerics, dtype, device)
        self.step: StepMetadata | None = None
        self.kv_cache: Pool | None = None
        self.topk_indices_buffer: Tensor | None = None
        self.decode_topk_slots: Tensor | None = None
        self.prefill_workspace_rows = 0
        self.takes_quantized_heads = False

    def make_entry_modules(
        self,
        config: DeepseekV4Base,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Makes compressor and indexer, appends their projections to `input_linears`, and sets ``index_topk``."""
        spec = self.spec
        self.compressor = None
        self.indexer = None
        if not spec.swa_only:
            self.compressor = Compressor(config, spec, self.head_dim, rope, numerics, dtype, device)
        if spec.has_indexer:
            self.indexer = Indexer(config, spec, rope, numerics, dtype, device)
        self.compressors = [self.compressor] if self.compressor is not None else []
        self.compressors += [self.indexer.compressor] if self.indexer is not None else []
        for compressor in self.compressors:
            self.input_linears += [compressor.wkv, compressor.wgate]
        self.input_linears += [self.indexer.weights_proj] if self.indexer is not None else []
        self.index_topk = None if self.indexer is None else self.indexer.topk

    def process_weights_after_loading(self) -> None:
        """Joins the weights of `input_linears`, so that one GEMM can compute all. Sets `takes_quantized_heads`."""
        join_weights(self.input_linears)
        whole = self.padded_heads == self.num_heads and self.head_dim % FP8_INPUT_GROUP == 0
        self.takes_quantized_heads = whole and self.wo_a.takes_quantized_heads

    def bind_caches(
        self,
        pools: CachePools,
        workspace: Workspace,
        topk_indices_buffer: Tensor | None,
        prefill_workspace_rows: int,
    ) -> None:
        """Gives the layer its window, the pools of the layer that makes its entries, and shared scratch memory."""
        self.pools, self.workspace, self.prefill_workspace_rows = pools, workspace, prefill_workspace_rows
        owner = self.spec.entry_owner
        self.swa_cache, self.kv_cache = pools[self.prefix, "window"], pools.get(owner, "compressed")
        if self.compressor is not None:
            self.compressor.bind(pools[owner, "compressed"], pools.get(owner, "state"))
        if self.indexer is not None:
            self.indexer.bind(pools[owner, "index"], pools.get(owner, "index_state"))
        if self.index_topk is not None:
            self.topk_indices_buffer = topk_indices_buffer

    @property
    def backend_name(self) -> str:
        """Name of the impl."""
        return self.impl.name

    @traced("attention")
    @in_own_torch_state
    def forward(self, x: Tensor, positions: Tensor, step: StepMetadata | None) -> Tensor:
        """Attention of new tokens over everything their requests have cached, themselves included.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of all requests, concatenated.
            positions: int64 ``[T]``.
            step: metadata of the batch; None: warm-up, which reserves scratch memory and returns zeros.

        Returns:
            ``[T, hidden_size]`` in the dtype of ``x``.
        """
        self.step = step
        if step is None:
            return self.warmed_up(x, positions)
        if step.batch is not None:
            step.batch.begin(self.prefix, self.pools, x, positions)
        with stage("project"):
            inputs = self.project(x)
        linears = query_linears(self.wq_b, self.indexer, step)
        qr_fp8 = empty_quantized(inputs.qr, linears)
        qr, kv = self.insert(inputs, positions, step, qr_fp8)
        with stage("project"):
            # without a name, projections are freed before attention takes memory: they are as large as the queries
            query = self.queries(QueryProjections(*multi_linear(qr, linears, qr_fp8)), inputs.index_weights, positions)
        return self.attend(query, kv, positions, step)

    def attend(self, queries: LayerQueries, kv: Tensor, positions: Tensor, step: StepMetadata) -> Tensor:
        """Selects entries, attends, and projects the output: ``[T, hidden_size]``."""
        self.select(queries.index, step)
        with stage("attend"):
            output = self.impl.attend(self, queries, kv, positions)
        if step.observer is not None and isinstance(output, Tensor):  # for an observer, no impl quantises its output
            step.observer(AttentionCall(self.prefix, queries.normed(), kv, output, queries.index))
        with stage("output"):
            z, z_fp8 = self.wo_a.project_quantized(output, positions, self.rope.cos_sin)
            (y,) = multi_linear(z, [self.wo_b], z_fp8)
        return self.parallel.sum(y)

    def warmed_up(self, x: Tensor, positions: Tensor) -> Tensor:
        """Zeros, after the impl has reserved its scratch."""
        q = x.new_zeros(len(x), self.padded_heads, self.head_dim)
        self.impl.forward_mqa(self, q, q[:, 0], positions)
        return torch.zeros_like(x)

    def project(self, x: Tensor) -> InputProjections:
        """Projections of ``x [T, hidden_size]``."""
        results = iter(multi_linear(x, self.input_linears))
        qr, kv = next(results), next(results)
        parts = [compressor.part(kv=next(results), score=next(results)) for compressor in self.compressors]
        return InputProjections(qr, kv, parts, next(results, None))

    @traced("insert")
    def insert(
        self, inputs: InputProjections, positions: Tensor, step: StepMetadata, qr_fp8: QuantizedRows | None
    ) -> LatentAndKey:
        """Writes the new tokens to all caches, before any query reads them.

        Returns the normed query latent, which ``qr_fp8`` also receives in FP8, and the normed and rotated key.
        """
        compressors = inputs.compressors
        batch = step.compressor[self.spec.ratio, self.spec.overlap] if compressors else None
        return insert_tokens(self.token_rows(inputs.qr, inputs.kv, positions, step, qr_fp8), compressors, batch)

    def token_rows(
        self, qr: Tensor, kv: Tensor, positions: Tensor, step: StepMetadata, qr_fp8: QuantizedRows | None
    ) -> TokenRows:
        """Projected query latents and keys of the new tokens, as `insert_tokens` writes them to the window."""
        pool = self.swa_cache
        return TokenRows(
            qr=qr,
            kv=kv,
            q_weight=self.q_norm.weight,
            kv_weight=self.kv_norm.weight,
            eps=self.eps,
            cos_sin=self.rope.cos_sin,
            positions=positions,
            cache=CacheRows(pool.record, pool.tensor, pool.entries, step.window.slot_mapping),
            qr_fp8=qr_fp8,
        )

    def select(self, queries: IndexQueries | None, step: StepMetadata) -> None:
        """Selects the entries that each query reads, if the layer has an indexer; queries: see `Indexer.select`."""
        if self.indexer is not None:
            selected = selected_entries(self, 0, len(step.positions))
            self.decode_topk_slots = self.indexer.select(queries, step, selected)
            if step.on_selection is not None:
                self.decode_topk_slots = step.on_selection(self.spec.index, selected, self.decode_topk_slots)

    def raw_queries(self, q: Tensor, positions: Tensor) -> RawQueries:
        """Projected queries ``[T, num_heads * head_dim]`` as the ops take them, padded to ``padded_heads``."""
        return RawQueries(q, self.num_heads, self.eps, self.rope.cos_sin, positions, self.padded_heads)

    def queries(self, projected: QueryProjections, weights: Tensor | None, positions: Tensor) -> LayerQueries:
        """Queries of attention, and of the indexer, with ``weights`` of its heads, if it has to select entries.

        One launch norms and rotates both. Without index queries, the impl norms and rotates the queries of attention.
        """
        raw, q, index = self.raw_queries(projected.q, positions), None, None
        if self.indexer is not None and projected.index_q is not None and weights is not None:
            q, index = queries(raw, self.indexer.query_rows(projected.index_q, weights, positions))
            raw = raw._replace(q=q.flatten(1))  # see `AttentionQueries`: frees the projections
        return LayerQueries(raw, q, index)
