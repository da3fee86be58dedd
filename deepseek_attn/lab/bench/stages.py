"""The stages of a model step: the work of each, and calls with which each can be timed alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from deepseek_attn.estimates.floors import (
    ATTENTION,
    ENGRAM,
    EXPERTS,
    HEAD,
    NORMS,
    ROUTING,
    STAGES,
    FloorWork,
    ModelWork,
    StepShape,
)
from deepseek_attn.impls.metadata import StepMetadata, TrailingStep
from deepseek_attn.kernels.hyper_connection.types import DelayedOutput
from deepseek_attn.models import block, deepseek_v41
from deepseek_attn.models.hyper_connection import hc_post
from deepseek_attn.models.moe import MoE
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.v41.attention import DeepseekV41MLAAttention

Calls = dict[str, list[Callable[[], object]]]


def stage_works(runner: ModelRunner, shape: StepShape) -> dict[str, list[FloorWork]]:
    """Work of each stage, one item per block. The head has one item: the last row of each request.

    The shared expert and dense FFNs count as experts. Norms between sublayers count as hyper-connections.
    """
    specs = runner.backbone_layers
    work = ModelWork(runner.config, runner.numerics, runner.dtype, specs)
    rows = {spec: (shape if runner.trailing is None else work.shape_of(spec, shape)).rows for spec in specs}
    attention = work.attention if runner.trailing is None else work.attention_to_end
    return {
        ATTENTION: [attention(spec, runner.layout, shape) for spec in specs],
        EXPERTS: [work.experts(spec, rows[spec]) for spec in specs],
        NORMS: [work.norms(spec, rows[spec]) for spec in specs],
        ROUTING: [work.routing(spec, rows[spec]) for spec in specs],
        HEAD: [work.head(shape.batch)],
        ENGRAM: [work.engram(spec, work.shape_of(spec, shape, before=True).rows) for spec in specs],
    }


def stage_calls(runner: ModelRunner, step: StepMetadata, last_rows: torch.Tensor) -> Calls:
    """Splits a model step into one list of calls per stage, so that each stage can be timed alone.

    The calls take random hidden states: no stage needs the result of another. Together they cover all blocks and the
    head.

    Args:
        step: metadata of the step, with rows of Engram tables on the device.
        last_rows: int64, rows to compute logits for, as indices into the rows of the last layer.

    Returns:
        Calls by stage. Run the calls of a stage in order: attention layers of V4.1 read results of earlier layers.

    Notes:
        The router of each block chooses the experts from the random hidden states of that block.
    """
    model, config, device = runner.whole_model(), runner.config, runner.device
    generator = torch.Generator(device).manual_seed(0)
    rows = len(step.positions)
    token_ids = torch.randint(config.vocab_size, (rows,), generator=generator, device=device)
    calls: Calls = {stage: [] for stage in STAGES}
    for index, layer in model.layers.items():
        trailing, attention = step.trailing_at(int(index)), partial(_attention, layer.attn)
        if trailing is not None and trailing.step is not None:
            outer, step, rows = step, trailing.step, len(trailing.step.positions)
            token_ids, attention = trailing.take(token_ids), partial(_first_attention, layer.attn, outer, trailing)
        x = torch.randn(rows, config.hidden_size, generator=generator, device=device).to(runner.dtype)
        streams = x.unsqueeze(1).repeat(1, layer.config.hc_mult, 1) if isinstance(layer, block.Block) else x
        if isinstance(model, deepseek_v41.DeepseekV41) and isinstance(layer, deepseek_v41.DeepseekV41Block):
            output = layer.attn_input(model.first_streams(token_ids)._replace(streams=streams)).output(x)
            head = partial(_collapsed_logits, model, output, last_rows)
        else:
            output = layer.collapse(streams).output(x) if isinstance(layer, block.Block) else (x, x)
            head = partial(model.logits, streams[last_rows])
        calls[ATTENTION].append(partial(attention, x, step))
        calls[NORMS] += [partial(layer.attn_input, output), partial(layer.ffn_input, output)]
        if isinstance(layer, deepseek_v41.DeepseekV41Block) and isinstance(output, DelayedOutput) and layer.engram:
            calls[NORMS].append(partial(hc_post, *output.streams))  # not fused with the collapse: Engram is between
            calls[ENGRAM].append(partial(layer.add_memory, streams, step))
        if isinstance(layer.ffn, MoE):
            calls[ROUTING].append(partial(layer.ffn.gate, x, token_ids))
            calls[EXPERTS].append(partial(layer.ffn.mixture, x, *layer.ffn.gate(x, token_ids)))
        else:
            calls[EXPERTS].append(partial(layer.ffn, x))
    calls[HEAD].append(head)
    return {stage: found for stage, found in calls.items() if found}


def _attention(attn: nn.Module, x: torch.Tensor, step: StepMetadata) -> torch.Tensor:
    return attn(x, step.positions, step)


def _first_attention(
    attn: nn.Module, outer: StepMetadata, trailing: TrailingStep, x: torch.Tensor, step: StepMetadata
) -> torch.Tensor | None:
    """Attention of the first layer that computes only trailing rows ``x [T', hidden_size]``.

    If this layer still makes the keys of all rows, ``x`` is repeated to the length of the outer step.
    """
    if isinstance(attn, DeepseekV41MLAAttention) and trailing.queries_only:
        return attn.forward_trailing(
            x.repeat(-(-len(outer.positions) // len(x)), 1)[: len(outer.positions)], outer, trailing
        )
    trailing.begin(outer.results)
    return attn(x, step.positions, step)


def _collapsed_logits(model: deepseek_v41.DeepseekV41, output: DelayedOutput, last_rows: torch.Tensor) -> torch.Tensor:
    """Logits of some rows, from the last block's output of all rows."""
    return model.head(model.collapse(output, model.norm)[last_rows])
