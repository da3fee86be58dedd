"""Floors: the least bytes and products of a part of a model, and the time that they take at peak rates.

Bytes are counted once each: weights as the checkpoint's format stores them (where the numerics keep it), cached entries
that were there before the step, new entries, input and output. A second read, or intermediate results
that are written and read again, are not in a floor.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch

from deepseek_attn.cache.layout import CacheLayout, PoolSpec, divides_blocks
from deepseek_attn.checkpoint.published import canonical_names, published_tensors
from deepseek_attn.checkpoint.recipes import ROWS, Recipe
from deepseek_attn.config.model import AnyConfig, AnySpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.trailing import layer_reach
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec
from deepseek_attn.kernels.common.quant import FP4_GROUP
from deepseek_attn.kernels.engram.types import SCALE_GROUP

Tensors = tuple[tuple[str, Recipe], ...]
ATTENTION, EXPERTS, NORMS, ROUTING, HEAD = "attention", "experts", "hyper-connections and norms", "routing", "head"
ENGRAM = "n-gram memory"
STAGES = (ATTENTION, EXPERTS, NORMS, ROUTING, HEAD, ENGRAM)
"""The stages of a model step."""
ROUTED, HEAD_TENSORS = ("experts.", "gate."), ("norm.", "head.", "hc_head_")
ENTRIES = ("compressor.", "indexer.wk.", "indexer.k_norm.")  # weights that entries and index keys are made with
SELECTION = ("indexer.wq_b.", "indexer.weights_proj.")  # weights that are read only where queries have to select


@dataclass(frozen=True)
class Product:
    """Matrix products of one kind.

    Attributes:
        name: ``projections``, ``index scores`` or ``attention``; unit: ``bf16`` or ``fp8``, the rate that bounds them.
        flops: a multiplication with its addition is two.
    """

    name: str
    unit: str
    flops: int


@dataclass(frozen=True)
class FloorWork:
    """Bytes that a part of a model has to move, and products that it has to compute.

    Attributes:
        bytes: by kind (``weights``, ``index keys``, ``selected entries``, ``output``, ...).
        bus: the part of these bytes that comes from host memory.
    """

    bytes: dict[str, int]
    products: tuple[Product, ...] = ()
    bus: int = 0

    def __add__(self, other: FloorWork) -> FloorWork:
        """The work of both, one after the other."""
        flops = Counter()
        for product in (*self.products, *other.products):
            flops[product.name, product.unit] += product.flops
        merged = tuple(Product(name, unit, count) for (name, unit), count in flops.items())
        return FloorWork(dict(Counter(self.bytes) + Counter(other.bytes)), merged, self.bus + other.bus)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def total_flops(self) -> int:
        return sum(product.flops for product in self.products)

    def floor(self, rates: Mapping[str, float]) -> Floor:
        """The least time of this work at ``rates``: ``copy`` and ``bus`` in bytes/s, ``bf16`` and ``fp8`` in FLOP/s.

        A machine without an FP8 rate computes FP8 products at its bf16 rate. Bytes of host memory need a ``bus``.
        """
        seconds = sum(product.flops / rates.get(product.unit, rates["bf16"]) for product in self.products)
        bus_us = self.bus / rates["bus"] * 1e6 if self.bus else 0.0
        return Floor(self.total_bytes / rates["copy"] * 1e6, seconds * 1e6, bus_us)


@dataclass(frozen=True)
class Floor:
    """Microseconds that the bytes and the products of some work take at peak rates, each alone.

    Attributes:
        bus_us: of the bytes that come from host memory.
    """

    bytes_us: float
    flops_us: float
    bus_us: float = 0.0

    @property
    def microseconds(self) -> float:
        return max(self.bytes_us, self.flops_us, self.bus_us)

    @property
    def bound(self) -> str:
        """``bus``, ``bytes`` or ``flops``, whichever takes longest."""
        if self.bus_us > max(self.bytes_us, self.flops_us):
            return "bus"
        return "bytes" if self.bytes_us >= self.flops_us else "flops"


@dataclass(frozen=True)
class StepShape:
    """``batch`` requests with ``tokens`` new tokens each, which have ``context`` tokens after the step."""

    batch: int
    tokens: int
    context: int

    @property
    def before(self) -> int:
        """Tokens of a request that were cached before the step."""
        return self.context - self.tokens

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class ModelWork:
    """Counts the work of the parts of a model.

    Attributes:
        dtype: of hidden states, and of weights that are not quantised.
        layers: the backbone layers that there are; None: all of the config's.
    """

    config: AnyConfig
    numerics: Numerics
    dtype: torch.dtype
    layers: tuple[AnySpec, ...] | None = None

    def attention(self, spec: AnySpec, layout: CacheLayout, shape: StepShape) -> FloorWork:
        """Work of one attention layer, from normed hidden states to the output projection.

        Args:
            layout: holds the layer's pools.

        Notes:
            Queries of one request are taken to select different entries, as far as there are different ones.
            Without more visible entries than ``index_topk`` nothing has to be selected, and nothing is scored.
            Entries and index keys of the step that another layer makes (V4.1) are read too.
        """
        selection = _Selection.of(self.config, spec, layout, shape)
        tensors = attention_tensors(self.config, spec.name)
        if not selection.scored:
            tensors = tuple((name, recipe) for name, recipe in tensors if not name.startswith(SELECTION))
        work = self.weights(tensors, shape.rows)
        for pool in layout.pools:
            owned = pool.layer == spec.name
            if owned or (pool.layer == spec.entry_owner and pool.kind in ("compressed", "index")):
                work += FloorWork(pool_bytes(pool, layout, selection, shape, owned))
        work += self._shared_choices(spec, layout, shape)
        work += self._activations(shape.rows, inputs=1, outputs=1)
        return work + FloorWork({}, selection.products(self.config, self.numerics))

    def shape_of(self, spec: AnySpec, shape: StepShape, before: bool = False) -> StepShape:
        """The rows of a step that a layer computes when results of each request's last row are wanted.

        All rows, except in V4.1's upper layers (`config.trailing`). ``before``: the rows of the layer's input."""
        rows = None if spec.is_mtp else self._rows.get(spec.index if before else spec.index + 1)
        return shape if rows is None or rows >= shape.tokens else StepShape(shape.batch, rows, shape.context)

    def attention_to_end(self, spec: AnySpec, layout: CacheLayout, shape: StepShape) -> FloorWork:
        """`attention` of these rows; a layer that makes entries makes them of all rows."""
        own = self.shape_of(spec, shape)
        work = self.attention(spec, layout, own)
        if own is shape or spec.name != spec.entry_owner:
            return work
        others = StepShape(shape.batch, shape.tokens - own.tokens, shape.context - own.tokens)
        tensors = attention_tensors(self.config, spec.name)
        made = self.weights(tuple(t for t in tensors if t[0].startswith(ENTRIES)), others.rows)
        entries = sum(
            pool_bytes(pool, layout, _NOTHING_SELECTED, others, owned=True)["new entries"]
            for pool in layout.pools
            if pool.layer == spec.name and pool.kind in ("compressed", "index")
        )
        work += FloorWork({"new entries": entries}, made.products)
        return work + self._activations(others.rows, inputs=1)

    @cached_property
    def _rows(self) -> dict[int, int]:
        """V4.1: by layer number, input rows that a request's last row needs; absent if it needs all of them.

        The number after a layer stands for its output.
        """
        config = self.config
        if not isinstance(config, DeepseekV41Config):
            return {}
        layers = config.layers if self.layers is None else self.layers
        reach, found = layer_reach(layers, config.sliding_window), dict[int, int]()
        for spec, inputs, outputs in zip(layers, reach, (*reach[1:], 0), strict=True):
            found |= {} if inputs is None else {spec.index: 1 + inputs}
            found |= {} if outputs is None else {spec.index + 1: 1 + outputs}
        return found

    def _shared_choices(self, spec: AnySpec, layout: CacheLayout, shape: StepShape) -> FloorWork:
        """Work of writing a selection and candidate blocks (int32) that other layers read too, or of reading them.

        A query has them if it sees more entries than they hold.
        """
        config = self.config
        if not isinstance(config, DeepseekV41Config):
            return FloorWork({})
        blocks, size = config.candidate_topk_blocks or 0, config.candidate_block_size or 0
        found = {}
        for what, key, width, most in (
            ("selection", "index_source", config.index_topk, config.index_topk),
            ("candidates", "candidate_source", blocks, blocks * size),
        ):
            source = getattr(spec, key)
            if source is not None and sum(getattr(layer, key) == source for layer in config.layers) > 1:
                ratio = entry_ratio(layout, spec.entry_owner)
                queries = sum(length // ratio > most for length in range(shape.before + 1, shape.context + 1))
                found[what] = 4 * shape.batch * queries * width
        return FloorWork(found)

    def weights(self, tensors: Tensors, rows: int) -> FloorWork:
        """Work of reading ``tensors`` once and multiplying ``rows`` token rows with each matrix among them.

        FP8 weights count with a float32 scale per block, vectors and hyper-connections as float32.
        """
        size, flops = 0, Counter()
        for name, recipe in tensors:
            count = prod(recipe.shape)
            if recipe.kind not in ("quantized", "linear"):
                size += 4 * count
                flops["bf16"] += 2 * rows * count * (recipe.kind == "hc_fn")
                continue
            fp8 = self.quantized and recipe.kind == "quantized"
            size += stored_bytes(recipe.shape, "fp8", self.config.FP8_GROUP) if fp8 else count * self.dtype.itemsize
            flops["fp8" if fp8 and fp8_product(name, self.numerics) else "bf16"] += 2 * rows * count
        products = tuple(Product("projections", unit, count) for unit, count in flops.items() if count)
        return FloorWork({"weights": size}, products)

    @property
    def quantized(self) -> bool:
        """Whether weights are read as the checkpoint stores them."""
        return self.numerics.quantized_weights and self.config.quantization_config is not None

    def experts(self, spec: AnySpec, rows: int, hit_rate: float = 1.0) -> FloorWork:
        """Work of the experts of one layer, the shared one included, or of its dense MLP.

        Args:
            hit_rate: fraction of the chosen experts whose weights are on the device; the others are read over the bus.

        Notes:
            Tokens are assumed to choose experts evenly and independently. Weights count for the expected number of
            experts that at least one token chooses.
        """
        config, tensors = self.config, tensors_below(self.config, f"{spec.name}.ffn.")
        work = self.weights(tuple(t for t in tensors if not t[0].startswith(ROUTED)), rows)
        shapes = [recipe.shape for name, recipe in tensors if name.startswith("experts.")]
        if shapes:
            chosen = expected_experts(config.n_routed_experts, config.num_experts_per_tok, rows)
            if self.quantized:
                form = getattr(config, "expert_dtype", None) or "fp8"
                one = sum(stored_bytes(shape, form, config.FP8_GROUP) for shape in shapes)
            else:
                one = sum(map(prod, shapes)) * self.dtype.itemsize
            unit = "fp8" if self.quantized and self.numerics.fp8_activations else "bf16"
            flops = 2 * rows * config.num_experts_per_tok * sum(map(prod, shapes))
            routed, bus = round(chosen * one), round((1 - hit_rate) * chosen * one)
            work += FloorWork({"routed weights": routed}, (Product("routed experts", unit, flops),), bus)
        return work + self._activations(rows, inputs=1, outputs=1)

    def routing(self, spec: AnySpec, rows: int) -> FloorWork:
        """Work of the router of one layer: from hidden states to expert ids (int64) and weights (float32)."""
        tensors = tensors_below(self.config, f"{spec.name}.ffn.gate.")
        if not tensors:
            return FloorWork({})
        table = tuple(t for t in tensors if t[0] != "tid2eid")  # of which a row per token is read
        chosen = rows * self.config.num_experts_per_tok
        work = self.weights(table, rows) + self._activations(rows, inputs=1)
        return work + FloorWork({"output": chosen * 12} | ({"table": chosen * 8} if len(table) < len(tensors) else {}))

    def norms(self, spec: AnySpec, rows: int) -> FloorWork:
        """Work between the sublayers of one block: both norms, and hyper-connections, with the residual in and out.

        The residual is ``hc_mult`` streams in V4.
        """
        tensors = tensors_below(self.config, f"{spec.name}.")
        own = tuple(t for t in tensors if t[0].startswith(("hc_attn_", "hc_ffn_", "attn_norm.", "ffn_norm.")))
        streams = getattr(self.config, "hc_mult", 1)
        return self.weights(own, rows) + self._activations(2 * rows, inputs=1 + streams, outputs=1 + streams)

    def engram(self, spec: AnySpec, rows: int) -> FloorWork:
        """Work of the n-gram memory before one layer of V4.1: table rows, their projection, all streams in and out."""
        tensors = tensors_below(self.config, f"{spec.name}.engram.")
        if not tensors or not isinstance(self.config, DeepseekV41Config):
            return FloorWork({})
        width, streams = self.config.memory.width, self.config.hc_mult
        work = self.weights(tuple(t for t in tensors if t[1].kind != ROWS), rows)
        work += self._activations(rows, inputs=streams, outputs=streams)
        return work + FloorWork({"table rows": rows * (width + width // SCALE_GROUP)})

    def head(self, rows: int) -> FloorWork:
        """Work of the output head: from hidden states (all streams) of ``rows`` tokens to float32 logits."""
        found = (tensor for tensors in _tensors_by_layer(self.config).values() for tensor in tensors)
        work = self.weights(tuple((name, recipe) for name, recipe in found if name.startswith(HEAD_TENSORS)), rows)
        work += self._activations(rows, inputs=getattr(self.config, "hc_mult", 1))
        return work + FloorWork({"logits": 4 * rows * self.config.vocab_size})

    def _activations(self, rows: int, inputs: int, outputs: int = 0) -> FloorWork:
        """Hidden states of ``rows`` tokens that are read and written."""
        size = rows * self.config.hidden_size * self.dtype.itemsize
        return FloorWork({name: n * size for name, n in (("input", inputs), ("output", outputs)) if n})


def stored_bytes(shape: tuple[int, ...], form: str, block: int) -> int:
    """Bytes of a quantised matrix: ``fp8`` with a float32 scale per block, or ``fp4`` with an e8m0 byte per group."""
    count = prod(shape)
    if form == "fp4":
        return count // 2 + count // FP4_GROUP
    return count + 4 * prod(-(-n // block) for n in shape)


def expected_experts(experts: int, topk: int, rows: int) -> float:
    """Expected number of different experts that ``rows`` tokens choose, each ``topk`` of ``experts``, evenly."""
    return experts * (1 - (1 - topk / experts) ** rows)


def fp8_product(name: str, numerics: Numerics) -> bool:
    """Whether a quantised weight is multiplied with FP8 inputs.

    V3.2's ``wkv_b`` is not: absorbed into queries and outputs, it is dequantised first.
    """
    if name.startswith("wo_a."):
        return numerics.fp8_wo_a_input
    return numerics.fp8_activations and not name.startswith("wkv_b.")


def attention_tensors(config: AnyConfig, layer: str) -> Tensors:
    """Name within the attention of ``layer`` (``layers.3``) and recipe of each of its tensors, scales excepted."""
    return tensors_below(config, f"{layer}.attn.")


def tensors_below(config: AnyConfig, prefix: str) -> Tensors:
    """Name after ``prefix`` and recipe of a layer's tensors with that prefix; of routed experts, only number 0."""
    found = _tensors_by_layer(config).get(_layer_of(prefix), ())
    return tuple((name.removeprefix(prefix), recipe) for name, recipe in found if name.startswith(prefix))


def _layer_of(name: str) -> str:
    """``layers.3`` of a tensor of that layer."""
    return ".".join(name.split(".", 2)[:2])


@lru_cache(maxsize=4)
def _tensors_by_layer(config: AnyConfig) -> dict[str, list[tuple[str, Recipe]]]:
    rename = canonical_names(config)
    others = re.compile(r"\.experts\.[1-9]")
    found: dict[str, list[tuple[str, Recipe]]] = {}
    for name, recipe in published_tensors(config):
        if not others.search(name):
            name = rename(name)
            found.setdefault(_layer_of(name), []).append((name, recipe))
    return found


@dataclass(frozen=True)
class _Selection:
    """Numbers of keys and entries that the new tokens of all requests read.

    Attributes:
        window_keys: keys of the window, all queries together; entries: entries of the layer's compressed or latent
            pool; scored: entries that they have to score.
        entries_per_request: different entries that a request's queries read at most; keys_per_request: that they score.
    """

    window_keys: int
    entries: int
    scored: int
    entries_per_request: int
    keys_per_request: int

    @classmethod
    def of(cls, config: AnyConfig, spec: AnySpec, layout: CacheLayout, shape: StepShape) -> _Selection:
        lengths = range(shape.before + 1, shape.context + 1)  # of the request, as each new token sees it
        window = sum(min(layout.window, length) for length in lengths)
        ratio = entry_ratio(layout, spec.entry_owner)
        visible = [length // ratio for length in lengths] if ratio else []
        read, scored = visible, 0
        if ratio and not spec.lists_entries and config.index_topk is not None:
            read = [min(count, config.index_topk) for count in visible]
        if spec.has_indexer:
            most = max_scored(config, spec)
            scored = sum(min(count, most) for count in visible if count > config.index_sizes.topk)
        return cls(shape.batch * window, shape.batch * sum(read), shape.batch * scored, sum(read), scored)

    def products(self, config: AnyConfig, numerics: Numerics) -> tuple[Product, ...]:
        keys, value_dim = self.window_keys + self.entries, config.head_dim
        if isinstance(config, DeepseekV32Config):
            value_dim = config.kv_lora_rank
        flops = 2 * config.num_attention_heads * (config.head_dim + value_dim) * keys
        products = (Product("attention", "bf16", flops),)
        if self.scored:
            unit = "bf16" if numerics.index_record == "plain" else "fp8"
            score = 2 * config.index_sizes.n_heads * config.index_sizes.head_dim
            products = (Product("index scores", unit, score * self.scored), *products)
        return products


_NOTHING_SELECTED = _Selection(0, 0, 0, 0, 0)


def max_scored(config: AnyConfig, spec: AnySpec) -> int:
    """Most entries that an indexer scores for a query: the entries of its candidate blocks (V4.1), or all."""
    if isinstance(spec, V41LayerSpec) and isinstance(config, DeepseekV41Config):
        return sys.maxsize if spec.candidate_source in (None, spec.index) else config.candidate_entries
    return sys.maxsize


def pool_bytes(
    pool: PoolSpec, layout: CacheLayout, selection: _Selection, shape: StepShape, owned: bool
) -> dict[str, int]:
    """Bytes that a layer reads from one pool in a step, and writes to it if it is its own, by kind.

    Compression reads the raw projections of a window only if it closes in the step, and keeps projections that a later
    window needs.
    """
    ratio = entry_ratio(layout, pool.layer)
    if pool.record is None:
        row, opened, closed = pool.width * 4, shape.before // ratio * ratio, shape.context // ratio * ratio
        overlap = pool.carry - (0 if divides_blocks(ratio) else ratio)
        read = min(shape.before, shape.before - opened + overlap) if closed > shape.before else 0
        kept = min(shape.tokens, shape.context - closed + overlap)
        return {"compressor state": shape.batch * (read + kept) * row}
    entry = pool.record.entry_bytes
    if pool.kind == "window":
        read, new = min(layout.window - 1, shape.before), min(layout.window, shape.tokens)
        return {"window": shape.batch * read * entry, "new entries": shape.batch * new * entry}
    cached, after = shape.before // ratio, shape.context // ratio
    written = {"new entries": shape.batch * (after - cached) * entry} if owned else {}
    present = cached if owned else after
    if pool.kind == "index":
        return written | {"index keys": shape.batch * min(present, selection.keys_per_request) * entry}
    return written | {"selected entries": shape.batch * min(present, selection.entries_per_request) * entry}


def entry_ratio(layout: CacheLayout, layer: str) -> int:
    """Tokens per entry of a layer's compressed or latent pool; 0 for a layer that reads its window only."""
    groups: Iterable[str] = (pool.group for pool in layout.pools if pool.layer == layer and pool.kind != "window")
    return next((layout.spans[group].ratio for group in groups if group in layout.spans), 0)
