"""Small random weights are made once in a process: most tests read checkpoints of the same few models.

To draw and quantise them takes half of the time in which a small model is built.
"""

from __future__ import annotations

from collections.abc import Hashable

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.published import StoredWeight
from tests.support.typed import untyped

SMALL = 2**18  # elements of a weight that is kept
TOTAL = 2**26  # elements of all that are kept, before all are dropped


class KeptWeights:
    """Weights of `RandomSource` by all that their values depend on; a reader gets a copy, which it may change."""

    def __init__(self) -> None:
        self.weights: dict[Hashable, StoredWeight] = {}
        self.elements = 0
        self.make = RandomSource._make

    def install(self) -> None:
        """Replaces `RandomSource._make`, but not for subclasses, which may have values of their own."""
        kept = self

        def make(source: RandomSource, name: str) -> StoredWeight:
            return kept.get(source, name) if type(source) is RandomSource else kept.make(source, name)

        untyped(RandomSource)._make = make

    def get(self, source: RandomSource, name: str) -> StoredWeight:
        recipe, config = source._recipes[name], source.config
        stored_as = source._formats.get(recipe.kind), source._style, config.FP8_GROUP
        key = (source.seed, name, recipe, stored_as, config.n_routed_experts, RandomSource.values)
        found = self.weights.get(key)
        if found is None:
            found = self.make(source, name)
            if found.weight.numel() > SMALL:
                return found
            self.elements += found.weight.numel()
            if self.elements > TOTAL:
                self.weights, self.elements = {}, found.weight.numel()
            self.weights[key] = found
        weight, scale = found
        return StoredWeight(weight.clone(), None if scale is None else scale.clone())
