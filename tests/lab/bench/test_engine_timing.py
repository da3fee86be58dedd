"""Timing the engine: every figure is that of the runs it stands for, and the ratios are those of the figures shown."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v32 import V32LayerSpec
from deepseek_attn.engine.stats import EngineStats
from deepseek_attn.lab.bench import engine as bench
from deepseek_attn.lab.bench.engine import (
    DecodingVariant,
    Pass,
    SetAcceptance,
    cut_config,
    random_prompts,
    text_prompts,
    time_engine,
)
from deepseek_attn.lab.bench.structured import wide_tokenizer
from deepseek_attn.lab.bench.timing import GraphReplays
from deepseek_attn.lab.training.text import sample_text
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from tests.support.tiers import exhaustive_on_cpu
from tests.support.typed import of_type, untyped


@exhaustive_on_cpu
@pytest.mark.parametrize(("preset", "layers"), [("tiny", 3), ("tiny_v32", 2)])
def test_rows_of_an_engine(preset, layers, device):
    config = cut_config(ModelConfig.from_pretrained(preset), layers)
    runner = ModelRunner.from_config(config, device=device, max_model_len=64, max_num_seqs=2)
    before = runner.manager.available_pages()
    prompts = list(random_prompts(config.vocab_size, 2, 20))
    base, one, two = time_engine(
        runner, prompts, [DecodingVariant(), DecodingVariant(1), DecodingVariant(2)], 8, rounds=2
    )
    assert runner.manager.available_pages() == before
    assert (runner.decode_query_len, runner.graphs is None) == (1, device.type == "cpu")
    assert [(row.batch, row.drafts, row.rounds) for row in (base, one, two)] == [(2, 0, 2), (2, 1, 2), (2, 2, 2)]
    assert (base.speedup, base.break_even_tokens_per_step, base.acceptance_rate) == (1.0, None, None)
    for row in (one, two):
        assert row.speedup == pytest.approx(row.tokens_per_second / base.tokens_per_second)
        assert row.break_even_tokens_per_step == pytest.approx(row.step_us / base.step_us)
        assert len(row.acceptance_by_position) == row.drafts
        assert 1 <= row.tokens_per_step <= 1 + row.drafts
        if device.type == "cpu":  # in float32, where rows are the same in any step
            assert row.same_text == 2
    assert json.loads(json.dumps(two.row()))["drafts"] == 2


@pytest.mark.exhaustive
def test_a_set_acceptance():
    """Drafts count as right by lot: all, none, or as often as it says; the host's count is the device's."""
    config = cut_config(ModelConfig.from_pretrained("tiny"), 2)
    runner = ModelRunner.from_config(config, device="cpu", max_model_len=128, max_num_seqs=4, compile_ahead=False)
    with pytest.raises(ValueError, match="a set acceptance needs steps that are CUDA graphs"):
        SetAcceptance(runner, 2)
    runner.graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, capture=False)
    variants = [DecodingVariant(), *(DecodingVariant(2, acceptance=rate) for rate in (0.0, 0.6, 1.0))]
    acceptance = SetAcceptance(runner, 2)
    prompts = list(random_prompts(config.vocab_size, 4, 20))
    with acceptance.installed():
        _, none, some, every = time_engine(runner, prompts, variants, 60, rounds=1, acceptance=acceptance)
        with pytest.raises(ValueError, match="some variants with drafts lack an acceptance"):
            time_engine(runner, prompts, [DecodingVariant(1)], 60, rounds=1, acceptance=acceptance)
    assert {size.requests for size in runner.graphs._decode_steps} == {4}  # runs end with their first request
    assert (none.acceptance_rate, none.tokens_per_step) == (0, 1)
    assert every.acceptance_by_position == [1, 1]
    assert every.tokens_per_step == pytest.approx(3, abs=0.1)  # the last step of a request has fewer drafts
    assert some.acceptance_by_position == pytest.approx([0.6, 0.36], abs=0.12)
    assert [row.acceptance for row in (none, some, every)] == [0.0, 0.6, 1.0]
    # without it, the same runner compares drafts with tokens again, and the text is the one without drafts
    plain, drafted = time_engine(runner, prompts, [DecodingVariant(), DecodingVariant(2)], 60, rounds=1)
    assert (plain.same_text, drafted.same_text, drafted.acceptance) == (4, 4, None)


def test_a_pass_counts_what_comes_after_the_prompts():
    config = cut_config(ModelConfig.from_pretrained("tiny"), 2)
    runner = ModelRunner.from_config(config, device="cpu", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16)
    prompts, free = list(random_prompts(config.vocab_size, 3, 20)), runner.manager.available_pages()
    found = bench.run_variant(runner, DecodingVariant(), prompts, 14)
    assert [len(tokens) for tokens in found.tokens] == [14, 14, 14]
    # 60 prompt tokens take 4 steps of 16, in the last of which the first two requests have begun to decode
    assert 3 * 11 <= found.generated <= 3 * 13
    assert 0 < sum(found.step_seconds) < found.seconds
    assert found.device_seconds is None
    with pytest.raises(ValueError, match="2 new tokens per request: 0 steps in which all 3 requests"):
        bench.run_variant(runner, DecodingVariant(), prompts, 2)
    found = bench.run_variant(runner, DecodingVariant(), prompts, 14, computed=True)
    assert (found.prompt_tokens, found.generated) == (0, 3 * 14)  # the last token of each prompt is a decode
    assert runner.manager.available_pages() == free


def make_pass(seconds, generated, steps, counts=(), device=None, tokens=((1, 2), (3, 4))):
    return Pass(seconds, generated, list(steps), device, Counter(dict(counts)), [list(ids) for ids in tokens])


def test_a_row_by_hand():
    baseline = [make_pass(1.0, 100, [0.01, 0.01]), make_pass(2.0, 100, [0.03, 0.05]), make_pass(4.0, 100, [0.02, 0.02])]
    counts = {(2, 2): 3, (2, 1): 2, (2, 0): 4, (1, 1): 1}
    passes = [make_pass(1.0, 90, [0.03, 0.03], counts, 0.045, tokens=((1, 2), (3, 5)))] * 3
    row = bench.summary(DecodingVariant(2), passes, baseline, 2)
    assert (row.tokens_per_second, row.speedup) == (90.0, 1.8)  # beside 100, 50 and 25
    assert row.step_us == pytest.approx(30_000)
    assert row.break_even_tokens_per_step == pytest.approx(1.5)  # beside 10, 40 and 20 ms
    assert row.break_even_acceptance == pytest.approx((3**0.5 - 1) / 2)  # a + a^2 = 0.5
    assert row.tokens_per_step == pytest.approx(1 + (2 * 3 + 2 + 1) / 10)
    assert row.acceptance_rate == pytest.approx(9 / 19)
    assert row.acceptance_by_position == pytest.approx([6 / 10, 3 / 9])
    assert row.device_us == pytest.approx(22_500)
    assert row.host_share == pytest.approx(0.25)
    assert (row.graphs, row.same_text) == (True, 1)
    plain = bench.summary(DecodingVariant(), baseline, baseline, 2)
    assert (plain.graphs, plain.host_share, plain.acceptance_by_position, plain.same_text) == (False, None, [], 2)


@pytest.mark.parametrize(
    ("cost", "drafts", "expected"),
    [(1.4, 1, 0.4), (1.75, 2, 0.5), (1.875, 3, 0.5), (3.0, 2, 1.0), (3.01, 2, None), (0.9, 2, 0.0), (1.0, 3, 0.0)],
)
def test_break_even(cost, drafts, expected):
    found = bench.break_even_acceptance(cost, drafts)
    assert found is None if expected is None else found == pytest.approx(expected, abs=1e-9)


def test_acceptance_by_position():
    stats = EngineStats(verifications=Counter({(3, 0): 2, (3, 2): 1, (1, 1): 1}))
    assert stats.acceptance_by_position == pytest.approx([2 / 4, 1 / 3, 0.0])
    assert EngineStats().acceptance_by_position == []


def test_prompts_are_pieces_of_the_text_that_training_held_out():
    tokenizer = Tokenizer(default_checkpoint())
    prompts = text_prompts(tokenizer, 8, 40)
    assert prompts == text_prompts(tokenizer, 8, 40)
    assert [len(prompt) for prompt in prompts] == [40] * 8
    assert {prompt[0] for prompt in prompts} == {tokenizer.bos_token_id}
    pieces = [tokenizer.decode(prompt[1:]) for prompt in prompts]
    text = sample_text()
    places = [text.rindex(piece) for piece in pieces]
    assert places == sorted(set(places))
    assert places[0] >= 0.98 * len(text)
    with pytest.raises(ValueError, match="prompts of 99999 tokens: the held-out text has"):
        text_prompts(tokenizer, 1, 99999)


def test_a_cut_model_keeps_its_mtp_layer():
    flash = ModelConfig.from_pretrained("v4_flash")
    cut = cut_config(flash, 4, 16)
    assert [layer.kind for layer in cut.layers] == [layer.kind for layer in flash.layers[:4]]
    assert [layer.kind for layer in cut.mtp_layers] == [layer.kind for layer in flash.mtp_layers]
    assert cut.n_routed_experts == 16
    v32 = cut_config(ModelConfig.from_pretrained("v32"), 2)
    assert [of_type(layer, V32LayerSpec).dense_ffn for layer in v32.layers] == [True, True]
    assert len(v32.mtp_layers) == 1
    assert cut_config(v32) is v32
    with pytest.raises(ValueError, match="9 layers: the model has 1 to 2 to keep"):
        cut_config(v32, 9)


def test_replays_are_kept_in_order_and_only_in_the_context(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", done.append)
    with GraphReplays() as replays:
        untyped(torch.cuda.CUDAGraph).replay("a")
        untyped(torch.cuda.CUDAGraph).replay("b")
    untyped(torch.cuda.CUDAGraph).replay("c")
    assert replays.graphs == ["a", "b"]
    assert done == ["a", "b", "c"]


@pytest.mark.exhaustive
def test_command_on_random_weights(capsys):
    args = "bench engine --device cpu --model tiny_v32 --layers 1 --experts 16 --batch 1,2 --drafts 2 --prompt 20"
    assert main([*args.split(), "--tokens", "8", "--repeats", "1", "--eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert len(lines) == 1 + 4 + 1  # no graphs here, so nothing to compare with eager steps
    assert [(row["batch"], row["drafts"]) for row in report["rows"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert (report["layers"], report["experts"], report["prompt"], report["tokens"]) == (1, 16, 20, 8)
    assert report["environment"]["packages"]["torch"]


@pytest.mark.exhaustive
def test_command_with_log_probabilities_and_structure(capsys):
    pytest.importorskip("llguidance", reason="pip install 'deepseek-attn[structured]'")
    args = "bench engine --device cpu --model tiny_v32 --layers 1 --experts 16 --batch 1 --drafts 0 --prompt 20"
    assert main([*args.split(), "--tokens", "12", "--repeats", "1", "--logprobs", "3", "--structured"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["logprobs"], row["structured"]) for row in rows] == [(None, False), (3, False), (None, True)]
    assert rows[1]["same_text"] == 1 > rows[2]["same_text"]
    assert rows[2]["speedup"] == pytest.approx(rows[2]["tokens_per_second"] / rows[0]["tokens_per_second"])


@pytest.mark.parametrize(
    "what", ["engine --model tiny --structured", pytest.param("structured --vocab 2000", marks=pytest.mark.exhaustive)]
)
def test_without_llguidance_there_is_a_message(monkeypatch, capsys, what):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert main(["bench", *what.split(), "--device", "cpu"]) == 2
    assert "pip install 'deepseek-attn[structured]'" in capsys.readouterr().err


def test_masks_of_structures(capsys):
    """Each text is long enough, or ends; the vocabulary is as wide as the model's."""
    pytest.importorskip("llguidance", reason="pip install 'deepseek-attn[structured]'")
    assert main(["bench", "structured", "--device", "cpu", "--vocab", "700", "--tokens", "3"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["structure"] for row in rows] == ["json_schema", "regex", "choices", "grammar"]
    assert all(row["tokens"] <= 3 and 0 < row["allowed"] < 1 and row["apply_us"] > 0 for row in rows)
    assert rows[1]["tokens"] == rows[2]["tokens"] == 3
    with wide_tokenizer(700) as tokenizer:
        assert len(tokenizer) == 700
        assert tokenizer.decode(tokenizer.encode("grüße €\n")) == "grüße €\n"


def test_command_on_the_small_checkpoint(capsys):
    args = "bench engine --device cpu --batch 1 --drafts 0 --prompt 12 --tokens 5 --repeats 1"
    assert main([*args.split()]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["drafts"], row["graphs"]) for row in report["rows"]] == [(0, False)]
    assert report["model"] == "small"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--layers 2", "--layers and --experts cut a preset"),
        ("--drafts 1,-1", "--drafts -1: must be 0 to 15"),
        ("--tokens 1", "--tokens 1: must be at least 2"),
        ("--batch 0", "--batch 0: must be at least 1"),
        ("--acceptance 0.5,1.2", "--acceptance 1.2: must be 0 to 1"),
        ("--acceptance 0.5", "--acceptance needs steps that are CUDA graphs"),
        ("--model nothing", "'nothing'"),
    ],
)
def test_wrong_command(args, message, capsys):
    assert main(["bench", "engine", "--device", "cpu", *args.split()]) == 2
    assert message in capsys.readouterr().err
