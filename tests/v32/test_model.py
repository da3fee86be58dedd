"""DeepSeek-V3.2 and V3 end to end: against transformers and against the formulas, in one go and in pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.runner import StepOptions
from deepseek_attn.runner.step import step_input
from deepseek_attn.testing import poison_caches
from tests.support.oracle_v32 import NaiveOracle, Tensors, TransformersV32Oracle
from tests.support.small_models import assert_close, assert_no_near_tie, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import of_type, required
from tests.support.v32_cases import make_runner, recorded, small

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 128, 129, 150)


class Tiny:
    """A preset with its references; all lengths scored in one batch, neighbours with different tokens."""

    def __init__(self, config: DeepseekV32Config):
        self.config, self.source = config, RandomSource(config, 0)
        self.runner = make_runner(config, self.source)
        poison_caches(self.runner)
        self.prompts = [prompt(config, 150, seed) for seed in (1, 5)]  # without near-ties
        self.hf = TransformersV32Oracle(config, self.source)
        self.references = [self.hf(tokens) for tokens in self.prompts]
        batch = [self.prompts[i % 2][:length] for i, length in enumerate(LENGTHS)]
        self.scores = dict(zip(LENGTHS, self.runner.score(batch), strict=True))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny(of_type(ModelConfig.from_preset("tiny_v32"), DeepseekV32Config))


@pytest.fixture(scope="module")
def tiny_v3() -> Tiny:
    return Tiny(ModelConfig.from_preset("tiny_v32").replace(model_type="deepseek_v3"))


@pytest.fixture(scope="module")
def naive(tiny) -> list:
    return [NaiveOracle(tiny.config, tiny.source)(tokens) for tokens in tiny.prompts]


# against the oracles


@pytest.mark.parametrize("length", LENGTHS)
def test_v32_equals_transformers(tiny, length):
    """In a batch of all lengths, and alone: up to 16 tokens the indexer selects all."""
    which = LENGTHS.index(length) % 2
    for logits in (tiny.scores[length], tiny.runner.score([tiny.prompts[which][:length]])[0]):
        assert_close(logits, tiny.references[which][:length])


@pytest.mark.parametrize("length", tiered(LENGTHS, [1, 17, 129, 150]))
def test_v3_equals_transformers(tiny_v3, length):
    which = LENGTHS.index(length) % 2
    for logits in (tiny_v3.scores[length], tiny_v3.runner.score([tiny_v3.prompts[which][:length]])[0]):
        assert_close(logits, tiny_v3.references[which][:length])


@exhaustive_on_cpu
@pytest.mark.parametrize("which", tiered([0, 1], [1]))
def test_absorbed_equals_naive(tiny, naive, which):
    """Logits, experts and selected tokens; transformers is in between: it equals both."""
    reference = naive[which]
    assert_no_near_tie(reference)
    assert_close(tiny.references[which], reference.logits)
    experts, entries = {}, {}
    with recorded(tiny.runner, experts, entries):
        logits = tiny.runner.score([tiny.prompts[which]])[0]
    assert_close(logits, reference.logits)
    assert set(experts) == {"layers.2", "layers.3"}
    assert set(entries) == {f"layers.{i}" for i in range(4)}
    for name, chosen in experts.items():
        assert torch.equal(chosen, reference.experts[int(name[-1])]), name
    for name, chosen in entries.items():
        assert torch.equal(chosen, reference.entries[int(name[-1])]), name
        assert chosen[-1].sum() == 16


MISTAKES = ["interleaved indexer rope", "last channels", "half-split mla rope", "rms index norm", "no mscale"]
MISTAKES += ["group max", "zero masked groups", "biased weights", "relu after weight", "embedding half last"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
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
    changes: dict[str, Any] = {
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
    indexer: dict[str, Any] = {
        "index_n_heads": draw.choice([16, 24]),
        "index_head_dim": 64,
        "index_topk": draw.choice([1, 5, 60, 300]),
    }
    return small(**changes, **indexer)


@pytest.mark.parametrize("seed", tiered(range(15), [1], quick_on_gpu=[0, 2]))
def test_random_configs(seed):
    config = random_config(seed)
    source = RandomSource(config, seed)
    tokens = prompt(config, 150, seed)
    reference = NaiveOracle(config, source)(tokens)
    assert_no_near_tie(reference)
    assert_close(TransformersV32Oracle(config, source)(tokens), required(reference.logits))
    runner = make_runner(config, source)
    poison_caches(runner)
    assert_close(runner.score([tokens])[0], required(reference.logits))
    assert_close(runner.score([tokens], chunk_size=37)[0], required(reference.logits))
    if config.mtp_layers:
        assert_close(runner.score_mtp([tokens], chunk_size=64)[1][0], required(reference.mtp_logits))


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


@pytest.mark.exhaustive  # about transformers alone
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


@pytest.fixture(params=tiered(["deepseek_v32", "deepseek_v3"], ["deepseek_v32"], quick_on_gpu=["deepseek_v3"]))
def model_type(request) -> str:
    return request.param


@pytest.mark.parametrize("chunk", tiered([1, 2, 7, 64, 65, 100], [7]))
def test_chunks_equal_one_prefill(model_type, chunk):
    config = small(model_type)
    runner = make_runner(config)
    poison_caches(runner)
    tokens = prompt(config, 150)
    assert_close(runner.score([tokens], chunk_size=chunk)[0], runner.score([tokens])[0])


@pytest.mark.parametrize("seed", tiered(range(4), [0]))
def test_ragged_batches_equal_prompts_alone(model_type, seed):
    """Chunks of random sizes, in random company, decodes beside prefills."""
    config, draw = small(model_type), random.Random(seed)
    runner = make_runner(config, max_num_seqs=4)
    poison_caches(runner)
    count = 7 if seed else 5
    prompts = [prompt(config, draw.randint(1, 160 if seed else 100), 10 * seed + i) for i in range(count)]
    expected = [runner.score([tokens])[0] for tokens in prompts]
    waiting, running, got = list(range(count)), {}, {i: [] for i in range(count)}
    while waiting or running:
        while waiting and len(running) < 4:
            i = waiting.pop(0)
            running[i] = runner.sequence(prompts[i])
        chosen = draw.sample(sorted(running), draw.randint(1, len(running)))
        batch = [(running[i], draw.choice([1, 1, draw.randint(1, running[i].num_pending)])) for i in chosen]
        for i, rows in zip(chosen, runner.step(batch, StepOptions(all_logits=True)).rows, strict=True):
            got[i].append(rows)
        for i in chosen:
            if not running[i].num_pending:
                running.pop(i).free()
    for i in range(count):
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


@pytest.mark.parametrize("numerics", tiered(["exact", "official", "serving"], ["official"]))
def test_what_is_not_written_is_not_read(model_type, numerics):
    """Pools full of NaN give the same bits as pools full of zeros; token by token, so that pages fill up slowly."""
    config = small(model_type, num_nextn_predict_layers=1)
    tokens = prompt(config, 70)
    clean, dirty = make_runner(config, numerics=numerics), make_runner(config, numerics=numerics)
    poison_caches(dirty)
    for chunk in (None, 17):
        for a, b in zip(clean.score_mtp([tokens], chunk), dirty.score_mtp([tokens], chunk), strict=True):
            assert torch.equal(a[0], b[0])
            assert b[0].isfinite().all()


@pytest.mark.parametrize("length", tiered([0, 1, 5, 63, 64, 65, 100], [5, 64], quick_on_gpu=[0]))
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
    logits = runner.step([(sequence, 130 - length)], StepOptions(all_logits=True)).rows[0]
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
    got = runner.step([(parent, 40), (child, 40)], StepOptions(all_logits=True)).logits
    assert_close(required(got)[0], runner.score([tokens + left])[0][100:])
    assert_close(required(got)[1], runner.score([tokens + right])[0][100:])


# MTP


@pytest.mark.parametrize("chunk", tiered([None, 1, 7, 23, 64], [23]))
def test_mtp_equals_the_formulas(tiny, naive, chunk):
    tokens, reference = tiny.prompts[0], naive[0]
    assert_no_near_tie(reference)
    logits, drafts = tiny.runner.score_mtp([tokens, tiny.prompts[1][:40]], chunk)
    assert drafts[0].shape == (149, 512)
    assert drafts[1].shape == (39, 512)
    assert_close(logits[0], required(reference.logits))
    assert_close(drafts[0], required(reference.mtp_logits))
    assert_close(drafts[1], naive[1].mtp_logits[:39])


def test_mtp_drafts_go_on_from_their_own_states(tiny):
    """`draft_hidden_states` takes what it returned: states after a norm, like the backbone's."""
    tokens = torch.tensor(tiny.prompts[0][:20])
    runner = make_runner(tiny.config, tiny.source)
    sequence = runner.sequence(tokens.tolist())
    runner.manager.reserve([(sequence.cache, 20)])
    meta = runner.step_metadata([sequence.cache], [20])
    model = runner.whole_model()
    states = model(tokens, meta.positions, meta)
    assert torch.equal(model.logits(states), model.head(states))
    meta = required(runner.drafter).builder.build(step_input(runner.manager, [sequence.cache], [20], 1))
    drafted = model.draft_hidden_states(states, tokens.roll(-1), meta.positions, meta)
    assert drafted.shape == states.shape
    assert torch.equal(model.draft_logits(drafted), model.head(drafted))
