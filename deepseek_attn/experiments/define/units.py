"""The pieces of work of an experiment: each leaves one record, and is done when that record is there."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_attn.config.model import LayerSpec, ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.define.variant import Variant

FORMAT = 1  # of the records: raise it when their meaning changes, and old ones are made again


@dataclass(frozen=True, eq=False)
class Unit:
    """One piece of work.

    Attributes:
        kind: ``cost``, ``layer_time``, ``model_time``, ``reference``, ``checkpoint``, ``tokens`` or ``train``.
        name: for people; path: of its record, inside the folder of results, without ``.json``.
        inputs: all that its result depends on.
        alone: nothing else may run beside it, because it measures time or others wait for it.
    """

    kind: str
    name: str
    path: str
    inputs: Mapping[str, Any]
    alone: bool = False

    @property
    def fingerprint(self) -> str:
        """Changes with the inputs: a record of another fingerprint does not count."""
        text = json.dumps({"format": FORMAT, "kind": self.kind, **self.inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_units(experiment: Experiment, device: str) -> list[Unit]:
    """All units, those that run alone first; ``device`` is part of what times and training depend on."""
    units = [*_cost_units(experiment, device), *_model_time_units(experiment, device)]
    units += [*_checkpoint_units(experiment, device), *_train_units(experiment, device)]
    return sorted(units, key=lambda unit: not unit.alone)


def layer_key(spec: LayerSpec, config: ModelConfig, kv_record: str) -> str:
    """Names a kind of attention layer: layers of one key cost the same."""
    options = [f"w{config.sliding_window}", kv_record]
    if spec.ratio:
        options += ["overlap"] * spec.overlap + [f"top{config.index_topk}"] * spec.has_indexer
    return "-".join([spec.kind, *options])


def _cost_units(experiment: Experiment, device: str) -> list[Unit]:
    cost, units, kinds = experiment.cost, [], {}
    if cost is None:
        return []
    shared = {"model": cost.model.to_dict(), "numerics": cost.numerics, "contexts": cost.contexts}
    for variant in experiment.variants:
        inputs = {"variant": _changes(variant), **shared}
        units.append(
            Unit("cost", f"{variant.name}: bytes and FLOPs", f"variants/{variant.slug}/cost", inputs, alone=True)
        )
        config, numerics = variant.config(cost.model), variant.numerics(get_numerics(cost.numerics))
        for spec in config.layers:
            kinds.setdefault(layer_key(spec, config, numerics.kv_record), (variant, spec))
    if not cost.time_up_to:
        return units
    names = ("time_up_to", "batch", "prefill", "repeats")
    sizes = {"device": device, **{name: getattr(cost, name) for name in names}}
    # few entries first: what takes longest, or does not fit, comes when the rest is there
    for key, (variant, spec) in sorted(kinds.items(), key=lambda item: (-item[1][1].ratio or -math.inf, item[0])):
        inputs = {"key": key, "variant": variant.name, "layer": spec.index, **shared, **sizes}
        units.append(Unit("layer_time", f"times of a {key} layer", f"layers/{key.lower()}", inputs, alone=True))
    return units


def _model_time_units(experiment: Experiment, device: str) -> list[Unit]:
    if experiment.model_time is None:
        return []
    shared = {"base": experiment.base.to_dict(), "device": device, **asdict(experiment.model_time)}
    return [
        Unit(
            "model_time", f"{variant.name}: times of a step", f"variants/{variant.slug}/model_time",
            {"variant": _changes(variant), **shared}, alone=True,
        )
        for variant in experiment.variants
    ]  # fmt: skip


def _checkpoint_units(experiment: Experiment, device: str) -> list[Unit]:
    if experiment.checkpoint is None:
        return []
    shared = {"device": device, **asdict(experiment.checkpoint)}
    units = [Unit("reference", "the checkpoint's own schedule", "checkpoint/own", shared, alone=True)]
    for variant in experiment.variants:
        inputs = {"variant": _changes(variant), **shared}
        units.append(Unit("checkpoint", f"{variant.name}: checkpoint", f"variants/{variant.slug}/checkpoint", inputs))
    return units


def _train_units(experiment: Experiment, device: str) -> list[Unit]:
    """Seeds outermost: an interrupted experiment has all variants of its first seeds."""
    settings = experiment.train
    if settings is None:
        return []
    base = experiment.base
    shared = {"base": base.to_dict(), "device": device, "budget_s": settings.budget_s}
    shared |= {"eval_batches": settings.eval_batches, "seq_lens": settings.seq_lens}
    text = {"text": settings.text, "vocab_size": base.vocab_size}
    units = []
    if "text" in settings.tasks:
        text |= settings.tasks["text"].options
        units.append(Unit("tokens", "tokens of the text", "text/tokens", text, alone=True))
    for seed in experiment.seeds:
        for task, own in settings.tasks.items():
            inputs = {"task": task, "seed": seed, "settings": asdict(own), **shared}
            inputs |= {"tokens": text} if task == "text" else {}
            for variant in experiment.variants:
                name, path = f"{variant.name}: {task}, seed {seed}", f"variants/{variant.slug}/{task}-seed{seed}"
                units.append(Unit("train", name, path, {"variant": _changes(variant), **inputs}))
    return units


def _changes(variant: Variant) -> dict[str, Any]:
    return asdict(variant)
