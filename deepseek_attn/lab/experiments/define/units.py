"""The pieces of work of an experiment: each writes one record, and is done when the record exists."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

from deepseek_attn.config.model import LayerSpec, ModelConfig, preset_names
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.lab.experiments.define.files import digest_of, name_of
from deepseek_attn.lab.experiments.define.settings import (
    CheckpointSettings,
    CostSettings,
    ModelTimeSettings,
    QualitySettings,
    TaskSettings,
    TrainSettings,
)
from deepseek_attn.lab.experiments.define.variant import ModelVariant

if TYPE_CHECKING:  # it imports torch, and worker processes receive units before they do
    from deepseek_attn.lab.experiments.define.config import Experiment

FORMAT = 2  # of the records: raise it when their meaning changes, and old ones are made again

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
    """Tokenises the text of a text task, once for all runs; ``task``: its label."""

    settings: TrainSettings
    task: str
    vocab_size: int


@dataclass(frozen=True)
class TrainJob:
    """Trains a variant of ``base`` on one task with one seed, and measures it; ``task``: its label."""

    variant: ModelVariant
    settings: TrainSettings
    base: ModelConfig
    task: str
    seed: int
    quality: QualitySettings | None

    @property
    def setup(self) -> TaskSettings:
        return self.settings.tasks[self.task]


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
            case TrainJob(settings=settings) as job:
                return {"by_length": [job.setup.seq_len * times for times in settings.lengths]}
        return {}

    @property
    def fingerprint(self) -> str:
        """Changes with the inputs: a record of another fingerprint does not count."""
        text = json.dumps({"format": FORMAT, "kind": self.kind, **self.inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Group:
    """Trainings of one task that one process does at the same time. ``deterministic``: see `TrainSettings`.

    ``together``: the seeds of a variant are trained as one model.
    """

    units: tuple[Unit, ...]
    deterministic: bool
    together: bool = False
    kind: Kind = "train"
    alone: bool = False

    @property
    def name(self) -> str:
        more = len(self.units) - 1
        return self.units[0].name + (f", and {more} more" if more else "")

    @property
    def models(self) -> list[tuple[Unit, ...]]:
        """The units of each model in training."""
        if not self.together:
            return [(unit,) for unit in self.units]
        return [tuple(seeds) for seeds in by_variant(self.units)]


def by_variant(units: Iterable[Unit]) -> list[list[Unit]]:
    """Trainings of one task by variant, in the order of their first ones."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        assert isinstance(unit.job, TrainJob)
        found.setdefault(unit.job.variant.name, []).append(unit)
    return [*found.values()]


def grouped(units: list[Unit], device: str) -> list[Unit | Group]:
    """The units, with the trainings of a task in groups of the number that a GPU trains at a time; on a CPU one each.

    All groups of a task but one have the same size, so that the last trainings do not wait for a large group.
    """
    found: list[Unit | Group] = []
    for label, run in groupby(units, lambda unit: unit.job.task if isinstance(unit.job, TrainJob) else None):
        members = list(run)
        job = members[0].job
        if label is None or not isinstance(job, TrainJob):
            found += members
            continue
        settings = job.settings
        lanes = 1 if device.startswith("cpu") else settings.lanes
        models = [[unit] for unit in members]
        if settings.together and lanes > 1:
            models = [seeds[at : at + lanes] for seeds in by_variant(members) for at in range(0, len(seeds), lanes)]
        count = -(-len(models) // (lanes // max(map(len, models))))
        ends = [len(models) * number // count for number in range(count + 1)]
        for start, end in pairwise(ends):
            chosen = tuple(unit for model in models[start:end] for unit in model)
            found.append(Group(chosen, settings.deterministic, settings.together and lanes > 1))
    return found


def make_units(experiment: Experiment, device: str) -> list[Unit]:
    """All units; units that run alone come first. ``device`` (without a GPU's index) is an input of all but costs."""
    device = device.partition(":")[0]
    units = [*_cost_units(experiment, device), *_model_time_units(experiment, device)]
    units += [*_checkpoint_units(experiment, device), *_train_units(experiment, device)]
    return sorted(units, key=lambda unit: not unit.alone)


def layer_key(spec: LayerSpec, config: DeepseekV4Base, variant: ModelVariant, preset: Numerics) -> str:
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
        if not variant.counts_for(experiment.base, cost.model):
            continue
        inputs, name = {"variant": asdict(variant), **shared}, f"{variant.name}: bytes and FLOPs"
        units.append(Unit("cost", name, f"variants/{variant.slug}/cost", inputs, CostJob(variant, cost), alone=True))
        config = variant.config(cost.model)
        if not isinstance(config, ModelConfig) or variant.dense:
            continue  # a layer alone cannot be timed if it reads another's entries, or a window that holds everything
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
        if variant.dense or variant.v41 is not None or variant.selection != "learned":
            continue  # none of them is a model that serves
        inputs, name = {"variant": asdict(variant), **shared}, f"{variant.name}: times of a step"
        job = ModelTimeJob(variant, settings, experiment.v4_base)
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
        if variant.dense or variant.v41 is not None or variant.selection != "learned" or variant.layers is not None:
            continue  # schedules alone are changed
        inputs, path = {"variant": asdict(variant), **shared}, f"variants/{variant.slug}/checkpoint"
        job = CheckpointJob(variant, settings)
        units.append(Unit("checkpoint", f"{variant.name}: checkpoint", path, inputs, job, files=files))
    return units


def _text_file(settings: CheckpointSettings | TrainSettings) -> dict[str, str | None]:
    return {} if settings.text is None else {"text": digest_of(settings.text)}


def _train_units(experiment: Experiment, device: str) -> list[Unit]:
    """Units task by task in the order of the file, seeds outermost: an interrupted experiment can be compared."""
    settings = experiment.train
    if settings is None:
        return []
    shared = {
        "device": device, "lengths": settings.lengths, "deterministic": settings.deterministic and device != "cpu",
    }  # fmt: skip
    units = []
    for label, setup in settings.tasks.items():
        base, read = experiment.base_of(setup), {}
        inputs: dict[str, Any] = {"base": base.to_dict(), "task": label, "settings": setup.training, **shared}
        inputs["eval_batches"] = setup.eval_batches
        if setup.task == "text":
            read = _text_file(settings)
            text = {"text": name_of(settings.text), "vocab_size": base.vocab_size, **setup.options}
            inputs |= {"tokens": text}
            if (quality := experiment.quality) is not None:
                inputs["quality"] = asdict(quality) | {"include_path": name_of(quality.include_path)}
            job = TokensJob(settings, label, base.vocab_size)
            name = f"tokens of the text ({label})"
            units.append(Unit("tokens", name, f"text/{label}", text, job, alone=True, files=read))
        chosen = [v for v in experiment.variants if setup.variants is None or v.name in setup.variants]
        for seed in experiment.seeds if setup.seeds is None else setup.seeds:
            for variant in chosen:
                name, path = f"{variant.name}: {label}, seed {seed}", f"variants/{variant.slug}/{label}-seed{seed}"
                job = TrainJob(variant, settings, base, label, seed, experiment.quality)
                given = {"variant": asdict(variant), "seed": seed, **inputs}
                units.append(Unit("train", name, path, given, job, files=read))
    return units
