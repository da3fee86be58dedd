"""Hyper-connections in Triton: compiled for every GPU generation, and on a GPU against plain torch."""

import re

import pytest
import torch

from deepseek_attn.kernels.hyper_connection import HyperConnection, reference

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.hyper_connection import launch as hc
from deepseek_attn.kernels.hyper_connection.plan import MANY_TOKENS
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import ONE, compiled_ops, on_gpus, ptxas_report
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import required

NAN = float("nan")
LIMIT = {torch.bfloat16: 3e-3, torch.float32: 1e-5}
NUMBERS = (1e-6, 1e-6, 20)


def make(T, m, D, dtype, device=None):
    """y, streams, post and comb; and a hyper-connection with a norm."""
    rows = (2 + m) * m
    shapes = ((T, D), (T, m, D), (T, m), (T, m, m), (rows, m * D), (rows,), (3,), (D,))
    y, streams, post, comb, fn, base, scale, norm = (torch.randn(*shape, device=device) for shape in shapes)
    hc = HyperConnection(fn * (m * D) ** -0.5 * 2, base, scale, *NUMBERS, norm)
    return (y.to(dtype), streams.to(dtype), post, comb), hc


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def check(got, expected, dtype):
    for mine, other in zip(got, expected, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert relative(mine, other) <= (
            LIMIT[dtype] if other.dtype == dtype else 2e-4 if dtype != torch.float32 else 1e-5
        )


SHAPES = {"V4": (4, 4096), "odd": (4, 100), "three": (3, 72), "one": (1, 64)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("T", [1, 17, 600])
def test_every_op(gpu, T, dtype, shape: tuple[int, int]):
    (y, streams, post, comb), pre = make(T, *shape, dtype)
    m = shape[0]
    check(hc.hc_pre(streams, pre), reference.hc_pre(streams, pre), dtype)
    check(hc.hc_pre(streams, pre._replace(norm=None)), reference.hc_pre(streams, pre._replace(norm=None)), dtype)
    check([hc.hc_post(y, streams, post, comb)], [reference.hc_post(y, streams, post, comb)], dtype)
    update = y, streams, post, comb
    check(hc.hc_post_pre(*update, pre), reference.hc_post_pre(*update, pre), dtype)
    head = pre._replace(fn=pre.fn[:m].contiguous(), base=pre.base[:m].contiguous(), scale=pre.scale[:1])
    for norm in (None, pre.norm):
        head = head._replace(norm=norm)
        check([hc.hc_head(streams, head)], [reference.hc_head(streams, head)], dtype)


def separately(y, streams, post, comb, pre):
    """Update, then collapse: the new streams, and what ``hc_pre`` makes of them."""
    streams = hc.hc_post(y, streams, post, comb)
    return streams, *hc.hc_pre(streams, pre)


@pytest.mark.parametrize("both", [separately, hc.hc_post_pre])
@pytest.mark.parametrize("T", [9, 100, 700])
def test_a_token_does_not_depend_on_the_others(gpu, T, both):
    """The same bits every time and where others are NaN; alone, the same up to rounding."""
    rows, pre = make(T, 4, 512, torch.bfloat16)
    together = both(*rows, pre)
    for part in (slice(1), slice(3, 8)):
        for mine, other in zip(both(*(row[part] for row in rows), pre), together, strict=True):
            torch.testing.assert_close(mine, other[part], rtol=2**-7, atol=2**-7)
    rows[1][5] = NAN
    after = both(*rows, pre)
    kept = torch.arange(T) != 5
    for mine, other in zip(after, together, strict=True):
        assert torch.equal(mine[kept], other[kept])
        assert mine[5].isnan().any()
    for _ in range(50):
        for mine, other in zip(both(*rows, pre), after, strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())


def test_the_projection_is_float32(gpu):
    """With TF32 or bfloat16 weights the logits would be off by 1e-3."""
    (_, streams, _, _), pre = make(300, 4, 1024, torch.bfloat16)
    pre = pre._replace(fn=pre.fn * 30)
    _, post, comb = hc.hc_pre(streams, pre)
    exact = reference.hc_pre(streams.double().float(), pre)
    torch.testing.assert_close(post, exact[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(comb, exact[2], rtol=1e-3, atol=1e-5)


def test_no_tokens_and_strides(gpu):
    (y, streams, post, comb), pre = make(6, 4, 128, torch.bfloat16)
    wide = torch.full((6, 4, 256), NAN).bfloat16()
    wide[..., :128] = streams
    assert torch.equal(hc.hc_pre(wide[..., :128], pre)[0], hc.hc_pre(streams, pre)[0])
    for both in (separately, hc.hc_post_pre):
        out = both(y[:0], streams[:0], post[:0], comb[:0], pre)
        assert [tuple(part.shape) for part in out] == [(0, 4, 128), (0, 128), (0, 4), (0, 4, 4)]
    strided = torch.full((6, 256), NAN).bfloat16()
    strided[:, :128] = y
    for mine, other in zip(
        hc.hc_post_pre(strided[:, :128], wide[..., :128], post, comb, pre),
        hc.hc_post_pre(y, streams, post, comb, pre),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("T", "shape"), [(1, (3, 72)), (33, (3, 72)), (MANY_TOKENS + 1, (4, 96))])
def test_memory_that_is_not_written_is_not_read(gpu, monkeypatch, T, shape: tuple[int, int]):
    """Partial sums of tiles that are not full, and of channels past the last one."""
    (y, streams, post, comb), pre = make(T, *shape, torch.bfloat16)
    expected = hc.hc_post_pre(y, streams, post, comb, pre)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))
    for mine, other in zip(hc.hc_post_pre(y, streams, post, comb, pre), expected, strict=True):
        assert torch.equal(mine, other)


def test_bad_arguments_are_named():
    (y, streams, post, comb), pre = make(3, 4, 32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"streams must be .* \[T, m, D\]"):
        hc.hc_pre(streams[0], pre)
    with pytest.raises(ValueError, match=r"fn of 4 streams must be contiguous float32 \[24, 128\]"):
        hc.hc_pre(streams, pre._replace(fn=pre.fn[:4]))
    with pytest.raises(ValueError, match=r"the norm's weight must be float32 \[32\]"):
        hc.hc_pre(streams, pre._replace(norm=required(pre.norm)[:5]))
    with pytest.raises(ValueError, match=r"y must be"):
        hc.hc_post(y[:2], streams, post, comb)
    with pytest.raises(ValueError, match="must be contiguous float32"):
        hc.hc_post(y, streams, post.double(), comb)
    with pytest.raises(ValueError, match=r"y must be"):
        hc.hc_post_pre(y[:2], streams, post, comb, pre)
    with pytest.raises(ValueError, match=r"contiguous float32 \[24, 128\]"):
        hc.hc_post_pre(y, streams, post, comb, pre._replace(fn=pre.fn[:4]))


FEW, MANY = {"hc_mix_kernel"}, {"float32_product_kernel", "split_float32_weight_kernel"}
STEPS = {
    "one token": (1, torch.bfloat16, FEW),
    "32": (32, torch.bfloat16, FEW),
    "128": (128, torch.bfloat16, {"float32_product_kernel"}),
    "4096": (4096, torch.bfloat16, MANY),
    "float32": (4096, torch.float32, {"float32_product_kernel"}),
}


@pytest.mark.parametrize(("arch", "step"), on_gpus(STEPS, ["4096"], ONE))
def test_it_compiles(tmp_path, arch, step):
    T, dtype, products = STEPS[step]
    update, pre = make(T, 4, 4096, dtype, "meta")

    def call():
        hc.hc_post(*update)
        hc.hc_pre(update[1], pre)
        hc.hc_post_pre(*update, pre)

    found = compiled_ops(arch, call, alike=step != "4096")
    assert set(found) == {"hc_post_kernel", "hc_collapse_kernel"} | products
    if arch == "sm90":
        for kernel in (kernel for kernels in found.values() for kernel in kernels):
            assert "griddepcontrol.wait" in kernel.asm["ptx"]
            assert " 0 bytes spill stores" in ptxas_report(kernel, tmp_path)


@exhaustive_on_cpu
def test_few_variants_serve_all_numbers_of_tokens():
    """Splits depend on the number of tokens; a kernel is compiled for powers of two of them, not for each number."""
    found = set()
    for T in range(512, 8193, 64):
        update, pre = make(T, 4, 4096, torch.bfloat16, "meta")
        with recorded_launches(GPU((9, 0), 132)) as launches:
            hc.hc_post_pre(*update, pre)
        found |= {(variant.name, key) for key, variant in launches.variants.items()}
    assert len({key for name, key in found if name == "hc_collapse_kernel"}) <= 7
    assert len({key for name, key in found if name == "float32_product_kernel"}) <= 3


def test_rounds_wait_for_no_other_thread():
    """Each of Sinkhorn's rounds with a barrier, or an exchange of lanes, takes three times as long."""
    update, pre = make(1, 4, 4096, torch.bfloat16, "meta")
    (kernel,) = compiled_ops("sm90", lambda: hc.hc_post_pre(*update, pre))["hc_collapse_kernel"]
    (loop,) = re.findall(r"Loop Header(.*?)bra", kernel.asm["ptx"], re.DOTALL)
    assert loop.count("rcp.approx") == 8
    assert not re.search(r"bar\.|shfl|div\.", loop)
