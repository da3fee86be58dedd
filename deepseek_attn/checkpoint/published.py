"""Checkpoints in exactly the published format, with values from any source."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from deepseek_attn.checkpoint.names import canonical_name
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32
from deepseek_attn.checkpoint.recipes import DRAW, ROWS, Recipe
from deepseek_attn.checkpoint.recipes_v4 import published_tensors_v4
from deepseek_attn.checkpoint.recipes_v32 import published_tensors_v32
from deepseek_attn.checkpoint.recipes_v41 import published_tensors_v41
from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.kernels.common.quant import FP4_GROUP, encode_e8m0, quantize_fp4, quantize_fp8, quantize_fp8_block
from deepseek_attn.kernels.engram.types import SCALE_GROUP
from deepseek_attn.utils.device import total_memory


@dataclass(frozen=True)
class Style:
    """Format of the published checkpoints of a family.

    Attributes:
        tensors: gives name and recipe of every tensor of a config, scales excepted. ``config.layers`` may be some of
            the model's layers: names follow from ``layer.index``, not from the place in the list.
        names: gives, for a config, the function from a tensor's name in a checkpoint to its name in the model.
        scale: replaces ``weight`` in the name of a scale; scale_dtype: its dtype in the header.
        expert_dtypes: formats of experts, the published one first.
    """

    tensors: Callable[[Any], Iterator[tuple[str, Recipe]]]
    names: Callable[[Any], Callable[[str], str]]
    scale: str
    scale_dtype: str
    expert_dtypes: tuple[str, ...]


def _names_v4(config: AnyConfig) -> Callable[[str], str]:
    return canonical_name


def _names_v32(config: DeepseekV32Config) -> Callable[[str], str]:
    return partial(canonical_name_v32, num_hidden_layers=config.num_hidden_layers)


# by class of config; a class without a row has the row of the class that it derives from
STYLES: dict[type[AnyConfig], Style] = {
    ModelConfig: Style(published_tensors_v4, _names_v4, "scale", "F8_E8M0", ("fp4", "fp8", "bf16")),
    DeepseekV32Config: Style(published_tensors_v32, _names_v32, "weight_scale_inv", "F32", ("fp8", "bf16")),
    DeepseekV41Config: Style(published_tensors_v41, _names_v4, "scale", "F8_E8M0", ("fp4", "fp8", "bf16")),
}


def style_of(config: AnyConfig) -> Style:
    """The row of a config's class. ValueError: not a config."""
    found = next((STYLES[cls] for cls in type(config).__mro__ if cls in STYLES), None)
    if found is None:
        raise ValueError(f"config is a {type(config).__name__}: pass a ModelConfig (ModelConfig.from_preset makes one)")
    return found


def canonical_names(config: AnyConfig) -> Callable[[str], str]:
    """The function from a checkpoint tensor's name to the model's, by the family of the config."""
    return style_of(config).names(config)


def published_tensors(config: AnyConfig) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every tensor of a published checkpoint, scales excepted, from first to last layer."""
    return style_of(config).tensors(config)


class StoredWeight(NamedTuple):
    """A weight as a checkpoint stores it, with its scale if it is quantised."""

    weight: torch.Tensor
    scale: torch.Tensor | None


class PublishedSource(CheckpointSource):
    """A checkpoint for ``config`` with the names, dtypes and shapes of a published one.

    Linears are FP8 in blocks of ``config.FP8_GROUP`` rows and columns, and experts FP4 (V4, V4.1) or FP8; without a
    ``config.quantization_config`` all weights are BF16. A subclass gives the values, in float32, and this class stores
    them.

    Args:
        config: the model; ``self.config`` is its copy with the given ``expert_dtype``.
        expert_dtype: ``"fp4"`` (V4 and V4.1), ``"fp8"`` or ``"bf16"``; None: the config's.

    Raises:
        ValueError: an unsupported ``expert_dtype``, FP4 experts whose width 32 does not divide, or a tensor that is
            larger than this machine's memory.
    """

    def __init__(self, config: AnyConfig, expert_dtype: str | None = None):
        self._style = style_of(config)
        quantized, dtypes = config.quantization_config is not None, self._style.expert_dtypes
        expert_dtype = expert_dtype or (config.expert_dtype or dtypes[0] if quantized else "bf16")
        if expert_dtype not in dtypes or (expert_dtype != "bf16" and not quantized):
            allowed = dtypes if quantized else "bf16 (the config has no quantization_config)"
            raise ValueError(f"expert_dtype is {expert_dtype!r}: supported is {allowed}")
        if expert_dtype in ("fp4", "fp8") and expert_dtype != config.expert_dtype:
            config = config.replace(expert_dtype=expert_dtype)
        self.config = config
        self._formats = {"quantized": "fp8" if quantized else "bf16", "expert": expert_dtype}
        self._recipes = dict(published_tensors(config))
        made = [name for name, recipe in self._recipes.items() if recipe.kind != ROWS]
        largest = max(made, key=lambda name: math.prod(self._recipes[name].shape))
        needed, memory = 4 * math.prod(self._recipes[largest].shape), total_memory(torch.device("cpu"))
        if needed > memory:
            raise ValueError(f"{largest} has {needed:,} bytes in float32, and there is memory for {memory:,}")
        self._entries: dict[str, TensorInfo] = {}
        for name, recipe in self._recipes.items():
            self._entries.update(self._infos(name, recipe))
        self._last: tuple[str, StoredWeight] | None = None  # of which weight, scale included

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise ValueError(f"no tensor {name} in a checkpoint of this config")
        base = self._weight_of(name)
        if self._last is None or self._last[0] != base:
            self._last = None  # the old pair is freed before the new one is made
            self._last = (base, self._make(base))
        return _part(self._last[1], name, base)

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        base = self._weight_of(name)
        if base not in self._recipes or self._recipes[base].kind != ROWS:
            return super().read_rows(name, rows)
        return _part(self._make_rows(base, rows), name, base)

    def _weight_of(self, name: str) -> str:
        """The weight that a scale is of; other names as they are."""
        stem = name.removesuffix(f".{self._style.scale}")
        return name if stem == name else f"{stem}.weight"

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        """Token ids modulo ``count``, because there is no tokenizer."""
        return [token_id % count for token_id in range(vocab_size)]

    def row_values(self, name: str, recipe: Recipe, rows: torch.Tensor) -> torch.Tensor:
        """`values` of some rows of a table that is read by row."""
        return self.values(name, recipe)[rows]

    def _make_rows(self, name: str, rows: torch.Tensor) -> StoredWeight:
        values, scale = quantize_fp8(self.row_values(name, self._recipes[name], rows), SCALE_GROUP)
        return StoredWeight(values, encode_e8m0(scale))

    def _infos(self, name: str, recipe: Recipe) -> Iterator[tuple[str, TensorInfo]]:
        """Names and headers of a tensor as it is stored, and of its scale if it has one."""
        form = self._formats.get(recipe.kind)
        if recipe.kind == ROWS:
            rows, columns = recipe.shape
            stored = TensorInfo.of("F8_E4M3", recipe.shape)
            scale = TensorInfo.of("F8_E8M0", (rows, columns // SCALE_GROUP))
        elif form == "fp8":
            grid = tuple(-(-size // self.config.FP8_GROUP) for size in recipe.shape)
            stored, scale = TensorInfo.of("F8_E4M3", recipe.shape), TensorInfo.of(self._style.scale_dtype, grid)
        elif form == "fp4":
            rows, columns = recipe.shape
            if columns % FP4_GROUP:
                raise ValueError(
                    f"{name} has {columns} input features: FP4 experts need a multiple of {FP4_GROUP}; change "
                    "hidden_size or moe_intermediate_size, or use expert_dtype='fp8'"
                )
            stored = TensorInfo.of("I8", (rows, columns // 2))
            scale = TensorInfo.of("F8_E8M0", (rows, columns // FP4_GROUP))
        else:
            stored, scale = TensorInfo.of(DRAW[recipe.kind].dtype, recipe.shape), None
        yield name, stored
        if scale is not None:
            yield name.removesuffix("weight") + self._style.scale, scale

    def stored_as(self, name: str) -> str:
        """Format of the stored tensor: ``fp8``, ``fp4``, or the dtype in its header, such as ``BF16``."""
        kind = self._recipes[name].kind
        if kind == ROWS:
            return "fp8"
        form = self._formats.get(kind, "bf16")
        return DRAW[kind].dtype if form == "bf16" else form

    @abstractmethod
    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        """Values of the tensor before they are quantised: of ``recipe.shape``, on the CPU."""

    def _make(self, name: str) -> StoredWeight:
        recipe = self._recipes[name]
        if recipe.kind == ROWS:
            return self._make_rows(name, torch.arange(recipe.shape[0], device="cpu"))
        master = self.values(name, recipe)
        form = self._formats.get(recipe.kind)
        if form in ("fp8", "fp4"):
            block = (self.config.FP8_GROUP, self.config.FP8_GROUP)
            weight, scale = quantize_fp8_block(master, block) if form == "fp8" else quantize_fp4(master)
            return StoredWeight(weight, encode_e8m0(scale) if self._style.scale_dtype == "F8_E8M0" else scale)
        return StoredWeight(master.to(DTYPES[DRAW[recipe.kind].dtype].torch), None)


def _part(stored: StoredWeight, name: str, weight: str) -> torch.Tensor:
    """The tensor ``name`` of a stored weight: the weight itself, or its scale."""
    part = stored.weight if name == weight else stored.scale
    if part is None:
        raise ValueError(f"{weight} is stored without a scale, so there is no {name}")
    return part
