"""Model families: the choices of a runner's construction that depend on the family."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from deepseek_attn.attention.builder import MetadataBuilder
from deepseek_attn.cache.layout import TOKENS_PAGE
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics, numerics_for
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.impls import AttentionSpec, DeepseekV4SparseMLAAttentionImpl, get_impl
from deepseek_attn.kernels.common.dispatch import problem_on
from deepseek_attn.kernels.indexer import MAX_TRITON_TOPK, TRITON_HEAD_DIM
from deepseek_attn.layers.parallel import Parallel, check_split
from deepseek_attn.layers.weights import CheckpointModule
from deepseek_attn.models import block, deepseek_v4, deepseek_v32
from deepseek_attn.models.block import AttentionStack, BuildContext, attention_layers, layer_specs
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.attention import sparse_config
from deepseek_attn.v32.backends import KVCacheSpec, SparseMLAConfig, get_backend
from deepseek_attn.v32.backends.kernels import get_kernels
from deepseek_attn.v32.step_metadata import TokenMetadataBuilder

V32_BACKENDS = ("auto", "flashmla", "triton", "flashinfer", "reference")


class Family(ABC):
    """A config with its numerics and backend settled.

    Attributes:
        model_class, block_class: classes that `build` instantiates.
        impl: V4's attention impl; None for other families.
        reference_only: every op runs as its torch reference (``backend="reference"``).

    Raises:
        ValueError: unknown numerics, a backend that is unknown or cannot run here, or a model that the ranks cannot
            share.
    """

    model_class: type[deepseek_v4.DeepseekV4] | type[deepseek_v32.DeepseekV32]
    block_class: type[CheckpointModule]
    impl: type[DeepseekV4SparseMLAAttentionImpl] | None = None

    def __init__(
        self,
        config: AnyConfig,
        numerics: str | Numerics,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        parallel: Parallel | None = None,
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.parallel = parallel or Parallel.single()
        check_split(config, self.parallel)
        self.reference_only = backend == "reference"
        self.numerics = numerics_for(config, numerics)
        self.choose_backend(backend, AttentionSpec.of(config, self.numerics, dtype, self.parallel.token_ranks))

    @abstractmethod
    def choose_backend(self, backend: str, spec: AttentionSpec) -> None:
        """Chooses the attention backend; raises ValueError for one that is unknown or cannot run here."""

    def canonical(self, source: CheckpointSource) -> CanonicalSource:
        """A checkpoint under the names that the model's weight slots have."""
        return CanonicalSource(source)

    def build(
        self, layers: list[int] | None, attention_only: bool, max_positions: int
    ) -> deepseek_v4.DeepseekV4 | deepseek_v32.DeepseekV32 | AttentionStack:
        """The model without weights: all of it, or some layers, or only their attention.

        MTP layers are built with the whole model only, and not with data-parallel attention.
        """
        context = BuildContext(
            self.config, self.numerics, self.dtype, self.device, self.impl, max_positions, self.parallel
        )
        if attention_only:
            return AttentionStack(context, layers, self.block_class)
        return self.model_class(context, layers, mtp=layers is None and not self.parallel.dp_attention)

    @abstractmethod
    def bind(self, model: nn.Module, pools: CachePools, workspace: Workspace) -> None:
        """Gives the layers their caches and reserves the largest workspace that any of them can need."""

    @abstractmethod
    def metadata_builder(
        self, model: nn.Module, pools: CachePools, mtp: bool
    ) -> MetadataBuilder | TokenMetadataBuilder:
        """Builder of step metadata for the backbone's layers, or with ``mtp`` for the MTP layers."""

    def graph_problem(self) -> str:
        """Why decode steps cannot be captured as CUDA graphs; empty where they can."""
        return "only decode steps of DeepSeek-V4 are captured"

    def topk_buffer(self, model: nn.Module, pools: CachePools) -> torch.Tensor | None:
        """Buffer for the indexers' top-k indices, int32 ``[max_num_batched_tokens, index_topk]``; None without any."""
        if all(layer.indexer is None for layer in attention_layers(model)):
            return None
        shape = (pools.layout.max_num_batched_tokens, self.config.index_topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.device)


class DeepseekV4Family(Family):
    """DeepSeek-V4. Backends: those of `impls`."""

    model_class, block_class = deepseek_v4.DeepseekV4, block.Block

    def choose_backend(self, backend: str, spec: AttentionSpec) -> None:
        self.impl = get_impl(backend, self.device, spec)

    def graph_problem(self) -> str:
        if self.parallel.dp_attention:
            return "ranks with data-parallel attention settle the size of each step on the CPU"
        if self.reference_only:
            return "backend 'reference' runs plain torch, which waits for the device within a step"
        selects = any(spec.has_indexer for spec in self.config.layers)
        if selects and self.config.index_head_dim != TRITON_HEAD_DIM:
            return (
                f"the indexer's kernels take heads of {TRITON_HEAD_DIM} channels, and index_head_dim is "
                f"{self.config.index_head_dim}: plain torch takes their place, which waits for the device within a step"
            )
        if selects and self.config.index_topk > MAX_TRITON_TOPK:
            return (
                f"the indexer's kernels select up to {MAX_TRITON_TOPK} entries, and index_topk is "
                f"{self.config.index_topk}: plain torch takes their place, which waits for the device within a step"
            )
        return problem_on(self.device)

    def bind(self, model: nn.Module, pools: CachePools, workspace: Workspace) -> None:
        buffer = self.topk_buffer(model, pools)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        for layer in attention_layers(model):
            layer.process_weights_after_loading()
            layer.bind_caches(pools, workspace, buffer)
            q = torch.zeros(1, layer.padded_heads, layer.head_dim, dtype=self.dtype, device=self.device)
            layer.impl.forward_mqa(layer, q, q[:, 0], position)

    def metadata_builder(self, model: nn.Module, pools: CachePools, mtp: bool) -> MetadataBuilder:
        return MetadataBuilder(tuple(s for s in layer_specs(model) if s.is_mtp == mtp), pools.layout, self.device)


class DeepseekV32Family(Family):
    """DeepSeek-V3.2, and V3 / V3.1 without an indexer.

    Backends: ``auto``, ``reference``, ``triton`` or ``flashmla`` (kernels of the FlashMLA sparse backend), or
    ``flashinfer``. Dense models have one implementation and accept any of these.
    """

    model_class, block_class = deepseek_v32.DeepseekV32, deepseek_v32.Block

    def choose_backend(self, backend: str, spec: AttentionSpec) -> None:
        if backend not in V32_BACKENDS:
            raise ValueError(
                f"unknown backend {backend!r} for {self.config.model_type}: supported are {', '.join(V32_BACKENDS)}"
            )
        flashinfer = backend == "flashinfer"
        if flashinfer and self.numerics.kv_record != "plain":
            raise ValueError(
                f"backend 'flashinfer' reads plain latents, and numerics {self.numerics.name!r} stores FP8 ones: use "
                "numerics='exact' or backend='auto'"
            )
        self.backend = get_backend("FLASHINFER_MLA_SPARSE" if flashinfer else "FLASHMLA_SPARSE")
        self.kernels = "auto" if flashinfer else backend
        get_kernels(self.kernels, self.device, spec)

    def canonical(self, source: CheckpointSource) -> CanonicalSource:
        return CanonicalSource(source, lambda name: canonical_name_v32(name, self.config.num_hidden_layers))

    def bind(self, model: nn.Module, pools: CachePools, workspace: Workspace) -> None:
        buffer, sparse = self.topk_buffer(model, pools), self.sparse_config(pools)
        for layer in attention_layers(model):
            layer.process_weights_after_loading(self.dtype)
            layer.bind_caches(pools, workspace, buffer, self.backend, sparse)

    def metadata_builder(self, model: nn.Module, pools: CachePools, mtp: bool) -> TokenMetadataBuilder:
        if not self.config.has_indexer:
            return TokenMetadataBuilder(None, self.device)
        names = [spec.name for spec in layer_specs(model) if spec.is_mtp == mtp]
        spec = KVCacheSpec(TOKENS_PAGE, self.config.head_dim, self.config.qk_rope_head_dim)
        backend = self.backend.get_builder_cls()(spec, names, self.sparse_config(pools), self.device)
        return TokenMetadataBuilder(backend, self.device)

    def sparse_config(self, pools: CachePools) -> SparseMLAConfig | None:
        ranks = self.parallel.token_ranks
        return sparse_config(self.config, self.numerics, self.dtype, pools.layout, self.kernels, ranks)


def get_family(
    config: AnyConfig,
    numerics: str | Numerics,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    parallel: Parallel | None = None,
) -> Family:
    """The family of a config; see `Family` for what it refuses."""
    family = DeepseekV32Family if isinstance(config, DeepseekV32Config) else DeepseekV4Family
    return family(config, numerics, dtype, device, backend, parallel)
