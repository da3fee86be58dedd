"""Experts from the checkpoint's files in rows of the device, as on a GPU: the same bits as with all resident."""

from collections import Counter

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.layers.expert_files import ExpertReaders
from deepseek_attn.layers.expert_memory import ExpertMemory
from deepseek_attn.models.file_experts import FileExperts, keep_on_device
from deepseek_attn.models.moe import Experts
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from tests.runner.test_expert_files import CASES, FAMILIES, QUICK, KeptSource, v4
from tests.support.small_models import prompt, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped

CPU = torch.device("cpu")


def experts_of(runner) -> list[Experts]:
    return [module for module in runner.model.modules() if isinstance(module, Experts)]


def with_rows(runner, budget: int) -> tuple[list[FileExperts], int]:
    """Gives the layers of a runner rows, as on a GPU; returns them, and how many experts each keeps."""
    layers = experts_of(runner)
    projections = [layer.projections for layer in layers]
    readers = ExpertReaders(weight for each in projections for linear in each for weight in linear.unread.values())
    found, divided = keep_on_device(projections, CPU, budget, readers)
    assert divided.nbytes <= budget
    for layer, rows in zip(layers, found, strict=True):
        layer.rows = rows
    return found, divided.cached


def one_expert(runner) -> int:
    """Bytes of an expert as a device holds it."""
    rows = experts_of(runner)[0].rows
    return sum(part[0].nbytes for stack in required(rows).stacks for part in stack if part is not None)


@exhaustive_on_cpu
@pytest.mark.parametrize(("family", "numerics", "stored"), tiered(CASES, QUICK))
def test_same_bits_with_any_number_of_rows(family, numerics, stored):
    config, make = FAMILIES[family]()
    config = config if stored == "bf16" or config.expert_dtype == stored else config.replace(expert_dtype=stored)
    source = KeptSource(config, 1, stored)
    texts = [prompt(config, length, length) for length in (23, 1, 9)]
    expected = make(config, source, numerics=numerics)
    chunked, single = expected.score(texts, chunk_size=7), expected.score(texts[2:], chunk_size=1)
    runner = make(config, source, numerics=numerics, expert_memory="disk")
    with_rows(runner, 1 << 40)
    one, layers = one_expert(runner), Counter(layer.count for layer in experts_of(runner))
    most = max(layers)  # a drafter's stages have another number of experts, and an area of their own
    for cached in (1, config.num_experts_per_tok + 1, most):
        own = {E: min(cached, E) for E in layers}
        found, kept = with_rows(runner, one * sum(n * own[E] + E - own[E] for E, n in layers.items()))
        assert kept == cached
        for rows in found:
            for stack in rows.stacks:
                for part in stack:
                    if part is not None:
                        part.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing was copied
        for left, right in zip(chunked, runner.score(texts, chunk_size=7), strict=True):
            assert torch.equal(left, right)
        assert torch.equal(single[0], runner.score(texts[2:], chunk_size=1)[0])
        assert all(len(rows.row) <= cached for rows in found)
        assert all(len(set(rows.row.values())) == len(rows.row) for rows in found)


def test_least_used_experts_make_room():
    config = v4()
    runner = small_runner(config, KeptSource(config, 1, "fp4"), expert_memory="disk")
    with_rows(runner, 1 << 40)
    E, one = config.n_routed_experts, one_expert(runner)
    rows = with_rows(runner, one * (3 * 3 + E - 3))[0][1]
    find = lambda *chosen: rows.find(torch.tensor([chosen])).rows.tolist()  # noqa: E731
    assert [find(2, 5, 7)[e] for e in (2, 5, 7)] == [3, 4, 5]  # behind the rows of the first layer
    find(2, 5)
    assert find(2, 3)[3] == 5
    assert sorted(rows.row) == [2, 3, 5]  # 7 was used once
    placed = find(0, 1, 2, 4)
    assert sorted(rows.row) == [0, 1, 2]  # 3 and 5 made room; 4 has none
    assert placed[4] == rows.rows.staged == 9
    assert find(-1, 2)[2] == rows.row[2]


def test_too_little_memory():
    config = v4()
    runner = small_runner(config, KeptSource(config, 1, "fp4"), expert_memory="disk")
    with pytest.raises(ValueError, match=r"1,000 bytes of GPU memory for routed experts: the least is [\d,]+, for one"):
        with_rows(runner, 1000)


def test_rows_have_exponents_if_all_experts_have_them():
    """As where all are loaded: the kernels' choice depends on it."""
    config = v4()
    for spoiled in (False, True):
        source = KeptSource(config, 1, "fp4")
        if spoiled:
            name, read = "layers.1.ffn.experts.5.w3.scale", source.read
            far = torch.where(torch.arange(4) == 1, 1, read(name)).to(torch.uint8)
            untyped(source).read = lambda wanted, far=far, name=name, read=read: far if wanted == name else read(wanted)
        resident = small_runner(config, source, numerics="official")
        runner = small_runner(config, source, numerics="official", expert_memory="disk")
        with_rows(runner, 1 << 40)
        for left, right in zip(experts_of(resident), experts_of(runner), strict=True):
            for linear, stack in zip(left.projections, required(right.rows).stacks, strict=True):
                assert (linear.exponent is None) == (stack.exponent is None)
        assert (required(experts_of(runner)[1].rows).stacks[1].exponent is None) == spoiled
        assert torch.equal(resident.score([[1, 2, 3, 4]])[0], runner.score([[1, 2, 3, 4]])[0])


def test_a_gpu_runner_is_planned_without_one():
    """Steps of a runner without memory: rows of all experts, no CUDA graphs."""
    pytest.importorskip("triton")
    from deepseek_attn.runner.ahead.recording import recorded_launches
    from deepseek_attn.runner.meta_runner import MetaRunner
    from deepseek_attn.runner.warm_up import WarmUp

    config = ModelConfig.from_preset("tiny_gpu")
    headers = RandomSource(config).entries()
    gpu = GPU((9, 0), 132)
    request = RunnerRequest.of(
        config, headers, numerics=numerics_for(config, "serving"), dtype=torch.bfloat16, attention=AttentionOptions(),
        sizes=RunnerSizes(512, 2, 64, 16), gpu=gpu, experts=ExpertMemory("disk"),
    )  # fmt: skip
    with recorded_launches(gpu) as launches:
        runner = MetaRunner.build(request)
        assert runner.graphs is None
        assert all(isinstance(layer.rows, FileExperts) for layer in experts_of(runner))
        with runner.op_settings(), torch.inference_mode():
            WarmUp(runner, 0).prefill([(5, 5)])
    assert launches
