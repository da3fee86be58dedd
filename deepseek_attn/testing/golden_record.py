"""Records the results of the ops of layers and models, in the order of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pools import Pool
from deepseek_attn.checkpoint import CheckpointSource
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.impls.base import SparseMLAAttentionImpl
from deepseek_attn.impls.queries import AttentionQueries
from deepseek_attn.kernels.hyper_connection import SublayerOutput, hc_post, hc_pre
from deepseek_attn.kernels.hyper_connection.types import DelayedOutput
from deepseek_attn.kernels.indexer import index_scores
from deepseek_attn.models.hyper_connection import hyper_connection
from deepseek_attn.models.moe import MoE
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.session import LayerSequence, LayerSession
from deepseek_attn.runner.step import StepOptions

Ops = dict[str, Tensor]
NUMERICS = {
    "float32": ("exact", torch.float32),
    "official": ("official", torch.bfloat16),
    "official_float32": ("official", torch.float32),
}


def make_runner(config: AnyConfig, source: CheckpointSource, numerics: str, tokens: int, **options: Any) -> ModelRunner:
    """A runner on the CPU whose ops are all in plain torch."""
    name, dtype = NUMERICS[numerics]
    limits = {"max_model_len": max(64, tokens), "max_num_seqs": 1, "max_num_batched_tokens": max(64, tokens)}
    return ModelRunner.from_source(
        config,
        source,
        device="cpu",
        numerics=name,
        dtype=dtype,
        backend="reference",
        progress=False,
        **limits,
        **options,
    )


class _RecordingImpl:
    """Wraps an impl and records its queries and results."""

    def __init__(self, impl: type[SparseMLAAttentionImpl], ops: Ops, prefix: str):
        self.impl, self.ops, self.prefix = impl, ops, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def attend(self, layer: Any, queries: AttentionQueries, kv: Tensor, positions: Tensor) -> Any:
        self.ops[f"{self.prefix}query"] = queries.normed()[:, : layer.num_heads].clone()
        result: Any = self.impl.attend(layer, queries, kv, positions)
        self.ops[f"{self.prefix}attended"] = result[:, : layer.num_heads].clone()
        return result

    def forward_mqa(self, layer: Any, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor | None = None) -> Tensor:
        self.ops[f"{self.prefix}query"] = q[:, : layer.num_heads].clone()
        result = self.impl.forward_mqa(layer, q, kv, positions, output)
        self.ops[f"{self.prefix}attended"] = result[:, : layer.num_heads].clone()
        return result


@contextmanager
def _recorded(attention: Any, ops: Ops, prefix: str) -> Iterator[None]:
    """Context that records an attention layer's latents, keys, queries and attended values."""
    insert, queries, impl = attention.insert, attention.queries, attention.impl

    def recorded_insert(*args: Any) -> Any:
        result = insert(*args)
        latent = result if isinstance(result, Tensor) else result[0]
        ops[f"{prefix}q_latent"] = latent.clone()
        if not isinstance(result, Tensor):
            ops[f"{prefix}key"] = result[1].clone()
        return result

    def recorded_queries(*args: Any) -> Any:
        result = queries(*args)
        index = result[1] if isinstance(result, tuple) else result.index
        if index is not None:
            ops[f"{prefix}index_query"], ops[f"{prefix}index_weights"] = index.q.clone(), index.weights.clone()
        return result

    attention.insert, attention.queries = recorded_insert, recorded_queries
    attention.impl = _RecordingImpl(impl, ops, prefix)
    try:
        yield
    finally:
        del attention.insert, attention.queries
        attention.impl = impl


def record_attention(
    config: AnyConfig, source: CheckpointSource, numerics: str, layers: Sequence[int], x: Tensor
) -> Ops:
    """Runs attention layers over one prompt: ``x [T, hidden_size]``, or one per layer ``[layers, T, hidden_size]``."""
    tokens = x.shape[-2]
    runner = make_runner(config, source, numerics, tokens, layers=layers, attention_only=True)
    session = LayerSession(runner)
    sequence, ops = session.sequence(), {}
    several = len(session.layers) > 1
    with ExitStack() as stack:
        for number, layer in session.attention.items():
            stack.enter_context(_recorded(layer, ops, f"layers.{number}." if several else ""))
        y = session.run(x.to(runner.dtype), {sequence: tokens})
    out: Ops = {}
    for place, (number, layer) in enumerate(session.attention.items()):
        prefix = f"layers.{number}." if several else ""
        _add_layer(out, ops, prefix, session, sequence, layer)
        out[f"{prefix}output"] = y[place] if several else y
    return out


def _add_layer(out: Ops, ops: Ops, prefix: str, session: LayerSession, sequence: LayerSequence, layer: Any) -> None:
    """The ops of one layer in their order: latent, key, entries, queries, selection, attended values."""
    runner, spec, tokens = session.runner, layer.spec, sequence.num_tokens
    for name in ("q_latent", "key"):
        if f"{prefix}{name}" in ops:
            out[f"{prefix}{name}"] = ops[f"{prefix}{name}"]
    counts = {"latent": tokens, "compressed": tokens // max(1, spec.ratio), "index": tokens // max(1, spec.ratio)}
    names = {"latent": "latents", "compressed": "entries", "index": "index_keys"}
    keys = None
    owns = getattr(spec, "owns_entries", True)
    for kind, count in counts.items():
        pool = runner.pools.get(layer.prefix if owns else spec.entry_owner, kind)
        if pool is None or not count:
            continue
        slots = slots_of(runner, sequence.cache, pool, range(count))
        rows = pool.gather(slots, torch.float32)
        keys = rows if kind == "index" else keys
        if owns:
            out[f"{prefix}{names[kind]}"] = rows
            _add_bytes(out, f"{prefix}cache.{kind}", pool, slots)
    window = runner.pools.get(layer.prefix, "window")
    if window is not None:
        kept = range(max(0, tokens - layer.window_size), tokens)
        _add_bytes(out, f"{prefix}cache.window", window, slots_of(runner, sequence.cache, window, kept))
    out[f"{prefix}query"] = ops[f"{prefix}query"]
    index_q = ops.get(f"{prefix}index_query")
    if index_q is not None and keys is not None and runner.numerics.index_record == "plain":
        weights = ops[f"{prefix}index_weights"]
        scores = index_scores(index_q, keys, weights)
        visible = (torch.arange(tokens, device="cpu") + 1) // spec.ratio
        hidden = torch.arange(len(keys), device="cpu") >= visible.unsqueeze(1)
        out[f"{prefix}index_query"], out[f"{prefix}index_weights"] = index_q, weights
        out[f"{prefix}index_scores"] = scores.masked_fill(hidden, 0.0)
    if spec.has_indexer:
        out[f"{prefix}selected"] = session.selected[spec.index]
    out[f"{prefix}attended"] = ops[f"{prefix}attended"]


def slots_of(runner: ModelRunner, cache: SequenceCache, pool: Pool, entries: range) -> Tensor:
    """Slots in a pool of a sequence's entries, int64."""
    table = runner.manager.block_table([cache], pool.spec.group)[0].long()
    entry = torch.tensor(list(entries), dtype=torch.int64, device="cpu")
    return table[entry // pool.entries] * pool.entries + entry % pool.entries


def _add_bytes(out: Ops, name: str, pool: Pool, slots: Tensor) -> None:
    """Bytes of entries, uint8 ``[entries, bytes]``: values, then scales of each entry. Plain rows have no scales."""
    if pool.record.name == "plain":
        return
    page, offset = slots // pool.entries, slots % pool.entries
    parts = [view[page, offset] for view in pool.record._views(pool.tensor, pool.entries)]
    out[name] = torch.cat(parts, dim=1)


def record_moe(
    config: AnyConfig, source: CheckpointSource, numerics: str, layer: int, x: Tensor, token_ids: Tensor
) -> Ops:
    """Router, shared expert and mixture of one layer, for ``x [T, hidden_size]`` and ``token_ids [T]``."""
    runner = make_runner(config, source, numerics, len(x), layers=[layer])
    ffn = runner.model.layers[str(layer)].ffn
    with torch.no_grad(), runner.op_settings(len(x)):
        x = x.to(runner.dtype)
        experts, weights = ffn.gate(x, token_ids)
        routed, shared = ffn.experts(x, experts, weights), ffn.shared_experts(x)
        output = ffn(x, token_ids)
    order = experts.argsort(dim=1, stable=True)  # a router may list them in any order
    parts = {"experts": experts.gather(1, order), "expert_weights": weights.gather(1, order)}
    return parts | {"routed": routed, "shared": shared, "output": output}


def record_hyper_connection(
    config: DeepseekV4Base, source: CheckpointSource, numerics: str, layer: int, streams: Tensor, y: Tensor
) -> Ops:
    """The hyper-connection around the attention of one layer of V4: streams ``[T, m, D]`` before, ``y`` its output."""
    runner = make_runner(config, source, numerics, len(y), layers=[layer])
    block = runner.model.layers[str(layer)]
    streams, y = streams.to(runner.dtype), y.to(runner.dtype)
    with torch.no_grad(), runner.op_settings(len(y)):
        plain, post, comb = hc_pre(streams, hyper_connection(block, "attn", config))
        normed = hc_pre(streams, hyper_connection(block, "attn", config, block.attn_norm.weight))[0]
        after = hc_post(y, streams, post, comb)
    return {"post": post, "comb": comb, "collapsed": plain, "input": normed, "streams": after}


def record_model(config: AnyConfig, source: CheckpointSource, numerics: str, token_ids: Tensor) -> Ops:
    """Runs a whole model over one prompt and records every sublayer, choice, stream, logit, draft and cache byte."""
    runner, ops = make_runner(config, source, numerics, len(token_ids)), {}
    hooks = []

    def keep(name: str, choose: Callable[[Any, Any], Any]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            chosen = choose(args, result)
            if chosen is not None:
                ops[name] = chosen.detach().clone()

        return hook

    def watch(module: nn.Module, name: str, choose: Callable[[Any, Any], Any]) -> None:
        hooks.append(module.register_forward_hook(keep(name, choose)))

    blocks = [(f"layers.{number}", block) for number, block in runner.model.layers.items()]
    if config.dspark is None:
        blocks += [(f"mtp.{number}", block) for number, block in runner.whole_model().mtp.items()]
    for name, block in blocks:
        if getattr(block, "engram", None) is not None:
            watch(block.engram, f"{name}.engram", lambda args, result: result)
        for part in ("attn", "ffn"):
            watch(getattr(block, part), f"{name}.{part}_input", lambda args, result: args[0])
            if part == "ffn" and isinstance(block.ffn, MoE):
                watch(block.ffn.gate, f"{name}.experts", lambda args, result: result[0].sort(-1).values)
            watch(getattr(block, part), f"{name}.{part}_output", lambda args, result: result)
        watch(block, f"{name}.output", lambda args, result: _streams(result))
    sequence, drafts = runner.sequence(token_ids.tolist()), runner.has_mtp and config.dspark is None
    selections = runner.record_options(selections=True) if any(spec.has_indexer for spec in config.layers) else None
    try:
        options = StepOptions(all_logits=True, mtp=drafts, record=(selections,))
        output = runner.step([(sequence, len(token_ids))], options)
        ops["logits"] = output.rows[0]
        if output.mtp_logits is not None:
            ops["mtp_logits"] = output.mtp_logits[0]
        records = None if output.records is None else output.records[0]
        if records is not None and records.selections is not None:
            for column, layer in enumerate(records.selection_layers):
                ops[f"layers.{layer}.selected"] = records.selections[:, column].to(torch.int32)
        # the last token has no draft: its row in the MTP layer is padding
        padded = [name for name, rows in ops.items() if name.startswith("mtp.") and len(rows) == len(token_ids)]
        ops |= {name: ops[name][:-1] for name in padded}
        for name, block in blocks:
            _add_caches(ops, f"{name}.", runner, sequence.cache, block.attn)
    finally:
        sequence.free()
        for hook in hooks:
            hook.remove()
    return _in_order(ops)


def _add_caches(ops: Ops, prefix: str, runner: ModelRunner, cache: SequenceCache, layer: Any) -> None:
    """Adds the bytes of the quantised entries of one layer; layout as in `_add_bytes`."""
    tokens, ratio = cache.num_tokens - layer.spec.is_mtp, max(1, layer.spec.ratio)
    first = max(0, tokens - getattr(layer, "window_size", 0))
    for kind, entries in (
        ("latent", range(tokens)), ("compressed", range(tokens // ratio)), ("index", range(tokens // ratio)),
        ("window", range(first, tokens)),
    ):  # fmt: skip
        pool = runner.pools.get(layer.prefix, kind)
        if pool is not None and len(entries):
            _add_bytes(ops, f"{prefix}cache.{kind}", pool, slots_of(runner, cache, pool, entries))


def _streams(result: Any) -> Tensor | None:
    """The residual streams after a block, from the result of its forward."""
    if isinstance(result, DelayedOutput):
        result = result.streams
    if isinstance(result, SublayerOutput):
        return hc_post(*result)
    if isinstance(result, tuple):
        y, residual = result
        return y.float() + residual.float()
    return result


def _in_order(ops: Ops) -> Ops:
    """Sorts ops into the order of the computation: backbone layers, logits, MTP layers.

    They were recorded in another order: module hooks run when a module ends, and caches are read after the step.
    """
    order = ("engram", "attn_input", "cache", "selected", "attn_output", "ffn_input", "experts", "ffn_output", "output")

    def place(name: str) -> tuple[int, int, int]:
        part, _, rest = name.partition(".")
        if not rest:
            return (1 if name == "logits" else 3), 0, 0
        layer, _, op = rest.partition(".")
        return (0 if part == "layers" else 2), int(layer), order.index(op.partition(".")[0])

    return {name: ops[name] for name in sorted(ops, key=place)}
