"""The linear kernel for Hopper: what it supports, its configurations, and that ptxas keeps its pipeline."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import forced_row
from deepseek_attn.kernels.common.quant import InputFormat, empty_quantized_rows
from deepseek_attn.kernels.linear import Segment
from deepseek_attn.kernels.linear.launch import launch, linear_problem
from deepseek_attn.kernels.linear.plan import DECODE, HOPPER, PRODUCTS, TRITON, hopper_products, plan, tiles_at_once
from deepseek_attn.kernels.linear.problem import LinearHopperTiles, LinearWeight
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import compiled_ops, loads_behind_release, ptxas_report
from tests.kernels.linear.products import H200, ROUNDED, config_of, forced, problem
from tests.support.tiers import tiered
from tests.support.typed import required

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
AT_ONCE = next(row for row in PRODUCTS.rows if row.config is tiles_at_once)
C4A = (4096, (1024, 512), (1024, 1024, 256, 256, 64))
# name: channels, rows of FP8 weights, of plain ones, groups, whether the output is quantised as well
LAUNCHES = {
    "x of C4A": (*C4A, 1, False),
    "queries": (1024, (32768, 8192), (), 1, False),
    "wo_a": (4096, (8192,), (), 8, False),
    "wo_a, quantised": (4096, (8192,), (), 8, True),
    "wo_a, one group": (4096, (1024,), (), 1, True),
    "wo_b": (8192, (4096,), (), 1, False),
    "Pro, queries": (1536, (65536, 8192), (), 1, False),
    "odd blocks": (640, (192, 64), (128,), 1, False),
    "blocks of 32": (5120, (1280, 512), (512, 512), 1, False, None, 32),
    "blocks of 32, queries": (1280, (32768,), (), 1, False, None, 32),
}


def run(M, K, fp8_rows, plain_rows, groups, quantize_output, quantized_groups=None, group=128):
    def empty(*shape, dtype=F32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    segments = [
        Segment(empty(n, K, dtype=FP8), empty(-(-n // group), K // group), InputFormat(True, group=group))
        for n in fp8_rows
    ]
    segments += [Segment(empty(n, K, dtype=BF16), out_dtype=F32) for n in plain_rows]
    values = quantized_groups or (groups if groups > 1 else None)
    quantized = empty_quantized_rows(M, K * groups, torch.device("meta"), groups=values, group=group)
    x = empty(M, K * groups, dtype=BF16)
    wanted = linear_problem(x, segments, quantized, groups, False, quantize_output)
    of_launch = plan(wanted, H200)
    if of_launch.products[0].choice.kernel == DECODE:  # which is faster, but would not be compiled here
        with forced_row(PRODUCTS, AT_ONCE):
            of_launch = plan(wanted, H200)
    assert [product.choice.kernel for product in of_launch.products] == [HOPPER]
    launch(of_launch, x, segments, quantized, groups)


# an output is quantised from 33 tokens on; tiles between the smallest and the largest once for each kind of launch
TILINGS = [(name, M) for name, case in LAUNCHES.items() for M in (16, 128) if M > 32 or not case[4]]
TILINGS += [("x of C4A", 32), ("x of C4A", 64), ("queries", 64), ("wo_a", 32), ("wo_a, quantised", 64)]
MAIN = [("wo_a, quantised", 128), ("blocks of 32", 16)]  # FP8 output, several scales of a block


@pytest.mark.parametrize(("name", "M"), tiered(TILINGS, MAIN))
def test_compiles_without_waits_between_the_products_of_a_block(name, M, tmp_path):
    """ptxas waits for each product by itself where it cannot follow which registers are under way.

    A stage is given back when its scales are in registers: TMA overwrote them beside launches that delay loads.
    """
    (kernel,) = compiled_ops("sm90", lambda: run(M, *LAUNCHES[name]))[HOPPER]
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert "f32.e4m3.e4m3" in ptx
    assert "setmaxnreg" in ptx
    # both factors come from shared memory: a register factor could be overwritten while it is read
    dots = [line for line in kernel.asm["ttgir"].splitlines() if "ttng.warp_group_dot " in line]
    assert dots
    assert all("!ttg.memdesc" in line.rpartition(" : ")[2].split(" * ")[0] for line in dots)
    assert "serialized" not in ptxas_report(kernel, tmp_path)
    assert not loads_behind_release(kernel, tmp_path)


def test_one_group_of_a_grouped_input():
    """A rank with one of the groups: the same kernel, whether or not the input has a dimension of groups."""
    with recorded_launches(H200) as launches:
        for quantized_groups in (None, 1):
            run(40, *LAUNCHES["wo_a, one group"], quantized_groups=quantized_groups)
    assert len(launches.variants) == 1


def test_which_launches_it_takes():
    def fits(fp8=(256,), plain=(64,), x=BF16, out=BF16, weight=BF16, gpu=H200, **options):
        weights = [LinearWeight(n, FP8, out, ROUNDED) for n in fp8] + [LinearWeight(n, weight, F32) for n in plain]
        wanted = replace(problem(20, 1024), dtype=x, weights=tuple(weights), **options)
        return hopper_products(wanted, gpu)

    assert fits()
    assert fits(x=F16, weight=F16, out=F16)
    assert fits(plain=())
    assert fits(tokens=21, groups=2, plain=())
    assert fits(fp8=(64,) * 3, plain=(64,) * 5)
    assert fits(plain=(), aligned=False)
    others = [{"fp8": ()}, {"fp8": (64,) * 4}, {"plain": (64,) * 6}, {"plain": (70,)}, {"fp8": (72,)}]
    others += [{"x": F32}, {"weight": F32}, {"out": F32}, {"quantized": False}, {"groups": 4}, {"aligned": False}]
    others += [{"quantized_aligned": False}, {"gpu": GPU((10, 0), 148)}]
    assert not any(fits(**other) for other in others)


def wanted(M, K, rows, plain=0, quantizes=False):
    return problem(M, K, [rows], [plain] * bool(plain and not quantizes), quantize_output=quantizes)


@pytest.mark.parametrize("K", [128, 640, 1024, 1536, 4096, 7168, 16384])
def test_configurations(K):
    """Results of 9 to 64 tokens are summed alike, and of 65 to 128; registers and shared memory suffice."""
    for rows, plain in ((1536, 2624), (1536, 0), (40960, 0), (4096, 0), (128, 64)):
        for quantizes in (False, True):
            tokens = (*range(33 if quantizes else 9, 129), 129, 256, 4096)
            configs = {M: config_of(HOPPER, wanted(M, K, rows, plain, quantizes)) for M in tokens}
            for few in (range(tokens[0], 65), range(65, 129)):
                assert len({(required(configs[M]).splits, required(configs[M]).plain_splits) for M in few}) == 1
            for M, config in configs.items():
                assert isinstance(config, LinearHopperTiles)
                assert config.tokens >= min(M, 64) // (1 + quantizes)
                assert config.warpgroups in (1, 2)
                assert config.warpgroup_rows == 128 or not quantizes
                shared_kib = config.stages * (128 * (config.rows + config.tokens)) // 1024
                assert 2 <= shared_kib <= 216 // (1 + config.spare)


def test_configurations_of_the_layers_that_were_measured():
    """Tokens and rows of a tile, split-K: inputs of SWA, C128A, V4-Pro's C128A and C4A; outputs of both models."""

    def chosen(M, K, rows, plain=0, quantizes=False):
        config = config_of(HOPPER, wanted(M, K, rows, plain, quantizes))
        return required(config).tokens, required(config).rows, required(config).splits

    assert [chosen(M, 4096, 1536) for M in (16, 32, 64, 128)] == [(16, 64, 3), (32, 64, 3), (64, 64, 3), (64, 64, 2)]
    assert [chosen(M, 4096, 1536, 1024) for M in (32, 64, 128)] == [(32, 128, 2), (64, 128, 2), (64, 128, 2)]
    assert [chosen(M, 7168, 2048, 1024) for M in (32, 64, 128)] == [(32, 128, 2), (64, 128, 2), (64, 128, 2)]
    assert chosen(128, 4096, 1536, 2624) == (128, 128, 2)  # C4A: tiles of 64 tokens would not run at once
    assert [chosen(128, 4096, rows, 0, True) for rows in (8192, 16384)] == [(64, 128, 1), (128, 128, 1)]
    assert [chosen(128, K, rows) for K, rows in ((8192, 4096), (16384, 7168))] == [(128, 64, 2), (128, 64, 1)]


def test_tiles_without_a_whole_scale_block_write_no_fp8():
    """Rows that are timed or tested by name, too: a scale of the output is of 128 rows of one warpgroup."""
    for rows in (64, 128):
        with forced(LinearHopperTiles(128, 64, rows, 64)):
            assert [one.quantizes_output for one in plan(wanted(129, 512, 512, 0, True), H200).products] == [
                rows == 128
            ]


def test_few_rows_of_a_plain_weight_are_a_launch_of_their_own():
    """V4.1's index weights, 32 rows: all other projections of its input are for Hopper's tensor cores."""
    made = plan(problem(32, 5120, (1280, 512), (512, 512, 32)), H200).products
    assert [(one.choice.kernel, one.weights) for one in made] == [(HOPPER, (0, 1, 2, 3)), (TRITON, (4,))]
    (one,) = plan(problem(8, 5120, (1280, 512), (512, 512, 32), quantized=False), H200).products
    assert one.choice.kernel == TRITON
