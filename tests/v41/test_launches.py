"""Steps of DeepSeek-V4.1 on tensors without memory, where whatever would wait for the device is an error."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.launches import recorded_launches
from deepseek_attn.runner.compile_ahead import RunnerRequest, RunnerSizes
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.stand_in import StandIn
from deepseek_attn.runner.warm_up import WarmUp
from tests.kernels.compiled_launches import CAPABILITIES
from tests.support.tiers import tiered
from tests.support.v41_cases import tiny

WIDTHS = {
    "hidden_size": 256, "q_lora_rank": 128, "num_attention_heads": 8, "o_lora_rank": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 64, "candidate_topk_blocks": 20,
    "candidate_block_size": 4, "moe_intermediate_size": 128, "engram_head_dim": 64,
}  # fmt: skip
V41 = {
    "compress_kernel", "rope_insert_kernel", "candidate_scores_kernel", "block_scores_kernel",
    "candidate_entries_kernel", "queries_kernel",
}  # fmt: skip


@pytest.mark.parametrize("arch", tiered(["sm90", "sm80", "sm100"], ["sm90"]))
def test_no_step_waits_for_the_device(arch):
    config = tiny(**WIDTHS)
    request = RunnerRequest.of(
        config,
        RandomSource(config, 0).entries(),
        numerics=numerics_for(config, "serving"),
        dtype=torch.bfloat16,
        attention=AttentionOptions(),
        sizes=RunnerSizes(1024, 2, 64, 16),
        gpu=GPU(CAPABILITIES[arch], 132),
        cuda_graphs=True,
    )
    with recorded_launches(request.gpu) as launches:
        runner = StandIn.build(request)
        assert runner.graphs is not None
        steps = WarmUp(runner)
        with runner.op_settings(), torch.inference_mode():
            steps.decode(StepSize(2, 1, 1024))
            decoded = {variant.name for variant in launches.variants.values()}
            steps.prefill([(1, 90), (40, 1000)])
    assert decoded >= V41
