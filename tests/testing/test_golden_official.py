"""Whole models in DeepSeek's quantised numerics, one sublayer at a time on its recorded input: float64 by brute force.

With float32 between the quantisers a right program gives the same codes, but for values next to a boundary between two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint import read_float32
from deepseek_attn.checkpoint.names_v32 import canonical_name_v32
from deepseek_attn.testing import golden
from deepseek_attn.testing.golden_compare import MODEL_TOLERANCES
from deepseek_attn.testing.golden_source import GoldenSource, golden_config
from deepseek_attn.testing.reference import layer_reference
from tests.support.oracle_dense import DenseOracle
from tests.support.oracle_official import OfficialV4Layer, OfficialV32Layer, QuantizedLinears
from tests.support.small_models import assert_same_codes
from tests.support.v41_cases import oracle_of
from tests.testing.test_golden import decode_68, decode_132, decode_288, decode_584, decode_656, e8m0, fp8 as e4m3

NUMERICS = "official_float32"
CLEAR = 2e-2  # relative distance of two scores that another code of one of their values does not exchange


@cache
def model(family) -> Any:
    config = golden_config(family)
    return golden.load(f"{family}_model"), config, GoldenSource(config)


def assert_right(name, got, expected, share=0.7):
    """Most of the last rows are the same, and all are within the tolerance of the fixture."""
    assert_same_codes(got, expected[-len(got) :], MODEL_TOLERANCES[NUMERICS], share=share, what=name)


def decode_528(rows):
    """512 e4m3 values, then 16 scale bytes of 32 values."""
    assert rows.shape[1] == 528
    return (e4m3(rows[:, :512]).unflatten(1, (16, 32)) * e8m0(rows[:, 512:])[:, :, None]).flatten(1)


def best(scores, visible, topk):
    """By query, its best entries and whether rounding could exchange the last one."""
    found = []
    for row, count in zip(scores, visible, strict=True):
        order = row[:count].sort(descending=True)
        gap = float(order.values[topk - 1] - order.values[topk]) if count > topk else torch.inf
        size = float(row[:count].abs().max()) if count else 0.0
        found.append((set(order.indices[:topk].tolist()), gap > CLEAR * size))
    return found


def check_selection(ops, name, scores, visible, topk):
    """The entries that each query reads: of the fixture where it has them, else of the oracle."""
    chosen = best(scores, visible, topk)
    if f"{name}.selected" not in ops:
        return [entries for entries, _ in chosen], [clear for _, clear in chosen]
    recorded = [{entry for entry in row if entry >= 0} for row in ops[f"{name}.selected"].tolist()]
    first = len(chosen) - len(recorded)
    for own, (entries, clear) in zip(recorded, chosen[first:], strict=True):
        assert own == entries or not clear
    return [entries for entries, _ in chosen[:first]] + recorded, [True] * len(chosen)


@pytest.mark.parametrize("numerics", [NUMERICS, "official"])
def test_attention_of_v4_and_its_caches(numerics):
    fixture, config, source = model("v4")
    ops = fixture.results[numerics]
    for spec in (*config.layers, *config.mtp_layers):
        layer, name = OfficialV4Layer(config, source, spec), spec.name
        x, reads = ops[f"{name}.attn_input"].double(), None
        if spec.has_indexer:
            visible = [(t + 1) // spec.ratio for t in range(len(x))]
            if numerics == NUMERICS:
                reads, _ = check_selection(ops, name, layer.index_scores(x), visible, config.index_topk)
            else:
                chosen = [{entry for entry in row if entry >= 0} for row in ops[f"{name}.selected"].tolist()]
                reads = [set()] * (len(x) - len(chosen)) + chosen
        output = layer.output(layer.attend(x, reads))
        if numerics == "official":  # in bfloat16, whose roundings exchange many codes
            found = ops[f"{name}.attn_output"]
            golden.compare(fixture, {f"{name}.attn_output": output}, numerics)
            assert 1e-3 < float((found.double() - output[-len(found) :]).norm() / output[-len(found) :].norm()) < 0.05
            continue
        assert_right(name, ops[f"{name}.attn_output"], output)
        assert_right(name, decode_584(ops[f"{name}.cache.window"]), layer.window_keys(x))
        if spec.ratio:
            assert_right(name, decode_584(ops[f"{name}.cache.compressed"]), layer.compress("compressor", x))
        if spec.has_indexer:
            assert_right(name, decode_68(ops[f"{name}.cache.index"]), layer.compress("indexer.compressor", x))


def test_experts_streams_and_logits_of_v4():
    fixture, config, source = model("v4")
    ops, tokens = fixture.results[NUMERICS], fixture.inputs["token_ids"]
    dense, linears = DenseOracle(config, source), QuantizedLinears(config, source)
    count = fixture.rows
    streams = dense["embed.weight"][tokens[-count:]].unsqueeze(1).repeat(1, config.hc_mult, 1)
    for spec in (*config.layers, *config.mtp_layers):
        name, rows = spec.name, count
        if spec.is_mtp:  # its first rows follow from streams that the fixture does not have
            rows = count - 1
            following = dense.norm(dense["embed.weight"][tokens[-rows:]], f"{name}.enorm")
            hidden = dense.norm(streams[-count:-1], f"{name}.hnorm")
            streams = linears.linear(f"{name}.e_proj", following).unsqueeze(1)
            streams = streams + linears.linear(f"{name}.h_proj", hidden)
        for part in ("attn", "ffn"):

            def recorded(x, name=name, part=part, rows=rows):
                x = dense.norm(x, f"{name}.{part}_norm")
                assert_right(name, ops[f"{name}.{part}_input"][-rows:], x)
                return ops[f"{name}.{part}_output"][-rows:].double()

            streams = dense.sublayer(f"{name}.hc_{part}_", streams, recorded)
        x, experts = ops[f"{name}.ffn_input"].double(), ops[f"{name}.experts"]
        scores = F.softplus(dense.linear(f"{name}.ffn.gate", x)).sqrt()
        if spec.hash_routing:
            table = source.read(f"{name}.ffn.gate.tid2eid")
            assert torch.equal(experts.long(), table[tokens[-count:]].sort(1).values.long())
        else:
            biased = scores + dense[f"{name}.ffn.gate.bias"]
            assert torch.equal(experts.long(), biased.topk(config.num_experts_per_tok).indices.sort(1).values)
        assert_right(name, ops[f"{name}.ffn_output"], linears.experts(f"{name}.ffn", x, experts, scores), share=0.5)
        assert_right(name, ops[f"{name}.output"][-rows:], streams)
        prefix = f"{name}." if spec.is_mtp else ""
        if spec.is_mtp or spec.index == config.num_hidden_layers - 1:
            assert_right(name, ops["mtp_logits" if spec.is_mtp else "logits"][-rows:], dense.head(prefix, streams))
        streams = ops[f"{name}.output"].double()


def test_sublayers_and_caches_of_v32():
    fixture, config, source = model("v32")
    ops, tokens, layers = fixture.results[NUMERICS], fixture.inputs["token_ids"], config.num_hidden_layers
    linears = QuantizedLinears(config, source, lambda name: canonical_name_v32(name, layers))

    def weight(name):
        return read_float32(linears.source, name).double()

    residual = weight("embed.weight")[tokens]
    for spec in (*config.layers, *config.mtp_layers):
        name, layer = spec.name, OfficialV32Layer(config, source, spec)
        x = ops[f"{name}.attn_input"].double()
        scores = layer.index_scores(x)
        reads, clear = check_selection(ops, name, scores, range(1, len(x) + 1), config.index_topk)
        output, found = layer.output(layer.attend(x, reads)), ops[f"{name}.attn_output"]
        assert_right(name, found[clear[-len(found) :]], output[-len(found) :][clear[-len(found) :]])
        assert_right(name, decode_656(ops[f"{name}.cache.latent"]), layer.latents(x))
        assert_right(name, decode_132(ops[f"{name}.cache.index"]), layer.index_keys(x))
        x = ops[f"{name}.ffn_input"].double()
        if f"{name}.experts" in ops:
            scores = torch.sigmoid(x @ weight(f"{name}.ffn.gate.weight").T)
            expected = linears.experts(f"{name}.ffn", x, ops[f"{name}.experts"], scores)
        else:
            expected = linears.expert(f"{name}.ffn", x)
        assert_right(name, ops[f"{name}.ffn_output"], expected, share=0.5)
        if not spec.is_mtp:
            rows = len(found)
            after = residual[-rows:] + found.double() + ops[f"{name}.ffn_output"].double()
            assert_right(name, ops[f"{name}.output"], after)
            residual = ops[f"{name}.output"].double()
    final = residual / (residual.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight("norm.weight")
    assert_right("logits", ops["logits"], final @ weight("head.weight").T)


@pytest.mark.exhaustive
def test_sublayers_and_caches_of_v41():
    """Entries, index keys, selections and candidates come from the layers that the schedule names."""
    fixture, config, source = model("v41")
    ops, tokens, count = fixture.results[NUMERICS], fixture.inputs["token_ids"].tolist(), fixture.rows
    oracle = oracle_of(config, source, official=True)
    oracle.tokens, oracle.entries, oracle.index_keys, oracle.selection, oracle.kept_blocks = tokens, {}, {}, [], []

    def padded(rows):
        return torch.cat([rows.new_zeros(len(tokens) - len(rows), *rows.shape[1:]), rows])

    streams = oracle.tensor("embed.weight")[tokens].unsqueeze(1).repeat(1, config.hc_mult, 1)[-count:]
    weights = torch.zeros(count, config.hc_mult, dtype=torch.float64)
    weights[:, 0] = 1
    for spec in config.layers:
        name, i = spec.name, spec.index
        if f"{name}.engram" in ops:
            assert_right(name, ops[f"{name}.engram"], oracle.engram(i, padded(streams)))
            streams = ops[f"{name}.engram"].double()
        for part in ("attn", "ffn"):
            pre, post, comb = oracle.mixes(i, part, streams)
            x = oracle.norm((weights.unsqueeze(-1) * streams).sum(1), f"{name}.{part}_norm.weight")
            given = ops[f"{name}.{part}_input"].double()
            assert_right(name, given[-count:], x)
            y = oracle.attention(i, given) if part == "attn" else oracle.moe(i, given)
            assert_right(f"{name}.{part}", ops[f"{name}.{part}_output"], y, share=0.5)
            y = ops[f"{name}.{part}_output"].double()
            mixed = torch.einsum("tjk,tjd->tkd", comb, streams)
            streams, weights = post.unsqueeze(-1) * y.unsqueeze(1) + mixed, pre
        assert_right(name, ops[f"{name}.output"], streams)
        streams = ops[f"{name}.output"].double()
        if spec.has_indexer:
            chosen = [sorted(entry for entry in row if entry >= 0) for row in ops[f"{name}.selected"].tolist()]
            assert chosen == oracle.selection[-count:]
        if f"{name}.cache.compressed" in ops:
            assert_right(name, decode_288(ops[f"{name}.cache.compressed"]), oracle.entries[i])
            assert_right(name, decode_68(ops[f"{name}.cache.index"]), oracle.index_keys[i])
        assert decode_528(ops[f"{name}.cache.window"]).isfinite().all()
    x = oracle.norm((weights.unsqueeze(-1) * streams).sum(1), "norm.weight")
    assert_right("logits", ops["logits"], x @ oracle.tensor("head.weight").T)


@pytest.mark.parametrize("family", ["v4", "v32", "v41"])
def test_whole_models_name_the_first_sublayer_that_is_not_quantised(family):
    """Given its recorded input, attention without the quantisers is too far off; so is a cache of other codes."""
    fixture, config, source = model(family)
    ops = dict(fixture.results[NUMERICS])
    golden.compare(fixture, ops, NUMERICS)
    x = ops["layers.0.attn_input"]
    layer: Any = oracle_of(config, source) if family == "v41" else layer_reference(config, source, 0)
    exact = layer.attention(0, x.double()) if family == "v41" else layer(x)
    with pytest.raises(golden.GoldenMismatch, match=r"layers\.0\.attn_output differs"):
        golden.compare(fixture, ops | {"layers.0.attn_output": exact}, NUMERICS)
    name = next(op for op in ops if ".cache." in op)
    with pytest.raises(golden.GoldenMismatch, match=name):
        golden.compare(fixture, ops | {name: ops[name] ^ 1}, NUMERICS)
