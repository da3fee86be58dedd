"""Ranks of a launcher: their rendezvous, their network interface, and the rank that reports a failure.

Ranks trust each other: messages are not encrypted, and objects are pickled. So they listen on the loopback interface if
all are on one machine, and otherwise on the given interface.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist

from deepseek_attn.config.options import parse_device
from deepseek_attn.utils.processes import check_interface, output_to_stderr

logger = logging.getLogger(__name__)
GRACE_SECONDS = 3.0  # for other ranks to report why a collective failed, and for a launcher to end this process
LAUNCH = "torchrun --nproc-per-node {} SCRIPT"


class RankFailed(BaseException):
    """A step failed on this rank while others wait for its part: the process must end, so nothing should catch it."""


class OthersLost(RankFailed):
    """A collective failed on this rank, most likely because another rank has died or does not take part."""


def check_launch(world: int, device: torch.device | str | None) -> tuple[int, torch.device]:
    """(rank, device) of this process; see `launched` for the errors."""
    started = environment("WORLD_SIZE", 1)
    if world < 1 or started != world:
        raise ValueError(
            f"{world} ranks were asked for, and {started} processes were started: ask for {started} ranks, or start "
            f"`{LAUNCH.format(max(world, 1))} ...`"
        )
    local = environment("LOCAL_RANK", 0)
    device = parse_device(device)
    if device.type == "cuda" and world > 1:
        if device.index is not None:
            raise ValueError(f"device {str(device)!r} with {world} ranks: each has a GPU of its own; use device='cuda'")
        if local >= torch.cuda.device_count():
            raise ValueError(f"rank {local} of this host has no GPU: there are {torch.cuda.device_count()}")
        device = torch.device("cuda", local)
    return environment("RANK", 0), device


MOST_OF_VARIABLES = 2**16 - 1  # ports and ranks


def environment(name: str, default: int) -> int:
    """An integer that torchrun sets: a rank, a number of ranks or a port.

    Raises:
        ValueError: the variable is not an integer from 0 to `MOST_OF_VARIABLES`.
    """
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) <= 9 and int(value) <= MOST_OF_VARIABLES):
        raise ValueError(
            f"the environment variable {name} is {value[:80]!r}: torchrun sets it to an integer from 0 to "
            f"{MOST_OF_VARIABLES}"
        )
    return int(value)


def listen_on(interface: str | None) -> None:
    """Has the ranks of this process listen on a network interface; see `launched`."""
    loopback = next((name for name in check_interface(interface) if name in ("lo", "lo0")), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None:
            os.environ[variable] = interface
        elif loopback is not None and _on_one_machine():
            os.environ.setdefault(variable, loopback)


def _on_one_machine() -> bool:
    """Whether all ranks run on this machine, by the launcher's variables or the rendezvous address."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return environment("LOCAL_WORLD_SIZE", 1) == environment("WORLD_SIZE", 1)
    return os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")


def meet(rank: int, world: int, timeout: timedelta, rendezvous: str | None) -> dist.Store:
    """The key-value store that all ranks have in common.

    torchrun has one. Without it rank 0 serves one at ``MASTER_ADDR`` and ``MASTER_PORT``, on that address only unless
    it is a name that means another one elsewhere.
    """
    by_hand = rendezvous is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = environment("MASTER_PORT", 0)  # of all ranks, so that each refuses a wrong one
    if by_hand and rank == 0 and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        family, _, _, _, (host, *_) = socket.getaddrinfo(os.environ["MASTER_ADDR"], port, type=socket.SOCK_STREAM)[0]
        address = str(host)
        if _on_one_machine() or not ip_address(address).is_loopback:
            server = socket.create_server((address, port), family=family).detach()
            return dist.TCPStore(address, port, world, True, timeout, wait_for_workers=False, master_listen_fd=server)
    return next(dist.rendezvous(rendezvous or "env://", rank, world, timeout=timeout))[0]


@contextmanager
def process_group(store: dist.Store, rank: int, world: int, device: torch.device, timeout: timedelta) -> Iterator[None]:
    """Context with torch's collectives over the ranks: through NCCL on GPUs and Gloo on CPUs."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # kernels and NCCL use the current one
    try:
        with output_to_stderr():  # Gloo of torch 2.10 writes there that ranks are connected
            dist.init_process_group(
                "nccl" if cuda else "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world,
                timeout=timeout, device_id=device if cuda else None,
            )  # fmt: skip
    except RuntimeError as error:
        raise OthersLost(f"rank {rank} of {world} could not join the others: {error}") from error
    try:
        yield
    except BaseException:
        if not cuda:  # NCCL would wait for collectives that never end
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def one_message(store: dist.Store, rank: int, world: int, timeout_seconds: float) -> Iterator[None]:
    """The first rank that fails raises its error, all others raise `SystemExit`. Lost ranks: see `launched`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        lost = _silent_ranks(store, rank, world) if isinstance(error, OthersLost) else None
        first = lost != [] and _is_first(store)
        _wait_for_readers(store, world)
        if not first:
            logger.info("rank %d ends because another one failed", rank, exc_info=True)
            raise SystemExit(1) from error
        if lost is None:
            raise
        some = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        raise RankFailed(
            f"{some} of {world} died (killed, out of memory?) or did not take part for {timeout_seconds:g} s "
            f"(timeout_seconds, --rank-timeout); {error}"
        ) from error


def _is_first(store: dist.Store) -> bool:
    """Whether this rank failed first; True if the store does not answer."""
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:
        return True


def _silent_ranks(store: dist.Store, rank: int, world: int) -> list[int]:
    """Ranks that have not reported a loss some seconds after this rank did; empty if a rank failed."""
    try:
        store.set(f"lost others {rank}", "")
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if store.check(["failed"]):
                return []
            time.sleep(0.05)
        return [other for other in range(world) if not store.check([f"lost others {other}"])]
    except RuntimeError:  # rank 0 served the store, and is gone
        return [0]


def _wait_for_readers(store: dist.Store, world: int) -> None:
    """If this process serves the store, keeps it alive for a while, so that other ranks can read the failure."""
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    with suppress(RuntimeError):
        store.add("ended", 1)
        while isinstance(store, dist.TCPStore) and store.add("ended", 0) < world and time.monotonic() < deadline:
            time.sleep(0.05)
