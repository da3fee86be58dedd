"""DeepSeek-V3.2 (and V3, V3.1) as a diagram: embedding -> blocks on one residual stream -> norm -> head.

Parameter names are those of DeepSeek's inference code; ``checkpoint/names_v32.py`` has the checkpoint's. Tokens of all
requests of a step lie flat, ``[T]``; what belongs to whom is in the step's metadata.
"""

from __future__ import annotations

import torch
from torch import nn

from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.kernels.common.norm_rope import rms_norm
from deepseek_attn.layers.embedding import Embedding, Head
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.models.block import BuildContext
from deepseek_attn.models.moe import MLP, MoE
from deepseek_attn.v32.attention import DeepseekV32MLAAttention
from deepseek_attn.v32.step_metadata import TokenStepMetadata


class Block(CheckpointModule):
    """Attention, then a dense MLP or experts. The residual is rounded only where it is stored."""

    def __init__(self, context: BuildContext, spec: V32LayerSpec, attention_only: bool = False):
        config, numerics, dtype, device = context.config, context.numerics, context.dtype, context.device
        super().__init__(device)
        self.parallel = parallel = context.parallel
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.attn = DeepseekV32MLAAttention(config, spec, context.rope(spec), numerics, dtype, device, parallel)
        if attention_only:
            return
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        if spec.dense_ffn:
            widths, limit = (config.hidden_size, config.intermediate_size), config.swiglu_limit
            self.ffn = MLP(*widths, limit, numerics, dtype, device, parallel.token_shard)
        else:
            self.ffn = MoE(config, spec, numerics, dtype, device, parallel)

    def attend(self, x: torch.Tensor, step: TokenStepMetadata) -> torch.Tensor:
        """The attention layer alone, on normed ``x [T, hidden_size]``."""
        return self.attn(x, step)

    def forward(
        self, y: torch.Tensor, residual: torch.Tensor | None, token_ids: torch.Tensor, step: TokenStepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``y [T, hidden_size]``, output of the sublayer before, and the residual it adds to -> the same after."""
        x, residual = add_norm(self.attn_norm, y, residual)
        x, residual = add_norm(self.ffn_norm, self.attn(x, step), residual)
        return self.ffn(x, token_ids) if isinstance(self.ffn, MoE) else self.parallel.sum(self.ffn(x)), residual


def add_norm(norm: RMSNorm, y: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the unrounded float32 sum, the sum), both in the dtype of ``y``."""
    if residual is None:
        return norm(y), y
    total = y.float() + residual.float()
    return rms_norm(total, norm.eps, norm.weight).to(y.dtype), total.to(y.dtype)


class MTPLayer(Block):
    """Multi-token prediction: from position t and the token at t + 1, logits for t + 2.

    One more block with caches of its own; ``norm`` is the checkpoint's ``shared_head.norm``, embedding and head are the
    backbone's.
    """

    def __init__(self, context: BuildContext, spec: V32LayerSpec):
        config, device = context.config, context.device
        super().__init__(context, spec)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, context.numerics, context.dtype, device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)

    def draft(
        self, states: torch.Tensor, embeddings: torch.Tensor, token_ids: torch.Tensor, step: TokenStepMetadata
    ) -> torch.Tensor:
        """States to draft on from ``states [T, hidden_size]`` and the ``embeddings`` of the token after each row."""
        z = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], dim=-1))
        return add_norm(self.norm, *self(z, None, token_ids, step))[0]


class DeepseekV32(CheckpointModule):
    """The whole model, or some of its layers. Built without weights; ``loader.load_model`` fills it.

    Args:
        layers: backbone layer numbers to build, in model order; None builds all of them.
        mtp: also build the MTP layers.
    """

    def __init__(self, context: BuildContext, layers: list[int] | None = None, mtp: bool = True):
        config, device = context.config, context.device
        super().__init__(device)
        specs = config.layers if layers is None else [config.layers[i] for i in layers]
        self.embed = Embedding(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        self.layers = nn.ModuleDict({str(spec.index): Block(context, spec) for spec in specs})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.head = Head(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        drafts = config.mtp_layers if mtp else ()
        self.mtp = nn.ModuleDict({str(i): MTPLayer(context, spec) for i, spec in enumerate(drafts)})

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: TokenStepMetadata) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> states after the final norm, ``[T, hidden_size]``."""
        y, residual = self.embed(token_ids), None
        for block in self.layers.values():
            y, residual = block(y, residual, token_ids, step)
        return add_norm(self.norm, y, residual)[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 ``[T, vocab_size]`` from states."""
        return self.head(states)

    def draft_streams(
        self, states: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor, step: TokenStepMetadata
    ) -> torch.Tensor:
        """The MTP layer's states ``[T, hidden_size]``, for `draft_logits` and to draft on from."""
        return self.mtp["0"].draft(states, self.embed(next_token_ids), next_token_ids, step)

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """For the token after next, float32 ``[T, vocab_size]``, from the MTP layer's states."""
        return self.head(states)
