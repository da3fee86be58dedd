"""Golden results of small models, to check another implementation op by op.

    from deepseek_attn.testing import golden
    fixture = golden.load("v4_c4a_layer")
    outputs = my_layer(fixture.weights(), fixture.inputs["x"])  # any of fixture.ops, by name
    golden.compare(fixture, outputs)

`compare` names the first op that differs. A fixture is computed in plain torch on the CPU from a config, a seed-free
rule for weights and inputs (`golden_source.uniform`), and the library's reference ops; files are `Golden.save`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_attn.checkpoint import CanonicalSource, read_float32, write_checkpoint
from deepseek_attn.checkpoint.headers import FLOAT_DTYPES
from deepseek_attn.checkpoint.names_v32 import canonical_names
from deepseek_attn.checkpoint.stored_weights import scale_name
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.testing.errors import BY_DTYPE, QUANTIZED_CACHE, QUANTIZED_INPUTS
from deepseek_attn.testing.golden_record import (
    NUMERICS,
    Ops,
    record_attention,
    record_hyper_connection,
    record_model,
    record_moe,
)
from deepseek_attn.testing.golden_source import GoldenSource, golden_config, uniform
from deepseek_attn.utils.files import write_tensors
from deepseek_attn.utils.version import __version__

FORMAT = "1"
MODEL_TOLERANCE = 1e-4  # of ops behind several layers, in float32: each adds its roundings
SELECTED = {"float32": 0.0, "official": 0.1}  # share of rows whose set of numbers may differ, by near ties
BYTES = 0.05  # share of bytes of a cache that may differ: values next to a boundary between two codes


class _Case(NamedTuple):
    """A fixture: the model, the layers and tokens of it, and what is recorded."""

    family: str
    kind: str
    about: str
    layers: tuple[int, ...] = ()
    tokens: int = 24
    rows: int = 24


CASES = {
    "v4_swa_layer": _Case("v4", "attention", "V4 attention over a window alone", (0,)),
    "v4_c4a_layer": _Case("v4", "attention", "V4 attention, ratio 4, overlapping windows, indexer", (1,), 45, 20),
    "v4_c128a_layer": _Case("v4", "attention", "V4 attention, ratio 128, all entries", (2,), 260, 8),
    "v4_hash_moe": _Case("v4", "moe", "V4 experts chosen by token id", (0,)),
    "v4_moe": _Case("v4", "moe", "V4 experts chosen by the router", (1,)),
    "v4_hyper_connection": _Case("v4", "hyper_connection", "V4 residual streams around one sublayer", (1,)),
    "v4_model": _Case("v4", "model", "V4: every sublayer, logits and the MTP layer's", (), 140, 8),
    "v32_layer": _Case("v32", "attention", "V3.2 latent attention behind an indexer", (0,), 40, 20),
    "v32_moe": _Case("v32", "moe", "V3.2 experts of the best groups", (1,)),
    "v32_model": _Case("v32", "model", "V3.2: every sublayer, logits and the MTP layer's", (), 40, 12),
    "v41_shared_selections": _Case(
        "v41",
        "attention",
        "V4.1 attention: entries, selections and candidates that layers share",
        (1, 2, 4, 5, 6),
        40,
        8,
    ),
    "v41_model": _Case("v41", "model", "V4.1: every sublayer, both n-gram memories, logits", (), 40, 8),
}
# A line for each op, by the last part of its name.
OPS = {
    "q_latent": "wq_a x, normed [T, q_lora_rank]",
    "key": "window key = value, normed and rotated [T, head_dim]",
    "latents": "key latent, normed, then the rotated key [T, kv_lora_rank + qk_rope_head_dim], as the cache holds them",
    "entries": "compressed entries, normed and rotated, as the cache holds them [entries, head_dim]",
    "index_keys": "the indexer's keys as the cache holds them [entries, index_head_dim]",
    "cache.window": "bytes of the last window's keys: of each its values, then its scales",
    "cache.latent": "the same of latents",
    "cache.compressed": "the same of compressed entries",
    "cache.index": "the same of index keys",
    "query": "queries, normed (V4) or absorbed (V3.2), rotated [T, heads, d]",
    "index_query": "the indexer's queries, rotated [T, index_n_heads, index_head_dim]",
    "index_weights": "weights of its heads, all scales included [T, index_n_heads]",
    "index_scores": "scores of the entries, 0 where a query does not see one [T, entries]",
    "selected": "entries that each query reads, -1 for none [T, index_topk]; compared as sets",
    "attended": "attention's result before the inverse rotation (V4), or latents before W_UV (V3.2) [T, heads, d]",
    "output": "the layer's output, or the residual streams behind a block of a model",
    "experts": "chosen experts, ascending [T, k]",
    "expert_weights": "their weights, in that order [T, k]",
    "routed": "sum of the routed experts, float32 [T, hidden_size]",
    "shared": "the shared expert [T, hidden_size]",
    "post": "weights of the sublayer's output in each stream [T, m]",
    "comb": "mixing matrix of the streams [T, m, m]",
    "collapsed": "the sublayer's input before its norm [T, hidden_size]",
    "input": "the sublayer's input [T, hidden_size]",
    "streams": "streams after the sublayer [T, m, hidden_size]",
    "engram": "streams behind the n-gram memory [T, m, hidden_size]",
    "attn_input": "input of attention, normed",
    "attn_output": "output of attention",
    "ffn_input": "input of the experts or the MLP, normed",
    "ffn_output": "their output",
    "logits": "[T, vocab_size]",
    "mtp_logits": "logits of the MTP layer for the token after next [T - 1, vocab_size]",
}


def about(op: str) -> str:
    """What an op is, in words."""
    return next((text for name, text in OPS.items() if op == name or op.endswith(f".{name}")), "")


@dataclass
class Golden:
    """Inputs of a part of a small model, and the results of its ops.

    Attributes:
        name: of the fixture; about: what it is.
        config: decoded ``config.json`` of the model.
        layers: layers whose parts are computed; empty: all.
        inputs: by name, tensors. Hidden states are bfloat16.
        results: by numerics and name, results of the ops in the order of the computation. ``official`` is absent for
            whole models.
        rows: results that have a row for each token hold the last ``rows`` of them.
        version: of the library that computed it.
    """

    name: str
    about: str
    config: dict[str, Any]
    layers: tuple[int, ...]
    inputs: dict[str, Tensor]
    results: dict[str, Ops]
    rows: int
    version: str = __version__
    kind: str = "attention"
    _source: GoldenSource | None = field(default=None, repr=False)

    @property
    def ops(self) -> list[str]:
        """Names of the ops in order."""
        return list(self.results["float32"])

    def weights(self, dequantized: bool = True) -> dict[str, Tensor]:
        """Weights of the model by published name: float32 values, or the stored tensors with their scales.

        Raises:
            ValueError: the fixture is not one of the library's models.
        """
        source = self._source or GoldenSource(ModelConfig.from_dict(self.config))
        if self.name not in CASES:
            raise ValueError(f"{self.name} was made of another checkpoint, which has the weights")
        if not dequantized:
            return {name: source.read(name).clone() for name in source.entries()}
        source_names = CanonicalSource(source, canonical_names(source.config))
        out, entries = {}, source_names.entries()
        scales = {scale_name(name) for name in entries}
        for name, info in entries.items():
            if name in scales or (
                self.layers and name.startswith("layers.") and int(name.split(".")[1]) not in self.layers
            ):
                continue
            table = "engram.embed" in name or (info.dtype not in FLOAT_DTYPES and scale_name(name) not in entries)
            out[name] = source_names.read(name).clone() if table else read_float32(source_names, name)
        return out

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file: ``input.NAME`` and ``NUMERICS.OP``; the rest is JSON in its metadata."""
        tensors = {f"input.{name}": tensor for name, tensor in self.inputs.items()}
        for numerics, ops in self.results.items():
            tensors |= {f"{numerics}.{name}": tensor for name, tensor in ops.items()}
        facts = {
            "format": FORMAT, "name": self.name, "about": self.about, "version": self.version, "rows": self.rows,
            "layers": list(self.layers), "kind": self.kind, "config": self.config,
            "ops": {numerics: list(ops) for numerics, ops in self.results.items()},
            "tolerances": {n: {op: self.tolerance(op, n) for op in ops} for n, ops in self.results.items()},
        }  # fmt: skip
        write_tensors(Path(path), tensors, {"golden": json.dumps(facts)})

    def tolerance(self, op: str, numerics: str) -> float:
        """How far an op may be off: relative error of a row; of bytes and numbers, the share that differs."""
        expected = self.results[numerics][op]
        if op.endswith("selected"):
            return SELECTED[numerics]
        if expected.dtype == torch.uint8:
            return BYTES
        if not expected.dtype.is_floating_point:
            return SELECTED[numerics]
        if self.kind == "model":
            return MODEL_TOLERANCE
        if numerics == "float32":
            return BY_DTYPE[torch.float32]
        if self.kind == "hyper_connection":
            return BY_DTYPE[torch.bfloat16]
        return QUANTIZED_CACHE if op.rsplit(".", 1)[-1] in ("q_latent", "key") else QUANTIZED_INPUTS


class OpResult(NamedTuple):
    """An op beside its golden result.

    Attributes:
        op: its name; difference, tolerance: relative error of the worst row, or share of what differs.
        place: index of the largest difference in the golden tensor; None where nothing differs.
        expected, got: the two values there.
    """

    op: str
    difference: float
    tolerance: float
    place: tuple[int, ...] | None
    expected: float
    got: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.op}: equal"
        return (
            f"{self.op} differs by {self.difference:.1e} ({self.tolerance:.0e} is allowed); the largest difference is "
            f"at {list(self.place)}: expected {self.expected:.6g}, got {self.got:.6g}"
        )


class GoldenMismatch(AssertionError):
    """Results of another implementation are not the golden ones; ``first`` is the first op that differs.

    Attributes:
        results: all ops that were compared, in order.
    """

    def __init__(self, name: str, results: list[OpResult]):
        self.results = results
        self.first = next(result for result in results if not result.passed)
        wrong = sum(not result.passed for result in results)
        before = [result.op for result in results[: results.index(self.first)]]
        right = f"ops before it are right ({', '.join(before)})" if before else "it is the first op that was given"
        super().__init__(
            f"{name}: {self.first}\n  {right}; {wrong} of {len(results)} ops differ\n  {about(self.first.op)}"
        )


def names() -> list[str]:
    """Names of the library's fixtures."""
    return list(CASES)


def load(name: str | Path) -> Golden:
    """A fixture by its name, computed within seconds on the CPU, or from a file that `Golden.save` wrote.

    Raises:
        ValueError: neither a name nor such a file, or a file of another format version.
    """
    if str(name) in CASES:
        return _computed(str(name))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{str(name)!r} is no file and no fixture: there are {', '.join(CASES)}")
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("golden", "{}"))
            if facts.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is no golden fixture of format {FORMAT}: its format is {facts.get('format')!r}; write it "
                    "again with `deepseek-attn port-check --write DIR`"
                )
            inputs = {n[6:]: file.get_tensor(n) for n in file.keys() if n.startswith("input.")}  # noqa: SIM118
            results = {n: {op: file.get_tensor(f"{n}.{op}") for op in ops} for n, ops in facts["ops"].items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    keys = ("name", "about", "config", "rows", "version", "kind")
    return Golden(layers=tuple(facts["layers"]), inputs=inputs, results=results, **{key: facts[key] for key in keys})


def read_outputs(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name of op; ValueError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} is no safetensors file that can be read: {error}") from None


def compare(
    golden: Golden | str | Path,
    outputs: Mapping[str, Tensor],
    numerics: str = "float32",
    tolerances: Mapping[str, float] | None = None,
) -> list[OpResult]:
    """Compares an implementation's results with the golden ones, op by op in the order of the computation.

    Args:
        golden: a fixture, or what `load` takes.
        outputs: results by name of op, any of ``golden.ops``; of all tokens, or of the last ``golden.rows``.
        numerics: ``float32``, or ``official``: bfloat16 with DeepSeek's quantised inputs and caches.
        tolerances: by op, instead of `Golden.tolerance`; 0: equal to the bit.

    Returns:
        The results of all ops, none of which differs.

    Raises:
        GoldenMismatch: names the first op that differs, with the place and size of its largest difference.
        ValueError: unknown ops, none, or shapes that do not fit.
    """
    results = differences(golden, outputs, numerics, tolerances)
    if not all(result.passed for result in results):
        raise GoldenMismatch(golden.name if isinstance(golden, Golden) else str(golden), results)
    return results


def differences(
    golden: Golden | str | Path,
    outputs: Mapping[str, Tensor],
    numerics: str = "float32",
    tolerances: Mapping[str, float] | None = None,
) -> list[OpResult]:
    """`compare` without an error for results that differ."""
    golden = golden if isinstance(golden, Golden) else load(golden)
    if numerics not in golden.results:
        raise ValueError(f"numerics {numerics!r}: {golden.name} has {', '.join(golden.results)}")
    expected, tolerances = golden.results[numerics], dict(tolerances or {})
    if unknown := [name for name in (*outputs, *tolerances) if name not in expected]:
        raise ValueError(f"{golden.name} has no op {', '.join(unknown)} in {numerics}: there are {', '.join(expected)}")
    if not outputs:
        raise ValueError(f"no outputs to compare: give any of {', '.join(expected)}")
    found = []
    for op, right in expected.items():
        if op in outputs:
            limit = tolerances.get(op, golden.tolerance(op, numerics))
            found.append(_difference(op, outputs[op].detach().cpu(), right, limit))
    return found


def _difference(op: str, got: Tensor, right: Tensor, limit: float) -> OpResult:
    if got.shape[1:] != right.shape[1:] or len(got) < len(right):
        raise ValueError(f"{op} is {list(got.shape)}: expected {list(right.shape)}, or more rows before these")
    got = got[len(got) - len(right) :]
    if not right.dtype.is_floating_point:
        if op.endswith(("selected", "experts")):
            got, right = got.sort(dim=1).values, right.sort(dim=1).values
        wrong = got.to(torch.int64) != right.to(torch.int64)
        share = wrong if right.dtype == torch.uint8 else wrong.flatten(1).any(1)
        return _at(op, float(share.double().mean()), limit, wrong.flatten().int(), got, right)
    got, right = got.double(), right.double()
    off = (got - right).abs().nan_to_num(torch.inf)
    rows, size = off.flatten(1).norm(dim=1), right.flatten(1).norm(dim=1)
    errors = torch.where(rows == 0, 0.0, rows / size)  # infinite where zeros are expected
    return _at(op, float(errors.max()) if len(errors) else 0.0, limit, off.flatten(), got, right)


def _at(op: str, difference: float, limit: float, off: Tensor, got: Tensor, right: Tensor) -> OpResult:
    if not off.numel() or not bool(off.any()):
        return OpResult(op, 0.0, limit, None, 0.0, 0.0)
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), right.shape))
    return OpResult(op, difference, limit, place, float(right[place]), float(got[place]))


def write(directory: str | Path, chosen: Sequence[str] = ()) -> list[Path]:
    """Writes fixtures and, beside them, the checkpoints of their models in the published format.

    Args:
        directory: made if it is absent.
        chosen: names of fixtures; none: all.

    Raises:
        ValueError: unknown names, or a directory that cannot be written to or has a model of that name.
    """
    directory, chosen = Path(directory), list(chosen) or names()
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"no fixture {', '.join(unknown)}: there are {', '.join(CASES)}")
    written = []
    for family in dict.fromkeys(CASES[name].family for name in chosen):
        source = GoldenSource(golden_config(family))
        written.append(write_checkpoint(source, source.config, directory / family, num_shards=1))
    for name in chosen:
        written.append(directory / f"{name}.safetensors")
        load(name).save(written[-1])
    return written


def of_checkpoint(config: AnyConfig, source: Any, layer: int, tokens: int = 40, rows: int = 8) -> Golden:
    """A fixture of one attention layer of any checkpoint, for instance of a crop; V4.1: with the layers it reads.

    Raises:
        ValueError: a layer that the model does not have, or tensors that do not fit.
    """
    layers = tuple(config.with_sources([layer]))
    return _record(f"layer_{layer}", _Case(config.model_type, "attention", f"{config.model_type}, attention of layer "
                   f"{layer}", layers, tokens, rows), config, source)  # fmt: skip


@cache
def _computed(name: str) -> Golden:
    case = CASES[name]
    config = golden_config(case.family)
    return _record(name, case, config, GoldenSource(config))


def _record(name: str, case: _Case, config: AnyConfig, source: Any) -> Golden:
    hidden = config.hidden_size

    def drawn(key: str, *shape: int) -> Tensor:
        return uniform(f"{name}.{key}", shape).bfloat16()

    token_ids = ((uniform(f"{name}.token_ids", (case.tokens,)) + 3**0.5) / 12**0.5 * config.vocab_size).long()
    record: Callable[[str], Ops]
    if case.kind == "attention":
        several = (len(case.layers),) if len(case.layers) > 1 else ()
        inputs = {"x": drawn("x", *several, case.tokens, hidden)}
        record = lambda numerics: record_attention(config, source, numerics, case.layers, inputs["x"])  # noqa: E731
    elif case.kind == "moe":
        inputs = {"token_ids": token_ids, "x": drawn("x", case.tokens, hidden)}
        record = lambda numerics: record_moe(config, source, numerics, case.layers[0], inputs["x"], token_ids)  # noqa: E731
    elif case.kind == "hyper_connection" and isinstance(config, DeepseekV4Base):
        inputs = {
            "streams": drawn("streams", case.tokens, config.hc_mult, hidden),
            "y": drawn("y", case.tokens, hidden),
        }
        record = lambda numerics: record_hyper_connection(  # noqa: E731
            config, source, numerics, case.layers[0], inputs["streams"], inputs["y"]
        )
    else:
        inputs = {"token_ids": token_ids}
        record = lambda numerics: record_model(config, source, numerics, token_ids)  # noqa: E731
    # roundings to FP8 make whole models chaotic: two right programs differ by half, or choose other experts
    kept = ("float32",) if case.kind == "model" else tuple(NUMERICS)
    results = {numerics: _last_rows(record(numerics), case) for numerics in kept}
    return Golden(
        name, case.about, config.to_dict(), case.layers, inputs, results, case.rows, kind=case.kind,
        _source=source if isinstance(source, GoldenSource) else None,
    )  # fmt: skip


def _last_rows(ops: Ops, case: _Case) -> Ops:
    """Results with a row for each token, cut to their last rows; draft logits have a token less."""
    out = {}
    for op, result in ops.items():
        per_token = len(result) in (case.tokens, case.tokens - 1)
        out[op] = result[-case.rows :].contiguous().clone() if per_token else result.contiguous().clone()
    return out
