"""The kernels of index scores compile for every GPU generation, on any machine; which of them runs."""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.cache.records import make_index_record
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.indexer import IndexQueries, PagedIndexKeys
from deepseek_attn.kernels.indexer.launch import paged_index_scores
from deepseek_attn.kernels.indexer.plan import SCORES, ScoresConfig, ScoresProblem
from tests.kernels.compiled_launches import compiled_ops, on_gpus, ptxas_report
from tests.support.tiers import tiered

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing")
SCORED = [(T, fmt) for T in (4096, 1) for fmt in ("plain", "fp8", "fp4")]
HOPPER = GPU((9, 0), 132)


def of(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def score(fmt, T, page=64, score_dtype=torch.float32):
    """Scores of ``T`` queries of one request with 32,768 keys."""
    record = make_index_record(fmt, 128, torch.bfloat16)
    q = of(T, 64, 128, dtype=torch.bfloat16 if fmt == "plain" else torch.float8_e4m3fn)
    pool = of(9, -(-record.page_bytes(page) // 16) * 16, dtype=torch.uint8)
    keys = PagedIndexKeys(record, pool, page, of(1, 32768 // page), of(T))
    paged_index_scores(IndexQueries(q, of(T, 64, dtype=torch.float32), score_dtype), keys, of(T, dtype=torch.int64))


def compiled(arch, kernel, call):
    """The kernel that ``call`` launches; ``index_scores_kernel`` in the configuration of its own rows."""
    (found,) = compiled_ops(arch, call)[kernel]
    return found


@pytest.mark.parametrize(("arch", "scored"), on_gpus(SCORED, [(4096, "fp8")]), ids=str)
def test_compiles(arch, scored):
    T, fmt = scored
    keys = 128 if arch == "sm90" else 64
    row = Row(ANY, "index_scores_kernel", ScoresConfig(min(T, 4), keys, 3, 2))
    dtype = torch.bfloat16 if fmt == "fp4" and T == 1 else torch.float32
    with forced_row(SCORES, row):
        ptx = compiled(arch, "index_scores_kernel", lambda: score(fmt, T, score_dtype=dtype)).asm["ptx"]
    assert ("e4m3" in ptx) == (arch != "sm80" and fmt != "plain") or arch.startswith("sm10")


@pytest.mark.parametrize("page", tiered([64, 32, 2], [64]))
def test_the_hopper_kernel_compiles(page, tmp_path):
    kernel = compiled("sm90", "index_scores_hopper_kernel", lambda: score("fp8", 4096, page))
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # 16 bytes at a time
    assert "wgmma" in kernel.asm["ptx"]
    assert "serialized" not in ptxas_report(kernel, tmp_path)


@pytest.mark.parametrize(("page", "tokens"), tiered([(64, 1), (64, 2), (64, 4), (32, 2), (2, 1), (128, 4)], [(64, 1)]))
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_the_hopper_kernel_for_decode_steps_compiles(fmt, page, tokens, tmp_path):
    row = Row(ANY, "index_scores_decode_hopper_kernel", ScoresConfig(tokens, 64, 2, 3))
    with forced_row(SCORES, row):
        kernel = compiled("sm90", row.kernel, lambda: score(fmt, 9, page))
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    assert "wgmma" in kernel.asm["ptx"]
    report = ptxas_report(kernel, tmp_path)
    assert "serialized" not in report
    assert " 0 bytes spill stores" in report


def chosen(gpu=HOPPER, key_format="fp8", T=4096, B=1, width=2048, H=64, dim=128, **flags):
    return SCORES.plan(ScoresProblem(T, B, width, H, dim, key_format, **flags), gpu)


def test_which_scores_eight_tokens_at_a_time():
    kernel = "index_scores_hopper_kernel"
    assert chosen().kernel == chosen(T=64, width=262144, B=8).kernel == kernel
    others = [{"key_format": "fp4"}, {"H": 32}, {"dim": 64}, {"B": 513}, {"T": 64}, {"aligned": False}]
    others += [{"gpu": GPU((10, 0), 132)}, {"gpu": GPU((8, 9), 132)}, {"batch_invariant": True}, {"rounded": True}]
    assert all(chosen(**other).kernel != kernel for other in others)
    shapes = ((4096, 32768), (512, 32768), (64, 262144), (4096, 2048))
    assert [chosen(T=T, width=W).config.splits for T, W in shapes] == [1, 2, 16, 1]


def test_which_scores_of_decode_steps_are_computed_on_tensor_cores():
    kernel, decode = "index_scores_decode_hopper_kernel", dict[str, Any](T=9, B=8, width=32768)
    assert chosen(**decode).kernel == chosen(key_format="fp4", T=9, width=64).kernel == kernel
    assert chosen(T=8, B=8, width=8192).kernel == chosen(T=64, B=64, width=4096).kernel == kernel
    others = [{"key_format": "plain"}, {"H": 32}, {"dim": 64}, {"B": 1}, {"width": 8128}, {"aligned": False}]
    others += [{"gpu": GPU((10, 0), 132)}, {"batch_invariant": True}, {"rounded": True}]
    assert all(chosen(**decode | other).kernel == "index_scores_kernel" for other in others)
    # tokens of a program, and splits of at least four tiles that fill all multiprocessors
    shapes = ((128, 128, 32768, "fp8"), (8, 8, 262144, "fp8"), (24, 8, 4096, "fp4"))
    configs = [chosen(T=T, B=B, width=width, key_format=fmt).config for T, B, width, fmt in shapes]
    assert [(config.tokens, config.splits) for config in configs] == [(1, 6), (1, 99), (4, 16)]
