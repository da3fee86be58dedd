"""Worker processes: what comes back from them, what dies with them, and how long the rest takes."""

import sys
import time

import pytest

from deepseek_attn.experiments.define.units import Unit
from deepseek_attn.experiments.run.clock import Clock, show_seconds
from deepseek_attn.experiments.run.pool import Pool
from deepseek_attn.experiments.run.records import read_record, record_path, write_json, write_record

# Speaks like a worker; what it does with a unit is the unit's path.
SCRIPT = """
import json, os, sys, time

def send(**message):
    print(json.dumps(message), flush=True)

send(ready=True)
for line in sys.stdin:
    action = line.strip().split("/")[0]
    send(progress=0.5)
    if action == "crash":
        os._exit(7)
    if action == "hang":
        time.sleep(600)
    if action == "error":
        send(error="ValueError: no")
        continue
    time.sleep(0.05)
    send(done=line.strip())
"""


def make(path, alone=False):
    return Unit("train", path, path, {"path": path}, alone)


def run(tmp_path, paths, jobs=1, script=SCRIPT, limit_s=None):
    units, results = [make(path) for path in paths], {}
    clock = Clock(units, jobs)

    def finished(unit, seconds, error):
        clock.finished(unit, seconds)
        results[unit.path] = error

    pool = Pool(("experiment", "folder", "cpu"), tmp_path, clock, finished, limit_s)
    assert pool.command[1:3] == ["-m", "deepseek_attn.experiments.run.worker"]
    pool.command = [sys.executable, "-c", script]
    pool.run(units)
    assert not clock.left
    assert not pool.workers
    return results


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_unit_is_done_once(tmp_path, jobs):
    results = run(tmp_path, [f"ok/{i}" for i in range(7)], jobs)
    assert results == {f"ok/{i}": None for i in range(7)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_and_crashes_cost_their_own_unit_only(tmp_path, jobs):
    results = run(tmp_path, ["ok/0", "crash/1", "error/2", "crash/3", "ok/4", "crash/5"], jobs)
    assert results["ok/0"] is results["ok/4"] is None
    assert results["error/2"] == "ValueError: no"
    for path in ("crash/1", "crash/3", "crash/5"):
        assert "ended with code 7" in results[path]


def test_what_takes_too_long_is_given_up(tmp_path):
    results = run(tmp_path, ["ok/0", "hang/1", "ok/2"], limit_s=1.5)
    assert results["ok/0"] is results["ok/2"] is None
    assert "not done after 1.5 s" in results["hang/1"]


def test_a_worker_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="ended with code 3 before it began"):
        run(tmp_path, ["ok/0"], script="raise SystemExit(3)")


def test_time_left_follows_what_was_seen():
    units = [make("a"), make("b"), make("c"), Unit("cost", "d", "d", {}, alone=True)]
    clock = Clock(units, jobs=2)
    assert clock.remaining() == (0.0, False)
    clock.finished(units[0], 10.0)
    assert clock.remaining() == (
        pytest.approx(10 / 2 * 2),
        False,
    )  # two of a kind on two jobs; the other kind is unknown
    assert clock.note() == ", at least 10 s left"
    clock.finished(units[3], 2.0)
    assert clock.remaining() == (pytest.approx(10.0), True)
    clock.started(units[1])
    clock.running[units[1]] = (time.monotonic() - 2.0, 0.5)  # half done after 2 s: 4 s in all, so a mean of 7 s
    assert clock.remaining() == (pytest.approx((7 * 0.5 + 7) / 2, rel=0.01), True)
    assert clock.note() == ", about 5 s left"
    for unit in units[1:3]:
        clock.finished(unit, 1.0)
    assert clock.note() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_times_for_people(seconds, text):
    assert show_seconds(seconds) == text


def test_a_record_counts_only_whole_and_for_its_own_inputs(tmp_path):
    unit = make("v/x")
    assert read_record(tmp_path, unit) is None
    write_record(tmp_path, unit, {"loss": 1.5}, 2.0)
    assert read_record(tmp_path, unit)["result"] == {"loss": 1.5}
    assert read_record(tmp_path, Unit("train", "v/x", "v/x", {"path": "other"})) is None
    path = record_path(tmp_path, unit)
    path.write_text(path.read_text()[:-5])
    assert read_record(tmp_path, unit) is None
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(tmp_path, unit, {"loss": float("nan")}, 2.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    write_json(path, {"result": 1, "fingerprint": unit.fingerprint})
    assert read_record(tmp_path, unit) is None
