"""The checkpoint that comes with the library: published format, small, and the same words every time."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint.source import SafetensorsSource
from deepseek_attn.cli import main
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.training import sample_text

MAX_BYTES = 14 * 10**6


@pytest.fixture(scope="module")
def directory():
    return default_checkpoint()


def backbone(config: ModelConfig) -> ModelConfig:
    """The config without an MTP layer."""
    return config.replace(num_nextn_predict_layers=0, compress_ratios=[spec.ratio for spec in config.layers])


def test_it_is_small_and_in_the_published_format(directory):
    assert sum(file.stat().st_size for file in directory.iterdir()) < MAX_BYTES
    config = ModelConfig.from_pretrained(directory)
    assert backbone(config) == backbone(ModelConfig.from_preset("small"))
    with SafetensorsSource(directory) as source:
        entries = source.entries()
    assert entries["layers.1.ffn.experts.0.w1.weight"].dtype == "I8"
    assert entries["layers.1.attn.wq_a.weight"].dtype == "F8_E4M3"
    assert entries["embed.weight"].dtype == "BF16"


def test_it_has_learned_english(directory):
    """Per token, on a page of the held-out end of its text: far below the ln 2048 = 7.6 of random weights."""
    tokenizer = Tokenizer(directory)
    page = sample_text()[-4000:]
    tokens = tokenizer.encode_prompt(page)[:513]
    runner = ModelRunner.from_pretrained(directory, device="cpu", max_model_len=600, max_num_seqs=1, progress=False)
    logits = runner.score([tokens])[0]
    loss = float(F.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
    assert loss < 4.2 < math.log(runner.config.vocab_size)


def test_the_demo_writes_the_same_words_each_time(capsys):
    command = [
        "generate",
        "--prompt",
        "Once upon a time",
        "--temperature",
        "0",
        "--max-tokens",
        "24",
        "--device",
        "cpu",
    ]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "Jane Austen" in first.err
    words = first.out.split()
    assert len(words) >= 12
    known = set(sample_text().split())
    assert sum(word in known for word in words) >= 0.8 * len(words), first.out
    assert main(command) == 0
    assert capsys.readouterr().out == first.out


def test_how_it_was_made_is_written_down(directory):
    facts = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    assert facts["config"] == "small"
    assert facts["seed"] == 0
    assert facts["losses"][-1][0] == facts["steps"]
    assert facts["test"]["loss"] < 4.0
