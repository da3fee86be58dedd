"""Tensor-parallel and data-parallel ranks: processes with one GPU each that run one model over torch.distributed.

Two ways to share the work, over the same ranks:

* **Tensor parallel** (the default). Every rank has the same tokens. Attention heads with their sinks and output groups,
  the inner width of experts and dense MLPs (or routed experts, see `splits_widths`), and the vocabulary are sharded;
  each sublayer ends in one all-reduce. Parts with one head only (keys, caches, compressors, indexers) are replicated.
* **Data-parallel attention**. Every rank has different requests and all weights of attention, so that no cache is
  replicated. Experts are sharded as before: an all-gather of tokens before them, a reduce-scatter of sums after them.
  `Parallel.agree` keeps the ranks in step, those without work included.

Sums over ranks have another order than on one rank, and the dtype of the model: results agree with the results of one
process to rounding, not bit for bit. All ranks have the same bits, so tensor-parallel ranks choose the same tokens.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepseek_attn.kernels.collectives import PeerBuffers, all_gather, all_reduce, reduce_scatter
from deepseek_attn.layers.launch import (
    OthersLost,
    RankFailed,
    check_launch,
    environment,
    listen_on,
    meet,
    one_message,
    process_group,
)
from deepseek_attn.layers.peers import Peers, open_peers
from deepseek_attn.layers.weights import Shard
from deepseek_attn.utils.processes import check_timeout, end_with_parent

ONE_SHOT_BYTES = 1 << 21  # largest message of the one-shot exchange on one host, which is faster than NCCL up to here
TIMEOUT_SECONDS = 600.0  # a collective's time limit: other ranks may still be loading
# torch 2.13 has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class StepNeeds(NamedTuple):
    """Size of a step of one rank, or of all: then the largest.

    Attributes:
        rows: new tokens.
        longest: length of the longest sequence after the step.
        eager: no CUDA graph may hold the step.
    """

    rows: int = 0
    longest: int = 0
    eager: bool = False


@dataclass
class Parallel:
    """The rank of this process, and the collectives it takes part in.

    Made by `launched`. `single` is a process alone, for which every collective is the identity.

    Attributes:
        rank, world: number of this rank, and number of ranks.
        dp_attention: data-parallel attention.
        step_rows: tokens of every rank in the running step, padding included; set by `agree`.
        peers: memory through which small messages go, of ranks on one host with GPUs; None: all go through torch.
    """

    rank: int = 0
    world: int = 1
    dp_attention: bool = False
    step_rows: int = field(default=0, repr=False)
    peers: Peers | None = field(default=None, repr=False)
    _seed: int = field(default=0, repr=False)

    @classmethod
    def single(cls) -> Parallel:
        return cls()

    @property
    def token_ranks(self) -> int:
        """Number of ranks that compute the same tokens: they shard heads and vocabulary."""
        return 1 if self.dp_attention else self.world

    def shard(self, dim: int, total: int, unit: int = 1) -> Shard | None:
        """This rank's shard of dimension ``dim`` of size ``total``, over all ranks; None for all of it.

        Shards are equal, or differ by one ``unit`` if equal ones would not consist of whole units: the first ranks
        then have the larger ones.
        """
        if self.world == 1:
            return None
        if total % (self.world * unit) == 0:
            unit = total // self.world
        count, larger = divmod(total // unit, self.world)
        first = self.rank * count + min(self.rank, larger)
        return Shard(dim, first * unit, (count + (self.rank < larger)) * unit)

    def token_shard(self, dim: int, total: int, unit: int = 1) -> Shard | None:
        """This rank's shard among the ranks with the same tokens; None for all of it. See `shard`."""
        return None if self.token_ranks == 1 else self.shard(dim, total, unit)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce over the ranks that have the same tokens. May overwrite ``x``."""
        return x if self.token_ranks == 1 or not x.numel() else self._all_reduce(x.contiguous())

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if peers := self._peers_for(x.nbytes):
            return all_reduce(x, peers)
        self._exchange(dist.all_reduce, x)
        return x

    def _peers_for(self, size: int) -> PeerBuffers | None:
        """Memory for a message of ``size`` bytes to each rank; None where it goes through torch."""
        if self.peers is None or not exchanged(size, self.world) or not self.peers.buffers.holds(size):
            return None
        return self.peers.buffers

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, n]`` of each rank that has the same tokens -> ``[T, token_ranks * n]``."""
        if self.token_ranks == 1:
            return x
        rows, columns = x.shape
        x = x.contiguous()
        if peers := self._peers_for(x.nbytes):
            gathered = all_gather(x, peers)
        else:
            gathered = x.new_empty(self.world * rows, columns)
            if rows:
                self._exchange(_all_gather, gathered, x)
        return gathered.view(self.world, rows, columns).transpose(0, 1).reshape(rows, self.world * columns)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Before experts: all-gather of the tokens of all ranks, each padded with zeros to ``step_rows``."""
        if not self.dp_attention:
            return x
        part = x
        if len(x) < self.step_rows:
            part = x.new_zeros(self.step_rows, *x.shape[1:])
            part[: len(x)] = x
        part = part.contiguous()
        if peers := self._peers_for(part.nbytes):
            return all_gather(part, peers)
        everyone = x.new_empty(self.world * self.step_rows, *x.shape[1:])
        self._exchange(_all_gather, everyone, part)
        return everyone

    def own_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """Values of this rank's tokens, and zeros for tokens of other ranks, in the order of `gather_tokens`."""
        if not self.dp_attention:
            return y
        everyone = y.new_zeros(self.world * self.step_rows, *y.shape[1:])
        first = self.rank * self.step_rows
        everyone[first : first + len(y)] = y
        return everyone

    def sum_experts(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        """After experts: sums over all ranks for this rank's ``rows`` tokens. May overwrite ``y``."""
        if not self.dp_attention:
            return self.sum(y)
        y = y.contiguous()
        if peers := self._peers_for(y.nbytes // self.world):
            return reduce_scatter(y, peers)[:rows]
        summed = y.new_empty(self.step_rows, y.shape[1])
        self._exchange(_reduce_scatter, summed, y)
        return summed[:rows]

    def agree(self, step: StepNeeds, device: torch.device) -> StepNeeds:
        """With data-parallel attention, begins a step; returns the common requirements of all ranks' steps.

        Waits until every rank has begun one. No rows: no rank has work left.
        """
        most = torch.tensor([step.rows, step.longest, step.eager], device=device, dtype=torch.int64)
        self._exchange(dist.all_reduce, most, dist.ReduceOp.MAX)
        rows, longest, eager = most.tolist()
        self.step_rows = rows
        return StepNeeds(rows, longest, bool(eager))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that all ranks do: an error inside becomes `RankFailed`; with one rank it stays as it is."""
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            if self.peers is not None and (missing := self.peers.missing()) is not None:
                raise OthersLost(f"rank {self.rank} of {self.world} waited for rank {missing}") from error
            raise RankFailed(f"rank {self.rank} of {self.world} failed within a step: {error}") from error

    def fresh_seed(self) -> int | None:
        """A random seed that ranks with the same tokens have in common; None where each may have a different one."""
        if self.token_ranks == 1:
            return None
        self._seed += 1
        return self._seed

    def share(self, value: Any) -> Any:
        """Rank 0's picklable ``value``, on every rank."""
        values = [value]
        if self.world > 1:
            self._exchange(dist.broadcast_object_list, values)
        return values[0]

    def _exchange(self, collective: Callable, *args: Any) -> None:
        try:
            collective(*args)
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]  # without torch's advice
            raise OthersLost(f"rank {self.rank} of {self.world} waited for the others: {reason}") from error


def exchanged(size: int, world: int) -> bool:
    """Whether ranks of one host exchange messages of ``size`` bytes themselves, if their GPUs can."""
    return size * (world - 1) <= ONE_SHOT_BYTES


@contextmanager
def launched(
    world: int,
    device: torch.device | str | None = None,
    dp_attention: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    interface: str | None = None,
    rendezvous: str | None = None,
) -> Iterator[tuple[Parallel, torch.device]]:
    """Joins the ranks that a launcher has started, over NCCL on GPUs and Gloo on CPUs; 1 is a process alone.

    An error inside ends the ranks. The first rank that fails raises it; ranks that fail in consequence raise
    ``SystemExit`` of status 1, so that only one message is seen. If a rank has died or hangs, another rank raises
    `RankFailed` with its number. Launchers end waiting ranks; without a launcher they fail after ``timeout_seconds``
    (over Gloo, as soon as the failed process is gone).

    Args:
        world: ranks that are expected.
        device: default: GPU number ``LOCAL_RANK`` if there are GPUs, else the CPU.
        timeout_seconds: time limit of a rank for the rendezvous and for each collective.
        interface: name of the network interface to listen on. Default: loopback if all ranks are on this machine, else
            ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``.
        rendezvous: URL of the rendezvous (``file://...``); default: torchrun's variables.

    Yields:
        the ranks, and the device of this one.

    Raises:
        ValueError: not started by a launcher, or with another number of processes, or with fewer GPUs, or no such
            interface or timeout.
    """
    rank, started = environment("RANK", 0), environment("WORLD_SIZE", 1)
    if started == 1:
        _, device = check_launch(world, device)
        yield Parallel.single(), device
        return
    timeout = timedelta(seconds=check_timeout(timeout_seconds))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which leaves ranks behind when it is killed
        end_with_parent()
    listen_on(interface)
    try:
        store = meet(rank, started, timeout, rendezvous)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"rank {rank} of {started} met no others within {timeout_seconds:g} s: {error}") from error
    with one_message(store, rank, started, timeout_seconds):
        rank, device = check_launch(world, device)
        with process_group(store, rank, world, device, timeout):
            parallel = Parallel(rank, world, dp_attention)
            parallel._seed = parallel.share(secrets.randbits(48))
            if device.type == "cuda":
                parallel.peers = open_peers(rank, world, device, timeout_seconds)
            yield parallel, device
