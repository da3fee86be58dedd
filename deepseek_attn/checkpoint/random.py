"""Random checkpoints in exactly the published format; each tensor can be made without the others."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from deepseek_attn.checkpoint.published import PublishedSource, StoredWeight
from deepseek_attn.checkpoint.recipes import DRAW, ROWS, Recipe
from deepseek_attn.checkpoint.source import DTYPES
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
        generator = torch.Generator().manual_seed(self._seed_of(recipe.same_as or name) >> 1)
        return DRAW[recipe.kind].values(recipe, generator, self.config)

    def row_values(self, name: str, recipe: Recipe, rows: torch.Tensor) -> torch.Tensor:
        """Uniform values of unit variance, each a hash of the seed, the name and its place in the table."""
        columns = recipe.shape[1]
        places = rows.numpy().astype(np.uint64)[:, None] * columns + np.arange(columns, dtype=np.uint64)
        mixed = splitmix64(places + np.uint64(self._seed_of(name)))
        return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32)).mul_(2**-23 * 3**0.5).sub_(3**0.5)

    def _seed_of(self, name: str) -> int:
        """64 bits."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest(), "little")


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: each bit of the result depends on each bit of a value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class RepeatingSource(RandomSource):
    """Like `RandomSource`, but quick to make, for benchmarks.

    Tensors of one shape and kind share their values. Of a matrix only the first `DRAWN_ROWS` rows are drawn; those
    after them repeat them, each time rotated by one column more.
    """

    def __init__(self, config: AnyConfig):
        super().__init__(config)
        self._made: dict[Recipe, StoredWeight] = {}

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        drawn = self._drawn(name, recipe)
        return _repeated(drawn, recipe.shape[0]) if self._repeats(recipe) else drawn

    def _make(self, name: str) -> StoredWeight:
        recipe = self._recipes[name]
        if recipe not in self._made:
            if self._repeats(recipe) and recipe.kind not in self._formats:  # repeated as stored, not in float32
                drawn = self._drawn(name, recipe).to(DTYPES[DRAW[recipe.kind].dtype].torch)
                self._made[recipe] = StoredWeight(_repeated(drawn, recipe.shape[0]), None)
            else:
                self._made[recipe] = super()._make(name)
        return self._made[recipe]

    def _drawn(self, name: str, recipe: Recipe) -> torch.Tensor:
        """Values of the rows that are drawn: all, or the first `DRAWN_ROWS`."""
        if self._repeats(recipe):
            recipe = replace(recipe, shape=(DRAWN_ROWS, *recipe.shape[1:]))
        return super().values(name, recipe)

    def _repeats(self, recipe: Recipe) -> bool:
        """Whether rows of such a tensor are repeated."""
        return len(recipe.shape) > 1 and recipe.shape[0] > DRAWN_ROWS and recipe.kind not in ("table", ROWS)


def _repeated(drawn: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` rows: repetitions of the rows of ``drawn``, each repetition rotated by one more column."""
    repeated = drawn.new_empty(rows, *drawn.shape[1:])
    for number, part in enumerate(repeated.split(len(drawn))):
        shift = number % drawn.shape[-1]
        part[..., shift:] = drawn[: len(part), ..., : drawn.shape[-1] - shift]
        part[..., :shift] = drawn[: len(part), ..., drawn.shape[-1] - shift :]
    return repeated
