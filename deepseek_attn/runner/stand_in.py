"""A runner without memory, which runs the steps that a real one may be asked for, so that their launches are known.

It is built as every runner is, on the device "meta", of one layer of each kind, from the headers of a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, BinaryIO, TextIO

import torch

from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo
from deepseek_attn.kernels.common.launches import (
    Asks,
    Launches,
    Variant,
    compile_variants,
    digest_triton,
    recorded_launches,
)
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner.build import LoadedModel, build_runner
from deepseek_attn.runner.compile_ahead import RunnerRequest
from deepseek_attn.runner.step import Rows
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.processes import end_with_parent

META = torch.device("meta")


class HeaderSource(CheckpointSource):
    """The tensors of a checkpoint without their values, on the device "meta"."""

    def __init__(self, headers: dict[str, TensorInfo]):
        self._headers = headers

    def entries(self) -> dict[str, TensorInfo]:
        return self._headers

    def read(self, name: str) -> torch.Tensor:
        info = self._headers[name]
        dtype, shape = DTYPES[info.dtype], list(info.shape)
        if dtype.bits < 8 * dtype.torch.itemsize:  # packed
            shape[-1] = shape[-1] * dtype.bits // (8 * dtype.torch.itemsize)
        return torch.empty(shape, dtype=dtype.torch, device=META)

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return range(vocab_size)  # no step looks tokens up


class StandInRanks(Parallel):
    """A rank whose collectives exchange nothing."""

    def _exchange(self, collective: Any, *args: Any) -> None:
        pass


class StandIn(LoadedModel):
    """A runner on the device "meta"."""

    @classmethod
    def build(cls, request: RunnerRequest) -> StandIn:
        """The runner of a request."""
        ranks = request.parallel
        runner = build_runner(
            cls,
            request.config,
            HeaderSource(request.headers),
            device=META,
            dtype=request.dtype,
            numerics=request.numerics,
            **vars(request.attention),
            **request.sizes._asdict(),
            cuda_graphs=request.cuda_graphs,
            parallel=StandInRanks(ranks.rank, ranks.world, ranks.dp_attention),
            compile_ahead=False,
            progress=False,
        )
        runner.decode_query_len = 1 + request.num_drafts
        return runner


class Finder:
    """Finds the kernels that a runner may launch, by running its steps on a `StandIn`."""

    def __init__(self, request: RunnerRequest, launches: Launches):
        self._launches, self._warm_up = launches, WarmUp(StandIn.build(request), request.num_drafts)

    def all(self) -> Iterator[list[Variant]]:
        """Those of all steps: after each step a list of those that no step before it launched."""
        known = 0
        for _ in self._warm_up.steps():
            yield list(self._launches.variants.values())[known:]
            known = len(self._launches.variants)

    def step(self, rows: Rows) -> list[Variant]:
        """Those that one step launches, in the order of their first launches, found before or not."""
        self._launches.latest.clear()
        self._warm_up.step(rows)
        return list({id(variant): variant for variant in self._launches.latest}.values())


@contextmanager
def finding(request: RunnerRequest) -> Iterator[Finder]:
    """In this context the kernels of a runner can be found; nothing else in the process may launch kernels."""
    with recorded_launches(request.gpu) as launches:
        yield Finder(request, launches)


class _Events:
    """Lines of JSON for a `Compilation`."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def found(self, hashes: list[str]) -> None:
        self.write(found=hashes)

    def all_found(self) -> None:
        self.write(all_found=True)

    def compiled(self, cached_hash: str, error: str) -> None:
        self.write(done=[cached_hash], failed=[error] if error else [])


def main() -> None:
    """`serve` in an interpreter of its own: gets the request on stdin, tells events on stdout."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    serve(sys.stdin.buffer, events)


def serve(requests: BinaryIO, told: TextIO) -> None:
    """Main function of the process of a `Compilation`: reads a request, then what is asked for; tells events."""
    end_with_parent()
    torch.set_num_threads(1)  # forked processes have none of a pool's threads
    torch.set_default_device(None)  # which a fork has of its parent
    digest_triton()  # while the request is made
    # ops on "meta" that torch has in Python are exempted from torch.compile, for which it would be imported: seconds
    if "torch._dynamo" not in sys.modules:
        torch._dynamo = sys.modules["torch._dynamo"] = SimpleNamespace(disable=lambda op, *_, **__: op)
    events, asked = _Events(told), Connection(os.dup(requests.fileno()), writable=False)
    try:
        request, workers = asked.recv()
        with finding(request) as finder:
            compile_variants(finder.all(), workers, events, Asks(asked, finder.step))
    except Exception as error:
        events.write(problem=f"{type(error).__name__}: {error}"[:1000])
