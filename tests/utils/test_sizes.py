"""Sizes as people read them."""

import pytest

from deepseek_attn.utils.sizes import largest, show_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 KB"), (5.85e9, "5.85 GB"), (2e12, "2 TB")]
)
def test_show_bytes(count, text):
    assert show_bytes(count) == text


@pytest.mark.parametrize(("bound", "limit"), [(0, 10), (7, 10), (10, 10), (50, 10)])
def test_largest(bound, limit):
    assert largest(lambda value: value <= bound, 0, limit) == min(bound, limit)
