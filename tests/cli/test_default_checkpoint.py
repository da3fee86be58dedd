"""The checkpoint that comes with the library: published format, small, and the same words every time."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.cli import main
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.lab.training import sample_text
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from tests.support.tiers import EXHAUSTIVE, exhaustive_on_cpu
from tests.support.typed import required

MAX_BYTES = 14 * 10**6


@pytest.fixture(scope="module")
def directory():
    return default_checkpoint()


def test_it_is_small_and_in_the_published_format(directory):
    assert sum(file.stat().st_size for file in directory.iterdir()) < MAX_BYTES
    config = ModelConfig.from_pretrained(directory)
    assert config == ModelConfig.from_preset("small")
    with SafetensorsSource(directory) as source:
        entries = source.entries()
    assert entries["layers.1.ffn.experts.0.w1.weight"].dtype == "I8"
    assert entries["layers.1.attn.wq_a.weight"].dtype == "F8_E4M3"
    assert entries["embed.weight"].dtype == "BF16"


@pytest.mark.exhaustive
def test_it_has_learned_english(directory):
    """Per token, on a page of the held-out end of its text: far below the ln 2048 = 7.6 of random weights."""
    tokenizer = Tokenizer(directory)
    page = sample_text()[-4000:]
    tokens = tokenizer.encode_prompt(page)[:513]
    runner = ModelRunner.from_pretrained(directory, device="cpu", max_model_len=600, max_num_seqs=1, progress=False)
    logits = runner.score([tokens])[0]
    loss = float(F.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
    assert loss < 4.2 < math.log(runner.config.vocab_size)


@exhaustive_on_cpu
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
    assert facts["mtp"]["losses"][-1][0] == facts["mtp"]["steps"]
    assert all(facts["test"][f"acceptance_{n}"] > 0.5 for n in range(1, facts["mtp"]["depth"] + 1))


@pytest.fixture(scope="module")
def plain():
    return complete(drafts=0)[0]


def complete(drafts: int) -> tuple[list[list[int]], Counter[tuple[int, int]]]:
    """Greedy completions of four prompts at once, and how many verifications had these (drafts, accepted drafts)."""
    llm = LLM(speculate=drafts, device="cpu", max_model_len=128, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["It is a truth universally acknowledged", "She was", "The weather", "Mr. Darcy"]
    return [c.token_ids for c in llm.generate(prompts, params)], llm.engine.stats.verifications


@EXHAUSTIVE
@pytest.mark.parametrize("drafts", [1, 3])
def test_its_drafts_are_often_right_and_leave_the_text_alone(plain, drafts):
    """Of the drafts behind right ones, the share that is right too: 0.6 to 0.8 when it was trained."""
    tokens, verifications = complete(drafts)
    assert tokens == plain
    for position in range(drafts):
        reached = {made: count for made, count in verifications.items() if made[0] > position and made[1] >= position}
        right = sum(count for (_, right), count in reached.items() if right > position)
        assert sum(reached.values()) > 12
        assert right / sum(reached.values()) > 0.4, (position, verifications)


@pytest.mark.exhaustive
def test_the_command_shows_what_drafts_save(capsys):
    args = ["generate", "--prompt", "She was", "--temperature", "0", "--max-tokens", "24", "--device", "cpu"]
    assert main(args) == 0
    plain = capsys.readouterr()
    assert main([*args, "--speculate", "3"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "draft tokens" not in plain.err
    found = re.search(
        r"24 tokens in (\d+) steps and .* tokens/s; (\d+) of (\d+) draft tokens", drafted.err.splitlines()[-1]
    )
    steps, accepted, made = map(int, required(found).groups())
    assert steps < 18
    assert 0 < accepted < made
