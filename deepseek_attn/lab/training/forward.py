"""A V4 model with gradients: `models.deepseek_v4` whose attention and experts compute whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.kernels.moe import swiglu
from deepseek_attn.lab.training.attention import (
    MixedPrecision,
    Reading,
    TrainedAttention,
    WholeSequences,
    mix_bits,
    precision,
)
from deepseek_attn.models.block import Backbone, Block
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.moe import MoE
from deepseek_attn.models.mtp import MTPLayer


class TrainedMoE(MixedPrecision, MoE):
    """The experts with gradients: every expert computes every token, with weight 0 where it was not chosen.

    For the few, narrow experts of a small model, three plain matrix products are faster than sorting tokens by expert.
    The op `moe_experts` reads the number of tokens of each expert on the host, which a captured CUDA graph cannot, and
    its plain torch takes the weights of few tokens as Python numbers, through which no gradient passes.

    Attributes:
        load: float32 ``[experts]``, the share of tokens that each expert got in the last call.
    """

    load: torch.Tensor

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, hidden: Any = None) -> torch.Tensor:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> ``[T, hidden_size]``; ``hidden`` is not used."""
        chosen, share = self.gate(x, token_ids)
        experts = self.experts
        weights = torch.zeros(len(x), experts.count, device=x.device, dtype=torch.float32).scatter(1, chosen, share)
        self.load = (weights > 0).float().mean(0)
        with precision(x.device, self.product_dtype):
            gate = F.linear(x, experts.w1.weight.flatten(0, 1)).unflatten(-1, (experts.count, -1))
            up = F.linear(x, experts.w3.weight.flatten(0, 1)).unflatten(-1, (experts.count, -1))
            weighted = swiglu(gate, up, experts.limit) * weights.unsqueeze(-1)
            y = F.linear(weighted.flatten(1), experts.w2.weight.transpose(0, 1).flatten(1))
            return y + self.shared_experts(x.to(self.product_dtype))


class TrainedBlock(Block):
    """A block with gradients."""

    attention_class = TrainedAttention
    experts_class = TrainedMoE


class TrainedMTPLayer(MTPLayer):
    """The MTP layer with gradients."""

    attention_class = TrainedAttention
    experts_class = TrainedMoE


class TrainedModel(DeepseekV4):
    """The model with gradients: the step of a call is `WholeSequences`."""

    block_class = TrainedBlock
    mtp_class = TrainedMTPLayer


def ngrams_of(config: AnyConfig, token_ids: torch.Tensor) -> torch.Tensor | None:
    """Int64 ``[B * S, n]`` of ``token_ids [B, S]``, for V4.1's n-gram memory; None without one.

    Each token and those before it, which are their own numbers, as in a checkpoint without a tokenizer.
    """
    if not isinstance(config, DeepseekV41Config) or config.engram is None:
        return None
    count, longest = config.engram.engram_compressed_vocab_size, config.engram.engram_max_ngram_size
    numbers, pad = token_ids % count, config.engram.engram_pad_token_id % count
    parts = [F.pad(numbers, (shift, 0), value=pad)[:, : token_ids.shape[1]] for shift in range(longest)]
    return torch.stack(parts, -1).flatten(0, 1)


class Dense(NamedTuple):
    """Results of a model over whole sequences.

    Attributes:
        logits: float32 ``[B, S, vocab_size]``.
        index_loss: sum over the layers with an indexer, a scalar.
        loads: float32 ``[layers, experts]``: the share of tokens that each expert of a layer got.
        streams: float32 ``[B * S, hc_mult, hidden_size]`` after the last block, the input of an MTP layer.
    """

    logits: torch.Tensor
    index_loss: torch.Tensor
    loads: torch.Tensor
    streams: torch.Tensor


class DenseModel(nn.Module):
    """Calls a model with ``[B, S]`` tokens, every operation differentiable.

    Args:
        model: the whole backbone, a `TrainedModel` or `v41.TrainedV41`, its weights dequantised; an MTP layer is left
            to `drafts.DraftModel`.
        dtype: of matrix products; bfloat16 for speed on a GPU. Hyper-connections, router, norms, softmax and logits are
            float32 in any case.
        selection: which entries a query reads once entries are selected: ``learned``, ``oracle`` or ``random``, see
            `WholeSequences`. Indexers are trained if it is ``learned``.
        seed: of a random selection.
    """

    def __init__(self, model: Backbone, dtype: torch.dtype = torch.float32, selection: str = "learned", seed: int = 0):
        super().__init__()
        self.model, self.selection, self.seed = model, selection, seed
        for module in model.modules():
            if isinstance(module, MixedPrecision):
                module.product_dtype = dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        select: bool = True,
        observer: Callable[[Reading], None] | None = None,
        seed: torch.Tensor | None = None,
    ) -> Dense:
        """``token_ids`` int64 ``[B, S]``.

        Args:
            select: read the entries that are selected; otherwise all of them.
            observer: see `WholeSequences`.
            seed: int64, takes the place of the model's own.
        """
        number = self.seed if seed is None else seed
        size, length = token_ids.shape
        step = WholeSequences(
            size,
            length,
            token_ids.device,
            select=self.selection if select else "all",
            trains_index=self.selection == "learned",
            noise=mix_bits(mix_bits(token_ids + number * 7919).cumsum(1)) if self.selection == "random" else None,
            observer=observer,
            ngrams=ngrams_of(self.model.config, token_ids),
        )
        with reference_ops():
            streams = self.model(token_ids.flatten(), step.positions, step)
            logits = step.rows(self.model.logits(streams))
        index_loss = sum(step.index_losses, start=streams.new_zeros(()))
        return Dense(logits, index_loss, torch.stack([block.ffn.load for block in self.model.layers.values()]), streams)
