"""Folders and files in other formats: what they are, what is supported and what to do; DeepSeek's converted files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner
from tests.checkpoint.fabricate import tiny
from tests.support import v32_cases, v41_cases
from tests.support.small_models import prompt
from tests.support.tiers import tiered

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SUPPORTED = r"supported are safetensors checkpoints.*load the original checkpoint"


def config_with(**changes) -> str:
    return json.dumps(ModelConfig.from_preset("tiny").to_dict() | changes)


def quantized(**keys) -> str:
    return config_with(quantization_config=keys, expert_dtype=None)


FOLDERS = {
    "gguf": ({"v4-Q4_K_M.gguf": "GGUF"}, r"no config.json.*v4-Q4_K_M.gguf is in another format, GGUF.*" + SUPPORTED),
    "gguf beside a config": ({"a.gguf": "", "config.json": config_with()}, "no safetensors.*a.gguf is in .* GGUF"),
    "bin": (
        {"pytorch_model.bin": "", "config.json": config_with()},
        r"no safetensors checkpoint.*pytorch_model.bin is in another format, PyTorch pickle.*" + SUPPORTED,
    ),
    "onnx": ({"model.onnx": ""}, r"model.onnx is in another format, ONNX"),
    "nvfp4": (
        {"config.json": config_with(), "hf_quant_config.json": "{}"},
        r"quantised by hf_quant_config.json \(NVIDIA ModelOpt, such as NVFP4\).*" + SUPPORTED,
    ),
    "nvfp4 in the config": (
        {"config.json": quantized(quant_method="modelopt", quant_algo="NVFP4")},
        r"quant_method is 'modelopt' with quant_algo 'NVFP4': supported is 'fp8'.*load the original checkpoint",
    ),
    "compressed-tensors": (
        {"config.json": quantized(quant_method="compressed-tensors", format="pack-quantized")},
        r"quant_method is 'compressed-tensors': supported is 'fp8'",
    ),
    "awq": ({"config.json": quantized(quant_method="awq", bits=4)}, "quant_method is 'awq': supported is 'fp8'"),
    "gptq": ({"config.json": quantized(quant_method="gptq", bits=4)}, "quant_method is 'gptq': supported is 'fp8'"),
    "old gptq": ({"config.json": config_with(), "quantize_config.json": "{}"}, r"quantised by quantize_config.*GPTQ"),
    "mlx": ({"config.json": config_with(quantization={"bits": 4})}, r"quantization is .*quantised by MLX"),
    "tokenizer": ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "holds a tokenizer and no weights"),
    "tokenizer and config": (
        {"tokenizer.json": "{}", "config.json": config_with()},
        "holds a tokenizer and no weights",
    ),
    "lora": ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "LoRA adapter, which is not supported"),
    "pointer": ({"config.json": POINTER}, r"config.json\): a Git LFS pointer, .*git lfs pull"),
    "interrupted": (
        {"config.json": config_with(), ".cache/huggingface/download/abc.incomplete": "", "model-00001.aria2": ""},
        r"a download was interrupted \(2 unfinished files\): run it again",
    ),
    "missing shard": (
        {
            "config.json": config_with(),
            "model.safetensors.index.json": json.dumps({"weight_map": {"embed.weight": "a.safetensors"}}),
            ".cache/huggingface/download/a.incomplete": "",
        },
        r"shard .*a.safetensors is missing.*interrupted \(1 unfinished files\)",
    ),
    "two ranks": (
        {"config.json": config_with(), "model0-mp2.safetensors": "", "model1-mp2.safetensors": ""},
        r"output of DeepSeek's convert.py, split for 2 ranks: load the original .* --model-parallel 1",
    ),
    "one rank without a config": (
        {"model0-mp1.safetensors": ""},
        r"output of DeepSeek's convert.py: copy config.json of the original checkpoint here",
    ),
}


@pytest.mark.parametrize(("files", "message"), FOLDERS.values(), ids=FOLDERS)
def test_folders(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        ModelRunner.from_pretrained(tmp_path, device="cpu", progress=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m.gguf", r"is a weight file in the format GGUF.*" + SUPPORTED),
        (
            "m.safetensors",
            "in the format safetensors, not a checkpoint folder; give the folder that holds it and config",
        ),
    ],
)
def test_files(tmp_path, name, message):
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(tmp_path / name)


def test_a_flat_config_of_the_text_part_of_v41():
    raw = ModelConfig.from_preset("tiny_v41").to_dict()
    text = {**raw["text_config"], **{key: raw[key] for key in ("quantization_config", "bos_token_id", "eos_token_id")}}
    assert text["model_type"] == "deepseek_v41_text"
    config = ModelConfig.from_dict(text)
    assert config == ModelConfig.from_dict(raw).replace(pad_token_id=None, image_token_id=None)
    assert ModelConfig.from_dict(config.to_dict()) == config


# DeepSeek's convert.py


def converted_name(name: str, config: AnyConfig) -> str | None:
    """What convert.py calls a tensor of a published checkpoint; None if it leaves it out."""
    if f"model.layers.{config.num_hidden_layers}." in name:
        return None  # V3: the draft layer
    name = name.removeprefix("model.")
    for old, new in (
        ("self_attn", "attn"), ("mlp", "ffn"), ("weight_scale_inv", "scale"), ("e_score_correction_bias", "bias"),
        ("embed_tokens", "embed"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("q_a_proj", "wq_a"), ("q_a_layernorm", "q_norm"), ("q_b_proj", "wq_b"), ("kv_a_proj_with_mqa", "wkv_a"),
        ("kv_a_layernorm", "kv_norm"), ("kv_b_proj", "wkv_b"), ("o_proj", "wo"), ("gate_proj", "w1"),
        ("down_proj", "w2"), ("up_proj", "w3"), ("lm_head", "head"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def convert(folder: Path, out: Path, config: AnyConfig) -> None:
    """One rank's file: tensors renamed, ``wo_a`` in bfloat16, packed FP4 of that type."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            if (new := converted_name(name, config)) is not None:
                tensors[new] = tensor
    for name in [name for name in tensors if name.endswith("wo_a.weight")]:
        weight, scale = tensors[name], tensors.pop(name.replace("weight", "scale"))
        rows, columns = (-(-size // parts) for size, parts in zip(weight.shape, scale.shape, strict=True))
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        tensors[name] = (weight.float() * spread[: len(weight), : weight.shape[1]]).bfloat16()
    for name, tensor in tensors.items():
        if ".experts." in name and tensor.dtype == torch.int8:
            tensors[name] = tensor.view(torch.float4_e2m1fn_x2)
    out.mkdir()
    save_file(tensors, out / "model0-mp1.safetensors")
    for file in ("config.json", "tokenizer.json"):  # the config is copied by its user
        if (folder / file).exists():
            (out / file).write_bytes((folder / file).read_bytes())


CONVERTED = [tiny(), v41_cases.tiny(engram_layer_ids=None), v32_cases.small(num_nextn_predict_layers=1, vocab_size=300)]


@pytest.mark.parametrize(
    "config",
    tiered(CONVERTED, CONVERTED[1:2], quick_on_gpu=CONVERTED),
    ids=["v4", "v41", "v32"],
)
def test_a_converted_checkpoint_of_one_rank(config, tmp_path):
    published = write_checkpoint(RandomSource(config, 2), config, tmp_path / "published", num_shards=2)
    convert(published, tmp_path / "converted", config)
    options = {"device": "cpu", "max_model_len": 64, "progress": False}
    runner = ModelRunner.from_pretrained(tmp_path / "converted", **options)
    tokens = prompt(config, 50)
    expected = ModelRunner.from_pretrained(published, **options).score([tokens])[0]
    assert torch.equal(runner.score([tokens])[0], expected)
    assert runner.has_mtp == (config.model_type != "deepseek_v32")
    with SafetensorsSource(tmp_path / "converted") as source:
        assert "layers.0.attn.wq_a.weight" in source.entries()
