"""DeepSeek-V4.1's text model as a diagram: embedding -> m streams -> blocks -> one stream -> norm -> head.

Differences to V4: a sublayer's input is collapsed with the weights that the previous sublayer has computed, layers
share compressed entries and selections, and an n-gram memory is added to the streams of some layers. Parameter names
are the checkpoint's. Tokens of all requests of a step are concatenated, ``[T]``.
"""

from __future__ import annotations

import torch

from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.impls.metadata import StepMetadata, TrailingStep
from deepseek_attn.kernels.hyper_connection import DelayedInput, SublayerOutput
from deepseek_attn.kernels.hyper_connection.types import DelayedOutput
from deepseek_attn.layers.engram import Engram
from deepseek_attn.layers.weights import RMSNorm
from deepseek_attn.models.block import Backbone, Block, BuildContext
from deepseek_attn.models.dspark import DraftsBlocks, add_draft_ends, stage_context
from deepseek_attn.models.hyper_connection import hc_collapse, hc_delayed, hc_post
from deepseek_attn.v41.attention import DeepseekV41MLAAttention


class DeepseekV41Block(Block):
    """Attention and MoE, each on an input collapsed with the weights of the sublayer before (`hc_delayed`)."""

    attention_class = DeepseekV41MLAAttention
    attn: DeepseekV41MLAAttention

    def __init__(self, context: BuildContext[DeepseekV41Config], spec: V41LayerSpec, attention_only: bool = False):
        super().__init__(context, spec, attention_only)
        self.engram: Engram | None = None
        config = context.config
        if spec.has_engram and not attention_only:
            sizes = (config.hidden_size, config.hc_mult, config.rms_norm_eps)
            self.engram = Engram(config.memory, spec.index, *sizes, context.numerics, context.dtype, context.device)

    def forward(self, output: DelayedOutput, token_ids: torch.Tensor, step: StepMetadata) -> DelayedOutput:
        """Output of the previous block, or the first streams -> output of this block."""
        hc = self.attn_input(output)
        hc = self.ffn_input(hc.output(self.attn(hc.x, step.positions, step)))
        return hc.output(self.ffn(hc.x, token_ids, hc))

    def forward_trailing(
        self, output: DelayedOutput, token_ids: torch.Tensor, step: StepMetadata, trailing: TrailingStep
    ) -> DelayedOutput | None:
        """`forward` of trailing rows; keys and entries are made of all rows. None without such rows."""
        hc = self.attn_input(output)
        y = self.attn.forward_trailing(hc.x, step, trailing)
        if y is None:
            return None
        hc = self.ffn_input(DelayedInput(*map(trailing.take, hc)).output(y))
        return hc.output(self.ffn(hc.x, trailing.take(token_ids), hc))

    def attn_input(self, output: DelayedOutput) -> DelayedInput:
        """The attention's input, from the last block."""
        return hc_delayed(*output, self._hyper_connection("attn", self.attn_norm))

    def ffn_input(self, output: DelayedOutput) -> DelayedInput:
        """The experts' input, from the attention."""
        return hc_delayed(*output, self._hyper_connection("ffn", self.ffn_norm))

    def expect_experts(self, hc: DelayedInput) -> torch.Tensor:
        """See `Block.expect_experts`. The attention's hyper-connection computes the weights of the collapse."""
        pre = hc_delayed(hc.streams, hc.pre, self._hyper_connection("attn", self.attn_norm)).pre
        return self.ffn.gate.predict(hc_collapse(hc.streams, pre, self.config, self.ffn_norm.weight))

    def add_memory(self, streams: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """The streams with the n-gram memory of the layer, if it has one: the input of `forward`."""
        return streams if self.engram is None else self.engram(streams, step.engram[self.engram.layer].wait())


class DeepseekV41DraftStage(DeepseekV41Block):
    """A stage of the DSpark drafter (checkpoint: ``mtp.N``)."""

    def __init__(self, context: BuildContext[DeepseekV41Config], spec: V41LayerSpec):
        super().__init__(stage_context(context), spec)
        add_draft_ends(self, context, spec, "embed", "head")


class DeepseekV41(DraftsBlocks, Backbone):
    """The whole model, or some of its layers; see `Backbone`. Its hidden states follow the final norm.

    With a DSpark drafter, the mean of the streams before each of its target layers comes after them:
    ``[T, 1 + targets, hidden_size]``.
    """

    block_class = DeepseekV41Block

    def __init__(self, context: BuildContext[DeepseekV41Config], layers: list[int] | None = None, mtp: bool = True):
        super().__init__(context, layers, mtp, DeepseekV41DraftStage)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> hidden states after the final norm, ``[T, hidden_size]``.

        Only of the rows that the last layer computes, where these are fewer (`StepMetadata.trailing`).
        """
        output, targets, means = self.first_streams(token_ids), self.target_layers, []
        for index, layer in self.layers.items():
            trailing = step.trailing_at(int(index))
            if trailing is not None and not trailing.queries_only:
                if trailing.step is None:
                    return self.embed.weight.new_empty(0, *self.state_shape)
                output = DelayedOutput(taken(output.streams, trailing), trailing.take(output.pre))
                token_ids, means = trailing.take(token_ids), [trailing.take(rows) for rows in means]
                step, trailing = trailing.begin(step.results), None
            if layer.engram is not None or int(index) in targets:
                streams = layer.add_memory(updated(output.streams), step)
                means += [streams.mean(1)] if int(index) in targets else []
                output = output._replace(streams=streams)
            if trailing is None:
                output = layer(output, token_ids, step)
                continue
            output = layer.forward_trailing(output, token_ids, step, trailing)
            if trailing.step is None:
                return self.embed.weight.new_empty(0, *self.state_shape)
            token_ids, means, step = trailing.take(token_ids), [trailing.take(rows) for rows in means], trailing.step
        x = self.collapse(output, self.norm)
        return torch.stack([x, *means], dim=1) if means else x

    def first_streams(self, token_ids: torch.Tensor) -> DelayedOutput:
        """Streams before the first block and the weights to collapse them with: its attention reads stream 0."""
        streams = self.embed(token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2], device=streams.device, dtype=torch.float32)
        pre[:, 0] = 1
        return DelayedOutput(streams, pre)

    def collapse(self, output: DelayedOutput, norm: RMSNorm) -> torch.Tensor:
        """Normed hidden states ``[T, hidden_size]`` from the output of the last block."""
        return hc_collapse(updated(output.streams), output.pre, self.config, norm.weight)

    @property
    def state_shape(self) -> tuple[int, ...]:
        targets = len(self.target_layers)
        return (1 + targets, self.config.hidden_size) if targets else (self.config.hidden_size,)

    @property
    def layer_state_shape(self) -> tuple[int, ...]:
        return (self.config.hc_mult, self.config.hidden_size)

    def layer_states(self, output: DelayedOutput) -> torch.Tensor:
        """The residual streams; see `Backbone.layer_states`."""
        return updated(output.streams)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.logits`."""
        return self.head(hidden_states[:, 0] if self.target_layers else hidden_states)

    def draft_block(self, token_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """See `DraftsBlocks.draft_block`."""
        output = self.first_streams(token_ids)
        for stage in self.stages:
            output = stage(output, token_ids, step)
        return self.collapse(output, self.stages[-1].norm)


def taken(streams: torch.Tensor | SublayerOutput, trailing: TrailingStep) -> torch.Tensor | SublayerOutput:
    """Rows of the streams, or of the sublayer's output that updates them."""
    if isinstance(streams, SublayerOutput):
        return SublayerOutput(*map(trailing.take, streams))
    return trailing.take(streams)


def updated(streams: torch.Tensor | SublayerOutput) -> torch.Tensor:
    """The streams after a sublayer's output, if that is given."""
    return hc_post(*streams) if isinstance(streams, SublayerOutput) else streams
