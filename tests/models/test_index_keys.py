"""Index keys in another format than the numerics', beside DeepSeek's formulas for it."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.typed import required

LENGTH = 303  # 75 entries, and 3 tokens of an open window
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def hadamard(size: int) -> torch.Tensor:
    """The natural-order matrix of +1 and -1 over the square root of its size: signs are parities of common bits."""
    number = torch.arange(size)
    common = number[:, None] & number[None, :]
    parity = torch.stack([(common >> bit) & 1 for bit in range(size.bit_length())]).sum(0) % 2
    return (1 - 2 * parity).double() * size**-0.5


def fp4(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest of e2m1's values times a power of two, in groups of 32 channels."""
    groups = x.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)))
    distance = (groups.abs() / scale).unsqueeze(-1).sub(E2M1).abs()
    nearest = (distance + 1e-9 * (torch.arange(8) % 2)).argmin(-1)  # halfway between two: the even code
    return (E2M1[nearest] * groups.sign() * scale).flatten(-2)


def index_keys(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """The entries ``[T / 4, 128]`` that layer 1's indexer has of a prompt."""
    sequence = runner.sequence(tokens)
    runner.step([(sequence, len(tokens))])
    pool = runner.pools.get("layers.1", "index")
    pages = runner.manager.block_table([sequence.cache], required(pool).spec.group)[0]
    return required(pool).gather_request(pages, len(tokens) // 4, torch.float32)


@pytest.fixture(scope="module")
def runners() -> dict[str | None, ModelRunner]:
    config = small_config([0, 4])
    source = RandomSource(config, 0)
    return {keys: small_runner(config, source, index_keys=keys) for keys in (None, "fp8", "fp4")}


def test_fp4_keys_are_rotated_and_rounded(runners):
    """Layer 0 selects nothing, so layer 1 makes its keys of the same hidden states, whatever their format."""
    tokens = prompt(runners[None].config, LENGTH)
    plain, found = index_keys(runners[None], tokens), index_keys(runners["fp4"], tokens)
    expected = fp4((plain.double() @ hadamard(plain.shape[1])).bfloat16())  # as DeepSeek's code has them
    assert found.shape == (LENGTH // 4, 128)
    assert (found != expected).float().mean() <= 1e-3  # sums of the matrix may round the other way
    assert (found - plain).norm() > 0.5 * plain.norm()  # without the matrix they would be close to these


def test_fp8_keys_are_rounded_only(runners):
    tokens = prompt(runners[None].config, LENGTH)
    plain, found = index_keys(runners[None], tokens), index_keys(runners["fp8"], tokens)
    assert not torch.equal(found, plain)
    assert ((found - plain).abs() <= plain.abs().amax(-1, keepdim=True) * 2**-4).all()


@pytest.mark.parametrize("keys", ["fp8", "fp4"])
def test_queries_are_in_the_space_of_the_keys(runners, keys):
    """Queries select most of what they select among plain keys; of 75 entries they select 6."""
    config = runners[None].config
    tokens, selections = prompt(config, LENGTH), []
    for runner in (runners[None], runners[keys]):
        index_keys(runner, tokens)
        selections.append(runner.model.layers["1"].attn.topk_indices_buffer[:LENGTH].clone())
    queries = range(200, LENGTH)
    plain, found = ([set(rows[query].tolist()) for query in queries] for rows in selections)
    common = sum(len(a & b) for a, b in zip(plain, found, strict=True)) / sum(map(len, plain))
    assert common > 0.7


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="unknown index_keys 'fp6': supported are fp8, fp4"):
        small_runner(small_config([0, 4]), index_keys="fp6")


def test_a_runner_shows_them(runners):
    assert "exact (fp4 index keys) numerics" in repr(runners["fp4"])
    assert runners["fp4"].fingerprint() != runners["fp8"].fingerprint()
