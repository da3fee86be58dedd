"""A checkpoint under another schedule, without training: its own weights where shapes agree, else derived ones.

For each compressor whose ratio or overlap changes:

* projections and norm stay; a layer that had no compressor takes its window's ``wkv`` and ``kv_norm``, with no gate, so
  that an entry is the mean of its tokens;
* ``ape``, one row per position in a window, is interpolated to the new ratio;
* overlap that is dropped drops the half that feeds the next window, and overlap that is new gives that half no weight,
  so that entries are those without overlap.

A layer that gains or loses its long-range branch also changes its rotary base, as the architecture has it.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.checkpoint.stored_weights import read_float32
from deepseek_attn.config.model import LayerSpec, ModelConfig

NO_WEIGHT = -1e4  # a score whose softmax weight is exactly 0 in the presence of any real score

_BRANCH = re.compile(r"layers\.(\d+)\.attn\.(compressor|indexer)\..+")


class RescheduledSource(CheckpointSource):
    """The tensors of ``source``, a checkpoint of config ``own``, for a model of ``config``.

    Args:
        config: ``own`` with another schedule, overlap or indexer.

    Raises:
        ValueError: a layer gets an indexer that the checkpoint has not trained.
    """

    def __init__(self, source: CheckpointSource, own: ModelConfig, config: ModelConfig):
        self.source = source if isinstance(source, CanonicalSource) else CanonicalSource(source)
        pairs = list(zip(own.layers, config.layers, strict=True))
        gained = gained_indexers(own, config)
        if gained:
            raise ValueError(f"layers {gained} have no indexer in this checkpoint, and one cannot be derived")
        self._derived: dict[str, torch.Tensor] = {}
        for old, new in pairs:
            if new.ratio and (old.ratio, old.overlap) != (new.ratio, new.overlap):
                self._derive(old, new)
        keep = {spec.index: spec for spec in config.layers}
        self._entries = {name: info for name, info in self.source.entries().items() if _wanted(name, keep)}
        for name, tensor in self._derived.items():
            self._entries[name] = TensorInfo("F32", tuple(tensor.shape), tensor.numel() * 4)
            self._entries.pop(name.removesuffix("weight") + "scale", None)

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        return self._derived[name] if name in self._derived else self.source.read(name)

    def _derive(self, old: LayerSpec, new: LayerSpec) -> None:
        layer = f"layers.{new.index}.attn"
        compressors = [f"{layer}.compressor"] + [f"{layer}.indexer.compressor"] * new.has_indexer
        for name in compressors:
            if old.ratio:
                parts = {leaf: read_float32(self.source, f"{name}.{leaf}") for leaf in ("wkv.weight", "wgate.weight")}
                ape = _resample(read_float32(self.source, f"{name}.ape"), new.ratio)
                norm = read_float32(self.source, f"{name}.norm.weight")
            else:
                wkv = read_float32(self.source, f"{layer}.wkv.weight")
                parts = {"wkv.weight": wkv, "wgate.weight": torch.zeros_like(wkv)}
                ape = torch.zeros(new.ratio, len(wkv), dtype=torch.float32, device="cpu")
                norm = read_float32(self.source, f"{layer}.kv_norm.weight")
            had = old.overlap and old.ratio > 0
            for leaf, weight in parts.items():
                self._derived[f"{name}.{leaf}"] = _halves(weight, had, new.overlap, 0.0)
            self._derived[f"{name}.ape"] = _halves(ape.T, had, new.overlap, NO_WEIGHT).T.contiguous()
            self._derived[f"{name}.norm.weight"] = norm


class WithoutIndexers(CheckpointSource):
    """The tensors of ``source``, a V3.2, for the same model with dense attention (V3)."""

    def __init__(self, source: CheckpointSource):
        self.source = source
        self._entries = {name: info for name, info in source.entries().items() if ".indexer." not in name}

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        return self.source.read(name)


def gained_indexers(own: ModelConfig, config: ModelConfig) -> list[int]:
    """Layers of ``config`` with an indexer that a checkpoint of ``own`` has not trained."""
    return [new.index for old, new in zip(own.layers, config.layers, strict=True) if new.has_indexer > old.has_indexer]


def _wanted(name: str, specs: dict[int, LayerSpec]) -> bool:
    """Whether a model of these layers has the tensor."""
    match = _BRANCH.fullmatch(name)
    if match is None or int(match[1]) not in specs:
        return True
    spec = specs[int(match[1])]
    return spec.has_indexer if match[2] == "indexer" else not spec.swa_only


def _resample(ape: torch.Tensor, ratio: int) -> torch.Tensor:
    """``[r, width]`` -> ``[ratio, width]``, linear in the position within the window."""
    if len(ape) == ratio:
        return ape
    return F.interpolate(ape.T.unsqueeze(0), size=ratio, mode="linear", align_corners=False)[0].T


def _halves(weight: torch.Tensor, had: bool, wants: bool, fill: float) -> torch.Tensor:
    """Drops or adds the first half, for the next window, of ``weight``: ``[2 dim, ...]`` with it or ``[dim, ...]``."""
    if had and not wants:
        return weight.chunk(2)[1].contiguous()
    if wants and not had:
        return torch.cat([torch.full_like(weight, fill), weight])
    return weight
