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
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import parse_device
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.kernels.linear import FP8_BLOCK
from deepseek_attn.layers.weights import Shard

TIMEOUT_SECONDS = 600.0  # of one collective: ranks wait this long for one that is still loading or has died
# torch 2.13 has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LAUNCH = "torchrun --nproc-per-node {} -m deepseek_attn"


class RankFailed(BaseException):
    """A step failed on this rank while others wait for its part: the process must end, so nothing should catch it."""


@dataclass
class Parallel:
    """The rank of this process, and the collectives it takes part in.

    Made by `launched` under torchrun. `single` is a process alone, for which every collective is the identity.

    Attributes:
        rank, world: number of this rank, and number of ranks.
        dp_attention: data-parallel attention.
        step_rows: largest number of tokens of any rank in the running step; set by `agree`.
    """

    rank: int = 0
    world: int = 1
    dp_attention: bool = False
    step_rows: int = field(default=0, repr=False)
    _seed: int = field(default=0, repr=False)

    @classmethod
    def single(cls) -> Parallel:
        return cls()

    @property
    def token_ranks(self) -> int:
        """Number of ranks that compute the same tokens: they shard heads and vocabulary."""
        return 1 if self.dp_attention else self.world

    def shard(self, dim: int, total: int) -> Shard | None:
        """This rank's shard of dimension ``dim`` of size ``total``, over all ranks; None for all of it."""
        return None if self.world == 1 else Shard(dim, self.rank * (total // self.world), total // self.world)

    def token_shard(self, dim: int, total: int) -> Shard | None:
        """This rank's shard among the ranks with the same tokens; None for all of it."""
        return None if self.token_ranks == 1 else self.shard(dim, total)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce over the ranks that have the same tokens. May overwrite ``x``."""
        if self.token_ranks > 1 and x.numel():
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, n]`` of each rank that has the same tokens -> ``[T, token_ranks * n]``."""
        if self.token_ranks == 1:
            return x
        rows, columns = x.shape
        gathered = x.new_empty(self.world * rows, columns)
        if rows:
            _all_gather(gathered, x.contiguous())
        return gathered.view(self.world, rows, columns).transpose(0, 1).reshape(rows, self.world * columns)

    def gather_tokens(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Before experts: all-gather of the tokens of all ranks, each padded with zeros to ``step_rows``."""
        if not self.dp_attention:
            return x, token_ids
        return self._gather_rows(x), self._gather_rows(token_ids)

    def sum_experts(self, y: torch.Tensor, rows: int) -> torch.Tensor:
        """After experts: sums over all ranks for this rank's ``rows`` tokens. May overwrite ``y``."""
        if not self.dp_attention:
            return self.sum(y)
        summed = y.new_empty(self.step_rows, y.shape[1])
        _reduce_scatter(summed, y.contiguous())
        return summed[:rows]

    def _gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(self.step_rows, *x.shape[1:])
        padded[: len(x)] = x
        everyone = x.new_empty(self.world * self.step_rows, *x.shape[1:])
        _all_gather(everyone, padded)
        return everyone

    def agree(self, rows: int, device: torch.device) -> int:
        """With data-parallel attention, begins a step of ``rows`` tokens here; returns the most tokens of any rank.

        Waits until every rank has begun one. 0: no rank has work left.
        """
        most = torch.tensor([rows], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self.step_rows = int(most)
        return self.step_rows

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that all ranks do: an error inside becomes `RankFailed`; with one rank it stays as it is."""
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
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
            dist.broadcast_object_list(values)
        return values[0]


@contextmanager
def launched(
    world: int,
    device: torch.device | str | None = None,
    dp_attention: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[tuple[Parallel, torch.device]]:
    """Joins the ranks that torchrun has started, over NCCL on GPUs and Gloo on CPUs; 1 is a process alone.

    An error inside leaves the others waiting: torchrun then ends them, and without it they fail after
    ``timeout_seconds`` (over Gloo, as soon as this process is gone).

    Args:
        world: ranks that are expected.
        device: default: GPU number ``LOCAL_RANK`` if there are GPUs, else the CPU.

    Yields:
        the ranks, and the device of this one.

    Raises:
        ValueError: not started by torchrun, or with another number of processes, or with fewer GPUs.
    """
    place, device = check_launch(world, device)
    if world == 1:
        yield Parallel.single(), device
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # kernels and NCCL use the current one
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_seconds), device_id=device if cuda else None
    )
    parallel = Parallel(place, world, dp_attention)
    parallel._seed = parallel.share(secrets.randbits(48))
    yield parallel, device
    # not after an error: NCCL would wait for collectives that never end
    dist.destroy_process_group()


def check_launch(world: int, device: torch.device | str | None) -> tuple[int, torch.device]:
    """(rank, device) of this process; see `launched` for what it refuses."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 1 or started != world:
        raise ValueError(
            f"{world} ranks were asked for, and {started} processes were started: ask for {started} ranks, or start "
            f"`{LAUNCH.format(max(world, 1))} ...`"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = parse_device(device)
    if device.type == "cuda" and world > 1:
        if device.index is not None:
            raise ValueError(f"device {str(device)!r} with {world} ranks: each has a GPU of its own; use device='cuda'")
        if local >= torch.cuda.device_count():
            raise ValueError(f"rank {local} of this host has no GPU: there are {torch.cuda.device_count()}")
        device = torch.device("cuda", local)
    return int(os.environ.get("RANK", "0")), device


def check_split(config: AnyConfig, parallel: Parallel) -> None:
    """Checks that a model can be split over the ranks.

    Raises:
        ValueError: everything that does not divide, with the numbers.
    """
    if parallel.world == 1:
        return
    whole = [("n_routed_experts", config.n_routed_experts, 1)]
    block = FP8_BLOCK[0] if config.quantization_config is not None else 1
    shared = config.moe_intermediate_size * config.n_shared_experts
    whole.append(("moe_intermediate_size * n_shared_experts", shared, block))
    if not parallel.dp_attention:
        whole += _token_splits(config, block)
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
    """(name, total, unit that divides a rank's part) of each dimension that ranks split, besides experts."""
    heads = config.num_attention_heads
    found = [("num_attention_heads", heads, 1), ("vocab_size", config.vocab_size, 1)]
    if isinstance(config, DeepseekV32Config):
        found.append(("num_attention_heads * qk_head_dim", heads * config.qk_head_dim, block))
        found.append(("num_attention_heads * v_head_dim", heads * config.v_head_dim, block))
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        found.append(("num_attention_heads * (qk_nope_head_dim + v_head_dim)", rows, block))
        if any(layer.dense_ffn for layer in config.layers):
            found.append(("intermediate_size", config.intermediate_size, block))
        return found
    found.append(("o_groups", config.o_groups, 1))
    found.append(("num_attention_heads * head_dim", heads * config.head_dim, block))
    found.append(("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, block))
    return found
