"""Runs the units of an experiment, skips those that are done, and says how long the rest takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_attn.checkpoint.write import check_new_directory
from deepseek_attn.experiments.define.config import Experiment
from deepseek_attn.experiments.define.units import Unit, make_units
from deepseek_attn.experiments.run.clock import Clock
from deepseek_attn.experiments.run.pool import Pool
from deepseek_attn.experiments.run.records import read_record


@dataclass
class Outcome:
    """What a run did: units already done before, done now, and (unit, reason) of those that failed."""

    skipped: list[Unit] = field(default_factory=list)
    done: list[Unit] = field(default_factory=list)
    failed: list[tuple[Unit, str]] = field(default_factory=list)


def run_experiment(
    experiment: Experiment, folder: Path, device: str, *, resume: bool, say: Callable[[str], None] = print
) -> Outcome:
    """Does every unit that has no record yet.

    Args:
        folder: of the results; made if absent.
        resume: go on with what is there; else the folder must be empty.
        say: shows one line of progress.

    Raises:
        ValueError: ``folder`` is not empty and ``resume`` is off, or it cannot be made.
    """
    if not resume and (folder / "records").exists():
        raise ValueError(
            f"{str(folder)!r} holds results: go on with `deepseek-attn experiment resume`, or choose another --out"
        )
    if not resume or not folder.is_dir():
        check_new_directory(folder)
    outcome = Outcome()
    units = make_units(experiment, device)
    for unit in units:
        if read_record(folder, unit) is not None:
            outcome.skipped.append(unit)
    skipped = {unit.path for unit in outcome.skipped}
    left = [unit for unit in units if unit.path not in skipped]
    say(f"{experiment.name}: {len(units)} pieces of work, {len(skipped)} done before, {len(left)} to do on {device}")
    clock = Clock(left)

    def finished(unit: Unit, seconds: float, error: str | None) -> None:
        count = clock.finished(unit, seconds)
        if error is None:
            outcome.done.append(unit)
        else:
            outcome.failed.append((unit, error))
        state = f"{seconds:.1f} s" if error is None else f"FAILED: {error}"
        say(f"[{count}/{clock.total}] {unit.name} ({state}){clock.note()}")

    for alone in (True, False):
        part = [unit for unit in left if unit.alone is alone]
        if part:
            clock.jobs = 1 if alone else min(experiment.jobs, len(part))
            command = (experiment.origin, str(folder), device)
            Pool(command, folder / "logs", clock, finished, experiment.limit_s).run(part)
    return outcome
