"""``--numerics`` and ``--index-keys`` reach what each command builds, times or predicts."""

from __future__ import annotations

import json

import pytest

from deepseek_attn.cli import main
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.runner import model_runner
from deepseek_attn.runner.ahead import compilation

TINY = ("--model", "tiny")
RUNNERS = {
    "generate": ("generate", "--token-ids", "1,2"),
    "score": ("score", "--model", str(SMALL_CHECKPOINT), "--token-ids", "FILE", "--out", "OUT"),
    "inspect": ("inspect", "--prompt", "one", "--out", "OUT"),
    "bench layer": ("bench", "layer", *TINY),
    "bench model": ("bench", "model", *TINY),
    "bench engine": ("bench", "engine", *TINY),
}


class Stop(ValueError):
    """Ends a command where a test has seen what it wanted."""


@pytest.mark.parametrize("flags", [(), ("--numerics", "official", "--index-keys", "fp8")], ids=["without", "with"])
@pytest.mark.parametrize("command", RUNNERS.values(), ids=RUNNERS)
def test_a_command_that_runs_a_model(command, flags, tmp_path, monkeypatch):
    seen = []

    def build(*args, numerics=None, index_keys=None, **options):
        seen.append((numerics, index_keys))
        raise Stop("seen")

    monkeypatch.setattr(model_runner, "build_runner", build)
    (tmp_path / "tokens.json").write_text("[[1, 2]]")
    files = {"FILE": str(tmp_path / "tokens.json"), "OUT": str(tmp_path / "out")}
    assert main([*(str(files.get(word, word)) for word in command), "--device", "cpu", *flags]) == 2
    assert seen == [("official", "fp8") if flags else (None, None)]


@pytest.mark.parametrize("given", [False, True])
def test_approximate_prefill_reaches_the_model(given, monkeypatch):
    seen = []

    def build(*args, approximate_prefill=None, **options):
        seen.append(approximate_prefill)
        raise Stop("seen")

    monkeypatch.setattr(model_runner, "build_runner", build)
    flags = ["--approximate-prefill"] if given else []
    assert main([*RUNNERS["generate"], "--device", "cpu", *flags]) == 2
    assert seen == [given]


def test_plan(capsys):
    found = {}
    for keys in ((), ("--index-keys", "fp4")):
        assert main(["plan", "--model", "v4_flash", "--numerics", "serving", "--json", *keys]) == 0
        facts = json.loads(capsys.readouterr().out)
        found[facts["numerics"]] = sum(layer["index_per_token"] for layer in facts["layers"])
    assert set(found) == {"serving", "serving (fp4 index keys)"}
    assert 0.5 < found["serving (fp4 index keys)"] / found["serving"] < 0.54  # 68 of 132 bytes, in pages


def test_warmup(monkeypatch):
    seen = []

    def start(request, jobs):
        seen.append(request.numerics.name)
        raise Stop("seen")

    monkeypatch.setattr(compilation, "Compilation", start)
    assert main(["warmup", *TINY, "--gpu", "9.0:132", "--index-keys", "fp4"]) == 2
    assert seen == ["serving (fp4 index keys)"]
