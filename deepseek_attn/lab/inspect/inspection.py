"""`inspect_attention`: attention weights of the tokens of one sequence, by layer and head.

While a runner computes the sequence, each layer's call is observed once. It keeps sums over all queries, and the
largest weights of chosen queries. Additional memory is one layer's keys, a few blocks of logits (`BLOCK_BYTES`) and
at most `MAX_WEIGHTS` weights, however long the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from deepseek_attn.config.defaults import DEFAULT_TOP_READS
from deepseek_attn.config.model import AnyConfig, LayerSpec
from deepseek_attn.config.options import as_list, is_integer
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.lab.inspect.records import (
    RECENT,
    HeadRead,
    IndexRead,
    IndexSummary,
    Inspection,
    LayerRead,
    LayerSummary,
    QueryRead,
    Shares,
)
from deepseek_attn.lab.inspect.weights import Layer, QueryBlock, index_scores, query_blocks, selection_quality
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.prompts import TokenIds
from deepseek_attn.runner.step import StepOptions

MAX_WEIGHTS = 200_000
"""Weights that are kept, over all chosen queries. A page of them has up to 6 MB, and 20 bytes per token."""
INDEX_ROWS = 3  # size of an `IndexRead`, in sets of ``top`` weights with their keys


def inspect_attention(
    runner: ModelRunner,
    token_ids: TokenIds,
    *,
    queries: Iterable[int] | None = None,
    top: int = DEFAULT_TOP_READS,
    layers: Iterable[int] | None = None,
    progress: bool = False,
) -> Inspection:
    """Computes a sequence and records the attention weights of its tokens.

    Args:
        runner: a whole model on one rank; its other sequences are not touched.
        token_ids: the sequence, a prompt as `ModelRunner.sequence` takes it.
        queries: positions of the tokens whose reads are recorded; negative positions count from the end. Default: the
            last tokens, up to `MAX_WEIGHTS`.
        top: recorded tokens of the window, and recorded entries, per query, layer and head: the largest weights.
        layers: numbers of the layers to record; default: all layers that the runner holds.
        progress: show a bar over the tokens, on a terminal.

    Raises:
        ValueError: wrong arguments, or attention weights that are not finite. OutOfPages: too few free pages.
    """
    if not isinstance(runner, ModelRunner):
        raise ValueError(f"runner is of type {type(runner).__name__}: pass a ModelRunner; of an LLM, its `runner`")
    if runner.parallel.world > 1:
        raise ValueError("each rank holds some of the heads: inspect with a runner on one rank, without `parallel`")
    if runner.one_by_one:
        raise ValueError("with deterministic=True steps compute one token at a time here: inspect a runner without it")
    sequence = runner.sequence(token_ids)
    try:
        length = len(sequence.token_ids)
        choice = choose_reads(runner.config, runner.backbone_layers, length, queries, top, layers)
        watched = [layer for layer in attention_layers(runner.model) if not layer.spec.is_mtp]
        watched = [layer for layer in watched if layer.spec.index in choice.layers]
        records = {layer.prefix: LayerRecord(layer, frozenset(choice.queries), top) for layer in watched}

        def observe(call: AttentionCall) -> None:
            if call.layer in records:
                records[call.layer].add(call)

        options = StepOptions(observer=observe)
        with tqdm(total=sequence.num_pending, unit="tok", disable=None if progress else True) as bar:
            while sequence.num_pending:
                count = min(sequence.num_pending, runner.layout.max_num_batched_tokens)
                runner.step([(sequence, count)], options)
                bar.update(count)
        return Inspection(
            model_type=runner.config.model_type,
            window=watched[0].window_size,
            backend=watched[0].backend_name,
            numerics=runner.numerics.name,
            top=top,
            token_ids=list(sequence.token_ids),
            layers=[record.summary() for record in records.values()],
            queries=[
                QueryRead(position, [record.reads[position] for record in records.values()])
                for position in choice.queries
            ],
        )
    finally:
        sequence.free()


@dataclass(frozen=True)
class InspectedReads:
    """Reads to record: numbers of layers and positions of queries, both ascending, and keys of a kind per head."""

    layers: list[int]
    queries: list[int]
    top: int


def choose_reads(
    config: AnyConfig,
    specs: Sequence[LayerSpec | V32LayerSpec],
    length: int,
    queries: Iterable[int] | None,
    top: int,
    layers: Iterable[int] | None,
) -> InspectedReads:
    """Checks the arguments of `inspect_attention` for a sequence of ``length`` tokens, and fills in the defaults.

    Args:
        specs: of the layers that a runner holds.

    Raises:
        ValueError: layers or positions that do not exist, or more weights than `MAX_WEIGHTS`.
    """
    if not is_integer(top) or top < 1:
        raise ValueError(f"top={top!r}: must be an integer of at least 1")
    held = {spec.index: spec for spec in specs}
    watched = list(held) if layers is None else as_list(layers, "layers: numbers of layers")
    wrong = [layer for layer in watched if not is_integer(layer) or layer not in held]
    if wrong or not watched or len(set(watched)) < len(watched):
        raise ValueError(f"layers={watched!s:.80}: there are layers {list(held)}; name at least one, each once")
    per_query = top * sum(_rows_per_query(config, held[layer]) for layer in watched)
    limit = MAX_WEIGHTS // per_query
    remedy = f"choose fewer layers than {len(watched)} or a smaller top than {top}"
    if not limit:
        raise ValueError(f"one query has {per_query} weights, and {MAX_WEIGHTS} are kept: {remedy}")
    if queries is None:
        positions = list(range(max(0, length - limit), length))
    else:
        wanted = as_list(queries, "queries: positions of tokens")
        outside = [position for position in wanted if not is_integer(position) or not -length <= position < length]
        if outside or not wanted:
            given = (
                f"{outside[0]!r} is not a position of a sequence of {length} tokens" if outside else "there are none"
            )
            raise ValueError(f"queries: {given}; name integers from 0 to {length - 1}, or from the end -1 to -{length}")
        positions = sorted({int(position) % length for position in wanted})
    if len(positions) > limit:
        raise ValueError(
            f"{len(positions)} queries of {per_query} weights each: {MAX_WEIGHTS} weights are kept; choose at most "
            f"{limit} queries, or {remedy}"
        )
    return InspectedReads(sorted(watched), positions, top)


def _rows_per_query(config: AnyConfig, spec: LayerSpec | V32LayerSpec) -> int:
    """Sets of ``top`` weights kept per query in one layer."""
    kinds = isinstance(config, DeepseekV4Base) + (spec.ratio > 0)  # the window of V4, and entries
    return kinds * (config.num_attention_heads + 1) + INDEX_ROWS * spec.has_indexer


@dataclass
class LayerRecord:
    """One layer over the steps of a sequence: sums over its queries, and the reads of chosen queries.

    Attributes:
        queries: positions of the chosen queries; top: keys kept per query and head.
        reads: by position.
        shares: float64 ``[heads, 4]``, sums of the values of `Shares`; count: number of queries so far.
        index: float64 ``[3]``, sums of recall, chance and kept.
        index_count: number of queries in these sums.
        difference: largest difference between the layer's output and the output of these weights.
        largest: largest magnitude of the output.
    """

    layer: Layer
    queries: frozenset[int]
    top: int
    reads: dict[int, LayerRead] = field(default_factory=dict)
    shares: Tensor = field(init=False)
    count: int = 0
    index: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64, device="cpu"))
    index_count: int = 0
    difference: float = 0.0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.shares = torch.zeros(self.layer.num_heads, 4, dtype=torch.float64, device="cpu")

    def add(self, call: AttentionCall) -> None:
        """Adds the queries of one call of the layer.

        Raises:
            ValueError: weights or index scores that are not finite.
        """
        for block in query_blocks(self.layer, call):
            weights = block.weights()
            shares = self._block_shares(block, weights.keys, weights.sink)
            self._check_finite(shares, block, "attention weights")
            self.shares += shares.double().sum(0).cpu()
            self.count += len(shares)
            output = call.output[block.rows, : self.layer.num_heads].float()
            expected = torch.einsum("thk,kd->thd", weights.keys, block.keys[:, : self.layer.value_dim])
            self.difference = max(self.difference, float((output - expected).abs().max()))
            self.largest = max(self.largest, float(output.abs().max()))
            index = self._index_reads(block, call)
            chosen = [row for row, position in enumerate(block.positions.tolist()) if position in self.queries]
            if chosen:
                read, by_query = _with_mean(weights.keys[chosen]), _with_mean(shares[chosen])
                tokens, entries = read.split([block.window_keys, read.shape[2] - block.window_keys], dim=2)
                near, far = _largest(tokens, self.top), _largest(entries, self.top)
                for place, row in enumerate(chosen):
                    position = int(block.positions[row])
                    *heads, mean = [
                        HeadRead(
                            shares=self._as_shares(share),
                            tokens=[block.first_token + key for key in near[place][head].keys],
                            token_weights=near[place][head].weights,
                            entries=far[place][head].keys,
                            entry_weights=far[place][head].weights,
                        )
                        for head, share in enumerate(by_query[place])
                    ]
                    self.reads[position] = LayerRead(self.layer.spec.index, heads, mean, index.get(position))

    def summary(self) -> LayerSummary:
        """The layer over all queries so far."""
        spec, means = self.layer.spec, (self.index / max(self.index_count, 1)).tolist()
        return LayerSummary(
            layer=spec.index,
            kind=spec.kind,
            ratio=spec.ratio,
            overlap=spec.overlap,
            index_topk=self.layer.index_topk,
            heads=[self._as_shares(row) for row in self.shares / self.count],
            index=IndexSummary(self.index_count, *means) if self.index_count else None,
            error=self.difference / self.largest if self.largest else self.difference,
        )

    def _block_shares(self, block: QueryBlock, weights: Tensor, sink: Tensor) -> Tensor:
        """``[n, heads, 4]``: sink, window, entries, and entries that are recent tokens (0 with a window)."""
        window, entries = weights.split([block.window_keys, weights.shape[2] - block.window_keys], dim=2)
        recent = torch.zeros_like(sink)
        if not self.layer.window_size:
            token = torch.arange(entries.shape[2], device=entries.device)
            recent = (entries * (block.positions.unsqueeze(1) - token < RECENT).unsqueeze(1)).sum(2)
        return torch.stack([sink, window.sum(2), entries.sum(2), recent], dim=2)

    def _check_finite(self, values: Tensor, block: QueryBlock, what: str) -> None:
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"{self.layer.prefix}: {what} of tokens {int(block.positions[0])} to {int(block.positions[-1])} are "
                "not finite; check the checkpoint's weights"
            )

    def _as_shares(self, values: Tensor) -> Shares:
        sink, window, entries, recent = values.tolist()
        return Shares(sink, window, entries, None if self.layer.window_size else recent)

    def _index_reads(self, block: QueryBlock, call: AttentionCall) -> dict[int, IndexRead]:
        """Selections of the indexer for the chosen queries of a block, by position.

        Adds the quality of every selection of the block to ``index``, also of queries that are not chosen.
        """
        quality = None if self.layer.indexer is None else selection_quality(block, self.layer.index_topk)
        found: dict[int, IndexRead] = {}
        if quality is None:
            return found
        sums = [value.double().sum() for value in (quality.recall, quality.chance, quality.kept)]
        self.index += torch.stack(sums).cpu()
        self.index_count += len(quality.rows)
        rows = quality.rows.tolist()
        places = [place for place, row in enumerate(rows) if int(block.positions[row]) in self.queries]
        if not places:
            return found
        all_scores = index_scores(self.layer, call, [block.rows.start + rows[place] for place in places])
        for place, scores in zip(places, all_scores, strict=True):
            row = rows[place]
            visible = int(block.visible[row].sum())
            self._check_finite(scores[:visible], block, "index scores")
            scores, weights, read = scores[:visible], quality.dense[place, :visible], block.read[row, :visible]
            top = min(self.top, visible)
            entries = torch.cat([scores.topk(top).indices, weights.topk(top).indices]).unique()
            entries = entries[scores[entries].argsort(descending=True, stable=True)]
            found[int(block.positions[row])] = IndexRead(
                visible=visible,
                lowest_selected=float(scores[read].min()),
                recall=float(quality.recall[place]),
                kept=float(quality.kept[place]),
                entries=entries.tolist(),
                scores=scores[entries].tolist(),
                dense_weights=weights[entries].tolist(),
                selected=read[entries].tolist(),
            )
        return found


def _with_mean(values: Tensor) -> Tensor:
    """``[n, heads, ...]`` with the mean over heads appended."""
    return torch.cat([values, values.mean(1, keepdim=True)], dim=1)


class Largest(NamedTuple):
    """Keys with the largest weights of one query in one head, largest first. Keys of weight 0 are left out."""

    keys: list[int]
    weights: list[float]


def _largest(weights: Tensor, top: int) -> list[list[Largest]]:
    """At most ``top`` keys of ``weights [n, heads, K]``, by query and head."""
    values, keys = (part.tolist() for part in weights.topk(min(top, weights.shape[2])))
    return [
        [Largest(k[: (count := sum(v > 0 for v in value))], value[:count]) for k, value in zip(*rows, strict=True)]
        for rows in zip(keys, values, strict=True)
    ]
