"""Golden results of small models, to check another implementation op by op.

    from deepseek_attn.testing import golden
    fixture = golden.load("v4_c4a_layer")
    outputs = my_layer(fixture.weights(), fixture.inputs["x"])  # any of fixture.ops, by name
    golden.compare(fixture, outputs)

`compare` names the first op that differs. A fixture is computed in plain torch on the CPU from a config, a seed-free
rule for weights and inputs (`golden_source.uniform`), and the library's reference ops. `Golden.save` writes its file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_attn.checkpoint import CanonicalSource, read_float32, write_checkpoint
from deepseek_attn.checkpoint.headers import FLOAT_DTYPES
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.checkpoint.stored_weights import scale_name
from deepseek_attn.checkpoint.write import check_new_directory
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.testing.golden_compare import GoldenMismatch, OpResult, difference, tolerance
from deepseek_attn.testing.golden_record import (
    NUMERICS,
    Ops,
    record_attention,
    record_hyper_connection,
    record_model,
    record_moe,
)
from deepseek_attn.testing.golden_source import GoldenSource, golden_config, uniform
from deepseek_attn.utils.files import appearing, write_tensors
from deepseek_attn.utils.hub import check_path
from deepseek_attn.utils.version import __version__

FORMAT = "1"


class _Case(NamedTuple):
    """Definition of a fixture: the model, its layers and tokens, and the recorded ops."""

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


@dataclass
class Golden:
    """Inputs of a part of a small model, and the results of its ops.

    Attributes:
        name: of the fixture; about: its description.
        config: decoded ``config.json`` of the model.
        layers: numbers of the computed layers; empty: all.
        inputs: tensors by name. Hidden states are bfloat16.
        results: results of the ops by numerics and name, in the order of the computation.
        rows: results that have a row for each token hold the last ``rows`` of them; inputs of attention in a whole
            model hold all, since a sublayer is compared on its recorded input.
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
            ValueError: the library does not have the fixture's model.
        """
        source = self._source or GoldenSource(ModelConfig.from_dict(self.config))
        if self.name not in CASES:
            raise ValueError(f"{self.name} was made from another checkpoint, which holds the weights")
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
        """Writes a safetensors file: tensors ``input.NAME`` and ``NUMERICS.OP``, with other fields as JSON metadata."""
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
        """Tolerance of an op: relative error of a row, or for bytes and integers the fraction that may differ."""
        return tolerance(self.kind, op, numerics, self.results[numerics][op])


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
    check_path(name, "a fixture is named by its name or its file")
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{str(name)!r} is neither a file nor a fixture: there are {', '.join(CASES)}")
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("golden", "{}"))
            if facts.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not a golden fixture of format {FORMAT}: it has {facts.get('format')!r}; write it "
                    "again with `deepseek-attn port-check --write DIR`"
                )
            inputs = {n[6:]: file.get_tensor(n) for n in file.keys() if n.startswith("input.")}  # noqa: SIM118
            results = {n: {op: file.get_tensor(f"{n}.{op}") for op in ops} for n, ops in facts["ops"].items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    keys = ("name", "about", "config", "rows", "version", "kind")
    return Golden(layers=tuple(facts["layers"]), inputs=inputs, results=results, **{key: facts[key] for key in keys})


def read_outputs(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name of op; ValueError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(path)!r} is not a readable safetensors file: {error}") from None


def compare(
    golden: Golden | str | Path,
    outputs: Mapping[str, Tensor],
    numerics: str = "float32",
    tolerances: Mapping[str, float] | None = None,
) -> list[OpResult]:
    """Compares an implementation's results with the golden ones, op by op in the order of the computation.

    Args:
        golden: a fixture, or an argument of `load`.
        outputs: results by name of op, any of ``golden.ops``, for all tokens or for the last ``golden.rows``.
        numerics: ``float32``; ``official``: bfloat16 with DeepSeek's quantised inputs and caches; or, for whole models,
            ``official_float32``: these quantisers and float32 between them. In the last two a sublayer of a whole model
            is compared on its recorded input (``attn_input``, ``ffn_input``), since differences of quantised values
                grow from layer to layer.
        tolerances: by op, instead of `Golden.tolerance`; 0: bitwise equal.

    Returns:
        The results of all ops; every op agrees within its tolerance.

    Raises:
        GoldenMismatch: names the first op that differs, with the place and size of its largest difference.
        ValueError: unknown ops, no ops, or wrong shapes.
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
    """Like `compare`, but differing results raise no error."""
    golden = golden if isinstance(golden, Golden) else load(golden)
    if numerics not in golden.results:
        raise ValueError(f"numerics {numerics!r}: {golden.name} has {', '.join(golden.results)}")
    if not isinstance(outputs, Mapping):
        raise ValueError(f"outputs is of type {type(outputs).__name__}: pass results by op, {{'output': tensor}}")
    expected, tolerances = golden.results[numerics], dict(tolerances or {})
    if unknown := [name for name in (*outputs, *tolerances) if name not in expected]:
        raise ValueError(f"{golden.name} has no op {', '.join(unknown)} in {numerics}: there are {', '.join(expected)}")
    if not outputs:
        raise ValueError(f"no outputs to compare: give any of {', '.join(expected)}")
    found = []
    for op, right in expected.items():
        if op in outputs:
            limit = tolerances.get(op, golden.tolerance(op, numerics))
            got = _values(op, outputs[op])
            if op.endswith("attn_input") and len(got) < len(right):
                right = right[-golden.rows :]
            found.append(difference(op, got, right, limit))
    return found


def _values(op: str, output: object) -> Tensor:
    """A result on the CPU; ValueError for anything but a tensor, or an array of NumPy, with values."""
    output = torch.from_numpy(output) if isinstance(output, np.ndarray) else output
    if not isinstance(output, Tensor) or output.is_meta:
        given = "a tensor on the meta device" if isinstance(output, Tensor) else f"of type {type(output).__name__}"
        raise ValueError(f"{op} is {given}: pass a tensor or an array with the op's results")
    return output.detach().cpu()


def write(directory: str | Path, chosen: Sequence[str] = ()) -> list[Path]:
    """Writes fixtures and, beside them, the checkpoints of their models in the published format: all or nothing.

    Args:
        directory: made if it is absent.
        chosen: names of fixtures; none: all.

    Raises:
        ValueError: unknown names, or a directory that cannot be written to or has a model of that name.
    """
    directory, chosen = Path(directory), list(chosen) or names()
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"no fixture {', '.join(unknown)}: there are {', '.join(CASES)}")
    families = list(dict.fromkeys(CASES[name].family for name in chosen))
    for family in families:
        check_new_directory(directory / family)
    with appearing(directory, directory=True, into=True) as folder:
        for family in families:
            source = GoldenSource(golden_config(family))
            write_checkpoint(source, source.config, folder / family, num_shards=1)
        for name in chosen:
            load(name).save(folder / f"{name}.safetensors")
    return [*(directory / family for family in families), *(directory / f"{name}.safetensors" for name in chosen)]


def of_checkpoint(config: AnyConfig, source: Any, layer: int, tokens: int = 40, rows: int = 8) -> Golden:
    """A fixture of one attention layer of any checkpoint, for instance a crop; V4.1: with the layers it reads from.

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
    kept = NUMERICS if case.kind == "model" else ("float32", "official")
    results = {numerics: _last_rows(record(numerics), case) for numerics in kept}
    return Golden(
        name, case.about, config.to_dict(), case.layers, inputs, results, case.rows, kind=case.kind,
        _source=source if isinstance(source, GoldenSource) else None,
    )  # fmt: skip


def _last_rows(ops: Ops, case: _Case) -> Ops:
    """Cuts results with one row per token to their last rows; draft logits have one row less."""
    out = {}
    for op, result in ops.items():
        per_token = len(result) in (case.tokens, case.tokens - 1)
        whole = op.endswith("attn_input") or result.dtype == torch.uint8
        out[op] = result[-case.rows :].contiguous().clone() if per_token and not whole else result.contiguous().clone()
    return out
