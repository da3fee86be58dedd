"""How the tensors of a random checkpoint are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.config.model import AnyConfig


@dataclass(frozen=True)
class Recipe:
    """How a tensor is drawn.

    Attributes:
        kind: key of ``DRAW``, which says the distribution and the dtype of what is not quantised.
        shape: logical shape.
        gain: factor on a linear weight.
        same_as: name of a tensor that this one is a copy of; None for most.
    """

    kind: str
    shape: tuple[int, ...]
    gain: float = 1.0
    same_as: str | None = None


def _normal(mean: float, std: float) -> Callable:
    return lambda recipe, generator, config: torch.randn(recipe.shape, generator=generator).mul_(std).add_(mean)


def _linear(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    std = max(0.02, recipe.shape[-1] ** -0.5) * recipe.gain
    return torch.randn(recipe.shape, generator=generator).mul_(std)


def _uniform(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    return torch.rand(recipe.shape, generator=generator).add_(0.5)


def _expert_table(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    vocab, chosen = recipe.shape
    return torch.rand(vocab, config.n_routed_experts, generator=generator).topk(chosen, dim=-1).indices


# kind -> (header dtype, draw). Biases, sinks and bases are far from zero, so that a wrong order of rows shows.
DRAW = {
    "quantized": ("BF16", _linear),
    "expert": ("BF16", _linear),
    "linear": ("BF16", _linear),
    "embed": ("BF16", _normal(0.0, 1.0)),
    "norm": ("BF16", _normal(1.0, 0.1)),
    "ape": ("F32", _normal(0.0, 0.1)),
    "sink": ("F32", _normal(0.0, 1.0)),
    "hc_fn": ("F32", _normal(0.0, 0.02)),
    "hc_base": ("F32", _normal(0.0, 0.5)),
    "hc_scale": ("F32", _uniform),
    "bias": ("F32", _normal(0.0, 0.1)),
    "index_norm": ("F32", _normal(1.0, 0.1)),
    "index_bias": ("F32", _normal(0.0, 0.2)),
    "table": ("I64", _expert_table),
}


def prefixed(prefix: str, tensors: Iterator[tuple[str, Recipe]]) -> Iterator[tuple[str, Recipe]]:
    """The same tensors under ``prefix.``."""
    for name, recipe in tensors:
        yield f"{prefix}.{name}", recipe
