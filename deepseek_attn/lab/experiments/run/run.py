"""Runs the unfinished units of an experiment, and estimates the remaining time."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

import torch

from deepseek_attn.checkpoint.write import check_new_directory
from deepseek_attn.config.options import pick_device
from deepseek_attn.lab.experiments.define.config import Experiment
from deepseek_attn.lab.experiments.define.units import Group, Unit, grouped, make_units
from deepseek_attn.lab.experiments.run.pool import Finished, WorkerPool
from deepseek_attn.lab.experiments.run.progress import Progress
from deepseek_attn.lab.experiments.run.records import check_folder, make_folder, read_owner, read_record
from deepseek_attn.lab.experiments.run.work import UnitWork

MINUTE = 60.0  # seconds
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitFailure:
    """A unit that has no result, and why."""

    unit: Unit
    reason: str


@dataclass
class Outcome:
    """Outcome of a run: units already done before, done now, failed, and left when the time was over."""

    skipped: list[Unit] = field(default_factory=list)
    done: list[Unit] = field(default_factory=list)
    failed: list[UnitFailure] = field(default_factory=list)
    paused: list[Unit] = field(default_factory=list)


def run_experiment(
    experiment: Experiment, folder: Path, device: str, *, resume: bool, minutes: float | None = None
) -> Outcome:
    """Does every unit that has no record yet, and logs a line for each.

    Args:
        folder: of the results; made if absent.
        device: of every worker process; it must be on this machine where there is something left to do.
        resume: continue from existing records; else the folder must be empty.
        minutes: after so long nothing is begun, and trainings keep their state and end; None: no limit.

    Raises:
        ValueError: ``folder`` is not empty and ``resume`` is off, or it cannot be made; no such device.
    """
    if not resume and ((folder / "records").exists() or read_owner(folder)):
        raise ValueError(
            f"{str(folder)!r} holds results: go on with `deepseek-attn experiment resume`, or choose another --out"
        )
    outcome, left, units = Outcome(), [], make_units(experiment, device)
    if resume and folder.is_dir() and any(folder.iterdir()):
        check_folder(folder, experiment, units)
    else:
        check_new_directory(folder)
    for unit in units:
        (left if read_record(folder, unit) is None else outcome.skipped).append(unit)
    if left:
        pick_device(device)
    count, skipped = len(left), len(outcome.skipped)
    logger.info(
        f"{experiment.name}: {count + skipped} pieces of work, {skipped} done before, {count} to do on {device}"
    )
    work = grouped(left, device)
    gpus = gpu_environments(device)
    jobs = min(experiment.jobs * len(gpus), max(1, sum(not item.alone for item in work)))
    progress = Progress(work, jobs)
    until = None if minutes is None else time.monotonic() + MINUTE * minutes

    def finished(item: Unit | Group, end: Finished) -> None:
        progress.finished(item, end.seconds)
        for unit in item.units if isinstance(item, Group) else (item,):
            if read_record(folder, unit) is not None:
                outcome.done.append(unit)
                state = f"{end.seconds:.1f} s"
            elif end.error is None:
                outcome.paused.append(unit)
                state = "stopped, its state is kept"
            else:
                reason = end.reasons.get(unit.name, end.error)
                outcome.failed.append(UnitFailure(unit, reason))
                state = f"FAILED: {reason}"
            over = len(outcome.done) + len(outcome.failed) + len(outcome.paused)
            logger.info(f"[{over}/{count}] {unit.name} ({state}){progress.note()}")

    if left and read_owner(folder) is None:
        make_folder(folder, experiment.name)
    with progress.bar:
        task = UnitWork(folder, device, jobs, until)
        pool = WorkerPool(task, folder / "logs", jobs, progress.running, finished, experiment.limit_s, until, gpus)
        for item in pool.run(work):
            outcome.paused += item.units if isinstance(item, Group) else (item,)
    states = folder / "states"
    if not any(path.is_file() for path in states.rglob("*")):
        rmtree(states, ignore_errors=True)  # the folders of states that are removed
    return outcome


def gpu_environments(device: str) -> list[dict[str, str]]:
    """Variables of a process for each GPU that ``device`` names: ``cuda`` all visible ones, others one."""
    count = torch.cuda.device_count() if device == "cuda" else 1
    if count < 2:
        return [{}]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": name.strip()} for name in listed.split(",")[:count]]
