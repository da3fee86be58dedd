"""Memory of the GPUs of one host that all ranks write into, for `kernels.collectives`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepseek_attn.kernels.collectives import PeerBuffers
from deepseek_attn.kernels.collectives.types import buffer_bytes, initial_state
from deepseek_attn.kernels.common.dispatch import problem_on

logger = logging.getLogger(__name__)
CAPACITY = 1 << 19  # words of a message: 2 MiB
PEER_RANKS = (2, 4, 8)  # of one host that can share memory


@dataclass(frozen=True)
class Peers:
    """Receive buffers of the ranks, and the objects that keep them mapped."""

    buffers: PeerBuffers
    mapped: tuple[object, ...]

    def missing(self) -> int | None:
        """The rank whose message this rank has given up waiting for; None if there was no timeout."""
        number = int(self.buffers.missing)
        return number - 1 if number else None


def open_peers(rank: int, world: int, device: torch.device, timeout_seconds: float) -> Peers | None:
    """Maps the buffers of all ranks; None where a rank cannot, for a reason that is logged. All ranks call it."""
    problem = peer_problem(world, device)
    if _anywhere(problem, device):
        logger.info("small messages go through NCCL: %s", problem or "another rank cannot map memory")
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # unused here, and few can be had at once
    import torch.distributed._symmetric_memory as symmetric

    found = None
    try:
        buffer = symmetric.empty(buffer_bytes(world, CAPACITY) // 8, dtype=torch.int64, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        if (group := dist.group.WORLD) is None:
            raise RuntimeError("torch.distributed has no process group")
        handle = symmetric.rendezvous(buffer, group)
        missing = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
        offset = buffer.data_ptr() - handle.buffer_ptrs[rank]  # in the memory that is shared, the same on every rank
        places = [address + offset for address in handle.buffer_ptrs]
        addresses = torch.tensor([*places, missing.data_ptr()], device=device, dtype=torch.int64)
        limit = min(int(timeout_seconds * 1000), 2**31 - 1)
        buffers = PeerBuffers(rank, world, CAPACITY, addresses, initial_state(device), missing, limit)
        found = Peers(buffers, (buffer, handle))
    except (RuntimeError, OSError) as error:
        problem = f"torch's symmetric memory: {str(error).partition(chr(10))[0]}"
    if _anywhere(problem, device):
        logger.info("small messages go through NCCL: %s", problem or "another rank cannot map memory")
        return None
    return found


def peer_problem(world: int, device: torch.device) -> str:
    """Why the GPUs of the ranks cannot write into each other's memory; empty where they can."""
    if problem := problem_on(device):
        return problem
    if world not in PEER_RANKS:
        return f"{world} ranks; {', '.join(map(str, PEER_RANKS))} share memory"
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        return "the ranks are not known to be on one machine (LOCAL_WORLD_SIZE)"
    others = [other for other in range(min(world, torch.cuda.device_count())) if other != device.index]
    apart = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
    return f"GPU {device.index} does not reach the memory of GPU {apart[0]}" if apart else ""


def _anywhere(problem: str, device: torch.device) -> bool:
    """Whether any rank has a problem."""
    found = torch.tensor([int(problem != "")], device=device, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
