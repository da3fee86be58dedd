"""Without a GPU, the tests that need one are deselected, and no others."""

from types import SimpleNamespace

import pytest

from tests.conftest import deselected
from tests.support.typed import untyped


def case(fixtures=(), markers=()) -> SimpleNamespace:
    """A collected test that uses ``fixtures`` and is marked with ``markers``."""
    return SimpleNamespace(fixturenames=["seed", *fixtures], get_closest_marker=lambda name: name in markers or None)


@pytest.mark.parametrize(
    ("fixtures", "markers", "without", "interpreted"),
    [
        ((), (), False, False),
        (("gpu", "machine", "place"), ("exhaustive", "on_cpu"), False, False),  # names that several folders have
        (("gpu", "needs_gpu"), (), True, True),
        ((), ("gpu",), True, True),
        (("ops", "triton_device"), (), True, False),
        ((), ("triton",), True, False),
        (("machine", "gpu_or_stand_in"), (), True, True),
        (("machine", "gpu_or_stand_in"), ("on_cpu",), False, False),
    ],
    ids=str,
)
def test_what_needs_a_gpu(monkeypatch, fixtures, markers, without, interpreted):
    for value, expected in (("0", without), ("1", interpreted)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert deselected(untyped(case(fixtures, markers))) == expected
