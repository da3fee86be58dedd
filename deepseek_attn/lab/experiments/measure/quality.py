"""Differences between the predictions of two models: loss, KL divergence and top-1 agreement, by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepseek_attn.lab.experiments.define.results import CheckpointResult, PositionRow


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Teacher-forced loss in nats, float32 ``[T - 1]``, of ``logits [T, vocab]`` on ``tokens [T]``."""
    return F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="none")


def divergence(own: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(own || logits) in nats, float32 ``[T]``, and whether the argmax is the same, bool ``[T]``."""
    own, logits = own.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (own.exp() * (own - logits)).sum(-1), own.argmax(-1) == logits.argmax(-1)


def compare(own: list[torch.Tensor], found: list[torch.Tensor], prompts: list[list[int]]) -> CheckpointResult:
    """Quality of the logits ``found``, ``[len, vocab]`` per prompt, relative to the logits of the ``own`` schedule.

    Returns:
        ``loss`` in nats per token, ``kl`` in nats, ``top1`` agreement in [0, 1], and ``by_position``: the same for
        positions in [start, end), whose width doubles.
    """
    loss, kl, same, positions = [], [], [], []
    for mine, other, prompt in zip(own, found, prompts, strict=True):
        kl_of, same_of = divergence(mine[:-1], other[:-1])
        loss.append(next_token_loss(other, torch.tensor(prompt, dtype=torch.int64, device="cpu")))
        kl.append(kl_of)
        same.append(same_of.float())
        positions.append(torch.arange(len(prompt) - 1, device="cpu"))
    values = {"loss": torch.cat(loss), "kl": torch.cat(kl), "top1": torch.cat(same)}
    means = {name: float(value.double().mean()) for name, value in values.items()}
    return {
        "loss": means["loss"],
        "kl": means["kl"],
        "top1": means["top1"],
        "by_position": by_position(torch.cat(positions), values),
    }


def by_position(positions: torch.Tensor, values: dict[str, torch.Tensor]) -> list[PositionRow]:
    """Means of ``values [N]`` over positions in [0, 32), [32, 64), [64, 128), ..."""
    rows, start, end = [], 0, 32
    while len(positions) and start <= int(positions.max()):
        mask = (positions >= start) & (positions < end)
        if mask.any():
            means = {name: float(value[mask].double().mean()) for name, value in values.items()}
            rows.append({"start": start, "end": end, "tokens": int(mask.sum()), **means})
        start, end = end, 2 * end
    return rows
