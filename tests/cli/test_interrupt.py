"""Ctrl-C and other signals that end a command: exit code, no traceback, what is done is printed, no process is left."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import main
from tests.support.small_models import two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

COMMAND = [sys.executable, "-c", "import sys; from deepseek_attn.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = two_layers()
    return write_checkpoint(RandomSource(config, seed=5), config, tmp_path_factory.mktemp("model") / "m")


def generate(checkpoint, *flags: str) -> list[str]:
    flags = ("--prompt", "abc", "--temperature", "0", "--ignore-eos", *flags)
    return [*COMMAND, "generate", "--model", str(checkpoint), "--device", "cpu", *flags]


@pytest.fixture(scope="module")
def whole(checkpoint) -> str:
    """What is printed when nothing interrupts."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(generate(checkpoint, "--max-tokens", "120")[len(COMMAND) :]) == 0
    return out.getvalue()


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def listen() -> None:
    """In the child: a shell's background jobs ignore the signal, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen_on_terminal() -> None:
    listen()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(descriptor: int, process: subprocess.Popen, enough) -> bytes:
    """What a process writes, until ``enough`` says so."""
    found, deadline = b"", time.monotonic() + 900
    while not enough(found):
        assert time.monotonic() < deadline, found
        assert process.poll() is None, found
        found += os.read(descriptor, 4096)
    return found


@exhaustive_on_cpu
@pytest.mark.parametrize("times", tiered([1, 3], [3]))
def test_interrupted_generation(checkpoint, whole, times):
    command = generate(checkpoint, "--max-tokens", "30000")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=listen,
    )  # fmt: skip
    early = read_until(required(process.stdout).fileno(), process, lambda text: len(text) > 20)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"KeyboardInterrupt" not in err
    text = (early + out).decode()
    common = min(len(text), len(whole.rstrip("\n")))
    assert text[:common] == whole[:common], "what was printed before is part of the answer"
    assert not alive(process.pid)


@pytest.mark.exhaustive
def test_interrupted_on_a_terminal(checkpoint):
    """The terminal's own settings are as they were, and its cursor is at the start of a line."""
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    process = subprocess.Popen(
        generate(checkpoint, "--max-tokens", "30000"), stdout=follower, stderr=follower, stdin=follower,
        start_new_session=True, preexec_fn=listen_on_terminal,
    )  # fmt: skip
    shown = read_until(leader, process, lambda text: len(text) > 100)
    os.write(leader, b"\x03")  # Ctrl-C, which the terminal turns into the signal
    deadline = time.monotonic() + 900
    while process.poll() is None and time.monotonic() < deadline:
        os.set_blocking(leader, False)
        try:
            shown += os.read(leader, 4096)
        except BlockingIOError:
            time.sleep(0.01)
    assert process.wait() == 130
    with contextlib.suppress(OSError):
        shown += os.read(leader, 1 << 16)
    assert b"Traceback" not in shown
    assert shown.endswith(b"\r\n")
    assert termios.tcgetattr(follower) == before
    assert not alive(process.pid)
    os.close(leader)
    os.close(follower)


def test_a_request_that_fails_is_one_message(checkpoint, capsys, monkeypatch):
    from deepseek_attn.runner.model_runner import ModelRunner

    def broken(self, *args, **kwargs):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "step", broken)
    assert main(generate(checkpoint)[len(COMMAND) :]) == 1
    assert "the request failed: RuntimeError: the device is gone" in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import sys

class Interrupts:  # Ctrl-C while a module is looked for
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from deepseek_attn.cli import main
print(*(name for name in sys.modules if name.startswith("deepseek_attn.") or name in ("numpy", "torch")), flush=True)
sys.exit(main())
"""
ENTRY = {"cli", "cli.terminal", "utils", "utils.garbage", "utils.terminal", "utils.version"}


@pytest.mark.parametrize("module", ["deepseek_attn.cli.log", "deepseek_attn.cli.options", "numpy", "torch"])
def test_interrupted_imports(module):
    """Nothing but the entry point is imported before an interruption is caught, which then ends like any other."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT.replace("MODULE", repr(module)), "generate"]
    ended = subprocess.run([*command, "--prompt", "x"], capture_output=True, text=True, preexec_fn=listen)
    assert (ended.returncode, ended.stderr.strip()) == (130, "")
    assert {name.removeprefix("deepseek_attn.") for name in ended.stdout.split()} == ENTRY


def test_an_interruption_while_an_error_is_explained(monkeypatch, capsys):
    """Its message may need torch, whose import takes long."""

    def interrupted(error):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepseek_attn.cli.explanation", interrupted)
    assert main(["plan", "--model", "nowhere"]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.fixture
def as_process(monkeypatch):
    """Runs a command as the process does, with its arguments and its signal handlers, started by a shell."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}  # not of background jobs

    def run(command: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["deepseek-attn", *command])
        return main()

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", tiered(["SIGINT", "SIGTERM", "SIGHUP"], ["SIGTERM"]))
def test_a_signal_keeps_the_prompts_that_are_done(checkpoint, tmp_path, capsys, monkeypatch, as_process, name):
    from deepseek_attn.runner.model_runner import ModelRunner

    (tmp_path / "prompts").write_text("a\nb\nc\n")
    flags = ("--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--max-num-seqs", "1", "--device", "cpu")
    command = ["generate", "--model", str(checkpoint), "--prompts", str(tmp_path / "prompts"), *flags]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]
    number, compute, steps = getattr(signal, name), ModelRunner.step, itertools.count()
    handler = signal.getsignal(number)

    def step(self, *args):
        if next(steps) == 7:  # two prompts are done, of three steps each
            os.kill(os.getpid(), number)
        return compute(self, *args)

    monkeypatch.setattr(ModelRunner, "step", step)
    assert as_process(command) == 128 + number
    captured = capsys.readouterr()
    assert captured.out.splitlines() == lines[:2]
    assert "Traceback" not in captured.err
    signal.signal(number, handler)
    steps, out = itertools.count(), tmp_path / "out"
    assert as_process([*command, "--out", str(out)]) == 128 + number
    assert out.read_text().splitlines() == lines[:2]
    assert f"{out}: 2 lines; --resume goes on with the other prompts" in capsys.readouterr().err
    assert as_process([*command, "--out", str(out), "--resume"]) == 0
    assert out.read_text().splitlines() == lines


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_command_has_ended(name):
    """The interpreter shuts down in peace: exit callbacks run, and the exit code is that of the command."""
    script = f"""
import atexit, os, signal, sys
from deepseek_attn.cli import main

def interrupted():
    os.kill(os.getpid(), signal.{name})
    print("whole")

atexit.register(interrupted)
sys.argv = ["deepseek-attn", "plan"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=listen)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("whole\n")


def test_a_signal_that_is_ignored_stays_so(monkeypatch, as_process):
    """As under ``nohup``, and for the ranks of a model, which may hang in a collective."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert as_process(["plan"]) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert as_process(["plan"]) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.exhaustive
def test_a_terminated_checkpoint_leaves_nothing(tmp_path):
    command = [*COMMAND, "make-checkpoint", "--config", "small", "--out", str(tmp_path / "new" / "model")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 900
    while not list(tmp_path.glob("new/.model*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    _, err = process.communicate(timeout=900)
    assert process.returncode == 143
    assert err == b"\n"
    assert list(tmp_path.iterdir()) == []
