"""How the tensors of a random checkpoint are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.config.model import AnyConfig

ROWS = "rows"  # kind of an Engram table: float8_e4m3fn with a scale per row and 32 columns, made row by row


@dataclass(frozen=True)
class Recipe:
    """Distribution and shape of a random tensor.

    Attributes:
        kind: key of ``DRAW``: the distribution, and the dtype of tensors that are not quantised.
        shape: logical shape.
        gain: factor on a linear weight.
        same_as: name of the tensor that this tensor copies; None for most tensors.
    """

    kind: str
    shape: tuple[int, ...]
    gain: float = 1.0
    same_as: str | None = None


class Draw(NamedTuple):
    """Values of one kind of tensor.

    Attributes:
        dtype: dtype in the header, where the tensor is not quantised.
        values: draws the tensor on the generator's device, float32 unless it is a table of expert ids.
    """

    dtype: str
    values: Callable[[Recipe, torch.Generator, AnyConfig], torch.Tensor]


def _normal(mean: float, std: float) -> Callable[[Recipe, torch.Generator, AnyConfig], torch.Tensor]:
    return lambda recipe, generator, config: (
        torch.randn(recipe.shape, generator=generator, dtype=torch.float32, device=generator.device)
        .mul_(std)
        .add_(mean)
    )


def _linear(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    std = max(0.02, recipe.shape[-1] ** -0.5) * recipe.gain
    return torch.randn(recipe.shape, generator=generator, dtype=torch.float32, device=generator.device).mul_(std)


def _uniform(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    return torch.rand(recipe.shape, generator=generator, dtype=torch.float32, device=generator.device).add_(0.5)


def _expert_table(recipe: Recipe, generator: torch.Generator, config: AnyConfig) -> torch.Tensor:
    vocab, chosen = recipe.shape
    return (
        torch.rand(vocab, config.n_routed_experts, generator=generator, dtype=torch.float32, device=generator.device)
        .topk(chosen, dim=-1)
        .indices
    )


# By kind. Biases, sinks and bases are far from zero, so that a wrong order of rows shows.
DRAW = {
    "quantized": Draw("BF16", _linear),
    "expert": Draw("BF16", _linear),
    "linear": Draw("BF16", _linear),
    "embed": Draw("BF16", _normal(0.0, 1.0)),
    "norm": Draw("BF16", _normal(1.0, 0.1)),
    "ape": Draw("F32", _normal(0.0, 0.1)),
    "sink": Draw("F32", _normal(0.0, 1.0)),
    "hc_fn": Draw("F32", _normal(0.0, 0.02)),
    "hc_base": Draw("F32", _normal(0.0, 0.5)),
    "hc_scale": Draw("F32", _uniform),
    "bias": Draw("F32", _normal(0.0, 0.1)),
    "index_norm": Draw("F32", _normal(1.0, 0.1)),
    "index_bias": Draw("F32", _normal(0.0, 0.2)),
    "table": Draw("I64", _expert_table),
}


def mlp(hidden: int, inner: int, kind: str, gain: float = 1.0) -> Iterator[tuple[str, Recipe]]:
    """The three matrices of a gated MLP; ``gain`` on w1 and w3 is undone in w2."""
    yield "w1.weight", Recipe(kind, (inner, hidden), gain)
    yield "w2.weight", Recipe(kind, (hidden, inner), gain**-2)
    yield "w3.weight", Recipe(kind, (inner, hidden), gain)


def prefixed(prefix: str, tensors: Iterator[tuple[str, Recipe]]) -> Iterator[tuple[str, Recipe]]:
    """The same tensors under ``prefix.``."""
    for name, recipe in tensors:
        yield f"{prefix}.{name}", recipe
