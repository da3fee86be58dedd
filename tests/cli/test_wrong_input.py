"""A newcomer's mistakes on the command line: a message that says what is wrong, exit code 2, nothing left behind."""

from __future__ import annotations

import json

import pytest

from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    config = ModelConfig.from_preset("tiny").replace(num_hidden_layers=1, compress_ratios=[4, 0], num_hash_layers=0)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    assert main(["make-checkpoint", "--config", str(folder / "config.json"), "--out", str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, but for token ids, a file and a folder with something in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    return tmp_path


def refused(capsys, place, *command: str) -> str:
    """The message of a command that fails as wrong input should."""
    before = sorted(place.rglob("*"))
    try:
        code = main(list(command))
    except SystemExit as end:  # argparse
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    assert "error: " in captured.err
    assert sorted(place.rglob("*")) == before
    return captured.err


SCORE = ("--token-ids", "ids.json", "--out", "o.safetensors")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--token-ids", "ids.json", "--out", "."), "--out .: it is a folder"),
        (("--token-ids", "ids.json", "--out", "no/o"), "the folder 'no' does not exist"),
        (("--token-ids", "ids.json", "--out", "file/o"), "the folder 'file' does not exist"),
        (("--token-ids", "full", "--out", "o"), "--token-ids full: Is a directory"),
        (("--token-ids", "none", "--out", "o"), "--token-ids none: No such file"),
        ((*SCORE, "--device", "banana"), "device 'banana': supported are cpu, cuda and cuda:N"),
        ((*SCORE, "--device", "meta"), "device 'meta': supported are cpu, cuda and cuda:N"),
        ((*SCORE, "--kv-cache-bytes", "1e400GB"), "'1e400GB' is no amount of memory"),
        ((*SCORE, "--kv-cache-bytes", "1.2.3GB"), "'1.2.3GB' is no amount of memory"),
        ((*SCORE, "--max-num-seqs", "99999999999"), "bytes of caches for max_num_seqs=99999999999"),
        ((*SCORE, "--max-num-seqs", "1", "--max-num-batched-tokens", "9999999999999"), "lower"),
    ],
)
def test_score(checkpoint, place, capsys, flags, message):
    assert message in refused(capsys, place, "score", "--model", str(checkpoint), *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompts", "full"), "--prompts full: Is a directory"),
        (("--prompts", "none"), "--prompts none: No such file"),
        (("--prompt", "x", "--device", "tpu"), "device 'tpu'"),
        (("--prompt", "x", "--speculate", "99"), "99 drafts per step: supported are 1 to 15"),
        (("--prompt", "x", "--speculate", "-1"), "-1 drafts per step: supported are 1 to 15"),
        (("--prompt", "x" * 99, "--max-model-len", "20"), "a sequence of 100 tokens exceeds max_model_len=20"),
        (("--prompt", "x", "--profile", "no/trace.json"), "name a file in an existing, writable folder"),
    ],
)
def test_generate(checkpoint, place, capsys, flags, message):
    assert message in refused(capsys, place, "generate", "--model", str(checkpoint), *flags)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("make-checkpoint --out file/new", "is a file; choose another place"),
        ("make-checkpoint --out full", "not an empty directory"),
        ("make-checkpoint --out new --shards 0", "between 1 and"),
        ("make-checkpoint --out new --config none", "no directory, JSON file or preset"),
        ("bench model --experts 1", "num_experts_per_tok 2 is above n_routed_experts 1"),
        ("bench model --batch 0", "--batch 0: numbers of at least 1"),
        ("bench layer --context 5,-1", "--context 5,-1: numbers of at least 1"),
        ("bench layer --plot no/times.svg", "--plot no/times.svg: the folder 'no' does not exist"),
        ("bench layer --plot times.doc", "--plot times.doc: it ends in none of"),
        ("train --out full", "not an empty directory"),
        ("train --out file/new", "is a file; choose another place"),
        ("train --text none", "No such file"),
        ("experiment run smoke --out full", "not an empty directory"),
        ("experiment resume smoke --out file", "not an empty directory"),
        ("experiment report smoke --out none", "no results in 'none'"),
    ],
)
def test_other_commands(place, capsys, command, message):
    assert message in refused(capsys, place, *command.split())


def test_a_file_that_cannot_be_written(checkpoint, place, capsys, monkeypatch):
    """The folder is there, and says no only at the end."""
    from safetensors import SafetensorError

    from deepseek_attn.utils import files

    def full(*arguments):
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(files, "save_file", full)
    message = refused(capsys, place, "score", "--model", str(checkpoint), *SCORE)
    assert "'o.safetensors' cannot be written: no space left on device" in message
