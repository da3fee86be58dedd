"""The work of a whole prompt by groups of layers that compute the same rows of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.trailing import trailing_parts
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.estimates.floors import FloorWork, ModelWork, StepShape


@dataclass(frozen=True)
class LayerGroup:
    """Layers ``first`` to ``last`` of a prompt.

    Attributes:
        rows: trailing rows that they compute; the first of upper layers makes entries of all rows.
        flops, bytes: the least that results of the prompt's last token need of them; all_flops: of all rows.
    """

    first: int
    last: int
    rows: int
    flops: int
    bytes: int
    all_flops: int


def prompt_groups(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    tokens: int,
    max_rollback: int,
    approximate: bool = False,
) -> list[LayerGroup]:
    """Groups of a model whose upper layers compute trailing rows alone (V4.1), for a prompt computed in one step.

    Empty for other models. Flops and bytes are of exact results, even if ``approximate`` computes fewer rows.
    """
    if not isinstance(config, DeepseekV41Config):
        return []
    parts = trailing_parts(config.layers, config.sliding_window, len(config.mtp_layers) > 0, approximate)
    starts = sorted({0, *(part.layer for part in parts if part.queries_only or part.layer != parts[0].layer + 1)})
    rows = {part.layer: min(tokens, part.reach + max(1, max_rollback)) for part in parts}
    layout, shape = make_layout(config, numerics, dtype, tokens, 1, tokens), StepShape(1, tokens, tokens)
    work, groups = ModelWork(config, numerics, dtype), []
    for first, end in zip(starts, [*starts[1:], len(config.layers)], strict=True):
        found, every = FloorWork({}), FloorWork({})
        for spec in config.layers[first:end]:
            own = work.shape_of(spec, shape).rows
            found += work.attention_to_end(spec, layout, shape) + work.experts(spec, own) + work.norms(spec, own)
            every += work.attention(spec, layout, shape) + work.experts(spec, tokens) + work.norms(spec, tokens)
        groups.append(
            LayerGroup(first, end - 1, rows.get(first, tokens), found.total_flops, found.total_bytes, every.total_flops)
        )
    return groups
