"""DeepSeek-V4 as a diagram: embedding -> m streams -> blocks -> one stream -> norm -> head.

Parameter names are the checkpoint's. Tokens of all requests of a step are concatenated, ``[T]``; the step's metadata
maps them to requests.
"""

from __future__ import annotations

import torch

from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.hyper_connection import SublayerOutput
from deepseek_attn.models.block import Backbone, Block, BuildContext
from deepseek_attn.models.dspark import DraftsBlocks, add_draft_ends, stage_context
from deepseek_attn.models.hyper_connection import collapse_streams, declare_stream_head, hc_post
from deepseek_attn.models.mtp import MTPLayer


class DraftStage(Block):
    """A stage of the DSpark drafter of V4's revisions (checkpoint: ``mtp.N``)."""

    def __init__(self, context: BuildContext[DeepseekV4Base], spec: LayerSpec):
        super().__init__(stage_context(context), spec)
        add_draft_ends(self, context, spec, "markov_w1", "markov_w2")
        if spec is context.config.mtp_layers[-1]:
            declare_stream_head(self, context.config)


class DeepseekV4(DraftsBlocks, Backbone):
    """The whole model, or some of its layers; see `Backbone`. Its hidden states are the residual streams.

    With a DSpark drafter they end in the mean of the streams after each of its target layers.
    """

    block_class = Block
    mtp_class = MTPLayer

    def __init__(self, context: BuildContext[DeepseekV4Base], layers: list[int] | None = None, mtp: bool = True):
        super().__init__(context, layers, mtp, self.mtp_class if context.config.dspark is None else DraftStage)
        declare_stream_head(self, self.config)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> streams after the last block, ``[T, hc_mult, hidden_size]``."""
        return self.run_layers(self.first_streams(token_ids), token_ids, positions, step)

    def first_streams(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Streams before the first block, ``[T, hc_mult, hidden_size]``: copies of the embedding."""
        return self.embed(token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()

    def run_layers(
        self, streams: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None
    ) -> torch.Tensor:
        """The result of `forward`, from the streams before the first loaded layer."""
        targets, means = self.target_layers, []
        for index, block in self.layers.items():
            is_target = int(index) in targets
            streams = block(streams, token_ids, positions, step, deferred=not is_target)
            if is_target:
                means.append(streams.mean(1, keepdim=True))
        if isinstance(streams, SublayerOutput):
            streams = hc_post(*streams)
        return torch.cat([streams, *means], dim=1) if means else streams

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.config.hc_mult + len(self.target_layers), self.config.hidden_size)

    @property
    def layer_state_shape(self) -> tuple[int, ...]:
        return (self.config.hc_mult, self.config.hidden_size)

    def layer_states(self, output: torch.Tensor | SublayerOutput) -> torch.Tensor:
        """The residual streams; see `Backbone.layer_states`."""
        return hc_post(*output) if isinstance(output, SublayerOutput) else output

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.logits`."""
        return self.head(collapse_streams(self, hidden_states[:, : self.config.hc_mult], self.config))

    def draft_block(self, token_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """See `DraftsBlocks.draft_block`."""
        streams = self.first_streams(token_ids)
        for stage in self.stages:
            streams = stage(streams, token_ids, step.positions, step)
        return collapse_streams(self.stages[-1], streams, self.config)

    def draft_hidden_states(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata | None,
    ) -> torch.Tensor:
        """See `Backbone.draft_hidden_states`."""
        return self.mtp["0"].draft(hidden_states, self.embed(next_token_ids), next_token_ids, positions, step)

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.draft_logits`."""
        return self.head(collapse_streams(self.mtp["0"], hidden_states, self.config))
