"""Steps of DeepSeek-V4.1 on tensors without memory, where whatever would wait for the device is an error."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.ahead.recording import recorded_launches
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.step_runner import chunks_of
from deepseek_attn.runner.trailing import SequenceRows
from deepseek_attn.runner.warm_up import WarmUp
from tests.kernels.compiled_launches import CAPABILITIES
from tests.support.small_models import prompt
from tests.support.tiers import tiered
from tests.support.typed import required
from tests.support.v41_cases import tiny_for_kernels

V41 = {
    "compress_kernel", "rope_insert_kernel", "candidate_scores_kernel", "block_scores_kernel",
    "candidate_entries_kernel", "queries_kernel", "multi_linear_kernel",
}  # fmt: skip
GPUS = [(numerics, arch) for numerics in ("serving", "official") for arch in ("sm90", "sm80", "sm100")]
OFFICIAL = {"attend_kernel", "gather_kernel", "grouped_product_kernel"}  # Hopper has none for these


def trailing_prefill(runner: MetaRunner, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Hidden states of the rows of a step that the last layers compute, of requests (new tokens, length)."""
    query_lens, seq_lens = (torch.tensor(part, dtype=torch.int64) for part in zip(*rows, strict=True))
    tables = {group: torch.zeros(len(rows), 16, dtype=torch.int32) for group in runner.layout.pages}
    batch = StepInput(query_lens, seq_lens, tables)
    step = runner.builder.build(batch)
    step.engram = runner.tables.blank(len(step.positions)) if runner.tables is not None else {}
    plans = [SequenceRows(length - n, length, max(0, length - 11)) for n, length in rows]
    lengths = required(runner.trailing).attach(step, batch, plans)
    assert [part.window_starts is not None for part in step.parts()] == [False, False, True, True]
    states = runner.model(torch.zeros(len(step.positions), dtype=torch.int64, device="meta"), step.positions, step)
    assert len(states) == sum(lengths)
    return states


@pytest.mark.parametrize(("numerics", "arch"), tiered(GPUS, [("official", "sm90")]))
def test_no_step_waits_for_the_device(numerics, arch):
    config = tiny_for_kernels()
    request = RunnerRequest.of(
        config,
        RandomSource(config, 0).entries(),
        numerics=numerics_for(config, numerics),
        dtype=torch.bfloat16,
        attention=AttentionOptions(),
        sizes=RunnerSizes(1024, 2, 64, 16),
        gpu=GPU(CAPABILITIES[arch], 132),
        cuda_graphs=True,
    )
    with recorded_launches(request.gpu) as launches:
        runner = MetaRunner.build(request)
        assert runner.graphs is not None
        steps = WarmUp(runner)
        with runner.op_settings(), torch.inference_mode():
            steps.decode(StepSize(2, 1, 1024))
            decoded = {variant.name for variant in launches.variants.values()}
            steps.prefill([(1, 90), (40, 1000)])
            states = trailing_prefill(runner, [(1, 90), (17, 900), (46, 1000)])
    assert len(states) == 1 + 17 + 25
    assert decoded >= V41
    if numerics == "official":
        launched = {variant.name for variant in launches.variants.values()}
        assert launched >= OFFICIAL
        assert not {"experts_hopper_kernel", "attend_hopper_kernel"} & launched


@pytest.mark.gpu
def test_replays_equal_eager_steps(device):
    """The same bits, as those of steps that are not over persistent tensors; candidates limit the longest sequences."""
    config = tiny_for_kernels()
    limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    options = {"device": device, "numerics": "serving", "dtype": "bfloat16", "cuda_graphs": True, "progress": False}
    runner = ModelRunner.from_source(config, RandomSource(config, 0), **limits, **options)
    assert runner.graphs is not None
    sequences = [runner.sequence(prompt(config, n, n)) for n in (2, 61, 190, 333)]
    for sequence in sequences:
        runner.step([(sequence, sequence.num_pending)])
        sequence.token_ids.extend(prompt(config, 4, 1))
    sizes = runner.whole_model(), runner.layout, device, [4]
    both = [DecodeGraphs(*sizes, capture=capture, engram=runner.tables) for capture in (True, False)]
    for chosen in ([0, 1, 2, 3], [3, 1], [2, 0, 3], [1]):
        rows = [(sequences[i], 1) for i in chosen]
        caches = [sequence.cache for sequence, _ in rows]
        ids = [[sequence.token_ids[sequence.num_computed]] for sequence, _ in rows]
        runner.manager.reserve([(cache, 1) for cache in caches])
        with torch.inference_mode(), runner.op_settings():
            replayed, eager = (graphs.run(caches, ids, chunks=chunks_of(rows)).logits() for graphs in both)
        assert torch.equal(replayed, eager)
        runner.graphs = None
        ordinary = torch.cat(required(runner.step(rows).logits))
        assert (replayed - ordinary).norm() <= 0.02 * ordinary.norm()
    assert both[0].step(StepSize(4, 1, 1024)).graph is not None
