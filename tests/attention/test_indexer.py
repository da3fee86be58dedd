"""The indexers of whole layers on a GPU: Triton and plain torch select the same entries of the same caches."""

import pytest
import torch

from deepseek_attn.attention import indexer
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.kernels.common.dispatch import reference_ops, runs_triton
from deepseek_attn.runner.model_runner import ModelRunner

NUMERICS = ["exact", "official", "serving"]


@pytest.fixture
def gpu(device, needs_gpu):
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("needs a GPU with Triton: DEEPSEEK_ATTN_TEST_DEVICE=cuda")
    return device


def compare(selections, monkeypatch):
    """Selects twice at every call, in Triton and in plain torch, and keeps both selections."""
    original = indexer.index_select

    def both(queries, keys, num_visible, k, width, out, *slots):
        assert runs_triton(queries.q)
        original(queries, keys, num_visible, k, width, out, *slots)
        with reference_ops():
            plain = original(queries, keys, num_visible, k, width)
        selections.append((out.clone(), plain))

    monkeypatch.setattr(indexer, "index_select", both)


def check(selections):
    """As many entries, ascending, and the same ones except for a few that rounding swaps."""
    common = total = 0
    for fused, plain in selections:
        assert torch.equal((fused >= 0).sum(1), (plain >= 0).sum(1))
        rises = fused[:, 1:] > fused[:, :-1]
        assert (rises | (fused[:, 1:] == -1)).all()
        chosen = (fused >= 0).sum().item()
        common += sum(len(set(a) & set(b) - {-1}) for a, b in zip(fused.tolist(), plain.tolist(), strict=True))
        total += chosen
    assert total > 1000
    assert common / total > 0.97


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
def test_prefills_and_decodes_together(gpu, preset, numerics, monkeypatch):
    selections = []
    compare(selections, monkeypatch)
    config = ModelConfig.from_preset(preset)
    options = {"max_model_len": 1200, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "cuda_graphs": False}
    runner = ModelRunner.from_config(config, device=gpu, numerics=numerics, **options)
    tokens = torch.randint(config.vocab_size, (4, 1100)).tolist()
    sequences = [runner.sequence(ids) for ids in tokens]
    for sizes in ((700, 3, 0, 0), (1, 200, 500, 0), (1, 1, 1, 200), (2, 1, 2, 1)):
        runner.step([(sequence, n) for sequence, n in zip(sequences, sizes, strict=True) if n])
    check(selections)
