"""The MTP layer over whole sequences: its drafts from every row, with gradients to its own parameters alone.

At inference the MTP layer runs over confirmed tokens, then over its own drafts (`runner.drafting`): each step reads the
streams of the step before, one row earlier, and the window cache holds rows of confirmed tokens followed by rows of
drafts. Here every row is the last confirmed one of a drafting, all at once, and rows are attended as in that cache, so
that drafts are exactly a runner's. One thing differs: the tokens that the steps read are the text's (teacher forcing),
where a runner has only its own drafts. The two agree until a draft is wrong, and no draft after that is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.lab.training.attention import WholeSequences, shifted
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.models.hyper_connection import collapse_streams


class Drafts(NamedTuple):
    """Logits of the backbone and of drafts over whole sequences.

    Attributes:
        backbone: the backbone's logits, float32 ``[B, S, vocab_size]``, without gradient.
        logits: float32 ``[B, S - 1, vocab_size]`` of each draft: row p is for token p + 2, like row p + 1 of
            ``backbone``. Draft d (from 0) has no meaning before row d.
        loads: float32 ``[1, experts]``: the share of tokens that each expert of the MTP layer got.
    """

    backbone: torch.Tensor
    logits: list[torch.Tensor]
    loads: torch.Tensor


class DraftModel(nn.Module):
    """Drives the MTP layer of a model behind its backbone, which learns nothing from it.

    The streams, the embedding and the output head are read without gradient: the backbone's loss is the same as
    without an MTP layer, and the MTP layer does not change its own targets.
    """

    def __init__(self, dense: DenseModel):
        super().__init__()
        self.dense = dense

    def forward(self, token_ids: torch.Tensor, depth: int) -> Drafts:
        """``token_ids`` int64 ``[B, S]``, ``S`` at least 2.

        Args:
            depth: drafts from every row.
        """
        model = self.dense.model
        size, length = token_ids.shape
        layer, step = model.mtp["0"], WholeSequences(size, length - 1, token_ids.device, draft_keys=[])
        next_ids, positions = token_ids[:, 1:].flatten(), step.positions
        with torch.no_grad():
            dense = self.dense(token_ids)
            streams = dense.streams.unflatten(0, token_ids.shape)[:, :-1]
            embedded, head = model.embed(next_ids), model.head.weight.detach().float()
        logits, loads = [], []
        with reference_ops():
            for draft in range(depth):
                before = shifted(streams) if draft else streams
                streams = layer.draft(before.flatten(0, 1), embedded, next_ids, positions, step)
                logits.append(step.rows(F.linear(collapse_streams(layer, streams, layer.config), head)))
                streams = step.rows(streams)
                loads.append(layer.ffn.load)
        return Drafts(dense.logits, logits, torch.stack(loads).mean(0, keepdim=True))


def draft_losses(drafts: Drafts, counted: torch.Tensor, greedy_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of drafts to the backbone's predictions at the same place, which decides whether they are accepted.

    Args:
        counted: bool ``[B, S - 1]``, rows whose token p + 2 counts.
        greedy_share: weight of the cross-entropy with the backbone's likeliest token, against that of the divergence.

    Returns:
        The loss to minimise and the divergence from the backbone's distribution, in nats, each the mean of all drafts.
    """
    expected = drafts.backbone[:, 1:].log_softmax(-1)
    greedy = expected.argmax(-1, keepdim=True)
    losses, divergences = [], []
    for draft, logits in enumerate(drafts.logits):
        found, target, rows = logits[:, draft:].log_softmax(-1), expected[:, draft:], counted[:, draft:]
        count = rows.sum().clamp_min(1)
        divergence = ((target.exp() * (target - found)).sum(-1) * rows).sum() / count
        missed = (-found.gather(-1, greedy[:, draft:]).squeeze(-1) * rows).sum() / count
        losses.append((1.0 - greedy_share) * divergence + greedy_share * missed)
        divergences.append(divergence.detach())
    return torch.stack(losses).mean(), torch.stack(divergences).mean()


def count_accepted(drafts: Drafts, counted: torch.Tensor) -> torch.Tensor:
    """Int64 ``[depth, 2]``: greedy drafts that are the backbone's greedy token, and drafts whose predecessors all are.

    Args:
        counted: bool ``[B, S - 1]``, rows whose token p + 2 counts.
    """
    greedy = drafts.backbone[:, 1:].argmax(-1)
    alive, counts = torch.ones_like(counted), []
    for draft, logits in enumerate(drafts.logits):
        tried = shifted(alive) if draft else alive
        alive = tried & (logits.argmax(-1) == greedy)
        counts.append(torch.stack([(alive & counted).sum(), (tried & counted).sum()]))
    return torch.stack(counts)
