"""Fraction of dense attention that a layer retains: mass on its window and entries, and recall of its indexer.

Computed from the queries, keys and selection of each layer while a runner computes a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.lab.experiments.define.results import RecallRow
from deepseek_attn.lab.inspect.weights import Layer, query_blocks, selection_quality, softmax_with_sink
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions


@dataclass
class LayerRecall:
    """Values of one layer per query, as parts ``[queries]`` in [0, 1].

    Attributes:
        token_mass: share of dense attention over all earlier tokens on the tokens that the layer sees: tokens of its
            window, and source tokens of the entries that it reads.
        entry_mass: share of the layer's attention over all visible entries on the selected entries.
        found: part of the ``index_topk`` entries with the largest attention that the indexer selects; chance: the
            same for a random selection. These three are over queries with more visible entries than ``index_topk``.
    """

    layer: Layer
    token_mass: list[torch.Tensor] = field(default_factory=list)
    entry_mass: list[torch.Tensor] = field(default_factory=list)
    found: list[torch.Tensor] = field(default_factory=list)
    chance: list[torch.Tensor] = field(default_factory=list)

    def means(self) -> dict[str, float | None]:
        """Means over queries; None where no query needs a top-k."""
        values = {"token_mass": self.token_mass, "entry_mass": self.entry_mass}
        values |= {"index_recall": self.found, "index_recall_of_chance": self.chance}
        joined = {
            name: torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")
            for name, parts in values.items()
        }
        return {name: float(value.double().mean()) if len(value) else None for name, value in joined.items()}

    def row(self) -> RecallRow:
        """The means, with the layer's number and kind."""
        means, spec = self.means(), self.layer.spec
        return {
            "layer": spec.index,
            "kind": spec.kind,
            "token_mass": means["token_mass"],
            "entry_mass": means["entry_mass"],
            "index_recall": means["index_recall"],
            "index_recall_of_chance": means["index_recall_of_chance"],
        }

    def add(self, call: AttentionCall) -> None:
        """Adds the queries of a call of the layer, which computes one new sequence."""
        spec, keys = self.layer.spec, call.kv.float()
        position = torch.arange(len(keys), device=keys.device)
        for block in query_blocks(self.layer, call, more_keys=len(keys)):
            at = block.positions.unsqueeze(1)
            logits = torch.einsum("thd,kd->thk", block.queries, keys)
            dense = softmax_with_sink(logits, position <= at, block.sink).keys.sum(1)
            seen = (at - position < self.layer.window_size) | covered_tokens(
                block.read, spec.ratio, spec.overlap, len(keys)
            )
            self.token_mass.append(((dense * seen).sum(1) / dense.sum(1)).cpu())
            quality = selection_quality(block, self.layer.index_topk)
            if quality is not None:
                self.entry_mass.append(quality.kept.cpu())
                self.found.append(quality.recall.cpu())
                self.chance.append(quality.chance.cpu())


class RecallObserver(dict[str, LayerRecall]):
    """Recall of the backbone layers of a runner, by their prefix; called by each layer that computes a new sequence."""

    def __init__(self, runner: ModelRunner):
        layers = attention_layers(runner.model)
        super().__init__({layer.prefix: LayerRecall(layer) for layer in layers if not layer.spec.is_mtp})

    def __call__(self, call: AttentionCall) -> None:
        self[call.layer].add(call)

    def rows(self) -> list[RecallRow]:
        """One row per layer, with the means of `LayerRecall` over all queries so far."""
        return [recall.row() for recall in self.values()]


def measure_recall(runner: ModelRunner, prompts: list[list[int]]) -> list[RecallRow]:
    """`RecallObserver.rows` over ``prompts``, each computed in one step.

    Raises:
        ValueError: a prompt longer than a step of the runner.
    """
    limit = runner.layout.max_num_batched_tokens
    longest = max(map(len, prompts), default=0)
    if longest > limit:
        raise ValueError(f"prompts of up to {longest} tokens: a step of this runner takes {limit}")
    observer = RecallObserver(runner)
    options = StepOptions(observer=observer)
    for prompt in prompts:
        sequence = runner.sequence(prompt)
        try:
            runner.step([(sequence, len(prompt))], options)
        finally:
            sequence.free()
    return observer.rows()


def covered_tokens(reads: torch.Tensor, ratio: int, overlap: bool, tokens: int) -> torch.Tensor:
    """Bool ``[rows, tokens]``: tokens that the entries of ``reads [rows, entries]`` were compressed from."""
    if not reads.shape[1]:
        return torch.zeros(len(reads), tokens, dtype=torch.bool, device=reads.device)
    if overlap:
        reads = reads | torch.nn.functional.pad(reads[:, 1:], (0, 1))
    spread = reads.repeat_interleave(ratio, dim=1)
    return torch.nn.functional.pad(spread, (0, tokens - spread.shape[1]))
