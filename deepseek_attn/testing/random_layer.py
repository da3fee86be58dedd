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
from deepseek_attn.config.options import as_list, is_integer
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.session import LayerSequence, LayerSession
from deepseek_attn.testing.errors import HEAD_TO_ROW, selection_tolerance, tolerance
from deepseek_attn.testing.mistakes import Place, channels_in_words, head_errors, row_errors, rows_in_words
from deepseek_attn.testing.reference import layer_reference
from deepseek_attn.testing.watched_impl import Attended, WatchedImpl

NAN_BYTE = 0xFF  # NaN in float32, float16, bfloat16 and e4m3


def poison_caches(runner: ModelRunner) -> None:
    """Fills every cache with NaN, so that reading an unwritten entry shows."""
    for pool in runner.pools:
        pool.tensor.view(torch.uint8).fill_(NAN_BYTE)


def poison_scratch(runner: ModelRunner) -> None:
    """Fills scratch memory with NaN and huge indices: no call may depend on its earlier contents."""
    (everything,) = runner.workspace.get(((runner.workspace.nbytes(),), torch.uint8))
    everything.fill_(NAN_BYTE)
    for layer in attention_layers(runner.model.layers):
        if layer.topk_indices_buffer is not None:
            layer.topk_indices_buffer.fill_(2**31 - 1)


@dataclass
class LayerRequest:
    """Hidden states of one sequence, and the layer's results for its first tokens.

    Attributes:
        x: ``[length, hidden_size]``; sequence: the pages of the tokens computed so far.
        number: index of the request among the layer's requests, from 0.
        outputs, selected: results by step; ``selected`` stays empty without an indexer.
        attended: results of the impl by step, ``[n, heads, value_dim]``; empty without an impl (V3).
        places: where each token was computed; rotated_back: `Attended.rotated_back` by token.
    """

    x: Tensor
    sequence: LayerSequence
    number: int = 0
    outputs: list[Tensor] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)
    attended: list[Tensor] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    rotated_back: list[bool] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.x) - self.sequence.num_tokens


class RandomLayer:
    """One attention layer with random weights. Every byte of its caches that no step has written is NaN.

    Index tensors point to NaN past the length of each row, unless the impl has ``needs_masked_tails``.

    Args:
        config: a preset's name, a path or a config; layer: the layer's number.
        seed: of the weights.
        options: of `ModelRunner.from_source`; on a CPU the default is float32 and ``exact``.

    Attributes:
        runner, session, attention: the layer, the session that drives it, the runner that holds it.
        reference: the same layer in float64.
        tolerance, head_tolerance, selection_tolerance: tolerances of `check` for a row of the output, a head's attended
            values, and the indexer's selection.
        steps, requests: number of steps and of requests so far.
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
        self.head_tolerance = HEAD_TO_ROW * self.tolerance
        self.selection_tolerance = selection_tolerance(self.runner.dtype, self.runner.numerics)
        self.steps = self.requests = 0
        poison_caches(self.runner)

    def hidden_states(self, length: int) -> Tensor:
        """Random hidden states ``[length, hidden_size]`` in the layer's dtype and on its device."""
        x = torch.randn(length, self.runner.config.hidden_size, device=self.runner.device, dtype=torch.float32)
        return x.to(self.runner.dtype)

    def request(self, length: int) -> LayerRequest:
        """A sequence of ``length`` random hidden states, at least one; no token is computed yet."""
        _check_lengths("length", [length])
        self.requests += 1
        return LayerRequest(self.hidden_states(length), self.session.sequence(), self.requests - 1)

    def fork(self, request: LayerRequest) -> LayerRequest:
        """A second sequence with the same hidden states and the same computed tokens."""
        self.requests += 1
        copy = LayerRequest(request.x.clone(), request.sequence.fork(), self.requests - 1)
        for name in ("outputs", "selected", "attended", "places", "rotated_back"):
            setattr(copy, name, list(getattr(request, name)))
        return copy

    def truncate(self, request: LayerRequest, n: int) -> None:
        """Goes back to the first ``n`` tokens of a request; later results are dropped."""
        request.sequence.truncate(n)
        for parts in (request.outputs, request.selected, request.attended):
            parts[:] = [torch.cat(parts)[:n]] if parts else []
        del request.places[n:], request.rotated_back[n:]

    def step(self, work: Sequence[tuple[LayerRequest, int]]) -> None:
        """Computes the next ``n`` tokens of each (request, n) in one step; scratch memory is filled with NaN first."""
        poison_scratch(self.runner)
        starts = [request.sequence.num_tokens for request, _ in work]
        x = torch.cat([request.x[at : at + n] for (request, n), at in zip(work, starts, strict=True)])
        lengths = [n for _, n in work]
        y, attended = self._run(x, {request.sequence: n for request, n in work})
        row = 0
        for (request, n), part in zip(work, y.split(lengths), strict=True):
            request.outputs.append(part)
            decode = n <= self.session.decode_query_len
            request.places += [Place(self.steps, row + i, n, decode) for i in range(n)]
            row += n
        for selected in self.session.selected.values():
            for (request, _), part in zip(work, selected.split(lengths), strict=True):
                request.selected.append(part)
        if attended is not None:
            order = sorted(work, key=lambda item: item[1] > self.session.decode_query_len)  # decodes first
            for (request, n), part in zip(order, attended.heads.split([n for _, n in order]), strict=True):
                request.attended.append(part)
                request.rotated_back += [attended.rotated_back] * n
        self.steps += 1

    def _run(self, x: Tensor, lengths: dict[LayerSequence, int]) -> tuple[Tensor, Attended | None]:
        """`LayerSession.run` under a `WatchedImpl`: output, and attended values (None without an impl)."""
        impl = self.attention.impl
        if impl is None:
            return self.session.run(x, lengths), None
        watched: Any = WatchedImpl(impl)  # an object with the methods of an impl's class
        self.attention.impl = watched
        try:
            return self.session.run(x, lengths), watched.attended
        finally:
            self.attention.impl = impl

    def run(self, requests: Sequence[LayerRequest], chunks: Sequence[int]) -> None:
        """Computes all requests together, each in chunks of these sizes; the last size repeats.

        Raises:
            ValueError: no sizes, or sizes that are not positive integers.
        """
        _check_lengths("chunks", chunks)
        index = 0
        while pending := [request for request in requests if request.left]:
            size = chunks[min(index, len(chunks) - 1)]
            self.step([(request, min(size, request.left)) for request in pending])
            index += 1

    def check(self, request: LayerRequest) -> None:
        """Compares results and selected entries with the reference; AssertionError where they differ.

        The message names the request, the first wrong position and the step that computed it, the head and its
        channels, the number of wrong rows and heads, and the keys that the query reads.
        """
        if not request.outputs:
            raise ValueError("no token of the request is computed yet: call run or step before check")
        y = torch.cat(request.outputs)
        x, selected = request.x[: len(y)], torch.cat(request.selected).cpu() if request.selected else None
        if selected is not None:
            errors = torch.tensor(self.reference.selection_errors(x, selected), dtype=torch.float32, device="cpu")
            if bool((wrong := errors > self.selection_tolerance).any()):
                raise AssertionError(self._selection_message(request, selected, errors, wrong))
        expected = self.reference.heads(x, selected)
        watched = len(request.rotated_back) == len(y)  # steps run outside of `step` have no recorded outputs
        if watched and request.attended:
            actual, right = self._comparable_heads(request, expected)
            errors = head_errors(actual, right)
            if bool((wrong := errors > self.head_tolerance).any()):
                t = int(wrong.any(1).nonzero()[0])
                heads = wrong[t].nonzero().flatten().tolist()
                numbers = channels_in_words(actual[t, heads[0]], right[t, heads[0]], self.head_tolerance)
                raise AssertionError(
                    f"attention is wrong: the relative error of a head is {float(errors[t].max()):.1e}; "
                    f"{self.head_tolerance:.0e} is allowed\n"
                    f"  {self._where(request, t)}\n"
                    f"  head {heads[0]}: {numbers}\n"
                    f"  {rows_in_words(wrong.any(1))}; in the first of them {len(heads)} of {wrong.shape[1]} heads\n"
                    f"  {self._keys(t, selected)}"
                )
        actual, right = y.detach().cpu().double(), self.reference.output(expected)
        errors = row_errors(actual, right)
        if bool((wrong := errors > self.tolerance).any()):
            t = int(wrong.nonzero()[0])
            cause = (
                "; attention itself is right in every head, so look behind it" if watched and request.attended else ""
            )
            raise AssertionError(
                f"the output is wrong: the relative error of a row is {float(errors[t]):.1e}; {self.tolerance:.0e} is "
                f"allowed{cause}\n"
                f"  {self._where(request, t)}\n"
                f"  {channels_in_words(actual[t], right[t], self.tolerance)}\n"
                f"  {rows_in_words(wrong)}\n"
                f"  {self._keys(t, selected)}"
            )

    def _comparable_heads(self, request: LayerRequest, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Attended heads and their reference; the reference is rotated back for tokens where the impl did that (V4)."""
        actual = torch.cat(request.attended).double()
        back = torch.tensor(request.rotated_back, dtype=torch.bool, device="cpu")
        if not back.any():
            return self.reference.head_values(actual), expected
        return actual, torch.where(back[:, None, None], self.reference.rotated_back(expected), expected)

    def _selection_message(self, request: LayerRequest, selected: Tensor, errors: Tensor, wrong: Tensor) -> str:
        t = int(wrong.nonzero()[0])
        best = self.reference.best(self.reference.index_scores(request.x[: len(selected)].cpu().double()))[t]
        chosen = [entry for entry in selected[t].tolist() if entry >= 0]
        return (
            f"the selection is wrong: selected entries score {float(errors[t]):.1e} too low; "
            f"{self.selection_tolerance:.0e} is allowed\n"
            f"  {self._where(request, t)}\n"
            f"  selected in place of better ones: {sorted(set(chosen) - set(best))}; not selected: "
            f"{sorted(set(best) - set(chosen))}; of {self.reference.visible(t)} visible entries\n"
            f"  {rows_in_words(wrong)}"
        )

    def _where(self, request: LayerRequest, t: int) -> str:
        place = request.places[t] if len(request.places) == sum(map(len, request.outputs)) else "in some step"
        return f"request {request.number}, position {t}: {place}"

    def _keys(self, t: int, selected: Tensor | None) -> str:
        chosen = None if selected is None else [entry for entry in selected[t].tolist() if entry >= 0]
        return f"the query reads {self.reference.keys_of(t, chosen)}"


def _check_lengths(name: str, lengths: Sequence[int]) -> None:
    listed = as_list(lengths, f"{name}: positive integers")
    if not listed or not all(is_integer(length) and length > 0 for length in listed):
        raise ValueError(f"{name}={lengths!r:.80}: positive integers are needed, at least one")
