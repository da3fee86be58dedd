"""Hidden states between two layers of a model of any family, as tensors that can be kept and gone on from.

The output of a layer is V4's residual streams, V4.1's streams with the weights that collapse them, or V3.2's sublayer
output with its residual. A sublayer's output that is still pending (`SublayerOutput`) is added when states are kept.
"""

from __future__ import annotations

from typing import Any

import torch

from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.kernels.hyper_connection.types import DelayedOutput
from deepseek_attn.models.block import Backbone, BlockBase
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.deepseek_v32 import DeepseekV32, DeepseekV32Block, add_norm
from deepseek_attn.models.deepseek_v41 import DeepseekV41, DeepseekV41Block, updated

States = tuple[torch.Tensor, ...]  # of one sequence, each ``[T, ...]``


def first_states(model: Backbone, token_ids: torch.Tensor) -> Any:
    """The input of the first block of a model, for ``token_ids [T]``."""
    if isinstance(model, DeepseekV32):
        return model.embed(token_ids), None
    assert isinstance(model, (DeepseekV4, DeepseekV41))
    return model.first_streams(token_ids)


def run_layer(block: BlockBase, output: Any, token_ids: torch.Tensor, step: StepMetadata) -> Any:
    """The output of a block, from the previous block's output."""
    if isinstance(block, DeepseekV32Block):
        return block(*output, token_ids, step)
    if isinstance(block, DeepseekV41Block):
        return block(with_memory(block, output, step), token_ids, step)
    return block(output, token_ids, step.positions, step, deferred=True)


def attend(block: BlockBase, output: Any, step: StepMetadata) -> None:
    """Makes a V4.1 block's entries, index keys and selection for later layers."""
    assert isinstance(block, DeepseekV41Block)
    block.attn(block.attn_input(with_memory(block, output, step)).x, step.positions, step)


def with_memory(block: DeepseekV41Block, output: DelayedOutput, step: StepMetadata) -> DelayedOutput:
    """The output of the block before, with the n-gram memory of ``block`` if it has one."""
    if block.engram is None:
        return output
    return output._replace(streams=block.add_memory(updated(output.streams), step))


def final_states(model: Backbone, output: Any) -> torch.Tensor:
    """The input of `Backbone.logits`, from the output of the last block."""
    if isinstance(model, DeepseekV32):
        return add_norm(model.norm, *output)[0]
    if isinstance(model, DeepseekV41):
        return model.collapse(output, model.norm)
    return model.layer_states(output)


def packed(model: Backbone, output: Any) -> States:
    """The output of a block as tensors on the CPU."""
    if isinstance(model, DeepseekV32):
        parts = output
    elif isinstance(model, DeepseekV41):
        parts = (updated(output.streams), output.pre)
    else:
        parts = (model.layer_states(output),)
    return tuple(part.cpu() for part in parts)


def unpacked(model: Backbone, states: States, device: torch.device) -> Any:
    """The output of a block that `packed` kept."""
    parts = [part.to(device) for part in states]
    if isinstance(model, DeepseekV41):
        return DelayedOutput(*parts)
    return tuple(parts) if isinstance(model, DeepseekV32) else parts[0]
