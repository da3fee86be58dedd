"""Cases of a test that ``make test`` runs, and those that only ``make test-all`` runs as well."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

ON_GPU = os.environ.get("DEEPSEEK_ATTN_TEST_DEVICE", "cpu") != "cpu"


def tiered(cases: Iterable, quick: Iterable, gpu: Iterable = (), quick_on_gpu: Iterable = ()) -> list:
    """``cases`` for ``parametrize``: those in ``quick`` as they are, the others marked ``exhaustive``.

    Those in ``gpu`` need a GPU. Those in ``quick_on_gpu`` are in ``quick`` there, where each has kernels of its own.

    ``quick`` shows each thing once, at awkward sizes; the others show the same at more sizes, in more variants or for
    more GPUs.
    """
    cases, quick, gpu = list(cases), [*quick, *(quick_on_gpu if ON_GPU else ())], list(gpu)
    missing = [case for case in quick if case not in cases]
    if missing or not quick:
        raise ValueError(f"no such cases: {missing}" if missing else "no case is left for make test")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[*([] if case in quick else [EXHAUSTIVE]), *([GPU] if case in gpu else [])],
        )
        for case in cases
    ]


EXHAUSTIVE = pytest.mark.exhaustive
GPU = pytest.mark.gpu


def exhaustive_on_cpu(test: Any) -> Any:
    """Marks a test ``exhaustive`` where it runs on a CPU: on a GPU it shows more."""
    return test if ON_GPU else EXHAUSTIVE(test)
