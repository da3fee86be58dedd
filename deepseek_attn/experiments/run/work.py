"""What a worker process does with a unit: measures it, and writes the record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.config.options import pick_dtype
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.define.units import ReportProgress, Unit
from deepseek_attn.experiments.measure.checkpoint import measure_own, measure_variant
from deepseek_attn.experiments.measure.costs import count_costs
from deepseek_attn.experiments.measure.timing import time_layer_kind, time_model
from deepseek_attn.experiments.measure.trained import train_variant, write_tokens
from deepseek_attn.experiments.run.records import write_record


@dataclass(frozen=True)
class Work:
    """The task of the worker processes of one experiment.

    Attributes:
        folder: of the results; device: of every process; jobs: how many share the CPUs.
    """

    experiment: Experiment
    folder: Path
    device: str
    jobs: int

    def __call__(self, unit: Unit, report: ReportProgress) -> None:
        """Measures ``unit`` and writes its record.

        Raises:
            ValueError: the unit cannot be measured, and why.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (1 if unit.alone else self.jobs)))
        start = time.monotonic()
        result = self.measure(unit, report)
        write_record(self.folder, unit, result, time.monotonic() - start)

    def measure(self, unit: Unit, report: ReportProgress) -> Mapping[str, Any]:
        """The result of a unit, see `deepseek_attn.experiments.define.results`."""
        experiment, variant, device = self.experiment, unit.variant, torch.device(self.device)
        records = self.folder / "records"
        match unit.kind:
            case "reference":
                return measure_own(experiment.checkpoint, device, records / "checkpoint")
            case "tokens":
                return write_tokens(experiment.train, experiment.base.vocab_size, records / "text")
            case "checkpoint":
                return measure_variant(variant, experiment.checkpoint, device, records / "checkpoint")
            case "cost":
                cost = experiment.cost
                numerics = variant.numerics(get_numerics(cost.numerics))
                return count_costs(variant.config(cost.model), numerics, pick_dtype(None, device), cost.contexts)
            case "layer_time":
                cost = experiment.cost
                numerics = variant.numerics(get_numerics(cost.numerics))
                return time_layer_kind(variant.config(cost.model), numerics, unit.layer, cost, device, report)
            case "model_time":
                config, numerics = variant.config(experiment.base), variant.numerics(get_numerics("exact"))
                return time_model(config, numerics, experiment.model_time, device, report)
            case "train":
                config, text = variant.config(experiment.base), records / "text"
                return train_variant(config, experiment.train, unit.task, unit.seed, device, text, report)
        raise ValueError(f"unknown kind of unit {unit.kind!r}")
