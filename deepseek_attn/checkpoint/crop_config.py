"""The ``config.json`` of a crop, in the spelling of the model's own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deepseek_attn.checkpoint.crop_plan import CropPlan
from deepseek_attn.config.keys import V4, V32, V41
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import CANDIDATES, DeepseekV41Config

MODULE_LISTS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers")
VISION_KEYS = ("vision_config", "image_token_id")
_NUMBERED = re.compile(r"(^|[.*])(layers|experts)\.(\d+)(?=\.|$)")


def crop_config(raw: Mapping[str, Any], plan: CropPlan) -> dict[str, Any]:
    """Decoded JSON of the crop's config: ``raw``, the model's, with the keys changed that the plan changes.

    Keys of both levels of a nested config (V4.1) and of all spellings are changed where they are; others stay.

    Raises:
        ValueError: the result does not describe the kept layers.
    """
    aliases = _aliases(plan.config)
    changed = _level(raw, plan, aliases)
    if isinstance(raw.get("text_config"), Mapping):
        changed["text_config"] = _level(raw["text_config"], plan, aliases)
    _check(changed, plan)
    return changed


def _aliases(config: AnyConfig) -> Mapping[str, str]:
    if isinstance(config, DeepseekV41Config):
        return V41.aliases
    return V32.aliases if isinstance(config, DeepseekV32Config) else V4.aliases


def _level(level: Mapping[str, Any], plan: CropPlan, aliases: Mapping[str, str]) -> dict[str, Any]:
    """One level of a config, its nested objects unchanged but for ``quantization_config``."""
    out = {}
    for key, value in level.items():
        name = aliases.get(key, key)
        if value is None or not _dropped(name, value, plan):
            change = CHANGES.get(name)
            out[key] = copy.deepcopy(value) if value is None or change is None else change(value, plan)
    return out


def _dropped(name: str, value: Any, plan: CropPlan) -> bool:
    """Whether a key belongs to a part that the crop does not have."""
    if name.startswith("dspark_") and "mtp" in plan.without:
        return True
    if name.startswith("engram_") and not _tables(plan):
        return True
    if name in VISION_KEYS and "vision" in plan.without:
        return True
    source = getattr(plan.config, "candidate_source_layer_id", None)
    return name in CANDIDATES and source is not None and source not in plan.layers


def _tables(plan: CropPlan) -> list[int]:
    """Kept layers with an n-gram memory."""
    engram = getattr(plan.config, "engram", None)
    if engram is None or "engram" in plan.without:
        return []
    return [layer for layer in engram.engram_layer_ids if layer in plan.layers]


def _kept_of_each_layer(values: Any, plan: CropPlan) -> Any:
    """A list with an entry for each backbone layer, and maybe for MTP layers behind them."""
    if not isinstance(values, list):  # an object from ratio to bool
        ratios = {str(plan.config.layers[layer].ratio) for layer in plan.layers}
        return {ratio: value for ratio, value in values.items() if ratio in ratios}
    behind = [] if "mtp" in plan.without else values[plan.config.num_hidden_layers :]
    return [values[layer] for layer in plan.layers] + behind


def _renumbered(values: Any, plan: CropPlan) -> Any:
    """Numbers of layers."""
    return [plan.new_layer[layer] for layer in values if layer in plan.new_layer]


def _layers_before(count: int, plan: CropPlan) -> int:
    """Number of kept layers among the first ``count``."""
    return sum(layer < count for layer in plan.layers)


def _modules(quantization: Any, plan: CropPlan) -> Any:
    """A ``quantization_config`` whose lists name the kept modules under their new numbers."""
    if not isinstance(quantization, Mapping):
        return quantization
    out = copy.deepcopy(dict(quantization))
    for key in MODULE_LISTS:
        if isinstance(out.get(key), list):
            names = [_module(name, plan) for name in out[key]]
            out[key] = list(dict.fromkeys(name for name in names if name is not None))
    return out


def _module(name: Any, plan: CropPlan) -> Any:
    """The new name of a module; None for a dropped module. A pattern without numbers stays."""
    if not isinstance(name, str):
        return name
    backbone, drafts, lost = plan.config.num_hidden_layers, name.startswith("mtp."), False

    def renumber(match: re.Match) -> str:
        nonlocal lost, drafts
        number = int(match[3])
        if match[2] == "layers" and number >= backbone:  # V3's MTP layer
            new, drafts = len(plan.layers) + number - backbone, True
        elif match[2] == "layers":
            new = plan.new_layer.get(number)
        else:
            new = (plan.new_draft_expert if drafts else plan.new_expert).get(number)
        lost = lost or new is None
        return f"{match[1]}{match[2]}.{new}"

    renamed = _NUMBERED.sub(renumber, name)
    return None if lost or (drafts and "mtp" in plan.without) else renamed


CHANGES: dict[str, Callable[[Any, CropPlan], Any]] = {
    "num_hidden_layers": lambda value, plan: len(plan.layers),
    "num_nextn_predict_layers": lambda value, plan: 0 if "mtp" in plan.without else value,
    **dict.fromkeys(
        ("compress_ratios", "compress_overlap", "compress_indexer", "layer_types", "mlp_layer_types"),
        _kept_of_each_layer,
    ),
    **dict.fromkeys(("num_hash_layers", "first_k_dense_replace"), _layers_before),
    **dict.fromkeys(("kv_source_layer_ids", "index_source_layer_ids", "dspark_target_layer_ids"), _renumbered),
    "candidate_source_layer_id": lambda value, plan: plan.new_layer.get(value, value),
    "engram_layer_ids": lambda value, plan: _tables(plan),  # their numbers stay
    "engram_num_embeddings": lambda value, plan: value[: len(_tables(plan))],
    "n_routed_experts": lambda value, plan: len(plan.experts),
    "num_experts_per_tok": lambda value, plan: plan.experts_per_token,
    "dspark_n_routed_experts": lambda value, plan: len(plan.draft_experts),
    "dspark_num_experts_per_tok": lambda value, plan: plan.draft_experts_per_token,
    "vocab_size": lambda value, plan: plan.vocab_size,
    "quantization_config": _modules,
}


def _check(changed: Mapping[str, Any], plan: CropPlan) -> None:
    """ValueError unless each layer of the new config is the kept one in everything but numbers."""
    config = ModelConfig.from_dict(changed, "the crop's config")
    wrong = []
    for new, old in zip(config.layers, plan.layers, strict=True):
        expected = plan.config.layers[old].unnumbered()
        if "engram" in plan.without and isinstance(plan.config, DeepseekV41Config):
            expected = replace(expected, has_engram=False)
        if new.unnumbered() != expected or {plan.layers[i] for i in new.sources} != plan.config.layers[old].sources:
            wrong.append(old)
    if wrong or config.n_routed_experts != len(plan.experts) or config.vocab_size != plan.vocab_size:
        raise ValueError(
            f"the config of the crop would not describe layers {wrong or list(plan.layers)} as the model's config.json "
            "does: it has keys that a crop does not know; please report that file"
        )
