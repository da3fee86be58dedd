"""Trained weights as a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deepseek_attn.checkpoint.names import EXPERT
from deepseek_attn.checkpoint.published import PublishedSource
from deepseek_attn.checkpoint.recipes import ROWS, Recipe
from deepseek_attn.checkpoint.write import write_checkpoint
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.lab.training.weights import rounded
from deepseek_attn.models.block import Backbone

MTP = "mtp."  # begins the names of an MTP layer's tensors


class TrainedSource(PublishedSource):
    """The weights of a model in training as the checkpoint that stores them."""

    def __init__(self, model: Backbone, config: AnyConfig):
        super().__init__(config)
        self.model = model

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        parameter, expert = parameter_name(name)
        values = self.model.get_parameter(parameter).detach()
        return (values if expert is None else values[expert]).cpu()

    def rounded_parameters(
        self, backbone: bool = True, mtp: bool = True, weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Parameters as a runner would load them, by name; gradients reach the model's own.

        Args:
            backbone, mtp: with those of the backbone, with those of the MTP layer.
            weights: parameters by name that take the place of the model's own.
        """
        result = {}
        for name in self._recipes:
            if not (mtp if name.startswith(MTP) else backbone):
                continue
            parameter, expert = parameter_name(name)
            values = self.model.get_parameter(parameter) if weights is None else weights[parameter]
            if not expert and values.is_floating_point():
                form = ROWS if self._recipes[name].kind == ROWS else self.stored_as(name)
                result[parameter] = rounded(values, form, self.config.FP8_GROUP)
        return result


def parameter_name(published: str) -> tuple[str, int | None]:
    """Name of the parameter that holds a published tensor, and the expert's place in it: experts are stacked."""
    match = EXPERT.fullmatch(published)
    if match is None:
        return published, None
    return f"{match['layer']}.experts.{match['projection']}.weight", int(match["expert"])


def save_checkpoint(
    model: Backbone,
    config: AnyConfig,
    directory: str | Path,
    tokenizer: Tokenizer | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Writes a checkpoint directory in the published format; see `write_checkpoint` for what it refuses.

    Args:
        tokenizer: the tokenizer of the training text; None writes a byte-level one.
        texts: text of more files, by name.
    """
    source = TrainedSource(model, config)
    return write_checkpoint(source, config, directory, num_shards=2, tokenizer=tokenizer, texts=texts)
