"""Results that move: records name the files that they were made from, and count wherever these lie."""

import json

import pytest

from deepseek_attn.lab.experiments.define.config import read_experiment
from deepseek_attn.lab.experiments.define.files import ENDS, digest_of
from deepseek_attn.lab.experiments.define.units import make_units
from deepseek_attn.lab.experiments.run.records import read_record, record_path, recorded_device, write_record

RESULTS = {
    "tokens": {"tokens": 3, "vocab_size": 8},
    "train": {
        "metrics": {"loss": 1.0, "accuracy": 0.5},
        "by_length": [{"seq_len": 8, "loss": 1.0, "accuracy": 0.5, "trailing": None, "chance": None}],
        **dict.fromkeys(("steps", "parameters", "answers", "train_seconds", "tokens_per_second"), 1),
        **{name: [] for name in ("losses", "by_distance", "by_depth", "by_position", "layers")},
    },
}


def experiment(folder, **checkpoint):
    """An experiment with a text and a checkpoint of its own in ``folder``, named by absolute paths."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(bytes(3 * ENDS))
    (folder / "mine.txt").write_text("one two three")
    return read(folder, **checkpoint)


def read(folder, **checkpoint):
    raw = {
        "base": "tiny", "variants": [{"schedule": "0*"}],
        "train": {"tasks": {"text": {"steps": 1}}, "batch": 1, "seq_len": 8, "lengths": [1],
                  "text": str(folder / "mine.txt")},
        "checkpoint": {"model": str(folder / "model"), "text": str(folder / "mine.txt"), **checkpoint},
    }  # fmt: skip
    return read_experiment(raw, "mine", folder)


def done(experiment, results, device="cpu"):
    """Paths of the units that have a record."""
    return {unit.path for unit in make_units(experiment, device) if read_record(results, unit)}


@pytest.fixture
def moved(tmp_path):
    """(folder of the experiment, results, paths of all units); all were measured, on the second GPU, elsewhere."""
    units = make_units(experiment(tmp_path / "there"), "cuda:1")
    for unit in units:
        write_record(tmp_path / "results", unit, RESULTS.get(unit.kind, {}), 1.0)
    experiment(tmp_path / "here")
    return tmp_path / "here", tmp_path / "results", {unit.path for unit in units}


def test_records_hold_no_path_and_count_in_another_place(moved, tmp_path):
    folder, results, units = moved
    for path in (results / "records").rglob("*.json"):
        assert str(tmp_path) not in path.read_text()
    assert len(units) == 4
    assert done(read(folder), results, "cuda") == units
    assert done(read(folder), results, "cpu") == {"text/text"}
    assert recorded_device(results) == "cuda"
    assert recorded_device(tmp_path) is None


def test_the_librarys_own_checkpoint_counts_wherever_it_is_installed(tmp_path, monkeypatch):
    unit = make_units(read(tmp_path, model=None, text=None), "cpu")[0]
    assert unit.path == "checkpoint/own"
    assert unit.inputs["model"] == "small"
    assert list(unit.files) == ["model"]
    assert "/" not in json.dumps(dict(unit.inputs))


def test_a_file_that_has_changed_is_measured_again(moved):
    folder, results, units = moved
    (folder / "mine.txt").write_text("one two four")
    assert done(read(folder), results, "cuda") == set()
    (folder / "mine.txt").write_text("one two three")
    with (folder / "model" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"1")
    assert done(read(folder), results, "cuda") == units - {"checkpoint/own", "variants/0/checkpoint"}


def test_a_report_needs_no_file_that_is_elsewhere(moved):
    folder, results, units = moved
    (folder / "mine.txt").unlink()
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model").rmdir()
    assert done(read(folder), results, "cuda") == units


def test_a_record_with_other_files_does_not_count(moved):
    folder, results, _ = moved
    unit = make_units(read(folder), "cuda")[0]
    path = record_path(results, unit)
    record = json.loads(path.read_text())
    for files in ({}, {"model": "other"}, 3, {**record["files"], "more": "x"}):
        path.write_text(json.dumps(record | {"files": files}))
        assert read_record(results, unit) is None
    path.write_text(json.dumps(record))
    assert read_record(results, unit) is not None


def test_digests_of_what_is_there(tmp_path):
    assert digest_of(str(tmp_path / "none")) is None
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    assert digest_of(str(tmp_path / "a")) == digest_of(str(tmp_path / "b"))
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, shard in ((one, "1.safetensors"), (other, "2.safetensors")):
        folder.mkdir()
        (folder / shard).write_bytes(b"123")
    assert digest_of(str(one)) != digest_of(str(other))
    (other / "2.safetensors").rename(other / "1.safetensors")
    (other / "notes.txt").write_text("not read")
    assert digest_of(str(one)) == digest_of(str(other))
