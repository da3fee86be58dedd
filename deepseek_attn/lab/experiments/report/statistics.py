"""Paired differences by seed: t intervals, and p values corrected for the number of comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95


class Paired(NamedTuple):
    """Differences of two variants by seed: their mean, its 95 % interval and the p value of "no difference".

    Interval and p value are None for a single seed.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None


def paired(differences: Sequence[float]) -> Paired:
    """Student's t for the mean of paired differences; differences that are all equal have no width.

    Raises:
        ValueError: no difference.
    """
    if not differences:
        raise ValueError("a paired comparison needs a seed that both variants have")
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return Paired(mean, None, None, None)
    freedom = len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = error * t_quantile(LEVEL, freedom)
    if error == 0.0:
        return Paired(mean, mean, mean, 1.0 if mean == 0.0 else 0.0)
    return Paired(mean, mean - half, mean + half, 1.0 - t_within(abs(mean) / error, freedom))


def holm(values: Sequence[float]) -> list[float]:
    """p values adjusted by Holm's method: the k-th smallest of n times n - k + 1, in non-decreasing order."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted


def t_within(t: float, freedom: int) -> float:
    """Probability that Student's t with a whole number of degrees of freedom is within ``-t`` and ``t``.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + sine * total)


def t_quantile(share: float, freedom: int) -> float:
    """The t for which `t_within` is ``share``."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < share else (low, middle)
    return high
