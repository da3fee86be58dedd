"""Trainings of an experiment: in groups, stopped and resumed to the same bits, and what is measured of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.lab.experiments.define.config import load_experiment
from deepseek_attn.lab.experiments.define.units import Group, grouped, make_units
from deepseek_attn.lab.experiments.run.records import read_record
from deepseek_attn.lab.experiments.run.work import GroupFailure, UnitWork
from deepseek_attn.lab.training.loop import Paused
from deepseek_attn.lab.training.state import MADE_BY
from deepseek_attn.utils.files import write_tensors
from tests.lab.experiments.run.test_experiment import PoolHere, without_times
from tests.support.typed import untyped

TRAIN = {
    "tasks": {"recall": {"symbols": 8, "pairs": 2, "questions": 4, "curriculum": 0.5}, "needle": {"symbols": 8}},
    **{"steps": 6, "batch": 2, "seq_len": 24, "lengths": [1, 2], "eval_batches": 1, "lanes": 4},
}
BASE = {"num_hidden_layers": 2, "compress_ratios": [0, 0], "vocab_size": 64, "hidden_size": 64, "index_topk": 2}


def experiment(folder, **changes):
    raw = {
        "name": "trained", "base": "1m", "base_changes": BASE, "seeds": [0, 1], "device": "cpu", "train": TRAIN,
        "variants": [
            {"attention": "dense", "window_layers": 1},
            *({"schedule": "0,4*"}, {"schedule": "0,4*", "selection": "oracle"}),
        ],
    } | changes  # fmt: skip
    file = folder / "trained.json"
    file.write_text(json.dumps(raw))
    return load_experiment(file)


@pytest.fixture(scope="module")
def units(tmp_path_factory):
    return make_units(experiment(tmp_path_factory.mktemp("file")), "cpu")


class Alone(dict):
    """Results of trainings of the first task by their paths, each trained alone when it is first asked for."""

    def __init__(self, folder, units):
        super().__init__()
        self.folder, self.units, self.work = folder, {unit.path: unit for unit in units}, UnitWork(folder, "cpu", 1)

    def __missing__(self, path):
        self.work(Group((self.units[path],), False), lambda part: None)
        self[path] = found = without_times(read_record(self.folder, self.units[path]))
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory, units):
    return Alone(tmp_path_factory.mktemp("whole"), units[:6])


def test_groups_are_trainings_of_one_task(units):
    groups: Any = grouped(units, "cuda:0")
    assert [len(group.units) for group in groups] == [3, 3, 3, 3]
    assert all(group.units[0].job.task == unit.job.task for group in groups for unit in group.units)
    assert [len(group.units) for group in untyped(grouped(units, "cpu"))] == [1] * len(units)


def test_seeds_of_a_variant_stay_together(tmp_path):
    units = make_units(experiment(tmp_path, seeds=[0, 1, 2], train=TRAIN | {"together": True}), "cuda")
    groups: Any = grouped(units, "cuda")
    assert [[len(model) for model in group.models] for group in groups] == [[3]] * 6
    assert all(len({unit.job.variant.name for unit in model}) == 1 for group in groups for model in group.models)
    wide = make_units(experiment(tmp_path, seeds=[0, 1, 2], train=TRAIN | {"together": True, "lanes": 7}), "cuda")
    groups = grouped(wide[1:], "cuda:0")  # without a seed of the first variant
    assert [[len(model) for model in group.models] for group in groups] == [[3], [3, 2], [3], [3, 3]]
    groups = grouped(make_units(experiment(tmp_path, train=TRAIN | {"together": True, "lanes": 1}), "cuda"), "cuda")
    assert not any(group.together for group in groups)


def test_seeds_that_are_trained_together(tmp_path, units, whole, monkeypatch):
    """Stopped in the second part and resumed; their records are those of seeds alone, up to rounding."""
    seeds = (units[1], units[4])
    clock = iter([0.0] * 3 + [9.0])
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(clock))
        UnitWork(tmp_path, "cpu", 1, until=5.0)(Group(seeds, False, together=True), lambda part: None)
    assert [path.name for path in (tmp_path / "states").rglob("*state")] == ["recall-seed0.training-state"]
    UnitWork(tmp_path, "cpu", 1)(Group(seeds, False, together=True), lambda part: None)
    assert not [path for path in (tmp_path / "states").rglob("*") if path.is_file()]
    for unit in seeds:
        found, expected = (result["result"] for result in (untyped(read_record(tmp_path, unit)), whole[unit.path]))
        assert found["together"] == [0, 1]
        assert found["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-3)
        assert found["losses"] == [[6, pytest.approx(expected["losses"][0][1], rel=1e-3)]]


def test_seeds_that_cannot_be_trained_together_are_trained_one_by_one(tmp_path, units, whole, monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("no rule for this operation")

    monkeypatch.setattr("deepseek_attn.lab.training.loop.SeedsStep", refuse)
    UnitWork(tmp_path, "cpu", 1)(Group((units[0], units[3]), False, together=True), lambda part: None)
    assert "2 seeds of dense, 1 window layers are trained one by one: no rule" in caplog.text
    for unit in (units[0], units[3]):
        assert without_times(read_record(tmp_path, unit)) == whole[unit.path]


@pytest.mark.exhaustive
def test_models_of_a_group_are_those_that_are_trained_alone(tmp_path, units, whole):
    UnitWork(tmp_path, "cpu", 1)(Group(tuple(units[:6]), False), lambda part: None)
    for unit in units[:6]:
        assert without_times(read_record(tmp_path, unit)) == whole[unit.path]
    assert not list((tmp_path / "states").rglob("*state"))


def test_a_training_that_is_stopped_goes_on_to_the_same_bits(tmp_path, units, whole, monkeypatch):
    """Stopped after four of six steps: in the second part, at full difficulty; all state is in the file."""
    ended = []
    original = Paused.__init__
    monkeypatch.setattr(Paused, "__init__", lambda self, text: (ended.append(text), original(self, text))[1])
    clock = iter([0.0] * 3 + [9.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    group = Group((units[1],), False)
    UnitWork(tmp_path, "cpu", 1, until=5.0)(group, lambda part: None)
    assert ended == ["stopped after 4 of 6 steps"]
    assert read_record(tmp_path, units[1]) is None
    [state] = (tmp_path / "states").rglob("*.training-state")
    monkeypatch.undo()
    UnitWork(tmp_path, "cpu", 1)(group, lambda part: None)
    assert without_times(read_record(tmp_path, units[1])) == whole[units[1].path]
    assert not state.exists()


def test_a_state_of_other_inputs_is_dropped_and_a_file_of_another_writer_stays(tmp_path, units, whole):
    place = tmp_path / "states" / f"{units[0].path}.training-state"
    place.parent.mkdir(parents=True)
    write_tensors(place, {}, {MADE_BY: json.dumps({"unit": "another"})})
    UnitWork(tmp_path, "cpu", 1)(Group((units[0],), False), lambda part: None)
    assert without_times(read_record(tmp_path, units[0])) == whole[units[0].path]
    place.write_bytes(b"x")
    with pytest.raises(GroupFailure, match="was not written by"):
        UnitWork(tmp_path, "cpu", 1)(Group((units[0],), False), lambda part: None)
    assert place.read_bytes() == b"x"


@pytest.mark.exhaustive
def test_a_run_of_some_minutes_says_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.experiments.run.run.WorkerPool", PoolHere)
    experiment(tmp_path, seeds=[0], train=TRAIN | {"tasks": {"needle": {"symbols": 8}}})
    command = ["experiment", "run", str(tmp_path / "trained.json"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr("deepseek_attn.lab.experiments.run.run.MINUTE", 0.0)
        assert main([*command, "--minutes", "25"]) == 0
    printed = capsys.readouterr()
    assert "the time was over: 3 pieces of work are left" in printed.out
    assert "resume" in printed.out
    command[1] = "resume"
    assert main(command) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["units"]["missing"] == []
    assert not (tmp_path / "out" / "states").exists()


def test_what_is_measured_of_a_model(whole, units):
    dense, learned, oracle = (whole[unit.path]["result"] for unit in units[:3])
    for found in (dense, learned, oracle):
        assert [row["seq_len"] for row in found["by_length"]] == [24, 48]
        assert found["answers"] == 8
        assert found["metrics"]["accuracy"] == found["by_length"][0]["accuracy"]
        assert 0 < found["by_length"][0]["chance"] < 0.5
        assert sum(row["answers"] for row in found["by_distance"] if row["seq_len"] == 24) == 8
        assert found["by_depth"] == []
    first, second = (row["token_mass"] for row in dense["layers"])
    assert first < 1  # it keeps its window
    assert second == pytest.approx(1.0)
    assert dense["layers"][1]["index_recall"] is None
    assert oracle["layers"][1]["index_recall"] == 1.0
    assert 0 < learned["layers"][1]["index_recall"] < 1
    assert learned["layers"][1]["token_mass"] < 1


@pytest.mark.gpu
def test_one_seed_gives_one_result_on_a_gpu(tmp_path, device):
    """In a group of several and alone, twice: bit for bit."""
    units = make_units(experiment(tmp_path, device="cuda"), "cuda")[:6]
    results = []
    for name, size in (("a", 6), ("b", 6), ("c", 1)):
        work = UnitWork(tmp_path / name, str(device), 1)
        for start in range(0, 6, size):
            work(Group(tuple(units[start : start + size]), True), lambda part: None)
        results.append([without_times(read_record(tmp_path / name, unit)) for unit in units])
    assert results[0] == results[1] == results[2]
    assert not torch.are_deterministic_algorithms_enabled()
