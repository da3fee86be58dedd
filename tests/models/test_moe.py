"""Routing and experts against formulas written out in float64."""

import math
from dataclasses import replace

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.kernels.common.quant import (
    dequantize_fp4,
    dequantize_fp8_block,
    encode_e8m0,
    fake_quant_fp8,
    quantize_fp4,
    quantize_fp8_block,
)
from deepseek_attn.kernels.moe.reference import swiglu
from deepseek_attn.layers.weights import Shard, checkpoint_slots
from deepseek_attn.models.moe import Experts, Gate, MoE
from deepseek_attn.utils.device import run_beside
from tests.support.small_models import assert_same_codes
from tests.support.typed import required

HIDDEN, INNER, EXPERTS, TOPK, VOCAB = 128, 128, 7, 3, 50
TOKENS = 21


def config(scoring_func="sqrtsoftplus", norm_topk_prob=True, **changes):
    """A small V4 config, with any router: only V4.1 and V3.2 have all."""
    checked = ModelConfig.from_preset("tiny").replace(
        **{
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INNER,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOPK,
            "vocab_size": VOCAB,
            "routed_scaling_factor": 1.5,
            **changes,
        }
    )
    return replace(checked, scoring_func=scoring_func, norm_topk_prob=norm_topk_prob)


def make_gate(cfg, hash_layer=False, device="cpu"):
    """A gate with weights far from uniform, and a bias that changes most choices."""
    spec = cfg.layers[0 if hash_layer else 5]
    assert spec.hash_routing == hash_layer
    gate = Gate(cfg, spec, device=device)
    slots = dict(gate.slots())
    assert set(slots) == {"weight", "tid2eid" if hash_layer else "bias"}
    slots["weight"].load((torch.randn(EXPERTS, HIDDEN) * 0.2).bfloat16(), None)
    if hash_layer:
        slots["tid2eid"].load(torch.rand(VOCAB, EXPERTS).topk(TOPK).indices, None)
    else:
        slots["bias"].load(torch.randn(EXPERTS) * 2, None)
    return gate


@pytest.mark.parametrize("expert", [-1, EXPERTS, 2**40])
def test_tables_of_experts_that_do_not_exist(expert):
    """Kernels read the experts' weights at these places."""
    cfg = config()
    gate = make_gate(cfg, hash_layer=True)
    table = gate.tid2eid.clone()
    table[VOCAB - 1, 1] = expert
    with pytest.raises(ValueError, match=rf"names experts .*{expert}.* and n_routed_experts is {EXPERTS}"):
        dict(gate.slots())["tid2eid"].load(table, None)
    assert int(gate.tid2eid.max()) < EXPERTS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_biases_that_are_not_finite(value):
    bias = torch.zeros(EXPERTS)
    bias[2] = value
    with pytest.raises(ValueError, match=f"1 of {EXPERTS} values are not finite, such as {value}"):
        dict(make_gate(config()).slots())["bias"].load(bias, None)


SCORES = {
    "sqrtsoftplus": lambda row: [math.sqrt(math.log1p(math.exp(v))) for v in row],
    "sigmoid": lambda row: [1 / (1 + math.exp(-v)) for v in row],
    "softmax": lambda row: [math.exp(v) / sum(math.exp(u) for u in row) for v in row],
}


def scalar_scores(gate, x, scoring):
    logits = x.double() @ gate.weight.cpu().double().T
    return [SCORES[scoring](row) for row in logits.tolist()]


def expected_weights(scores, chosen, normalize, factor):
    out = []
    for row, experts in zip(scores, chosen, strict=True):
        picked = [row[e] for e in experts]
        out.append([w / (sum(picked) if normalize else 1) * factor for w in picked])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as_scored"])
@pytest.mark.parametrize("scoring", SCORES)
def test_scored_routing(scoring, normalize, device):
    cfg = config(scoring_func=scoring, norm_topk_prob=normalize, routed_scaling_factor=2.5)
    gate, x = make_gate(cfg, device=device), torch.randn(TOKENS, HIDDEN)
    experts, weights = gate(x.to(device), torch.zeros(TOKENS, dtype=torch.int64, device=device))
    scores, bias = scalar_scores(gate, x, scoring), gate.bias.tolist()
    biased_differs = 0
    for t, row in enumerate(scores):
        best = sorted(range(EXPERTS), key=lambda e: -(row[e] + bias[e]))[:TOPK]
        assert sorted(experts[t].tolist()) == sorted(best)
        biased_differs += set(best) != set(sorted(range(EXPERTS), key=lambda e: -row[e])[:TOPK])
    assert biased_differs > 3, "the bias must matter in this test"
    expected = expected_weights(scores, experts.tolist(), normalize, 2.5)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=2e-5, atol=0)
    assert weights.dtype == torch.float32
    if normalize:
        torch.testing.assert_close(weights.sum(-1).cpu(), torch.full((TOKENS,), 2.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scoring", SCORES)
def test_hash_routing_looks_the_choice_up_and_scores_the_weights(scoring, device):
    cfg = config(scoring_func=scoring)
    gate, x = make_gate(cfg, True, device), torch.randn(TOKENS, HIDDEN)
    ids = torch.randint(VOCAB, (TOKENS,))
    ids[:2] = torch.tensor([0, VOCAB - 1])
    experts, weights = gate(x.to(device), ids.to(device))
    assert experts.cpu().tolist() == [gate.tid2eid[i].tolist() for i in ids]
    expected = expected_weights(scalar_scores(gate, x, scoring), experts.tolist(), True, 1.5)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=2e-5, atol=0)


def test_the_router_scores_in_float32():
    """A bfloat16 product would change which expert wins."""
    gate = make_gate(config())
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    experts, weights = gate(x, torch.zeros(TOKENS, dtype=torch.int64))
    expected = expected_weights(scalar_scores(gate, x, "sqrtsoftplus"), experts.tolist(), True, 1.5)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=0)


# swiglu


def test_clamp_is_asymmetric_and_before_silu():
    gate = torch.tensor([11.0, 10.0, -11.0, -50.0, 3.0, 3.0, 3.0])
    up = torch.tensor([1.0, 1.0, 2.0, 1.0, 12.0, -12.0, 10.0])

    def silu(v):
        return v / (1 + math.exp(-v))

    expected = [silu(10.0), silu(10.0), silu(-11.0) * 2, silu(-50.0), silu(3.0) * 10, silu(3.0) * -10, silu(3.0) * 10]
    torch.testing.assert_close(swiglu(gate, up, 10.0), torch.tensor(expected), rtol=1e-5, atol=0)
    assert swiglu(gate, up, 10.0)[2] != swiglu(torch.tensor([-10.0]), torch.tensor([2.0]), 10.0)[0]


def test_no_limit_means_no_clamp():
    gate, up = torch.tensor([30.0, -2.0]), torch.tensor([-40.0, 25.0])
    expected = torch.tensor([30.0 * -40.0, -2.0 / (1 + math.exp(2.0)) * 25.0])
    torch.testing.assert_close(swiglu(gate, up, 0.0), expected, rtol=1e-5, atol=0)


def test_swiglu_is_float32_for_bfloat16_inputs():
    gate, up = torch.randn(50).bfloat16() * 4, torch.randn(50).bfloat16() * 4
    out = swiglu(gate, up, 10.0)
    assert out.dtype == torch.float32
    assert torch.equal(out, swiglu(gate.float(), up.float(), 10.0))


# experts


def load(module, fmt):
    """Random weights in a checkpoint format; returns their float32 values by slot name."""
    values = {}
    for name, slot in checkpoint_slots(module).items():
        if not slot.quantizable:
            continue
        master = torch.randn(slot.shape) * (0.5 if "w2" in name else 0.3)
        if fmt == "fp8":
            weight, scale = quantize_fp8_block(master)
            values[name] = dequantize_fp8_block(weight, scale)
        elif fmt == "fp4":
            weight, scale = quantize_fp4(master)
            values[name] = dequantize_fp4(weight, scale)
            scale = encode_e8m0(scale)
        else:
            weight, scale = master, None
            values[name] = master
        slot.load(weight, scale)
    return values


def expert_formula(x, w1, w2, w3, limit, weight, rounded, weight_after=False):
    """One expert on float64 rows: clamp, silu, routing weight, then w2."""
    see = (lambda v: fake_quant_fp8(v.float(), 128).double()) if rounded else (lambda v: v)
    g, u = see(x) @ w1.double().T, see(x) @ w3.double().T
    hidden = torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
    if weight_after:
        return see(hidden) @ w2.double().T * weight
    return see(hidden * weight) @ w2.double().T


def routed(tokens=TOKENS):
    experts = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    return torch.randn(tokens, HIDDEN) * 2, experts, torch.rand(tokens, TOPK) + 0.1


@pytest.mark.parametrize("fmt", ["plain", "fp8", "fp4"])
@pytest.mark.parametrize("name", ["exact", "official", "serving"])
def test_routed_experts(name, fmt, device):
    cfg = config(swiglu_limit=4.0)
    module = Experts(cfg, get_numerics(name), torch.float32, device)
    values = load(module, fmt)
    x, experts, weights = routed()
    out = module(x.to(device), experts.to(device), weights.to(device)).cpu()
    rounded = name != "exact" and fmt != "plain"
    expected, after = torch.zeros(2, TOKENS, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for e, weight in zip(experts[t].tolist(), weights[t].double(), strict=True):
            w1, w2, w3 = (values[f"{e}.{w}.weight"] for w in ("w1", "w2", "w3"))
            row = x[t].double()
            expected[t] += expert_formula(row, w1, w2, w3, 4.0, weight, rounded)
            after[t] += expert_formula(row, w1, w2, w3, 4.0, weight, rounded, weight_after=True)
    scale = expected.abs().mean()
    if rounded:
        assert_same_codes(out, expected, largest=0.01, same=5e-4)
        assert (after - expected).abs().max() / scale > 0.01, "where the routing weight goes must show"
    else:
        torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=2e-4)


def test_the_clamp_matters_in_these_tests():
    cfg = config(swiglu_limit=4.0)
    module, free = (Experts(c, get_numerics("exact"), torch.float32) for c in (cfg, config(swiglu_limit=1e9)))
    values = load(module, "plain")
    for name, slot in checkpoint_slots(free).items():
        slot.load(values[name], None)
    x, experts, weights = routed()
    assert not torch.allclose(module(x, experts, weights), free(x, experts, weights), rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "fmt"), [("exact", "plain"), ("official", "fp4"), ("serving", "fp8")])
def test_a_token_is_the_same_in_every_batch(name, fmt, dtype):
    """Alone, beside others, in another order, and with 1 to 40 tokens on the same expert; up to rounding."""
    module = Experts(config(), get_numerics(name), dtype)
    load(module, fmt)
    x, experts, weights = routed(60)
    x = x.to(dtype)
    experts[:40, 0] = 3
    experts[:40, 1:] = torch.tensor([0, 5])
    together = module(x, experts, weights)
    parts = [slice(t, t + few) for t in (0, 7, 38, 39, 58) for few in (1, 2)]
    for part in [*parts, torch.randperm(60), *map(slice, (6, 15, 16, 17, 33))]:
        assert_same_codes(module(x[part], experts[part], weights[part]), together[part], 0.02, same=1e-5)


def test_the_order_of_a_tokens_choices_does_not_matter():
    module = Experts(config(), get_numerics("exact"), torch.float32)
    load(module, "plain")
    x, experts, weights = routed()
    assert torch.equal(module(x, experts.flip(1), weights.flip(1)), module(x, experts, weights))


def test_experts_that_no_token_chose_are_not_read():
    module = Experts(config(), get_numerics("exact"), torch.float32)
    load(module, "plain")
    x, experts, weights = routed()
    experts = experts % 2
    before = module(x, experts, weights)
    for projection in (module.w1, module.w2, module.w3):
        projection.weight[2:] = float("nan")
    assert torch.equal(module(x, experts, weights), before)


@pytest.mark.parametrize("weigh_output", [False, True])
def test_parts_of_experts_add_up(weigh_output):
    """Each of two ranks has other channels of every expert, here unequally many."""
    cfg = config()
    first = cfg.moe_intermediate_size // 4
    parts = [Shard(0, 0, first), Shard(0, first, cfg.moe_intermediate_size - first)]
    whole, *split = (
        Experts(cfg, get_numerics("exact"), torch.float32, weigh_output=weigh_output, width=width)
        for width in (None, *parts)
    )
    for name, slot in checkpoint_slots(whole).items():
        weight = torch.randn(slot.shape) * 0.1
        slot.load(weight, None)
        for part in split:
            own = checkpoint_slots(part)[name]
            place = required(own.shard)
            own.load(weight.narrow(place.dim, place.start, place.size), None)
    x, weights = torch.randn(6, cfg.hidden_size), torch.rand(6, 2)
    experts = torch.rand(6, whole.count).topk(2).indices
    total = sum(part(x, experts, weights) for part in split)
    torch.testing.assert_close(total, whole(x, experts, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_of_another_rank_are_left_out(tokens):
    """Experts of a shard, plus those of the others, are all of them."""
    shards = [Shard(0, 0, config().n_routed_experts - 1), Shard(0, config().n_routed_experts - 1, 1)]
    parts = [Experts(config(), get_numerics("exact"), torch.float32, shard=shard) for shard in shards]
    whole = Experts(config(), get_numerics("exact"), torch.float32)
    for name, slot in checkpoint_slots(whole).items():
        weight = torch.randn(slot.shape) * 0.1
        slot.load(weight, None)
        kept = [found for part in parts if not (found := checkpoint_slots(part)[name]).elsewhere]
        assert len(kept) == 1
        kept[0].load(weight, None)
    x = torch.randn(tokens, config().hidden_size)
    experts = torch.rand(tokens, whole.count).topk(2).indices
    weights = torch.rand(tokens, 2)
    total = 0
    for part, shard in zip(parts, shards, strict=True):
        own = experts - shard.start
        total += part(x, torch.where((own >= 0) & (own < shard.size), own, -1), weights)
    torch.testing.assert_close(total, whole(x, experts, weights), rtol=1e-5, atol=1e-6)


def test_no_tokens():
    module = Experts(config(), get_numerics("exact"), torch.float32)
    load(module, "plain")
    assert module(*(part[:0] for part in routed())).shape == (0, HIDDEN)


@pytest.mark.parametrize(("name", "fmt"), [("exact", "plain"), ("official", "fp8")])
def test_shared_expert_is_clamped_and_unweighted(name, fmt):
    cfg = config(swiglu_limit=4.0)
    module = MoE(cfg, cfg.layers[5], get_numerics(name), torch.float32).shared_experts
    values = load(module, fmt)
    x = torch.randn(9, HIDDEN) * 2
    w1, w2, w3 = (values[f"{w}.weight"] for w in ("w1", "w2", "w3"))
    expected = expert_formula(x.double(), w1, w2, w3, 4.0, 1.0, name == "official")
    assert_same_codes(module(x), expected, largest=0.01, same=5e-4)


@pytest.mark.parametrize("hash_layer", [False, True], ids=["scored", "hash"])
def test_moe_adds_routed_and_shared(hash_layer):
    cfg = config()
    module = MoE(cfg, cfg.layers[0 if hash_layer else 5], get_numerics("exact"), torch.float32)
    values = load(module, "plain")
    module.gate = make_gate(cfg, hash_layer)
    x, ids = torch.randn(TOKENS, HIDDEN), torch.randint(VOCAB, (TOKENS,))
    experts, weights = module.gate(x, ids)
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for e, weight in zip(experts[t].tolist(), weights[t].double(), strict=True):
            w1, w2, w3 = (values[f"experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3"))
            expected[t] += expert_formula(x[t].double(), w1, w2, w3, 10.0, weight, False)
        w1, w2, w3 = (values[f"shared_experts.{w}.weight"] for w in ("w1", "w2", "w3"))
        expected[t] += expert_formula(x[t].double(), w1, w2, w3, 10.0, 1.0, False)
    scale = expected.abs().mean()
    torch.testing.assert_close(module(x, ids).double() / scale, expected / scale, rtol=0, atol=1e-4)


def test_a_cpu_has_no_second_stream():
    assert run_beside(lambda: 3, torch.device("cpu")) == (3, None)


@pytest.mark.gpu
def test_a_graph_computes_the_shared_expert_beside_the_others(device, monkeypatch):
    """On a second stream, whose memory is reused from layer to layer: the same bits as in order, at every replay."""
    cfg, events = config(), []
    module = MoE(cfg, cfg.layers[5], get_numerics("serving"), torch.bfloat16, device)
    load(module, "fp8")
    module.gate = make_gate(cfg, device=device)
    x, ids = torch.randn(TOKENS, HIDDEN, device=device).bfloat16(), torch.randint(VOCAB, (TOKENS,), device=device)

    def noted(function, on):
        result = run_beside(function, on)
        events.append(result[1])
        return result

    def layers():
        y = x
        for _ in range(6):
            y = torch.nn.functional.normalize(module(y, ids).float(), dim=-1).bfloat16()
        return y

    with torch.inference_mode():
        layers()
        monkeypatch.setattr("deepseek_attn.models.moe.run_beside", noted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        assert len(events) == 6
        assert None not in events
        for _ in range(50):
            x.normal_()
            graph.replay()
            replayed = out.clone()
            assert torch.equal(replayed, layers())


def test_expert_slots_have_published_names():
    cfg = config()
    names = set(checkpoint_slots(MoE(cfg, cfg.layers[5], get_numerics("exact"), torch.float32)))
    expected = {f"experts.{e}.{w}.weight" for e in range(EXPERTS) for w in ("w1", "w2", "w3")}
    expected |= {f"shared_experts.{w}.weight" for w in ("w1", "w2", "w3")} | {"gate.weight", "gate.bias"}
    assert names == expected
