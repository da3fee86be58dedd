"""DeepSeek-V4.1 end to end: against brute force in float64, in one go and in pieces."""

from __future__ import annotations

import random

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls import DeepseekV4TritonSparseImpl, DeepseekV41TritonSparseImpl
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU, meta_stands_for
from deepseek_attn.models.families import get_family
from deepseek_attn.runner import StepOptions
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.session import LayerSession
from deepseek_attn.testing import poison_caches
from tests.support.small_models import assert_close, assert_same_codes, prompt
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required
from tests.support.v41_cases import TOLERANCE, assert_clear, make_runner, oracle_of, random_schedule, tiny

# Around the window of 8, pairs, index_topk 6 (12 tokens of ratio 2), candidates (12 entries, blocks of 4) and pages.
ONE_LAYER = {
    "num_hidden_layers": 1, "compress_ratios": [0], "kv_source_layer_ids": [], "index_source_layer_ids": [],
    "candidate_source_layer_id": None, "engram_layer_ids": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
LENGTHS = (1, 2, 3, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 63, 64, 65, 100)


class Tiny:
    """The preset with its reference; all lengths scored in one batch, neighbours with different tokens."""

    def __init__(self):
        self.config = tiny()
        self.source = RandomSource(self.config, 0)
        self.runner = make_runner(self.config, self.source, max_num_seqs=len(LENGTHS))
        poison_caches(self.runner)
        self.prompts = [prompt(self.config, 100, seed) for seed in (0, 1)]
        self.references = []
        for tokens in self.prompts:
            oracle = oracle_of(self.config, self.source)
            self.references.append(oracle(tokens).float())
            assert_clear(oracle)
        batch = [self.prompts[i % 2][:length] for i, length in enumerate(LENGTHS)]
        self.scores = dict(zip(LENGTHS, self.runner.score(batch), strict=True))


@pytest.fixture(scope="module")
def model() -> Tiny:
    return Tiny()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_brute_force(model, length):
    which = LENGTHS.index(length) % 2
    assert_close(model.scores[length], model.references[which][:length], TOLERANCE)


@exhaustive_on_cpu
@pytest.mark.parametrize("chunk", tiered([1, 2, 3, 5, 8, 13, 64, 65], [3]))
def test_chunks_equal_brute_force(model, chunk):
    """1: token by token, through the decode path; each ratio-2 pair then spans two steps."""
    prompts = [model.prompts[0][:35], model.prompts[1][:26]]
    for logits, expected in zip(model.runner.score(prompts, chunk), model.references, strict=True):
        assert_close(logits, expected[: len(logits)], TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [{"scoring_func": "softmax"}, {"scoring_func": "sigmoid", "norm_topk_prob": False}, {"num_experts_per_tok": 1}],
    ids=["softmax", "as-scored", "one-expert"],
)
def test_other_routers_equal_brute_force(changes):
    """The weight of a single expert is not divided by itself."""
    config = tiny(**ONE_LAYER, **changes)
    source, tokens = RandomSource(config, 0), prompt(config, 20)
    oracle = oracle_of(config, source)
    expected = oracle(tokens).float()
    assert_clear(oracle)
    assert_close(make_runner(config, source).score([tokens])[0], expected, TOLERANCE)


@exhaustive_on_cpu
@pytest.mark.parametrize("seed", tiered(range(8), [1]))
def test_random_schedules(seed):
    config = tiny(**random_schedule(random.Random(seed)))
    source, tokens = RandomSource(config, seed), prompt(config, 50, seed)
    oracle = oracle_of(config, source)
    expected = oracle(tokens).float()
    assert_clear(oracle)
    runner = make_runner(config, source)
    poison_caches(runner)
    for chunk in (None, 1, 27):
        assert_close(runner.score([tokens], chunk)[0], expected, TOLERANCE)


@pytest.mark.parametrize("seed", tiered(range(3), [1]))
def test_official_numerics_equal_brute_force(seed):
    """With each quantiser of the published program: one of them left out in a layer moves a row by 0.03 or more."""
    config = tiny(num_hidden_layers=7)
    source, tokens = RandomSource(config, seed), prompt(config, 26, seed)
    oracle = oracle_of(config, source, official=True)
    expected = oracle(tokens).float()
    runner = make_runner(config, source, numerics="official")
    assert {pool.record.name for pool in runner.pools if pool.spec.record} == {"fp8_v41", "fp4_v41", "index_fp4"}
    poison_caches(runner)
    for chunk in (None, 7):
        assert_same_codes(runner.score([tokens], chunk)[0], expected, largest=0.01)


def test_serving_numerics():
    """Records of 584 bytes for both caches, FP8 index keys, blocks of 128: near the exact result, equal in pieces.

    In ``deterministic`` steps, since a last bit that products of other sizes round otherwise may change a value in FP8.
    """
    widths = {"hidden_size": 128, "q_lora_rank": 128, "num_attention_heads": 8, "o_lora_rank": 64}
    config = tiny(num_hidden_layers=3, moe_intermediate_size=128, index_topk=64, engram_layer_ids=None, **widths)
    source, tokens = RandomSource(config, 0), prompt(config, 30)
    expected = make_runner(config, source).score([tokens])[0]
    runner = make_runner(config, source, numerics="serving", deterministic=True)
    assert {pool.record.name for pool in runner.pools if pool.spec.record} == {"fp8_v4", "index_fp8"}
    assert runner.model.layers["1"].attn.wq_b.scale.shape == (6, 1)
    logits = runner.score([tokens])[0]
    assert torch.equal(runner.score([tokens], 7)[0], logits)
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-3 < float(error.median()) < 0.25  # experts may differ


def test_persistent_tensors_equal_brute_force(model):
    """Decode steps as CUDA graphs run them, with Engram rows as an input: batches change, some rows are padding."""
    draw, runner = random.Random(5), make_runner(model.config, model.source, max_num_seqs=3)
    runner.decode_query_len = 3
    sizes = runner.whole_model(), runner.layout, runner.device, [1, 3]
    runner.graphs = DecodeGraphs(*sizes, capture=False, engram=runner.tables)
    for rows in required(runner.graphs.step(StepSize(3, 3, 320)).engram).rows.values():
        rows.scales.fill_(0xFF)  # NaN
    poison_caches(runner)
    prompts = [model.prompts[0][:70], model.prompts[1][:66], model.prompts[0][:13]]
    sequences = [runner.sequence(tokens[:-9]) for tokens in prompts]
    everything = StepOptions(all_logits=True)
    got = [list(runner.step([(sequence, sequence.num_pending)], everything).rows) for sequence in sequences]
    for sequence, tokens in zip(sequences, prompts, strict=True):
        sequence.token_ids.extend(tokens[-9:])
    while pending := [i for i, sequence in enumerate(sequences) if sequence.num_pending]:
        chosen = draw.sample(pending, draw.randint(1, len(pending)))
        rows = [(sequences[i], min(draw.randint(1, 3), sequences[i].num_pending)) for i in chosen]
        for i, logits in zip(chosen, runner.step(rows, everything).rows, strict=True):
            got[i].append(logits)
    for parts, tokens, expected in zip(got, prompts, [*model.references, model.references[0]], strict=True):
        assert_close(torch.cat(parts), expected[: len(tokens)], TOLERANCE)
    sequences[0].token_ids.append(5)
    runner.step([(sequences[0], 1)], StepOptions(greedy=True, next_step=((sequences[0], 320),)))
    assert not runner.next_step_launched, "the rows of its token are not known"


@exhaustive_on_cpu
def test_ragged_batches_equal_prompts_alone(model):
    """Chunks of random sizes, in random company, decodes beside prefills."""
    config, draw = model.config, random.Random(3)
    runner = make_runner(config, model.source, max_num_seqs=3)
    poison_caches(runner)
    prompts = [prompt(config, draw.randint(1, 60), 20 + i) for i in range(5)]
    expected = model.runner.score(prompts)
    waiting, running, got = list(range(5)), {}, {i: [] for i in range(5)}
    while waiting or running:
        while waiting and len(running) < 3:
            i = waiting.pop(0)
            running[i] = runner.sequence(prompts[i])
        chosen = draw.sample(sorted(running), draw.randint(1, len(running)))
        batch = [(running[i], draw.choice([1, 1, draw.randint(1, running[i].num_pending)])) for i in chosen]
        for i, rows in zip(chosen, runner.step(batch, StepOptions(all_logits=True)).rows, strict=True):
            got[i].append(rows)
        for i in chosen:
            if not running[i].num_pending:
                running.pop(i).free()
    for i in range(5):
        assert_close(torch.cat(got[i]), expected[i], TOLERANCE, f"prompt {i}")
    assert runner.manager.available_pages() == {group: n - 1 for group, n in runner.layout.pages.items()}


@pytest.mark.parametrize("length", tiered([0, 1, 41, 84, 85, 86, 100], [41, 85]))
def test_truncate_and_fork(model, length):
    """Other tokens after ``length``, in a fork that goes back; the parent goes on as if it were alone."""
    runner = model.runner
    tokens, other = model.prompts[0], prompt(model.config, 100, 7)
    parent = runner.sequence(tokens)
    runner.step([(parent, 98)])
    child = parent.fork()
    child.truncate(min(length, 98))
    for token in other[min(length, 98) :]:
        child.append(token)
    batch = [(child, child.num_pending), (parent, 2)]
    got = runner.step(batch, StepOptions(all_logits=True)).rows
    expected = runner.score([[*tokens[: min(length, 98)], *other[min(length, 98) :]]])[0]
    assert_close(got[0], expected[len(expected) - len(got[0]) :], TOLERANCE)
    assert_close(got[1], model.references[0][98:], TOLERANCE)
    parent.free()
    child.free()


def test_a_layer_refuses_what_other_layers_have_not_computed(model):
    config = model.config
    runner = make_runner(config, model.source, layers=[4, 5, 6, 7], attention_only=True)
    x = torch.randn(20, config.hidden_size)
    for layers, missing in (([5], "[4]"), ([6], "[4]"), ([4, 7], "[6]"), ([4, 6, 5, 7], "[4]"), ([6, 4], "[4]")):
        session = LayerSession(runner, layers)
        sequence = session.sequence()
        with pytest.raises(RuntimeError, match="reads results of layers " + missing.replace("[", r"\[")):
            sequence.run(x if len(layers) == 1 else torch.stack([x] * len(layers)))
        assert sequence.num_tokens == 0
    sequence = LayerSession(runner, [4, 5, 6, 7]).sequence()
    assert sequence.run(torch.stack([x] * 4)).shape == (4, 20, config.hidden_size)


def test_which_impl_reads_official_records():
    """On a GPU Triton's, whatever else runs there; V4's in Triton would not."""
    config = tiny()
    given = config, numerics_for(config, "official"), torch.bfloat16, torch.device("meta")
    with meta_stands_for(GPU((9, 0), 132)):
        chosen = get_family(*given, AttentionOptions())
        assert chosen.impl is DeepseekV41TritonSparseImpl
        assert not chosen.reference_only
        assert "'fp8_fp4'" in DeepseekV4TritonSparseImpl.supported(given[-1], chosen.spec)[1]
        with pytest.raises(ValueError, match="it reads plain and fp8_v4 records, and the KV record"):
            get_family(*given, AttentionOptions("flashmla"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "triton"}, r"backend 'triton'"),
        ({"cuda_graphs": True}, r"take heads of 128 channels, and index_head_dim is 64"),
        ({"layers": [5]}, r"layers=\[5\]: they read entries or selections of layers \[4\]; take layers=\[4, 5\]"),
    ],
)
def test_what_is_not_supported_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_runner(tiny(), **options)
