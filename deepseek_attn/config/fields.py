"""Typed access to the keys of a ``config.json`` that collects problems instead of stopping at the first one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

REQUIRED = object()
MAX_INTEGER = 2**31 - 1  # sizes and token ids are int32 on a GPU, and products of two fit in int64
# Upper bounds of sizes that no tensor bounds, or that determine the number of layers and tables. Published: 61 layers,
# one MTP layer, 20 iterations, 2048 indices, windows of 128 tokens and heads of 512 channels.
MAXIMA = {
    "num_hidden_layers": 1000,
    "num_nextn_predict_layers": 100,
    "hc_sinkhorn_iters": 1000,
    "index_topk": 16_384,
    "sliding_window": 65_536,
    "head_dim": 4096,
    "qk_rope_head_dim": 4096,
}
MIN_NUMBER, MAX_NUMBER = 1e-37, 1e37  # numbers are float32 in kernels
SHOWN_PROBLEMS = 20


class FieldReader:
    """Reads keys of one config and collects every problem.

    A getter returns the checked value, or ``None`` where it recorded a problem; JSON ``null`` counts as an absent key.
    ``as_*`` methods check a value read elsewhere; ``label`` is its name in the message.

    Args:
        raw: the decoded JSON object.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.problems: list[str] = []
        self._missing: list[str] = []

    def problem(self, text: str) -> None:
        """Records a problem. A long text (it quotes a long value) is shortened in the middle."""
        self.problems.append(text if len(text) <= 600 else f"{text[:300]} ... {text[-200:]}")

    def missing(self, label: str) -> None:
        self._missing.append(label)

    def raise_if_problems(self, origin: str) -> None:
        """Raises one ValueError that lists all problems found so far. ``origin`` names the source of the config."""
        problems = list(self.problems)
        if self._missing:
            problems.insert(0, f"missing required keys: {', '.join(self._missing)}")
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            lines = [f"\n  - {text}" for text in problems[:SHOWN_PROBLEMS]]
            more = len(problems) - SHOWN_PROBLEMS
            raise ValueError(
                f"invalid config ({origin}), {count}:{''.join(lines)}" + (f"\n  - and {more} more" if more > 0 else "")
            )

    # values by key

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        return self.agreed(key, {key: self.raw.get(key)}, default)

    def agreed(self, label: str, spellings: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """Returns the value given in one or several spellings of a key; different values are a problem."""
        given = [(name, value) for name, value in spellings.items() if value is not None]
        if not given:
            if default is REQUIRED:
                self.missing(label)
                return None
            return default
        first_name, first = given[0]
        for name, value in given[1:]:
            if value != first:
                self.problem(f"{first_name} is {first!r} but {name} is {value!r}: they mean the same, drop one of them")
        return first

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> int | None:
        return self.as_integer(key, self.value(key, default), minimum)

    def number(self, key: str, default: Any = REQUIRED) -> float | None:
        return self.as_number(key, self.value(key, default))

    def flag(self, key: str, default: bool) -> bool | None:
        value = self.value(key, default)
        if isinstance(value, bool):
            return value
        self.problem(f"{key} is {value!r}: expected true or false")
        return None

    def choice(self, key: str, supported: tuple, default: Any = REQUIRED) -> Any:
        return self.as_choice(key, self.value(key, default), supported)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        return self.as_mapping(key, self.raw.get(key))

    # values already at hand

    def as_integer(self, label: str, value: Any, minimum: int = 1) -> int | None:
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            if value <= MAXIMA.get(label, MAX_INTEGER):
                return value
            self.problem(f"{label} is {value!r}: supported is at most {MAXIMA.get(label, MAX_INTEGER)}")
            return None
        kind = {0: "an integer >= 0", 1: "a positive integer"}.get(minimum, f"an integer >= {minimum}")
        self.problem(f"{label} is {value!r}: expected {kind}")
        return None

    def as_number(self, label: str, value: Any) -> float | None:
        """Checks a positive number that float32 holds."""
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            if MIN_NUMBER <= value <= MAX_NUMBER:
                return float(value)
            self.problem(f"{label} is {value!r}: supported are numbers from {MIN_NUMBER} to {MAX_NUMBER}")
            return None
        self.problem(f"{label} is {value!r}: expected a positive number")
        return None

    def as_choice(self, label: str, value: Any, supported: tuple) -> Any:
        if value is None or any(type(value) is type(item) and value == item for item in supported):
            return value
        self.problem(f"{label} is {value!r}: supported is {' or '.join(repr(item) for item in supported)}")
        return None

    def as_mapping(self, label: str, value: Any) -> Mapping[str, Any] | None:
        if value is None or isinstance(value, Mapping):
            return value
        self.problem(f"{label} is {value!r}: expected an object")
        return None

    def as_integers(self, label: str, value: Any, minimum: int = 1) -> tuple[int, ...] | None:
        """Checks a list of integers; returns None if the list is absent or wrong."""
        values = self.as_list(label, value)
        if values is None:
            return None
        checked = [self.as_integer(f"{label}[{i}]", item, minimum) for i, item in enumerate(values)]
        known = tuple(value for value in checked if value is not None)
        return known if len(known) == len(checked) else None

    def as_list(self, label: str, value: Any) -> list | None:
        if isinstance(value, (list, tuple)):
            return list(value)
        if value is not None:
            self.problem(f"{label} is {value!r}: expected a list")
        return None
