"""Routed experts in pinned host memory: how much of the GPU's memory holds some of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.layers.expert_memory import HOST, ExpertMemory
from deepseek_attn.models.block import Backbone
from deepseek_attn.models.host_experts import AHEAD_LOAD, LayerExperts, NextLayer
from deepseek_attn.models.host_rows import ExpertRows
from deepseek_attn.models.moe import MoE

STEP_BYTES, STEP_BYTES_PER_TOKEN = 2 << 30, 384 << 10
"""GPU memory that is left to steps and their graphs, and more of it for each token of ``max_num_batched_tokens``."""


def hold_experts(
    model: nn.Module, config: AnyConfig, memory: ExpertMemory, device: torch.device, tokens: int
) -> ExpertRows | None:
    """Gives the layers of a loaded model rows on the GPU for experts in host memory; None if there are none.

    Called when everything else of the runner's lifetime is allocated. Without ``expert_cache_bytes`` experts take all
    free memory except the part that steps of ``tokens`` tokens need.

    Raises:
        ValueError: too little memory; see `cached_experts`.
    """
    if memory.kind != HOST or device.type == "cpu" or not isinstance(model, Backbone):
        return None
    in_turn = [module for module in model.layers.modules() if isinstance(module, MoE)]
    drafting = [module for module in model.mtp.modules() if isinstance(module, MoE)]
    layers = in_turn + drafting
    if not layers:
        return None
    budget = memory.cache_bytes
    if device.type == "meta":
        budget = None
    elif budget is None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        budget = free - STEP_BYTES - STEP_BYTES_PER_TOKEN * tokens
    rows = ExpertRows.of([layer.experts.stacks() for layer in layers], device, budget, len(in_turn))
    give_rows(in_turn, drafting, rows)
    predict_experts(model, AHEAD_LOAD)
    rows.watch(model, config.num_experts_per_tok)
    return rows


def give_rows(in_turn: Sequence[MoE], drafting: Sequence[MoE], rows: ExpertRows) -> None:
    """Lets layers read experts by rows, those that a step calls ``in_turn`` first."""
    for layer, held in zip([*in_turn, *drafting], rows.layers, strict=True):
        layer.experts.rows = held
    for layer, held in zip(in_turn, rows.layers, strict=False):
        # with data-parallel attention, experts see the tokens of all ranks
        if layer.gate.hash and not layer.parallel.dp_attention:
            held.lookup = layer.gate.lookup


def predict_experts(model: Backbone, load: float) -> None:
    """Lets layers copy experts of their next layer ahead, where it has a router that scores and rows of its own.

    Steps with more pairs of a token and an expert than ``load`` times the experts of a layer do not.
    """
    for block, following in pairwise(model.layers.values()):
        if isinstance(block.ffn, MoE) and isinstance(following.ffn, MoE) and not following.ffn.gate.hash:
            rows, others = block.ffn.experts.rows, following.ffn.experts.rows
            if isinstance(rows, LayerExperts) and isinstance(others, LayerExperts):
                most_pairs = int(load * following.ffn.experts.count)
                rows.next_layer = NextLayer(others, following.expect_experts, most_pairs)
