"""Restricts rows of logits to the tokens that structured output allows: one bit per token, expanded on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepseek_attn.utils.device import to_device


def restrict(logits: torch.Tensor, masks: Sequence[bytes]) -> torch.Tensor:
    """Sets all tokens to -inf whose bit is 0, in place. The host does not wait for the device.

    Args:
        logits: ``[B, vocab]``.
        masks: one per row, at least ``vocab`` bits; bit ``i % 8`` of byte ``i // 8`` is token ``i``.
    """
    packed = to_device(torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8), logits.device)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    excluded = (packed.view(len(masks), -1, 1) & bits) == 0
    return logits.masked_fill_(excluded.flatten(1)[:, : logits.shape[1]], -torch.inf)


def some_restricted(logits: torch.Tensor, masks: Sequence[bytes | None]) -> torch.Tensor:
    """A copy of the logits, of which the rows with a mask are restricted."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    given = [mask for mask in masks if mask is not None]
    if len(places) == len(logits):
        return restrict(logits.clone(), given)
    index, logits = to_device(places, logits.device), logits.clone()
    logits[index] = restrict(logits[index], given)
    return logits
