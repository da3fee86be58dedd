"""Experiments as files: what is read, and every problem at once."""

import json
from pathlib import Path

import pytest

from deepseek_attn.experiments.define.config import load_experiment, read_experiment, shipped_experiments
from deepseek_attn.experiments.define.units import make_units

VARIANTS = [{"schedule": "0*"}]
COST = {"model": "tiny", "numerics": "exact", "contexts": [64]}


def read(tmp_path, **changes):
    raw = {"base": "tiny", "variants": VARIANTS, "cost": COST} | changes
    return read_experiment({key: value for key, value in raw.items() if value is not None}, "exp.json", tmp_path)


@pytest.mark.parametrize("name", shipped_experiments())
def test_shipped_experiments_are_valid(name):
    experiment = load_experiment(name)
    units = make_units(experiment, "cpu")
    assert len({unit.path for unit in units}) == len(units)
    assert len({unit.fingerprint for unit in units}) == len(units)


def test_the_study_has_what_it_promises():
    study = load_experiment("study")
    schedules = {(v.schedule, str(v.overlap), str(v.indexer)) for v in study.variants}
    assert len(schedules) >= 12
    assert len(study.seeds) >= 3


def test_a_grid_is_a_product_after_the_listed_variants(tmp_path):
    experiment = read(tmp_path, grid={"schedule": ["0,4*", "0,8*"], "index_topk": [2, 4]})
    assert [variant.name for variant in experiment.variants] == [
        "0*", "0,4*, index_topk 2", "0,4*, index_topk 4", "0,8*, index_topk 2", "0,8*, index_topk 4",
    ]  # fmt: skip


def test_costs_with_index_keys_of_another_format(tmp_path):
    """They are measured anew, since everything that was measured without them stays what it was."""
    found = {}
    for keys in (None, "fp8", "fp4"):
        experiment = read(tmp_path, cost=COST | {"numerics": "serving", "index_keys": keys})
        units = [unit for unit in make_units(experiment, "cpu") if unit.kind in ("cost", "layer_time")]
        found[keys] = experiment.cost.numerics.name, {unit.fingerprint for unit in units}
    assert found[None] == found["fp8"]
    assert found["fp4"][0] == "serving (fp4 index keys)"
    assert len(found["fp4"][1]) == len(found[None][1])
    assert not found["fp4"][1] & found[None][1]
    with pytest.raises(ValueError, match=r"cost\.index_keys is 'fp6': supported is 'fp8' or 'fp4'"):
        read(tmp_path, cost=COST | {"index_keys": "fp6"})


def test_every_problem_is_listed(tmp_path):
    with pytest.raises(ValueError, match="invalid config") as caught:
        read(
            tmp_path,
            colour="red",
            variants=[
                {"schedule": 4, "topk": 1},
                {"schedule": "0,4", "indexer": "yes"},
                {"schedule": "0,0,0", "name": "short"},
                {"schedule": "0*"},
                {"schedule": "0 *"},
                {"schedule": "0*", "name": "fp8", "kv_record": "fp16"},
            ],
            grid={"schedule": "0*"},
            seeds=[0, 0],
            jobs=0,
            device=3,
            cost={"model": "tiny_v32", "contexts": ["long"], "speed": 1},
            train={"tasks": {"recall": {"gap": 4, "depth": 3}, "sums": {}}, "batch": 2, "lr": -1},
            checkpoint={"max_tokens": 0},
        )
    message = str(caught.value)
    for part in (
        "unknown key 'colour'", "variants[0].schedule is 4", "unknown key 'topk'", "variants[1].indexer is 'yes'",
        "'short' does not fit base", "have the same name for a file", "variants[5].kv_record is 'fp16'",
        "grid.schedule is '0*'", "seeds is [0, 0]", "jobs is 0", "device is 3", "cost.contexts is ['long']",
        "unknown key cost.speed", "cost.model: tiny_v32 is deepseek_v32", "unknown key train.tasks.recall.depth",
        "train.tasks.sums", "train.tasks.recall.steps", "train.tasks.recall.seq_len", "train.tasks.recall.lr",
        "checkpoint.max_tokens is 0",
    ):  # fmt: skip
        assert part in message, part


def test_a_variant_must_fit_the_model_whose_costs_are_counted(tmp_path):
    cost = COST | {"model": "v4_flash"}
    read(tmp_path, cost=cost)
    with pytest.raises(ValueError, match=r"does not fit cost\.model: .* names 6 layers, and the model has 43"):
        read(tmp_path, variants=[{"schedule": "0,4,0,4,0,4"}], cost=cost)


def test_the_example_of_the_documentation_is_valid(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text()
    example = json.loads(text.split("```json")[1].split("```")[0])
    assert len(read_experiment(example, "example.json", tmp_path).variants) == 3 + 2 * 2


def test_nothing_to_do_is_a_problem(tmp_path):
    with pytest.raises(ValueError, match="no variants") as caught:
        read(tmp_path, variants=[], cost=None)
    assert "nothing to measure" in str(caught.value)


def test_grids_without_end(tmp_path):
    axis = list(range(1, 1001))
    with pytest.raises(ValueError, match="grid has 1000000000 cells: supported are 10000"):
        read(tmp_path, grid={"index_topk": axis, "sliding_window": axis, "schedule": ["0"] * 1000})


def test_files_are_found_by_path_and_by_name(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"base": "tiny", "variants": VARIANTS, "cost": COST}))
    assert load_experiment(file).name == "mine"
    with pytest.raises(ValueError, match=r"no shipped experiment \(.*smoke"):
        load_experiment("other")
    file.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_experiment(file)


def test_fingerprints_follow_inputs(tmp_path):
    before = {u.path: u.fingerprint for u in make_units(read(tmp_path), "cpu")}
    same = {u.path: u.fingerprint for u in make_units(read(tmp_path), "cpu")}
    longer = {u.path: u.fingerprint for u in make_units(read(tmp_path, cost=COST | {"contexts": [64, 128]}), "cpu")}
    assert before == same
    assert before.keys() == longer.keys()
    assert all(before[path] != longer[path] for path in before)
