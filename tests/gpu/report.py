"""What the checks on a GPU found: each error beside its limit, kept for the file that a run may write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepseek_attn.impls import flash_mla

LIMIT = 4e-3  # relative to float32; the kernels round weights and output to bf16
LSE_LIMIT = 1e-4
INF = float("inf")


class Case(NamedTuple):
    section: str
    case: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


class Report(list[Case]):
    """Results of one test, or of all."""

    def add(self, section: str, case: str, error: float, limit: float = LIMIT) -> None:
        self.append(Case(section, case, error, limit))

    def compare(self, section: str, case: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        """Of (output, log-sum-exp) pairs."""
        self.add(section, case, relative(got[0], expected[0]))
        finite = expected[1].isfinite()
        same = bool((got[1].isfinite() == finite).all())
        worst = (got[1] - expected[1])[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        self.add(section, case + " lse", float(worst) if same else INF, LSE_LIMIT)

    @property
    def failed(self) -> list[str]:
        return [f"{case.section}: {case.case}: {case.error:.2e} > {case.limit:.0e}" for case in self if not case.passed]

    def write(self, path: Path, command: str) -> None:
        """As JSON: the command, a summary with the worst relative error of each section, and all cases."""
        worst: dict[str, float] = {}
        for case in self:
            if case.limit == LIMIT:
                worst[case.section] = max(worst.get(case.section, 0.0), case.error)
        found = flash_mla.flavour()
        summary = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                   "torch": torch.__version__, "flash_mla": f"{found.name} {found.version}",
                   "cases": len(self), "failed": self.failed, "worst_relative_error": worst}  # fmt: skip
        rows = ",\n".join("  " + json.dumps(case._asdict() | {"passed": case.passed}) for case in self)
        path.write_text(
            f'{{"command": {json.dumps(command)},\n"summary": {json.dumps(summary)},\n"cases": [\n{rows}\n]}}\n'
        )


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def on_cpu_too(cases: Iterable, small: Iterable) -> list:
    """``cases`` for ``parametrize``; those in ``small`` also run on a CPU, where a stand-in computes them."""
    cases, small = list(cases), list(small)
    assert all(case in cases for case in small)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.on_cpu if case in small else ())
        for case in cases
    ]
