"""The stages of a model step: the work of each, and calls with which each can be timed alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from deepseek_attn.bench.floors import ModelWork, StepShape, Work
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.models.block import Block
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.deepseek_v32 import DeepseekV32
from deepseek_attn.models.moe import MoE
from deepseek_attn.runner.model_runner import ModelRunner

ATTENTION, EXPERTS, NORMS, ROUTING, HEAD = "attention", "experts", "hyper-connections and norms", "routing", "head"
ENGRAM = "n-gram memory"
STAGES = (ATTENTION, EXPERTS, NORMS, ROUTING, HEAD)
Calls = dict[str, list[Callable[[], object]]]


def has_stages(runner: ModelRunner) -> bool:
    """Whether the stages of a model can be timed alone: V4's and V3.2's; layers of V4.1 share what they compute."""
    return type(runner.model) in (DeepseekV4, DeepseekV32)


def stage_works(runner: ModelRunner, shape: StepShape) -> dict[str, list[Work]]:
    """Work of each stage, by block; of the head once, for the last row of each request.

    The shared expert and layers without a router count as experts, norms between sublayers as hyper-connections do.
    """
    work = ModelWork(runner.config, runner.numerics, runner.dtype)
    specs, rows = runner.backbone_layers, shape.rows
    return {
        ATTENTION: [work.attention(spec, runner.layout, shape) for spec in specs],
        EXPERTS: [work.experts(spec, rows) for spec in specs],
        NORMS: [work.norms(spec, rows) for spec in specs],
        ROUTING: [work.routing(spec, rows) for spec in specs],
        HEAD: [work.head(shape.batch)],
        ENGRAM: [work.engram(spec, rows) for spec in specs],
    }


def stage_calls(runner: ModelRunner, step: StepMetadata, last_rows: torch.Tensor) -> Calls:
    """Calls that together compute what a step computes in its blocks and its head, on random hidden states.

    Args:
        step: metadata of the step.
        last_rows: int64, the rows that logits are computed for.

    Notes:
        Experts are chosen by the router of each block, from hidden states of that block alone.
    """
    model, config, device = runner.model, runner.config, runner.device
    generator = torch.Generator(device).manual_seed(0)
    rows = len(step.positions)
    token_ids = torch.randint(config.vocab_size, (rows,), generator=generator, device=device)
    calls: Calls = {stage: [] for stage in STAGES}
    for block in model.layers.values():
        x = torch.randn(rows, config.hidden_size, generator=generator, device=device).to(runner.dtype)
        streams = x.unsqueeze(1).repeat(1, config.hc_mult, 1) if isinstance(block, Block) else x
        output = block.collapse(streams).output(x) if isinstance(block, Block) else (x, x)
        calls[ATTENTION].append(partial(block.attn, x, step.positions, step))
        calls[NORMS] += [partial(block.attn_input, output), partial(block.ffn_input, output)]
        if isinstance(block.ffn, MoE):
            calls[ROUTING].append(partial(block.ffn.gate, x, token_ids))
            calls[EXPERTS].append(partial(block.ffn.mixture, x, *block.ffn.gate(x, token_ids)))
        else:
            calls[EXPERTS].append(partial(block.ffn, x))
    calls[HEAD].append(partial(model.logits, streams[last_rows]))
    return calls
