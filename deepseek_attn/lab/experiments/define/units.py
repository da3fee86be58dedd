"""The pieces of work of an experiment: each writes one record, and is done when the record exists."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from deepseek_attn.config.model import LayerSpec, ModelConfig, preset_names
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.lab.experiments.define.files import digest_of, name_of
from deepseek_attn.lab.experiments.define.settings import (
    CheckpointSettings,
    CostSettings,
    ModelTimeSettings,
    TrainSettings,
)
from deepseek_attn.lab.experiments.define.variant import ModelVariant

if TYPE_CHECKING:  # it imports torch, and worker processes receive units before they do
    from deepseek_attn.lab.experiments.define.config import Experiment

FORMAT = 1  # of the records: raise it when their meaning changes, and old ones are made again

ReportProgress = Callable[[float], None]  # called with the part of a unit that is done, in [0, 1]
Kind = Literal["cost", "layer_time", "model_time", "reference", "checkpoint", "tokens", "train"]


@dataclass(frozen=True)
class CostJob:
    """Counts bytes and FLOPs of a variant of ``settings.model``."""

    variant: ModelVariant
    settings: CostSettings


@dataclass(frozen=True)
class LayerTimeJob:
    """Times layer ``layer`` of a variant of ``settings.model``, for all layers that cost the same."""

    variant: ModelVariant
    settings: CostSettings
    layer: int


@dataclass(frozen=True)
class ModelTimeJob:
    """Times whole steps of a variant of ``base``."""

    variant: ModelVariant
    settings: ModelTimeSettings
    base: ModelConfig


@dataclass(frozen=True)
class ReferenceJob:
    """Measures the checkpoint under its own schedule."""

    settings: CheckpointSettings


@dataclass(frozen=True)
class CheckpointJob:
    """Measures the checkpoint under a variant's schedule."""

    variant: ModelVariant
    settings: CheckpointSettings


@dataclass(frozen=True)
class TokensJob:
    """Tokenises the text of the text task, once for all runs."""

    settings: TrainSettings
    vocab_size: int


@dataclass(frozen=True)
class TrainJob:
    """Trains a variant of ``base`` on one task with one seed, and measures it."""

    variant: ModelVariant
    settings: TrainSettings
    base: ModelConfig
    task: str
    seed: int


Job = CostJob | LayerTimeJob | ModelTimeJob | ReferenceJob | CheckpointJob | TokensJob | TrainJob


@dataclass(frozen=True, eq=False)
class Unit:
    """One piece of work.

    Attributes:
        name: for people; path: of its record, inside the folder of results, without ``.json``.
        inputs: everything that its result depends on; files by name, so that results may move between machines.
        alone: no other unit may run at the same time, because the unit measures time or other units wait for it.
        files: digests of the files among the inputs, see `digest_of`.
        job: the work, by ``kind``.
    """

    kind: Kind
    name: str
    path: str
    inputs: Mapping[str, Any]
    job: Job
    alone: bool = False
    files: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Rows that lists of its result have, see `find_mistake`."""
        match self.job:
            case CostJob(variant, settings):
                layers = [spec.index for spec in variant.config(settings.model).layers]
                return {"contexts": list(settings.contexts), "layers": layers}
            case LayerTimeJob(settings=settings) | ModelTimeJob(settings=settings):
                return {"times": list(settings.contexts)}
            case TrainJob(settings=settings, task=task):
                return {"by_length": sorted({settings.tasks[task].seq_len, *settings.seq_lens})}
        return {}

    @property
    def fingerprint(self) -> str:
        """Changes with the inputs: a record of another fingerprint does not count."""
        text = json.dumps({"format": FORMAT, "kind": self.kind, **self.inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_units(experiment: Experiment, device: str) -> list[Unit]:
    """All units; units that run alone come first. ``device`` (without a GPU's index) is an input of all but costs."""
    device = device.partition(":")[0]
    units = [*_cost_units(experiment, device), *_model_time_units(experiment, device)]
    units += [*_checkpoint_units(experiment, device), *_train_units(experiment, device)]
    return sorted(units, key=lambda unit: not unit.alone)


def layer_key(spec: LayerSpec, config: ModelConfig, variant: ModelVariant, preset: Numerics) -> str:
    """Names a kind of attention layer of ``variant``: layers of one key cost the same."""
    options = [f"w{config.sliding_window}", variant.numerics_from(preset).kv_record]
    options += [] if variant.numerics is None else [variant.numerics]
    if spec.ratio:
        options += ["overlap"] * spec.overlap + [f"top{config.index_topk}"] * spec.has_indexer
    return "-".join([spec.kind, *options])


def _cost_units(experiment: Experiment, device: str) -> list[Unit]:
    """Costs of every variant, and times of every kind of layer among them, once each."""
    cost, units, kinds = experiment.cost, [], {}
    if cost is None:
        return []
    shared = {"model": cost.model.to_dict(), "numerics": cost.numerics.name, "contexts": cost.contexts}
    for variant in experiment.variants:
        inputs, name = {"variant": asdict(variant), **shared}, f"{variant.name}: bytes and FLOPs"
        units.append(Unit("cost", name, f"variants/{variant.slug}/cost", inputs, CostJob(variant, cost), alone=True))
        config = variant.config(cost.model)
        for spec in config.layers:
            kinds.setdefault(layer_key(spec, config, variant, cost.numerics), (variant, spec))
    if not cost.timed:
        return units
    names = ("time_up_to", "batch", "prefill", "repeats")
    sizes = {"device": device, **{name: getattr(cost, name) for name in names}}
    # high ratios first: layers with many entries take longest, or do not fit
    for key, (variant, spec) in sorted(kinds.items(), key=lambda item: (-item[1][1].ratio or -math.inf, item[0])):
        inputs = {"key": key, "variant": variant.name, "layer": spec.index, **shared, **sizes}
        name, path = f"times of a {key} layer", f"layers/{key.lower()}"
        units.append(Unit("layer_time", name, path, inputs, LayerTimeJob(variant, cost, spec.index), alone=True))
    return units


def _model_time_units(experiment: Experiment, device: str) -> list[Unit]:
    settings, base = experiment.model_time, experiment.base
    if settings is None:
        return []
    shared, units = {"base": base.to_dict(), "device": device, **asdict(settings)}, []
    for variant in experiment.variants:
        inputs, name = {"variant": asdict(variant), **shared}, f"{variant.name}: times of a step"
        job = ModelTimeJob(variant, settings, base)
        units.append(Unit("model_time", name, f"variants/{variant.slug}/model_time", inputs, job, alone=True))
    return units


def _checkpoint_units(experiment: Experiment, device: str) -> list[Unit]:
    """Quality of the checkpoint's own schedule and of every variant."""
    settings = experiment.checkpoint
    if settings is None:
        return []
    names = {"model": name_of(settings.model), "text": name_of(settings.text)}
    shared, label = {"device": device, **asdict(settings), **names}, "the checkpoint's own schedule"
    files = {} if settings.model in preset_names() else {"model": digest_of(settings.model)}
    files |= _text_file(settings)
    units = [Unit("reference", label, "checkpoint/own", shared, ReferenceJob(settings), alone=True, files=files)]
    for variant in experiment.variants:
        inputs, path = {"variant": asdict(variant), **shared}, f"variants/{variant.slug}/checkpoint"
        job = CheckpointJob(variant, settings)
        units.append(Unit("checkpoint", f"{variant.name}: checkpoint", path, inputs, job, files=files))
    return units


def _text_file(settings: CheckpointSettings | TrainSettings) -> dict[str, str | None]:
    return {} if settings.text is None else {"text": digest_of(settings.text)}


def _train_units(experiment: Experiment, device: str) -> list[Unit]:
    """Seeds outermost: an interrupted experiment has all variants of its first seeds."""
    settings = experiment.train
    if settings is None:
        return []
    base = experiment.base
    shared = {"base": base.to_dict(), "device": device, "budget_s": settings.budget_s}
    shared |= {"eval_batches": settings.eval_batches, "seq_lens": settings.seq_lens}
    text: dict[str, Any] = {"text": name_of(settings.text), "vocab_size": base.vocab_size}
    units, files = [], {}
    if "text" in settings.tasks:
        files = _text_file(settings)
        text |= settings.tasks["text"].options
        job = TokensJob(settings, base.vocab_size)
        units.append(Unit("tokens", "tokens of the text", "text/tokens", text, job, alone=True, files=files))
    for seed in experiment.seeds:
        for task, task_settings in settings.tasks.items():
            inputs = {"task": task, "seed": seed, "settings": asdict(task_settings), **shared}
            inputs |= {"tokens": text} if task == "text" else {}
            read = files if task == "text" else {}
            for variant in experiment.variants:
                name, path = f"{variant.name}: {task}, seed {seed}", f"variants/{variant.slug}/{task}-seed{seed}"
                job = TrainJob(variant, settings, base, task, seed)
                units.append(Unit("train", name, path, {"variant": asdict(variant), **inputs}, job, files=read))
    return units
