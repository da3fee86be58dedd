"""DSpark: draft stages that propose a block of tokens at once from the backbone's residual streams.

For each position, stage 0 projects the streams of some backbone layers, averaged over the streams, to one vector. Each
stage makes a window key of it. A block is the newest token and noise tokens; its rows read the last keys and each
other, also later rows. A Markov head ties each draft to the token before it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.embedding import Embedding, Head
from deepseek_attn.layers.linear import Linear
from deepseek_attn.layers.weights import CheckpointModule, ModuleTable, RMSNorm
from deepseek_attn.models.block import BuildContext

ConfigT = TypeVar("ConfigT", bound=DeepseekV4Base)


class MarkovHead(CheckpointModule):
    """Logits that a token adds to its successor's: ``head embed[token]``.

    Args:
        embed, head: names of the weights, both ``[vocab_size, dspark_markov_rank]``.
    """

    def __init__(self, context: BuildContext[DeepseekV4Base], embed: str, head: str):
        super().__init__(context.device)
        sizes = context.config.vocab_size, context.config.drafter.dspark_markov_rank
        self.names = embed, head
        self.add_module(embed, Embedding(*sizes, context.dtype, context.device, context.parallel))
        self.add_module(head, Head(*sizes, context.dtype, context.device, context.parallel))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[B]`` -> float32 ``[B, vocab_size]``."""
        embed, head = map(self.get_submodule, self.names)
        return head(embed(token_ids))


def add_draft_ends(
    stage: CheckpointModule, context: BuildContext[DeepseekV4Base], spec: LayerSpec, embed: str, head: str
) -> None:
    """Adds the extra modules of the first and the last stage to a stage; see `MarkovHead`."""
    config, sizes = context.config, (context.numerics, context.dtype, context.device)
    if spec is config.mtp_layers[0]:
        inputs = config.hidden_size * len(config.drafter.dspark_target_layer_ids)
        stage.main_proj = Linear(inputs, config.hidden_size, *sizes)
        stage.main_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.device)
    if spec is config.mtp_layers[-1]:
        stage.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.device)
        stage.markov_head = MarkovHead(context, embed, head)


def stage_context(context: BuildContext[ConfigT]) -> BuildContext[ConfigT]:
    """The context of draft stages, which may have other experts."""
    return replace(context, config=context.config.draft_stages)


class DraftsBlocks:
    """Mixin of models whose ``mtp`` layers are draft stages, where the config has a DSpark drafter.

    Their hidden states then end in the averaged streams of the target layers: ``[T, s + targets, hidden_size]``.
    """

    config: DeepseekV4Base
    head: Head
    mtp: ModuleTable[Any]

    @property
    def target_layers(self) -> Sequence[int]:
        """Backbone layers whose streams the drafter reads; empty without one."""
        return self.config.dspark.dspark_target_layer_ids if self.config.dspark is not None and len(self.mtp) else ()

    @property
    def stages(self) -> list[Any]:
        """The draft stages in order."""
        return list(self.mtp.values())

    def write_context(self, hidden_states: torch.Tensor, step: StepMetadata) -> None:
        """Writes the stages' window keys of all tokens of a step, from the backbone's hidden states of them."""
        first = self.stages[0]
        targets = hidden_states[:, -len(self.target_layers) :].flatten(1)
        main = first.main_norm(first.main_proj(targets))
        for stage in self.stages:
            stage.attn.insert(stage.attn.project(main), step.positions, step, None)

    @abstractmethod
    def draft_block(self, token_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Normed hidden states ``[T, hidden_size]`` of the rows of blocks, for the output head.

        Args:
            step: metadata of the blocks, in which each row reads its whole block.
        """

    def draft_tokens(self, hidden_states: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequential greedy drafts.

        Args:
            hidden_states: ``[B, n, hidden_size]`` of the first rows of each block.
            token_ids: int64 ``[B]``, the newest token.

        Returns:
            Drafts int64 ``[B, n]``, and the logits of the first ones, float32 ``[B, vocab_size]``.
        """
        requests, count, _ = hidden_states.shape
        logits = self.head(hidden_states.flatten(0, 1)).unflatten(0, (requests, count))
        drafts, markov = [token_ids], self.stages[-1].markov_head
        for i in range(count):
            logits[:, i] += markov(drafts[-1])
            drafts.append(logits[:, i].argmax(-1))
        return torch.stack(drafts[1:], dim=1), logits[:, 0]
