"""Rows of decode attention: both kernels get the same queries and keys, and count the same work."""

from __future__ import annotations

import sys

import pytest
import torch

from deepseek_attn.impls import flash_mla
from deepseek_attn.lab.bench.cases import attention
from tests.support import fake_flash_mla

CPU = torch.device("cpu")


@pytest.fixture
def small_pool(monkeypatch):
    monkeypatch.setattr(attention, "PAGES", 4)
    monkeypatch.setattr(attention, "PAGE", 32)
    attention._pool.cache_clear()
    yield
    attention._pool.cache_clear()


@pytest.fixture
def fake(monkeypatch):
    module = fake_flash_mla.make("sgl")
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    flash_mla.flavour.cache_clear()
    yield module
    flash_mla.flavour.cache_clear()


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_both_attend_to_the_same_keys_of_v32(small_pool, fake, heads, n):
    case = attention._decode("row", attention.V32, heads, (64,), 3, n, CPU)
    ours, theirs = case.make(CPU, 5)
    assert theirs.q.shape == (3, n, max(64, heads), 576)
    assert theirs.keys[0].indices.shape == (3, n, 64)
    expected = case.run["triton"](ours, theirs)
    found, _ = flash_mla.sparse_decode(theirs.q, theirs.keys, 576**-0.5)
    torch.testing.assert_close(found[:, :, :heads].flatten(0, 1), expected, atol=2e-2, rtol=2e-2)
    assert fake.calls.decode == [{"q": (3, n, max(64, heads), 576), "widths": [64]}]


def test_both_attend_to_the_same_keys_of_v4(small_pool, fake):
    case = attention._decode("row", attention.V4, 8, (64, 128), 5, 1, CPU)
    ours, theirs = case.make(CPU, 6)
    assert (ours.q.shape, theirs.q.shape) == ((5, 8, 512), (5, 64, 512))
    expected = case.run["triton"](ours, theirs)
    found, _ = flash_mla.sparse_decode(theirs.q, theirs.keys, 512**-0.5, theirs.sink)
    torch.testing.assert_close(found[:, :8], expected, atol=2e-2, rtol=2e-2)


def test_sets_share_the_pool_and_nothing_else(small_pool):
    case = attention._decode("row", attention.V32, 16, (64,), 2, 2, CPU)
    (first, _), (second, _) = case.make(CPU, 0), case.make(CPU, 1)
    assert first.keys[0].pool.data_ptr() == second.keys[0].pool.data_ptr()
    assert not torch.equal(first.q, second.q)
    assert not torch.equal(first.keys[0].indices, second.keys[0].indices)


def test_work_is_counted_by_hand(small_pool):
    case = attention._decode("row", attention.V32, 16, (24,), 2, 2, CPU)
    assert case.bytes == 4 * 24 * 656 + 4 * (2 * 16 * (576 + 512) + 4 * 24)
    assert case.flops == 2 * 4 * 16 * 24 * (576 + 512)
    many = attention._decode("row", attention.V32, 16, (64,), 4, 2, CPU)
    assert many.bytes == 128 * 656 + 8 * (2 * 16 * 1088 + 4 * 64)  # no more entries than the pool has


def test_v32_has_rows_of_every_batch_and_number_of_tokens():
    labels = [case.label for case in attention.cases(CPU) if case.label.startswith("V3.2")]
    assert len(labels) == len(set(labels)) == 3 * 4 * 3
    assert {"V3.2 H=128 B=1 tokens=1", "V3.2 H=16 B=128 tokens=4"} <= set(labels)
