"""The task of a worker process: measures a unit, or a group of trainings, and writes its records."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.config.options import pick_dtype
from deepseek_attn.lab.experiments.define.units import (
    CheckpointJob,
    CostJob,
    Group,
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
from deepseek_attn.lab.experiments.measure.trained import SharedBatches, measure_trained, open_task, write_tokens
from deepseek_attn.lab.experiments.run.records import write_record
from deepseek_attn.lab.training import TrainResult
from deepseek_attn.lab.training.loop import (
    WORKSPACES,
    Paused,
    deterministic_ops,
    train_stepwise,
)
from deepseek_attn.lab.training.state import MADE_BY, TrainingState
from deepseek_attn.lab.training.task import Task
from deepseek_attn.utils.clock import seconds_since
from deepseek_attn.utils.files import check_replaceable

STATE = ".training-state"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitWork:
    """The task of an experiment's worker processes.

    Attributes:
        folder: of the results; device: of every process; jobs: how many share the CPUs.
        until: time of the monotonic clock at which trainings keep their state and end; None: they run to their end.
    """

    folder: Path
    device: str
    jobs: int
    until: float | None = None

    def __call__(self, unit: Unit | Group, report: ReportProgress) -> None:
        """Measures ``unit`` and writes its records.

        Raises:
            ValueError: the unit cannot be measured, and why; other trainings of its group have their records.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES)  # read with the first product of the process
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (1 if unit.alone else self.jobs)))
        if isinstance(unit, Group):
            self.train(unit, report)
            return
        start = time.perf_counter()
        result = self.measure(unit, report)
        write_record(self.folder, unit, result, seconds_since(start))

    def measure(self, unit: Unit, report: ReportProgress) -> Mapping[str, Any]:
        """The result of a unit, see `deepseek_attn.lab.experiments.define.results`."""
        device, records = torch.device(self.device), self.folder / "records"
        match unit.job:
            case CostJob(variant, settings):
                # a window that holds every token is counted by its tokens, not by pages for the longest sequence
                counted = replace(variant, attention="compressed", window_layers=0)
                config = counted.config(settings.model)
                numerics, dense = variant.numerics_from(settings.numerics), variant.dense_layers(settings.model)
                return count_costs(config, numerics, pick_dtype(None, device), settings.contexts, dense)
            case LayerTimeJob(variant, settings, layer):
                config, numerics = variant.v4_config(settings.model), variant.numerics_from(settings.numerics)
                return time_layer_kind(config, numerics, layer, settings, device, report)
            case ModelTimeJob(variant, settings, base):
                numerics = variant.numerics_from(get_numerics("exact"))
                return time_model(variant.v4_config(base), numerics, settings, device, report)
            case ReferenceJob(settings):
                return measure_own(settings, device, records / "checkpoint")
            case CheckpointJob(variant, settings):
                return measure_variant(variant, settings, device, records / "checkpoint")
            case TokensJob() as job:
                return write_tokens(job, records / "text")
        raise TypeError(f"{unit.name} is done in a group")

    def train(self, group: Group, report: ReportProgress) -> None:
        """Trains the models of a group in turn, step by step, and measures each when it is trained.

        On a GPU each has a stream of its own, on which its steps are one graph: the GPU runs several at a time, which a
        model of a million parameters cannot fill. Seeds that cannot be trained as one model are trained one by one.
        """
        device, text = torch.device(self.device), self.folder / "records" / "text"
        failures: dict[str, str] = {}
        with deterministic_ops(group.deterministic, device):
            shared: dict[str, Task] = {}
            lanes: list[Lane] = []

            def begin(units: tuple[Unit, ...]) -> None:
                job = units[0].job
                assert isinstance(job, TrainJob)
                try:
                    task = shared.setdefault(job.task, SharedBatches(open_task(job, text)))
                    lanes.append(Lane(units, job, task, self))
                except ValueError as error:
                    failures.update({unit.name: f"ValueError: {error}" for unit in units})

            for units in group.models:
                begin(units)
            while lanes:
                for lane in [*lanes]:
                    try:
                        if lane.advance():
                            lanes.remove(lane)
                    except Paused:
                        lanes.remove(lane)
                    except Exception as error:
                        traceback.print_exc()
                        lanes.remove(lane)
                        first, *others = lane.units
                        if not others:
                            failures[first.name] = f"{type(error).__name__}: {error}"
                            continue
                        name, count = lane.job.variant.name, len(lane.units)
                        logger.warning(f"{count} seeds of {name} are trained one by one: {error}")
                        lane.state.remove()
                        for unit in lane.units:
                            begin((unit,))
                report(max((lane.part for lane in lanes), default=1.0))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes share the GPU
        if failures:
            raise GroupFailure(failures)


class GroupFailure(Exception):
    """Some trainings of a group failed; ``reasons`` by their names."""

    def __init__(self, reasons: dict[str, str]):
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class Lane:
    """One training of a group: its steps, its stream and, at its end, its measurements.

    Attributes:
        units: one, or the seeds of a variant that are trained together; job: of the first of them.
        part: of the training that is done.
    """

    def __init__(self, units: tuple[Unit, ...], job: TrainJob, task: Task, work: UnitWork):
        self.units, self.job, self.task, self.folder = units, job, task, work.folder
        self.jobs = [unit.job for unit in units if isinstance(unit.job, TrainJob)]
        self.started, self.part, setup = time.perf_counter(), 0.0, job.setup
        device = torch.device(work.device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.state = open_state(work.folder / "states" / f"{units[0].path}{STATE}", units)
        options: dict[str, Any] = {
            "steps": setup.steps, "batch": setup.batch, "seq_len": setup.seq_len, "device": device, "lr": setup.lr,
            "weight_decay": setup.weight_decay, "curriculum": setup.curriculum, "selection": job.variant.selection,
            "windows": job.variant.windows(job.base), "state": self.state, "progress": self.note,
            "stop": None if work.until is None else lambda: time.monotonic() >= (work.until or 0.0),
        }  # fmt: skip
        seeds = [job.seed for job in self.jobs]
        self.steps = train_stepwise(job.variant.config(job.base), task, seeds=seeds, test_batches=0, **options)

    def note(self, step: int, loss: float) -> None:
        self.part = 0.9 * step / self.job.setup.steps

    def advance(self) -> bool:
        """Makes a step; after the last one, measures the models, writes their records and returns True."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            try:
                next(self.steps)
                return False
            except StopIteration as end:
                trained: list[TrainResult] = end.value
        if self.stream is not None:
            self.stream.synchronize()  # measured on the common stream: each has a cache of free memory of its own
        for unit, job, result in zip(self.units, self.jobs, trained, strict=True):
            measured = measure_trained(result, job, self.task)
            if len(self.jobs) > 1:
                measured["together"] = [each.seed for each in self.jobs]
            write_record(self.folder, unit, measured, seconds_since(self.started))
        self.state.remove()
        return True


def open_state(path: Path, units: tuple[Unit, ...]) -> TrainingState:
    """The state of an interrupted training of ``units``; a state of other inputs is removed.

    Raises:
        ValueError: the file is of another writer.
    """
    check_replaceable(path, MADE_BY)
    settings = {"unit": " ".join(unit.fingerprint for unit in units)}
    try:
        return TrainingState(path, settings, resume=True)
    except ValueError:
        path.unlink()
        return TrainingState(path, settings)
