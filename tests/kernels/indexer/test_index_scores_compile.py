"""The kernels of index scores compile for every GPU generation, on any machine; which of them runs."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deepseek_attn.kernels.indexer.scores import (
    choose_config,
    few_hopper_tiling,
    fits_few_hopper,
    fits_hopper,
    hopper_splits,
)
from deepseek_attn.kernels.indexer.scores_few_hopper import index_scores_few_hopper_kernel
from deepseek_attn.kernels.indexer.scores_hopper import index_scores_hopper_kernel
from deepseek_attn.kernels.indexer.scores_triton import index_scores_kernel
from tests.kernels.compiled_launches import CAPABILITIES, SHARED, on_gpus, ptxas_report, target_of
from tests.support.tiers import tiered

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")
FORMATS = ("plain", "fp8", "fp4")
SCORES = [(T, fmt) for T in (4096, 1) for fmt in FORMATS]


@pytest.mark.parametrize(("arch", "scores"), on_gpus(SCORES, [(4096, "fp8")]), ids=str)
def test_compiles(arch, scores):
    kernel = index_scores_kernel
    (T, fmt), native, names = scores, arch != "sm80", kernel.arg_names
    config = choose_config(T, 1, 32768, False, CAPABILITIES[arch], 132)
    constants = {
        "H": 64,
        "DIM": 128,
        "PAGE": 64,
        "KEY_FORMAT": fmt,
        "NATIVE_FP8": native,
        "PRECISION": None,
        "SCORE_DTYPE": tl.bfloat16 if fmt == "fp4" and T == 1 else tl.float32,
    }
    constants["DTYPE"] = tl.bfloat16 if fmt == "plain" else tl.float8e4nv if native else tl.float16
    constants |= {"TOKENS": config.tokens, "BLOCK_T": config.tokens, "BLOCK_H": 64, "BLOCK_D": 128}
    constants |= {"BLOCK_N": config.keys, "STAGES": config.num_stages, "PDL": CAPABILITIES[arch] >= (9, 0)}
    q = "*bf16" if fmt == "plain" else "*fp8e4nv" if native else "*u8"
    kinds = {
        "q_ptr": q,
        "pool_ptr": "*u8" if fmt == "fp4" else q,
        "weights_ptr": "*fp32",
        "out_ptr": "*fp32",
    }
    kinds |= {"block_table_ptr": "*i32", "token_to_req_ptr": "*i32", "num_visible_ptr": "*i64"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "ptr" in name or "stride" in name}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": 4, "num_stages": config.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target_of(arch), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED[arch] * 1024
    assert ("e4m3" in compiled.asm["ptx"]) == (native and fmt != "plain") or arch == "sm100"


@pytest.mark.parametrize("page", tiered([64, 32, 2], [64]))
def test_the_hopper_kernel_compiles(page, tmp_path):
    kernel = compiled_for_hopper(index_scores_hopper_kernel, "*fp8e4nv", {"PAGE": page})
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # 16 bytes at a time
    assert "serialized" not in ptxas_report(kernel, tmp_path)


@pytest.mark.parametrize(("page", "tokens"), tiered([(64, 1), (64, 2), (64, 4), (32, 2), (2, 1), (128, 4)], [(64, 1)]))
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_the_hopper_kernel_for_few_tokens_compiles(fmt, page, tokens, tmp_path):
    constants = {"PAGE": page, "TOKENS": tokens, "FP4": fmt == "fp4"}
    kernel = compiled_for_hopper(index_scores_few_hopper_kernel, "*u8" if fmt == "fp4" else "*fp8e4nv", constants)
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    report = ptxas_report(kernel, tmp_path)
    assert "serialized" not in report
    assert " 0 bytes spill stores" in report


def compiled_for_hopper(kernel, pool, constants):
    names = kernel.arg_names
    kinds = {"q_ptr": "*fp8e4nv", "pool_ptr": pool, "block_table_ptr": "*i32", "token_to_req_ptr": "*i32"}
    kinds |= {"num_visible_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": "*fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "ptr" in name or "stride" in name}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places, aligned)
    compiled = triton.compile(source, target=target_of("sm90"), options={"num_warps": 4, "enable_fp_fusion": True})
    assert compiled.metadata.shared <= SHARED["sm90"] * 1024
    assert "wgmma" in compiled.asm["ptx"]
    return compiled


def test_what_the_hopper_kernel_takes():
    def fits(key_format="fp8", T=4096, H=64, dim=128, B=1, width=2048, capability=(9, 0), page=8448):
        q = torch.empty(T, H, dim, dtype=torch.float8_e4m3fn)
        return fits_hopper(key_format, q, torch.empty(3, page, dtype=torch.uint8), B, width, capability, 132)

    assert fits()
    assert fits(T=64, width=262144, B=8)
    others = [
        {"key_format": "fp4"},
        {"H": 32},
        {"dim": 64},
        {"B": 513},
        {"capability": (10, 0)},
        {"capability": (8, 9)},
    ]
    others += [{"T": 64}, {"page": 8452}]
    assert not any(fits(**other) for other in others)
    assert [hopper_splits(T, W, 132) for T, W in ((4096, 32768), (512, 32768), (64, 262144), (4096, 2048))] == [
        1,
        2,
        16,
        1,
    ]


def test_what_the_hopper_kernel_for_few_tokens_takes():
    def fits(key_format="fp8", H=64, dim=128, B=8, width=32768, capability=(9, 0), page=8448, offset=0):
        q = torch.empty(9, H, dim, dtype=torch.float8_e4m3fn)
        pool = torch.empty(3, page, dtype=torch.uint8)[:, offset:]
        return fits_few_hopper(key_format, q, pool, B, width, capability)

    assert fits()
    assert fits("fp4", B=1, width=64, page=4352)
    others = [{"key_format": "plain"}, {"H": 32}, {"dim": 64}, {"B": 7}, {"width": 16384}, {"capability": (10, 0)}]
    others += [{"page": 8452}, {"offset": 4}]
    assert not any(fits(**other) for other in others)
    # tokens of a program, and splits of at least four tiles that fill all multiprocessors
    assert few_hopper_tiling(128, 128, 32768, 132, False) == (1, 6)
    assert few_hopper_tiling(8, 8, 262144, 132, False) == (1, 99)
    assert few_hopper_tiling(24, 8, 4096, 132, True) == (4, 16)
