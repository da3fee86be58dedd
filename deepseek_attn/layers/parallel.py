"""Tensor-parallel and data-parallel ranks: processes with one GPU each that run one model over torch.distributed.

Two ways to share the work, over the same ranks:

* **Tensor parallel** (the default). Every rank has the same tokens. Attention heads with their sinks and output groups,
  routed experts, the inner width of shared experts and dense MLPs, and the vocabulary are sharded; each sublayer ends
  in one all-reduce. Parts with one head only (keys, caches, compressors, indexers) are replicated.
* **Data-parallel attention**. Every rank has different requests and all weights of attention, so that no cache is
  replicated. Experts are sharded as before: an all-gather of tokens before them, a reduce-scatter of sums after them.
  `Parallel.agree` keeps the ranks in step, those without work included.

Sums over ranks add up in another order than on one, and in the dtype of the model: results agree with those of one
process to rounding, not bit for bit. All ranks have the same bits, so tensor-parallel ranks choose the same tokens.

Ranks trust each other: what they exchange is not encrypted, and objects are pickled. So they listen on the loopback
interface where all are on one machine, and elsewhere on the interface that they are told.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.options import parse_device
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.kernels.collectives import PeerBuffers, all_gather, all_reduce
from deepseek_attn.layers.peers import Peers, open_peers
from deepseek_attn.layers.weights import Shard
from deepseek_attn.utils.processes import check_interface, check_timeout, end_with_parent

logger = logging.getLogger(__name__)
ONE_SHOT_BYTES = 1 << 21  # that a rank of one host sends itself, in one message to each other one: NCCL takes longer
TIMEOUT_SECONDS = 600.0  # that a rank waits for the others in one collective: they may still be loading
GRACE_SECONDS = 3.0  # in which the others can say why a collective failed, and a launcher can end this process
# torch 2.13 has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LAUNCH = "torchrun --nproc-per-node {} SCRIPT"


class RankFailed(BaseException):
    """A step failed on this rank while others wait for its part: the process must end, so nothing should catch it."""


class OthersLost(RankFailed):
    """A collective failed on this rank, most likely because another one has died, or does not take part."""


class StepNeeds(NamedTuple):
    """Size of a step of one rank, or of all: then the largest.

    Attributes:
        rows: new tokens; longest: length of the longest sequence after the step; eager: it is no decode step that a
            CUDA graph may hold.
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
        """What a message of ``size`` bytes to each rank goes through, if not through torch."""
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
        everyone = x.new_empty(self.world * self.step_rows, *x.shape[1:])
        self._exchange(_all_gather, everyone, part)
        return everyone

    def own_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """Values of this rank's tokens among zeros for those of other ranks, in the order of `gather_tokens`."""
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
        summed = y.new_empty(self.step_rows, y.shape[1])
        self._exchange(_reduce_scatter, summed, y)
        return summed[:rows]

    def agree(self, step: StepNeeds, device: torch.device) -> StepNeeds:
        """With data-parallel attention, begins a step here; returns what the steps of all ranks need together.

        Waits until every rank has begun one. No rows: no rank has work left.
        """
        most = torch.tensor([step.rows, step.longest, step.eager], device=device)
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
            reason = str(error).partition(". ")[0]  # and not what torch advises
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

    An error inside ends the ranks: the first one that fails raises it. Those that then fail because it is gone raise
    ``SystemExit`` of status 1, so that only one message is seen; if a rank has died or hangs, one of the others raises
    `RankFailed` with its number. Launchers end those that wait; without one they fail after ``timeout_seconds`` (over
    Gloo, as soon as the failed process is gone).

    Args:
        world: ranks that are expected.
        device: default: GPU number ``LOCAL_RANK`` if there are GPUs, else the CPU.
        timeout_seconds: that a rank waits for the others, while they join and in each collective.
        interface: name of the network interface to listen on. Default: loopback if all ranks are on this machine, else
            what ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` say.
        rendezvous: URL of a place where the ranks meet (``file://...``); default: as torchrun says.

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
        store = _meet(rank, started, timeout, rendezvous)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"rank {rank} of {started} met no others within {timeout_seconds:g} s: {error}") from error
    with _one_message(store, rank, started, timeout_seconds):
        rank, device = check_launch(world, device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)  # kernels and NCCL use the current one
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world,
                timeout=timeout, device_id=device if cuda else None,
            )  # fmt: skip
        except RuntimeError as error:
            raise OthersLost(f"rank {rank} of {world} could not join the others: {error}") from error
        try:
            parallel = Parallel(rank, world, dp_attention)
            parallel._seed = parallel.share(secrets.randbits(48))
            if cuda and not dp_attention:
                parallel.peers = open_peers(rank, world, device, timeout_seconds)
            yield parallel, device
        except BaseException:
            if not cuda:  # NCCL would wait for collectives that never end
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def environment(name: str, default: int) -> int:
    """An integer that torchrun sets; ValueError if it is none."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ValueError(f"the environment variable {name} is {value!r}: torchrun sets it to an integer from 0 on")
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
    """Whether all ranks run here, as their launcher says, or the address where they meet."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return environment("LOCAL_WORLD_SIZE", 1) == environment("WORLD_SIZE", 1)
    return os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")


def _meet(rank: int, world: int, timeout: timedelta, rendezvous: str | None) -> dist.Store:
    """The key-value store that all ranks have in common.

    torchrun has one. Without it rank 0 serves one at ``MASTER_ADDR`` and ``MASTER_PORT``, on that address only unless
    it is a name that means another one elsewhere.
    """
    by_hand = rendezvous is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if by_hand and rank == 0 and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        port = environment("MASTER_PORT", 0)
        family, _, _, _, (address, *_) = socket.getaddrinfo(os.environ["MASTER_ADDR"], port, type=socket.SOCK_STREAM)[0]
        if _on_one_machine() or not ip_address(address).is_loopback:
            server = socket.create_server((address, port), family=family).detach()
            return dist.TCPStore(address, port, world, True, timeout, wait_for_workers=False, master_listen_fd=server)
    return next(dist.rendezvous(rendezvous or "env://", rank, world, timeout=timeout))[0]


@contextmanager
def _one_message(store: dist.Store, rank: int, world: int, timeout_seconds: float) -> Iterator[None]:
    """The first rank that fails raises its error, the others `SystemExit`; for those that lost one, see `launched`."""
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
    """Whether this rank is the first that failed; also if the others cannot be asked."""
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:
        return True


def _silent_ranks(store: dist.Store, rank: int, world: int) -> list[int]:
    """Ranks that do not say that they have lost others, some seconds after this one did; none if one failed."""
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
    """If this process serves the store, lets the other ranks read there for a while that one has failed."""
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    with suppress(RuntimeError):
        store.add("ended", 1)
        while isinstance(store, dist.TCPStore) and store.add("ended", 0) < world and time.monotonic() < deadline:
            time.sleep(0.05)


def check_launch(world: int, device: torch.device | str | None) -> tuple[int, torch.device]:
    """(rank, device) of this process; see `launched` for what it refuses."""
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


def shard_unit(config: AnyConfig, numerics: Numerics) -> int:
    """Rows or columns of a linear's weight of which a rank has a whole number: those of an FP8 block."""
    if config.quantization_config is None:
        return 1
    return max(numerics.weight_block, numerics.fp8_group if numerics.quantized_weights else 1)


def check_split(config: AnyConfig, numerics: Numerics, parallel: Parallel) -> None:
    """Checks that a model can be split over the ranks.

    Raises:
        ValueError: everything that does not divide, with the numbers.
    """
    if parallel.world == 1:
        return
    whole, widths = [("n_routed_experts", config.n_routed_experts, 1)], []
    if not parallel.dp_attention:
        unit = shard_unit(config, numerics)
        whole, widths = whole + _token_splits(config, unit), _mlp_widths(config, unit)
        if config.dspark is not None:
            whole.append(("dspark_n_routed_experts", config.draft_stages.n_routed_experts, 1))
    whole += [width for width in widths if not _splits_unevenly(*width[1:], parallel.world)]
    problems = []
    for name, total, unit in whole:
        if total % parallel.world:
            problems.append(f"{name} = {total} is no multiple of {parallel.world}")
        elif total // parallel.world % unit:
            problems.append(
                f"{name} = {total} would leave {total // parallel.world} per rank, which FP8 blocks of {unit} rows or "
                "columns do not divide"
            )
    if problems:
        raise ValueError(f"the model cannot be split over {parallel.world} ranks:\n  - " + "\n  - ".join(problems))


def _token_splits(config: AnyConfig, block: int) -> list[tuple[str, int, int]]:
    """(name, total, unit that divides a rank's part) of each dimension that ranks split evenly, besides experts."""
    heads = config.num_attention_heads
    found = [("num_attention_heads", heads, 1), ("vocab_size", config.vocab_size, 1)]
    if isinstance(config, DeepseekV32Config):
        found.append(("num_attention_heads * qk_head_dim", heads * config.qk_head_dim, block))
        found.append(("num_attention_heads * v_head_dim", heads * config.v_head_dim, block))
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        found.append(("num_attention_heads * (qk_nope_head_dim + v_head_dim)", rows, block))
        return found
    found.append(("o_groups", config.o_groups, 1))
    found.append(("num_attention_heads * head_dim", heads * config.head_dim, block))
    found.append(("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, block))
    return found


def _mlp_widths(config: AnyConfig, block: int) -> list[tuple[str, int, int]]:
    """(name, total, unit) of the inner widths of dense MLPs and shared experts; see `Parallel.shard`."""
    shared = config.moe_intermediate_size * config.n_shared_experts
    found = [("moe_intermediate_size * n_shared_experts", shared, block)]
    if isinstance(config, DeepseekV32Config) and any(layer.dense_ffn for layer in config.layers):
        found.append(("intermediate_size", config.intermediate_size, block))
    return found


def _splits_unevenly(total: int, block: int, world: int) -> bool:
    """Whether a width consists of FP8 blocks, and each rank gets some."""
    return block > 1 and total % block == 0 and total // block >= world
