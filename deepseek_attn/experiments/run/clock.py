"""How long the rest of an experiment takes, judged by what has been done."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable

from deepseek_attn.experiments.define.units import Unit


class Clock:
    """Estimates the time left from how long units of the same kind took.

    Attributes:
        total: units at the start; jobs: how many run at a time, for those that need not run alone.
        running: seconds at which each running unit began, and the part of it that is done.
    """

    def __init__(self, units: Iterable[Unit], jobs: int = 1):
        self.left = list(units)
        self.total, self.jobs = len(self.left), jobs
        self.running: dict[Unit, tuple[float, float]] = {}
        self._seconds: dict[str, list[float]] = {}
        self._shown = 0.0

    def started(self, unit: Unit) -> None:
        self.running[unit] = (time.monotonic(), 0.0)

    def progress(self, unit: Unit, part: float) -> None:
        self.running[unit] = (self.running[unit][0], part)

    def finished(self, unit: Unit, seconds: float) -> int:
        """Counts a unit as finished; returns how many are."""
        self.left.remove(unit)
        self.running.pop(unit, None)
        self._seconds.setdefault(unit.kind, []).append(seconds)
        return self.total - len(self.left)

    def remaining(self) -> tuple[float, bool]:
        """Seconds left for the kinds of units that have been seen, and whether that is all of them."""
        known = {kind: list(times) for kind, times in self._seconds.items()}
        now = time.monotonic()
        for unit, (start, part) in self.running.items():
            if part > 0.05:
                known.setdefault(unit.kind, []).append((now - start) / part)
        total, complete = 0.0, True
        for unit in self.left:
            if unit.kind not in known:
                complete = False
                continue
            mean = sum(known[unit.kind]) / len(known[unit.kind])
            part = self.running.get(unit, (0.0, 0.0))[1]
            total += mean * (1 - part) / (1 if unit.alone else self.jobs)
        return total, complete

    def note(self) -> str:
        """``, about 40 s left``, or nothing where nothing is left; ``at least`` while some kinds are yet to be seen."""
        seconds, complete = self.remaining()
        return f", {'about' if complete else 'at least'} {show_seconds(seconds)} left" if self.left else ""

    def show(self) -> None:
        """On a terminal, a line that is written over: what is running, and the time left."""
        if not sys.stderr.isatty() or time.monotonic() - self._shown < 1:
            return
        self._shown = time.monotonic()
        width = shutil.get_terminal_size().columns - 1
        parts = [f"{unit.name} {part:.0%}" for unit, (_, part) in self.running.items()]
        line = (", ".join(parts) + self.note())[:width]
        print(f"\r{line:<{width}}", end="\r", file=sys.stderr, flush=True)


def show_seconds(seconds: float) -> str:
    """A time for people: ``40 s``, ``3 min 20 s``, ``2 h 5 min``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
