"""Each command with a V4.1 model: a result, or one message that says what is not supported."""

from __future__ import annotations

import json

import pytest

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from tests.support.tiers import tiered
from tests.support.v41_cases import tiny_for_kernels

PRESET = "--model tiny_v41"
SHORT = "--batch 2 --context 40 --repeats 1 --device cpu"
TOKENS = "--token-ids 5,9,511 --device cpu"
COMMANDS = {
    "plan --model DIR/kernels.json --gpu h200 --layout dp --ranks 2 --max-num-batched-tokens 16": "2 x h200",
    f"bench layer {PRESET} --layers 0,1,2,3 {SHORT}": "C2 reindex",
    f"bench model {PRESET} --prefill 20 {SHORT}": '"context": 40',
    f"bench engine {PRESET} --batch 2 --drafts 2 --prompt 9 --tokens 6 --repeats 1 --device cpu": '"drafts": 2',
    "score --model DIR --token-ids DIR/ids.json --out DIR/logits.safetensors --device cpu": "1 sequences, 3 tokens",
    f"generate --model DIR {TOKENS} --max-tokens 3 --ignore-eos --speculate 2 --stats": "",
    f"inspect --model DIR {TOKENS} --out DIR/page.html": "3 of 3 tokens, 8 layers",
    "make-checkpoint --config tiny_v41 --out DIR/other": "817 tensors",
}
REFUSED = {
    "train --config tiny_v41": "DSpark drafters are not trained",
    f"generate --model DIR {TOKENS} --speculate 6": "dspark_block_size 5 is the most",
    "score --mtp --model DIR --token-ids DIR/ids.json --out DIR/drafts.safetensors": "the drafter is DSpark",
}
QUICK = [line for line in COMMANDS if line.startswith("generate")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    config = ModelConfig.from_preset("tiny_v41")
    directory = write_checkpoint(RandomSource(config, 0), config, tmp_path_factory.mktemp("checkpoint") / "model")
    (directory / "ids.json").write_text("[[5, 9, 511]]")
    (directory / "kernels.json").write_text(json.dumps(tiny_for_kernels().to_dict()))
    return str(directory)


@pytest.mark.parametrize("line", tiered(list(COMMANDS), QUICK))
def test_commands_that_run(line, checkpoint, capsys):
    assert main([word.replace("DIR", checkpoint) for word in line.split()]) == 0
    assert COMMANDS[line] in capsys.readouterr().out


@pytest.mark.parametrize("line", tiered(list(REFUSED), [line for line in REFUSED if "--speculate" in line]))
def test_commands_that_are_refused(line, checkpoint, capsys):
    assert main([word.replace("DIR", checkpoint) for word in line.split()]) == 2
    *before, message = capsys.readouterr().err.splitlines()
    assert REFUSED[line] in message
    assert not before  # nor is a text read
