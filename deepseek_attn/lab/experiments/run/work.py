"""The task of a worker process: measures a unit and writes its record."""

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
from deepseek_attn.lab.experiments.define.units import (
    CheckpointJob,
    CostJob,
    LayerTimeJob,
    ModelTimeJob,
    ReferenceJob,
    ReportProgress,
    TokensJob,
    TrainJob,
    Unit,
)
from deepseek_attn.lab.experiments.measure.checkpoint import measure_own, measure_variant
from deepseek_attn.lab.experiments.measure.costs import count_costs
from deepseek_attn.lab.experiments.measure.timing import time_layer_kind, time_model
from deepseek_attn.lab.experiments.measure.trained import train_variant, write_tokens
from deepseek_attn.lab.experiments.run.records import write_record
from deepseek_attn.utils.clock import seconds_since


@dataclass(frozen=True)
class UnitWork:
    """The task of an experiment's worker processes.

    Attributes:
        folder: of the results; device: of every process; jobs: how many share the CPUs.
    """

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
        start = time.perf_counter()
        result = self.measure(unit, report)
        write_record(self.folder, unit, result, seconds_since(start))

    def measure(self, unit: Unit, report: ReportProgress) -> Mapping[str, Any]:
        """The result of a unit, see `deepseek_attn.lab.experiments.define.results`."""
        device, records = torch.device(self.device), self.folder / "records"
        match unit.job:
            case CostJob(variant, settings):
                config, numerics = variant.config(settings.model), variant.numerics_from(settings.numerics)
                return count_costs(config, numerics, pick_dtype(None, device), settings.contexts)
            case LayerTimeJob(variant, settings, layer):
                config, numerics = variant.config(settings.model), variant.numerics_from(settings.numerics)
                return time_layer_kind(config, numerics, layer, settings, device, report)
            case ModelTimeJob(variant, settings, base):
                numerics = variant.numerics_from(get_numerics("exact"))
                return time_model(variant.config(base), numerics, settings, device, report)
            case ReferenceJob(settings):
                return measure_own(settings, device, records / "checkpoint")
            case CheckpointJob(variant, settings):
                return measure_variant(variant, settings, device, records / "checkpoint")
            case TokensJob(settings, vocab_size):
                return write_tokens(settings, vocab_size, records / "text")
            case TrainJob(variant, settings, base, task, seed):
                config = variant.config(base)
                return train_variant(config, settings, task, seed, device, records / "text", report)
