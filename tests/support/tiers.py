"""Cases of a test that ``make test`` runs, and those that only ``make test-all`` runs as well."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def tiered(cases: Iterable, quick: Iterable, gpu: Iterable = ()) -> list:
    """``cases`` for ``parametrize``: those in ``quick`` as they are, the others marked ``exhaustive``.

    Those in ``gpu`` need a GPU.

    ``quick`` shows each thing once, at awkward sizes; the others show the same at more sizes, in more variants or for
    more GPUs.
    """
    cases, quick, gpu = list(cases), list(quick), list(gpu)
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
