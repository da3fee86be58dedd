"""Random checkpoints in exactly the published format, any tensor of which can be made alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from deepseek_attn.checkpoint.published import PublishedSource, StoredWeight
from deepseek_attn.checkpoint.recipes import DRAW, Recipe
from deepseek_attn.config.model import AnyConfig

DRAWN_ROWS = 4096


class RandomSource(PublishedSource):
    """A random checkpoint for ``config``.

    Each tensor is drawn from a generator seeded by ``(seed, name)``, so it does not depend on earlier reads.

    Args:
        config, expert_dtype: see `PublishedSource`.
        seed: any integer.
    """

    def __init__(self, config: AnyConfig, seed: int = 0, expert_dtype: str | None = None):
        super().__init__(config, expert_dtype)
        self.seed = seed

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self.seed}:{recipe.same_as or name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return DRAW[recipe.kind].values(recipe, generator, self.config)


class RepeatingSource(RandomSource):
    """Like `RandomSource`, but quick to make, for benchmarks.

    Tensors of one shape and kind share their values. Of a matrix only the first `DRAWN_ROWS` rows are drawn; those
    after them repeat them, shifted by one column more every time.
    """

    def __init__(self, config: AnyConfig, seed: int = 0, expert_dtype: str | None = None):
        super().__init__(config, seed, expert_dtype)
        self._made: dict[Recipe, StoredWeight] = {}

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        rows, *columns = recipe.shape
        if rows <= DRAWN_ROWS or not columns or recipe.kind == "table":
            return super().values(name, recipe)
        drawn = super().values(name, replace(recipe, shape=(DRAWN_ROWS, *columns)))
        return torch.cat([drawn.roll(i, dims=-1) for i in range(-(-rows // DRAWN_ROWS))])[:rows]

    def _make(self, name: str) -> StoredWeight:
        recipe = self._recipes[name]
        if recipe not in self._made:
            self._made[recipe] = super()._make(name)
        return self._made[recipe]
