"""Compares results of ops with golden results: description and tolerance of each op, and its largest difference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.testing.errors import BY_DTYPE, QUANTIZED_CACHE, QUANTIZED_INPUTS

MODEL_TOLERANCES = {
    "float32": 1e-4,  # rounding errors of several layers add up
    "official_float32": 2.5e-2,  # a row with a value near a rounding boundary; 1e-6 for most rows
    "official": 1.25e-1,  # bfloat16 rounding changes many quantised values: 6e-2 is measured
}
# fraction of rows whose selection may differ because of near ties
SELECTED = {"float32": 0.0, "official": 0.1, "official_float32": 0.1}
MODEL_SELECTED = 0.5  # whole models in bfloat16, with keys and queries in FP4
BYTES = 0.05  # fraction of cache bytes that may differ: values near a rounding boundary

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
    """Description of an op."""
    return next((text for name, text in OPS.items() if op == name or op.endswith(f".{name}")), "")


def tolerance(kind: str, op: str, numerics: str, expected: Tensor) -> float:
    """Tolerance of an op: relative error of a row, or for bytes and integers the fraction that may differ.

    Args:
        kind: the fixture's. With quantised numerics, the sublayers of a whole model are computed on their recorded
            inputs.
    """
    if op.endswith("selected"):
        return MODEL_SELECTED if (kind, numerics) == ("model", "official") else SELECTED[numerics]
    if expected.dtype == torch.uint8:
        return BYTES
    if not expected.dtype.is_floating_point:
        return SELECTED[numerics]
    if kind == "model":
        return MODEL_TOLERANCES[numerics]
    if numerics == "float32":
        return BY_DTYPE[torch.float32]
    if kind == "hyper_connection":
        return BY_DTYPE[torch.bfloat16]
    return QUANTIZED_CACHE if op.rsplit(".", 1)[-1] in ("q_latent", "key") else QUANTIZED_INPUTS


class OpResult(NamedTuple):
    """Comparison of an op with its golden result.

    Attributes:
        op: its name; difference, tolerance: relative error of the worst row, or fraction of differing values.
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
    """Results of another implementation differ from the golden ones; ``first`` is the first op that differs.

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


def difference(op: str, got: Tensor, right: Tensor, limit: float) -> OpResult:
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
