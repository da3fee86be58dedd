"""DeepSeek-V3.2 (and V3, V3.1) as a diagram: embedding -> blocks on one residual stream -> norm -> head.

Parameter names follow DeepSeek's inference code; ``checkpoint/names_v32.py`` has the checkpoint's. Tokens of all
requests of a step are concatenated, ``[T]``; the step's metadata maps them to requests.
"""

from __future__ import annotations

from functools import partial

import torch

from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.norm import add_rms_norm
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.split import shard_unit
from deepseek_attn.layers.weights import RMSNorm
from deepseek_attn.models.block import Backbone, BlockBase, BuildContext
from deepseek_attn.models.moe import MLP, MoE
from deepseek_attn.v32.attention import DeepseekV32MLAAttention


class DeepseekV32Block(BlockBase):
    """Attention, then a dense MLP or experts. The residual is float32 between its sum and its norm."""

    attention_class = DeepseekV32MLAAttention

    def __init__(self, context: BuildContext[DeepseekV32Config], spec: V32LayerSpec, attention_only: bool = False):
        config, numerics, dtype, device = context.config, context.numerics, context.dtype, context.device
        super().__init__(context, spec, attention_only)
        self.parallel = parallel = context.parallel
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        rope, impl = context.rope(spec), context.impl
        self.attn = self.attention_class(config, spec, rope, numerics, dtype, device, impl, parallel)
        if attention_only:
            return
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        if spec.dense_ffn:
            widths, limit = (config.hidden_size, config.intermediate_size), config.swiglu_limit
            split = partial(parallel.token_shard, unit=shard_unit(config, numerics))
            self.ffn = MLP(*widths, limit, numerics, dtype, device, split)
        else:
            self.ffn = MoE(config, spec, numerics, dtype, device, parallel, context.experts)

    def forward(
        self, y: torch.Tensor, residual: torch.Tensor | None, token_ids: torch.Tensor, step: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the last sublayer ``y [T, hidden_size]``, residual that it adds to) -> the same of this block.

        In the first block, the residual is None.
        """
        x, residual = self.attn_input((y, residual))
        x, residual = self.ffn_input((self.attn(x, step.positions, step), residual))
        if isinstance(self.ffn, MoE):
            return self.ffn(x, token_ids, residual), residual
        return self.parallel.sum(self.ffn(x)), residual

    def expect_experts(self, residual: torch.Tensor) -> torch.Tensor:
        """Experts ``[T, k]`` that the router chooses for the residual before the experts of the previous block."""
        assert isinstance(self.ffn, MoE)
        return self.ffn.gate.predict(add_norm(self.ffn_norm, residual, None)[0])

    def attn_input(self, output: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the attention's input, the residual), from the last sublayer of the block before and its residual."""
        return add_norm(self.attn_norm, *output)

    def ffn_input(self, output: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the experts, from the attention."""
        return add_norm(self.ffn_norm, *output)


def add_norm(norm: RMSNorm, y: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of ``y + residual``, the sum), as `add_rms_norm`; of ``y`` alone without a residual."""
    if residual is None:
        return norm(y), y
    x, total = add_rms_norm(y, residual, norm.eps, norm.weight)
    return x, total


class DeepseekV32MTPLayer(DeepseekV32Block):
    """Multi-token prediction: from position t and the token at t + 1, logits for t + 2.

    One more block with separate caches; ``norm`` is the checkpoint's ``shared_head.norm``, embedding and head are the
    backbone's.
    """

    def __init__(self, context: BuildContext[DeepseekV32Config], spec: V32LayerSpec):
        config, device = context.config, context.device
        super().__init__(context, spec)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, context.numerics, context.dtype, device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)

    def draft(
        self,
        hidden_states: torch.Tensor,
        next_embeddings: torch.Tensor,
        next_token_ids: torch.Tensor,
        step: StepMetadata,
    ) -> torch.Tensor:
        """New hidden states from ``hidden_states [T, hidden_size]`` and the embeddings of the token after each row."""
        z = self.eh_proj(torch.cat([self.enorm(next_embeddings), self.hnorm(hidden_states)], dim=-1))
        return add_norm(self.norm, *self(z, None, next_token_ids, step))[0]


class DeepseekV32(Backbone):
    """The whole model, or some of its layers; see `Backbone`. Its hidden states are those after the final norm."""

    block_class = DeepseekV32Block
    mtp_class = DeepseekV32MTPLayer

    def __init__(self, context: BuildContext[DeepseekV32Config], layers: list[int] | None = None, mtp: bool = True):
        super().__init__(context, layers, mtp, self.mtp_class)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> hidden states after the final norm, ``[T, hidden_size]``."""
        y, residual = self.embed(token_ids), None
        for block in self.layers.values():
            y, residual = block(y, residual, token_ids, step)
        return add_norm(self.norm, y, residual)[0]

    @property
    def layer_state_shape(self) -> tuple[int, ...]:
        return (self.config.hidden_size,)

    def layer_states(self, output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The residual, summed in float32 as the next block does; see `Backbone.layer_states`."""
        y, residual = output
        return (y.float() + residual.float()).to(y.dtype)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.logits`."""
        return self.head(hidden_states)

    def draft_hidden_states(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
    ) -> torch.Tensor:
        """See `Backbone.draft_hidden_states`; positions are the step's."""
        return self.mtp["0"].draft(hidden_states, self.embed(next_token_ids), next_token_ids, step)

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `Backbone.draft_logits`."""
        return self.head(hidden_states)
