"""Rotary embedding against complex multiplication in float64."""

import math
from dataclasses import replace

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.impls import get_impl
from deepseek_attn.layers.rope import RotaryTable, apply_rope, inverse_frequencies
from deepseek_attn.models.block import BuildContext

FLASH = ModelConfig.from_preset("v4_flash")
PLAIN, YARN = FLASH.layers[0].rope, FLASH.layers[2].rope


def frequencies(spec):
    """Closed form in float64."""
    values = []
    for i in range(spec.dim // 2):
        f = spec.theta ** (-2 * i / spec.dim)
        if spec.factor != 1.0:
            low, high = yarn_bounds(spec)
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            f = f / spec.factor * ramp + f * (1 - ramp)
        values.append(f)
    return torch.tensor(values, dtype=torch.float64)


def yarn_bounds(spec):
    def corr(n):
        return (
            spec.dim * math.log(spec.original_max_position_embeddings / (2 * math.pi * n)) / (2 * math.log(spec.theta))
        )

    return max(math.floor(corr(spec.beta_fast)), 0), min(math.ceil(corr(spec.beta_slow)), spec.dim - 1)


def complex_rotation(x, positions, spec, sign=1):
    """``(a + ib) * exp(i * position * f)`` on the pairs of the last ``dim`` channels, in float64."""
    x = x.double()
    head, tail = x[..., : x.shape[-1] - spec.dim], x[..., x.shape[-1] - spec.dim :]
    angles = sign * torch.outer(positions.double(), frequencies(spec))
    phase = torch.polar(torch.ones_like(angles), angles)
    phase = phase.view(len(positions), *[1] * (x.dim() - 2), -1)
    rotated = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous()) * phase
    return torch.cat([head, torch.view_as_real(rotated).flatten(-2)], dim=-1)


def test_the_published_layers_have_two_kinds_of_rope():
    assert (PLAIN.theta, PLAIN.factor, PLAIN.dim) == (10000, 1.0, 64)
    assert (YARN.theta, YARN.factor, YARN.dim) == (160000, 16, 64)
    assert all(layer.rope == (YARN if layer.ratio else PLAIN) for layer in FLASH.all_layers)


def test_published_yarn_bounds():
    """Pairs up to 15 keep their frequency, pairs from 25 on have a sixteenth of it, the ones between interpolate."""
    assert yarn_bounds(YARN) == (15, 25)
    scaled = inverse_frequencies(YARN) / inverse_frequencies(replace(YARN, factor=1.0))
    expected = [1.0] * 16 + [1 - (i - 15) / 10 * (1 - 1 / 16) for i in range(16, 25)] + [1 / 16] * 7
    torch.testing.assert_close(scaled, torch.tensor(expected), rtol=2e-6, atol=0)
    assert scaled[:16].eq(1).all()
    assert scaled[25:].eq(1 / 16).all()


@pytest.mark.parametrize("spec", [PLAIN, YARN], ids=["plain", "yarn"])
def test_frequencies_have_their_closed_form(spec):
    torch.testing.assert_close(inverse_frequencies(spec).double(), frequencies(spec), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [{"original_max_position_embeddings": 256}, {"original_max_position_embeddings": 4}, {"dim": 6},
     {"beta_fast": 1, "beta_slow": 1}, {"factor": 4.0}],
    ids=["short_context", "low_clamped_to_0", "dim6", "equal_betas", "factor4"],
)  # fmt: skip
def test_unusual_yarn(changes):
    spec = replace(YARN, **changes)
    freqs = inverse_frequencies(spec)
    assert freqs.isfinite().all()
    low, high = yarn_bounds(spec)
    if high > low:
        torch.testing.assert_close(freqs.double(), frequencies(spec), rtol=1e-6, atol=0)


def test_yarn_with_one_bound_switches_between_two_pairs():
    """low == high, as when one pair completes exactly beta_fast == beta_slow rotations."""
    spec = replace(YARN, dim=8, theta=math.e**4, original_max_position_embeddings=2 * math.pi * math.e**2)
    spec = replace(spec, beta_fast=1, beta_slow=1)
    low, high = yarn_bounds(spec)
    freqs = inverse_frequencies(spec)
    assert freqs.isfinite().all()
    ratio = freqs / inverse_frequencies(replace(spec, factor=1.0))
    torch.testing.assert_close(ratio[: low + 1], torch.ones(low + 1), rtol=1e-6, atol=0)
    torch.testing.assert_close(ratio[high + 1 :], torch.full((4 - high - 1,), 1 / 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("shape", [(7, 64), (7, 3, 80), (7, 2, 3, 128)], ids=str)
@pytest.mark.parametrize("spec", [PLAIN, YARN], ids=["plain", "yarn"])
def test_rotation_is_complex_multiplication(spec, shape, inverse, device):
    table = RotaryTable(spec, 1000, device)
    x = torch.randn(shape, device=device)
    positions = torch.tensor([0, 1, 999, 63, 64, 500, 1], device=device)
    out = table.rotate(x, positions, inverse=inverse)
    expected = complex_rotation(x.cpu(), positions.cpu(), spec, -1 if inverse else 1)
    # the angle itself is a float32 product: up to 999 * 2**-24 of error
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=3e-4)
    assert torch.equal(out[..., : shape[-1] - 64], x[..., : shape[-1] - 64])
    assert out.dtype == x.dtype


def test_small_positions_are_exact_to_float32():
    table = RotaryTable(YARN, 16)
    x, positions = torch.randn(16, 96), torch.arange(16)
    torch.testing.assert_close(
        table.rotate(x, positions).double(), complex_rotation(x, positions, YARN), rtol=1e-5, atol=1e-5
    )


def test_position_0_changes_nothing():
    x = torch.randn(3, 2, 70)
    assert torch.equal(RotaryTable(PLAIN, 1).rotate(x, torch.zeros(3, dtype=torch.int64)), x)


def test_inverse_undoes_the_rotation():
    table, x, positions = RotaryTable(YARN, 300), torch.randn(5, 3, 96), torch.tensor([0, 3, 17, 255, 299])
    there = table.rotate(x, positions)
    assert (there - x)[1:].abs().amax() > 0.1
    torch.testing.assert_close(table.rotate(there, positions, inverse=True), x, rtol=1e-5, atol=1e-5)


def test_dot_products_depend_on_distance_only():
    table, q, k = RotaryTable(YARN, 300), torch.randn(64), torch.randn(64)
    dots = []
    for shift in (0, 1, 100, 259):
        rotated = table.rotate(torch.stack([q, k]), torch.tensor([40 + shift, shift]))
        dots.append(rotated[0] @ rotated[1])
    torch.testing.assert_close(torch.stack(dots), dots[0].expand(4), rtol=0, atol=2e-3)


def test_one_rounding_to_bfloat16():
    table, positions = RotaryTable(YARN, 300), torch.randint(300, (50,))
    x = torch.randn(50, 2, 96, dtype=torch.bfloat16)
    out = table.rotate(x, positions)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, table.rotate(x.float(), positions).bfloat16())


def test_yarn_does_not_scale_cosines():
    """No mscale: the rotation keeps lengths."""
    table, x = RotaryTable(YARN, 300), torch.randn(20, 64)
    out = table.rotate(x, torch.arange(280, 300))
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    assert table.cos_sin[0].tolist() == [1.0] * 32 + [0.0] * 32


def test_pairs_are_interleaved():
    out = apply_rope(torch.tensor([[9.0, 1, 2, 3, 4]]), torch.tensor([[1j, 1]]))
    assert out.tolist() == [[9, -2, 1, 3, 4]]


def test_layers_with_the_same_frequencies_share_a_table():
    config = ModelConfig.from_preset("tiny")
    context = BuildContext(config, get_numerics("exact"), torch.float32, torch.device("cpu"), get_impl("reference"), 50)
    tables = [context.rope(layer) for layer in config.all_layers]
    kinds = [layer.ratio > 0 for layer in config.all_layers]
    assert len({id(table) for table in tables}) == 2
    for table, compressed, layer in zip(tables, kinds, config.all_layers, strict=True):
        assert (table is tables[1]) == compressed
        assert table.spec == layer.rope
        assert table.cos_sin.shape == (50, 64)
