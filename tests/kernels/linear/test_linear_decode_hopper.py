"""The linear kernel of decode steps on Hopper: what it supports, its configurations, and what it compiles to."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.linear import Segment
from deepseek_attn.kernels.linear.launch import empty_quantized, grouped_linear, multi_linear
from deepseek_attn.kernels.linear.plan import DECODE, plan
from deepseek_attn.kernels.linear.problem import LinearDecodeTiles, LinearWeight
from tests.kernels.compiled_launches import compiled_ops, ptxas_report
from tests.kernels.linear.products import H200, ROUNDED, config_of, forced, problem
from tests.support.tiers import tiered
from tests.support.typed import required

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# name: channels, rows of the weights, heads and groups of a grouped one
WEIGHTS = {
    "queries": (1024, (32768,), None),
    "queries and the indexer's": (1024, (32768, 8192), None),
    "wo_a": (4096, (8192,), (64, 8)),
    "wo_b": (8192, (4096,), None),
    "half of the queries and the indexer's": (1024, (16384, 8192), None),
    "half of wo_a": (4096, (4096,), (32, 4)),
    "half of wo_b": (4096, (4096,), None),
    "Pro, queries": (1536, (65536, 8192), None),
    "Pro, wo_a": (4096, (16384,), (128, 16)),
}
CASES = [(name, M) for name in WEIGHTS for M in (5, 16) if M == 5 or not (name == "wo_b" or "half" in name)]
MAIN = [("queries", 16), ("wo_a", 5), ("half of wo_a", 5)]


def empty(*shape, dtype=F32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(M, K, rows, heads):
    """As attention layers do: queries quantised before, heads rotated, wo_b quantising what it reads."""
    if heads is not None:
        o, scale = empty(M, heads[0], 512, dtype=BF16), empty(rows[0] // 128, K // 128)
        weight, positions = empty(*rows, K, dtype=FP8), empty(M, dtype=torch.int64)
        grouped_linear(o, Segment(weight, scale, ROUNDED), heads[1], positions, empty(99, 64))
        return
    x = empty(M, K, dtype=BF16)
    segments = [Segment(empty(n, K, dtype=FP8), empty(n // 128, K // 128), ROUNDED) for n in rows]
    multi_linear(x, segments, empty_quantized(x, segments) if K < 4096 else None)


@pytest.mark.parametrize(("name", "M"), tiered(CASES, MAIN))
def test_compiles_without_waits_between_products(name, M, tmp_path):
    """Products of a batch of blocks are under way together, and weights wait for no kernel."""
    (kernel,) = compiled_ops("sm90", lambda: launch(M, *WEIGHTS[name]))[DECODE]
    ptx = kernel.asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == 1  # of the warpgroup that multiplies
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx
    assert f"n{8 if M <= 8 else 16}k32.f32.e4m3.e4m3" in ptx
    report = ptxas_report(kernel, tmp_path)
    assert "serialized" not in report
    assert "0 bytes spill stores" in report


def test_which_launches_it_takes():
    def config(M=8, K=1024, rows=(32768,), x=BF16, out=BF16, aligned=True, gpu=H200, **options):
        weights = tuple(LinearWeight(n, FP8, out, ROUNDED, aligned) for n in rows)
        (launch,) = plan(replace(problem(M, K), dtype=x, weights=weights, **options), gpu).products
        return launch.choice.config if launch.choice.kernel == DECODE else None

    assert config() == config(M=1) == config_of(DECODE, problem(8, 1024, [32768]))
    assert all([config(x=F16, out=F16), config(rows=(32768, 64, 64)), config(K=4096, rows=(8192,), groups=8)])
    assert config(M=16) == config_of(DECODE, problem(9, 1024, [32768]))
    others = [
        {"M": 17},
        {"M": 9, "K": 8192, "rows": (4096,)},
        {"K": 16384, "rows": (7168,)},
        {"rows": (16320,)},
        {"M": 9, "rows": (32640,)},
        {"K": 4096, "rows": (2048, 2048)},  # V4-Flash's shared expert
        {"K": 1536, "rows": (20480,)},
        {"rows": (32768, 64, 64, 64)},
        {"rows": (32768, 72)},
    ]
    others += [{"x": F32}, {"out": F32}, {"groups": 512}, {"aligned": False}, {"gpu": GPU((10, 0), 132)}]
    assert not any(config(**other) for other in others)
    # jobs of 16 blocks, and of 28 as the shared expert of V4-Pro would have
    assert config(K=8192, rows=(4096,), quantized=False)
    assert not config(K=7168, rows=(3072, 3072), quantized=False)


@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_configurations(multiprocessors):
    """Every multiprocessor has a job, stages divide jobs, and the ring fits beside the input."""
    for M, K in product((1, 8, 9, 16), (128, 640, 1024, 1536, 2176, 4096, 7168, 8192, 16384)):
        for rows in (64, 4096, 8192, 16384, 32768, 40960, 65536, 73728, 1 << 20):
            config = config_of(DECODE, problem(M, K, [rows]), GPU((9, 0), multiprocessors))
            if config is None:
                continue
            assert rows * K >= 1 << (24 if M <= 8 and K in (128, 640, 1024, 4096) else 25)
            assert config.tokens >= M
            blocks = -(-K // 128 // config.splits)
            assert blocks % config.stage_blocks == 0
            assert config.rows * config.stage_blocks == 128
            assert config.stages >= 2 * config.stages_at_once
            stages, inputs = config.stages << 14, (1 << (blocks - 1).bit_length()) * config.tokens * (128 + 4)
            assert stages + inputs + 4096 <= 227 << 10
            jobs = -(-rows // config.rows) * config.splits
            assert jobs >= 0.8 * multiprocessors or config.splits * 4 > blocks
    for M, K, rows in ((8, 8192, 4096), (16, 4096, 8192)):
        assert config_of(DECODE, problem(M, K, [rows]), GPU((9, 0), multiprocessors))


@pytest.mark.parametrize(("M", "K", "rows", "stages"), [
    (1, 1536, 65536, 12), (8, 1536, 65536, 12), (9, 1536, 65536, 5), (8, 1024, 32768, 5),
])  # fmt: skip
def test_who_takes_all_of_the_shared_memory(M, K, rows, stages):
    """Jobs of 64 MiB or more, of up to 8 tokens: V4-Pro's queries."""
    assert required(config_of(DECODE, problem(M, K, [rows]), H200)).stages == stages


def test_stages_that_do_not_divide_a_job():
    with (
        forced(LinearDecodeTiles(64, stage_blocks=2)),
        pytest.raises(ValueError, match="stages of 2 blocks do not divide 5 blocks in 1 splits"),
    ):
        plan(problem(2, 640, [128]), H200)
