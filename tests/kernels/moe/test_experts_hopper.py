"""Routed experts on Hopper's FP8 tensor cores: FP4 in FP8, which arguments fit, what compiles, and on a GPU results."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from deepseek_attn.kernels.common.device import GPU, gpu as gpu_of
from deepseek_attn.kernels.common.plans import ANY, Row, forced_row
from deepseek_attn.kernels.common.quant import E2M1, ROW_SPAN, InputFormat
from deepseek_attn.kernels.moe import plan, reference
from deepseek_attn.kernels.moe.types import ExpertsCall, ExpertStack
from tests.kernels.moe.moe_cases import Case, make_case
from tests.support.tiers import tiered

pytest.importorskip("triton", reason="the package triton is not installed")

from triton import cdiv

from deepseek_attn.kernels.common import fp4_hopper
from deepseek_attn.kernels.moe import experts_hopper, experts_hopper_weights, launch as moe, launch_hopper
from deepseek_attn.kernels.moe.plan import HOPPER, PRODUCTS
from deepseek_attn.kernels.moe.problem import ExpertsProblem, HopperExpertTiles
from tests.kernels.compiled_launches import compiled_ops, ptxas_report
from tests.support.typed import required

BF16, F32 = torch.bfloat16, torch.float32
FP8_INPUT = InputFormat(fp8=True)
H200 = GPU((9, 0), 132)
MASK = 0xFFFFFFFF


# --- FP4 in FP8 ---


def run_ptx(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the instructions of ``text``, of which `_TO_FP8` has a few kinds."""
    registers = dict(inputs)
    value = lambda name: registers[name] if name in registers else int(name, 0)  # noqa: E731
    for line in re.findall(r"^\s*(\w+)\.b32 (.*);$|^\s*(\w+)\.u32 (.*);$", text, re.M):
        operation, operands = (line[0] or line[2]), (line[1] or line[3]).split(", ")
        to, values = operands[0], [value(name) for name in operands[1:]]
        if operation == "and":
            result = values[0] & values[1]
        elif operation == "shl":
            result = values[0] << values[1]
        elif operation == "shr":
            result = values[0] >> values[1]
        elif operation == "prmt":
            picks = [values[2] >> 4 * i & 15 for i in range(4)]
            assert max(picks) < 8  # of larger ones, only the sign of the byte is copied
            bytes_ = values[0].to_bytes(4, "little") + values[1].to_bytes(4, "little")
            result = int.from_bytes([bytes_[pick] for pick in picks], "little")
        else:
            assert (operation, values[3]) == ("lop3", 0xF8)
            result = values[0] | values[1] & values[2]
        registers[to] = result & MASK
    return registers


def test_fp4_is_exact_in_fp8():
    """Every pair of codes in every place, under every power of two that a row may have, both ends included."""
    text = fp4_hopper._TO_FP8.value.replace("        .reg", "//")
    low, high = fp4_hopper.LOW.value, fp4_hopper.HIGH.value
    low_step, high_step = fp4_hopper.LOW_STEP.value, fp4_hopper.HIGH_STEP.value
    values = torch.tensor(E2M1, dtype=torch.float64)
    for power in range(experts_hopper.TOP.value - ROW_SPAN, experts_hopper.TOP.value + 1):
        # prmt ignores what is above its 16 bits
        table = {"$3": low + power * low_step & MASK, "$4": high + power * high_step & MASK}
        for first in range(16):
            for second in range(16):
                codes = [first, second] * 4
                word = sum(code << 4 * i for i, code in enumerate(codes))
                found = run_ptx(text, {"$2": word} | table)
                got = torch.tensor([*found["$0"].to_bytes(4, "little"), *found["$1"].to_bytes(4, "little")])
                got = got.to(torch.uint8).view(torch.float8_e4m3fn).double()
                assert torch.equal(got, values[codes] * 2.0**power)
                assert torch.equal(got.signbit(), values[codes].signbit())


def test_scales_of_a_group_in_four_blocks():
    """Byte n of four words in one word, the first lowest."""
    text = experts_hopper_weights._PICK.value.replace("    .reg", "//")
    words = {f"${i}": sum((16 * i + byte) << 8 * byte for byte in range(4)) for i in range(1, 5)}
    for group in range(4):
        found = run_ptx(text, words | {"$5": group | group + 4 << 4})["$0"]
        assert list(found.to_bytes(4, "little")) == [16 * i + group for i in range(1, 5)]


# --- what is launched ---


def call_of(case: Case, input_format=FP8_INPUT):
    return ExpertsCall(*case, 4.0, False, input_format)


def problem_of(case, input_format=FP8_INPUT):
    return ExpertsProblem.of(call_of(case, input_format))


def taking(config):
    """A context in which the products take ``config`` of `experts_hopper_kernel`."""
    return forced_row(PRODUCTS, Row(ANY, HOPPER, config))


def fits(
    gpu=H200, T=100, D=1024, inner=512, fmt="fp4", dtype=BF16, exponents=True, fp8=True, group=128, unaligned=None
):
    case = make_case(T, D, inner, 4, 2, fmt, dtype, "cpu")
    w2 = case.w2 if exponents else case.w2._replace(exponent=None)
    if unaligned:
        part = getattr(w2, unaligned)
        w2 = w2._replace(**{unaligned: part.new_empty(part.numel() + 1)[1:].view(part.shape)})
    return PRODUCTS.kernels[HOPPER](problem_of(case._replace(w2=w2), InputFormat(fp8, True, group)), gpu)


def test_which_experts_it_takes():
    assert fits()
    assert fits(fmt="fp8")
    assert fits(dtype=torch.float16)
    assert fits(fmt="fp8", unaligned="scale")  # read by threads
    assert fits(inner=768)  # V4.1's 2304 ends with half a quad of blocks, too
    others = [
        {"D": 768},
        {"inner": 384},
        {"inner": 256},
        {"inner": 768, "fmt": "fp8"},
        {"fmt": "plain"},
        {"dtype": F32},
    ]
    others += [
        {"exponents": False},
        {"fp8": False},
        {"unaligned": "weight"},
        {"unaligned": "scale"},
        {"group": 32},
        {"gpu": GPU((10, 0), 132)},
    ]
    assert not any(fits(**other) for other in others)


TILES = list(dict.fromkeys(row.config for row in PRODUCTS.rows if row.kernel == HOPPER))


def test_tiles_are_possible():
    for tiles in TILES:
        assert all(size % tiles.sizes[0] == 0 for size in tiles.sizes)
        assert list(tiles.sizes) == sorted(tiles.sizes)
        assert tiles.sizes[0] % 8 == 0
        rests = {size % tiles.part for size in tiles.sizes}
        assert all(rest & (rest - 1) == 0 for rest in rests)  # shapes of products are powers of two
        assert tiles.programs <= 3
        assert tiles.warpgroups < 3 or tiles.programs == 1
        assert tiles.channels == 128 or tiles.part == tiles.sizes[-1]


def launches(fmt, config, tokens=100, hidden=1024, inner=512):
    case = make_case(tokens, hidden, inner, 32, 6, fmt, BF16, "meta")
    with taking(config):
        return compiled_ops("sm90", lambda: moe.moe_experts(ExpertsCall(*case, 10.0, fmt == "fp8", FP8_INPUT)))


def name_of(config):
    """Rows of its largest tile by weight rows of a job."""
    return f"{config.sizes[-1]}x{64 * config.warpgroups}"


CONFIGS = {name_of(config): config for config in TILES}
LARGEST = name_of(TILES[-1])
# of FP8 weights only the largest tiles are launched; on a GPU all are, the smallest with half the channels of a stage
COMPILED = [*(("fp4", name, 512) for name in CONFIGS), *(("fp4", name, 768) for name in CONFIGS)]
COMPILED += [("fp8", LARGEST, 512), ("fp8", "8x128", 512)]


@pytest.mark.parametrize(("fmt", "name", "inner"), tiered(COMPILED, [("fp4", "8x128", 512), ("fp4", "8x128", 768)]))
def test_it_compiles(tmp_path, fmt, name, inner):
    """`compiled_ops` compares shared memory with the GPU's. Sizes between the first and the last once."""
    config = CONFIGS[name]
    if (fmt, name, inner) != ("fp4", LARGEST, 512):
        config = replace(config, sizes=tuple(sorted({config.sizes[0], config.sizes[-1]})))
    found = launches(fmt, config, inner=inner)
    assert len(found["experts_hopper_kernel"]) == 2
    for kernel in found["experts_hopper_kernel"]:
        assert "f32.e4m3.e4m3" in kernel.asm["ptx"]
        assert "setmaxnreg" in kernel.asm["ptx"]
        assert kernel.metadata.shared * config.programs <= 220 << 10  # of 228 KiB: 1 KiB is taken per program
        report = ptxas_report(kernel, tmp_path)
        assert "serialized" not in report
        spilled = [int(size) for size in re.findall(r"(\d+) bytes spill stores", report)]
        assert max(spilled) <= 256  # a few addresses; sums would take thousands


def test_loads_begin_at_multiples_of_16_bytes():
    """Also within a row: elsewhere TMA raises an illegal instruction. Odd rows have their scales from byte 24 on."""
    _, second = launches("fp4", CONFIGS["8x128"], inner=768)["experts_hopper_kernel"]
    ptx = second.asm["ptx"]
    columns = set(re.findall(r"cp\.async\.bulk\.tensor\.2d.*, \{(%r\d+), %r\d+\}\], \[", ptx))
    moved = re.findall(r"mov\.b32 \t(%r\d+), (\d+);", ptx)
    added = [(to, by) for to, of, by in re.findall(r"add\.s32 \t(%r\d+), (%r\d+), (\d+);", ptx) if to != of]
    offsets = {int(by) for to, by in moved + added if to in columns}
    assert offsets >= {16, 32}
    assert all(offset % 16 == 0 for offset in offsets)


@pytest.mark.parametrize(
    ("tokens", "grouping"), [(10, ["prepare_decode_rows_kernel"]), (100, ["place_rows_kernel", "prepare_rows_kernel"])]
)
def test_launches_beside_the_products(tokens, grouping):
    made = plan.plan_experts(problem_of(make_case(tokens, 1024, 512, 32, 6, "fp4", BF16, "meta")), H200)
    assert [choice.kernel for choice in (made.grouping, made.inputs) if choice] == grouping
    assert (made.product.kernel, required(made.hidden).kernel) == (HOPPER, "prepare_rows_kernel")
    assert (tokens == 10) == made.hopper[0].tiling.WAIT
    assert not made.hopper[1].tiling.WAIT


def test_stages_of_rows_that_end_with_half_a_quad():
    """A stage's next use is behind the last use of the scales that its quad overwrites: of the quad two before it."""
    for tiles in TILES:
        problem, blocks = problem_of(make_case(10, 1024, 2304, 8, 6, "fp4", BF16, "meta")), tiles.channels // 128
        first, second = (plan.hopper_product(problem, tiles, gated, True, H200).tiling for gated in (True, False))
        assert (first.HALF_QUAD, second.HALF_QUAD) == (False, True)
        assert first.STAGES * blocks <= 8
        assert second.STAGES * blocks <= 6


@pytest.mark.parametrize("beside", [(False, False), (True, False), (True, True)])
def test_products_wait_for_weights_that_are_copied(beside):
    """Also where an event orders them: an edge of a graph lets a launch begin before the one that it follows ends."""
    problem = problem_of(make_case(10, 1024, 512, 32, 6, "fp4", BF16, "meta"))
    first, second = beside
    copied = replace(problem, in_rows=True, first_beside_copies=first, second_beside_copies=second)
    made = plan.plan_experts(copied, H200)
    assert all(product.tiling.WAIT for product in made.hopper)
    rest = [H200.multiprocessors * made.product.config.programs - product.programs for product in made.hopper]
    assert rest == [plan.LEFT_TO_COPIES * first, plan.LEFT_TO_COPIES * second]


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


@pytest.mark.parametrize("tokens", [1, 10, 21, 200, 1500])
def test_rows_of_pairs(gpu, tokens):
    """Each expert has rows of its own from a multiple of 16 on, in order of pairs, in tiles of equal size."""
    case = make_case(tokens, 512, 512, 9, 6, "fp4")
    case.experts[tokens // 2] = -1
    case.experts[: tokens // 3, 0] = 4
    with taking(HopperExpertTiles((16, 32, 64), 64)):
        made = plan.plan_experts(problem_of(case), gpu_of(case.x.device))
    rows, quantized = launch_hopper.route_rows(made, call_of(case))
    tiles = rows.tiles[:, : int(rows.num_tiles)].T.tolist()
    chosen, start, expected = case.experts.flatten(), 0, []
    for expert in range(9):
        mine = (chosen == expert).nonzero().flatten()
        place = slice(start, start + len(mine))
        assert torch.equal(rows.pair[place], mine.int())
        assert torch.equal(rows.row[mine], torch.arange(place.start, place.stop).int())
        assert torch.equal(rows.weight[place], case.weights.flatten()[mine])
        values = quantized.values[place].float().unflatten(1, (4, 8, 4, 4)).transpose(2, 3).flatten(1)
        dense = values.unflatten(1, (4, 128)) * quantized.scale[place][:, :, None].float()
        if len(mine):
            assert relative(dense.flatten(1), case.x[mine // 6]) <= 0.04
            size = cdiv(cdiv(len(mine), cdiv(len(mine), 64)), 16) * 16
            expected += [[expert, start + i, min(size, len(mine) - i)] for i in range(0, len(mine), size)]
        start += cdiv(len(mine), 16) * 16
    assert tiles == expected


# Tensor cores keep about 14 bits of a sum of FP8 products, which moves a few intermediate results over the boundary
# between two e4m3 values, 1/16 to 1/8 apart: an error of 4e-3 to 6e-3 of the norm was measured, with any tiling.
LIMIT = 1e-2


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("fmt", "inner"), [("fp4", 512), ("fp8", 512), ("fp4", 768)])
def test_any_routing(gpu, fmt, inner, config):
    """Every size of tile; experts with many rows and with none; pairs of other ranks; a token by itself."""
    case = make_case(300, 1024, inner, 12, 3, fmt)
    case.experts[:, 0] = torch.where(torch.arange(300) < 200, 3, case.experts[:, 0])
    case.experts[7] = -1
    case.experts[9, 1] = -1
    case.experts[case.experts == 5] = 6
    weigh = fmt == "fp8"
    expected = reference.moe_experts(ExpertsCall(*case, 4.0, weigh, FP8_INPUT))
    with taking(config):
        together = moe.moe_experts(ExpertsCall(*case, 4.0, weigh, FP8_INPUT))
    assert relative(together, expected) <= LIMIT
    assert not together[7].any()
    for part in (slice(1), slice(3), slice(5, 22), slice(20, 117), slice(299, 300)):
        with taking(config):
            assert torch.equal(moe.moe_experts(ExpertsCall(*case.of(part), 4.0, weigh, FP8_INPUT)), together[part])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("fmt", "inner"), [("fp4", 2048), ("fp8", 2048), ("fp4", 2304)])
def test_the_same_bits_and_a_nan_in_one_token(gpu, fmt, inner, config):
    """Thousands of jobs: a stage that is overwritten too early shows in few of them."""
    case = make_case(400, 4096, inner, 6, 3, fmt)
    with taking(config):
        first = moe.moe_experts(ExpertsCall(*case, 4.0, False, FP8_INPUT))
        assert all(torch.equal(moe.moe_experts(ExpertsCall(*case, 4.0, False, FP8_INPUT)), first) for _ in range(50))
        case.x[5, 17] = float("nan")
        out, kept = moe.moe_experts(ExpertsCall(*case, 4.0, False, FP8_INPUT)), torch.arange(400) != 5
    assert out[5].isnan().all()
    assert torch.equal(out[kept], first[kept])


def test_scales_far_apart_take_another_kernel(gpu):
    case = make_case(250, 1024, 512, 12, 3, "fp4")
    scale = required(case.w1.scale).clone()
    scale[:, :, 3] = 104
    case = case._replace(w1=ExpertStack(case.w1.weight, scale))
    assert PRODUCTS.choose(problem_of(case), gpu_of(case.x.device)).kernel != HOPPER
    got, expected = (op(ExpertsCall(*case, 4.0, False, FP8_INPUT)) for op in (moe.moe_experts, reference.moe_experts))
    assert relative(got, expected) <= 4e-3  # products in bfloat16
