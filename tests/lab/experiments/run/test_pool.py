"""Worker processes: what comes back from them, what dies with them, and how long the rest takes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseek_attn.lab.experiments.define.units import Unit
from deepseek_attn.lab.experiments.run.pool import Running, WorkerPool
from deepseek_attn.lab.experiments.run.progress import Progress
from deepseek_attn.lab.experiments.run.records import read_record, record_path, write_json, write_record
from deepseek_attn.lab.experiments.run.run import gpu_environments
from tests.lab.experiments.run.pool_tasks import CannotStart, act
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

# An experiment in a process of its own: prints the process ids of its workers once both hang.
HANGING = """
import sys
from pathlib import Path
from deepseek_attn.lab.experiments.define.units import Unit
from deepseek_attn.lab.experiments.run.pool import WorkerPool
from tests.lab.experiments.run.pool_tasks import act

begun = []

def running(unit, state):
    begun.append(unit)
    if len(begun) == 2:
        print(*(worker.process.pid for worker in pool.workers), flush=True)

if __name__ == "__main__":
    units = [Unit("train", f"hang/{i}", f"hang/{i}", {}, None) for i in range(3)]
    pool = WorkerPool(act, Path(sys.argv[1]), 2, running, print)
    pool.run(units)
"""


def make(path, alone=False):
    return Unit("train", path, path, {"path": path}, untyped(None), alone)


def run(tmp_path, paths, jobs=1, task=act, limit_s=None, alone=()):
    """Errors by path; checks that units which run alone do."""
    units, results, busy = [make(path, path in alone) for path in paths], {}, set()
    assert len({*paths}) == len(paths)

    def running(unit, state):
        busy.add(unit)
        assert len(busy) <= (1 if any(unit.alone for unit in busy) else jobs)

    def finished(unit, end):
        busy.discard(unit)
        assert unit.path not in results
        results[unit.path] = end.error

    pool = WorkerPool(task, tmp_path, jobs, running, finished, limit_s)
    pool.run(units)
    assert not pool.workers
    return results


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.exhaustive
def test_units_share_processes_and_some_run_alone(tmp_path):
    paths = [f"ok/{i}" for i in range(7)]
    assert run(tmp_path, paths, jobs=2, alone=paths[:3]) == dict.fromkeys(paths)
    lines = [line for log in tmp_path.iterdir() for line in log.read_text().splitlines()]
    assert sorted(lines) == [f"act {path}" for path in paths]
    assert {log.name for log in tmp_path.iterdir()} == {"worker0.txt", "worker1.txt"}


@pytest.mark.parametrize("jobs", tiered([1, 2], [2]))
def test_errors_and_crashes_cost_their_own_unit_only(tmp_path, jobs):
    results = run(tmp_path, ["ok/0", "crash/1", "error/2", "full/3", "killed/4"], jobs)
    assert results["ok/0"] is None
    assert results["error/2"] == results["full/3"] == "ValueError: no"
    assert "ended with code 7; see " in results["crash/1"]
    assert "ended with code -9; see " in results["killed/4"]
    assert any("ValueError: no" in log.read_text() for log in tmp_path.iterdir()), "no traceback in the log"


@pytest.mark.exhaustive
def test_a_unit_that_hangs_is_given_up(tmp_path):
    results = run(tmp_path, ["hang/0", "ok/1"], limit_s=4.0)
    assert results["ok/1"] is None
    assert "not done after 4.0 s" in results["hang/0"]


def test_a_worker_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="ended with code 3 before it began"):
        run(tmp_path, ["ok/0"], task=CannotStart())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks at processes in /proc")
@pytest.mark.parametrize("how", tiered(["Ctrl-C", "SIGKILL"], ["SIGKILL"]))
def test_no_process_outlives_a_run_that_is_ended(tmp_path, how):
    """Ctrl-C goes to all processes of a terminal; SIGKILL leaves the first one no time to end the others."""
    file = tmp_path / "hanging.py"
    file.write_text(HANGING)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    process = subprocess.Popen(
        [sys.executable, str(file), str(tmp_path / "logs")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    workers = [int(pid) for pid in required(process.stdout).readline().split()]
    assert len(workers) == 2
    assert all(map(running, workers))
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    _, errors = process.communicate(timeout=900)
    if how == "Ctrl-C":
        assert errors.count("KeyboardInterrupt") == 1, "a worker has something to say of Ctrl-C"
    deadline = time.monotonic() + 900
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, workers))


def test_time_left_follows_what_was_seen():
    units = [make("a"), make("b"), make("c"), Unit("cost", "d", "d", {}, untyped(None), alone=True)]
    progress = Progress(units, jobs=2)
    assert progress.remaining() == (0.0, False)
    progress.finished(units[0], 10.0)
    # two of a kind on two jobs; the other kind is unknown
    assert progress.remaining() == (pytest.approx(10 / 2 * 2), False)
    assert progress.note() == ", at least 00:10 left"
    progress.finished(units[3], 2.0)
    assert progress.remaining() == (pytest.approx(10.0), True)
    progress.running(units[1], Running(part=0.5, seconds=2.0))  # 4 s in all, so a mean of 7 s
    assert progress.remaining() == (pytest.approx((7 * 0.5 + 7) / 2), True)
    assert progress.note() == ", about 00:05 left"
    for unit in units[1:3]:
        progress.finished(unit, 1.0)
    assert progress.note() == ""


def test_the_bar_shows_what_runs(monkeypatch):
    shown = []
    monkeypatch.setattr("tqdm.tqdm.set_description_str", lambda self, text: shown.append(text))
    units = [make("a"), make("b")]
    progress = Progress(units, jobs=2)
    progress.running(units[0], Running(part=0.25, seconds=10.0))
    progress.running(units[1], Running(part=0.0, seconds=0.0))
    assert shown == ["a 25%, about 00:35 left", "a 25%, b 0%, about 00:35 left"]
    progress.finished(units[0], 40.0)
    assert progress.bar.total == 2


def test_a_record_counts_only_whole_and_for_its_own_inputs(tmp_path):
    unit = Unit("checkpoint", "v/x", "v/x", {"path": "v/x"}, untyped(None))
    assert read_record(tmp_path, unit) is None
    write_record(tmp_path, unit, {"loss": 1.5}, 2.0)
    assert required(read_record(tmp_path, unit))["result"] == {"loss": 1.5}
    assert read_record(tmp_path, Unit("checkpoint", "v/x", "v/x", {"path": "other"}, untyped(None))) is None
    path = record_path(tmp_path, unit)
    path.write_text(path.read_text()[:-5])
    assert read_record(tmp_path, unit) is None
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(tmp_path, unit, {"loss": float("nan")}, 2.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    write_json(path, {"result": 1, "fingerprint": unit.fingerprint})
    assert read_record(tmp_path, unit) is None


@pytest.mark.exhaustive
def test_processes_take_turns_with_the_sets_of_variables(tmp_path, monkeypatch):
    """Each GPU gets as many processes as another, and this process keeps its environment."""
    monkeypatch.delenv("POOL_TEST", raising=False)
    sets = [{"POOL_TEST": "first"}, {"POOL_TEST": "second"}]
    pool = WorkerPool(act, tmp_path, 4, lambda *_: None, lambda *_: None, environments=sets)
    pool.run([make(f"variable/{i}") for i in range(4)])
    assert "POOL_TEST" not in os.environ
    logs = [(tmp_path / f"worker{i}.txt").read_text().split() for i in range(4)]
    assert [{word for word in log if word in ("first", "second")} for log in logs] == [{"first"}, {"second"}] * 2


@pytest.mark.parametrize(
    ("device", "count", "listed", "expected"),
    [
        ("cuda", 2, None, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        ("cuda", 2, "3, GPU-7", [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}]),
        ("cuda", 1, "3", [{}]),
        ("cuda:1", 2, None, [{}]),
        ("cpu", 0, None, [{}]),
    ],
)
def test_an_experiment_uses_every_gpu_unless_one_is_named(monkeypatch, device, count, listed, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert gpu_environments(device) == expected
