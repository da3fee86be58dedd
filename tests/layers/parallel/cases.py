"""What the ranks of the tests compute, and what one process computes for comparison."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.split import EXPERT_CHANNELS
from deepseek_attn.layers.weights import Shard
from deepseek_attn.runner.graph_steps import DecodeStep, StepSize
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions
from tests.support.drafts import DraftedSource, draft_after
from tests.support.held_experts import held
from tests.support.small_models import small_config
from tests.support.typed import required

WIDTHS = {"num_attention_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 512}
OWN = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)  # of `own_requests`
LIMITS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "progress": False, "device": "cpu"}


def v4_config() -> ModelConfig:
    """Two ranks divide the width of its experts; four ranks, and those of the other families, the experts."""
    widths = WIDTHS | {"moe_intermediate_size": 2 * EXPERT_CHANNELS}
    return small_config(
        [0, 4, 128], mtp=1, o_groups=4, o_lora_rank=128, num_experts_per_tok=3, vocab_size=320, **widths
    )


def v32_config():
    widths = {"qk_nope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    return ModelConfig.from_preset("tiny_v32").replace(**WIDTHS | {"num_attention_heads": 8} | widths)


def v41_config():
    """Five FP8 blocks of the shared expert: ranks have different numbers of them."""
    return ModelConfig.from_preset("tiny_v41").replace(o_groups=4, moe_intermediate_size=160)


CONFIGS = {"v4": v4_config, "v32": v32_config, "v41": v41_config}
CHECKPOINTS = ("v4", "v41")
DATA_PARALLEL = {2: "v4", 4: "v41"}  # family whose attention is data-parallel over that many ranks


def prompts(config, lengths=(140, 9, 33)) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(2, config.vocab_size) for _ in range(length)] for length in lengths]


class CountingSource(SafetensorsSource):
    """Counts the bytes that are copied out of the mapped files."""

    total = 0

    def read(self, name: str) -> torch.Tensor:
        return self._counted(super().read(name))

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        return self._counted(super().read_part(name, index, count))

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        return self._counted(super().read_shard(name, shard))

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.total += tensor.untyped_storage().nbytes()
        return tensor


def scores(family: str, parallel: Parallel) -> dict:
    """Logits of backbone and drafter, of prompts together and token by token, records of a prompt and their replay."""
    config = CONFIGS[family]()
    runner = ModelRunner.from_source(config, RandomSource(config, 3), parallel=parallel, numerics="exact", **LIMITS)
    texts = prompts(config)
    if config.dspark is None:
        logits, drafts = runner.score_mtp(texts)
    else:
        logits, drafts = runner.score(texts), [draft_after(runner, texts[1], [5, 4], newest=11).logits]
    steps = runner.score([texts[1]], chunk_size=1)
    logprobs = [text.to_dict() for text in runner.score_logprobs(texts, top=2)]
    whole = runner.sequence(texts[0])
    steps += [runner.step([(whole, n)], StepOptions(ends=(140,))).rows[0] for n in (110, 30)]  # V4.1: of trailing rows
    recorded, [records] = runner.score_records(texts[2:], runner.record_options(routes=True, selections=True))
    replayed = runner.score(texts[2:], replay=[records])
    entries = RandomSource(config, 3).entries().items()
    one = sum(info.nbytes for name, info in entries if ".experts.0." in name)
    read = {"expert_memory": "disk", "expert_cache_bytes": one}
    from_disk = ModelRunner.from_source(
        config, RandomSource(config, 3), parallel=parallel, numerics="exact", **LIMITS | read
    )
    files, disk = from_disk.expert_files, from_disk.score([texts[1]], chunk_size=1)
    arrays = required(records).arrays | {"difference": (replayed[0] - recorded[0]).abs().max()}
    experts = {"disk": disk, "experts": (required(files).slots, required(files).experts)}
    with held(runner, 1) as rows:
        experts |= {"host": runner.score([texts[1]], chunk_size=1), "guesses": (rows.stats.ahead, rows.stats.dropped)}
    return {"logits": logits, "drafts": drafts, "steps": steps, "records": arrays, "logprobs": logprobs} | experts


def serving_logits(parallel: Parallel) -> list[torch.Tensor]:
    config = v4_config()
    source, numerics = RandomSource(config, 3), "serving"
    runner = ModelRunner.from_source(config, source, parallel=parallel, numerics=numerics, **LIMITS)
    return runner.score(prompts(config))


def texts_of(directory: Path, parallel: Parallel) -> dict:
    """Tokens generated from a checkpoint: greedy, speculated, and (of a fast model) seeded and with fresh seeds."""
    llm = LLM(directory, parallel=parallel, **LIMITS)
    texts = prompts(llm.runner.config, (70, 9))

    def tokens(model, **options) -> list[list[int]]:
        params = SamplingParams(max_tokens=4, ignore_eos=True, **options)
        return [list(done.token_ids) for done in model.generate(texts, params)]

    asked = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0, logprobs=1, prompt_logprobs=0)
    greedy = llm.generate(texts, asked)
    logprobs = [(required(done.logprobs).to_dict(), required(done.prompt_logprobs).to_dict()) for done in greedy]
    speculating = LLM(directory, parallel=parallel, speculate=2, **LIMITS)
    found = {"logprobs": logprobs, "greedy": [list(done.token_ids) for done in greedy]}
    found["speculated"] = tokens(speculating, temperature=0)
    if llm.runner.tables is None:
        found |= {"seeded": tokens(llm, seed=7), "fresh": tokens(llm)}
    return found | {"accepted": speculating.engine.stats.accepted}


def loads(directory: Path, parallel: Parallel) -> dict:
    """What was read of a checkpoint, and by which rule the rest was not."""
    config = ModelConfig.from_pretrained(directory)
    with CountingSource(directory) as source:
        report = ModelRunner.from_source(config, source, parallel=parallel, **LIMITS).report
    return {"bytes": report.bytes, "read": source.total, "loaded": report.loaded, "ignored": report.ignored}


class CountedGraphs(DecodeGraphs):
    """Notes the size of each step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sizes: list[StepSize] = []

    def step(self, size: StepSize) -> DecodeStep:
        self.sizes.append(size)
        return super().step(size)


def own_requests(directory: Path, parallel: Parallel) -> dict:
    """With data-parallel attention: rank r has r requests in a first call, and as many fewer in a second one.

    That with eager steps, then with decode steps of a common size over persistent tensors, as graphs hold them.
    """
    llm = LLM(directory, parallel=parallel, **LIMITS)
    texts = prompts(llm.runner.config, range(20, 20 + 13 * parallel.world, 13))
    found = []
    runner = llm.runner
    common = CountedGraphs(runner.model, runner.layout, runner.device, capture=False, engram=runner.tables)
    for graphs in (None, common):
        llm.runner.graphs = graphs
        for own in (texts[: parallel.rank], texts[parallel.rank :][:2]):
            found.append([list(done.token_ids) for done in llm.generate(own, OWN)])
    scored = llm.runner.score(texts[:1] if parallel.rank == 1 else [])
    logprobs = llm.runner.score_logprobs(texts[:1] if parallel.rank == 1 else [])
    runner.graphs = common  # which a rank that records keeps the others from using
    own = texts[: parallel.rank]
    recorded = llm.generate(own, OWN, return_routes=True, return_selections=True)
    return {
        "records": [required(done.records).arrays for done in recorded],
        "logprobs": [text.to_dict() for text in logprobs],
        "texts": found,
        "scored": scored,
        "mtp": llm.runner.has_mtp,
        "steps": [tuple(size) for size in common.sizes],
    }


def write_checkpoints(directory: Path) -> Path:
    """A checkpoint of each family in `CHECKPOINTS`, in a folder of its name."""
    v4, v41 = v4_config(), v41_config()
    write_checkpoint(RandomSource(v4, 4), v4, directory / "v4")
    write_checkpoint(DraftedSource(v41, 4), v41, directory / "v41")
    return directory


def everything(directory: Path, parallel: Parallel) -> dict:
    """What is computed with tensor-parallel attention, by name."""
    found: dict[str, Any] = {family: scores(family, parallel) for family in CONFIGS}
    found["serving"] = serving_logits(parallel)
    for what in (texts_of, loads):
        found[what.__name__] = {family: what(directory / family, parallel) for family in CHECKPOINTS}
    return found


def run_rank(rank: int, world: int, ports: tuple[int, int], checkpoints: Path, results: Path) -> None:
    """A rank started by the tests: computes `everything`, then `own_requests`, and writes both to ``results``.

    Args:
        ports: where the ranks meet, and where they meet again for data-parallel attention.
    """
    from deepseek_attn.layers.parallel import launched

    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    with launched(world, "cpu", timeout_seconds=900) as (parallel, _):
        found = everything(checkpoints, parallel)
    os.environ["MASTER_PORT"] = str(ports[1])
    with launched(world, "cpu", True, timeout_seconds=900) as (parallel, _):
        found["own_requests"] = own_requests(checkpoints / DATA_PARALLEL[world], parallel)
        torch.save(found, results / f"{parallel.rank}.pt")
