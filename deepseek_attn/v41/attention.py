"""The V4.1 attention layer: V4's, with entries, index keys and selections that layers share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.attention.indexer import QueryProjections, query_linears
from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.impls.metadata import StepMetadata, TrailingStep
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.indexer import IndexQueries
from deepseek_attn.kernels.insert import LatentAndKey, RawQueries, insert_tokens
from deepseek_attn.layers.linear import empty_quantized, multi_linear
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.utils.torch_state import in_own_torch_state
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.v41.compressor import LatentCompressor
from deepseek_attn.v41.indexer import SharedKeyIndexer


class V41Projections(NamedTuple):
    """Projections of the layer's input.

    Attributes:
        qr: ``[T, q_lora_rank]``, the query latent; kv: ``[T, head_dim]``, the key, which is also the value.
        entries: projections for `LatentCompressor.latents`; empty for layers that own no entries.
        index_weights: float32 ``[T, index_n_heads]``; None without an indexer.
    """

    qr: Tensor
    kv: Tensor
    entries: list[Tensor]
    index_weights: Tensor | None


class DeepseekV41MLAAttention(DeepseekV4MLAAttention):
    """V4's layer without the norm of query heads, over a window and the entries of layer ``spec.kv_source``.

    The role of a layer decides: ``full`` makes entries, index keys and a selection, ``reindex`` only a selection,
    ``reuse`` reads the selection of ``spec.index_source``. The layers of a step must run in order: a layer raises if
    the results that it reads are missing.

    Attributes:
        compressor: None unless the layer owns entries; indexer: None for reuse layers.
    """

    spec: V41LayerSpec
    compressor: LatentCompressor | None
    indexer: SharedKeyIndexer | None

    def make_entry_modules(
        self,
        config: DeepseekV41Config,
        rope: RotaryTable,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        spec = self.spec
        parts = (config, spec, rope, numerics, dtype, device)
        self.compressor = LatentCompressor(*parts) if spec.owns_entries else None
        self.indexer = SharedKeyIndexer(*parts) if spec.has_indexer else None
        self.input_linears += [] if self.compressor is None else self.compressor.input_linears
        self.input_linears += [] if self.indexer is None else [self.indexer.weights_proj]
        self.index_topk = config.index_topk if spec.ratio else None

    def project(self, x: Tensor) -> V41Projections:
        qr, kv, *rest = multi_linear(x, self.input_linears)
        weights = None if self.indexer is None else rest.pop()
        return V41Projections(qr, kv, rest, weights)

    @traced("insert")
    def insert(
        self, inputs: V41Projections, positions: Tensor, step: StepMetadata, qr_fp8: QuantizedRows | None
    ) -> LatentAndKey:
        self.check_sources(step)
        rows = insert_tokens(self.token_rows(inputs.qr, inputs.kv, positions, step, qr_fp8), [], None)
        if self.compressor is not None and self.indexer is not None:  # layers that make entries have both
            latents = self.compressor.latents(inputs.entries, step)
            self.compressor.store(latents, self.compressor.pool, step)
            self.compressor.store(self.indexer.keys(latents), self.indexer.pool, step)
        return rows

    @traced("attention")
    @in_own_torch_state
    def forward_trailing(self, x: Tensor, step: StepMetadata, trailing: TrailingStep) -> Tensor | None:
        """`forward` with the queries of some rows alone; keys and entries are made of all rows.

        Args:
            x: ``[T, hidden_size]`` of the step's rows; trailing: the rows with queries.

        Returns:
            ``[T', hidden_size]`` of these rows; None if there are none.
        """
        self.step = step
        with stage("project"):
            inputs = self.project(x)
        qr_fp8 = empty_quantized(inputs.qr, query_linears(self.wq_b, self.indexer, step))
        qr, kv = self.insert(inputs, step.positions, step, qr_fp8)
        if trailing.step is None:
            return None
        self.step = step = trailing.begin(step.results)
        if qr_fp8 is not None and trailing.rows is not None:
            qr_fp8 = qr_fp8.take(trailing.rows)
        weights = None if inputs.index_weights is None else trailing.take(inputs.index_weights)
        qr, kv, positions = trailing.take(qr), trailing.take(kv), step.positions
        linears = query_linears(self.wq_b, self.indexer, step)
        with stage("project"):
            queries = self.queries(QueryProjections(*multi_linear(qr, linears, qr_fp8)), weights, positions)
        return self.attend(queries, kv, positions, step)

    def check_sources(self, step: StepMetadata) -> None:
        """RuntimeError unless the layers whose results this one reads have computed the step, in the model's order."""
        spec = self.spec
        missing, source = spec.sources - step.results.computed, spec.index_source
        if source is not None and not spec.has_indexer and step.results.selected_by != source:
            missing |= {source}  # or another layer has selected since
        if missing:
            raise RuntimeError(
                f"{self.prefix} reads results of layers {sorted(missing)} in the same step: run these before it, and "
                "all layers in the model's order"
            )
        step.results.computed.add(spec.index)

    def select(self, queries: IndexQueries | None, step: StepMetadata) -> None:
        if self.indexer is not None:
            super().select(queries, step)
            step.results.selected_by, step.results.decode_topk_slots = self.spec.index, self.decode_topk_slots
        elif self.spec.ratio:
            self.decode_topk_slots = step.results.decode_topk_slots

    def raw_queries(self, q: Tensor, positions: Tensor) -> RawQueries:
        return super().raw_queries(q, positions)._replace(norm=False)
