"""Checks of attention that need a GPU and FlashMLA. Without them a small part runs on a CPU, against a stand-in.

    DEEPSEEK_ATTN_TEST_DEVICE=cuda DEEPSEEK_ATTN_GPU_RESULTS=errors.json pytest tests/gpu

Every case draws random data, fills what nothing may read with NaN, and compares with float32 torch on the same cached
bytes. ``DEEPSEEK_ATTN_GPU_RESULTS`` names a file for all errors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pytest
import torch

from deepseek_attn.impls import flash_mla, get_impl
from tests.support import fake_flash_mla
from tests.support.report import ON_CPU
from tests.support.tiers import EXHAUSTIVE


@pytest.fixture
def checked(
    device: torch.device, gpu_or_stand_in, request: pytest.FixtureRequest, monkeypatch
) -> Iterator[torch.device]:
    """The device of the tests if FlashMLA runs there; a CPU, with a stand-in for the package, for small cases."""
    usable, reason = flash_mla.supported(device)
    if not usable and request.node.get_closest_marker("on_cpu") is None:
        pytest.skip(reason)
    if not usable:
        device = torch.device("cpu")
        fake_flash_mla.install(monkeypatch)
    flash_mla.flavour.cache_clear()
    yield device
    monkeypatch.undo()
    flash_mla.flavour.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_backends(
    backends: Iterable[str], cases: Iterable[str], reference: Iterable[str], stand_in: Iterable[str] = ()
) -> list:
    """(backend, case) for ``parametrize``: each of ``cases`` on each backend that the device has.

    Args:
        reference: cases that run in plain torch.
        stand_in: cases that FlashMLA's stand-in computes on a CPU where FlashMLA does not run, in ``make test-all``.
    """
    on_device = [(backend, case) for backend in backends for case in cases]
    on_cpu = [pytest.param("reference", case, marks=ON_CPU) for case in reference]
    on_cpu += [pytest.param("flashmla", case, marks=[ON_CPU, EXHAUSTIVE]) for case in stand_in]
    return on_device + on_cpu


@pytest.fixture
def machine(
    device: torch.device, gpu_or_stand_in, backend: str, request: pytest.FixtureRequest, monkeypatch
) -> Iterator[torch.device]:
    """The device of the tests if ``backend`` runs there; else a CPU, for what `on_backends` runs on one."""
    try:
        get_impl(backend, device)
    except ValueError as error:
        if request.node.get_closest_marker("on_cpu") is None:
            pytest.skip(str(error))
        device = torch.device("cpu")
        fake_flash_mla.install(monkeypatch)
        monkeypatch.setattr(flash_mla, "supported", lambda device, spec=None: (True, "a stand-in"))
    flash_mla.flavour.cache_clear()
    yield device
    monkeypatch.undo()
    flash_mla.flavour.cache_clear()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
