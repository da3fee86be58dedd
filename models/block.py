"""One transformer block, and the parts around the stack of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig, RopeSpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.impls.base import DeepseekV4SparseMLAAttentionImpl
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.models.hyper_connection import hc_head, hc_post, hc_pre
from deepseek_attn.models.moe import MoE
from deepseek_attn.v32.attention import DeepseekV32MLAAttention


@dataclass
class BuildContext:
    """What every part of a model is built with.

    Attributes:
        impl: V4's attention impl; None for other families, whose layers get theirs with their caches.
        max_positions: length of the rotary tables.
        parallel: the ranks that share the model.
    """

    config: AnyConfig
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    impl: type[DeepseekV4SparseMLAAttentionImpl] | None
    max_positions: int
    parallel: Parallel = field(default_factory=Parallel.single)
    ropes: dict[RopeSpec, RotaryTable] = field(default_factory=dict)

    def rope(self, spec: LayerSpec | V32LayerSpec) -> RotaryTable:
        """The rotary table of a layer; layers with the same frequencies share one."""
        if spec.rope not in self.ropes:
            self.ropes[spec.rope] = RotaryTable(spec.rope, self.max_positions, self.device)
        return self.ropes[spec.rope]


class Block(CheckpointModule):
    """Attention and MoE, each between a collapse of the streams and their update."""

    def __init__(self, context: BuildContext, spec: LayerSpec, attention_only: bool = False):
        config, device = context.config, context.device
        super().__init__(device)
        self.config = config
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attn = DeepseekV4MLAAttention(
            config, spec, context.rope(spec), context.numerics, context.dtype, device, context.impl, context.parallel
        )
        if attention_only:
            return
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.ffn = MoE(config, spec, context.numerics, context.dtype, device, context.parallel)
        rows, columns = (2 + config.hc_mult) * config.hc_mult, config.hc_mult * config.hidden_size
        for sublayer in ("attn", "ffn"):
            self.declare(f"hc_{sublayer}_fn", (rows, columns), torch.float32)
            self.declare(f"hc_{sublayer}_base", (rows,), torch.float32)
            self.declare(f"hc_{sublayer}_scale", (3,), torch.float32)

    def attend(self, x: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """The attention layer alone, on normed ``x [T, hidden_size]``."""
        return self.attn(x, step.positions, step)

    def forward(
        self, streams: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None
    ) -> torch.Tensor:
        """``streams [T, hc_mult, hidden_size]`` -> the same shape."""
        before_attn = self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.config, self.attn_norm.weight
        before_ffn = self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.config, self.ffn_norm.weight
        x, post, comb = hc_pre(streams, *before_attn)
        streams = hc_post(self.attn(x, positions, step), streams, post, comb)
        x, post, comb = hc_pre(streams, *before_ffn)
        return hc_post(self.ffn(x, token_ids), streams, post, comb)


class AttentionStack(nn.Module):
    """Only the attention layers and their norms: what testing a layer of a large checkpoint needs.

    Args:
        block: the model's class of blocks.
    """

    def __init__(self, context: BuildContext, layers: list[int] | None, block: type[CheckpointModule]):
        super().__init__()
        specs = context.config.layers if layers is None else [context.config.layers[i] for i in layers]
        self.layers = nn.ModuleDict({str(spec.index): block(context, spec, attention_only=True) for spec in specs})


def attention_layers(model: nn.Module) -> list[DeepseekV4MLAAttention | DeepseekV32MLAAttention]:
    """The attention layers of a model, in order."""
    kinds = (DeepseekV4MLAAttention, DeepseekV32MLAAttention)
    return [module for module in model.modules() if isinstance(module, kinds)]


def layer_specs(model: nn.Module) -> tuple[LayerSpec, ...] | tuple[V32LayerSpec, ...]:
    """What was built, in order."""
    return tuple(layer.spec for layer in attention_layers(model))


def declare_stream_head(module: CheckpointModule, config: ModelConfig, device: torch.device | str) -> None:
    """Gives ``module`` what ends in one stream: a learned collapse (``hc_head_*``) and a norm."""
    module.declare("hc_head_fn", (config.hc_mult, config.hc_mult * config.hidden_size), torch.float32)
    module.declare("hc_head_base", (config.hc_mult,), torch.float32)
    module.declare("hc_head_scale", (1,), torch.float32)
    module.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)


def collapse_streams(module: CheckpointModule, streams: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Streams ``[T, hc_mult, hidden_size]`` -> normed hidden states ``[T, hidden_size]``."""
    head = module.hc_head_fn, module.hc_head_base, module.hc_head_scale
    return hc_head(streams, *head, config, module.norm.weight)
