"""The kernels that a runner may launch, listed without a GPU; main module of the process of a `Compilation`."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from deepseek_attn.runner.ahead.pool import compile_variants
from deepseek_attn.runner.ahead.recording import Launches, Variant, prepare_keys, recorded_launches
from deepseek_attn.runner.ahead.request import RunnerRequest
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.processes import end_with_parent

SLOWEST = ("experts_hopper_kernel", "compress_kernel", "topk_kernel", "insert_tokens_kernel")
"""Kernels that take 3 to 8 s to compile, most others less than 1 s. Each list begins with them: a step that had every
other kernel would wait for them."""


def kernel_lists(request: RunnerRequest, launches: Launches) -> Iterator[list[Variant]]:
    """For each size of a step, in the order of `WarmUp.sizes`, the kernels that no earlier one launched, slowest first.

    Args:
        launches: of a `recorded_launches` that lasts until the last list; a `MetaRunner` runs the steps.
    """
    known = 0
    for _ in WarmUp(MetaRunner.build(request), request.num_drafts).steps():
        yield sorted(list(launches.variants.values())[known:], key=lambda variant: variant.name not in SLOWEST)
        known = len(launches.variants)


def main() -> None:
    """Reads a request and the number of workers on stdin, compiles kernels, and writes events in JSON on stdout."""
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
        request, workers = pickle.load(sys.stdin.buffer)
        with recorded_launches(request.gpu) as launches:
            keys.join()  # forked processes inherit the digest of Triton's files
            compile_variants(kernel_lists(request, launches), workers, tell)
    except Exception as error:
        tell(problem=f"{type(error).__name__}: {error}"[:1000])
