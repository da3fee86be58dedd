"""vLLM's config classes, models and weight loader over crops: ``scripts/vllm_reads.py`` where vLLM can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.crop import crop_checkpoint
from deepseek_attn.config.model import AnyConfig, ModelConfig

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: the head of scripts/vllm_reads.py says how"),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_reads.py"
SMALLER = {"vocab_size": 1024, "hidden_size": 1024, "num_attention_heads": 16, "q_lora_rank": 256, "index_n_heads": 16,
    "n_routed_experts": 16, "moe_intermediate_size": 256}  # fmt: skip
OUTPUT = {"o_groups": 4, "o_lora_rank": 256}


def config_of(family: str) -> AnyConfig:
    """The published widths of heads, which vLLM's layers check, and as little else as they take."""
    if family == "v4":
        ratios = [0, 0, 4, 128, 4, 0]
        return ModelConfig.from_pretrained("v4_flash").replace(
            num_hidden_layers=5, compress_ratios=ratios, **SMALLER, **OUTPUT
        )
    if family == "v32":
        return ModelConfig.from_pretrained("v32").replace(
            num_hidden_layers=4, first_k_dense_replace=1, intermediate_size=512, num_key_value_heads=16, n_group=4,
            topk_group=2, **SMALLER,
        )  # fmt: skip
    return ModelConfig.from_pretrained("tiny_v41").replace(
        head_dim=512, qk_rope_head_dim=64, sliding_window=128, index_head_dim=128, index_topk=64,
        candidate_topk_blocks=64, engram_head_dim=256, engram_compressed_vocab_size=241, dspark_n_routed_experts=8,
        **SMALLER, **OUTPUT,
    )  # fmt: skip


CROPS = {"v4": {"layers": [0, 2, 3, 4]}, "v32": {"layers": [0, 2, 3]}, "v41": {}}


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crops")
    for family, options in CROPS.items():
        config = config_of(family)
        whole = write_checkpoint(RandomSource(config, seed=1), config, folder / f"whole_{family}")
        crop_checkpoint(whole, folder / family, experts=8, **options)
    return folder


def read(*folders: Path) -> tuple[int, list[dict]]:
    run = subprocess.run([sys.executable, SCRIPT, *folders], capture_output=True, text=True, timeout=570, check=False)
    return run.returncode, json.loads(run.stdout.splitlines()[-1])["rows"]


def test_every_tensor_reaches_a_parameter(crops):
    status, rows = read(*(crops / family for family in CROPS))
    assert [row.get("error") for row in rows] == [None] * 6
    assert status == 0
    for family in CROPS:
        written = json.loads((crops / family / "model.safetensors.index.json").read_text())["weight_map"]
        of_model = [row["tensors"] for row in rows if row["checkpoint"].endswith(f"/{family}")]
        assert sum(of_model) == len(written)


def test_a_tensor_that_is_not_there_is_missed(crops):
    path = next((crops / "v4").glob("*.safetensors"))
    tensors = load_file(path)
    removed = tensors.pop("layers.1.attn.wq_b.weight")
    assert removed.numel()
    save_file(tensors, path)
    status, rows = read(crops / "v4")
    assert status == 1
    assert "layers.1.attn.wq_b.weight" in rows[0]["error"]
