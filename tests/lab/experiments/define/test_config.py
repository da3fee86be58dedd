"""Experiments as files: what is read, and every problem at once."""

import json
from pathlib import Path

import pytest

from deepseek_attn import ModelConfig
from deepseek_attn.lab.experiments.define.config import load_experiment, read_experiment, shipped_experiments
from deepseek_attn.lab.experiments.define.units import make_units
from deepseek_attn.lab.experiments.define.variant import ModelVariant
from tests.support.typed import required

VARIANTS = [{"schedule": "0*"}]
SIZES = {"steps": 1, "batch": 1, "seq_len": 64}
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
    """The published schedule and five others under every selection, five seeds, three sizes of models."""
    study = load_experiment("study")
    controls = {}
    for variant in study.variants:
        if variant.layers is None and not variant.dense:
            key = (variant.schedule, str(variant.overlap), str(variant.indexer), variant.index_topk)
            controls.setdefault(key, set()).add(variant.selection)
    full = [key for key, found in controls.items() if found == {"learned", "oracle", "random"}]
    assert len(full) >= 6
    assert ("0,(4,128)*", "None", "None", None) in full
    assert len(study.seeds) >= 5
    assert {task.size for task in required(study.train).tasks.values()} >= {None, "10m", "50m"}
    assert any(variant.dense for variant in study.variants)
    assert any(variant.layers for variant in study.variants)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"attention": "dense", "schedule": "0,4*"}, "dense reads every token, so that schedule cannot be given"),
        ({"attention": "dense", "window_layers": 6}, "window_layers is 6: the model has 6 layers"),
        ({"attention": "dense", "window_layers": -1}, "window_layers is -1: expected a number of layers"),
        (
            {"schedule": "0*", "window_layers": 1},
            "window_layers is 1: expected a number of layers, with attention dense",
        ),
        ({"attention": "sparse", "schedule": "0*"}, "attention is 'sparse': expected compressed, dense"),
        ({"schedule": "0,4*", "selection": "best"}, "selection is 'best': expected learned, oracle, random"),
        ({"schedule": "0,4*", "selection": "random", "indexer": False}, "no layer selects entries"),
        ({"schedule": "0,4*", "layers": {"1": {"topk": 2}}}, "expected changes by layer"),
        ({"schedule": "0,4*", "layers": {"9": {"ratio": 2}}}, "layers names 9: the model has layers 0 to 5"),
        ({"schedule": "0,2*", "v41": {"depth": 2}}, "entries, selection, candidates, engram"),
        ({"schedule": "0,2*", "v41": {}, "indexer": True}, "so that indexer cannot be given"),
        ({"schedule": "0,4*", "v41": {}}, "(?s)does not fit base: .*compress_ratios"),
        ({"schedule": "0,2*", "v41": {"entries": 0}}, r"v41.entries is 0: expected a number of layers"),
    ],
)
def test_controls_that_make_no_sense_are_refused(tmp_path, variant, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, variants=[variant])


def test_single_layers_are_changed(tmp_path):
    experiment = read(
        tmp_path,
        variants=[{"name": "own", "schedule": "0,(4,128)*"}],
        ablate={"of": "own", "indexer": True, "ratios": [0]},
    )
    names = [variant.name for variant in experiment.variants]
    assert names == ["own"] + [
        f"own; layer {layer} {what}"
        for layer in range(1, 6)
        for what in (["no indexer"] if layer % 2 else []) + ["ratio 0"]
    ]
    own, changed = (experiment.variant(name).config(experiment.base).layers for name in (names[0], names[1]))
    assert [spec.has_indexer for spec in own] == [False, True, False, True, False, True]
    assert [spec.has_indexer for spec in changed] == [False, False, False, True, False, True]
    dropped = experiment.variant("own; layer 2 ratio 0").config(experiment.base).layers
    assert [spec.ratio for spec in dropped] == [0, 4, 0, 4, 128, 4]
    cost_names = {unit.name for unit in make_units(experiment, "cpu") if unit.kind == "cost"}
    assert len(cost_names) == len(names), "the model whose costs are counted has as many layers"
    with pytest.raises(ValueError, match=r"ablate\.of is 'other'"):
        read(tmp_path, ablate={"of": "other"})


def test_tasks_choose_sizes_seeds_and_variants(tmp_path):
    large = {"task": "recall", "size": "10m", "seeds": [1], "variants": ["0*"], "eval_batches": 9}
    train = {"tasks": {"recall": {}, "large": large}, "eval_batches": 2}
    experiment = read(tmp_path, base="1m", variants=[*VARIANTS, {"attention": "dense"}], seeds=[0, 1],
                      cost=None, train=train | SIZES)  # fmt: skip
    units = [unit for unit in make_units(experiment, "cpu") if unit.kind == "train"]
    assert [unit.path for unit in units] == [
        "variants/0/recall-seed0", "variants/dense/recall-seed0", "variants/0/recall-seed1",
        "variants/dense/recall-seed1", "variants/0/large-seed1",
    ]  # fmt: skip
    assert units[-1].inputs["base"]["hidden_size"] == 320
    assert [unit.inputs["eval_batches"] for unit in units] == [2, 2, 2, 2, 9]
    for change, message in (
        ({"size": "2m"}, "size is '2m': supported is '1m' or '10m' or '50m'"),
        ({"seeds": [7]}, "names 7: seeds are"),
        ({"variants": ["4*"]}, "names 4\\*: there are"),
        ({"task": "sums"}, "is one of text, recall"),
        ({"seq_len": 1000}, "8000 tokens .8 times seq_len. exceed the model's 4096"),
        ({"curriculum": 2}, "curriculum is 2"),
        ({"eval_batches": 0}, "large.eval_batches is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, base="1m", seeds=[0, 1], train=SIZES | {"tasks": {"large": {"task": "recall"} | change}})


def test_lm_eval_needs_the_package_and_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.experiments.define.config.find_spec", lambda name: None)
    train = SIZES | {"tasks": {"recall": {}}}
    with pytest.raises(ValueError, match=r"no task `text`") as caught:
        read(tmp_path, train=train, quality={"lm_eval": ["lambada_openai"]})
    assert "pip install 'deepseek-attn[lm-eval]'" in str(caught.value)


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
        found[keys] = required(experiment.cost).numerics.name, {unit.fingerprint for unit in units}
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
    text = (Path(__file__).parents[4] / "docs" / "experiments.md").read_text()
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
    with pytest.raises(ValueError, match=r"nor a shipped experiment \(.*smoke"):
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


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/x",
        "a/b",
        "..",
        ".hidden",
        "a\\b",
        "",
        " ",
        "a ",
        "x\x1b[2J",
        "\ud800",
        "é" * 80,
        ["a"],
        3,
        None,
    ],
)
def test_a_name_is_that_of_a_folder_in_results(tmp_path, name):
    raw = {"base": "tiny", "variants": VARIANTS, "cost": COST, "name": name}
    with pytest.raises(ValueError, match=r"name is .*: (expected|it has)"):
        read_experiment(raw, "exp.json", tmp_path)
    assert read(tmp_path, name="A name, of 2 parts (é)").name == "A name, of 2 parts (é)"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"variants": [*VARIANTS, {"schedule": "4*", "name": ["a"]}]}, "variants[1].name is ['a']"),
        ({"variants": [{"schedule": "0*", "name": "a\x1b[2J"}]}, r"variants[0].name is 'a\x1b[2J'"),
        ({"variants": [{"name": "v", "schedule": "(" * 4000 + "0" + ")" * 4000}]}, "more than 20 parentheses"),
        ({"variants": [{"schedule": "4x999999999"}]}, "repeated to more than the model's 6 layers"),
        ({"variants": [{"schedule": "(4x3)x3"}]}, "repeated to more than the model's 6 layers"),
        ({"variants": [{"name": "v", "schedule": "9" * 5000 + "*"}]}, "a number has 5000 digits"),
        ({"variants": [{"name": "v", "schedule": "0," * 10_000}]}, "has 20000 characters"),
        ({"variants": [{"schedule": "0*", "overlap": {"4": "on"}}]}, "variants[0].overlap is {'4': 'on'}"),
        ({"variants": VARIANTS * 10_001}, "there are 10001 variants"),
        ({"seeds": [10**400]}, "seeds is ["),
        ({"title": "\ud800"}, "title is"),
        ({"base": ["tiny"]}, "base ['tiny']"),
        ({"base": "x" * 5000}, "is not a path or name"),
        ({"base": "x/" + "é" * 200}, "is not a path or name"),
        ({"cost": COST | {"contexts": [10**400]}}, "cost.contexts is ["),
        ({"cost": COST | {"contexts": list(range(1, 102))}}, "cost.contexts has 101 values"),
        ({"cost": COST | {"model": {}}}, "cost.model: {}"),
        ({"checkpoint": {"text": "x" * 5000}}, "checkpoint.text: "),
        ({"seeds": list(range(60_000)), "train": SIZES | {"tasks": {"text": {}, "copy": {}}}}, "make 120000 runs"),
    ],
)  # fmt: skip
def test_hostile_values_are_named(tmp_path, changes, field):
    with pytest.raises(ValueError, match="invalid config") as caught:
        read(tmp_path, **changes)
    assert field in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_long_names_give_short_files(tmp_path):
    variants = [{"schedule": "0*", "name": "a" * 400 + end} for end in "bc"]
    paths = [unit.path for unit in make_units(read(tmp_path, variants=variants), "cpu")]
    assert len(set(paths)) == len(paths)
    assert max(len(part) for path in paths for part in path.split("/")) < 120


def places(value, place=()):
    """Places of all values inside a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inside for found in [(*place, key), *places(item, (*place, key))]]


HOSTILE = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    "\x1b[2J",
    "../../x",
    "\ud800",
    [],
    [[1]],
    {},
    {"a": [1]},
)


def test_altered_experiments_are_one_error(tmp_path):
    """Each value of an experiment replaced by others in turn: it is valid, or one ValueError."""
    raw = {
        "base": "tiny", "variants": [{"schedule": "0*", "overlap": {"4": True}}], "seeds": [0], "cost": COST,
        "grid": {"index_topk": [2], "schedule": ["4*"]}, "model_time": {"contexts": [8]},
        "checkpoint": {"max_tokens": 8}, "train": SIZES | {"tasks": {"recall": {"gap": 4}}},
    }  # fmt: skip
    for number, place in enumerate(places(raw)):
        for shift in range(3):
            altered = json.loads(json.dumps(raw))
            parent = altered
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = HOSTILE[(number * 5 + shift * 7) % len(HOSTILE)]
            try:
                units = make_units(read_experiment(altered, "exp.json", tmp_path), "cpu")
            except ValueError as error:
                message, units = str(error), []
            else:
                message = ""
            assert message.startswith("invalid config (exp.json), ") or units
            assert not any(".." in unit.path for unit in units)


def test_an_experiment_on_a_checkpoint_alone_takes_its_config_as_base():
    raw = {"variants": [{"schedule": "own", "index_topk": 4}], "checkpoint": {"model": "tiny_v32"}}
    experiment = read_experiment(raw, "mine", Path())
    assert experiment.base.model_type == "deepseek_v32"
    assert experiment.variants[0].config(experiment.base).index_topk == 4
    with pytest.raises(ValueError, match=r"base.*missing|missing.*base"):
        read_experiment(raw | {"cost": {"contexts": [512]}}, "mine", Path())
    with pytest.raises(ValueError, match=r"changes schedule of a deepseek_v32"):
        read_experiment(raw | {"variants": [{"schedule": "0,4*"}]}, "mine", Path())


def test_own_schedule_keeps_ratios_overlap_and_indexers():
    base = ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=3, compress_ratios=[0, 16, 4], num_nextn_predict_layers=0, compress_indexer={"16": True}
    )
    own = ModelVariant("own", "own", index_topk=3).config(base)
    assert own.layers == base.layers
    assert own.index_topk == 3
