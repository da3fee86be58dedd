"""What checks of attention found: each error beside its limit, kept for the file that a run on a GPU may write.

DEEPSEEK_ATTN_TEST_DEVICE=cuda DEEPSEEK_ATTN_GPU_RESULTS=errors.json pytest tests/gpu tests/kernels/attention
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:  # the process that only hands out tests does not import torch
    from torch import Tensor

RESULTS = "DEEPSEEK_ATTN_GPU_RESULTS"
LIMIT = 4e-3  # relative to float32; the kernels round weights and output to bf16
LSE_LIMIT = 1e-4
INF = float("inf")
ON_CPU = pytest.mark.on_cpu


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
        """Of (output, log-sum-exp) pairs ``[T, H, d]`` and ``[T, H]``: the worst row of each."""
        import torch

        from deepseek_attn.testing import relative_error

        self.add(section, case, relative_error(got[0], expected[0]))
        finite = expected[1].isfinite()
        same = bool((got[1].isposinf() == expected[1].isposinf()).all())  # NaN is neither
        worst = (got[1] - expected[1])[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        self.add(section, case + " lse", float(worst) if same else INF, LSE_LIMIT)

    @property
    def failed(self) -> list[str]:
        return [f"{case.section}: {case.case}: {case.error:.2e} > {case.limit:.0e}" for case in self if not case.passed]

    def write(self, path: Path, command: str) -> None:
        """As JSON: the command, a summary with the worst error of each section and limit, and all cases."""
        import torch

        from deepseek_attn.impls import flash_mla

        worst: dict[str, dict[str, float]] = {}
        for case in self:
            limits = worst.setdefault(case.section, {})
            limits[f"{case.limit:g}"] = max(limits.get(f"{case.limit:g}", 0.0), case.error)
        found = flash_mla.flavour()
        summary = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                   "torch": torch.__version__, "flash_mla": f"{found.name} {found.version}",
                   "cases": len(self), "failed": self.failed, "worst_error_by_limit": worst}  # fmt: skip
        rows = ",\n".join("  " + json.dumps(case._asdict() | {"passed": case.passed}) for case in self)
        path.write_text(
            f'{{"command": {json.dumps(command)},\n"summary": {json.dumps(summary)},\n"cases": [\n{rows}\n]}}\n'
        )


def on_cpu_too(cases: Iterable, small: Iterable) -> list:
    """``cases`` for ``parametrize``; those in ``small`` also run on a CPU, where a stand-in computes them."""
    cases, small = list(cases), list(small)
    assert all(case in cases for case in small)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=ON_CPU if case in small else ())
        for case in cases
    ]
