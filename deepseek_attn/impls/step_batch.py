"""The batch that a step's metadata was made for: layers refuse any other batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pools import CachePools


@dataclass
class StepBatch:
    """Sequences of a step as they were when its metadata was made.

    Attributes:
        pools: caches that the layers must be bound to.
        caches: caches of the sequences.
        new_tokens: number of new tokens of each sequence, without padding.
        x_shape, x_dtype: shape and dtype of the hidden states.
        positions: the metadata's positions.
        starts, versions: `SequenceCache.num_tokens` and ``version`` of each sequence.
        computed_by: names of the layers that have computed the step.
    """

    pools: CachePools
    caches: list[SequenceCache]
    new_tokens: list[int]
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    positions: torch.Tensor
    starts: list[int] = field(init=False)
    versions: list[int] = field(init=False)
    computed_by: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.starts = [cache.num_tokens for cache in self.caches]
        self.versions = [cache.version for cache in self.caches]
        for cache in self.caches:
            cache.uncommitted = 0

    def begin(self, layer: str, pools: CachePools, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Called by each layer before it computes the step; the step is then pending until it is committed.

        Raises:
            ValueError: hidden states, positions or caches of another step.
            RuntimeError: the sequences have changed since, or the layer has computed the step already.
        """
        if pools is not self.pools:
            raise ValueError(f"the step's metadata is another runner's than {layer}: call step_metadata of its runner")
        check_hidden_states(x, self.x_shape, self.x_dtype, self.positions.device)
        if positions is not self.positions:
            raise ValueError(f"{layer} takes the positions of the step's metadata: pass step.positions")
        for cache, start, version, n in zip(self.caches, self.starts, self.versions, self.new_tokens, strict=True):
            if cache.num_tokens != start or cache.version != version or start + n > cache.owned_to:
                raise RuntimeError(
                    f"the step's metadata is of the {n} tokens after {start} of a sequence that has {cache.num_tokens} "
                    "by now, or other pages: it was committed, truncated, freed, forked or reserved again; call "
                    "reserve and step_metadata again, for its next tokens"
                )
        if layer in self.computed_by:
            raise RuntimeError(
                f"{layer} has computed this step: call manager.commit for its sequences, then reserve and "
                "step_metadata for their next tokens"
            )
        self.computed_by.add(layer)
        for cache, n in zip(self.caches, self.new_tokens, strict=True):
            cache.uncommitted = n


def check_hidden_states(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless ``x`` is a dense tensor of this shape, dtype and device, without gradients."""
    names = "[tokens, hidden_size]" if len(shape) == 2 else "[layers, tokens, hidden_size]"
    expected = f"{names} = {list(shape)} in {dtype} on {device}"
    if not isinstance(x, torch.Tensor) or x.is_nested:
        given = "a nested tensor" if isinstance(x, torch.Tensor) else f"of type {type(x).__name__}"
        raise ValueError(f"x is {given}: layers take a dense tensor {expected}")
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device or x.layout != torch.strided:
        given = f"{list(x.shape)} in {x.dtype} on {x.device}"
        layout = "" if x.layout == torch.strided else f" in layout {x.layout}"
        raise ValueError(f"x is {given}{layout}: layers take a dense tensor {expected}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x requires grad, and no gradient goes through the caches: pass x.detach(), or train with "
            "deepseek_attn.training"
        )
