"""The command line as a user meets it: results on disk, and one clear message for each wrong input."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deepseek_attn
from deepseek_attn import ModelConfig, ModelRunner
from deepseek_attn.cli import main
from deepseek_attn.cli.options import parse_bytes
from deepseek_attn.runner import TokenRecords
from tests.support.exit_codes import exit_code
from tests.support.small_models import two_layers
from tests.support.typed import required

IMPORTS = """
import gc, sys
from deepseek_attn.cli import make_parser
from deepseek_attn.cli.ranks import joined_ranks
args, collections = make_parser().parse_args(["generate"]), []
gc.callbacks.append(lambda phase, _: collections.append(phase))
assert "torch" not in sys.modules
with joined_ranks(args):
    assert "torch" in sys.modules and gc.isenabled()
    print(len(collections))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Made by the command line itself, from a config file."""
    folder = tmp_path_factory.mktemp("cli")
    config = two_layers()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    directory = folder / "model"
    assert (
        main(["make-checkpoint", "--config", str(folder / "config.json"), "--out", str(directory), "--seed", "5"]) == 0
    )
    return directory


def token_file(tmp_path, lists):
    path = tmp_path / "tokens.json"
    path.write_text(lists if isinstance(lists, str) else json.dumps(lists))
    return path


def score(checkpoint, tmp_path, lists, *flags):
    out = tmp_path / "logits.safetensors"
    code = main(
        ["score", "--model", str(checkpoint), "--token-ids", str(token_file(tmp_path, lists)), "--out", str(out)]
        + ["--device", "cpu", "--numerics", "exact", "--dtype", "float32", *flags]
    )
    return code, out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --temperatur 0", "unrecognized arguments: --temperatur 0; did you mean --temperature instead"),
        ("generate --temp=0", "unrecognized arguments: --temp=0; did you mean --temperature instead of --temp?"),
        ("generate --max_tokens 9", "did you mean --max-tokens instead of --max_tokens?"),
        ("bench engine --draft 2", "did you mean --drafts instead of --draft?"),
        ("score --token_ids f --out o", "required: --model, --token-ids; did you mean --token-ids instead of"),
        ("generate --n 2 --s 1", "did you mean --system or --seed or --stop or --stop-token-id or --speculate or --s"),
        ("generate --gpu-memory-utilization 0.9", "unrecognized arguments: --gpu-memory-utilization 0.9\n"),
        ("--vers", "required: COMMAND; did you mean --version instead of --vers?"),
    ],
)
def test_flags_are_written_out_and_others_name_the_nearest(command, message, capsys):
    assert exit_code(main, command.split()) == 2
    assert message in capsys.readouterr().err


def test_make_checkpoint_has_everything(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert sum(name.endswith(".safetensors") for name in names) >= 2


def test_score_writes_the_logits_of_each_list(checkpoint, tmp_path):
    lists = [torch.randint(300, (n,)).tolist() for n in (7, 1, 150)]
    code, out = score(checkpoint, tmp_path, lists, "--mtp", "--chunk-size", "33")
    assert code == 0
    tensors = load_file(out)
    assert set(tensors) == {"0", "1", "2", "0.mtp", "1.mtp", "2.mtp"}
    logits, drafts = ModelRunner.from_pretrained(checkpoint, device="cpu", progress=False).score_mtp(lists, 33)
    for i in range(3):
        assert tensors[str(i)].dtype == torch.float32
        assert torch.equal(tensors[str(i)], logits[i])
        assert torch.equal(tensors[f"{i}.mtp"], drafts[i])
        assert tensors[f"{i}.mtp"].shape == (len(lists[i]) - 1, 512)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_score_writes_log_probabilities(checkpoint, tmp_path):
    lists = [torch.randint(300, (n,)).tolist() for n in (7, 1, 50)]
    code, out = score(checkpoint, tmp_path, lists, "--logprobs", "3", "--chunk-size", "33")
    assert code == 0
    tensors = load_file(out)
    logits = ModelRunner.from_pretrained(checkpoint, device="cpu", progress=False).score(lists, 33)
    assert set(tensors) == {
        f"{i}.{name}" for i in range(3) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
    }
    for i, (ids, rows) in enumerate(zip(lists, logits, strict=True)):
        log_softmax, own = rows[:-1].double().log_softmax(1), torch.tensor(ids[1:], dtype=torch.int64)[:, None]
        assert tensors[f"{i}.ranks"].shape == (len(ids) - 1,)
        torch.testing.assert_close(tensors[f"{i}.logprobs"], log_softmax.gather(1, own)[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(tensors[f"{i}.top_logprobs"], log_softmax.topk(3).values, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--logprobs", "-1"), "--logprobs"), (("--logprobs", "1", "--mtp"), "give one of them")],
)
def test_wrong_flags_for_log_probabilities(checkpoint, tmp_path, capsys, flags, message):
    code, out = score(checkpoint, tmp_path, [[1, 2]], *flags)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_scores_with_the_records_of_another_run(checkpoint, tmp_path):
    """Records change the logits of other weights' choices, and none of their own."""
    lists, records = [[*range(200, 290)], [4, 9]], str(tmp_path / "records")
    code, out = score(checkpoint, tmp_path, lists, "--records", records)
    assert code == 0
    own = load_file(out)
    changed = TokenRecords.load(f"{records}/0.safetensors")
    required(changed.experts).copy_(
        (required(changed.experts) + 1) % ModelConfig.from_pretrained(checkpoint).n_routed_experts
    )
    code, out = score(checkpoint, tmp_path, lists, "--replay", records)
    assert code == 0
    again = load_file(out)
    assert own
    assert all(torch.equal(own[name], again[name]) for name in own)
    changed.save(f"{records}/0.safetensors")
    code, out = score(checkpoint, tmp_path, lists, "--replay", records)
    assert code == 0
    other = load_file(out)
    assert not torch.equal(own["0"], other["0"])
    assert torch.equal(own["1"], other["1"])


def test_deterministic_scores_in_any_chunks(checkpoint, tmp_path):
    found = []
    for size in ("7", "2"):
        code, out = score(checkpoint, tmp_path, [[0, 5, 7, 9, 3, 1, 8], [4]], "--deterministic", "--chunk-size", size)
        assert code == 0
        found.append(out.read_bytes())
        out.unlink()
    assert found[0] == found[1]


def test_score_of_some_layers(checkpoint, tmp_path):
    code, out = score(checkpoint, tmp_path, [[0, 5, 9]], "--layers", "1")
    assert code == 0
    runner = ModelRunner.from_pretrained(checkpoint, device="cpu", layers=[1], progress=False)
    assert torch.equal(load_file(out)["0"], runner.score([[0, 5, 9]])[0])


def test_generate_streams_to_standard_output(checkpoint, capsys):
    args = ["generate", "--model", str(checkpoint), "--prompt", "abc", "--temperature", "0", "--max-tokens", "9"]
    assert main(args) == 0
    first = capsys.readouterr().out
    assert main(args) == 0
    assert capsys.readouterr().out == first
    assert first.endswith("\n")


def test_generate_from_standard_input_and_chat(checkpoint, capsys, monkeypatch):
    flags = ["generate", "--model", str(checkpoint), "--temperature", "0", "--max-tokens", "5", "--chat"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi there"), encoding="utf-8"))
    assert main(flags) == 0
    piped = capsys.readouterr()
    assert "chat: built-in" in piped.err
    assert main([*flags, "--prompt", "hi there"]) == 0
    assert capsys.readouterr().out == piped.out


def test_info_json_names_every_backend_with_a_reason(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(facts["packages"]["torch"])
    assert facts["packages"]["deepseek-attn"] == deepseek_attn.__version__
    assert {"reference"} <= {backend["name"] for backend in facts["backends"]}
    assert {"flashmla", "reference", "flashinfer"} <= {backend["name"] for backend in facts["v32_backends"]}
    assert all(backend["reason"] for backend in facts["backends"] + facts["v32_backends"])
    assert {backend["backend"] for backend in facts["v32_backends"]} == {"FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"}
    assert main(["info"]) == 0
    assert "reference" in capsys.readouterr().out


def test_version(capsys):
    """pyproject.toml takes the version from the same place."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"deepseek-attn {deepseek_attn.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    module, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == deepseek_attn.__version__


def test_plan_reports_what_is_allocated(checkpoint, capsys):
    limits = ["--max-model-len", "777", "--max-num-seqs", "2", "--max-num-batched-tokens", "130"]
    args = ["plan", "--model", str(checkpoint), "--numerics", "official", "--dtype", "bfloat16", *limits, "--json"]
    assert main([*args, "--memory", "1GB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    runner = ModelRunner.from_pretrained(
        checkpoint, device="cpu", numerics="official", dtype="bfloat16", progress=False,
        max_model_len=777, max_num_seqs=2, max_num_batched_tokens=130,
    )  # fmt: skip
    assert facts["caches"] == runner.pools.nbytes()
    assert facts["sequences_that_fit"] > 2
    assert main(args[:-1]) == 0
    assert f"{facts['caches']:,} B" in capsys.readouterr().out


def break_shard(directory):
    shard = max(directory.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 3)


def break_json(directory):
    (directory / "config.json").write_text('{"model_type": ')


def break_model_type(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(break_shard, "truncated"), (break_json, "line 1"), (break_model_type, "llama")],
    ids=["truncated-shard", "broken-json", "unknown-model-type"],
)
def test_damaged_checkpoints(checkpoint, tmp_path, capsys, damage, message):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    damage(copy)
    code, out = score(copy, tmp_path, [[0, 1]])
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


NESTED = b"[" * 100_000


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "shard", "tokenizer_config.json"])
def test_json_without_end_in_a_checkpoint(checkpoint, tmp_path, capsys, file):
    for path in checkpoint.iterdir():
        os.link(path, tmp_path / path.name)
    data = NESTED
    if file == "shard":
        file, data = "model-00001-of-00002.safetensors", len(NESTED).to_bytes(8, "little") + NESTED
    (tmp_path / file).unlink()
    (tmp_path / file).write_bytes(data)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("deepseek-attn generate: error: ")
    assert file in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [["plan", "--model"], ["make-checkpoint", "--out", "out", "--config"], ["experiment", "run", "--out", "out"]],
    ids=lambda command: command[0],
)
def test_json_without_end(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nested.json").write_bytes(NESTED)
    assert main([*command, "nested.json"]) == 2
    assert "nested.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lists", "flags", "message"),
    [
        ("[[0, 1", [], "not valid JSON"),
        ("[" * 100_000, [], "more than 64 objects or lists"),
        ([], [], "non-empty list"),
        ([[0], []], [], "list 1: it is empty"),
        ([[0, "a"]], [], "'a' is not an integer"),
        ([[0, 512]], [], "token id 512"),
        ([[0, -1]], [], "token id -1"),
        ([[0] * 60], ["--max-model-len", "50"], "60 tokens exceeds max_model_len=50"),
        ([[0]], ["--chunk-size", "0"], "--chunk-size 0"),
        ([[0]], ["--layers", "1", "--mtp"], "--mtp needs the whole model"),
        ([[0]], ["--layers", "3"], "layers [3] do not exist"),
        ([[0]], ["--backend", "magic"], "unknown backend 'magic'"),
        ([[0]], ["--deterministic", "--fp8-mode", "separate"], "deterministic=True cannot be kept with"),
        ([[0]], ["--max-num-seqs", "0"], "--max-num-seqs 0: must be at least 1"),
        ([[0]], ["--max-model-len", "5000"], "exceeds the model's 4096"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_wrong_score_input(checkpoint, tmp_path, capsys, lists, flags, message):
    code, out = score(checkpoint, tmp_path, lists, *flags)
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.startswith("deepseek-attn score: error: ")
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/does/not/exist", "--prompt", "x"], "does not exist"),
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "x", "--thinking"], "--thinking needs --chat"),
        (["--prompt", "x", "--allow-special"], "--allow-special needs --chat"),
        (["--token-ids", "1,2", "--chat"], "--chat takes text"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_wrong_generate_input(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["generate", *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_checkpoint(tmp_path, capsys):
    path = token_file(tmp_path, [[0]])
    assert main(["score", "--model", str(path), "--token-ids", str(path), "--out", str(tmp_path / "o")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_make_checkpoint_refuses_a_full_directory(checkpoint, capsys):
    before = sorted(path.name for path in checkpoint.iterdir())
    assert main(["make-checkpoint", "--out", str(checkpoint)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    assert sorted(path.name for path in checkpoint.iterdir()) == before


def test_plan_with_a_budget_and_snapshots(capsys):
    flags = ["--model", "tiny", "--max-model-len", "1000", "--kv-cache-bytes", "40MB", "--max-snapshots", "3"]
    assert main(["plan", *flags, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 39e6 < facts["caches"] <= 40e6
    assert facts["capacity"] > 1000
    assert facts["snapshots"] > 0
    assert main(["plan", *flags]) == 0
    assert "tokens that the caches hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-bytes", "1MB"], "kv_cache_bytes=1000000 is too little"),
        (["--max-snapshots", "-1"], "--max-snapshots -1: must be 0 to 1048576"),
    ],
)
def test_wrong_plan_input(flags, message, capsys):
    assert main(["plan", "--model", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_amount_of_memory_that_is_none(capsys):
    with pytest.raises(SystemExit) as error:
        main(["plan", "--kv-cache-bytes", "lots"])
    assert error.value.code == 2
    assert "is not an amount of memory" in capsys.readouterr().err


def test_unknown_flags_exit_with_2():
    with pytest.raises(SystemExit) as error:
        main(["score", "--modle", "x"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("text", "count"), [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("141e9", 141 * 10**9), ("1.5k", 1500), ("7", 7)]
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "3 apples", "-1GB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="not an amount of memory"):
        parse_bytes(text)


@pytest.mark.exhaustive
def test_torch_is_imported_without_collections():
    """They would be hundreds, 0.2 s."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 20
