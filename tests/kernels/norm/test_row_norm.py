"""RMS norms in Triton: compiled for every GPU generation, and on a GPU against float64."""

import pytest
import torch

from deepseek_attn.kernels.common import norm_rope
from deepseek_attn.kernels.norm import reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.norm import launch as ops
from tests.kernels.compiled_launches import compiled_ops, on_gpus

EPS = 1e-6
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "fp16": torch.float16}
SHAPES = {"V3.2": (3, 7168), "streams": (2, 4, 4096), "odd": (17, 100), "one channel": (5, 1), "many": (700, 512)}


def in_float64(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel over the root of the mean square, from the definition."""
    total = total.double()
    return total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_rounded(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """``got`` is ``expected`` rounded to ``dtype``, but for a float32 error before it."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps * 0.51 + 1e-6, atol=3e-8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("op", [pytest.param("triton", marks=pytest.mark.gpu), "reference"])
def test_norm_and_sum(request, op, dtype, shape):
    device = request.getfixturevalue("gpu") if op == "triton" else torch.device("cpu")
    op = ops if op == "triton" else reference
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device)
    assert_rounded(op.rms_norm(x, EPS, weight), in_float64(x, weight), dtype)
    normed, total = op.add_rms_norm(x, residual, EPS, weight)
    sums = x.float() + residual.float()
    assert torch.equal(total, sums.to(dtype))
    assert_rounded(normed, in_float64(sums, weight), dtype)
    wider = torch.randn(*shape[:-1], 3 * shape[-1], device=device).to(dtype)[..., :: 3 if shape[-1] > 1 else 1]
    wider = wider[..., : shape[-1]]
    assert_rounded(op.rms_norm(wider, EPS, weight), in_float64(wider, weight), dtype)
    assert op.rms_norm(x[:0], EPS, weight).shape == (0, *shape[1:])


def test_broken_rows_stay_alone(gpu):
    x, weight = torch.randn(5, 100, device=gpu), torch.randn(100, device=gpu)
    expected = ops.rms_norm(x, EPS, weight)
    x[2, 7] = float("nan")
    found = ops.rms_norm(x, EPS, weight)
    assert found[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(found[keep], expected[keep])


@pytest.mark.parametrize("op", [ops, reference], ids=["triton", "reference"])
def test_refuses(op):
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        op.rms_norm(x, EPS, weight[:4])
    with pytest.raises(ValueError, match="residual must be"):
        op.add_rms_norm(x, x.bfloat16(), EPS, weight)
    with pytest.raises(ValueError, match="residual must be"):
        op.add_rms_norm(x, x[:1], EPS, weight)


@pytest.mark.parametrize("arch", on_gpus())
def test_compiles(arch):
    x, weight = torch.empty(4096, 7168, dtype=torch.bfloat16, device="meta"), torch.empty(7168, device="meta")
    both = lambda: (ops.rms_norm(x, EPS, weight), ops.add_rms_norm(x, x, EPS, weight))  # noqa: E731
    found = compiled_ops(arch, both)
    assert {name: len(kernels) for name, kernels in found.items()} == {"rms_norm_kernel": 2}


@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_of_norms_in_few_passes(mapped):
    """What trains on a GPU, in float64: gradients by finite differences, and values of the formula; under vmap too."""
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    def normed(x):
        return norm_rope.NormedRows.apply(x, EPS)[0]

    def inverted(x):
        return norm_rope.InverseRms.apply(x, EPS)

    for op, expected in ((normed, x * inverse), (inverted, inverse)):
        called = torch.func.vmap(op) if mapped else op
        torch.testing.assert_close(called(x), expected)
        assert torch.autograd.gradcheck(called, (x,))


def test_the_norms_of_a_training_on_a_gpu_are_those_of_one_on_a_cpu(monkeypatch):
    x, weight = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)), torch.rand(48)
    results = []
    for trains in (False, True):
        monkeypatch.setattr(norm_rope, "_trains_on_gpu", lambda x, trains=trains: trains)
        leaf = x.clone().requires_grad_()
        y = norm_rope.rms_norm(leaf, EPS, weight) * norm_rope.inverse_rms(leaf, EPS)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
