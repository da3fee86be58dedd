"""V4's multi-token-prediction layer: from position t and the token at t + 1, logits for t + 2."""

from __future__ import annotations

import torch

from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.weights import RMSNorm
from deepseek_attn.models.block import Block, BuildContext
from deepseek_attn.models.hyper_connection import declare_stream_head


class MTPLayer(Block):
    """One more block on the backbone's streams, with a separate window cache (checkpoint: ``mtp.N``).

    It has separate weights for norm and collapse of its streams; embedding and output head are the backbone's.
    """

    def __init__(self, context: BuildContext[DeepseekV4Base], spec: LayerSpec):
        config, device = context.config, context.device
        super().__init__(context, spec)
        declare_stream_head(self, config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.e_proj = Linear(config.hidden_size, config.hidden_size, context.numerics, context.dtype, device)
        self.h_proj = Linear(config.hidden_size, config.hidden_size, context.numerics, context.dtype, device)

    def draft(
        self,
        streams: torch.Tensor,
        next_embeddings: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata | None,
    ) -> torch.Tensor:
        """New streams ``[T, hc_mult, hidden_size]``, for `collapse_streams` and the backbone's head.

        Args:
            streams: ``[T, hc_mult, hidden_size]`` of the backbone after its last block, or of the previous draft step.
            next_embeddings: ``[T, hidden_size]``, embeddings of the token after each row.
            positions: int64 ``[T]`` of the rows themselves.
        """
        e = self.e_proj(self.enorm(next_embeddings))
        h = self.h_proj(self.hnorm(streams).flatten(0, 1)).view_as(streams)
        return self(e.unsqueeze(1) + h, next_token_ids, positions, step)
