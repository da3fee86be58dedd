"""Routed experts of a layer in pinned host memory: the order of its copies.

* Few tokens: `fetch_experts` copies the experts that the tokens chose and the GPU lacks. The device finds them, so that
  CUDA graphs hold all of it. The copies run on a stream of their own: the first product waits for w1 and w3 alone.
  Layers with hash routing begin with the step. The bus would rest from a layer's last copy to the next layer's routing:
  meanwhile `prefetch_experts` copies experts that the next layer's router chooses for the hidden state that is there;
  if the next layer lacks none of these, one of the layer after it.
* Many tokens need nearly every expert: all experts that are not cached are copied ahead of the routing, while the
  layers before compute. The host reads once per step which experts are cached and lets the GPU's copy engine do it:
  copies by a kernel are slower (50.5 and 55.3 GB/s, H200), and products start late on multiprocessors that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.moe import (
    ExpertSlots,
    HostExperts,
    count_expert_uses,
    fetch_experts,
    prefetch_experts,
)
from deepseek_attn.kernels.moe.types import expert_parts
from deepseek_attn.models.expert_rows import Stacks
from deepseek_attn.utils.device import run_beside

STREAM_LOAD = 2
"""Pairs of a token and an expert, per expert of the layer, from which on all experts are copied ahead: of random
routings 0.86 of the experts are needed then."""

AHEAD_COPIES = 2
"""Experts of a layer that are copied while the previous layer computes. One more may have been copied a layer earlier.
There is time for them from the copies of one layer to the routing of the next, 130 (one token) to 390 us (16 tokens) of
V4-Flash on an H200; the bus takes 270 us for an expert. More would not be begun in this time."""
AHEAD_LOAD = 0.375
"""Pairs of a token and an expert, per expert of the layer on all ranks, up to which experts are copied ahead.

These are 16 tokens of V4-Flash, the largest steps that were measured. On an H100, where half, 0.8 or all of the
predictions were right, steps of one token took 0.97, 0.93 or 0.93 of the time without (uniform routings) and 0.93, 0.87
or 0.79 (Zipf's law), steps of 16 tokens 0.99 to 0.97. The gain is at most the computation of a step: steps with more
pairs copy for so long that little is left to gain.
"""


class NextLayer(NamedTuple):
    """The layer that a step calls after another one.

    Attributes:
        experts: of the layer.
        predict: experts ``[T, k]`` that its router chooses for the hidden state before the experts of an earlier layer.
        most_pairs: of a token and an expert, for which experts are predicted.
    """

    experts: LayerExperts
    predict: Callable[[Any], Tensor]
    most_pairs: int

    def takes(self, pairs: int) -> bool:
        """Whether experts are copied ahead in a step with this number of pairs of a token and an expert.

        Not for many, nor for a layer that has all experts, fetched them already or copies all of them.
        """
        layer = self.experts
        busy = layer.has_all or layer._is_ahead or layer._fetched is not None or layer.known is not None
        return not busy and 0 < pairs <= self.most_pairs


class LayerExperts:
    """The experts of one layer, for its `moe_experts`.

    Attributes:
        state: rows and copies of the layer.
        area: number of the area behind the cached rows that it uses.
        stream, early_stream: where copies run, and those for the layer after the next one; None but on a GPU.
        successor: the next layer that uses the same area.
        known: row of each expert, -1 for others, as the host read them for this step; None: not read.
        lookup: experts ``[T, k]`` of token ids ``[T]``, of a layer with hash routing.
        next_layer: whose experts are predicted and copied ahead, and those of its own next layer; None: of no layer.
    """

    def __init__(
        self,
        state: HostExperts,
        area: int,
        stream: torch.cuda.Stream | None = None,
        early_stream: torch.cuda.Stream | None = None,
    ):
        self.state, self.area, self.stream, self.early_stream = state, area, stream, early_stream
        self.successor: LayerExperts | None = None
        self.known: list[int] | None = None
        self.lookup: Callable[[Tensor], Tensor] | None = None
        self.next_layer: NextLayer | None = None
        self._predicted: Tensor | None = None
        self._guessed: _Guess | None = None
        self._fetched: ExpertSlots | None = None
        self._arrived: torch.cuda.Event | None = None
        self._is_ahead = self._hands_over = False

    @property
    def stacks(self) -> Stacks:
        """Stacks on the GPU, which `find` names the rows of."""
        return self.state.device

    @property
    def has_all(self) -> bool:
        """Every expert of the layer has a row of its own."""
        return len(self.state.owner) == len(self.state.row)

    def wants_all(self, pairs: int) -> bool:
        """Whether a call with this number of pairs of a token and an expert takes all experts.

        Never in a CUDA graph: the experts that are cached change from one launch of it to the next.
        """
        many = not self.has_all and pairs >= STREAM_LOAD * len(self.state.row)
        return many and not self._is_captured

    @property
    def _is_captured(self) -> bool:
        """Whether a CUDA graph captures the current launches."""
        return self.stream is not None and torch.cuda.is_current_stream_capturing()

    def find(self, experts: Tensor) -> ExpertSlots:
        """The row of each expert of a routing ``[T, k]``, for the next `moe_experts`; `release` follows it."""
        if self.has_all:
            return ExpertSlots(self.state.row)
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            return fetched
        experts, wants_all = experts.contiguous(), self.wants_all(experts.numel())
        if not self._is_ahead and not wants_all:
            return fetch_experts(self.state, experts, self.stream, self._wait_for_guess())
        self.copy_ahead()
        self.finish()
        self._hands_over = wants_all
        count_expert_uses(self.state, experts)
        return ExpertSlots(self.state.found)

    def _following(self, pairs: int) -> list[NextLayer]:
        """The next layer and the one after it, as far as experts are copied ahead for them."""
        found: list[NextLayer] = []
        layer = self.next_layer
        while layer is not None and len(found) < 2 and layer.takes(pairs):
            found.append(layer)
            layer = layer.experts.next_layer
        return found

    def predict(self, hidden: Any, pairs: int) -> None:
        """In a CUDA graph: begins the prediction of the next layer's experts for `look_ahead`, beside the router.

        Args:
            hidden: for `NextLayer.predict`; pairs: of a token and an expert, which the router is about to choose.
        """
        self._predicted = None
        if self._is_captured and (following := self._following(pairs)):
            predict = partial(following[0].predict, hidden)
            self._predicted, _ = run_beside(predict, self.state.row.device, urgent=True)

    def look_ahead(self, hidden: Any, experts: Tensor) -> bool:
        """Copies experts of the next layer that its router predicts and that it lacks, beside all else.

        If it lacks none of these, one of the layer after it is copied. Returns whether experts are predicted.

        Args:
            hidden: that of `predict`; experts: the routing of this layer, whose copies are launched.
        """
        following = self._following(experts.numel())
        predicted, self._predicted = self._predicted, None
        if not following:
            return False

        def prefetch() -> None:
            following[0].experts._prefetch(following[0].predict(hidden) if predicted is None else predicted)
            for layer in following[1:]:
                layer.experts._prefetch(layer.predict(hidden), following[0].experts.state)

        # a prediction that was begun waits for nothing else
        _, chosen = run_beside(prefetch, self.state.row.device, urgent=True, behind=predicted is None)
        for number, layer in enumerate(following):
            early = layer.experts._guessed
            layer.experts._guessed = _Guess((hidden, early and early.inputs), chosen, number > 0)
        return True

    def _prefetch(self, predicted: Tensor, before: HostExperts | None = None) -> None:
        """Calls `prefetch_experts`; copies of an early call, ``before`` the next layer's routing, have a stream."""
        stream = self.stream
        if self.stream is not None and self.early_stream is not None:
            if before is not None:
                stream = self.early_stream
                stream.wait_stream(self.stream)
            elif self._guessed is not None:
                self.stream.wait_stream(self.early_stream)
        prefetch_experts(self.state, predicted.contiguous(), stream, before)

    def _wait_for_guess(self) -> bool:
        """Lets the next launches wait until experts to copy ahead are chosen; whether there were any for this call."""
        guessed = self._guessed
        if guessed is None:
            return False
        if guessed.chosen is not None:
            guessed.chosen.wait()
        if guessed.is_early:  # its copy may have paused: without another prediction the expert has no row
            self._prefetch(torch.full_like(self.state.ahead, -1))
        self._guessed = None
        return True

    def release(self) -> None:
        """The layer's products are launched: its area is the successor's, which is copied ahead as this one was."""
        if self._hands_over and self.successor is not None:
            self.successor.copy_ahead()
        self._hands_over = False

    def fetch_ahead(self, token_ids: Tensor, topk: int) -> None:
        """Fetches the experts of few tokens before their layer's turn, if token ids determine them.

        Does nothing if they might need rows of the common area, which other layers use before.
        """
        if self.lookup is not None and not self.has_all and len(token_ids) * topk <= len(self.state.owner):
            self._fetched = fetch_experts(self.state, self.lookup(token_ids).contiguous(), self.stream)

    def copy_ahead(self) -> None:
        """Starts to copy all experts that are not cached, unless that has been done for the coming call.

        The copies wait for everything launched so far, such as the products of the last layer that used their rows.
        """
        if self._is_ahead or self.has_all:
            return
        self._is_ahead = True
        if self.state.row.is_meta:
            return
        if self.stream is None:
            self._copy_missing()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            self._copy_missing()
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def finish(self) -> None:
        """Lets the next launches wait for copies ahead, used or not."""
        if self._arrived is not None:
            self._arrived.wait()
        if self._wait_for_guess() and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._is_ahead, self._hands_over, self._arrived, self.known, self._fetched = False, False, None, None, None

    def _copy_missing(self) -> None:
        """Launches copies of the experts that are not cached, in order of their ids: to the area, then to free rows.

        The area has room for all experts but one for each row. A row whose expert was a wrong prediction is free, so
        that one more expert is missing, which is copied to it.
        """
        state = self.state
        found = state.row.tolist() if self.known is None else list(self.known)
        rows = range(state.first, state.first + len(state.owner))
        places = [*range(state.staged, state.staged + len(found) - len(rows)), *sorted(set(rows).difference(found))]
        parts = list(zip(expert_parts(state.device), expert_parts(state.host), strict=True))
        for first, place, count in _missing_runs(found, places):
            for target, source in parts:
                target[place : place + count].copy_(source[first : first + count], non_blocking=True)
            found[first : first + count] = range(place, place + count)
        copied = torch.tensor(found, dtype=torch.int32, device="cpu", pin_memory=self.stream is not None)
        state.found.copy_(copied, non_blocking=True)


class _Guess(NamedTuple):
    """A prediction whose copies are launched.

    Attributes:
        inputs: of it and of an early one, which keep their memory until another stream has read it.
        chosen: event of another stream that completes the choice of experts; None: earlier launches do.
        is_early: it was made two layers ahead; the next layer makes another one.
    """

    inputs: Any
    chosen: torch.cuda.Event | None
    is_early: bool


def _missing_runs(rows: Sequence[int], places: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first expert, first place, count) of the longest runs of experts whose row is -1 and of their places."""
    runs: list[tuple[int, int, int]] = []
    missing = [expert for expert, row in enumerate(rows) if row < 0]
    for expert, place in zip(missing, places, strict=True):
        if runs:
            first, first_place, count = runs[-1]
            if (expert, place) == (first + count, first_place + count):
                runs[-1] = first, first_place, count + 1
                continue
        runs.append((expert, place, 1))
    return runs
