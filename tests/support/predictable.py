"""Random models whose MTP layer drafts what the backbone says next about every other time.

A checkpoint of random weights drafts nothing right. Here the output head mostly answers a token with the next one of
the vocabulary; attention, experts and noise decide otherwise often enough for text to depend on all that was read.
"""

from __future__ import annotations

import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.recipes import Recipe

HEADS = {"head.weight": "embed.weight", "lm_head.weight": "model.embed_tokens.weight"}


class PredictableSource(RandomSource):
    """Random weights; rows of the head are the embeddings of the tokens before, times a factor, and noise.

    Attributes:
        certainty: the factor at one channel. Noise grows with the root of the number of channels, agreement with it.
    """

    certainty = 9.0

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        values = super().values(name, recipe)
        of_mtp = name.endswith(".shared_head.head.weight")
        if name in HEADS or of_mtp:
            embeddings = "model.embed_tokens.weight" if of_mtp else HEADS[name]
            same = super().values(embeddings, self._recipes[embeddings])
            return values + self.certainty * same.shape[1] ** -0.5 * values.std() / same.std() * same.roll(1, 0)
        if name.endswith((".e_proj.weight", ".eh_proj.weight")):  # the embedding of the next token reaches the head
            values[:, : len(values)] += torch.eye(len(values))
        return values
