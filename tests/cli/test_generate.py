"""``generate`` with many prompts, speculation, statistics and a trace."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.safetensors_source import INDEX_FILE
from deepseek_attn.cli import main
from deepseek_attn.cli.log import logged
from deepseek_attn.cli.observe import describe_run, stats_printer
from deepseek_attn.cli.prompts import PromptLine, parse_line
from deepseek_attn.engine.stats import EngineStats, StepStats
from tests.support.exit_codes import exit_code
from tests.support.small_models import two_layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")


def generate(checkpoint, *flags, greedy=True):
    flags = (*flags, "--temperature", "0") if greedy else flags
    return main(["generate", "--model", str(checkpoint), "--device", "cpu", "--max-tokens", "6", *flags])


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ("plain text ", "plain text "),
        ('"two\\nlines"', "two\nlines"),
        ("[0, 17, 5]", [0, 17, 5]),
        ("[1, two]", "[1, two]"),
        ("true", "true"),
        ('"Hello", she said', '"Hello", she said'),
        ("[1] Once", "[1] Once"),
        ("{x}", "{x}"),
        ("42", "42"),
        ("windows\r", "windows"),
    ],
)
def test_a_line_is_json_or_text(line, prompt):
    assert parse_line(line, SamplingParams()) == PromptLine(prompt, SamplingParams())


def test_log_probabilities_of_lines(checkpoint, tmp_path, capsys):
    """With the flags, and with fields of a line."""
    (tmp_path / "prompts").write_text('[0, 5, 9]\n{"token_ids": [0, 7], "logprobs": 0, "prompt_logprobs": 2}\n')
    assert generate(checkpoint, "--prompts", str(tmp_path / "prompts"), "--logprobs", "2") == 0
    lines = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda line: line["index"])
    assert "prompt_logprobs" not in lines[0]
    assert lines[1]["prompt_logprobs"]["token_ids"] == [7]
    for line, top in zip(lines, (2, 0), strict=True):
        found = line["logprobs"]
        assert found["token_ids"] == line["token_ids"]
        assert found["ranks"] == [1] * 6
        assert [len(row) for row in found["top_ids"]] == [top] * 6
        assert all(-10 < logprob < 0 for logprob in found["logprobs"])


def test_log_probabilities_of_a_text(checkpoint, capsys):
    assert generate(checkpoint, "--token-ids", "0,5,9", "--logprobs", "1", "--prompt-logprobs", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("prompt_logprobs:")
    assert lines[first + 3] == "logprobs:"
    assert len(lines) == first + 4 + 6
    assert all(" rank " in line for line in lines[first + 1 : first + 3] + lines[first + 4 :])


def test_many_prompts(checkpoint, tmp_path, capsys):
    prompts = ["Hello there", "abc\ndef", [0, 5, 9], "Grüße"]
    lines = [prompts[0], json.dumps(prompts[1]), "", json.dumps(prompts[2]), prompts[3]]
    (tmp_path / "prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    assert generate(checkpoint, "--prompts", str(tmp_path / "prompts.txt"), "--max-num-seqs", "2") == 0
    records = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda record: record["index"])
    llm = LLM(checkpoint, device="cpu", progress=False)
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    for record, completion in zip(records, expected, strict=True):
        found = record["text"], record["token_ids"], record["finish_reason"]
        assert found == (completion.text, completion.token_ids, completion.finish_reason)


def test_many_turns_of_a_chat(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("hi\n")
    assert generate(checkpoint, "--prompts", str(tmp_path / "prompts.txt"), "--chat", "--system", "be brief") == 0
    [record] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    llm = LLM(checkpoint, device="cpu", progress=False)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert record["token_ids"] == llm.chat(messages, SamplingParams(temperature=0, max_tokens=6)).token_ids


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, [], "No such file"),
        (b"\n \n", [], "no prompt"),
        (b"fine\n\n\xff\xfe\n", [], "line 3: not UTF-8 text"),
        (b"fine\n", ["--prompt", "another"], "not allowed with"),
        (b"fine\n", ["--stats", "-1"], "--stats -1.0"),
        (b"fine\n", ["--profile", "/no/such/folder/t.json"], "no trace can be written"),
        (b"fine\n", ["--speculate", "16"], "--speculate 16: must be 0 to 15"),
    ],
)
def test_wrong_input_is_one_message(checkpoint, tmp_path, capsys, content, flags, message):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    assert exit_code(generate, checkpoint, "--prompts", str(path), *flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_speculation_gives_the_same_text_and_says_how_it_went(checkpoint, capsys):
    flags = ["--prompt", "abc", "--seed", "4"]
    assert generate(checkpoint, *flags, greedy=False) == 0
    plain = capsys.readouterr()
    assert generate(checkpoint, *flags, "--speculate", "2", greedy=False) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "draft" not in plain.err
    assert "draft tokens accepted" in drafted.err.splitlines()[-1]


def test_a_line_per_step_and_a_trace(checkpoint, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert generate(checkpoint, "--prompt", "abc", "--stats", "--profile", str(trace)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == [f"step {i}" for i in range(1, 7)]
    assert all("tok/s" in line and "running" in line and "pools" in line for line in lines)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"project", "insert", "select", "attend", "output", "moe", "hc_pre", "head", "metadata"} <= names
    assert {"schedule", "sample"} <= names


def test_lines_every_so_often_sum_up_steps():
    lines = []
    watch = stats_printer(3600, lines.append)
    watch(StepStats(seconds=1, decode_tokens=2))
    assert not lines
    watch = stats_printer(0, lines.append)
    step = {"pages": {"window": (1, 4), "state": (2, 2)}, "queried_tokens": 100, "cached_tokens": 25, "preempted": 1}
    step["verifications"] = Counter({(4, 3): 2})
    watch(StepStats(seconds=2, prefill_tokens=90, decode_tokens=10, running=3, **step))
    assert lines == [
        "step 1: 50 tok/s, 90 prompt + 10 decode tokens, 3 running, 0 waiting, pools 100%, prefix hits 25%, "
        "acceptance rate 75%, 1 preempted"
    ]


def test_the_last_line():
    stats = EngineStats(steps=5, seconds=2.0, generated=11, verifications=Counter({(2, 2): 2, (2, 1): 2}))
    assert describe_run(stats) == (
        "11 tokens in 5 steps and 2.00 s, 5.5 tokens/s; "
        "6 of 8 draft tokens accepted (75%), 2.50 tokens per request and step"
    )


def add_tensors(folder, **tensors):
    """Adds tensors to the index and the last shard of a checkpoint."""
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = sorted(set(index["weight_map"].values()))[-1]
    index["weight_map"] |= dict.fromkeys(tensors, shard)
    (folder / INDEX_FILE).write_text(json.dumps(index))
    save_file(load_file(folder / shard) | tensors, folder / shard)


@pytest.mark.exhaustive
def test_the_load_report(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "m", copy_function=shutil.copy)
    command = ["generate", "--model", str(folder), "--device", "cpu", "--prompt", "x", "--max-tokens", "1"]
    score = ["score", "--model", str(folder), "--token-ids", str(tmp_path / "ids"), "--out", str(tmp_path / "logits")]
    inspect = [
        "inspect",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--token-ids",
        "1,2",
        "--out",
        f"{tmp_path}/p.html",
    ]
    sizes = ["--batch", "1", "--drafts", "1", "--prompt", "4", "--tokens", "16", "--repeats", "1"]
    bench = ["bench", "engine", "--model", str(folder), "--device", "cpu", *sizes]
    (tmp_path / "ids").write_text("[[1, 2]]")
    assert main(command) == 0
    assert "left out" not in capsys.readouterr().err
    vision = {f"vision.blocks.{i}.weight": torch.zeros(2) for i in range(13)}
    add_tensors(folder, **vision, **{"layers.1.attn.rotary_emb.inv_freq": torch.zeros(2)})
    for run in ([*score, "--layers", "0"], bench):
        assert main(run) == 0
        err = capsys.readouterr().err.splitlines()
        counts = "1 rotary inv_freq buffers; 13 vision tensors, of which text needs none"
        assert f"left out of the checkpoint's tensors: {counts} (--report names them)" in err
    for run in (command, score, inspect):
        assert main([*run, "--report"]) == 0
        err = capsys.readouterr().err
        assert "LoadReport(" in err
        assert "GenerationConfig(eos_token_ids=(1,), temperature=1.0" in err
        listed = "left out (vision tensors, of which text needs none):\n  " + "\n  ".join(map(repr, sorted(vision)))
        assert listed in err
        assert "(--report names them)" not in err


def test_an_unknown_tensor_is_a_warning(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "m", copy_function=shutil.copy)
    add_tensors(folder, **{"layers.1.attn.k_norm.weight": torch.zeros(2)})
    command = ["generate", "--model", str(folder), "--device", "cpu", "--token-ids", "5", "--max-tokens", "1"]
    message = r"unknown tensors in the checkpoint \(1\): layers.1.attn.k_norm.weight; the model computes without them"
    with pytest.warns(UserWarning, match=message):
        assert main(command) == 0
    assert "left out of the checkpoint's tensors: 1 unknown tensors (--report" in capsys.readouterr().err


def test_a_warning_is_one_line():
    usual = warnings.formatwarning
    with logged(logging.WARNING):
        assert warnings.formatwarning(UserWarning("a problem"), UserWarning, "file", 3) == "warning: a problem\n"
    assert warnings.formatwarning is usual
