"""The kernels that a runner may launch, listed without a GPU; main module of the process of a `Compilation`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from deepseek_attn.runner.ahead.pool import compile_variants
from deepseek_attn.runner.ahead.recording import Launches, Variant, prepare_keys, recorded_launches
from deepseek_attn.runner.ahead.request import RunnerRequest
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.step import Rows
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.processes import end_with_parent


class KernelLists:
    """The kernels of a runner's steps, from plans and launches on a `MetaRunner` within `recorded_launches`."""

    def __init__(self, request: RunnerRequest, launches: Launches):
        self._launches, self._warm_up = launches, WarmUp(MetaRunner.build(request), request.num_drafts)

    def all(self) -> Iterator[list[Variant]]:
        """For each size of a step, the kernels that no earlier step launched. Steps of a first prompt come first."""
        known = 0
        for _ in self._warm_up.steps():
            yield list(self._launches.variants.values())[known:]
            known = len(self._launches.variants)

    def step(self, rows: Rows) -> list[Variant]:
        """All kernels of one step."""
        self._launches.latest.clear()
        self._warm_up.step(rows)
        return list({variant.key: variant for variant in self._launches.latest}.values())


def main() -> None:
    """Reads a request on stdin, then shapes of steps; compiles their kernels, and writes events in JSON on stdout."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed

    def tell(**event: object) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    end_with_parent()
    torch.set_num_threads(1)  # forked processes have no threads of a pool
    keys = prepare_keys()
    # ops on "meta" that torch has in Python are exempted from torch.compile, for which it would be imported: seconds
    if "torch._dynamo" not in sys.modules:
        stand_in: Any = SimpleNamespace(disable=lambda op, *_, **__: op)
        torch._dynamo = sys.modules["torch._dynamo"] = stand_in
    try:
        runner = Connection(os.dup(0), writable=False)
        request, workers = runner.recv()
        with recorded_launches(request.gpu) as launches:
            lists = KernelLists(request, launches)
            keys.join()  # forked processes inherit the digest of Triton's files
            compile_variants(lists.all(), workers, tell, runner, lists.step)
    except Exception as error:
        tell(problem=f"{type(error).__name__}: {error}"[:1000])
