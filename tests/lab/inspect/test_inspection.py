"""Weights of an inspection, against the indices that kernels were given and against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_attn import inspect_attention
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.impls.prefill import PrefillChunk
from deepseek_attn.lab.experiments.measure.reschedule import RescheduledSource
from deepseek_attn.lab.inspect.records import RECENT
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.testing import layer_reference
from tests.support import small_models, v32_cases
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

LENGTH = 67
V4: dict[str, Any] = {"ratios": [0, 4, 16], "index_topk": 6}


def make_runner(family: str, step: int, **options):
    sizes: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 1, "max_num_batched_tokens": step}
    options = sizes | options
    if family == "V4":
        return small_models.small_runner(small_models.small_config(**V4), **options)
    return v32_cases.make_runner(v32_cases.small("deepseek_v3" if family == "V3" else "deepseek_v32"), **options)


def tokens_of(runner) -> list[int]:
    return small_models.prompt(runner.config, LENGTH)


def softmax_by_hand(q, keys, scale, sink):
    """``[heads, K]`` in float64."""
    powers = (torch.stack(keys).double() @ q.double().T * scale).exp().T
    return powers / (powers.sum(1, keepdim=True) + (0 if sink is None else sink.double().exp()[:, None]))


class Kernels:
    """The calls of attention kernels: for each query the keys of its indices, by what they are, and their weights.

    Written down per (layer, position): a dict from ``("token", p)`` or ``("entry", e)`` to weights ``[heads]``.
    """

    def __init__(self, runner):
        self.runner, self.weights = runner, {}
        for layer in attention_layers(runner.model):
            if layer.impl is not None:
                layer.impl = self.recording(layer.impl)

    def recording(self, impl):
        kernels = self

        class Recording(impl):
            @classmethod
            def attend_pages(cls, layer, q, keys, output):
                kernels.add_pages(layer, q, keys)
                return super().attend_pages(layer, q, keys, output)

            @classmethod
            def attend_rows(cls, layer, q, kv, indices, lens, output):
                kernels.add_rows(layer, q, kv, indices, lens)
                return super().attend_rows(layer, q, kv, indices, lens, output)

        return Recording

    def add(self, layer, position, q, named):
        weights = softmax_by_hand(q, [key for _, key in named], layer.scale, layer.attn_sink)
        found = {name: weights[:, i] for i, (name, _) in enumerate(named)}
        assert len(found) == len(named), "a key that is read twice"
        self.weights[layer.spec.index, position] = found

    def add_pages(self, layer, q, parts):
        """Slots of pages: which token or entry one holds, the block table says."""
        step = layer.step
        for row, position in enumerate(step.positions.tolist()):
            named = []
            for part, kind in zip(parts, ["token", "entry"] if layer.window_size else ["entry"], strict=False):
                meta = step.swa if kind == "token" else step.sparse[layer.compress_ratio]
                pages = meta.block_table[0].tolist()
                for slot in part.indices[row, : int(part.lens[row])].tolist():
                    if slot >= 0:
                        number = pages.index(slot // part.entries) * part.entries + slot % part.entries
                        dtype = torch.bfloat16 if part.record.name == "fp8_v32" else torch.float32
                        key = part.record.gather(part.pool, part.entries, torch.tensor([slot]), dtype)[0]
                        named.append(((kind, number), key))
            self.add(layer, position, q[row], named)

    def add_rows(self, layer, q, kv, indices, lens):
        """Rows of the workspace: entries from row 0, then the window up to the last token of the step."""
        step = layer.step
        end, gathered = int(step.prefill_seq_lens[0]), int(step.prefill_gather_lens[0])
        entries = end // layer.compress_ratio if layer.compress_ratio else 0
        chunk = PrefillChunk(0, 1, entries, gathered if layer.window_size else 0)
        assert len(kv) == chunk.rows_per_request
        for row, position in enumerate(step.positions.tolist()):
            named = []
            for index in indices[row, : int(lens[row])].tolist():
                if index >= 0:
                    name = ("entry", index) if index < entries else ("token", end - gathered + index - entries)
                    named.append((name, kv[index]))
            self.add(layer, position, q[row], named)


CASES = [
    ("V4", LENGTH, {}),
    ("V4", 37, {"numerics": "serving"}),  # chunks, FP8 records
    ("V4", 1, {}),  # token by token, through the decode path
    ("V3.2", 64, {}),
    ("V3.2", LENGTH, {"numerics": "serving"}),
    ("V4", 1, {"numerics": "official"}),
    ("V4", 37, {"dtype": "bfloat16"}),
    ("V3.2", LENGTH, {"fp8_mode": "separate"}),
    ("V3.2", 1, {"numerics": "serving", "dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("family", "step", "options"), tiered(CASES, [CASES[4]]))
def test_weights_are_those_of_the_keys_that_the_kernels_read(family, step, options):
    runner = make_runner(family, step, **options)
    kernels = Kernels(runner)
    length = 29 if step == 1 else LENGTH
    found = inspect_attention(runner, tokens_of(runner)[:length], top=LENGTH)
    assert [query.position for query in found.queries] == list(range(length))
    for query in found.queries:
        assert [layer.layer for layer in query.layers] == [layer.layer for layer in found.layers] != []
        for layer in query.layers:
            assert len(layer.heads) == runner.config.num_attention_heads
            expected = kernels.weights[layer.layer, query.position]
            for head, read in enumerate(layer.heads):
                weights = {("token", p): w for p, w in zip(read.tokens, read.token_weights, strict=True)}
                weights |= {("entry", e): w for e, w in zip(read.entries, read.entry_weights, strict=True)}
                assert weights == pytest.approx({name: float(w[head]) for name, w in expected.items()}, abs=2e-6)
                for name, part in (("token", read.shares.window), ("entry", read.shares.entries)):
                    assert part == pytest.approx(sum(w for (kind, _), w in weights.items() if kind == name), abs=1e-5)
    tolerance = 1e-2 if options.get("dtype") == "bfloat16" else 1e-5
    assert all(layer.error < tolerance for layer in found.layers)


@pytest.mark.parametrize("family", tiered(["V4", "V3.2", "V3"], ["V4"]))
def test_weights_are_those_of_the_reference(family):
    """The float64 reference computes its own keys, entries and scores from the layer's input."""
    runner = make_runner(family, LENGTH)
    inputs = {}
    for layer in attention_layers(runner.model):
        layer.register_forward_hook(
            lambda layer, args, _: inputs.update({layer.spec.index: (args[0].clone(), chosen(layer))})
        )
    found = inspect_attention(runner, tokens_of(runner), top=LENGTH)
    assert len(inputs) == len(found.queries[0].layers) > 1
    for place, (index, (x, selected)) in enumerate(inputs.items()):
        reference: Any = layer_reference(runner.config, RandomSource(runner.config, 0), index)
        rows = []
        weights_of = reference.weights_of
        reference.weights_of = lambda q, keys, to=rows, f=weights_of: to.append(f(q, keys)) or to[-1]
        reference(x, selected)
        scores = reference.index_scores(x.double()) if selected is not None else None
        for query, expected in zip(found.queries, rows, strict=True):
            read = query.layers[place]
            assert len(read.heads) == runner.config.num_attention_heads
            for head, values in zip(read.heads, expected, strict=True):
                weights = dict(zip(head.tokens, head.token_weights, strict=True))
                entries = dict(zip(head.entries, head.entry_weights, strict=True))
                ordered = [weights[key] for key in sorted(weights)] + [entries[key] for key in sorted(entries)]
                assert ordered == pytest.approx(values.tolist(), abs=1e-6)
                assert head.shares.sink == pytest.approx(1 - float(values.sum()), abs=1e-6)
            if read.index is not None:
                row = required(scores)[query.position]
                assert read.index.scores == pytest.approx([float(row[e]) for e in read.index.entries], abs=1e-5)


def chosen(layer):
    return None if layer.indexer is None else layer.topk_indices_buffer[:LENGTH].clone()


@pytest.mark.parametrize("family", ["V4", "V3.2"])
def test_the_indexer_beside_dense_attention(family):
    """Recall, kept and the summary, from the weights of a model that reads every entry, in the first layer."""
    runner = make_runner(family, 50)
    index = 1 if family == "V4" else 0
    layer = attention_layers(runner.model)[index]
    topk = required(layer.index_topk)
    found = inspect_attention(runner, tokens_of(runner), top=LENGTH, layers=[index])
    recalls, kepts = [], []
    for query in found.queries:
        read, visible = query.layers[0].index, (query.position + 1) // layer.spec.ratio
        if visible <= topk:
            assert read is None
            continue
        assert read is not None
        assert read.visible == len(read.entries) == visible
        assert read.scores == sorted(read.scores, reverse=True)
        assert read.selected == [True] * topk + [False] * (visible - topk)  # the best, none twice
        assert read.lowest_selected == read.scores[topk - 1]
        dense = dict(zip(read.entries, read.dense_weights, strict=True))
        best = set(sorted(dense, key=lambda entry: dense[entry])[-topk:])
        selected = {entry for entry, was in zip(read.entries, read.selected, strict=True) if was}
        recalls.append(len(best & selected) / topk)
        kepts.append(sum(dense[entry] for entry in selected) / sum(dense.values()))
        assert (read.recall, read.kept) == pytest.approx((recalls[-1], kepts[-1]), abs=1e-5)
        # the entries that were read have the same logits densely: weights in proportion, head by head; summed, in order
        assert set(query.layers[0].mean.entries) == selected
    assert recalls
    [summary] = found.layers
    assert required(summary.index).queries == len(recalls)
    assert required(summary.index).recall == pytest.approx(sum(recalls) / len(recalls))
    assert required(summary.index).kept == pytest.approx(sum(kepts) / len(kepts), abs=1e-5)


def test_dense_weights_are_those_of_a_layer_that_reads_every_entry():
    """The same weights without an indexer; only in the first layer are the inputs the same."""
    config = small_models.small_config([4, 0])
    source = RandomSource(config, 0)
    options: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 1, "max_num_batched_tokens": 40}
    sparse = small_models.small_runner(config, source, **options)
    all_entries = config.replace(compress_indexer={"4": False})
    dense = small_models.small_runner(all_entries, RescheduledSource(source, config, all_entries), **options)
    tokens = small_models.prompt(config, LENGTH)
    indexed = inspect_attention(sparse, tokens, top=LENGTH, layers=[0], queries=[-1]).queries[0].layers[0].index
    mean = inspect_attention(dense, tokens, top=LENGTH, layers=[0], queries=[-1]).queries[0].layers[0].mean
    assert dict(zip(required(indexed).entries, required(indexed).dense_weights, strict=True)) == pytest.approx(
        dict(zip(mean.entries, mean.entry_weights, strict=True)), abs=1e-6
    )


def test_summaries_are_means_over_all_queries_and_reads_are_the_largest(monkeypatch):
    """In blocks of one query and of many, for few chosen queries and for all."""
    runner = make_runner("V4", 50)
    tokens = tokens_of(runner)
    whole = inspect_attention(runner, tokens, top=LENGTH)
    monkeypatch.setattr("deepseek_attn.lab.inspect.weights.BLOCK_BYTES", 1)
    few = inspect_attention(runner, tokens, top=3, queries=[-1, 17, 17, -LENGTH])
    assert [query.position for query in few.queries] == [0, 17, LENGTH - 1]
    assert len(whole.layers) == 3
    for place, (layer, other) in enumerate(zip(whole.layers, few.layers, strict=True)):
        assert len(layer.heads) == runner.config.num_attention_heads
        for head, (shares, others) in enumerate(zip(layer.heads, other.heads, strict=True)):
            reads = [query.layers[place].heads[head] for query in whole.queries]
            for name in ("sink", "window", "entries"):
                mean = sum(getattr(read.shares, name) for read in reads) / LENGTH
                assert getattr(shares, name) == pytest.approx(mean, abs=1e-6)
                assert getattr(others, name) == pytest.approx(mean, abs=1e-6)
            assert shares.sink + shares.window + shares.entries == pytest.approx(1, abs=1e-5)
            assert shares.recent is None
    for query in few.queries:
        for layer, other in zip(query.layers, whole.queries[query.position].layers, strict=True):
            for read, full in zip([*layer.heads, layer.mean], [*other.heads, other.mean], strict=True):
                assert read.tokens == full.tokens[:3]
                assert read.token_weights == pytest.approx(full.token_weights[:3], abs=1e-6)
                assert read.entries == full.entries[:3]
                assert full.entry_weights == sorted(full.entry_weights, reverse=True)


def test_recent_tokens_of_a_model_without_a_window():
    runner = make_runner("V3.2", 64)
    tokens = small_models.prompt(runner.config, RECENT + 20)
    [query] = inspect_attention(runner, tokens, top=160, layers=[1], queries=[-1]).queries
    assert len(query.layers[0].heads) == runner.config.num_attention_heads
    for read in query.layers[0].heads:
        near = [w for e, w in zip(read.entries, read.entry_weights, strict=True) if e >= len(tokens) - RECENT]
        assert read.shares.recent == pytest.approx(sum(near), abs=1e-5)
        assert (read.shares.sink, read.shares.window) == (0, 0)


def test_a_runner_goes_on_as_before():
    """Pages are free again, other sequences are untouched, and the logits of the next steps are the same."""
    runner = make_runner("V4", 50, max_num_seqs=2)
    tokens, logits = tokens_of(runner), []
    for inspected in (False, True):
        sequence = runner.sequence(tokens)
        runner.step([(sequence, 40)])
        free = runner.manager.available_pages()
        if inspected:
            inspect_attention(runner, tokens[:60], queries=[3])
        assert runner.manager.available_pages() == free
        logits += runner.step([(sequence, LENGTH - 40)]).rows
        sequence.free()
    assert torch.equal(*logits)


def test_steps_over_persistent_tensors_are_computed_eagerly(monkeypatch):
    """A replayed step would call no observer: nothing would be recorded."""
    runner = make_runner("V4", 1)
    tokens = tokens_of(runner)[:9]
    expected = inspect_attention(runner, tokens)
    monkeypatch.setattr(runner, "graphs", DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[1]))
    assert required(runner.graphs).supports([1], runner.decode_query_len)
    assert inspect_attention(runner, tokens) == expected


WRONG = [
    ({"queries": [LENGTH]}, f"{LENGTH} is not a position of a sequence of {LENGTH} tokens; name integers from 0 to"),
    ({"queries": [-LENGTH - 1]}, "is not a position"),
    ({"queries": [True]}, "True is not a position"),
    ({"queries": ["a"]}, "'a' is not a position"),
    ({"queries": []}, "queries: there are none"),
    ({"queries": 5}, "queries: positions of tokens in a list are needed, got 5"),
    ({"top": 0}, "top=0: must be an integer of at least 1"),
    ({"top": 1.5}, "top=1.5: must be an integer"),
    ({"top": 10**9}, "one query has .* weights, and 200000 are kept: choose fewer layers than 3 or a smaller top"),
    ({"top": 2000, "queries": [1, 2, 3, 4, 5, 6, 7, 8, 9]}, "9 queries of .* choose at most"),
    ({"layers": [3]}, r"layers=\[3\]: there are layers \[0, 1, 2\]"),
    ({"layers": [1, 1]}, "each once"),
    ({"layers": []}, "name at least one"),
    ({"layers": 1}, "layers: numbers of layers in a list are needed"),
]


@pytest.fixture(scope="module")
def runner():
    return make_runner("V4", 50)


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(runner, arguments, message):
    with pytest.raises(ValueError, match=message):
        inspect_attention(runner, tokens_of(runner), **arguments)


def test_a_runner_that_computes_one_token_at_a_time():
    runner = make_runner("V4", 50, deterministic=True)
    with pytest.raises(ValueError, match="deterministic=True"):
        inspect_attention(runner, tokens_of(runner))


def test_a_runner_of_another_type():
    with pytest.raises(ValueError, match="runner is of type NoneType: pass a ModelRunner"):
        inspect_attention(untyped(None), [1, 2])


@pytest.mark.parametrize(("tokens", "message"), [([], "empty prompt"), ([10**9], "vocabulary"), ([1] * 500, "exceeds")])
def test_wrong_tokens(runner, tokens, message):
    with pytest.raises(ValueError, match=message):
        inspect_attention(runner, tokens)


def test_as_many_of_the_last_tokens_as_are_kept(runner, monkeypatch):
    monkeypatch.setattr("deepseek_attn.lab.inspect.inspection.MAX_WEIGHTS", 2000)
    found = inspect_attention(runner, tokens_of(runner), top=5)
    # 2 heads and their mean: of the window in 3 layers, of entries in 2, and the indexer's 3
    assert [query.position for query in found.queries] == list(range(LENGTH - 2000 // (5 * (3 * 5 + 3)), LENGTH))


@pytest.mark.parametrize("what", ["attention weights", "index scores"])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_kept(what):
    runner = make_runner("V4", 50)
    layer = attention_layers(runner.model)[1]
    weights = layer.attn_sink if what == "attention weights" else required(layer.indexer).weights_proj.weight
    required(weights).data[0] = float("nan")
    free = runner.manager.available_pages()
    with pytest.raises(ValueError, match=rf"layers\.1: {what} of tokens 0 to .* are not finite"):
        inspect_attention(runner, tokens_of(runner))
    assert runner.manager.available_pages() == free
