"""Model families: the choices of a runner's construction that depend on the family."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepseek_attn.attention.builder import MetadataBuilder
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.record import OWN_RECORDS
from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.checkpoint.source import CheckpointSource
from deepseek_attn.config.model import MODEL_TYPES, MODELS, AnyConfig, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.trailing import TrailingPart, trailing_parts
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.impls import (
    DEEPSEEK_V4_IMPLS,
    DEEPSEEK_V41_IMPLS,
    AttentionSpec,
    Impls,
    combine_phases,
    find_impl,
    get_impl,
)
from deepseek_attn.impls.base import SparseMLAAttentionImpl
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.dispatch import problem_on
from deepseek_attn.kernels.indexer import MAX_TRITON_TOPK, TRITON_HEAD_DIM
from deepseek_attn.layers.expert_memory import RESIDENT, ExpertMemory
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.split import check_split
from deepseek_attn.models import deepseek_v4, deepseek_v32, deepseek_v41
from deepseek_attn.models.block import AttentionStack, Backbone, BuildContext, attention_layers, layer_specs
from deepseek_attn.utils.registry import class_problems, problems_error
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends import SPARSE_MLA_IMPLS, FlashMLASparseBackend


class Family(ABC):
    """A config with its numerics and attention settled.

    Attributes:
        model_class: class that `build` instantiates; its ``block_class`` has the layers' attention.
        impls: attention impls of the family.
        builder_class: builds the metadata of its steps.
        experts: where routed experts are kept.
        impl: the chosen impl; None for V3, whose layers have no impl.
        mixed: prefill queries read cache pages in place.
        reference_only: every op runs as its torch reference (``backend="reference"``).

    Raises:
        ValueError: the backend is unknown or cannot run here, the ranks cannot share the model, or ``deterministic``
            is not available for these options.
    """

    model_class: type[deepseek_v4.DeepseekV4] | type[deepseek_v32.DeepseekV32] | type[deepseek_v41.DeepseekV41]
    impls: Impls
    builder_class: type[MetadataBuilder] = MetadataBuilder

    def __init__(
        self,
        config: AnyConfig,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device,
        options: AttentionOptions,
        parallel: Parallel | None = None,
        experts: ExpertMemory = RESIDENT,
    ):
        self.config, self.dtype, self.device, self.options = config, dtype, device, options
        self.parallel, self.experts = parallel or Parallel.single(), experts
        if options.deterministic:
            self.check_deterministic()
        self.numerics = numerics
        check_split(config, self.numerics, self.parallel)
        self.reference_only = options.reference_only
        registered = [record for record in (numerics.kv_record, numerics.index_record) if OWN_RECORDS.find(record)]
        if registered and not self.reference_only and not problem_on(device):
            raise ValueError(
                f"records {', '.join(registered)} on {device}: kernels write the package's records alone; "
                "backend='reference' runs every op in plain torch"
            )
        self.spec = AttentionSpec.of(config, self.numerics, dtype, self.parallel.token_ranks)
        self.impl = self.choose_impl()
        self.mixed = options.prefill_reads_pages(self.spec)

    def choose_impl(self) -> type[SparseMLAAttentionImpl] | None:
        """The impl that the options name; ValueError if it is unknown or cannot run here."""

        impls = self.impls
        if self.options.deterministic:
            impls = [impl for impl in impls if not impl.batch_dependence]

        def find(name: str) -> type[SparseMLAAttentionImpl]:
            return get_impl(name, self.device, self.spec, impls)

        decode, prefill = self.options.phases
        return combine_phases(find(decode), find(prefill))

    def check_deterministic(self) -> None:
        """ValueError with everything under which a row's logits would depend on the batch."""
        problems = []
        for name in dict.fromkeys(self.options.phases):
            why = "" if name == "auto" else find_impl(name, self.impls).batch_dependence
            if why:
                problems.append(f"backend {name!r}: {why}; 'auto' takes one that is independent")
        if self.options.fp8_mode == "separate":
            problems.append("fp8_mode='separate': other kernels attend to a prompt than to a decode; leave it out")
        if self.parallel.world > 1:
            order = "the order in which an all-reduce adds depends on the number of rows"
            problems.append(f"{self.parallel.world} ranks: {order}; take one")
        if problems:
            raise ValueError("deterministic=True cannot be kept with\n  - " + "\n  - ".join(problems))

    def canonical(self, source: CheckpointSource) -> CanonicalSource:
        """A checkpoint under the names that the model's weight slots have."""
        return CanonicalSource(source, canonical_names(self.config))

    def build(self, layers: list[int] | None, attention_only: bool, max_positions: int) -> Backbone | AttentionStack:
        """The model without weights: all of it, or some layers, or only their attention.

        MTP layers are built with the whole model only, and not with data-parallel attention.
        """
        context: BuildContext[Any] = BuildContext(  # of the config of `model_class`
            self.config, self.numerics, self.dtype, self.device, self.impl, max_positions, self.parallel, self.experts
        )
        if attention_only:
            return AttentionStack(context, layers, self.model_class.block_class)
        return self.model_class(context, layers, mtp=layers is None and not self.parallel.dp_attention)

    def workspace_rows(self, model: nn.Module, layout: CacheLayout) -> int:
        """Rows of the prefill workspace; see `AttentionOptions.workspace_rows`."""
        return self.options.workspace_rows(self.spec, [spec.ratio for spec in layer_specs(model)], layout)

    def bind(self, model: nn.Module, pools: CachePools, workspace: Workspace) -> None:
        """Gives the layers their caches and reserves the largest workspace that any of them can need."""
        buffer, rows = self.topk_buffer(model, pools), self.workspace_rows(model, pools.layout)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        for layer in attention_layers(model):
            layer.process_weights_after_loading()
            layer.bind_caches(pools, workspace, buffer, rows)
            if layer.impl is not None:
                q = torch.zeros(1, layer.padded_heads, layer.head_dim, dtype=self.dtype, device=self.device)
                layer.impl.forward_mqa(layer, q, q[:, 0], position)

    def metadata_builder(self, model: nn.Module, pools: CachePools, mtp: bool) -> MetadataBuilder:
        """Builder of step metadata for the backbone's layers, or with ``mtp`` for the MTP layers."""
        specs = tuple(spec for spec in layer_specs(model) if spec.is_mtp == mtp)
        return self.builder_class(specs, pools.layout, self.device, self.mixed)

    def trailing_parts(self, model: Backbone, approximate: bool) -> tuple[TrailingPart, ...]:
        """Layers that compute only the trailing rows of prompts; none: all layers compute all rows."""
        return ()

    def graph_problem(self) -> str:
        """Why decode steps cannot be captured as CUDA graphs; empty where they can."""
        if self.impl is None:
            return "dense attention (DeepSeek-V3) runs in plain torch, which waits for the device within a step"
        if self.impl.waits_for_device and set(self.options.phases) != {"auto"}:
            return f"backend {self.impl.name!r} runs plain torch, which waits for the device within a step"
        if not any(spec.has_indexer for spec in self.config.layers):
            return problem_on(self.device)
        sizes = self.config.index_sizes
        if sizes.head_dim != TRITON_HEAD_DIM:
            return (
                f"the indexer's kernels take heads of {TRITON_HEAD_DIM} channels, and index_head_dim is "
                f"{sizes.head_dim}: plain torch takes their place, which waits for the device within a step"
            )
        if sizes.topk > MAX_TRITON_TOPK:
            return (
                f"the indexer's kernels select up to {MAX_TRITON_TOPK} entries, and index_topk is "
                f"{sizes.topk}: plain torch takes their place, which waits for the device within a step"
            )
        return problem_on(self.device)

    def topk_buffer(self, model: nn.Module, pools: CachePools) -> torch.Tensor | None:
        """Buffer for the indexers' top-k indices, int32 ``[max_num_batched_tokens, index_topk]``; None without any."""
        if all(layer.indexer is None for layer in attention_layers(model)):
            return None
        shape = (pools.layout.max_num_batched_tokens, self.config.index_sizes.topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.device)


class DeepseekV4Family(Family):
    """DeepSeek-V4."""

    model_class, impls = deepseek_v4.DeepseekV4, DEEPSEEK_V4_IMPLS


class DeepseekV32Family(Family):
    """DeepSeek-V3.2, and V3 / V3.1 without an indexer, whose dense attention has one implementation for any backend."""

    config: DeepseekV32Config
    model_class, impls = deepseek_v32.DeepseekV32, SPARSE_MLA_IMPLS
    builder_class = FlashMLASparseBackend.get_builder_cls()

    def choose_impl(self) -> type[SparseMLAAttentionImpl] | None:
        return super().choose_impl() if self.config.has_indexer else None


class DeepseekV41Family(Family):
    """DeepSeek-V4.1: the text model."""

    config: DeepseekV41Config
    model_class, impls = deepseek_v41.DeepseekV41, DEEPSEEK_V41_IMPLS

    def build(self, layers: list[int] | None, attention_only: bool, max_positions: int) -> Backbone | AttentionStack:
        """See `Family.build`.

        Raises:
            ValueError: ``layers`` lacks a layer whose entries, selections or candidates another layer reads.
        """
        if layers is None:
            return super().build(None, attention_only, max_positions)
        needed = self.config.with_sources(layers)
        if needed != sorted(layers):
            others = sorted(set(needed) - set(layers))
            raise ValueError(
                f"layers={layers}: they read entries or selections of layers {others}; take layers={needed}"
            )
        return super().build(needed, attention_only, max_positions)

    def trailing_parts(self, model: Backbone, approximate: bool) -> tuple[TrailingPart, ...]:
        """See `Family.trailing_parts`.

        None with data-parallel attention, where the experts' rows follow the rank with the most, and for a model with a
        `forward` of its own, which may compute all rows.
        """
        if self.parallel.dp_attention or type(model).forward is not deepseek_v41.DeepseekV41.forward:
            return ()
        specs = tuple(layer.spec for layer in attention_layers(model.layers))
        return trailing_parts(specs, self.config.sliding_window, len(model.mtp) > 0, approximate)

    def graph_problem(self) -> str:
        """See `Family.graph_problem`."""
        if self.options.deterministic:
            return "deterministic=True computes each token of DeepSeek-V4.1 by itself"
        blocks = self.config.candidate_topk_blocks or 0
        if blocks > MAX_TRITON_TOPK:
            return (
                f"the indexer's kernels keep up to {MAX_TRITON_TOPK} candidate blocks, and candidate_topk_blocks is "
                f"{blocks}: plain torch takes their place, which waits for the device within a step"
            )
        return super().graph_problem()


FAMILIES: dict[type[AnyConfig], type[Family]] = {
    ModelConfig: DeepseekV4Family,
    DeepseekV32Config: DeepseekV32Family,
    DeepseekV41Config: DeepseekV41Family,
}
PUBLISHED = frozenset(MODEL_TYPES)  # model types of the package
FAMILY_CLASSES = {"model_class": Backbone, "builder_class": MetadataBuilder}


def register_family(model_type: str, config_class: type[AnyConfig], family_class: type[Family]) -> None:
    """Makes a model family from outside the package known: ``config.json`` with this ``model_type`` builds it.

        @dataclass(frozen=True)
        class MyConfig(ModelConfig):
            @classmethod
            def from_dict(cls, raw, origin="dict"):  # checks of DeepSeek-V4's keys, and those of its own
                config = ModelConfig.from_dict({**raw, "model_type": "deepseek_v4"}, origin)
                return cls(**vars(config) | {"model_type": "mine"})

        class MyFamily(DeepseekV4Family):
            model_class = MyModel  # of blocks of its own: a DeepseekV4 whose block_class is a Block

        register_family("mine", MyConfig, MyFamily)

    Caches and the split over ranks follow the config that ``config_class`` derives from, and so do the tensors of a
    checkpoint and their names, without a row for ``config_class`` in `checkpoint.published.STYLES`.
    The module that registers a family is imported before its configs are read: by the program, or as an entry point of
    the group ``deepseek_attn.extensions``.

    Raises:
        ValueError: with everything that the classes lack, or a ``model_type`` that the package has.
    """
    bases = (ModelConfig, DeepseekV32Config, DeepseekV41Config)
    problems = [f"the config {problem}" for problem in class_problems(config_class, *bases)]
    if not problems and config_class in bases:
        problems.append(f"the config is the package's own {config_class.__name__}; derive one from it")
    if not problems and config_class.from_dict.__func__ is ModelConfig.from_dict.__func__:
        problems.append(f"the config {config_class.__name__} lacks from_dict, which builds it from decoded JSON")
    lacking = [f"the family {problem}" for problem in class_problems(family_class, Family)]
    for name, base in FAMILY_CLASSES.items() if not lacking else ():
        value = getattr(family_class, name, None)
        if value is None:
            lacking.append(f"the family {family_class.__name__} lacks {name}")
        else:
            lacking += [f"the family's {name} {problem}" for problem in class_problems(value, base)]
    if not lacking and not getattr(family_class, "impls", ()):
        lacking.append(f"the family {family_class.__name__} lacks impls, its attention impls in order of preference")
    if model_type in PUBLISHED:
        problems.append(f"the package has this model_type itself ({MODELS[model_type]})")
    if problems or lacking:
        raise problems_error(f"model_type {model_type!r}", "a model family", problems + lacking)

    def read(raw: Mapping[str, Any], origin: str) -> AnyConfig:
        config = config_class.from_dict(raw, origin)
        if type(config) is not config_class or config.model_type != model_type:
            raise ValueError(
                f"invalid config ({origin}): {config_class.__name__}.from_dict must make a {config_class.__name__} of "
                f"model_type {model_type!r}, and made a {type(config).__name__} of {config.model_type!r}"
            )
        return config

    MODEL_TYPES[model_type], FAMILIES[config_class] = read, family_class
    MODELS[model_type] = config_class.__name__


def get_family(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    device: torch.device,
    options: AttentionOptions,
    parallel: Parallel | None = None,
    experts: ExpertMemory = RESIDENT,
) -> Family:
    """The family of a config; see `Family` for its errors."""
    return FAMILIES[type(config)](config, numerics, dtype, device, options, parallel, experts)
