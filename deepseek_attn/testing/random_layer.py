"""A random attention layer over poisoned caches, and its results against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.session import LayerSequence, LayerSession
from deepseek_attn.testing.errors import relative_error, selection_tolerance, tolerance
from deepseek_attn.testing.reference import layer_reference

NAN_BYTE = 0xFF  # NaN as float32, float16, bfloat16 and e4m3 alike


def poison_caches(runner: ModelRunner) -> None:
    """Fills every cache with NaN: what no step has written must not matter."""
    for pool in runner.pools:
        pool.tensor.view(torch.uint8).fill_(NAN_BYTE)


def poison_scratch(runner: ModelRunner) -> None:
    """Fills scratch memory with NaN and huge indices: its content must not matter between calls."""
    (everything,) = runner.workspace.get(((runner.workspace.nbytes(),), torch.uint8))
    everything.fill_(NAN_BYTE)
    for layer in attention_layers(runner.model.layers):
        if layer.topk_indices_buffer is not None:
            layer.topk_indices_buffer.fill_(2**31 - 1)


@dataclass
class LayerRequest:
    """Hidden states of one sequence, and what the layer has made of its first tokens.

    Attributes:
        x: ``[length, hidden_size]``; sequence: the pages of the tokens computed so far.
        outputs, selected: results by step; ``selected`` stays empty without an indexer.
    """

    x: Tensor
    sequence: LayerSequence
    outputs: list[Tensor] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.x) - self.sequence.num_tokens


class RandomLayer:
    """One attention layer with random weights. Every byte of its caches that no step has written is NaN.

    Args:
        config: a preset's name, a path or a config; layer: the layer's number.
        seed: of the weights; options: of `ModelRunner.from_source`; on a CPU the default is float32 and ``exact``.

    Attributes:
        runner, session, attention: the layer, the session that drives it, the runner that holds it.
        reference: the same layer in float64.
        tolerance, selection_tolerance: errors that `check` allows, of a row and of what the indexer selects.
    """

    def __init__(self, config: AnyConfig | str | Path = "tiny", layer: int = 0, *, seed: int = 0, **options: Any):
        config = ModelConfig.from_pretrained(config) if isinstance(config, str | Path) else config
        source = RandomSource(config, seed)
        defaults: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        self.runner = ModelRunner.from_source(
            config, source, layers=[layer], attention_only=True, progress=False, **defaults | options
        )
        self.session = LayerSession(self.runner)
        self.attention = self.session.attention[layer]
        self.reference = layer_reference(config, source, layer)
        self.tolerance = tolerance(self.runner.dtype, self.runner.numerics)
        self.selection_tolerance = selection_tolerance(self.runner.dtype, self.runner.numerics)
        poison_caches(self.runner)

    def hidden_states(self, length: int) -> Tensor:
        """Random hidden states ``[length, hidden_size]`` as the layer takes them."""
        x = torch.randn(length, self.runner.config.hidden_size, device=self.runner.device)
        return x.to(self.runner.dtype)

    def request(self, length: int) -> LayerRequest:
        """A sequence of this many random hidden states, nothing computed."""
        return LayerRequest(self.hidden_states(length), self.session.sequence())

    def fork(self, request: LayerRequest) -> LayerRequest:
        """A second sequence with the same hidden states, of which as much is computed."""
        lists = list(request.outputs), list(request.selected)
        return LayerRequest(request.x.clone(), request.sequence.fork(), *lists)

    def step(self, work: Sequence[tuple[LayerRequest, int]]) -> None:
        """Computes the next ``n`` tokens of each (request, n), over scratch memory that is NaN."""
        poison_scratch(self.runner)
        starts = [request.sequence.num_tokens for request, _ in work]
        x = torch.cat([request.x[at : at + n] for (request, n), at in zip(work, starts, strict=True)])
        lengths = {request.sequence: n for request, n in work}
        for request, part in zip(work, self.session.run(x, lengths).split(list(lengths.values())), strict=True):
            request[0].outputs.append(part)
        for selected in self.session.selected.values():
            for request, part in zip(work, selected.split(list(lengths.values())), strict=True):
                request[0].selected.append(part)

    def run(self, requests: Sequence[LayerRequest], chunks: Sequence[int]) -> None:
        """Computes all requests together, each in chunks of these sizes; the last size repeats."""
        index = 0
        while pending := [request for request in requests if request.left]:
            size = chunks[min(index, len(chunks) - 1)]
            self.step([(request, min(size, request.left)) for request in pending])
            index += 1

    def check(self, request: LayerRequest) -> None:
        """AssertionError where results, or the entries that were selected for them, are not the reference's."""
        y = torch.cat(request.outputs)
        x, selected = request.x[: len(y)], torch.cat(request.selected) if request.selected else None
        if selected is not None:
            error = self.reference.selection_error(x, selected)
            limit = self.selection_tolerance
            assert error <= limit, f"selected entries score {error:.1e} too low; {limit:.0e} is allowed"
        error = relative_error(y.cpu(), self.reference(x, selected))
        assert error <= self.tolerance, f"the relative error of a row is {error:.1e}; {self.tolerance:.0e} is allowed"
