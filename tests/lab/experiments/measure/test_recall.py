"""Recall of a layer, against loops over queries and keys in float64."""

import math
from typing import Any

import pytest
import torch

from deepseek_attn import ModelConfig
from deepseek_attn.lab.experiments.measure.quality import by_position, compare
from deepseek_attn.lab.experiments.measure.recall import measure_recall
from deepseek_attn.layers.rope import apply_rope
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

LENGTH = 90


def captured(runner, tokens):
    """What each layer has to attend with: rotated queries, window keys, entries, selected entries, and its sinks."""
    found = {}

    def hook(layer, args, output):
        x, step = args[0], layer.step
        freqs_cis, ratio = layer.rope.at(args[1]), layer.compress_ratio
        q = layer.wq_b(layer.q_norm(layer.wq_a(x))).view(len(x), layer.num_heads, layer.head_dim)
        q = apply_rope(q * (q.square().mean(-1, keepdim=True) + layer.eps).rsqrt(), freqs_cis)
        keys = apply_rope(layer.kv_norm(layer.wkv(x)), freqs_cis)
        entries, selected = keys[:0], None
        if ratio:
            table = step.sparse[ratio].block_table[0]
            entries = layer.kv_cache.gather_request(table, len(x) // ratio, torch.float32)
        if layer.indexer is not None:
            selected = [{e for e in row if e >= 0} for row in layer.topk_indices_buffer[: len(x)].tolist()]
        found[layer.spec.index] = (layer, q.double(), keys.double(), entries.double(), selected)

    hooks = [block.attn.register_forward_hook(hook) for block in runner.model.layers.values()]
    sequence = runner.sequence(tokens)
    runner.step([(sequence, len(tokens))])
    sequence.free()
    for handle in hooks:
        handle.remove()
    return found


def weights(layer, q, keys):
    """Weights of all heads, summed, of one query over ``keys``; the sinks take their share."""
    total = torch.zeros(len(keys), dtype=torch.float64)
    for head in range(layer.num_heads):
        scores = [float(q[head] @ key) * layer.scale for key in keys]
        sink = float(layer.attn_sink[head])
        denominator = sum(math.exp(s) for s in scores) + math.exp(sink)
        total += torch.tensor([math.exp(s) / denominator for s in scores], dtype=torch.float64)
    return total


def brute_force(layer, q, keys, entries, selected):
    spec, window = layer.spec, layer.window_size
    masses, kept, found, chance = [], [], [], []
    for t in range(len(q)):
        visible = (t + 1) // spec.ratio if spec.ratio else 0
        reads = set(range(visible)) if selected is None else selected[t]
        dense = weights(layer, q[t], keys[: t + 1])
        seen = {s for s in range(t + 1) if t - s < window}
        for e in reads:
            seen |= set(range(max((e - spec.overlap) * spec.ratio, 0), (e + 1) * spec.ratio))
        masses.append(float(sum(dense[s] for s in seen) / dense.sum()))
        if selected is not None and visible > len(reads):
            near = keys[max(t - window + 1, 0) : t + 1]
            mass = weights(layer, q[t], torch.cat([entries[:visible], near]))[:visible]
            best = set(mass.topk(len(reads)).indices.tolist())
            kept.append(float(sum(mass[e] for e in reads) / mass.sum()))
            found.append(len(best & reads) / len(reads))
            chance.append(len(reads) / visible)
    values = {"token_mass": masses, "entry_mass": kept, "index_recall": found, "index_recall_of_chance": chance}
    return {name: sum(items) / len(items) if items else None for name, items in values.items()}


@exhaustive_on_cpu
@pytest.mark.parametrize("block_bytes", tiered([1, 1 << 20], [1]))
def test_recall_against_brute_force(monkeypatch, block_bytes):
    """Blocks of one query, and all queries in one."""
    monkeypatch.setattr("deepseek_attn.lab.inspect.weights.BLOCK_BYTES", block_bytes)
    config = small_config([0, 4, 8, 16], compress_overlap={"16": True}, compress_indexer={"8": True})
    runner = small_runner(config)
    tokens = prompt(config, LENGTH)
    rows = measure_recall(runner, [tokens])
    assert [(row["layer"], row["kind"]) for row in rows] == [(0, "SWA"), (1, "C4A"), (2, "C8A"), (3, "C16A")]
    for row in rows:
        expected = brute_force(*captured(runner, tokens)[row["layer"]])
        for name, value in expected.items():
            assert row[name] == (None if value is None else pytest.approx(value, abs=1e-5)), (row["kind"], name)
    assert required(rows[1]["entry_mass"]) < 1
    assert required(rows[2]["entry_mass"]) < 1
    assert rows[3]["entry_mass"] is None


def test_prompts_are_averaged_over_queries():
    config = small_config([0, 4])
    runner = small_runner(config)
    one, two = prompt(config, 40), prompt(config, 80, seed=1)
    both = measure_recall(runner, [one, two])[1]["token_mass"]
    alone = [measure_recall(runner, [tokens])[1]["token_mass"] for tokens in (one, two)]
    assert both == pytest.approx((40 * required(alone[0]) + 80 * required(alone[1])) / 120)


def test_everything_is_recalled_within_the_window_and_with_one_entry_per_token():
    config = small_config([0, 1])
    rows = measure_recall(small_runner(config), [prompt(config, 15)])
    assert [row["token_mass"] for row in rows] == [pytest.approx(1.0)] * 2
    rows = measure_recall(small_runner(config), [prompt(config, 100)])
    assert required(rows[0]["token_mass"]) < 0.99
    assert rows[1]["token_mass"] == pytest.approx(1.0)


def test_too_long_a_prompt_is_refused():
    config = ModelConfig.from_preset("tiny")
    runner = small_runner(config, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match="up to 65 tokens: a step of this runner takes 64"):
        measure_recall(runner, [prompt(config, 65)])


def test_comparison_of_logits():
    """Loss, KL and agreement from their definitions, in float64, over two prompts of different lengths."""
    prompts = [torch.randint(50, (n,)).tolist() for n in (70, 9)]
    own, other = ([torch.randn(len(p), 50) for p in prompts] for _ in range(2))
    losses, kls, same = [], [], []
    for a, b, p in zip(own, other, prompts, strict=True):
        for t in range(len(p) - 1):
            pa, pb = a[t].double().softmax(0), b[t].double().softmax(0)
            losses.append(-float(pb[p[t + 1]].log()))
            kls.append(float((pa * (pa / pb).log()).sum()))
            same.append(float(pa.argmax() == pb.argmax()))
    found: Any = compare(own, other, prompts)
    for name, values in (("loss", losses), ("kl", kls), ("top1", same)):
        assert found[name] == pytest.approx(sum(values) / len(values), abs=1e-5)
    rows = found["by_position"]
    assert [(row["start"], row["end"], row["tokens"]) for row in rows] == [(0, 32, 32 + 8), (32, 64, 32), (64, 128, 5)]
    assert rows[2]["loss"] == pytest.approx(sum(losses[64:69]) / 5, abs=1e-5)
    itself: Any = compare(own, own, prompts)
    assert itself["kl"] == pytest.approx(0.0, abs=1e-7)
    assert itself["top1"] == 1.0


def test_positions_without_tokens_are_left_out():
    rows = by_position(torch.tensor([3, 200]), {"loss": torch.tensor([1.0, 2.0])})
    assert [(row["start"], row["end"], row["loss"]) for row in rows] == [(0, 32, 1.0), (128, 256, 2.0)]
