"""Mistakes in Python: what was given and what is needed, before anything is allocated."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.config.options import explain_out_of_memory, parse_device, pick_device
from deepseek_attn.runner.model_runner import ModelRunner

SIZES = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner.from_config("tiny", layers=[1], **SIZES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "2"}, "max_num_seqs='2': must be an integer"),
        ({"max_model_len": 2.5}, r"max_model_len=2\.5: must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs=True: must be an integer"),
        ({"kv_cache_bytes": "1GB"}, "kv_cache_bytes='1GB': must be an integer"),
        ({"layers": 1}, "layers=1: must be a list of numbers of layers, or None"),
        ({"layers": "01"}, "layers='01': must be a list of numbers of layers"),
        ({"max_num_seqs": 0, "max_rollback": -1}, "(?s)max_num_seqs=0.*max_rollback=-1"),
        ({"device": "gpu"}, "device 'gpu': supported are cpu, cuda and cuda:N"),
        ({"dtype": "float16"}, "dtype 'float16': supported are float32, bfloat16"),
        ({"numerics": "fast"}, "numerics 'fast'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        ModelRunner.from_config("tiny", **SIZES | options)


@pytest.mark.parametrize("config", [3, {"model_type": "deepseek_v4"}, None])
def test_what_is_no_config(config):
    with pytest.raises(ValueError, match=f"config is a {type(config).__name__}: .*ModelConfig.from_dict"):
        ModelRunner.from_config(config)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], "token ids of a prompt are a list or a one-dimensional array of integers, got 1"),
        (torch.tensor([1, 2]), r"an iterable of prompts is needed, got tensor\(\[1, 2\]\): put a single prompt into a"),
        (["ab"], "got 'ab': text goes to LLM, which has a tokenizer"),
        ([[1.0]], r"token id 1\.0 is not in the vocabulary"),
        ([[]], "empty prompt"),
    ],
)
def test_prompts(runner, prompts, message):
    with pytest.raises(ValueError, match=message):
        runner.score(prompts)


@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True])
def test_chunk_sizes(runner, size):
    with pytest.raises(ValueError, match=f"chunk_size={size!r}: must be an integer of at least 1"):
        runner.score([[1, 2]], chunk_size=size)


def test_a_sequence_that_cannot_be_saved(runner, tmp_path):
    sequence = runner.sequence([1, 2, 3])
    runner.step([(sequence, 3)])
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(ValueError, match="cannot be written"):
            sequence.save(path)
    assert list(tmp_path.iterdir()) == []
    assert [path for path in tmp_path.parent.iterdir() if "partial" in path.name] == []
    sequence.free()


def test_devices(monkeypatch):
    assert parse_device("cuda:5") == torch.device("cuda:5")
    assert parse_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None) == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device 'cuda:2': there are 2 GPUs here, cuda:0 to cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no CUDA GPU here; use device='cpu'"):
        pick_device("cuda")


def test_only_a_lack_of_memory_is_explained():
    with (
        pytest.raises(ValueError, match="out of memory for caches: lower them"),
        explain_out_of_memory("caches", "lower them"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="a bug"), explain_out_of_memory("caches", "lower them"):
        raise RuntimeError("a bug")
