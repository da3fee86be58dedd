"""How many threads of a CPU a step runs on: one, unless more of them gain something."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.models.block import AttentionStack, Backbone
from deepseek_attn.utils.torch_state import torch_threads

ASKED = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
DEFAULT = torch.get_num_threads()
# Rates of one thread. With 8 ms of products, a second thread shortens a step by a tenth; with 2 ms by nothing.
# If another process keeps a core busy, each parallel loop waits for that core: 1000 ms a step instead of 12.
BYTES, MULTIPLY_ADDS = 20e9, 50e9
WORTHWHILE = 8e-3  # seconds


class CpuThreads:
    """Chooses the threads of a step by the weights that it reads and the products that it computes.

    A caller's choice stays: ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``, or another number in `torch.set_num_threads`
    than torch's default. Only ``deterministic`` runners always take one thread, because rounding depends on them.
    """

    def __init__(self, model: Backbone | AttentionStack, config: AnyConfig, deterministic: bool):
        self.deterministic = deterministic
        self.share = config.num_experts_per_tok / config.n_routed_experts  # of the experts' weights, per token
        stacks = [module for module in model.layers.modules() if isinstance(module, ExpertLinear)]
        routed = [(linear.experts, part) for linear in stacks for part in linear.one_expert()]
        inside = {id(p) for linear in stacks for p in linear.parameters()}
        others = [p for p in model.layers.parameters() if id(p) not in inside]
        self.routed_bytes = sum(count * part.nbytes for count, part in routed)
        self.routed = sum(count * part.numel() for count, part in routed)
        self.other_bytes, self.others = sum(p.nbytes for p in others), sum(p.numel() for p in others)

    def seconds(self, tokens: int) -> float:
        """Estimated time of a step's products on one thread."""
        read = self.other_bytes + self.routed_bytes * min(1.0, tokens * self.share)
        return read / BYTES + tokens * (self.others + self.routed * self.share) / MULTIPLY_ADDS

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Context of a step of this many new tokens; restores the calling thread's number of threads on exit."""
        threads = torch.get_num_threads()
        chosen = ASKED or threads != DEFAULT
        if threads == 1 or not (self.deterministic or (not chosen and self.seconds(tokens) < WORTHWHILE)):
            yield
            return
        with torch_threads(1):
            yield
