"""DeepSeek-V4 as a diagram: embedding -> m streams -> blocks -> one stream -> norm -> head.

Parameter names are the checkpoint's. Tokens of all requests of a step lie flat, ``[T]``; what belongs to whom is in the
step's metadata.
"""

from __future__ import annotations

import torch
from torch import nn

from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.embedding import Embedding, Head
from deepseek_attn.layers.weights import CheckpointModule
from deepseek_attn.models.block import Block, BuildContext, collapse_streams, declare_stream_head
from deepseek_attn.models.mtp import MTPLayer


class DeepseekV4(CheckpointModule):
    """The whole model, or some of its layers. Built without weights; ``loader.load_model`` fills it.

    Args:
        layers: backbone layer numbers to build, in model order; None builds all of them.
        mtp: also build the MTP layers.
    """

    def __init__(self, context: BuildContext, layers: list[int] | None = None, mtp: bool = True):
        config, device = context.config, context.device
        super().__init__(device)
        self.config = config
        declare_stream_head(self, config, device)
        specs = config.layers if layers is None else [config.layers[i] for i in layers]
        self.embed = Embedding(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        self.layers = nn.ModuleDict({str(spec.index): Block(context, spec) for spec in specs})
        self.head = Head(config.vocab_size, config.hidden_size, context.dtype, device, context.parallel)
        drafts = config.mtp_layers if mtp else ()
        self.mtp = nn.ModuleDict({str(i): MTPLayer(context, spec) for i, spec in enumerate(drafts)})

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None) -> torch.Tensor:
        """``token_ids``, ``positions`` int64 ``[T]`` -> streams after the last block, ``[T, hc_mult, hidden_size]``."""
        streams = self.embed(token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for block in self.layers.values():
            streams = block(streams, token_ids, positions, step)
        return streams

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Float32 ``[T, vocab_size]`` from streams."""
        return self.head(collapse_streams(self, streams, self.config))

    def draft_streams(
        self, streams: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata | None
    ) -> torch.Tensor:
        """The MTP layer's streams, for `draft_logits` and to draft on from.

        Args:
            streams: ``[T, hc_mult, hidden_size]`` of the backbone, or of the MTP layer for the token before.
        """
        embeddings = self.embed(next_token_ids)
        return self.mtp["0"].draft(streams, embeddings, next_token_ids, positions, step)

    def draft_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """For the token after next, float32 ``[T, vocab_size]``, from the MTP layer's streams."""
        return self.head(self.mtp["0"].collapse(streams))
