"""What the ranks of the tests compute, and what one process computes for comparison."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.weights import Shard
from deepseek_attn.runner.graph_steps import DecodeStep, StepSize
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.small_models import small_config

WIDTHS = {"num_attention_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 512}
LIMITS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "progress": False, "device": "cpu"}


def v4_config() -> ModelConfig:
    return small_config(
        [0, 4, 128], mtp=1, o_groups=4, o_lora_rank=128, num_experts_per_tok=3, vocab_size=320, **WIDTHS
    )


def v32_config():
    widths = {"qk_nope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    return ModelConfig.from_preset("tiny_v32").replace(**WIDTHS | {"num_attention_heads": 8} | widths)


CONFIGS = {"v4": v4_config, "v32": v32_config}


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


def scores(family: str, parallel: Parallel, numerics: str = "exact") -> dict:
    """Logits of backbone and MTP layer, of prompts together and token by token."""
    config = CONFIGS[family]()
    runner = ModelRunner.from_source(config, RandomSource(config, 3), parallel=parallel, numerics=numerics, **LIMITS)
    texts = prompts(config)
    logits, drafts = runner.score_mtp(texts)
    steps = runner.score([texts[1]], chunk_size=1)
    return {"logits": logits, "drafts": drafts, "steps": steps}


def texts_of(directory: Path, parallel: Parallel) -> dict:
    """Tokens generated from a checkpoint: greedy, seeded, with fresh seeds, and speculated."""
    llm = LLM(directory, parallel=parallel, **LIMITS)
    texts = prompts(llm.runner.config, (70, 9))

    def tokens(model, **options) -> list[list[int]]:
        params = SamplingParams(max_tokens=8, ignore_eos=True, **options)
        return [list(done.token_ids) for done in model.generate(texts, params)]

    speculating = LLM(directory, parallel=parallel, speculate=2, **LIMITS)
    return {
        "greedy": tokens(llm, temperature=0),
        "seeded": tokens(llm, seed=7),
        "fresh": tokens(llm),
        "speculated": tokens(speculating, temperature=0),
    }


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
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    found = []
    common = CountedGraphs(llm.runner.model, llm.runner.layout, llm.runner.device, capture=False)
    for graphs in (None, common):
        llm.runner.graphs = graphs
        for own in (texts[: parallel.rank], texts[parallel.rank :][:2]):
            found.append([list(done.token_ids) for done in llm.generate(own, params)])
    scored = llm.runner.score(texts[:1] if parallel.rank == 1 else [])
    return {
        "texts": found,
        "scored": scored,
        "mtp": llm.runner.has_mtp,
        "steps": [tuple(size) for size in common.sizes],
    }


def everything(directory: Path, parallel: Parallel) -> dict:
    """All of it, by name."""
    if parallel.dp_attention:
        return {"own": own_requests(directory, parallel)}
    found = {family: scores(family, parallel) for family in CONFIGS}
    found["serving"] = scores("v4", parallel, "serving")
    return found | {"texts": texts_of(directory, parallel), "loads": loads(directory, parallel)}


def main(world: int, dp_attention: bool, directory: str, results: str) -> None:
    """A rank started by the tests (or torchrun): computes everything and writes it to ``results``."""
    from deepseek_attn.layers.parallel import launched

    with launched(world, "cpu", dp_attention, timeout_seconds=900) as (parallel, _):
        torch.save(everything(Path(directory), parallel), Path(results) / f"{parallel.rank}.pt")


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), sys.argv[2] == "dp", sys.argv[3], sys.argv[4])
