"""The kernels of latent projections compile for every GPU generation, on any machine."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.indexer import IndexQueryRows, query
from deepseek_attn.kernels.latent import LatentQueries, absorb, values
from tests.kernels.compiled_launches import CAPABILITIES, compiled_launches, on_gpus, pass_for_gpu

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


# tokens, and how many heads
STEPS = {"decode": (1, 128), "batch": (64, 128), "tensor parallel": (8, 16), "prefill": (300, 96)}


@pytest.mark.parametrize(("arch", "step"), on_gpus(STEPS, ["decode", "prefill"]))
def test_absorb_queries(monkeypatch, arch, step):
    pass_for_gpu(monkeypatch, CAPABILITIES[arch])
    tokens, heads = STEPS[step]
    queries = LatentQueries(
        of(tokens, heads * 192), of(heads, 256, 512)[:, :128], of(4096, 64, dtype=torch.float32),
        of(tokens, dtype=torch.int64), 128,
    )  # fmt: skip
    found = compiled_launches(monkeypatch, [absorb], arch, lambda: absorb.absorb_queries(queries))
    few = step != "prefill"
    assert list(found) == ["absorb_queries_kernel" if few else "rotate_queries_kernel"]
    (kernel,) = found.popitem()[1]
    if arch == "sm90" and few:
        loads, wait = kernel.asm["ptx"].index("ld.global"), kernel.asm["ptx"].index("griddepcontrol.wait")
        assert loads < wait, "weights are loaded before the previous kernel has ended"


@pytest.mark.parametrize("arch", on_gpus())
def test_latent_queries(monkeypatch, arch):
    pass_for_gpu(monkeypatch, CAPABILITIES[arch])
    table, positions = of(4096, 64, dtype=torch.float32), of(8, dtype=torch.int64)
    queries = LatentQueries(of(8, 128 * 192), of(128, 256, 512)[:, :128], table, positions, 128)
    weights = of(8, 64, dtype=torch.float32)
    index = IndexQueryRows(of(8, 64 * 128), weights, table, positions, 0.1, "fp8", half_split=True)
    found = compiled_launches(monkeypatch, [query], arch, lambda: query.latent_queries(queries, index))
    (kernel,) = found["latent_queries_kernel"]
    assert kernel.asm["ptx"].count("griddepcontrol.wait") == (2 if CAPABILITIES[arch] >= (9, 0) else 0)


@pytest.mark.parametrize(("arch", "step"), on_gpus(STEPS, ["decode"]))
@pytest.mark.parametrize("quantize", [True, False], ids=["quantised", "plain"])
def test_project_values(monkeypatch, arch, step, quantize):
    pass_for_gpu(monkeypatch, CAPABILITIES[arch])
    tokens, heads = STEPS[step]
    op = values.project_values_quantized if quantize else values.project_values
    call = lambda: op(of(tokens, 128, 512), of(heads, 256, 512)[:, 128:])  # noqa: E731
    found = compiled_launches(monkeypatch, [values], arch, call)
    if step == "prefill":
        assert not found
        return
    (kernel,) = found["project_values_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == (quantize and arch != "sm80")
    if arch == "sm90":
        assert kernel.asm["ptx"].index("ld.global") < kernel.asm["ptx"].index("griddepcontrol.wait")
