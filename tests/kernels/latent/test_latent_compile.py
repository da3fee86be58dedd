"""The kernels of latent projections compile for every GPU generation, on any machine."""

import itertools
import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.indexer import IndexQueryRows, latent_queries
from deepseek_attn.kernels.latent import (
    LatentQueries,
    LatentWeight,
    absorb_queries,
    project_values,
)
from tests.kernels.compiled_launches import CAPABILITIES, compiled_ops, on_gpus, ptxas_report
from tests.support.tiers import tiered

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def half(heads, fp8, part):
    """A half of V3.2's ``kv_b_proj``."""
    both = of(heads, 256, 512, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scale = of(heads, 2, 4, dtype=torch.float32)[:, part : part + 1] if fp8 else None
    return LatentWeight(both[:, 128 * part : 128 * part + 128], scale)


# tokens, and how many heads
STEPS = {"decode": (1, 128), "batch": (64, 128), "tensor parallel": (8, 16), "prefill": (300, 96)}


ABSORBED = [(step, weight) for step in STEPS for weight in ("fp8", "bf16")]
ABSORBED_MAIN = [("decode", "fp8"), ("decode", "bf16"), ("prefill", "fp8")]


@pytest.mark.parametrize(("arch", "case"), on_gpus(ABSORBED, ABSORBED_MAIN), ids=str)
def test_absorb_queries(arch, case):
    step, fp8 = case[0], case[1] == "fp8"
    tokens, heads = STEPS[step]
    queries = LatentQueries(
        of(tokens, heads * 192), half(heads, fp8, 0), of(4096, 64, dtype=torch.float32),
        of(tokens, dtype=torch.int64), 128,
    )  # fmt: skip
    found = compiled_ops(arch, lambda: absorb_queries(queries))
    few = step != "prefill"
    names = ["absorb_queries_kernel"] if few else ["latent_dequantize_kernel"] * fp8 + ["rotate_queries_kernel"]
    assert list(found) == names
    (kernel,) = found[names[0]]
    if fp8:
        assert_reads_fp8(kernel, arch)
    if arch == "sm90" and few:
        loads, wait = kernel.asm["ptx"].index("ld.global"), kernel.asm["ptx"].index("griddepcontrol.wait")
        assert loads < wait, "weights are loaded before the previous kernel has ended"


def assert_reads_fp8(kernel, arch):
    """16 bytes at a time, into registers or shared memory; converted by the GPU where it can."""
    assert re.search(r"ld\.global[.\w:]*\.v4\.b32|cp\.async\.cg\.shared\.global", kernel.asm["ptx"])
    assert ("e4m3x2" in kernel.asm["ptx"]) == (arch != "sm80")


@pytest.mark.parametrize("arch", on_gpus())
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_latent_queries(arch, fp8):
    table, positions = of(4096, 64, dtype=torch.float32), of(8, dtype=torch.int64)
    queries = LatentQueries(of(8, 128 * 192), half(128, fp8, 0), table, positions, 128)
    index_weights = of(8, 64, dtype=torch.float32)
    index = IndexQueryRows(of(8, 64 * 128), index_weights, table, positions, 0.1, "fp8", half_split=True)
    found = compiled_ops(arch, lambda: latent_queries(queries, index))
    (kernel,) = found["latent_queries_kernel"]
    assert kernel.asm["ptx"].count("griddepcontrol.wait") == (2 if CAPABILITIES[arch] >= (9, 0) else 0)


PROJECTED = [(step, weight, out) for step in STEPS for weight in ("fp8", "bf16") for out in ("quantised", "plain")]
PROJECTED_MAIN = [("decode", "fp8", "quantised"), ("decode", "bf16", "plain")]


@pytest.mark.parametrize(("arch", "case"), on_gpus(PROJECTED, PROJECTED_MAIN), ids=str)
def test_project_values(arch, case):
    step, fp8, quantize = case[0], case[1] == "fp8", case[2] == "quantised"
    tokens, heads = STEPS[step]
    pow2_scales = True if quantize else None
    found = compiled_ops(arch, lambda: project_values(of(tokens, 128, 512), half(heads, fp8, 1), pow2_scales))
    if step == "prefill":
        assert list(found) == ["latent_dequantize_kernel"] * fp8
        return
    (kernel,) = found["project_values_kernel"]
    assert ("e4m3" in kernel.asm["ptx"]) == ((quantize or fp8) and arch != "sm80")
    if fp8:
        assert_reads_fp8(kernel, arch)
    if arch == "sm90":
        assert kernel.asm["ptx"].index("ld.global") < kernel.asm["ptx"].index("griddepcontrol.wait")


@pytest.mark.parametrize("T", tiered([1, 8, 16, 32, 64, 128], [1]))
def test_every_tile_for_hopper(T, tmp_path):
    """Weights that wait in registers for the previous kernel are not spilled."""
    queries = LatentQueries(
        of(T, 128 * 192), half(128, True, 0), of(4096, 64, dtype=torch.float32), of(T, dtype=torch.int64), 128
    )
    latents, weight = of(T, 128, 512), half(128, True, 1)

    def call():
        absorb_queries(queries)
        project_values(latents, weight)
        project_values(latents, weight, True)

    found = compiled_ops("sm90", call)
    assert list(found) == ["absorb_queries_kernel", "project_values_kernel"]
    for kernel in itertools.chain(*found.values()):
        report = ptxas_report(kernel, tmp_path)
        assert " 0 bytes spill stores" in report, report
