"""A V4 model over whole sequences with gradients: the modules of `models.deepseek_v4`, driven without caches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.kernels.moe.reference import swiglu
from deepseek_attn.lab.training.attention import attend
from deepseek_attn.models.block import Block
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.hyper_connection import collapse_streams, hc_post, hc_pre, hyper_connection
from deepseek_attn.models.moe import MoE


class Dense(NamedTuple):
    """Results of a model over whole sequences.

    Attributes:
        logits: float32 ``[B, S, vocab_size]``.
        index_loss: sum over the layers with an indexer, a scalar.
        loads: float32 ``[layers, experts]``: the share of tokens that each expert of a layer got.
        streams: float32 ``[B * S, hc_mult, hidden_size]`` after the last block, what an MTP layer reads.
    """

    logits: torch.Tensor
    index_loss: torch.Tensor
    loads: torch.Tensor
    streams: torch.Tensor


class DenseModel(nn.Module):
    """Drives a model's own modules over ``[B, S]`` tokens, every operation differentiable.

    Args:
        model: the whole backbone, its weights dequantised; an MTP layer is left to `drafts.DraftModel`.
        dtype: of matrix products; bfloat16 for speed on a GPU. Hyper-connections, router, norms, softmax and logits are
            float32 in any case.
    """

    def __init__(self, model: DeepseekV4, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, token_ids: torch.Tensor, select: bool = True) -> Dense:
        """``token_ids`` int64 ``[B, S]``.

        Args:
            select: read the entries that indexers select; otherwise all of them.
        """
        model, config = self.model, self.model.config
        batch, length = token_ids.shape
        precision = self.precision(token_ids.device)
        flat = token_ids.flatten()
        streams = F.embedding(flat, model.embed.weight).unsqueeze(1).repeat(1, config.hc_mult, 1)
        index_loss, loads = streams.new_zeros(()), []
        with reference_ops():
            for block in model.layers.values():
                streams, loss = self.attention(block, streams, (batch, length), precision, select)
                index_loss = index_loss if loss is None else index_loss + loss
                streams, load = self.experts(block, streams, flat, precision)
                loads.append(load)
            logits = F.linear(collapse_streams(model, streams, config).float(), model.head.weight.float())
        return Dense(logits.view(batch, length, -1), index_loss, torch.stack(loads), streams)

    def precision(self, device: torch.device) -> AbstractContextManager:
        """Context of matrix products."""
        if self.dtype == torch.float32:
            return nullcontext()
        # without the cache of cast weights, which a captured graph must not keep
        return torch.autocast(device.type, self.dtype, cache_enabled=False)

    def attention(
        self,
        block: Block,
        streams: torch.Tensor,
        shape: tuple[int, int],
        precision: AbstractContextManager,
        select: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        config = block.config
        x, post, comb = hc_pre(streams, hyper_connection(block, "attn", config))
        y, loss = attend(block.attn, block.attn_norm(x).view(*shape, -1), precision, select)
        return hc_post(y.flatten(0, 1), streams, post, comb), loss

    def experts(
        self, block: Block, streams: torch.Tensor, token_ids: torch.Tensor, precision: AbstractContextManager
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, post, comb = hc_pre(streams, hyper_connection(block, "ffn", block.config))
        y, load = mixture(block.ffn, block.ffn_norm(x), token_ids, precision)
        return hc_post(y, streams, post, comb), load


def mixture(
    moe: MoE, x: torch.Tensor, token_ids: torch.Tensor, precision: AbstractContextManager
) -> tuple[torch.Tensor, torch.Tensor]:
    """``moe`` over ``x [T, hidden_size]`` -> ``[T, hidden_size]`` and the share of tokens per expert ``[experts]``.

    Every expert computes every token, with weight 0 where it was not chosen: for the few, narrow experts of a small
    model, three plain matrix products are faster than sorting tokens by expert.
    """
    chosen, share = moe.gate(x, token_ids)
    weights = torch.zeros(len(x), moe.experts.count, device=x.device, dtype=torch.float32).scatter(1, chosen, share)
    experts, shared = moe.experts, moe.shared_experts
    with precision:
        gate = F.linear(x, experts.w1.weight.flatten(0, 1)).unflatten(-1, (experts.count, -1))
        up = F.linear(x, experts.w3.weight.flatten(0, 1)).unflatten(-1, (experts.count, -1))
        hidden = swiglu(gate, up, experts.limit) * weights.unsqueeze(-1)
        y = F.linear(hidden.flatten(1), experts.w2.weight.transpose(0, 1).flatten(1))
        hidden = swiglu(F.linear(x, shared.w1.weight), F.linear(x, shared.w3.weight), shared.limit)
        y = y + F.linear(hidden, shared.w2.weight)
    return y, (weights > 0).float().mean(0)
