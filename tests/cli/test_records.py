"""``generate --records`` and ``--replay``: files of what layers chose, whole or not there, and the text from them."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import main
from deepseek_attn.cli.batch import PromptBatch
from deepseek_attn.runner import ModelRunner, TokenRecords
from deepseek_attn.runner.record_store import RecordStore
from tests.support.small_models import two_layers
from tests.support.tiers import tiered
from tests.support.typed import required

OPTIONS = ["--device", "cpu", "--max-model-len", "120", "--max-num-seqs", "2", "--max-tokens", "6", "--ignore-eos"]
IDS = list(range(40, 70))
PROMPTS = [IDS, [44, 45], [9999], IDS[3:9]]  # the third is wrong


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = two_layers()
    return str(write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def run(checkpoint, tmp_path, monkeypatch):
    """Runs the command greedily in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_text("\n".join(map(json.dumps, PROMPTS)))

    def command(*flags: str) -> int:
        return main(["generate", "--model", checkpoint, *OPTIONS, "--temperature", "0", *flags])

    return command


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Completions with records in memory."""
    with LLM(checkpoint, device="cpu", max_model_len=120, max_num_seqs=2, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        good = [prompt for prompt in PROMPTS if prompt != [9999]]
        return llm.generate(good, params, return_routes=True, return_selections=True)


def ids(prompt: list[int]) -> list[str]:
    return ["--token-ids", ",".join(map(str, prompt))]


def assert_same(path: str, records: TokenRecords) -> None:
    found = TokenRecords.load(path)
    assert found.layers == records.layers
    assert found.arrays.keys() == records.arrays.keys() == {"token_ids", "experts", "expert_weights", "selections"}
    for name in ("token_ids", "experts", "selections"):
        assert torch.equal(found.arrays[name], records.arrays[name])


def test_one_prompt_to_a_file_and_back(run, expected, capsys):
    assert run(*ids(IDS), "--records", "run.safetensors") == 0
    shown = capsys.readouterr()
    assert shown.out.removesuffix("\n") == expected[0].text
    assert shown.err.splitlines()[-1] == f"records of {len(IDS) + 5} tokens -> run.safetensors"
    assert_same("run.safetensors", expected[0].records)
    assert sorted(path.name for path in Path().iterdir()) == ["prompts", "run.safetensors"]
    assert run(*ids(IDS), "--replay", "run.safetensors") == 0
    assert capsys.readouterr().out.removesuffix("\n") == expected[0].text
    changed = TokenRecords.load("run.safetensors")
    required(changed.experts).copy_((required(changed.experts) + 1) % 8)
    changed.save("other.safetensors")
    assert run(*ids(IDS), "--replay", "other.safetensors", "--records", "again.safetensors") == 0
    assert capsys.readouterr().out.removesuffix("\n") != expected[0].text
    assert torch.equal(
        required(TokenRecords.load("again.safetensors").experts)[: len(IDS)], required(changed.experts)[: len(IDS)]
    )


def test_completions_of_a_prompt_to_a_folder(run, expected):
    assert run(*ids(IDS), "--records", "runs", "--n", "2", "--temperature", "1", "--seed", "1") == 0
    first, second = (TokenRecords.load(f"runs/{name}.safetensors") for name in ("0", "0-1"))
    assert len(first) == len(second) == len(IDS) + 5
    assert not torch.equal(required(first.token_ids), required(second.token_ids))
    assert torch.equal(required(first.experts)[: len(IDS)], expected[0].records.experts[: len(IDS)])


def test_prompts_have_a_file_each(run, expected):
    batch = ["--prompts", "prompts", "--out", "out"]
    assert run(*batch, "--records", "runs") == 1
    assert sorted(path.name for path in Path("runs").iterdir()) == [f"{i}.safetensors" for i in (0, 1, 3)]
    for index, completion in zip((0, 1, 3), expected, strict=True):
        assert_same(f"runs/{index}.safetensors", completion.records)
    Path("runs/3.safetensors").unlink()
    assert run("--prompts", "prompts", "--out", "again", "--replay", "runs") == 1
    lines = {line["index"]: line for line in map(json.loads, Path("again").read_text().splitlines())}
    assert lines[0]["token_ids"] == expected[0].token_ids
    assert "3.safetensors' cannot be read as records" in lines[3]["error"]


@pytest.mark.parametrize("stage", ["load", "rows", "file"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")], ids=["ctrl-c", "error"])
def test_score_leaves_all_records_or_none(checkpoint, tmp_path, monkeypatch, capsys, stage, error):
    """Neither a folder without files, nor the records of some lists; files that were there stay."""
    monkeypatch.chdir(tmp_path)
    Path("lists").write_text("[[1, 2, 3], [4, 5]]")
    command = ["score", "--model", checkpoint, "--device", "cpu", "--token-ids", "lists", "--out", "logits"]
    owners = {"load": (ModelRunner, "record_options", 0), "rows": (RecordStore, "put", 1)}
    owner, name, calls = owners.get(stage, (RecordStore, "finish", 1))
    call, left = getattr(owner, name), iter(range(calls))

    def interrupted(*args, **kwargs):
        if next(left, None) is None:
            raise error
        return call(*args, **kwargs)

    for folder in ("new/runs", "old"):
        left = iter(range(calls))
        Path("old").mkdir(exist_ok=True)
        for i in range(2):
            Path(f"old/{i}.safetensors").write_text("old")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            assert main([*command, "--records", folder]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
        assert sorted(str(path) for path in Path().rglob("*")) == [
            "lists",
            "old",
            *(f"old/{i}.safetensors" for i in "01"),
        ]
        assert {path.read_text() for path in Path("old").iterdir()} == {"old"}
        assert main([*command, "--records", folder]) == 0
        assert [len(TokenRecords.load(f"{folder}/{i}.safetensors")) for i in range(2)] == [3, 2]
        assert len(list(Path(folder).iterdir())) == 2
        shutil.rmtree(folder.split("/")[0])
        Path("logits").unlink()


def test_score_records_more_lists_than_files_can_be_open(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lists").write_text(json.dumps([[20 + i, 3] for i in range(40)]))
    command = ["score", "--model", checkpoint, "--device", "cpu", "--token-ids", "lists", "--out", "logits"]
    assert main([*command, "--records", "first"]) == 0  # everything is imported
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, before[1]))
    try:
        assert main([*command, "--records", "runs"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for i in range(40):
        assert required(TokenRecords.load(f"runs/{i}.safetensors").token_ids).tolist() == [20 + i, 3]


@pytest.mark.parametrize("stage", tiered(["line", "rows", "file"], ["rows"]))
def test_after_an_interruption_every_line_has_its_file(run, monkeypatch, stage, capsys):
    """Ctrl-C when a line is written, when rows are stored, and when a file is complete: no part of a file is left."""
    batch = ["--prompts", "prompts", "--out", "out", "--records", "runs"]
    owner, name = {"line": (PromptBatch, "write"), "rows": (RecordStore, "put"), "file": (RecordStore, "finish")}[stage]
    call, left = getattr(owner, name), iter(range(2))

    def interrupted(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert run(*batch) == 130
    written = Path("out").read_text().splitlines() if Path("out").exists() else []
    lines = [json.loads(line)["index"] for line in written]
    files = sorted(path.name for path in Path("runs").iterdir()) if Path("runs").exists() else []
    assert files or not Path("runs").exists(), "an empty folder is left"
    assert all(TokenRecords.load(f"runs/{name}") for name in files)
    assert len(lines) < len(PROMPTS)
    assert {f"{index}.safetensors" for index in lines if index != 2} <= set(files)
    assert run(*batch, "--resume") == 1
    assert sorted(path.name for path in Path("runs").iterdir()) == [f"{i}.safetensors" for i in (0, 1, 3)]
    assert len(Path("out").read_text().splitlines()) == len(PROMPTS)


def test_lines_without_records_are_not_taken_for_recorded_ones(run, capsys):
    batch = ["--prompts", "prompts", "--out", "out", "--resume"]
    assert run(*batch) == 1
    assert run(*batch, "--records", "runs") == 2
    assert "out has a line of prompt 0, and runs has no records of it" in capsys.readouterr().err
    assert not Path("runs").exists()
    Path("runs").mkdir()
    assert run(*batch, "--replay", "runs") == 2
    assert "was made with other flags for chat, sampling or --replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replay", "nowhere"], "--replay nowhere: no such file or folder: write it with --records"),
        (["--replay", "prompts"], "'prompts' cannot be read as records (safetensors)"),
        (
            ["--records", "no/run.safetensors"],
            "--records no/run.safetensors: the folder 'no' does not exist; name a file",
        ),
        (["--records", "prompts"], "the folder 'prompts' cannot be made: File exists"),
        (
            ["--records", "x.safetensors", "--n", "2", "--temperature", "1"],
            "a file is for one completion of one prompt",
        ),
    ],
    ids=str,
)
def test_wrong_input_is_named_and_leaves_nothing(run, capsys, flags, message):
    assert run(*ids(IDS), *flags) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["prompts"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--records", "x.safetensors"], "a file is for one completion of one prompt: name a folder"),
        (["--replay", "prompts"], "--prompts needs a folder, with i.safetensors for prompt i"),
    ],
)
def test_several_prompts_need_a_folder(run, capsys, flags, message):
    assert run("--prompts", "prompts", *flags) == 2
    assert message in capsys.readouterr().err


def test_records_of_a_file_are_of_one_completion(checkpoint, tmp_path):
    with LLM(checkpoint, device="cpu", max_model_len=120, progress=False) as llm:
        with pytest.raises(ValueError, match="one completion of one prompt: pass record_dir"):
            llm.generate([[40], [41]], return_routes=True, record_file=tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match="record_dir beside record_file"):
            llm.generate([40], return_routes=True, record_file=tmp_path / "x", record_dir=tmp_path)
        with pytest.raises(ValueError, match="record_dir or record_file without anything to record"):
            llm.generate([40], record_file=tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
