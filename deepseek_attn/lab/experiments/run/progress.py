"""The progress bar of an experiment, and its remaining time, estimated from finished units of the same kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tqdm.auto import tqdm

from deepseek_attn.lab.experiments.define.units import Group, Unit
from deepseek_attn.lab.experiments.run.pool import Running
from deepseek_attn.utils.terminal import visible


class Progress:
    """Counts finished units; on a terminal, a bar shows what is running.

    Attributes:
        left: unfinished units.
        jobs: units that run at a time, except units that run alone.
    """

    def __init__(self, units: Iterable[Unit | Group], jobs: int = 1):
        self.left, self.jobs = list(units), jobs
        self._running: dict[Unit | Group, Running] = {}
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.bar = tqdm(
            total=len(self.left),
            disable=None,
            leave=False,
            dynamic_ncols=True,
            bar_format="{bar:20} {n_fmt}/{total_fmt} {desc}",
        )

    def running(self, unit: Unit | Group, state: Running) -> None:
        self._running[unit] = state
        parts = [f"{unit.name} {state.part:.0%}" for unit, state in self._running.items()]
        self.bar.set_description_str(visible(", ".join(parts) + self.note()))

    def finished(self, unit: Unit | Group, seconds: float) -> None:
        self.left.remove(unit)
        self._running.pop(unit, None)
        self._seconds[unit.kind].append(seconds)
        self.bar.update()

    def remaining(self) -> tuple[float, bool]:
        """(seconds left for the kinds of units seen so far, whether these are all kinds)."""
        known = {kind: list(seconds) for kind, seconds in self._seconds.items()}
        for unit, state in self._running.items():
            if state.part > 0.05:
                known.setdefault(unit.kind, []).append(state.seconds / state.part)
        total, complete = 0.0, True
        for unit in self.left:
            if unit.kind not in known:
                complete = False
                continue
            mean = sum(known[unit.kind]) / len(known[unit.kind])
            part = self._running[unit].part if unit in self._running else 0.0
            total += mean * (1 - part) / (1 if unit.alone else self.jobs)
        return total, complete

    def note(self) -> str:
        """``, about 00:40 left``, or nothing once all is done; ``at least`` while some kinds are yet to be seen."""
        seconds, complete = self.remaining()
        return f", {'about' if complete else 'at least'} {tqdm.format_interval(seconds)} left" if self.left else ""
