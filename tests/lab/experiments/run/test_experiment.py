"""An experiment as a user runs it: killed midway and resumed, failing in parts, and the page it leaves."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepseek_attn.cli import main
from deepseek_attn.lab.experiments.define.config import load_experiment
from deepseek_attn.lab.experiments.define.units import make_units
from deepseek_attn.lab.experiments.report.page import make_page
from deepseek_attn.lab.experiments.report.report import build_report
from deepseek_attn.lab.experiments.report.table import show_table
from deepseek_attn.lab.experiments.run.pool import Finished, WorkerPool
from deepseek_attn.lab.experiments.run.records import MADE_BY, make_folder, write_record

TIMES = re.compile(r".*(_ms|_low|_high|seconds|tokens_per_second)$")


def experiment(folder, **changes):
    """The shipped smoke experiment with less of everything."""
    from importlib import resources

    raw = json.loads(resources.files("deepseek_attn.configs").joinpath("experiments", "smoke.json").read_text())
    raw["variants"] = [{"name": "near", "schedule": "0*"}, {"schedule": "0,4*"}, {"schedule": "0,(2,8)*"}]
    raw |= {"name": "small", "seeds": [0], "jobs": 1, "model_time": None}
    raw["cost"] = {"model": "tiny", "numerics": "exact", "contexts": [64, 256], "repeats": 2, "prefill": 8, "batch": 1}
    raw["train"] |= {
        "tasks": {"recall": {"gap": 16, "symbols": 16, "pairs": 2, "steps": 4}},
        "batch": 2,
        "seq_len": 32,
        "lengths": [1, 2],
    }
    raw["checkpoint"] |= {"max_tokens": 60}
    file = folder / "small.json"
    file.write_text(json.dumps({key: value for key, value in (raw | changes).items() if value is not None}))
    return file


def without_times(value):
    """A record or report without what is measured by the clock: times, and fronts of a quality against a time."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not TIMES.fullmatch(key)}
    if isinstance(value, list):
        return [without_times(item) for item in value if not is_time_front(item)]
    return value


def is_time_front(item):
    return isinstance(item, dict) and isinstance(item.get("cost"), str) and TIMES.fullmatch(item["cost"])


def records(out):
    return {str(path.relative_to(out)): json.loads(path.read_text()) for path in (out / "records").rglob("*.json")}


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class PoolHere(WorkerPool):
    """Runs the units in this process, which has imported torch already; `test_pool` is about worker processes."""

    def run(self, units):
        for unit in units:
            self.task(unit, lambda part: None)
            self.finished(unit, Finished(0.0))
        return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(experiment, folder) of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("experiment")
    file = experiment(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepseek_attn.lab.experiments.run.run.WorkerPool", PoolHere)
        assert main(["experiment", "run", str(file), "--out", str(folder / "out")]) == 0
    return file, folder / "out"


@pytest.fixture
def no_page(monkeypatch):
    """Reports without the page, which takes most of their time."""
    monkeypatch.setattr("deepseek_attn.lab.experiments.report.write.have_matplotlib", lambda: False)


@pytest.mark.exhaustive  # half a minute of a processor
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
def test_killed_and_resumed_gives_the_same_report(finished, tmp_path, capsys, monkeypatch):
    """A worker process does the units until the kill."""
    file, whole = finished
    out = tmp_path / "out"
    first = out / "records" / "checkpoint" / "own.json"
    command = [sys.executable, "-m", "deepseek_attn", "experiment", "run", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 900
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    total = len(make_units(load_experiment(file), "cpu"))
    while any(running(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children
    assert not any(running(pid) for pid in children), "workers go on without anyone to work for"

    before = {path: path.stat().st_mtime_ns for path in (out / "records").rglob("*.json")}
    assert first in before
    assert len(before) < total, "nothing was left to do: it was killed too late"
    monkeypatch.setattr("deepseek_attn.lab.experiments.run.run.WorkerPool", PoolHere)
    assert main(["experiment", "resume", str(file), "--out", str(out)]) == 0
    assert f"{total} pieces of work, {len(before)} done before" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert without_times(records(out)) == without_times(records(whole))
    report, expected = (json.loads((folder / "report.json").read_text()) for folder in (out, whole))
    assert without_times(report) == without_times(expected)
    assert expected["units"]["missing"] == []


def test_run_does_not_touch_results_that_are_there(finished, capsys):
    file, out = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["experiment", "run", str(file), "--out", str(out)]) == 2
    assert "holds results" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.exhaustive  # draws the page again
def test_a_second_resume_has_nothing_to_do_and_writes_the_same_bytes(finished, capsys):
    file, out = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["experiment", "resume", str(file), "--out", str(out)]) == 0
    assert "0 to do" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_results_that_were_moved_stay_done(finished, tmp_path, capsys, monkeypatch, no_page):
    """On a machine whose device they do not come from, too, and with no option that names that one."""
    file, out = finished
    for path in (out / "records").rglob("*.json"):
        assert not re.search(r'"[^"]*/(home|root|usr|work|tmp)/', path.read_text()), path
    there, experiment = tmp_path / "moved", tmp_path / file.name
    experiment.write_text(json.dumps(json.loads(file.read_text()) | {"device": None}))
    shutil.copytree(out, there)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["experiment", "resume", str(experiment), "--out", str(there)]) == 0
    assert "0 to do on cpu" in capsys.readouterr().err
    assert (there / "report.json").read_bytes() == (out / "report.json").read_bytes()


def test_results_of_a_gpu_need_none_once_they_are_complete(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = experiment(tmp_path, device="cuda", cost=None, train=None)
    for unit in make_units(load_experiment(file), "cuda"):
        write_record(tmp_path / "out", unit, {"reason": "of this test"} if unit.kind == "checkpoint" else {}, 1.0)
    assert main(["experiment", "resume", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "0 to do on cuda" in capsys.readouterr().err
    next((tmp_path / "out" / "records" / "variants").rglob("*.json")).unlink()
    assert main(["experiment", "resume", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


def test_nothing_is_left_of_an_older_report(finished, tmp_path, capsys, no_page):
    file, out = finished
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "variants" / "gone.json").write_text((out / "report.json").read_text())
    assert main(["experiment", "report", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "for the page with plots, pip install" in capsys.readouterr().out
    assert not (tmp_path / "out" / "report.html").exists()
    names = {path.name for path in (out / "variants").iterdir()}
    assert {path.name for path in (tmp_path / "out" / "variants").iterdir()} == names


@pytest.mark.parametrize(
    ("time_up_to", "said"),
    [
        (0, "Nothing was timed: time_up_to is 0, and the shortest context has 64 tokens."),
        (63, "Nothing was timed: time_up_to is 63, and the shortest context has 64 tokens."),
        (64, "Contexts of more than 64 tokens were counted, not timed: time_up_to is 64."),
        (256, None),
    ],
)
def test_contexts_without_times_are_named(tmp_path, time_up_to, said):
    cost = {"model": "tiny", "numerics": "exact", "contexts": [64, 256], "time_up_to": time_up_to}
    small = load_experiment(experiment(tmp_path, cost=cost, train=None, checkpoint=None))
    assert any(unit.kind == "layer_time" for unit in make_units(small, "cpu")) == (time_up_to >= 64)
    report = build_report(small, tmp_path, "cpu")
    for text in (show_table(report), make_page(report)):
        assert (said in text) if said else ("timed: time_up_to" not in text)


@pytest.mark.exhaustive
def test_a_failed_part_is_named_and_the_rest_is_done(tmp_path, capsys):
    file = experiment(
        tmp_path, variants=[{"schedule": "0,4*"}], checkpoint={"model": "tiny", "max_tokens": 40},
        cost={"model": "tiny", "numerics": "exact", "contexts": [64], "time_up_to": 0},
        train={"tasks": {"copy": {"gap": 30, "steps": 4}}, "batch": 1, "seq_len": 32},
    )  # fmt: skip
    assert main(["experiment", "run", str(file), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "failed: 0,4*: copy, seed 0: ValueError: task copy: 32 tokens do not hold" in printed
    done = ["checkpoint/own", "variants/0-4/checkpoint", "variants/0-4/cost"]
    assert sorted(records(tmp_path / "out")) == [f"records/{path}.json" for path in done]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["units"]["missing"] == ["0,4*: copy, seed 0"]


def test_a_report_needs_results(tmp_path, capsys):
    assert main(["experiment", "report", "smoke", "--out", str(tmp_path / "none")]) == 2
    assert "run the experiment first" in capsys.readouterr().err


class Page(HTMLParser):
    """Exact values of cells, what the page refers to, ids, and the embedded document."""

    def __init__(self, text):
        super().__init__()
        self.values, self.references, self.ids, self.data, self.inside = [], [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "data-value" in attributes:
            self.values.append(json.loads(attributes["data-value"]))
        self.references += [v for k, v in attributes.items() if k in ("src", "href", "xlink:href")]
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.inside = tag == "script" and "type" in attributes

    def handle_data(self, data):
        self.data += data if self.inside else ""

    def handle_endtag(self, tag):
        self.inside = False


def numbers(value):
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_every_number_of_the_page_is_in_the_json(finished):
    _, out = finished
    text, report = (out / "report.html").read_text(), json.loads((out / "report.json").read_text())
    page = Page(text)
    assert json.loads(page.data) == report
    assert len(page.values) > 100
    assert set(page.values) <= set(numbers(report))
    # cells without an exact value hold no number
    for cell in re.findall(r"<td(?: class=\"\w+\")?>([^<]*)</td>", text):
        assert not re.fullmatch(r"[\d.,]+", cell), cell


def test_cells_of_the_first_tables_carry_their_columns(finished):
    """On a phone their head is hidden."""
    text = (finished[1] / "report.html").read_text()
    tables = re.findall(r'<table class="cards">(.*?)</table>', text, flags=re.DOTALL)
    assert len(tables) == 1
    for table in tables:
        heads = re.findall(r"<th[^>]*>([^<]*)</th>", table)
        rows = re.findall(r"<tr>(.*?)</tr>", table.split("</thead>")[1], flags=re.DOTALL)
        unnamed = heads.index("front") + 1 if "front" in heads else heads.index("task") + 1
        assert rows
        for row in rows:
            cells = re.findall(r"<td([^>]*)>", row)
            assert [re.findall(r'data-label="([^"]*)"', cell) for cell in cells] == [
                [] if place < unnamed else [head] for place, head in enumerate(heads)
            ]


def test_the_page_stands_alone_and_takes_the_colours_of_its_reader(finished):
    text = (finished[1] / "report.html").read_text()
    page = Page(text)
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert len(set(page.ids)) == len(page.ids)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) >= 12
    for picture in pictures:
        assert "var(--fg)" in picture
        assert not re.search(r"(fill|stroke): #", picture), "a colour that does not follow the page"


def test_each_variant_has_a_document_of_its_own(finished):
    file, out = finished
    report = json.loads((out / "report.json").read_text())
    for variant, values in zip(load_experiment(file).variants, report["variants"], strict=True):
        assert json.loads((out / "variants" / f"{variant.slug}.json").read_text()) == {"made_by": MADE_BY, **values}
        assert {"cost", "checkpoint", "tasks"} <= values.keys()
    near, indexed, mixed = report["variants"]
    assert near["checkpoint"]["kl"] > 0
    assert "no trained indexer" in indexed["checkpoint"]["reason"]
    assert mixed["tasks"]["recall"]["layers"][1]["kind"] == "C2A"
    assert report["own"]["kl"] == 0


def test_costs_of_a_schedule_are_sums_over_its_layers(finished):
    """Times from the records of the layer kinds, by hand: tiny has six layers, and 0,(2,8)* gives it 0 2 8 2 8 2."""
    _, out = finished
    mixed = json.loads((out / "report.json").read_text())["variants"][2]["cost"]
    kept = records(out)
    layers = [kept[f"records/layers/{kind}-w16-plain.json"] for kind in ("swa", "c2a", "c8a", "c2a", "c8a", "c2a")]
    counted = kept["records/variants/0-2-8/cost.json"]["result"]["contexts"]
    for index, row in enumerate(mixed["contexts"]):
        times = [layer["result"]["times"][index] for layer in layers]
        for name in ("decode_ms", "prefill_ms"):
            assert row[name] == pytest.approx(sum(time[name] for time in times))
        assert row["bytes_per_token"] == counted[index]["sequence_bytes"] / counted[index]["context"]
        assert row["flops"] == sum(layer["flops"] for layer in counted[index]["by_layer"])
    assert [layer["decode_ms"] for layer in mixed["layers"]] == [time["decode_ms"] for time in times]


def test_a_report_needs_no_machine_like_that_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    make_folder(tmp_path, "study")
    assert main(["experiment", "report", "study", "--out", str(tmp_path)]) == 0
    assert f"0 of {len(make_units(load_experiment('study'), 'cuda'))} pieces of work done" in capsys.readouterr().out
    assert main(["experiment", "run", "study", "--out", str(tmp_path / "new")]) == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_with_files_of_its_own_is_left_alone(tmp_path, capsys):
    file, mine = experiment(tmp_path), tmp_path / "mine"
    (mine / "variants").mkdir(parents=True)
    (mine / "variants" / "mine.json").write_text("{}")
    (mine / "report.html").write_text("my page")
    before = files(mine)
    for what in ("run", "resume", "report"):
        assert main(["experiment", what, str(file), "--out", str(mine)]) == 2
        assert "report.html" in capsys.readouterr().err
        (mine / "report.html").unlink()
        assert main(["experiment", what, str(file), "--out", str(mine)]) == 2
        assert re.search("not an empty|holds no results of experiment 'small'", capsys.readouterr().err)
        (mine / "report.html").write_text("my page")
    assert files(mine) == before


def test_only_documents_of_this_library_are_replaced_or_removed(finished, tmp_path, capsys, monkeypatch):
    file, out = finished
    shutil.copytree(out, tmp_path / "out")
    mine = tmp_path / "out" / "variants" / "mine.json"
    mine.write_text('{"name": "mine"}')
    with monkeypatch.context() as patch:
        page = (out / "report.html").read_text()  # drawing it again takes a second
        patch.setattr("deepseek_attn.lab.experiments.report.page.make_page", lambda report: page)
        assert main(["experiment", "report", str(file), "--out", str(tmp_path / "out")]) == 0
    assert mine.read_text() == '{"name": "mine"}'
    for name in ("report.html", "report.json", "variants/near.json"):
        place = tmp_path / "out" / name
        ours = place.read_bytes()
        place.write_text("{}")
        before = files(tmp_path / "out")
        for what in ("report", "resume"):
            assert main(["experiment", what, str(file), "--out", str(tmp_path / "out")]) == 2
            assert f"{name}' exists and was not written by" in capsys.readouterr().err
        assert files(tmp_path / "out") == before
        place.write_bytes(ours)


def test_the_page_of_another_experiment_is_not_replaced(finished, tmp_path, capsys):
    """Neither that of another name, nor that of a file of the same name that measures something else."""
    _, out = finished
    before = files(out)
    (tmp_path / "a").mkdir()
    for changes, why in (
        ({"name": "other"}, "holds the results of experiment 'small'"),
        ({"seeds": [5], "checkpoint": {"max_tokens": 50}, "cost": None}, "are of another version of experiment"),
    ):
        other = experiment(tmp_path / "a", **changes)
        for what in ("report", "resume"):
            assert main(["experiment", what, str(other), "--out", str(out)]) == 2
            assert why in capsys.readouterr().err
    assert files(out) == before


def test_results_without_the_file_that_names_them_are_known_by_their_records(finished, tmp_path, no_page):
    file, out = finished
    shutil.copytree(out / "records", tmp_path / "out" / "records")
    assert main(["experiment", "report", str(file), "--out", str(tmp_path / "out")]) == 0
    assert without_times(json.loads((tmp_path / "out" / "report.json").read_text())) == without_times(
        json.loads((out / "report.json").read_text())
    )


def test_altered_records_do_not_count_and_the_field_is_named(finished, tmp_path, caplog):
    file, out = finished
    shutil.copytree(out / "records", tmp_path / "records")
    whole, small = build_report(load_experiment(file), tmp_path, "cpu"), load_experiment(file)
    assert not whole["units"]["missing"]
    cases = {
        "variants/near/cost.json": [("per_token", "x"), ("contexts", []), ("layers", [{}]), ("fixed", float("nan"))],
        "layers/c2a-w16-plain.json": [("times", []), ("device", 3)],
        "variants/near/checkpoint.json": [("kl", [1]), ("layers", 3), ("by_position", [{"start": 0}])],
        "variants/near/recall-seed0.json": [
            ("losses", [[1]]), ("metrics", {"loss": 1}), ("by_length", []), ("steps", 1e400),
        ],
        "checkpoint/own.json": [("loss", "low")],
    }  # fmt: skip
    for name, changes in cases.items():
        path = tmp_path / "records" / name
        before = path.read_text()
        record = json.loads(before)
        for field, value in changes:
            caplog.clear()
            path.write_text(json.dumps(record | {"result": record["result"] | {field: value}}))
            report = build_report(small, tmp_path, "cpu")
            assert len(report["units"]["missing"]) == 1
            [message] = {line.getMessage() for line in caplog.records if "does not count" in line.getMessage()}
            assert f"{name} does not count: result.{field}" in message
            show_table(report)
        path.write_text(before)


def test_tables_say_what_guessing_reaches_and_over_how_many_answers(finished):
    """Two pairs of 16 values are asked in 2 sequences of 1 batch."""
    _, out = finished
    report = json.loads((out / "report.json").read_text())
    for variant in report["variants"]:
        assert variant["tasks"]["recall"]["chance"] == pytest.approx(1 / 16, abs=0.02)
        assert variant["tasks"]["recall"]["answers"] == 4
    assert re.search(r"recall accuracy \(chance 0\.0\d+, 4 answers a seed\)", show_table(report))
    page = (out / "report.html").read_text()
    [setting] = re.findall(r'<tr><td class="name">recall</td>.*?</tr>', page, flags=re.DOTALL)
    assert "<td>1 each</td>" in setting
    assert re.search(r'<td data-value="4">4</td>\s*<td data-value="0\.0\d+">0\.0\d+</td>\s*</tr>', setting)
    captions = re.findall(r"<figcaption>([^<]*)", page)
    assert "checkpoint: loss by position" in captions
    assert "checkpoint: KL from the own schedule by position" in captions


def test_the_table_is_a_csv_too(finished):
    _, out = finished
    report = json.loads((out / "report.json").read_text())
    with (out / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, variant in zip(rows, report["variants"], strict=True):
        assert row["deepseek-attn experiment"] == "small"
        assert (row["variant"], row["schedule"]) == (variant["name"], variant["schedule"])
        kl = variant["checkpoint"].get("kl")
        assert row["checkpoint KL"] == ("" if kl is None else repr(kl))
        assert float(row["KV bytes per token at 256"]) == variant["cost"]["contexts"][-1]["bytes_per_token"]
    assert "decode ms at 256, standard deviation" not in rows[0], "a column without a value"


def test_what_is_drawn_for_a_variant_can_be_hidden(finished):
    text = (finished[1] / "report.html").read_text()
    assert re.findall(r'data-variant="(\d+)"', text) == ["1", "2", "3"]
    for picture in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert re.search(r'id="[a-z]\w*(-\w+)*-v\d+-', picture)


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stopped(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepseek_attn.lab.experiments.run.run.run_experiment", stopped)
    file, out = experiment(tmp_path), tmp_path / "my results"
    assert main(["experiment", "run", str(file), "--out", str(out), "--device", "cpu"]) == 130
    assert f"`deepseek-attn experiment resume {file} --out '{out}' --device cpu` goes on" in capsys.readouterr().err


def test_two_folders_are_compared_by_the_names_of_variants(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.experiments.report.figures.svg_element", lambda *_: "<svg></svg>")
    file, out = finished
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(out, here)
    shutil.copytree(out, there)
    other = json.loads((there / "report.json").read_text())
    near, indexed, _ = other["variants"]
    indexed["name"] = "another"
    near["checkpoint"]["kl"] *= 2
    (there / "report.json").write_text(json.dumps(other))
    command = ["experiment", "report", str(file), "--out", str(here), "--against", str(there)]
    assert main(command) == 0
    found = json.loads((here / "report.json").read_text())["against"]
    assert found["name"] == "there"
    assert {row["variant"] for row in found["rows"]} == {"near", "0,(2,8)*"}
    [kl] = [row for row in found["rows"] if (row["variant"], row["quantity"]) == ("near", "checkpoint KL")]
    assert kl["there"] == 2 * kl["here"]
    assert kl["difference"] == -kl["here"]
    assert [row["quantity"] for row in found["rows"] if not row["equal"]] == ["checkpoint KL"]
    assert "checkpoint KL" in capsys.readouterr().out
    page = (here / "report.html").read_text()
    assert "<h2>Beside there</h2>" in page
    assert set(Page(page).values) <= set(numbers(json.loads((here / "report.json").read_text())))
    before = files(here)
    near["tasks"] = [1]
    (there / "report.json").write_text(json.dumps(other))
    assert main(command) == 2
    assert "report.variants[0].tasks is [1]: expected an object" in capsys.readouterr().err
    (there / "report.json").unlink()
    assert main(command) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert files(here) == before
