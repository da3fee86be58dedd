"""`hc_delayed` and `hc_collapse`: V4.1's use of the weights one sublayer late."""

import os

import pytest
import torch

from deepseek_attn.kernels.hyper_connection import HyperConnection, SublayerOutput, hc_collapse, hc_delayed, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import gpu as gpu_facts
from deepseek_attn.kernels.hyper_connection import hyper_connection_triton, launch
from deepseek_attn.kernels.hyper_connection.plan import StreamsProblem, plan
from tests.kernels.compiled_launches import ONE, compiled_ops, on_gpus, ptxas_report
from tests.support.typed import required

NAN = float("nan")
NUMBERS = (1e-20, 1e-6, 20)
LIMIT = {torch.bfloat16: 3e-3, torch.float32: 1e-5}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def make(T, m, D, dtype=torch.float32, device=None):
    """A sublayer's output, pre, and a hyper-connection with a norm."""
    rows = (2 + m) * m
    shapes = ((T, D), (T, m, D), (T, m), (T, m, m), (T, m), (rows, m * D), (rows,), (3,), (D,))
    y, streams, post, comb, pre, fn, base, scale, norm = (torch.randn(*shape, device=device) for shape in shapes)
    output = SublayerOutput(y.to(dtype), streams.to(dtype), post, comb)
    return output, pre, HyperConnection(fn * (m * D) ** -0.5 * 2, base, scale, *NUMBERS, norm)


def test_mix_and_collapse_are_hc_pre():
    output, _, connection = make(5, 4, 24)
    x, post, comb = reference.hc_pre(output.streams, connection)
    pre = reference.hc_mix(output.streams, connection)[0]
    got = hc_delayed(output.streams, pre, connection)
    for mine, other in ((got.x, x), (got.post, post), (got.comb, comb), (got.pre, pre)):
        assert torch.equal(mine, other)
    updated = reference.hc_post(*output)
    for mine, other in zip(hc_delayed(output, pre, connection), hc_delayed(updated, pre, connection), strict=True):
        assert torch.equal(mine, other)
    first = torch.zeros(5, 4).index_fill_(1, torch.tensor(0), 1)
    assert torch.equal(hc_collapse(output.streams, first, 1e-20), output.streams[:, 0])


def test_a_tiny_epsilon_counts():
    """Of rows of 1e-9, whose mean square of 1e-18 is far above 1e-20 and far below 1e-6."""
    x = torch.full((1, 1, 8), 1e-9)
    assert torch.allclose(hc_collapse(x, torch.ones(1, 1), 1e-20, torch.ones(8)), torch.full((1, 8), 1 / 1.01**0.5))


@pytest.fixture
def hc(triton_device):
    return launch


@pytest.fixture
def anywhere(hc, monkeypatch):
    """The kernels take tensors of a CPU, which an interpreter reads; it knows no assembler."""
    if INTERPRETED:
        monkeypatch.setattr(hyper_connection_triton, "_reciprocal", lambda x: 1 / x)


def check(got, expected, dtype):
    for mine, other in zip(got, expected, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        error = (mine.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)
        assert error <= (LIMIT[dtype] if other.dtype == dtype else 2e-4 if dtype != torch.float32 else 1e-5)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("shape", [(4, 100), (3, 72), (1, 64)], ids=str)
@pytest.mark.parametrize("T", [1, 3, 17])
def test_delayed_in_triton(hc, monkeypatch, device, T, shape: tuple[int, int]):
    """Of streams and of an output that updates them; memory that is not written is not read."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    output, pre, connection = make(T, *shape, dtype, device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))
    for streams in (output, output.streams):
        for each in (connection, connection._replace(norm=None)):
            got = hc.hc_delayed(streams, pre, each)
            check(got, reference.hc_delayed(streams, pre, each), dtype)
    for weight in (connection.norm, None):
        got = hc.hc_collapse(output.streams, pre, 1e-20, weight)
        check([got], [reference.hc_collapse(output.streams, pre, 1e-20, weight)], dtype)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("splits", [1, 5, 8])
@pytest.mark.parametrize("T", [3, 1100])
def test_partial_sums_are_added_up(hc, device, T, splits):
    """Of as many splits as there are, which is no power of two; NaN that follows them in memory is not read."""
    output, pre, connection = make(T, 4, 64, torch.float32, device)
    streams = output.streams
    flat = streams.flatten(1).double()
    whole = torch.cat([flat @ connection.fn.double().T, flat.square().sum(1, keepdim=True)], dim=1).float()
    memory = torch.full((16, *whole.shape), NAN, device=device)
    sums = memory[:splits]
    sums[:] = whole / splits
    expected = reference.hc_delayed(streams, pre, connection)
    _, x, post, comb, next_pre = (torch.empty_like(part) for part in expected)
    made = plan(StreamsProblem(T, 64, update=False), gpu_facts(streams.device))
    args = hc.CollapseArguments(
        streams, pre, sums, connection.base, connection.scale, connection.norm, x, next_pre, post, comb,
        connection.rms_eps, connection.hc_eps,
    )  # fmt: skip
    hc._launch_collapse(made.collapse, args, connection.iterations)
    check([streams, x, post, comb, next_pre], expected, torch.float32)


@pytest.mark.parametrize("T", [1, 9, 100, 700])
def test_at_the_size_of_v41(gpu, hc, T):
    """As plain torch, with the same bits every time, whatever the other tokens are."""
    output, pre, connection = make(T, 4, 5120, torch.bfloat16)
    got = hc.hc_delayed(output, pre, connection)
    check(got, reference.hc_delayed(output, pre, connection), torch.bfloat16)
    if T > 5:
        output.streams[5] = NAN
        kept = torch.arange(T) != 5
        for mine, other in zip(hc.hc_delayed(output, pre, connection), got, strict=True):
            assert torch.equal(mine[kept], other[kept])
    first = hc.hc_delayed(output, pre, connection)
    for _ in range(50):
        for mine, other in zip(hc.hc_delayed(output, pre, connection), first, strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())


@pytest.mark.usefixtures("anywhere")
def test_no_tokens_and_bad_arguments(hc, device):
    output, pre, connection = make(3, 4, 32, device=device)
    none = SublayerOutput(*(part[:0] for part in output))
    shapes = [tuple(part.shape) for part in hc.hc_delayed(none, pre[:0], connection)]
    assert shapes == [(0, 4, 32), (0, 32), (0, 4), (0, 4, 4), (0, 4)]
    for words, call in {
        r"contiguous float32 \[3, 4\], got float32 \[2, 4\]": lambda: hc.hc_delayed(output, pre[:2], connection),
        r"the norm's weight must be float32 \[32\]": lambda: hc.hc_collapse(
            output.streams, pre, 1e-20, required(connection.norm)[:3]
        ),
        r"y must be": lambda: hc.hc_delayed(output._replace(y=output.y[:2]), pre, connection),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


STEPS = {"one token": 1, "32": 32, "128": 128, "4096": 4096}


@pytest.mark.parametrize(("arch", "step"), on_gpus(STEPS, ["one token"], ONE))
@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
def test_it_compiles(tmp_path, arch, step):
    output, pre, connection = make(STEPS[step], 4, 5120, torch.bfloat16, "meta")

    def call():
        launch.hc_delayed(output, pre, connection)
        launch.hc_collapse(output.streams, pre, 1e-20, connection.norm)

    found = compiled_ops(arch, call, alike=step != "4096")
    assert len(found["hc_collapse_kernel"]) == 2
    if arch == "sm90":
        for kernel in found["hc_collapse_kernel"]:
            assert "griddepcontrol.wait" in kernel.asm["ptx"]
            assert " 0 bytes spill stores" in ptxas_report(kernel, tmp_path)
