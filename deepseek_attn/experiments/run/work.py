"""Does one unit: from its kind to the function that measures it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.config.options import pick_dtype
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.define.units import Unit
from deepseek_attn.experiments.measure import checkpoint, timing
from deepseek_attn.experiments.measure.costs import count_costs
from deepseek_attn.experiments.measure.trained import train_variant, write_tokens


def perform(
    unit: Unit, experiment: Experiment, device: torch.device, folder: Path, progress: Callable[[float], None]
) -> dict[str, Any]:
    """The result of a unit, as JSON values.

    Args:
        folder: of the experiment's results; progress: called with the part that is done, in [0, 1].

    Raises:
        ValueError: the unit cannot be done, and why.
    """
    return WORK[unit.kind](unit, experiment, device, folder, progress)


def _variant(unit: Unit, experiment: Experiment):
    return experiment.variant(unit.inputs["variant"]["name"])


def _cost(unit, experiment, device, folder, progress) -> dict[str, Any]:
    settings, variant = experiment.cost, _variant(unit, experiment)
    numerics = variant.numerics(get_numerics(settings.numerics))
    config = variant.config(settings.model)
    return count_costs(config, numerics, pick_dtype(None, device), settings.contexts)


def _layer_time(unit, experiment, device, folder, progress) -> dict[str, Any]:
    settings, variant = experiment.cost, experiment.variant(unit.inputs["variant"])
    numerics = variant.numerics(get_numerics(settings.numerics))
    config = variant.config(settings.model)
    return timing.time_layer_kind(config, numerics, unit.inputs["layer"], settings, device, progress)


def _model_time(unit, experiment, device, folder, progress) -> dict[str, Any]:
    variant = _variant(unit, experiment)
    numerics = variant.numerics(get_numerics("exact"))
    return timing.time_model(variant.config(experiment.base), numerics, experiment.model_time, device, progress)


def _reference(unit, experiment, device, folder, progress) -> dict[str, Any]:
    return checkpoint.measure_own(experiment.checkpoint, device, folder / "records" / "checkpoint")


def _checkpoint(unit, experiment, device, folder, progress) -> dict[str, Any]:
    place = folder / "records" / "checkpoint"
    return checkpoint.measure_variant(_variant(unit, experiment), experiment.checkpoint, device, place)


def _tokens(unit, experiment, device, folder, progress) -> dict[str, Any]:
    return write_tokens(experiment.train, experiment.base.vocab_size, folder / "records" / "text")


def _train(unit, experiment, device, folder, progress) -> dict[str, Any]:
    config, inputs = _variant(unit, experiment).config(experiment.base), unit.inputs
    place = folder / "records" / "text"
    return train_variant(config, experiment.train, inputs["task"], inputs["seed"], device, place, progress)


WORK = {
    "cost": _cost,
    "layer_time": _layer_time,
    "model_time": _model_time,
    "reference": _reference,
    "checkpoint": _checkpoint,
    "tokens": _tokens,
    "train": _train,
}
