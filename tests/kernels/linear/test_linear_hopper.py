"""The linear kernel for Hopper: what it supports, its configurations, and that ptxas keeps its pipeline."""

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.linear import launch_hopper as linear_hopper
from deepseek_attn.kernels.linear.launch import FP8Product, PlainProduct, Products, empty_quantized_rows
from deepseek_attn.kernels.linear.launch_config import HopperLaunchConfig, choose_hopper_config
from deepseek_attn.kernels.linear.launch_hopper import fits_hopper, launch_hopper
from deepseek_attn.runner.ahead.recording import recorded_launches
from tests.kernels.compiled_launches import pass_for_gpu, ptxas_report
from tests.kernels.linear.compiled_linear import compiled_launches
from tests.support.tiers import tiered

H200 = GPU((9, 0), 132)
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
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
}


def launch(M, K, fp8_rows, plain_rows, groups, quantize_output, quantized_groups=None):
    def empty(*shape, dtype=F32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    meta = torch.device("meta")
    fp8 = [FP8Product(empty(n, K, dtype=FP8), empty(n // 128, K // 128), empty(M, n, dtype=BF16)) for n in fp8_rows]
    plain = [PlainProduct(empty(n, K, dtype=BF16), empty(M, n)) for n in plain_rows]
    output = empty_quantized_rows(M, fp8_rows[0], meta) if quantize_output else None
    quantized = empty_quantized_rows(M, K * groups, meta, groups=quantized_groups or (groups if groups > 1 else None))
    x = empty(M, K * groups, dtype=BF16)
    launch_hopper(x, Products(fp8, plain), quantized, groups=groups, quantized_output=output)


# an output is quantised from 33 tokens on; tiles between the smallest and the largest once for each kind of launch
TILINGS = [(name, M) for name, case in LAUNCHES.items() for M in (16, 128) if M > 32 or not case[-1]]
TILINGS += [("x of C4A", 32), ("x of C4A", 64), ("queries", 64), ("wo_a", 32), ("wo_a, quantised", 64)]
MAIN = [("odd blocks", 16), ("wo_a, quantised", 128)]  # fewest and most tokens; plain weights beside FP8; FP8 output


@pytest.mark.parametrize(("name", "M"), tiered(TILINGS, MAIN))
def test_compiles_without_waits_between_the_products_of_a_block(name, M, monkeypatch, tmp_path):
    """ptxas waits for each product by itself where it cannot follow which registers are under way."""
    (kernel,) = compiled_launches(monkeypatch, (9, 0), lambda: launch(M, *LAUNCHES[name]))
    ptx = kernel.asm["ptx"]
    before, after = ptx.partition("griddepcontrol.wait")[::2]
    assert "cp.async.bulk.tensor" in before + after
    assert "f32.e4m3.e4m3" in ptx
    assert "setmaxnreg" in ptx
    # both factors come from shared memory: a register factor could be overwritten while it is read
    dots = [line for line in kernel.asm["ttgir"].splitlines() if "ttng.warp_group_dot " in line]
    assert dots
    assert all("!ttg.memdesc" in line.rpartition(" : ")[2].split(" * ")[0] for line in dots)
    assert "serialized" not in ptxas_report(kernel, tmp_path)


def test_one_group_of_a_grouped_input():
    """A rank with one of the groups: the same kernel, whether or not the input has a dimension of groups."""
    with recorded_launches(H200) as launches:
        for quantized_groups in (None, 1):
            launch(40, *LAUNCHES["wo_a, one group"], quantized_groups)
    assert len(launches.variants) == 1


def test_which_launches_it_takes(monkeypatch):
    def fits(
        M=20, K=1024, fp8=(256,), plain=(64,), x=BF16, out=BF16, weight=BF16, quantized=True, group_rows=0, offset=0
    ):
        storage = torch.empty(M * K + offset, dtype=x)
        products = Products(
            [FP8Product(torch.empty(n, K, dtype=FP8), torch.empty(1), torch.empty(M, n, dtype=out)) for n in fp8],
            [PlainProduct(torch.empty(n, K, dtype=weight), torch.empty(M, n)) for n in plain],
        )
        rows = empty_quantized_rows(M, K, torch.device("cpu")) if quantized else None
        return fits_hopper(storage[offset:].view(M, K), products, rows, group_rows)

    pass_for_gpu(monkeypatch, (9, 0), linear_hopper)
    assert fits()
    assert fits(x=F16, weight=F16, out=F16)
    assert fits(plain=())
    assert fits(M=21, group_rows=128, plain=())
    assert fits(fp8=(64,) * 3, plain=(64,) * 5)
    others = [
        {"M": 8},
        {"fp8": ()},
        {"fp8": (64,) * 4},
        {"plain": (64,) * 6},
        {"plain": (70,)},
        {"fp8": (72,)},
    ]
    others += [{"x": F32}, {"weight": F32}, {"out": F32}, {"quantized": False}, {"group_rows": 64}, {"offset": 1}]
    assert not any(fits(**other) for other in others)
    pass_for_gpu(monkeypatch, (10, 0), linear_hopper)
    assert not fits()


@pytest.mark.parametrize("K", [128, 640, 1024, 1536, 4096, 7168, 16384])
def test_configurations(K):
    """Results of 9 to 64 tokens are summed alike, and of 65 to 128; registers and shared memory suffice."""
    for rows, plain in ((1536, 2624), (1536, 0), (40960, 0), (4096, 0), (64, 64)):
        for quantizes in (False, True):
            tokens = (*range(33 if quantizes else 9, 129), 129, 256, 4096)
            configs = {M: choose_hopper_config(M, K, rows, plain, 132, quantizes) for M in tokens}
            for few in (range(tokens[0], 65), range(65, 129)):
                assert len({(configs[M].splits, configs[M].plain_splits) for M in few}) == 1
            for M, config in configs.items():
                assert isinstance(config, HopperLaunchConfig)
                assert config.tokens >= min(M, 64) // (1 + quantizes)
                assert config.warpgroups in (1, 2)
                assert config.warpgroup_rows == 128 or not quantizes
                shared_kib = config.stages * (128 * (config.rows + config.tokens)) // 1024
                assert 2 <= shared_kib <= 216 // (1 + config.spare)


def test_configurations_of_the_layers_that_were_measured():
    """Tokens and rows of a tile, split-K: inputs of SWA, C128A, V4-Pro's C128A and C4A; outputs of both models."""

    def chosen(M, K, rows, plain=0, quantizes=False):
        config = choose_hopper_config(M, K, rows, plain, 132, quantizes)
        return config.tokens, config.rows, config.splits

    assert [chosen(M, 4096, 1536) for M in (16, 32, 64, 128)] == [(16, 64, 3), (32, 64, 3), (64, 64, 3), (64, 64, 2)]
    assert [chosen(M, 4096, 1536, 1024) for M in (32, 64, 128)] == [(32, 128, 2), (64, 128, 2), (64, 128, 2)]
    assert [chosen(M, 7168, 2048, 1024) for M in (32, 64, 128)] == [(32, 128, 2), (64, 128, 2), (64, 128, 2)]
    assert chosen(128, 4096, 1536, 2624) == (128, 128, 2)  # C4A: tiles of 64 tokens would not run at once
    assert [chosen(128, 4096, rows, 0, True) for rows in (8192, 16384)] == [(64, 128, 1), (128, 128, 1)]
    assert [chosen(128, K, rows) for K, rows in ((8192, 4096), (16384, 7168))] == [(128, 64, 2), (128, 128, 2)]
