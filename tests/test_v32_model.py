"""DeepSeek-V3.2 and V3 end to end: against transformers and against the formulas, in one go and in pieces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.config import ModelConfig
from deepseek_attn.config_v32 import DeepseekV32Config
from deepseek_attn.models.moe import GroupLimitedGate
from deepseek_attn.numerics import get_numerics
from deepseek_attn.runner import ModelRunner
from tests.oracle_v32 import NaiveOracle, Tensors, TransformersV32Oracle, float32_weights, pack_experts
from tests.small_models import assert_close, assert_no_near_tie, prompt

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 600)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "index_topk": 12,
    "max_position_embeddings": 4096,
}


def small(model_type: str = "deepseek_v32", **changes) -> DeepseekV32Config:
    changes = SMALL | {"num_nextn_predict_layers": 0} | changes
    if model_type == "deepseek_v3":
        del changes["index_topk"]
    return ModelConfig.from_preset("tiny_v32").replace(model_type=model_type, **changes)


def make_runner(config, source=None, **options) -> ModelRunner:
    options = {"max_model_len": 640, "max_num_seqs": 16, "max_num_batched_tokens": 2400} | options
    return ModelRunner.from_source(config, source or RandomSource(config, 0), progress=False, device="cpu", **options)


def poison(runner: ModelRunner) -> None:
    """Every byte that no token wrote becomes NaN, as float32, bf16 and e4m3 alike."""
    for pool in runner.pools:
        pool.tensor.fill_(0xFF)


class Tiny:
    """A preset with its references; all lengths scored in one batch, neighbours with different tokens."""

    def __init__(self, config: DeepseekV32Config):
        self.config, self.source = config, RandomSource(config, 0)
        self.runner = make_runner(config, self.source)
        poison(self.runner)
        self.prompts = [prompt(config, 600, seed) for seed in (1, 5)]  # without near-ties
        self.hf = TransformersV32Oracle(config, self.source)
        self.references = [self.hf(tokens) for tokens in self.prompts]
        batch = [self.prompts[i % 2][:length] for i, length in enumerate(LENGTHS)]
        self.scores = dict(zip(LENGTHS, self.runner.score(batch), strict=True))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny(ModelConfig.from_preset("tiny_v32"))


@pytest.fixture(scope="module")
def tiny_v3() -> Tiny:
    return Tiny(ModelConfig.from_preset("tiny_v32").replace(model_type="deepseek_v3"))


@pytest.fixture(scope="module")
def naive(tiny) -> list:
    return [NaiveOracle(tiny.config, tiny.source)(tokens[:300]) for tokens in tiny.prompts]


# against the oracles


@pytest.mark.parametrize("length", LENGTHS)
def test_v32_equals_transformers(tiny, length):
    """In a batch of all lengths, and alone: up to 16 tokens the indexer has nothing to leave out."""
    which = LENGTHS.index(length) % 2
    for logits in (tiny.scores[length], tiny.runner.score([tiny.prompts[which][:length]])[0]):
        assert_close(logits, tiny.references[which][:length])


@pytest.mark.parametrize("length", LENGTHS)
def test_v3_equals_transformers(tiny_v3, length):
    which = LENGTHS.index(length) % 2
    for logits in (tiny_v3.scores[length], tiny_v3.runner.score([tiny_v3.prompts[which][:length]])[0]):
        assert_close(logits, tiny_v3.references[which][:length])


@pytest.mark.parametrize("which", [0, 1])
def test_absorbed_equals_naive(tiny, naive, which):
    """Logits, experts and selected tokens; transformers is in between: it equals both."""
    reference = naive[which]
    assert_no_near_tie(reference)
    assert_close(tiny.references[which][:300], reference.logits)
    experts, entries = {}, {}
    with recorded(tiny.runner, experts, entries):
        logits = tiny.runner.score([tiny.prompts[which][:300]])[0]
    assert_close(logits, reference.logits)
    assert set(experts) == {"layers.2", "layers.3"}
    assert set(entries) == {f"layers.{i}" for i in range(4)}
    for name, chosen in experts.items():
        assert torch.equal(chosen, reference.experts[int(name[-1])]), name
    for name, chosen in entries.items():
        assert torch.equal(chosen, reference.entries[int(name[-1])]), name
        assert chosen[299].sum() == 16


class recorded:
    """Hooks that keep the experts and the tokens that a single prompt's step chooses, by layer."""

    def __init__(self, runner: ModelRunner, experts: dict, entries: dict):
        self.hooks = []
        for name, module in runner.model.named_modules():
            layer = ".".join(name.split(".")[:2])
            if isinstance(module, GroupLimitedGate):
                hook = lambda m, a, r, layer=layer: experts.update({layer: r[0].sort(-1).values})  # noqa: E731
            elif name.endswith(".indexer"):
                hook = lambda m, a, r, layer=layer: entries.update({layer: as_mask(a[3])})  # noqa: E731
            else:
                continue
            self.hooks.append(module.register_forward_hook(hook))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def as_mask(rows: torch.Tensor) -> torch.Tensor:
    return (rows.unsqueeze(2) == torch.arange(len(rows))).any(1)


@pytest.mark.parametrize(
    "mistake",
    [
        *("interleaved indexer rope", "last channels", "half-split mla rope", "rms index norm", "no mscale"),
        *("group max", "zero masked groups", "biased weights", "relu after weight", "embedding half last"),
    ],
)
def test_known_mistakes_would_show(tiny, naive, mistake):
    """Each is a bug that an implementation had; only the formulas without it match transformers (or, for MTP, us)."""
    source = negative_bias(tiny.source) if mistake == "zero masked groups" else tiny.source
    tokens = tiny.prompts[0][:120]
    wrong = NaiveOracle(tiny.config, source, mistake)(tokens)
    right = NaiveOracle(tiny.config, source)(tokens)
    kind = "mtp_logits" if mistake == "embedding half last" else "logits"
    difference = (getattr(wrong, kind) - getattr(right, kind)).abs().max() / getattr(right, kind).abs().max()
    assert difference > 1e-2
    assert_close(make_runner(tiny.config, source).score_mtp([tokens])[kind == "mtp_logits"][0], getattr(right, kind))


def negative_bias(source: RandomSource) -> Tensors:
    """Biases of -2: all biased scores are negative."""
    tensors = Tensors.of(source).tensors
    return Tensors({n: t - 2 if n.endswith("e_score_correction_bias") else t for n, t in tensors.items()})


def random_config(seed: int) -> DeepseekV32Config:
    draw = random.Random(seed)
    groups, size = draw.choice([(1, 4), (2, 3), (4, 2)])
    kept = draw.randint(1, groups)
    layers = draw.choice([1, 2, 3])
    yarn = dict.fromkeys(("mscale", "mscale_all_dim"), draw.choice([1.0, 0.707]))
    yarn |= {"type": "yarn", "factor": draw.choice([4, 40]), "original_max_position_embeddings": 64}
    changes = {
        "vocab_size": draw.choice([33, 128]),
        "hidden_size": draw.choice([64, 96, 160]),
        "intermediate_size": draw.choice([48, 200]),
        "moe_intermediate_size": draw.choice([32, 96]),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw.randint(0, layers),
        "num_attention_heads": draw.choice([1, 3]),
        "q_lora_rank": draw.choice([48, 64]),
        "kv_lora_rank": draw.choice([40, 144]),
        "qk_nope_head_dim": draw.choice([24, 64]),
        "qk_rope_head_dim": draw.choice([16, 64]),
        "v_head_dim": draw.choice([32, 80]),
        "n_routed_experts": groups * size,
        "n_shared_experts": draw.choice([1, 2]),
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw.randint(1, kept * size),
        "norm_topk_prob": draw.choice([True, True, False]),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_theta": draw.choice([1000.0, 10000.0]),
        "rope_scaling": draw.choice([None, yarn, yarn]),
        "num_nextn_predict_layers": draw.choice([0, 1]),
    }
    if draw.random() < 0.4:
        changes["quantization_config"] = None
    if seed % 3 == 2:
        return small("deepseek_v3", **changes)
    indexer = {"index_n_heads": draw.choice([16, 24]), "index_head_dim": 64, "index_topk": draw.choice([1, 5, 60, 300])}
    return small(**changes, **indexer)


@pytest.mark.parametrize("seed", range(15))
def test_random_configs(seed):
    config = random_config(seed)
    source = RandomSource(config, seed)
    tokens = prompt(config, 150, seed)
    reference = NaiveOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    assert_close(TransformersV32Oracle(config, source)(tokens), reference.logits)
    runner = make_runner(config, source)
    poison(runner)
    assert_close(runner.score([tokens])[0], reference.logits)
    assert_close(runner.score([tokens], chunk_size=37)[0], reference.logits)
    if config.mtp_layers:
        assert_close(runner.score_mtp([tokens], chunk_size=64)[1][0], reference.mtp_logits)


def test_a_selection_that_does_not_bind_is_dense_attention():
    """index_topk >= T equals a V3 model with the same weights: ours, and transformers'."""
    config, dense = small(index_topk=128), small("deepseek_v3")
    source = RandomSource(config, 3)
    tokens = prompt(config, 128)
    sparse = make_runner(config, source).score([tokens])[0]
    v3 = make_runner(dense, Tensors.of(source, ".indexer.")).score([tokens])[0]
    assert_close(sparse, v3)
    assert_close(v3, TransformersV32Oracle(dense, source)(tokens))
    longer = prompt(config, 129)
    binding = make_runner(config, source).score([longer])[0]
    assert_close(binding[:128], sparse)
    full = make_runner(dense, Tensors.of(source, ".indexer.")).score([longer])[0]
    assert (binding[128] - full[128]).abs().max() > 1e-3


def test_transformers_disagrees_with_itself_where_few_index_heads_tie():
    """With 4 index heads, all ReLUs of a key are often 0 and exact ties reach the edge of the selection; then
    transformers' prefill and its own decoding choose differently. With 16 heads they agree."""
    spread = {}
    for heads in (4, 16):
        config = ModelConfig.from_preset("tiny_v32").replace(index_n_heads=heads)
        hf, tokens = TransformersV32Oracle(config, RandomSource(config, 0)), prompt(config, 90)
        spread[heads] = float((hf(tokens) - hf.step_by_step(tokens)).abs().max())
    assert spread[4] > 0.1
    assert spread[16] < 1e-3


# in one go and in pieces


@pytest.fixture(params=["deepseek_v32", "deepseek_v3"])
def model_type(request) -> str:
    return request.param


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 65, 100])
def test_chunks_equal_one_prefill(model_type, chunk):
    config = small(model_type)
    runner = make_runner(config)
    poison(runner)
    tokens = prompt(config, 150)
    assert_close(runner.score([tokens], chunk_size=chunk)[0], runner.score([tokens])[0])


@pytest.mark.parametrize("seed", range(4))
def test_ragged_batches_equal_prompts_alone(model_type, seed):
    """Chunks of random sizes, in random company, decodes beside prefills."""
    config, draw = small(model_type), random.Random(seed)
    runner = make_runner(config, max_num_seqs=4)
    poison(runner)
    prompts = [prompt(config, draw.randint(1, 160), 10 * seed + i) for i in range(7)]
    expected = [runner.score([tokens])[0] for tokens in prompts]
    waiting, running, got = list(range(7)), {}, {i: [] for i in range(7)}
    while waiting or running:
        while waiting and len(running) < 4:
            i = waiting.pop(0)
            running[i] = runner.sequence(prompts[i])
        chosen = draw.sample(sorted(running), draw.randint(1, len(running)))
        batch = [(running[i], draw.choice([1, 1, draw.randint(1, running[i].num_pending)])) for i in chosen]
        for i, rows in zip(chosen, runner.step(batch, all_logits=True).logits, strict=True):
            got[i].append(rows)
        for i in chosen:
            if not running[i].num_pending:
                running.pop(i).free()
    for i in range(7):
        assert_close(torch.cat(got[i]), expected[i], what=f"prompt {i}")
    assert runner.manager.available_pages() == {"tokens": runner.layout.pages["tokens"] - 1}


def test_later_tokens_change_no_bit_of_earlier_logits(model_type):
    config = small(model_type)
    runner = make_runner(config)
    tokens = prompt(config, 140)
    changed = tokens[:100] + prompt(config, 40, seed=9)
    a, b = runner.score([tokens])[0], runner.score([changed])[0]
    assert torch.equal(a[:100], b[:100])
    assert not torch.equal(a[100:], b[100:])


@pytest.mark.parametrize("numerics", ["exact", "official", "serving"])
def test_what_is_not_written_is_not_read(model_type, numerics):
    """Pools full of NaN give the same bits as pools full of zeros; token by token, so that pages fill up slowly."""
    config = small(model_type, num_nextn_predict_layers=1)
    tokens = prompt(config, 70)
    clean, dirty = make_runner(config, numerics=numerics), make_runner(config, numerics=numerics)
    poison(dirty)
    for chunk in (None, 9):
        for a, b in zip(clean.score_mtp([tokens], chunk), dirty.score_mtp([tokens], chunk), strict=True):
            assert torch.equal(a[0], b[0])
            assert b[0].isfinite().all()


@pytest.mark.parametrize("length", [0, 1, 5, 63, 64, 65, 100])
def test_truncate_goes_back_any_distance_without_computing_again(model_type, length):
    config = small(model_type)
    runner = make_runner(config, max_rollback=2)
    tokens, other = prompt(config, 130), prompt(config, 130, seed=5)
    sequence = runner.sequence(tokens)
    runner.step([(sequence, 130)])
    sequence.truncate(length)
    assert sequence.num_computed == length
    for token in other[length:]:
        sequence.append(token)
    logits = runner.step([(sequence, 130 - length)], all_logits=True).logits[0]
    assert_close(logits, runner.score([tokens[:length] + other[length:]])[0][length:])


def test_forks_share_pages_until_they_write(model_type):
    config = small(model_type)
    runner = make_runner(config)
    tokens, left, right = prompt(config, 100), prompt(config, 40, 1), prompt(config, 40, 2)
    parent = runner.sequence(tokens)
    runner.step([(parent, 100)])
    before = runner.manager.available_pages()["tokens"]
    child = parent.fork()
    assert runner.manager.available_pages()["tokens"] == before
    for a, b in zip(left, right, strict=True):
        parent.append(a)
        child.append(b)
    got = runner.step([(parent, 40), (child, 40)], all_logits=True).logits
    assert_close(got[0], runner.score([tokens + left])[0][100:])
    assert_close(got[1], runner.score([tokens + right])[0][100:])


# MTP


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
def test_mtp_equals_the_formulas(tiny, naive, chunk):
    tokens = tiny.prompts[0][:150]
    reference = NaiveOracle(tiny.config, tiny.source)(tokens)
    assert_no_near_tie(reference)
    logits, drafts = tiny.runner.score_mtp([tokens, tiny.prompts[1][:40]], chunk)
    assert drafts[0].shape == (149, 512)
    assert drafts[1].shape == (39, 512)
    assert_close(logits[0], reference.logits)
    assert_close(drafts[0], reference.mtp_logits)
    assert_close(drafts[1], naive[1].mtp_logits[:39])


def test_mtp_drafts_go_on_from_their_own_states(tiny):
    """`draft_streams` takes what it returned: states after a norm, like the backbone's."""
    tokens = torch.tensor(tiny.prompts[0][:20])
    runner = make_runner(tiny.config, tiny.source)
    sequence = runner.sequence(tokens.tolist())
    runner.manager.reserve([(sequence.cache, 20)])
    meta = runner.step_metadata([sequence.cache], [20])
    states = runner.model(tokens, meta.positions, meta)
    assert torch.equal(runner.model.logits(states), runner.model.head(states))
    meta = runner.mtp_builder.build(runner.step_input([sequence.cache], [20]))
    drafted = runner.model.draft_streams(states, tokens.roll(-1), meta.positions, meta)
    assert drafted.shape == states.shape
    assert torch.equal(runner.model.draft_logits(drafted), runner.model.head(drafted))


# quantised


def test_fp8_weights_are_dequantised_exactly():
    """A quantised checkpoint and its float32 values stored plainly give the same logits."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    plain = Tensors(float32_weights(source))
    tokens = prompt(config, 60)
    for a, b in zip(
        make_runner(config, source).score_mtp([tokens]),
        make_runner(config.replace(quantization_config=None), plain).score_mtp([tokens]),
        strict=True,
    ):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("numerics", ["official", "serving"])
def test_quantised_numerics_round_where_they_say(model_type, numerics):
    """Against formulas with the same roundings: far nearer than to the exact ones, and V3 (no choices left) equal.

    One group, all of whose experts are chosen, and a selection that does not bind: a rounding can flip no choice.
    """
    changes = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
    if model_type == "deepseek_v32":
        changes["index_topk"] = 128
    config = small(model_type, **changes)
    source, tokens = RandomSource(config, 0), prompt(config, 100)
    exact, rounded = (NaiveOracle(config, source, numerics=name)(tokens) for name in ("exact", numerics))
    logits, drafts = make_runner(config, source, numerics=numerics).score_mtp([tokens])
    assert distance(logits[0], exact.logits) > 0.05
    assert distance(logits[0], rounded.logits) < 0.002
    assert distance(drafts[0], rounded.mtp_logits) < 0.02


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("numerics", ["official", "serving"])
def test_quantised_selection(numerics):
    """The first layer's choice of tokens under the same roundings: equal but for a rounding here and there."""
    config = small()
    source, tokens = RandomSource(config, 0), prompt(config, 200)
    exact, rounded = (NaiveOracle(config, source, numerics=name)(tokens).entries[0] for name in ("exact", numerics))
    entries = {}
    runner = make_runner(config, source, numerics=numerics)
    with recorded(runner, {}, entries):
        runner.score([tokens])
    chosen = entries["layers.0"]
    assert (chosen & rounded).sum() / rounded.sum() > 0.998
    assert (chosen & exact).sum() / exact.sum() < 0.995


@pytest.mark.parametrize("numerics", ["official", "serving"])
def test_quantised_bfloat16_models_stay_near_exact_ones(model_type, numerics):
    config = small(model_type, n_group=1, topk_group=1, num_experts_per_tok=8)
    source, tokens = RandomSource(config, 0), prompt(config, 12)
    exact = make_runner(config, source).score([tokens])[0]
    assert distance(make_runner(config, source, numerics=numerics, dtype="bfloat16").score([tokens])[0], exact) < 0.15


@pytest.mark.parametrize("chunk", [1, 9, 64])
def test_quantised_chunks(model_type, chunk):
    """Decodes read FP8 entries, prefills what they decode to: the same values, whatever the chunks."""
    config = small(model_type, index_topk=64) if model_type == "deepseek_v32" else small(model_type)
    runner = make_runner(config, numerics="official")
    tokens = prompt(config, 60)
    assert_close(runner.score([tokens], chunk)[0], runner.score([tokens])[0], tolerance=2e-2)


def test_quantised_caches_hold_fp8_entries():
    runner = make_runner(small(), numerics="official")
    pools = {(pool.spec.layer, pool.spec.kind): pool.record for pool in runner.pools}
    assert {record.name for record in pools.values()} == {"fp8_ds_mla_v32", "index_fp8"}
    assert pools["layers.0", "latent"].scale_rule == "official"


def test_real_sizes():
    """656 + 132 bytes per token and layer (61 and the MTP layer), or 1152 + 132 with a bf16 latent."""
    from deepseek_attn.cache.layout import make_layout

    config = ModelConfig.from_preset("v32")
    for kv_record, per_token in (("fp8_ds_mla", 656 + 135), ("plain", 1152 + 135)):
        numerics = replace(get_numerics("serving"), kv_record=kv_record)
        layout = make_layout(config, numerics, torch.bfloat16, 6400, 1, 64)
        assert layout.pages == {"tokens": 101}
        # pages of 64 index keys are padded from 8448 to 8640 bytes: 135 per key
        assert layout.nbytes() == 101 * 64 * 62 * per_token


def test_official_means_fp8_index_keys_and_the_models_own_scales():
    """V4's official numerics have FP4 index keys; V3's activations have raw scales, V3.1's powers of two."""
    v32 = make_runner(small(), numerics="official")
    assert (v32.numerics.index_record, v32.numerics.index_hadamard) == ("fp8", True)
    assert v32.numerics.pow2_activation_scales
    raw = {k: v for k, v in small().quantization_config.items() if k != "scale_fmt"}
    config = small("deepseek_v3", quantization_config=raw)
    v3 = make_runner(config, numerics="official")
    assert not v3.numerics.pow2_activation_scales
    tokens = prompt(config, 40)
    power = make_runner(config, numerics=replace(v3.numerics, pow2_activation_scales=True))
    assert not torch.equal(v3.score([tokens])[0], power.score([tokens])[0])


@pytest.mark.parametrize("kv_record", ["plain", "fp8_ds_mla"])
def test_backends_agree(kv_record):
    """FlashInfer's impl in plain torch, beside FlashMLA's."""
    config = small()
    numerics = replace(get_numerics("exact"), kv_record=kv_record)
    tokens = prompt(config, 90)
    runs = {}
    for backend in ("auto", "reference", "flashinfer"):
        if (backend, kv_record) == ("flashinfer", "fp8_ds_mla"):
            with pytest.raises(ValueError, match="'flashinfer' reads plain latents"):
                make_runner(config, backend=backend, numerics=numerics)
            continue
        runs[backend] = make_runner(config, backend=backend, numerics=numerics).score([tokens], chunk_size=31)[0]
        assert_close(runs[backend], runs["auto"])


@pytest.mark.parametrize("fill", [0.25, 1.0])
def test_a_bfloat16_model_runs(model_type, fill):
    config = small(model_type)
    runner = make_runner(config, dtype="bfloat16")
    tokens = prompt(config, int(150 * fill))
    assert_close(runner.score([tokens], 40)[0], runner.score([tokens])[0], tolerance=0.5)
    assert runner.pools.get("layers.0", "latent").record.dtype == torch.bfloat16


# checkpoints


def test_checkpoints_round_trip(tmp_path, model_type):
    config = small(model_type, num_nextn_predict_layers=1, vocab_size=300)
    path = write_checkpoint(RandomSource(config, 4), config, tmp_path / "ckpt", num_shards=3)
    runner = ModelRunner.from_pretrained(path, device="cpu", max_model_len=640, progress=False)
    assert runner.config == config
    assert runner.report.mtp_loaded
    assert {rule: len(names) for rule, names in runner.report.ignored.items()} == {
        "mtp.*emb* / mtp.*head.weight copies": 2
    }
    tokens = prompt(config, 50)
    made = ModelRunner.from_config(config, seed=4, device="cpu", max_model_len=640)
    for a, b in zip(runner.score_mtp([tokens]), made.score_mtp([tokens]), strict=True):
        assert torch.equal(a[0], b[0])


def test_published_names_and_formats():
    config = ModelConfig.from_preset("v32")
    entries = RandomSource(config, 0).entries()
    assert len(entries) == 3 * 27 + 58 * 1565 + 1571 + 3
    expected = {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", (576, 7168)),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", (5, 56)),
        "model.layers.60.self_attn.kv_b_proj.weight_scale_inv": ("F32", (256, 4)),
        "model.layers.60.self_attn.indexer.wk.weight_scale_inv": ("F32", (1, 56)),
        "model.layers.61.self_attn.indexer.k_norm.bias": ("F32", (128,)),
        "model.layers.61.self_attn.indexer.weights_proj.weight": ("BF16", (64, 7168)),
        "model.layers.2.mlp.down_proj.weight": ("F8_E4M3", (7168, 18432)),
        "model.layers.3.mlp.gate.e_score_correction_bias": ("F32", (256,)),
        "model.layers.3.mlp.experts.255.up_proj.weight": ("F8_E4M3", (2048, 7168)),
        "model.layers.3.mlp.shared_experts.gate_proj.weight_scale_inv": ("F32", (16, 56)),
        "model.layers.61.eh_proj.weight": ("BF16", (7168, 14336)),
        "model.layers.61.shared_head.norm.weight": ("BF16", (7168,)),
        "model.layers.61.shared_head.head.weight": ("BF16", (129280, 7168)),
        "lm_head.weight": ("BF16", (129280, 7168)),
    }
    assert {name: (entries[name].dtype, entries[name].shape) for name in expected} == expected


def test_what_transformers_saves_loads_equally(tmp_path):
    """Packed experts, float32, no MTP layer, and transformers' own config.json."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    hf = TransformersV32Oracle(config, source)
    hf.model.save_pretrained(tmp_path / "hf")
    loaded = ModelRunner.from_pretrained(tmp_path / "hf", device="cpu", max_model_len=640, progress=False)
    packed = Tensors(pack_experts(float32_weights(source), config))
    tokens = prompt(config, 60)
    expected = make_runner(config, source).score([tokens])[0]
    for runner in (loaded, make_runner(config, packed)):
        assert not runner.has_mtp
        assert torch.equal(runner.score([tokens])[0], expected)


def test_scales_in_other_formats_load_equally():
    """``weight_scale_inv`` as e8m0 bytes or bf16; powers of two are exact in both."""
    config = small()
    source = RandomSource(config, 0)
    tensors = {name: source.read(name) for name in source.entries()}
    tokens = prompt(config, 60)
    expected = make_runner(config, Tensors(tensors)).score([tokens])[0]
    for convert in (lambda s: (s.log2() + 127).to(torch.uint8), torch.Tensor.bfloat16):
        other = {n: convert(t) if n.endswith("_scale_inv") else t for n, t in tensors.items()}
        assert torch.equal(make_runner(config, Tensors(other)).score([tokens])[0], expected)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("model.layers.1.self_attn.kv_b_proj.weight_scale_inv", r"missing scales \(1\): layers\.1\.attn\.wkv_b\."),
        (
            "model.layers.0.self_attn.indexer.k_norm.bias",
            r"missing tensors \(1\): layers\.0\.attn\.indexer\.k_norm",
        ),
        ("model.layers.1.mlp.gate.e_score_correction_bias", r"missing tensors \(1\): layers\.1\.ffn\.gate\.bias"),
    ],
)
def test_a_missing_tensor_is_named(drop, message):
    config = small()
    with pytest.raises(ValueError, match=message):
        make_runner(config, Tensors.of(RandomSource(config, 0), drop))


def test_models_and_checkpoints_of_different_kinds():
    """A V3 checkpoint has no indexer for a V3.2 config; a V3.2 checkpoint has one too many for a V3 config."""
    v32, v3 = small(), small("deepseek_v3")
    with pytest.raises(ValueError, match=r"missing tensors \(10\): layers\.0\.attn\.indexer\.wq_b\.weight"):
        make_runner(v32, RandomSource(v3, 0))
    with pytest.raises(ValueError, match=r"unknown tensors \(14\).*\(stored as model\.layers\.0\.self_attn\.indexer"):
        make_runner(v3, RandomSource(v32, 0))


def test_a_layer_past_the_last_is_no_decoder_layer():
    """``model.layers.{num_hidden_layers}`` is the MTP layer: never one more block, and ignored where there is none."""
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    runner = make_runner(config.replace(num_nextn_predict_layers=0), source)
    assert list(runner.model.layers) == ["0", "1"]
    assert all(name.startswith("mtp.0.") for names in runner.report.ignored.values() for name in names)
    tokens = prompt(config, 30)
    assert torch.equal(runner.score([tokens])[0], make_runner(config, source).score([tokens])[0])


def test_some_layers_or_their_attention_only():
    config = small(num_nextn_predict_layers=1)
    source = RandomSource(config, 0)
    runner = make_runner(config, source, layers=[1])
    assert list(runner.model.layers) == ["1"]
    assert {pool.spec.layer for pool in runner.pools} == {"layers.1"}
    assert runner.score([prompt(config, 20)])[0].isfinite().all()
    runner = make_runner(config, source, layers=[0], attention_only=True)
    assert all(name.startswith("layers.0.attn") for name in runner.report.loaded)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match=r"unknown backend 'tritonn' for deepseek_v32: .*flashinfer"):
        make_runner(small(), backend="tritonn")


def test_safetensors_source_reads_published_scales(tmp_path):
    config = small(vocab_size=300)
    source = RandomSource(config, 0)
    with SafetensorsSource(write_checkpoint(source, config, tmp_path / "ckpt")) as stored:
        assert stored.entries().keys() == source.entries().keys()
        for name in source.entries():
            assert torch.equal(stored.read(name).view(torch.uint8), source.read(name).view(torch.uint8)), name


def test_what_transformers_saves_loads(tmp_path):
    config = ModelConfig.from_preset("tiny_v32")
    oracle = TransformersV32Oracle(config, RandomSource(config, seed=0))
    oracle.model.save_pretrained(tmp_path)
    runner = ModelRunner.from_pretrained(tmp_path, device="cpu", progress=False)
    prompt = torch.randint(config.vocab_size, (77,)).tolist()
    expected = oracle(prompt)
    assert (runner.score([prompt])[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
