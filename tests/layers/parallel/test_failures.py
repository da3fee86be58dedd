"""Ranks that fail, die or hang: all end, one message is seen, nothing is left; and who can connect to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepseek_attn.cli import ranks as cli
from deepseek_attn.kernels.collectives import PeerBuffers
from deepseek_attn.layers import launch
from deepseek_attn.layers.launch import OthersLost, RankFailed, listen_on
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.peers import Peers
from tests.layers.parallel.test_launch import torchrun
from tests.support.tiers import EXHAUSTIVE
from tests.support.typed import of_type, required

ROOT = Path(__file__).parents[3]
LOST = OthersLost("rank 0 waited")

# A rank over Gloo: it sums, then one does what the second argument says while the other waits for its part.
RANK = """
import os, signal, sys, time
import torch
from deepseek_attn.layers import launch
from deepseek_attn.layers.parallel import launched
how, seconds = sys.argv[1:]
if how in ("kill", "hang"):
    launch.GRACE_SECONDS = 1  # there is nobody to say anything
with launched(2, "cpu", timeout_seconds=float(seconds)) as (parallel, _):
    parallel.sum(torch.ones(3))
    sockets = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    rows = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name).readlines()[1:]]
    found = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
    sys.stdout.write(" ".join(["listens", *found]) + "\\n")  # in one piece: ranks may share a pipe
    sys.stdout.flush()
    if how == "all raise" or (how == "raise" and parallel.rank == 1):
        raise ValueError("this rank stops here")
    if how == "kill" and parallel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang" and parallel.rank == 1:
        time.sleep(3600)
    parallel.sum(torch.ones(3))
"""
LOOPBACK = "0100007F"  # 127.0.0.1 in /proc/net/tcp


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([ValueError("bad"), LOST, LOST], [ValueError, SystemExit, SystemExit]),
        ([LOST, ValueError("bad"), None], [SystemExit, ValueError, None]),
        ([RankFailed("within a step"), LOST], [RankFailed, SystemExit]),
        ([KeyboardInterrupt(), LOST], [KeyboardInterrupt, RankFailed]),
        ([None, None], [None, None]),
    ],
)
def test_the_rank_that_failed_speaks(monkeypatch, errors, expected):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    found = end_together(errors)
    assert [error and type(error) for error in found] == expected
    assert all(error.code == 1 for error in found if isinstance(error, SystemExit))


def test_a_message_of_all_ranks_is_seen_once():
    """They read the same checkpoint."""
    found = end_together([ValueError("bad")] * 4)
    assert sorted(type(error).__name__ for error in found) == ["SystemExit"] * 3 + ["ValueError"]


def test_ranks_that_say_nothing_are_named(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    found = end_together([LOST, None, LOST, None])
    failed = [error for error in found if isinstance(error, RankFailed)]
    assert len(failed) == 1
    assert str(failed[0]).startswith("ranks 1, 3 of 4 died (killed, out of memory?) or did not take part for 9 s")
    assert sum(isinstance(error, SystemExit) for error in found) == 1


def test_a_rank_that_a_kernel_waited_for_is_named():
    buffers = PeerBuffers(0, 4, 1024, torch.zeros(5), torch.zeros(1), torch.tensor([0]), 5)
    ranks = Parallel(0, 4, peers=Peers(buffers, ()))
    with pytest.raises(RankFailed, match="within a step: CUDA error"), ranks.together():
        raise RuntimeError("CUDA error")
    buffers.missing.fill_(3)  # as the kernel counts them, from 1 on
    with pytest.raises(OthersLost, match="rank 0 of 4 waited for rank 2"), ranks.together():
        raise RuntimeError("CUDA error")


def end_together(errors: list[BaseException | None]) -> list[BaseException | None]:
    """What ranks end with that raise these errors; None: with nothing."""
    store = dist.HashStore()

    def end(rank: int) -> BaseException | None:
        try:
            with launch.one_message(store, rank, len(errors), 9):
                if (error := errors[rank]) is not None:
                    raise error
        except BaseException as raised:
            return raised
        return None

    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(end, range(len(errors))))


def test_the_store_is_served_on_its_address_only(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    store = of_type(launch.meet(0, 2, timedelta(seconds=30), None), dist.TCPStore)
    store.set("key", "value")
    with socket.create_connection(("127.0.0.1", store.port)):
        pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", store.port)):
        pass


@pytest.mark.parametrize(
    ("environment", "interface", "expected"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None, "lo"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None, "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None, None),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "head-node"}, None, None),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "told"}, None, "told"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "told"}, "fast0", "fast0"),
    ],
)
def test_the_interface(monkeypatch, environment, interface, expected):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "fast0")])
    monkeypatch.setattr(os, "environ", dict(environment))
    listen_on(interface)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


WAITS = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (["pass", "pass"], None),
        ([WAITS, "raise SystemExit(2)", WAITS], (1, 2)),
        ([WAITS, "import os; os.kill(os.getpid(), 9)"], (1, -9)),
        (["import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", "raise SystemExit(3)"], (1, 3)),
    ],
)
def test_one_rank_that_fails_ends_all(monkeypatch, programs, expected):
    """The last one waits and cannot be ended, but killed."""
    monkeypatch.setattr(cli, "END_SECONDS", 0.5)
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    program = f"import os; exec({programs!r}[int(os.environ['RANK'])])"
    assert cli.start_ranks([sys.executable, "-S", "-c", program], len(programs)) == expected
    assert len(started) == len(programs)
    assert all(rank.returncode is not None for rank in started)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it, on Linux")
def test_ranks_end_with_their_launcher():
    """The pipe that all of them hold is closed when the last one is gone; ``timeout`` ends a test that hangs."""
    program = "import os, time; os.write(1, b'started\\n'); time.sleep(600)"  # in one piece
    launcher = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from deepseek_attn.cli.ranks import start_ranks; "
        f"start_ranks([sys.executable, '-S', '-c', {program!r}], 2)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert [required(process.stdout).readline() for _ in range(2)] == ["started\n"] * 2
    process.kill()
    assert process.communicate(timeout=300) == ("", None)


@EXHAUSTIVE
def test_a_rank_that_raises_under_torchrun():
    """The other rank would wait an hour for the sum; ``timeout`` ends a test that hangs."""
    command = torchrun(2, "--no-python", sys.executable, "-c", RANK, "raise", "3600")
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: this rank stops here") == 1
    assert {line.rpartition(":")[0] for line in done.stdout.splitlines()} == {f"listens {LOOPBACK}"}


BY_HAND = {
    "raise": "ValueError: this rank stops here",
    "all raise": "ValueError: this rank stops here",
    "kill": "RankFailed: rank 1 of 2 died",
    "hang": "RankFailed: rank 1 of 2 died (killed, out of memory?) or did not take part for 3 s",
}


@EXHAUSTIVE
@pytest.mark.parametrize("how", BY_HAND)
def test_ranks_that_nobody_watches(how):
    """Without a launcher each rank ends by itself, but for one that hangs; one message is seen."""
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, how, "3" if how == "hang" else "3600"], cwd=ROOT, text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, said = ranks[0].communicate(timeout=900)
        if how == "hang":
            ranks[1].kill()
        listens, also_said = ranks[1].communicate(timeout=900)
    finally:
        for rank in ranks:
            rank.kill()
    assert (said + also_said).count(BY_HAND[how]) == 1
    assert ranks[0].returncode == 1
    assert ranks[1].returncode in (1, -signal.SIGKILL)
    assert listens.startswith(f"listens {LOOPBACK}:")
