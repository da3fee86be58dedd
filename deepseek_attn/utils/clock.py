"""Elapsed seconds, by a clock that may stand still or jump."""

from __future__ import annotations

import time

LEAST_SECONDS = 1e-9


def seconds_since(start: float) -> float:
    """Seconds since ``start``, a value of `time.perf_counter`.

    At least `LEAST_SECONDS`, so that a rate is a number even if the clock stands still or goes back, as it may on a
    virtual machine that was suspended.
    """
    return max(time.perf_counter() - start, LEAST_SECONDS)
