"""What commands write: whole or not at all on a full disk, behind links, to devices, and to a reader that is gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from tests.support.tiers import tiered

SCORE = "score --model model --device cpu --token-ids ids.json --out"
GENERATE = "generate --model model --device cpu --prompt x --max-tokens 2 --profile"
BENCH = "bench layer --model config.json --device cpu --batch 1 --context 64 --repeats 1 --plot"
TRAIN = (
    "train --config config.json --device cpu --text text.txt --steps 1 --batch 1 --seq-len 4 --mtp-steps 1 "
    "--mtp-depth 1 --out"
)
COMMANDS = {
    "score": f"{SCORE} logits",
    "inspect": "inspect --model model --device cpu --token-ids 5,6,7 --out page.html",
    "trace": f"{GENERATE} trace.json",
    "trace.gz": f"{GENERATE} trace.json.gz",
    "plot": f"{BENCH} times.svg",
    "checkpoint": "make-checkpoint --config config.json --out new",
    "train": f"{TRAIN} trained",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    config = ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=1, compress_ratios=[0, 0], num_hash_layers=0, n_routed_experts=2
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    assert main(["make-checkpoint", "--config", str(folder / "config.json"), "--out", str(folder / "model")]) == 0
    (folder / "ids.json").write_text("[[1, 2, 3]]")
    (folder / "text.txt").write_text("the quick brown fox " * 100)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    before = set(folder.iterdir())
    monkeypatch.chdir(folder)
    yield folder
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def disk_that_is_full_after(num_bytes: int):
    """No file can be longer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", tiered([0, 1, 9, 100, 3000, 5000], [100, 5000]))
@pytest.mark.parametrize("name", tiered(COMMANDS, ["score", "inspect", "trace", "trace.gz", "checkpoint"]))
def test_full_disk(here, capsys, name, num_bytes):
    command = COMMANDS[name].split()
    path = here / command[-1]
    if name not in ("checkpoint", "train"):
        path.write_text("old")
    before = sorted(here.iterdir())
    with disk_that_is_full_after(num_bytes):
        assert main(command) == 2
    written = [command[-1], f"{command[-1]}.training-state"] if name == "train" else [command[-1]]
    err = capsys.readouterr().err
    assert any(f"error: {name!r} cannot be written: " in err for name in written), err
    assert sorted(here.iterdir()) == before
    assert not path.exists() or path.read_text() == "old"


def test_a_training_that_cannot_save_its_state_leaves_no_folder(here):
    before = sorted(here.iterdir())
    with disk_that_is_full_after(100):
        assert main([*COMMANDS["train"].split()[:-1], "made/deep/trained"]) == 2
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("name", tiered(["score", "trace", "plot"], ["score"]))
def test_links_and_devices(here, name):
    *command, out = COMMANDS[name].split()
    (here / "elsewhere").mkdir()
    link = here / f"link_{out}"
    link.symlink_to(f"elsewhere/{out}")
    assert main([*command, link.name]) == 0
    assert link.is_symlink()
    assert (here / "elsewhere" / out).stat().st_size
    link.unlink()
    link.symlink_to("/dev/null")
    assert main([*command, link.name]) == 0
    assert link.is_symlink()


def test_make_checkpoint_follows_a_link(here):
    (here / "new").symlink_to("elsewhere")
    assert main(COMMANDS["checkpoint"].split()) == 0
    assert (here / "new").is_symlink()
    assert (here / "elsewhere" / "config.json").is_file()


def test_the_facts_of_a_training_come_with_its_checkpoint(here, capsys):
    assert main(COMMANDS["train"].split()) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((here / "trained" / "training.json").read_text()) == printed


def test_score_leaves_one_file(here):
    assert main(COMMANDS["score"].split()) == 0
    assert load_file("logits")["0"].shape[0] == 3
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_inspect_leaves_a_page_and_its_numbers(here, capsys):
    assert main([*COMMANDS["inspect"].split(), "--queries=0,-1", "--layers", "0"]) == 0
    assert "2 of 3 tokens, 1 layers -> page.html, page.json" in capsys.readouterr().out
    found = json.loads((here / "page.json").read_text())
    assert [query["position"] for query in found["queries"]] == [0, 2]
    assert len(found["text"]) == len(found["token_ids"]) == 3
    page = (here / "page.html").read_text()
    assert json.loads(page.split('id="data">')[1].split("</script>")[0]) == found
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def stdout_to(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(os.fdopen(descriptor, "wb"), encoding="utf-8")


@pytest.mark.parametrize(
    "command", tiered(["plan --model tiny --json", "info", f"{SCORE} logits", "--help"], ["plan --model tiny --json"])
)
def test_standard_output_that_is_full(here, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdout", stdout_to(os.open("/dev/full", os.O_WRONLY)))
    assert main(command.split()) == 2
    assert "No space left on device" in capsys.readouterr().err
    sys.stdout.flush()  # does not fail once more, as at the end of the process


@pytest.mark.parametrize(
    "command",
    tiered(["plan --model tiny", "generate --model model --device cpu --prompt x"], ["plan --model tiny"]),
)
def test_a_reader_that_is_gone(here, capsys, monkeypatch, command):
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setattr(sys, "stdout", stdout_to(theirs))
    assert main(command.split()) == 141
    assert capsys.readouterr().err == ""
    sys.stdout.flush()


def test_without_standard_output(here, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(COMMANDS["score"].split()) == 0
    assert load_file("logits")["0"].shape[0] == 3


def test_a_json_that_nobody_named_replaces_that_of_an_inspection_alone(here, capsys):
    command = [
        "inspect",
        "--model",
        "model",
        "--device",
        "cpu",
        "--token-ids",
        "1,2,3",
        "--queries",
        "0",
        "--layers",
        "0",
        "--out",
    ]
    config = (here / "model" / "config.json").read_bytes()
    assert main([*command, "model/config.html"]) == 2
    assert "config.json' exists and was not written by `deepseek-attn inspect`" in capsys.readouterr().err
    assert (here / "model" / "config.json").read_bytes() == config
    assert not (here / "model" / "config.html").exists()
    for _ in range(2):
        assert main([*command, "twice.html"]) == 0
    assert (here / "twice.json").is_file()


CLOSED = """import os, sys
for number in map(int, sys.argv.pop(1).split(",")):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "deepseek_attn", *sys.argv[1:]])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("closed", ["1", "2", "0,1,2"])
def test_standard_streams_that_are_closed(tmp_path, closed):
    """What goes to them is lost; the other outputs, and the exit status, are as ever."""
    (tmp_path / "prompts").write_text("It is\nShe was\n")
    command = ["generate", "--prompts", "prompts", "--max-tokens", "1", "--stats"]
    command += [] if closed == "2" else ["--out", "lines"]
    result = subprocess.run(
        [sys.executable, "-c", CLOSED, closed, *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout if closed == "2" else (tmp_path / "lines").read_text()
    assert [json.loads(line)["index"] for line in lines.splitlines()] == [0, 1]
    assert ("2 tokens in" in result.stderr) == (closed == "1")


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "--version", "plan --help"])
def test_help_that_cannot_be_written(command, buffered):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "deepseek_attn", *command.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert result.returncode == 2
    message = "error: standard output, or another open file, cannot be written: No space left on device\n"
    assert result.stderr.endswith(message)
    assert result.stderr.count("\n") == 1
