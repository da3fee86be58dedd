"""V4.1's differentiable path computes what a runner computes through its caches, and everything in it learns."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.experiments.define.sizes import sized_model
from deepseek_attn.lab.experiments.define.v41 import make_v41
from deepseek_attn.lab.training import make_task, train
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.loop import served_weights
from deepseek_attn.lab.training.save import TrainedSource
from deepseek_attn.lab.training.v41 import kept_blocks
from deepseek_attn.lab.training.weights import FreshSource, build_model
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.small_models import assert_close, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered

CPU = torch.device("cpu")
SHARED = {"selection": 2, "candidates": 3, "engram": True}


def published_tiny():
    return ModelConfig.from_preset("tiny_v41").replace(
        num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 2, 1, 1, 1, 1], dspark_block_size=0, hc_sinkhorn_iters=3,
        quantization_config=None, candidate_topk_blocks=4,
    )  # fmt: skip


def sized(options=SHARED, ratios=(0, 2, 2, 1, 1, 1)):
    base = sized_model("1m").replace(
        num_hidden_layers=len(ratios), compress_ratios=[0] * len(ratios), hidden_size=64, vocab_size=96, index_topk=6,
        num_attention_heads=2, moe_intermediate_size=32, n_routed_experts=2,
    )  # fmt: skip
    return make_v41(base, list(ratios), options)


def runner_of(config, source):
    return ModelRunner.from_source(config, source, device=CPU, numerics="exact", dtype="float32", max_model_len=128,
                                   max_num_seqs=2, progress=False)  # fmt: skip


@exhaustive_on_cpu
@pytest.mark.parametrize("config", [published_tiny(), sized()], ids=["published", "sized"])
def test_logits_are_those_of_the_caches(config):
    """Past the candidates, of 16 and 24 entries, and past the selected entries."""
    prompts = [prompt(config, 75, seed) for seed in range(2)]
    model, generator = build_model(config, FreshSource(config, 1), CPU, 128), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # what begins at zero would hide a mistake
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        weights = {f"model.{name}": value for name, value in served_weights(model, config).items()}
        dense = torch.func.functional_call(DenseModel(model), weights, (torch.tensor(prompts),)).logits
    runner = runner_of(config, TrainedSource(model, config))
    for row, expected in zip(dense, runner.score(prompts, chunk_size=50), strict=True):
        assert_close(row, expected)


def test_layers_read_the_selection_of_their_source():
    config, found = sized(), []
    dense = DenseModel(build_model(config, FreshSource(config, 0), CPU, 128))
    with torch.no_grad():
        dense(torch.tensor([prompt(config, 40, 0)]), observer=found.append)
    kinds = [spec.kind for spec in config.layers]
    assert kinds == ["SWA", "C2 full", "C2 reuse", "C1 full", "C1 reuse", "C1 reindex"]
    reads = [reading.read for reading in found]
    assert torch.equal(reads[1], reads[2])
    assert torch.equal(reads[3], reads[4])
    assert not torch.equal(reads[3], reads[5])
    assert (reads[5].sum(-1)[0, 6:] == 6).all()


def test_kept_blocks_by_definition():
    scores = torch.tensor([[[5.0, 0, 1, 1, 9, 0, 2, 7, 3]] * 9])
    visible = torch.arange(9).unsqueeze(0) <= torch.arange(9).unsqueeze(1)
    kept = kept_blocks(scores, visible.unsqueeze(0), 2, 2)[0]
    for query in range(9):
        newest = query // 2
        best = {block: float(scores[0, 0, 2 * block : min(2 * block + 2, query + 1)].max()) for block in range(newest)}
        expected = {newest, *sorted(best, key=lambda block: best[block], reverse=True)[:1]}
        assert set((kept[query].nonzero().flatten() // 2).tolist()) == expected


def test_everything_learns_and_the_index_loss_touches_indexers_alone():
    config = sized()
    model = build_model(config, FreshSource(config, 0), CPU, 128)
    dense = DenseModel(model)
    result = dense(torch.tensor([prompt(config, 40, 0)]))
    result.index_loss.backward(retain_graph=True)
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, _ in model.named_parameters() if ".indexer." in name}
    result.logits.square().mean().backward()
    silent = {n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    # the last sublayer computes weights of an input that no layer has, and an ape of ratio 1 weighs nothing
    assert all(name.startswith("layers.5.hc_ffn") or name.endswith(".ape") for name in silent), silent


@pytest.mark.parametrize("engram", tiered([True, False], [True]))
def test_a_model_is_trained(engram):
    config = sized(SHARED | {"engram": engram})
    task = make_task("recall", 96, symbols=8, pairs=2, questions=8)
    result = train(config, task, steps=6, batch=2, seq_len=32, device="cpu", test_batches=1, selection="oracle")
    assert result.steps == 6
    assert 0 < result.metrics["loss"] < 6
    table = [name for name, _ in result.model.named_parameters() if name.endswith("engram.embed.weight")]
    assert len(table) == engram
