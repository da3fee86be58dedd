"""``--tensor-parallel``: one model on several GPUs, with one rank per GPU.

Under torchrun this process is already a rank. Otherwise it starts the ranks as processes on this machine. They
rendezvous through a file, so that only their own connections listen, on the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepseek_attn.cli.terminal import say
from deepseek_attn.utils.garbage import without_collections
from deepseek_attn.utils.processes import check_interface, check_timeout, end_with_parent

if TYPE_CHECKING:
    from deepseek_attn.layers.parallel import Parallel

RENDEZVOUS = "DEEPSEEK_ATTN_RENDEZVOUS"  # rendezvous URL of the ranks that this command has started
MOST_RANKS = 64  # started on one machine
POLL_SECONDS = 0.05
END_SECONDS = 5.0  # for ranks to end by themselves after an interrupt or a request


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N GPUs of this machine; or of several, under torchrun (docs/parallel.md)",
    )
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=600,
        metavar="SECONDS",
        help="give up when a rank has waited this long for the others (default: 600)",
    )
    parser.add_argument(
        "--rank-interface",
        metavar="NAME",
        help="network interface that ranks listen on (default: loopback if all are on this machine)",
    )


@contextmanager
def joined_ranks(args: argparse.Namespace) -> Iterator[Parallel]:
    """Joins the ranks of ``--tensor-parallel``, and sets ``args.parallel`` and ``args.device`` for `runner_options`.

    Only rank 0 prints and writes files. If another rank fails, only the first failure is reported.

    Raises:
        SystemExit: in the process that started the ranks, with their exit code; in a rank, after another rank failed.
    """
    if args.tensor_parallel > 1 and "WORLD_SIZE" not in os.environ:
        raise SystemExit(run_as_ranks(args))
    with without_collections():  # the first import of torch
        from deepseek_attn.layers.launch import RankFailed
        from deepseek_attn.layers.parallel import launched

    try:
        with ExitStack() as stack:
            parallel, device = stack.enter_context(
                launched(
                    args.tensor_parallel,
                    args.device,
                    timeout_seconds=args.rank_timeout,
                    interface=args.rank_interface,
                    rendezvous=os.environ.get(RENDEZVOUS),
                )
            )
            args.parallel = parallel
            if parallel.world > 1:
                args.device = device
            if parallel.rank:
                args.profile = args.stats = None
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            yield parallel
    except RankFailed as error:
        complain(args, str(error))
        raise SystemExit(1) from error


def complain(args: argparse.Namespace, message: str) -> None:
    say(f"deepseek-attn {args.command}: error: {message}")


def run_as_ranks(args: argparse.Namespace) -> int:
    """Runs this command as ranks on this machine; returns 0, or the exit code of the first rank that failed.

    Raises:
        ValueError: more ranks than are started on one machine, or a wrong timeout or interface; none was started.
    """
    world = args.tensor_parallel
    check_timeout(args.rank_timeout)
    check_interface(args.rank_interface)
    if world > MOST_RANKS:
        raise ValueError(f"--tensor-parallel {world}: up to {MOST_RANKS} ranks run on one machine; torchrun joins more")
    failure = start_ranks([sys.executable, "-m", "deepseek_attn", *args.command_line], world)
    if failure is None:
        return 0
    if failure.code < 0:
        name = signal.Signals(-failure.code).name
        complain(args, f"rank {failure.rank} of {world} was ended by {name} (killed, or out of memory)")
        return 1
    return failure.code


class RankFailure(NamedTuple):
    """The first rank that failed, and its exit code: -n if signal n ended it."""

    rank: int
    code: int


def start_ranks(command: list[str], world: int) -> RankFailure | None:
    """Runs a command as ranks that rendezvous through a file, until all have ended or one has failed.

    No rank survives this call: if a rank fails, the remaining ranks are terminated; if this process is killed, all
    ranks are killed too.
    """
    ranks: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "store").as_uri()
        common = os.environ | {RENDEZVOUS: meeting, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        try:
            for rank in range(world):
                env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                stdin = subprocess.DEVNULL if rank else None
                ranks.append(subprocess.Popen(command, stdin=stdin, env=env, preexec_fn=end_with_parent))
            while any(rank.poll() is None for rank in ranks):
                if failure := first_failure(ranks):
                    return failure
                time.sleep(POLL_SECONDS)
            return first_failure(ranks)
        except KeyboardInterrupt:  # a terminal interrupts all of its processes: rank 0 writes finished results
            wait_for(ranks)
            raise
        finally:
            end(ranks)


def first_failure(ranks: list[subprocess.Popen]) -> RankFailure | None:
    """A failed rank, preferably a killed rank, which may have caused further failures."""
    failures = [RankFailure(number, code) for number, rank in enumerate(ranks) if (code := rank.poll())]
    return min(failures, key=lambda failure: failure.code > 0, default=None)


def end(ranks: list[subprocess.Popen]) -> None:
    """Terminates the running ranks, and kills ranks that hang."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    wait_for(ranks)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


def wait_for(ranks: list[subprocess.Popen]) -> None:
    """Waits until all ranks have ended, at most `END_SECONDS`."""
    deadline = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
