"""Records of a sequence: its layers' choices and hidden states by token; the options of records, and their file.

A file is safetensors: the recorded tensors, with the names and shapes of `TokenRecords`. The header's metadata has
``format`` and, as JSON lists, the numbers of the layers (``route_layers`` and so on).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import as_list, is_integer
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.models.block import Backbone
from deepseek_attn.utils.files import TensorBlocks, check_output, write_tensor_blocks

FORMAT = "deepseek-attn token records 1"
BLOCK_BYTES = 1 << 24  # of the rows that are written at once


@dataclass(frozen=True, eq=False)
class TokenRecords:
    """Choices and hidden states of a model's layers for the first ``n`` tokens of a sequence.

    Each array has one row per token and one column per layer of the list named with it. Ids are padded with -1. Arrays
    that were not recorded are None. Tensors are on the CPU; tensors of a file are read on first use.

    Attributes:
        token_ids: int32 ``[n]``.
        experts: int16 ``[n, layers, k]``, the router's experts in its order, counted over all ranks; of hash-routed
            layers too.
        expert_weights: float32 ``[n, layers, k]``, their weights.
        selections: int16 or int32 ``[n, layers, index_topk]``, the indexer's entries in ascending order; an entry is
            ``ratio`` tokens of the sequence, of DeepSeek-V3.2 one token.
        candidates: of the same dtype, ``[n, layers, candidate_topk_blocks]``: V4.1's blocks of entries to which later
            selections are limited, ascending.
        hidden_states: ``[n, layers, hidden_size]`` in the model's dtype, the residual after each layer; of V4 and V4.1
            ``[n, layers, hc_mult, hidden_size]``, all streams.
        route_layers: numbers of the layers of ``experts`` and ``expert_weights``.
        selection_layers: of ``selections``; V4.1's layers without an indexer read the one of their ``index_source``.
        candidate_layers, hidden_layers: of ``candidates`` and ``hidden_states``.
    """

    token_ids: Tensor | None = None
    experts: Tensor | None = None
    expert_weights: Tensor | None = None
    selections: Tensor | None = None
    candidates: Tensor | None = None
    hidden_states: Tensor | None = None
    route_layers: tuple[int, ...] = ()
    selection_layers: tuple[int, ...] = ()
    candidate_layers: tuple[int, ...] = ()
    hidden_layers: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of tokens."""
        return next((len(array) for array in self.arrays.values()), 0)

    def __repr__(self) -> str:
        shown = [f"{name} {str(array.dtype)[6:]} {list(array.shape)}" for name, array in self.arrays.items()]
        return f"TokenRecords({', '.join(shown)})"

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays that there are, by name."""
        found = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The lists of layer numbers, by name."""
        return {name: getattr(self, name) for name in LAYER_LISTS}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row of all arrays."""
        return sum(array.element_size() * math.prod(array.shape[1:]) for array in self.arrays.values())

    def save(self, path: str | Path) -> None:
        """Writes a file for `load`.

        Raises:
            ValueError: the file cannot be written, with the reason; an existing file is unchanged.
        """
        write_records(Path(path), self, lambda name: row_blocks(self.arrays[name]))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file of `save`, of a request, or of another program that uses these names.

        Raises:
            ValueError: the file cannot be read, is not a safetensors file, or has other tensors or metadata.
        """
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = dict(file.metadata() or {})
                names = set(file.keys())
                if names - set(ARRAYS) or not names:
                    held = ", ".join(sorted(names - set(ARRAYS)))[:200] or "no tensor"
                    raise ValueError(f"{str(path)!r} holds {held}: records hold {', '.join(ARRAYS)}")
                arrays = {name: file.get_tensor(name) for name in ARRAYS if name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as records (safetensors): {error}") from error
        fields: dict[str, Any] = {name: _layer_list(path, name, metadata.get(name, "[]")) for name in LAYER_LISTS}
        return cls(**arrays, **fields)


ARRAYS = ("token_ids", "experts", "expert_weights", "selections", "candidates", "hidden_states")
LAYER_LISTS = tuple(item.name for item in fields(TokenRecords) if item.name not in ARRAYS)


def _layer_list(path: str | Path, name: str, text: str) -> tuple[int, ...]:
    try:
        numbers = json.loads(text)
    except ValueError:
        numbers = None
    if not isinstance(numbers, list) or not all(is_integer(number) for number in numbers):
        raise ValueError(
            f"{str(path)!r}: {name} in its metadata is {text[:80]!r}: must be a JSON list of layer numbers"
        )
    return tuple(numbers)


def row_blocks(array: Tensor) -> Iterable[Tensor]:
    """The rows of an array in blocks of at most `BLOCK_BYTES`, or one by one."""
    rows = max(1, BLOCK_BYTES // max(1, array[:1].nbytes))
    return array.split(rows) if len(array) else ()


def write_records(
    path: Path, records: TokenRecords, blocks: Callable[[str], Iterable[Tensor]], *, parents: bool = False
) -> None:
    """Writes a file of records whose arrays ``blocks(name)`` yields in blocks of rows; ``parents``: makes folders.

    Raises:
        ValueError: it cannot be written there, with the reason.
    """
    arrays = {name: TensorBlocks.of(array, blocks(name)) for name, array in records.arrays.items()}
    metadata = {name: json.dumps(list(numbers)) for name, numbers in records.layers.items() if numbers}
    write_tensor_blocks(path, arrays, {"format": FORMAT} | metadata, parents=parents)


@dataclass(frozen=True)
class RouterSize:
    """Experts of a layer's router: how many there are, how many a token has, and whether a table chooses them."""

    experts: int
    topk: int
    hashed: bool


@dataclass(frozen=True)
class ChoosingLayers:
    """The layers of a model that choose, by number, in order.

    Attributes:
        routers: layers with experts.
        selectors: compress ratios of layers with an indexer.
        topk: entries that an indexer selects; 0 without indexers.
    """

    routers: Mapping[int, RouterSize]
    selectors: Mapping[int, int]
    topk: int

    @classmethod
    def of_config(cls, config: AnyConfig, layers: Iterable[int] | None = None) -> ChoosingLayers:
        """The layers of a config, or some of them, without MTP layers and draft stages."""
        numbers = None if layers is None else set(layers)
        specs = [spec for spec in config.layers if numbers is None or spec.index in numbers]
        selectors = {spec.index: spec.ratio for spec in specs if spec.has_indexer}
        experts, topk = config.n_routed_experts, config.num_experts_per_tok
        routers = {
            spec.index: RouterSize(experts, topk, spec.hash_routing)
            for spec in specs
            if not (isinstance(spec, V32LayerSpec) and spec.dense_ffn)
        }
        return ChoosingLayers(routers, selectors, (config.index_topk or 0) if selectors else 0)


@dataclass(frozen=True)
class RecordedLayers(ChoosingLayers):
    """The layers of a loaded model.

    Attributes:
        candidates: (blocks, entries of a block) of V4.1's layers that limit later selections.
        layers: all layers; state_shape: of one token's hidden states after one of them; dtype: of these.
        entry_dtype: int16 where it holds the number of every entry of a sequence, else int32.
    """

    candidates: Mapping[int, tuple[int, int]]
    layers: tuple[int, ...]
    state_shape: tuple[int, ...]
    dtype: torch.dtype
    entry_dtype: torch.dtype

    @classmethod
    def of(cls, model: Backbone, dtype: torch.dtype, max_model_len: int) -> Self:
        """The layers of the backbone, without MTP layers and draft stages."""
        config, blocks = model.config, {int(number): block for number, block in model.layers.items()}
        specs = {number: block.attn.spec for number, block in blocks.items()}
        choosing = ChoosingLayers.of_config(config, blocks)
        limiting = [number for number, spec in specs.items() if getattr(spec, "candidate_source", None) == number]
        blocks_kept = getattr(config, "candidate_topk_blocks", None) or 0, getattr(config, "candidate_block_size", 0)
        most = max((max_model_len // ratio for ratio in choosing.selectors.values()), default=0)
        return cls(
            **vars(choosing),
            candidates=dict.fromkeys(limiting, blocks_kept),
            layers=tuple(blocks),
            state_shape=model.layer_state_shape,
            dtype=dtype,
            entry_dtype=torch.int16 if most <= torch.iinfo(torch.int16).max else torch.int32,
        )


@dataclass(frozen=True)
class RecordOptions:
    """The records to make of each token of a sequence; see `TokenRecords`.

    Attributes:
        routes: experts and their weights; selections: entries of indexers, and V4.1's candidates.
        hidden_states: numbers of the layers after which hidden states are recorded.
    """

    routes: bool = False
    selections: bool = False
    hidden_states: tuple[int, ...] = field(default=())

    @classmethod
    def create(cls, found: RecordedLayers, routes: Any, selections: Any, hidden_states: Any) -> Self | None:
        """Checked options for a model; None if nothing is to be recorded.

        Raises:
            ValueError: the model has no router or indexer, or no such layers.
        """
        for name, value, there in (("routes", routes, found.routers), ("selections", selections, found.selectors)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: must be True or False")
            if value and not there:
                what = "experts" if name == "routes" else "an indexer"
                raise ValueError(f"{name}: the layers {list(found.layers)} lack {what}, so there is nothing to record")
        numbers = as_list(() if hidden_states is None else hidden_states, "hidden_states: numbers of layers")
        wrong = [number for number in numbers if not is_integer(number) or number not in found.layers]
        if wrong or len(set(numbers)) < len(numbers):
            raise ValueError(f"hidden_states={numbers}: there are layers {list(found.layers)}; name each once")
        options = cls(routes, selections, tuple(sorted(int(number) for number in numbers)))
        return options if options != cls() else None

    def template(self, found: RecordedLayers) -> TokenRecords:
        """The records of no token: dtypes and shapes."""

        def none(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(0, *shape, dtype=dtype, device="cpu")

        arrays: dict[str, Any] = {"token_ids": none(torch.int32)}
        if self.routes:
            width = next(iter(found.routers.values())).topk
            arrays["route_layers"] = tuple(found.routers)
            arrays["experts"] = none(torch.int16, len(found.routers), width)
            arrays["expert_weights"] = none(torch.float32, len(found.routers), width)
        if self.selections:
            arrays["selection_layers"] = tuple(found.selectors)
            arrays["selections"] = none(found.entry_dtype, len(found.selectors), found.topk)
        if self.selections and found.candidates:
            kept, _ = next(iter(found.candidates.values()))
            arrays["candidate_layers"] = tuple(found.candidates)
            arrays["candidates"] = none(found.entry_dtype, len(found.candidates), kept)
        if self.hidden_states:
            arrays["hidden_layers"] = self.hidden_states
            arrays["hidden_states"] = none(found.dtype, len(self.hidden_states), *found.state_shape)
        return TokenRecords(**arrays)

    def union(self, other: RecordOptions) -> RecordOptions:
        """The union of both records."""
        layers = tuple(sorted({*self.hidden_states, *other.hidden_states}))
        return RecordOptions(self.routes or other.routes, self.selections or other.selections, layers)


def record_path(directory: str | Path, name: str) -> Path:
    """The file of the records of that name in a folder, which need not exist: it is made with its first file.

    Raises:
        ValueError: the folder cannot be made or written to.
    """
    path = Path(directory) / f"{name}.safetensors"
    check_output(path, "records", parents=True)
    return path
