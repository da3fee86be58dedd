"""The library with nothing but what its wheel installs: every command, and the examples of the pages as printed.

``scripts/test_packages.py --part bare`` runs these tests on the wheel, in an environment without its extras.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_attn.cli import make_parser
from tests.house.test_docs import commands, subparsers

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKED = Path(__file__).parent / "blocked"
NO_POSIX = Path(__file__).parent / "no_posix"
PIPES = [line for line in README.splitlines() if re.match(r"deepseek-attn .*\| deepseek-attn ", line)]

# Commands with what the message of each says that cannot run here; "" for those that run.
COMMANDS = {
    "generate --prompt 'Once upon a time' --temperature 0 --max-tokens 3 --speculate 2 --stats": "",
    "generate --chat --prompt Hello --max-tokens 2": "",
    "generate --prompts prompts.txt --max-tokens 2 --out lines.jsonl": "",
    "make-checkpoint --out made": "",
    "crop --model made --layers 0,2 --out part": "",
    "port-check --write golden v4_moe": "",
    "score --model made --token-ids ids.json --out logits.safetensors --mtp": "",
    "inspect --prompt 'Once upon' --out page.html": "",
    "info": "",
    "info --plans tiny --gpu h100": "pip install triton",
    "plan": "",
    "plan --model v4_flash --memory 80GB --json": "",
    "plan --model v4_flash --gpu h200 --ranks 8": "pip install triton",
    "warmup --model tiny --gpu 9.0:132": "pip install triton",
    "warmup --model tiny": "pip install triton",
    "bench op": "need an NVIDIA GPU",
    "bench tune linear": "times kernels on a GPU",
    "bench layer --layers 1 --context 9 --batch 1 --repeats 1": "",
    "bench layer --plot times.svg": "pip install 'deepseek-attn[experiments]'",
    "bench model --layers 0 --context 9 --batch 1 --repeats 1": "",
    "bench engine --batch 1 --drafts 1 --prompt 4 --tokens 12 --repeats 1": "",
    "bench structured --device cpu --vocab 2000 --tokens 2": "pip install 'deepseek-attn[structured]'",
    "bench memory": "measures a GPU",
    "train --config tiny --text words.txt --steps 1 --batch 1 --seq-len 16 --mtp-steps 1": "",
    "experiment run experiment.json --out results": "",
    "experiment report experiment.json --out results": "",
}
# What only computes longer, in `make test-all` alone: other tests draw and time nothing without matplotlib.
LONG = ("bench engine", "bench model", "bench structured", "experiment", "train", "plan --model v4_flash --memory")
SMOKE = json.loads((ROOT / "configs" / "experiments" / "smoke.json").read_text(encoding="utf-8"))
EXPERIMENT = {
    **{key: SMOKE[key] for key in ("name", "title", "base", "base_changes", "device")},
    "variants": SMOKE["variants"][:2],
    "cost": {**SMOKE["cost"], "contexts": [64, 128], "repeats": 1, "prefill": 8},
}
PLACEHOLDER = re.compile(r"/path/to|org/|deepseek-ai/|\bFILE\b|\bN\b|\|")
PRINTED = [words[1:] for words in commands(README, "deepseek-attn ") if len(words) > 2]
PRINTED = [words for words in PRINTED if not any(map(PLACEHOLDER.search, words))]
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

RUN_ALL = """
import contextlib, io, json, sys, traceback
from deepseek_attn.cli import main

for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([code, err.getvalue()]), flush=True)
"""


def run(folder: Path, *arguments: str, first: Path = BLOCKED, shell: bool = False) -> str:
    """Standard output of a Python process, or a shell, that finds no optional package; fails if the process does."""
    paths = [str(first), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "-o", "pipefail", "-c"] if shell else [sys.executable]
    result = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def test_optional_packages_are_not_found(tmp_path):
    code = "import importlib.util as u; print(*(u.find_spec(n) for n in ('triton', 'transformers', 'matplotlib')))"
    assert run(tmp_path, "-c", code).split() == ["None"] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("everything", [False, True], ids=["quick", "all"])
def test_every_command(tmp_path, everything):
    """Each in the given order, in one process; with ``everything`` those of README too, as printed."""
    (tmp_path / "prompts.txt").write_text("It is\nShe was\n")
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    (tmp_path / "words.txt").write_text("one two three four five six seven eight nine ten " * 99)
    (tmp_path / "experiment.json").write_text(json.dumps(EXPERIMENT))
    lines = COMMANDS if everything else [line for line in COMMANDS if not line.startswith(LONG)]
    wanted = {tuple(shlex.split(line)): COMMANDS[line] for line in lines}
    if everything:
        wanted |= {tuple(words): "" for words in PRINTED}
    lines = run(tmp_path, "-c", RUN_ALL, json.dumps([list(words) for words in wanted])).splitlines()
    problems = []
    for (words, message), line in zip(wanted.items(), lines, strict=True):
        code, error = json.loads(line)
        right = code == 0 if not message else code == 2 and message in error and error.count("\n") == 1
        if not right:
            problems.append(f"deepseek-attn {shlex.join(words)}: {code}\n{error}")
    assert not problems, "\n".join(problems)
    assert (tmp_path / "page.html").exists()


def test_no_command_is_forgotten():
    """Of the parser, and of README."""
    parsers = subparsers(make_parser())
    known = {(name, part) for name, parser in parsers.items() for part in subparsers(parser) or ("",)}
    run = {
        tuple(line.split()[:2]) if subparsers(parsers[line.split()[0]]) else (line.split()[0], "") for line in COMMANDS
    }
    assert known - run <= {("experiment", "resume")}  # as `run`, of a folder that is there
    assert [words[0] for words in PRINTED] == ["generate", "plan"]
    assert len(PIPES) == 1


@pytest.mark.exhaustive
def test_pipes_of_readme(tmp_path):
    """The text is long enough for indexers to select."""
    [line] = PIPES
    run(tmp_path, line.replace("deepseek-attn", f"{shlex.quote(sys.executable)} -m deepseek_attn"), shell=True)
    layers = json.loads((tmp_path / "page.json").read_text())["layers"]
    assert any(layer["index"] for layer in layers)


@pytest.mark.exhaustive
def test_a_system_without_posix(tmp_path):
    """Text, plans and layers work; what needs limits of another process is refused, in one message."""
    wanted = [
        "generate --prompt x --max-tokens 2", "generate --chat --prompt x --max-tokens 2", "plan --model tiny", "info",
        "bench layer --layers 1 --context 9 --batch 1 --repeats 1",
    ]  # fmt: skip
    render = """
from deepseek_attn.text.template_process import render_untrusted
try:
    render_untrusted("", [])
except Exception as error:
    print(error)
"""
    lines = run(tmp_path, "-c", RUN_ALL + render, json.dumps([line.split() for line in wanted]), first=NO_POSIX)
    *lines, refused = lines.splitlines()
    assert [json.loads(line)[0] for line in lines] == [0] * len(wanted), "\n".join(lines)
    assert "this system cannot limit the time and memory" in refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_examples_of_readme(code, tmp_path):
    """Each as printed; the one that compares with transformers' layer says that it needs transformers."""
    if "testing.transformers_layer" not in code:
        run(tmp_path, "-c", code)
    else:
        before = README[: README.index(code)]
        assert "pip install transformers" in before[before.rindex("###") :]
        with pytest.raises(AssertionError, match="pip install transformers"):
            run(tmp_path, "-c", code)


@pytest.mark.exhaustive
def test_example_of_a_layer_test(tmp_path):
    """docs/testing.md's two files, in a folder of their own."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# conftest.py" in code]
    for name, text in re.findall(r"^# (\w+\.py)\n(.*?)(?=^# \w+\.py|\Z)", code, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert "1 passed" in run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", ".")
