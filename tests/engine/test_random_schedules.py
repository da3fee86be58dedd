"""Engines over random schedules of odd sizes: each text and its log-probabilities are those of brute force in float64.

Requests share beginnings of every length, prompts are read in small chunks, drafts are verified, and running requests
lose their caches. The oracle knows none of this: it computes each finished text as a whole.
"""

from __future__ import annotations

import random

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from tests.engine.workload import check_pages, leaked
from tests.support.oracle_dense import DenseOracle
from tests.support.small_models import NEAR_TIE, prompt, small_config, small_runner
from tests.support.typed import required

LENGTH = 150
LOGPROB = 1e-3  # largest error of a log-probability; 2e-5 is seen


def random_config(seed: int) -> ModelConfig:
    """Two layers with any overlap and indexer, an MTP layer, odd numbers of heads, and any window.

    Of even seeds ratios are powers of two; of odd ones they are odd, so that windows are open where prefixes are kept.
    """
    draw = random.Random(seed)
    odd = [draw.choice([0, 3, 5, 7]), draw.choice([3, 5, 7])]
    ratios = odd if seed % 2 else [draw.choice([0, 1, 2, 16]), draw.choice([2, 4, 8])]
    groups = draw.choice([1, 3])
    return small_config(
        ratios, mtp=1, quantization_config=None,
        compress_overlap=[bool(ratio) and draw.random() < 0.5 for ratio in ratios],
        compress_indexer=[bool(ratio) and draw.random() < 0.5 for ratio in ratios],
        vocab_size=61, hidden_size=40, q_lora_rank=24, head_dim=24, qk_rope_head_dim=16, o_groups=groups,
        num_attention_heads=groups * draw.choice([1, 3]), o_lora_rank=4, index_n_heads=3, index_head_dim=16,
        index_topk=draw.choice([1, 3, 100]), sliding_window=draw.choice([1, 2, 5, 11, 23]), moe_intermediate_size=8,
        n_routed_experts=3, hc_mult=draw.choice([1, 2, 3]), num_hash_layers=draw.choice([0, 1]),
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*one entry per token")
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_texts_equal_brute_force(seed):
    config, draw = random_config(seed), random.Random(seed)
    source = RandomSource(config, seed)
    sizes = {"max_model_len": LENGTH + 8, "max_num_seqs": 3, "max_num_batched_tokens": draw.choice([7, 16, 33])}
    runner = small_runner(config, source, **sizes, max_snapshots=draw.choice([2, 6]), max_rollback=draw.choice([4, 9]))
    engine = Engine(runner, decoder=MTPSpeculation(runner, 2))
    tokens, requests = prompt(config, LENGTH, seed), []
    for length in draw.sample(range(1, LENGTH), 14):
        params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 7), ignore_eos=True, logprobs=0)
        requests.append(engine.add_request([*tokens[:length], draw.randrange(2, 61)], params))
        for _ in range(draw.randint(0, 2)):
            advance(engine, draw)
    while engine.has_unfinished:
        advance(engine, draw)
    assert engine.stats.cached_tokens > 0
    assert engine.stats.drafted > 0
    assert sum(request.preemptions for request in requests) > 2
    checked, oracle = 0, DenseOracle(config, source)
    for request in requests[::4]:
        text, first = request.sequence.token_ids, request.prompt_length
        reference = oracle(text)
        if min(reference.router_gap, reference.index_gap) <= NEAR_TIE:
            continue
        rows = required(reference.logits)[first - 1 : -1].log_softmax(1)
        chosen = rows.gather(1, torch.tensor(text[first:])[:, None])[:, 0]
        found = torch.tensor(required(request.completion().logprobs).logprobs.tolist(), dtype=torch.float64)
        assert (found - chosen).abs().max() <= LOGPROB
        assert (rows.amax(1) - chosen).max() <= LOGPROB
        checked += 1
    assert checked >= 2
    assert not leaked(engine)


def advance(engine: Engine, draw: random.Random) -> None:
    """One step; now and then a running request loses its caches after it."""
    engine.step()
    check_pages(engine)
    if engine.scheduler.running and draw.random() < 0.15:
        engine.scheduler.preempt(draw.choice(engine.scheduler.running), engine.last_step)
