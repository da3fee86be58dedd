"""The layers that stand for all layers of a model where only kinds of layers matter."""

from __future__ import annotations

from typing import Any

from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig


def layer_of(name: str) -> int | None:
    """The backbone layer that a tensor of this published name belongs to."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "layers" else None


def representatives(config: AnyConfig, headers: dict[str, TensorInfo]) -> dict[int, int]:
    """Layers that stand for all layers of a model: by number, how many each stands for, itself included.

    The first layer of each kind, and every layer that one of these reads. Two layers are of one kind if their
    configurations and the dtypes of their tensors are equal, and if the layers that they read are of one kind. A layer
    whose streams a drafter reads stands for itself alone.
    """
    dtypes: dict[int | None, set[tuple[str, str]]] = {}
    for name, info in headers.items():
        tensor = name.split(".experts.")[0].partition(".")[2].partition(".")[2]
        dtypes.setdefault(layer_of(name), set()).add((tensor, info.dtype))
    targets = () if config.dspark is None or not config.mtp_layers else config.dspark.dspark_target_layer_ids
    kinds: dict[int, Any] = {}
    groups: dict[Any, list[int]] = {}
    for layer in config.layers:  # a layer comes after the layers that it reads
        number, sources = layer.index, frozenset(kinds.get(source) for source in layer.sources)
        target = number if number in targets else None
        kinds[number] = layer.unnumbered(), frozenset(dtypes.get(number, ())), sources, target
        groups.setdefault(kinds[number], []).append(number)
    kept = config.with_sources(group[0] for group in groups.values())
    counts = dict.fromkeys(kept, 1)
    for group in groups.values():
        counts[group[0]] += sum(number not in counts for number in group)
    return counts
