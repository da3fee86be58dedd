"""What the checks on a GPU share: errors, and a report that prints cases as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LIMIT = 4e-3  # relative to float32; the kernels round weights and output to bf16
LSE_LIMIT = 1e-4
INF = float("inf")


@dataclass
class Report:
    """Results, printed as they come."""

    cases: list[dict] = field(default_factory=list)

    def add(self, section: str, case: str, error: float, limit: float = LIMIT) -> None:
        passed = error <= limit  # False for NaN
        self.cases.append({"section": section, "case": case, "error": error, "limit": limit, "passed": passed})
        print(f"{section:8} {case:58} {error:9.2e} {'' if passed else 'FAILED'}", flush=True)

    def compare(self, section: str, case: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        self.add(section, case, relative(got[0], expected[0]))
        finite = expected[1].isfinite()
        same = bool((got[1].isfinite() == finite).all())
        worst = (got[1] - expected[1])[finite].abs().max() if bool(finite.any()) else torch.zeros(())
        self.add(section, case + " lse", float(worst) if same else INF, LSE_LIMIT)

    def summary(self) -> dict:
        worst: dict[str, float] = {}
        for case in self.cases:
            if case["limit"] == LIMIT:
                worst[case["section"]] = max(worst.get(case["section"], 0.0), case["error"])
        failed = [f"{c['section']}: {c['case']}" for c in self.cases if not c["passed"]]
        return {"cases": len(self.cases), "failed": failed, "worst_relative_error": worst}


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
