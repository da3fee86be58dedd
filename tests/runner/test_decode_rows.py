"""Requests of up to ``1 + drafts`` new tokens are decodes: eager or captured, alone or beside prompts."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.attention.builder import MetadataBuilder
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.impls import flow
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.drafting import DraftRows
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.testing import poison_scratch
from tests.support.one_layer import Layer
from tests.support.requests import greedy, prompt
from tests.support.small_models import two_layers
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

LENGTHS = (124, 60, 9, 0, 254)  # windows of 4 and 128 tokens close inside the next rows, pages of 64 end there
ROUNDS = [(4, 1, 3, 2, 4), (1, 4, 2, 3, 2), (2, 2, 4, 4, 1), (3, 3, 1, 1, 4)]


@torch.no_grad()
def one_round(layer: Layer, requests: list, counts: tuple[int, ...], threshold: int, padded: bool) -> torch.Tensor:
    """The next ``counts`` rows of each request, perhaps with padding behind them up to four."""
    lengths = [4 if padded else n for n in counts]
    caches = [request.sequence.cache for request in requests]
    layer.runner.manager.reserve(list(zip(caches, lengths, strict=True)))
    valid = torch.cat([torch.arange(length) < n for length, n in zip(lengths, counts, strict=True)])
    x = torch.full((len(valid), layer.runner.config.hidden_size), float("nan"))
    x[valid] = torch.cat([r.x[r.sequence.num_tokens :][:n] for r, n in zip(requests, counts, strict=True)])
    step = layer.runner.step_metadata(caches, lengths, valid, decode_query_len=threshold)
    poison_scratch(layer.runner)
    out = layer.attn(x.nan_to_num(7.0), step.positions, step)[valid]
    if layer.attn.indexer is not None:
        selected = required(layer.attn.topk_indices_buffer)[: len(valid)][valid].split(counts)
        for request, entries in zip(requests, selected, strict=True):
            request.selected.append(entries)
    for request, rows, n in zip(requests, out.split(counts), counts, strict=True):
        request.outputs.append(rows)
        layer.runner.manager.commit(request.sequence.cache, n)
    return out


@pytest.mark.parametrize("padded", tiered([False, True], [True]))
@pytest.mark.parametrize("kind", tiered(["SWA", "C4A", "C128A"], ["C4A"], quick_on_gpu=["SWA", "C128A"]))
def test_decode_and_prefill_compute_the_same(kind, padded):
    """One to four rows of a request as decodes and as prefills: the same bytes in the caches, outputs to rounding.

    A prefill adds compressed entries before the window's keys, a decode after them.
    """
    layers, outputs = [], []
    for threshold in (4, 0):
        torch.manual_seed(1)
        layer = Layer(kind)
        layer.session.decode_query_len = 0
        requests = [layer.request(n + 12) for n in LENGTHS]
        for request, n in zip(requests, LENGTHS, strict=True):
            if n:
                layer.step([(request, n)])
        rounds = [one_round(layer, requests, counts, threshold, padded) for counts in ROUNDS]
        step = layer.attn.step
        assert (required(step).num_decodes, required(step).num_prefills) == ((5, 0) if threshold else (0, 5))
        for request in requests:
            layer.check(request)
        layers.append(layer)
        outputs.append(torch.cat(rounds))
    torch.testing.assert_close(*outputs, rtol=2e-6, atol=2e-6)
    for pool, other in zip(*(layer.runner.pools for layer in layers), strict=True):
        assert torch.equal(pool.tensor.view(torch.uint8), other.tensor.view(torch.uint8))


OPTIONS = {"fp8_mode": "separate", "max_model_len": 300, "max_num_seqs": 4, "max_num_batched_tokens": 40}


def make_runner(preset: str = "tiny", **options) -> ModelRunner:
    config = two_layers() if preset == "tiny" else ModelConfig.from_preset(preset).replace(num_hidden_layers=2)
    return ModelRunner.from_config(config, device="cpu", **OPTIONS, **options)


class Rows:
    """Counts the rows of a runner's steps and the calls that gather keys.

    Attributes:
        steps: (lengths of decodes, lengths of prefills, calls that gathered keys) of each eager step, MTP passes too.
    """

    def __init__(self, monkeypatch):
        self.steps: list[tuple[list[int], list[int], int]] = []
        build, gather = MetadataBuilder.build, flow.gather_keys

        def counted_build(builder, batch):
            meta, lengths = build(builder, batch), batch.query_lens.tolist()
            decodes = meta.num_decodes
            assert meta.num_decode_tokens == sum(lengths[:decodes])
            assert meta.num_prefill_tokens == sum(lengths[decodes:])
            self.steps.append((lengths[:decodes], lengths[decodes:], 0))
            return meta

        def counted_gather(*args):
            decodes, prefills, gathers = self.steps[-1]
            self.steps[-1] = decodes, prefills, gathers + 1
            return gather(*args)

        monkeypatch.setattr(MetadataBuilder, "build", counted_build)
        monkeypatch.setattr(flow, "gather_keys", counted_gather)

    @property
    def gathers(self) -> int:
        return sum(gathers for _, _, gathers in self.steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "drafts"),
    tiered([("tiny", 3), ("tiny_v32", 3), ("tiny_v32", 1), ("tiny", 7)], [("tiny", 3)]),
)
def test_rows_of_a_running_engine(preset, drafts, monkeypatch):
    """Verifications gather nothing; beside a prompt's chunk they stay decodes, and the chunk is the only prefill."""
    runner = make_runner(preset)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts))
    rows = Rows(monkeypatch)
    first = [engine.add_request(prompt(n, n), greedy(30)) for n in (1, 17)]
    engine.step()
    assert {(tuple(d), tuple(p)) for d, p, _ in rows.steps[:2]} == {((1,), (17,))}  # the backbone, then the MTP layer
    assert rows.gathers == 1 + len(runner.backbone_layers)  # a layer each, once for the chunk of 17
    for _ in range(3):
        rows.steps.clear()
        engine.step()
        verified, *drafted = rows.steps
        assert verified == ([1 + drafts] * 2, [], 0)
        assert drafted[0] == ([1, 1], [], 0)  # no draft of random weights was right
        assert drafted[1:] == [([1, 1], [], 0)] * (drafts - 1)
    second = engine.add_request(prompt(60, 60), greedy(5))
    mixed = []
    while second.sequence.num_pending > 1 + drafts or not second.sequence.num_computed:
        rows.steps.clear()
        engine.step()
        mixed += [(decodes, prefills) for decodes, prefills, _ in rows.steps if prefills]
    for decodes, prefills in mixed:
        assert decodes[:2] == [1 + drafts] * 2
        assert len(prefills) == 1
    assert sum(n for _, prefills in mixed for n in prefills) == 2 * 60  # chunks go through the MTP layer too
    rows.steps.clear()
    while engine.has_unfinished:
        engine.step()
    assert rows.steps
    assert all(not prefills for _, prefills, _ in rows.steps)
    assert rows.gathers == 0
    assert [request.finish_reason for request in [*first, second]] == ["length"] * 3


def test_ragged_lengths_in_one_step(monkeypatch):
    """Any order of requests; those of up to four tokens are decodes, in a step's own MTP pass and in drafts too."""
    runner = make_runner()
    lengths = (9, 3, 1, 4)
    texts = [prompt(20 + n, 20 + n) for n in lengths]
    expected = runner.score(texts)
    expected_mtp = runner.score_mtp(texts)[1]
    runner.expect_drafts(3)
    sequences = [runner.sequence(text) for text in texts]
    for sequence in sequences:
        runner.step([(sequence, 20)], StepOptions(mtp=True))
    rows = Rows(monkeypatch)
    options = StepOptions(all_logits=True, mtp=True, hidden_states=True)
    output = runner.step(list(zip(sequences, lengths, strict=True)), options)
    layers = len(runner.backbone_layers)
    assert rows.steps == [([3, 1, 4], [9], layers), ([3, 1, 4], [9], 1)]
    for logits, mtp, score, score_mtp in zip(
        output.rows, required(output.mtp_logits), expected, expected_mtp, strict=True
    ):
        torch.testing.assert_close(logits, score[20:], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(mtp, score_mtp[20:], rtol=2e-5, atol=2e-5)
    rows.steps.clear()
    batch = [
        DraftRows(sequence, sequence.num_computed - n, states, [*sequence.token_ids[-n + 1 :], 5][-n:])
        for sequence, states, n in zip(sequences, required(output.hidden_states), lengths, strict=True)
    ]
    runner.manager.reserve([(sequence.cache, 1) for sequence in sequences])
    drafts = runner.draft(batch, 2)
    assert rows.steps == [([3, 1, 4], [9], 1), ([1, 1, 1, 1], [], 0)]
    alone = [runner.draft([rows], 2) for rows in batch]
    torch.testing.assert_close(drafts.logits, torch.cat([d.logits for d in alone]), rtol=2e-5, atol=2e-5)
    for sequence in sequences:
        sequence.free()


def test_padded_sizes_of_captured_steps():
    """Requests of one step have one row each or ``1 + drafts``: a graph for each number between would cost memory."""
    runner = make_runner()
    graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[2, 4], capture=False)
    assert graphs.supports([1, 1], 1)
    assert not graphs.supports([1, 2], 1)
    assert graphs.supports([1, 4, 2], 4)
    assert not graphs.supports([1, 5], 4)
    assert [graphs.size_for(lens, 100, 4)[:2] for lens in ([1], [1, 2], [4, 1, 1])] == [(2, 1), (2, 4), (4, 4)]


def test_what_cannot_be_expected():
    runner = make_runner()
    assert runner.decode_query_len == 1
    for wrong in (0, 16, True, 1.0):
        with pytest.raises(ValueError, match=r"drafts per step: supported are 1 to 15"):
            runner.expect_drafts(untyped(wrong))
    runner.expect_drafts(3)
    runner.expect_drafts(1)  # another engine of the same runner
    assert runner.decode_query_len == 4
    without = make_runner(layers=[0])
    with pytest.raises(ValueError, match="drafts need an MTP layer"):
        without.expect_drafts(1)
