"""Base class of the configs of all model families: conversion to JSON, changes and comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from deepseek_attn.config.common import RopeSpec
from deepseek_attn.config.dspark import DSparkConfig


class LayerBase:
    """Base class of the layer specs of all families."""

    index: int
    has_indexer: bool
    rope: RopeSpec
    is_mtp: bool

    @property
    def name(self) -> str:
        """Name of the layer in the model and in the caches: ``layers.3`` or ``mtp.0``."""
        return f"{'mtp' if self.is_mtp else 'layers'}.{self.index}"

    @property
    def sources(self) -> frozenset[int]:
        """Layers whose results this layer reads: they run before it in each step."""
        return frozenset()

    @property
    def entry_owner(self) -> str:
        """Name of the layer whose entries this layer reads."""
        return self.name

    def unnumbered(self) -> Self:
        """This spec with number 0: equal for layers that differ only in their number."""
        raise NotImplementedError


class ConfigBase:
    """A dataclass whose fields are keys of the published ``config.json``, except derived fields.

    Attributes:
        OPTIONAL: keys that ``to_dict`` may leave out and ``replace`` accepts.
        DERIVED: fields that are not keys.
        dspark: keys of the DSpark drafter; None without a drafter.
        FP8_GROUP: rows and columns of a block of an FP8 weight in checkpoints, and channels of a group of its inputs.
    """

    OPTIONAL: ClassVar[tuple[str, ...]]
    DERIVED: ClassVar[tuple[str, ...]] = ("layers", "mtp_layers", "dspark")
    FP8_GROUP: ClassVar[int] = 128

    model_type: str
    eos_token_id: int | tuple[int, ...]
    norm_topk_prob: bool
    dspark: DSparkConfig | None
    layers: tuple[LayerBase, ...]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def normalizes_weights(self) -> bool:
        """The weights of a token's experts are divided by their sum."""
        return self.norm_topk_prob

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], origin: str = "dict") -> Any:
        """Builds a config from decoded JSON. A ValueError lists every problem; ``origin`` names the config in it."""
        raise NotImplementedError

    def with_sources(self, layers: Iterable[int]) -> list[int]:
        """These layers and all layers that they depend on, in the model's order."""
        found, left = set(), set(layers)
        while left:
            found |= left
            left = {source for spec in self.layers if spec.index in left for source in spec.sources} - found
        return sorted(found)

    def constants(self) -> dict[str, Any]:
        """Keys of the published ``config.json`` that no field holds; they come first in the file."""
        raise NotImplementedError

    def schedule(self) -> dict[str, Any]:
        """Keys of the published ``config.json`` that follow from ``layers``; keys of value None are left out."""
        return {}

    def adapt(self, raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
        """Removes or shortens keys of ``raw``, this config's own, that contradict ``changes``."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the config as a published ``config.json`` object; ``from_dict`` gives an equal config back."""
        return self.flat_dict()

    def flat_dict(self) -> dict[str, Any]:
        """All keys of the config side by side, as ``replace`` takes them."""
        out = self.constants() | {"attention_dropout": 0.0, "initializer_range": 0.02}
        out |= {name: value for name, value in vars(self).items() if name not in self.DERIVED}
        out["torch_dtype"] = out.pop("dtype")
        if isinstance(self.eos_token_id, tuple):
            out["eos_token_id"] = list(self.eos_token_id)
        out |= self.schedule()
        return copy.deepcopy({key: value for key, value in out.items() if value is not None})

    def replace(self, **changes: Any) -> Any:
        """Returns a checked copy with keys of the published ``config.json`` changed; None removes an optional one.

        Raises:
            ValueError: a key that does not exist, or a config that is invalid after the change.
        """
        raw = self.flat_dict()
        known = {*raw, *self.OPTIONAL, "dtype"}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(
                f"replace: no such config keys: {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        if "dtype" in changes:
            del raw["torch_dtype"]
        self.adapt(raw, changes)
        return type(self).from_dict(raw | changes, origin=f"{self.model_type} with {', '.join(changes)} changed")
