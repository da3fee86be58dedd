"""V4's transformer block, and base classes of the models of all families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from deepseek_attn.attention.builder import LayerSpecs
from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.config.common import RopeSpec
from deepseek_attn.config.model import AnyConfig, AnySpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.base import SparseMLAAttentionImpl
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.hyper_connection import HyperConnection, SublayerInput, SublayerOutput
from deepseek_attn.layers.embedding import Embedding, Head
from deepseek_attn.layers.expert_memory import RESIDENT, ExpertMemory
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, ModuleTable, RMSNorm
from deepseek_attn.models.hyper_connection import hc_post, hc_post_pre, hc_pre, hyper_connection
from deepseek_attn.models.moe import MoE
from deepseek_attn.v32.attention import DeepseekV32MLAAttention

ConfigT = TypeVar("ConfigT", bound=AnyConfig, covariant=True)


@dataclass
class BuildContext(Generic[ConfigT]):
    """Arguments that the modules of a model are built with.

    Attributes:
        impl: the attention impl of layers that have one; dense ones (V3) run in plain torch.
        max_positions: length of the rotary tables.
        parallel: the ranks that share the model.
        experts: where routed experts are kept.
        ropes: rotary tables built so far; see `rope`.
    """

    config: ConfigT
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    impl: type[SparseMLAAttentionImpl] | None
    max_positions: int
    parallel: Parallel = field(default_factory=Parallel.single)
    experts: ExpertMemory = RESIDENT
    ropes: dict[RopeSpec, RotaryTable] = field(default_factory=dict)

    @property
    def layer_impl(self) -> type[SparseMLAAttentionImpl]:
        """The attention impl. ValueError for a model whose layers have no impl."""
        if self.impl is None:
            raise ValueError("layers with a window and entries need an attention impl: give one as impl")
        return self.impl

    def rope(self, spec: AnySpec) -> RotaryTable:
        """The rotary table of a layer; layers with the same frequencies share one."""
        if spec.rope not in self.ropes:
            self.ropes[spec.rope] = RotaryTable(spec.rope, self.max_positions, self.device)
        return self.ropes[spec.rope]


class BlockBase(CheckpointModule):
    """Base class of the layers of all families.

    Args:
        spec: of the layer, of the family's class.
        attention_only: build the attention and its norm alone.
    """

    def __init__(self, context: BuildContext, spec: Any, attention_only: bool = False):
        super().__init__(context.device)


class Block(BlockBase):
    """Attention and MoE, each on an input collapsed from the residual streams (`hc_pre`), which `hc_post` updates."""

    attention_class = DeepseekV4MLAAttention
    experts_class = MoE

    def __init__(self, context: BuildContext[DeepseekV4Base], spec: LayerSpec, attention_only: bool = False):
        config, device = context.config, context.device
        super().__init__(context, spec, attention_only)
        self.config = config
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attn = self.attention_class(
            config, spec, context.rope(spec), context.numerics, context.dtype, device, context.layer_impl,
            context.parallel,
        )  # fmt: skip
        if attention_only:
            return
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.ffn = self.experts_class(
            config, spec, context.numerics, context.dtype, device, context.parallel, context.experts
        )
        rows, columns = (2 + config.hc_mult) * config.hc_mult, config.hc_mult * config.hidden_size
        for sublayer in ("attn", "ffn"):
            self.declare(f"hc_{sublayer}_fn", (rows, columns), torch.float32)
            self.declare(f"hc_{sublayer}_base", (rows,), torch.float32)
            self.declare(f"hc_{sublayer}_scale", (3,), torch.float32)

    def forward(
        self,
        streams: torch.Tensor | SublayerOutput,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata | None,
        deferred: bool = False,
    ) -> torch.Tensor | SublayerOutput:
        """``streams [T, hc_mult, hidden_size]``, ``token_ids`` and ``positions [T]`` -> new streams.

        With ``deferred``, returns the pending `SublayerOutput`; the next block applies it to the streams.
        """
        hc = self.attn_input(streams) if isinstance(streams, SublayerOutput) else self.collapse(streams)
        hc = self.ffn_input(hc.output(self.attn(hc.x, positions, step)))
        output = hc.output(self.ffn(hc.x, token_ids, hc))
        return output if deferred else hc_post(*output)

    def collapse(self, streams: torch.Tensor) -> SublayerInput:
        """The attention's input, from streams ``[T, hc_mult, hidden_size]``."""
        return SublayerInput(streams, *hc_pre(streams, self._hyper_connection("attn", self.attn_norm)))

    def attn_input(self, output: SublayerOutput) -> SublayerInput:
        """The attention's input, from the last sublayer of the previous block."""
        return hc_post_pre(*output, self._hyper_connection("attn", self.attn_norm))

    def ffn_input(self, output: SublayerOutput) -> SublayerInput:
        """The experts' input, from the attention."""
        return hc_post_pre(*output, self._hyper_connection("ffn", self.ffn_norm))

    def expect_experts(self, hc: SublayerInput) -> torch.Tensor:
        """Experts ``[T, k]`` that the router chooses for the streams before the experts of the previous block.

        Args:
            hc: the previous block's experts' input. Its output, and this block's attention, will change the streams.
        """
        return self.ffn.gate.predict(hc_pre(hc.streams, self._hyper_connection("ffn", self.ffn_norm))[0])

    def _hyper_connection(self, sublayer: str, norm: RMSNorm) -> HyperConnection:
        """The hyper-connection that collapses the streams for a sublayer."""
        return hyper_connection(self, sublayer, self.config, norm.weight)


class Backbone(CheckpointModule, ABC):
    """Embedding, blocks and output head, and the MTP layers behind them. Built without weights: `load_model` fills it.

    Args:
        layers: backbone layer numbers to build, in model order; None builds all of them.
        mtp: also build the MTP layers.
        mtp_layer: the family's class.

    Attributes:
        block_class: class of the layers.

    `forward` returns "hidden states" ``[T, ...]``, the input of `logits` and of the MTP layer: V4's residual streams
    ``[T, hc_mult, hidden_size]``; of other families, states after the final norm ``[T, hidden_size]``.
    """

    block_class: type[BlockBase]
    layers: ModuleTable[Any]  # of `block_class`
    mtp: ModuleTable[Any]  # of the class given as ``mtp_layer``

    def __init__(
        self,
        context: BuildContext,
        layers: list[int] | None,
        mtp: bool,
        mtp_layer: type[BlockBase],
    ):
        config, device = context.config, context.device
        super().__init__(device)
        self.config: AnyConfig = config
        specs = config.layers if layers is None else [config.layers[i] for i in layers]
        self.embed = Embedding(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        self.layers = ModuleTable({str(spec.index): self.block_class(context, spec) for spec in specs})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.head = Head(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        mtp_specs = config.mtp_layers if mtp else ()
        self.mtp = ModuleTable({str(i): mtp_layer(context, spec) for i, spec in enumerate(mtp_specs)})

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the hidden states of one token."""
        return (self.config.hidden_size,)

    @property
    @abstractmethod
    def layer_state_shape(self) -> tuple[int, ...]:
        """Shape of `layer_states` of one token."""

    @abstractmethod
    def layer_states(self, output: Any) -> torch.Tensor:
        """Residual states ``[T, ...]`` after a layer, from the result of its ``forward``."""

    @abstractmethod
    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 ``[T, vocab_size]`` for the next token."""

    def draft_hidden_states(
        self, hidden_states: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor, step: Any
    ) -> torch.Tensor:
        """Hidden states of the MTP layer, for `draft_logits` and for drafting the token after.

        Args:
            hidden_states: of the backbone, or of the MTP layer for the token before.
            next_token_ids: int64 ``[T]``, the token after each row; positions: int64 ``[T]`` of the rows themselves.
            step: metadata of the MTP layer's caches.
        """
        raise NotImplementedError(f"{type(self).__name__} has no MTP layer")

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 ``[T, vocab_size]`` for the token after next, from hidden states of the MTP layer."""
        raise NotImplementedError(f"{type(self).__name__} has no MTP layer")


class AttentionStack(nn.Module):
    """Only the attention layers and their norms, to test or time a layer of a large checkpoint.

    Args:
        layers: layer numbers, in model order; None builds all of them.
        block: the family's class of blocks.
    """

    def __init__(self, context: BuildContext, layers: list[int] | None, block: type[BlockBase]):
        super().__init__()
        specs = context.config.layers if layers is None else [context.config.layers[i] for i in layers]
        self.layers = ModuleTable({str(spec.index): block(context, spec, attention_only=True) for spec in specs})


def attention_layers(model: nn.Module) -> list[DeepseekV4MLAAttention | DeepseekV32MLAAttention]:
    """The attention layers of a model, in order."""
    kinds = (DeepseekV4MLAAttention, DeepseekV32MLAAttention)
    return [module for module in model.modules() if isinstance(module, kinds)]


def layer_specs(model: nn.Module) -> LayerSpecs:
    """Specs of the attention layers of a model, in order."""
    return tuple(layer.spec for layer in attention_layers(model))
