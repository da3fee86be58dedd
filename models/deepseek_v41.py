"""DeepSeek-V4.1's text model as a diagram: embedding -> m streams -> blocks -> one stream -> norm -> head.

What differs from V4: a sublayer's input is collapsed with the weights that the sublayer before it has computed, layers
share compressed entries and selections, and an n-gram memory is added to the streams of some layers. Parameter names
are the checkpoint's. Tokens of all requests of a step are concatenated, ``[T]``.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from deepseek_attn.config.v41 import V41LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.engram import Engram
from deepseek_attn.models import block
from deepseek_attn.models.block import Backbone, BuildContext
from deepseek_attn.models.dspark import DraftsBlocks, add_draft_ends, stage_context
from deepseek_attn.models.hyper_connection import hc_collapse, hc_mix, hc_post
from deepseek_attn.v41.attention import DeepseekV41MLAAttention


class Block(block.Block):
    """Attention and MoE, each on an input collapsed with the weights of the sublayer before (`hc_mix`)."""

    attention_class = DeepseekV41MLAAttention

    def __init__(self, context: BuildContext, spec: V41LayerSpec, attention_only: bool = False):
        super().__init__(context, spec, attention_only)
        self.engram = None
        config = context.config
        if spec.has_engram and not attention_only:
            sizes = (config.hidden_size, config.hc_mult, config.rms_norm_eps)
            self.engram = Engram(config.engram, spec.index, *sizes, context.numerics, context.dtype, context.device)

    def forward(
        self, streams: torch.Tensor, pre: torch.Tensor, token_ids: torch.Tensor, step: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams ``[T, hc_mult, hidden_size]`` and the weights ``[T, hc_mult]`` to collapse them with -> both anew."""
        next_pre, post, comb = hc_mix(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.config)
        x = hc_collapse(streams, pre, self.config, self.attn_norm.weight)
        streams, pre = hc_post(self.attn(x, step.positions, step), streams, post, comb), next_pre
        next_pre, post, comb = hc_mix(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.config)
        x = hc_collapse(streams, pre, self.config, self.ffn_norm.weight)
        return hc_post(self.ffn(x, token_ids), streams, post, comb), next_pre

    def add_memory(self, streams: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """The streams with the n-gram memory of the layer, if it has one: the input of `forward`."""
        return streams if self.engram is None else self.engram(streams, step.engram[self.engram.layer].wait())


class DraftStage(Block):
    """A stage of the DSpark drafter (checkpoint: ``mtp.N``)."""

    def __init__(self, context: BuildContext, spec: V41LayerSpec):
        super().__init__(stage_context(context), spec)
        add_draft_ends(self, context, spec, "embed", "head")


class DeepseekV41(DraftsBlocks, Backbone):
    """The whole model, or some of its layers; see `Backbone`. Its hidden states are those after the final norm.

    With a DSpark drafter, the mean of the streams before each of its target layers comes after them:
    ``[T, 1 + targets, hidden_size]``.
    """

    def __init__(self, context: BuildContext, layers: list[int] | None = None, mtp: bool = True):
        super().__init__(context, layers, mtp, Block, DraftStage)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> hidden states after the final norm, ``[T, hidden_size]``."""
        streams, pre = self.first_streams(token_ids)
        targets, means = self.target_layers, []
        for index, layer in self.layers.items():
            streams = layer.add_memory(streams, step)
            if int(index) in targets:
                means.append(streams.mean(1))
            streams, pre = layer(streams, pre, token_ids, step)
        x = hc_collapse(streams, pre, self.config, self.norm.weight)
        return torch.stack([x, *means], dim=1) if means else x

    def first_streams(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams before the first block and the weights to collapse them with: its attention reads stream 0."""
        streams = self.embed(token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], device=streams.device)
        pre[:, 0] = 1
        return streams, pre

    @property
    def state_shape(self) -> tuple[int, ...]:
        targets = len(self.target_layers)
        return (1 + targets, self.config.hidden_size) if targets else (self.config.hidden_size,)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.logits`."""
        return self.head(hidden_states[:, 0] if self.target_layers else hidden_states)

    def draft_block(self, token_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """See `DraftsBlocks.draft_block`."""
        streams, pre = self.first_streams(token_ids)
        for stage in self.stages:
            streams, pre = stage(streams, pre, token_ids, step)
        return hc_collapse(streams, pre, self.config, self.stages[-1].norm.weight)

    def draft_hidden_states(
        self, hidden_states: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata
    ) -> NoReturn:
        """No MTP layer: never called."""
        raise NotImplementedError("DeepSeek-V4.1 has no MTP layer")

    def draft_logits(self, hidden_states: torch.Tensor) -> NoReturn:
        """No MTP layer: never called."""
        raise NotImplementedError("DeepSeek-V4.1 has no MTP layer")
