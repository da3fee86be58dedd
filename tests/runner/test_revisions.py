"""Checkpoints of V4's revisions: those with a vision part and DSpark stages give the text model's logits."""

import json

import torch

from deepseek_attn.checkpoint import write_checkpoint
from deepseek_attn.checkpoint.loader import DRAFTER, VISION
from deepseek_attn.runner.model_runner import ModelRunner
from tests.checkpoint.fabricate import random_source, tiny

VISION_KEYS = {
    "rms_norm_eps": 1e-20,
    "num_nextn_predict_layers": 3,
    "compress_ratios": [0, 4, 128, 0, 0, 0],
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_max_n_token": 384,
    "vision_max_wh_ratio": 8,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 256,
}
OPTIONS = {"device": "cpu", "max_model_len": 200, "progress": False}


def test_text_of_a_vision_checkpoint(tmp_path):
    config = tiny(rms_norm_eps=1e-20, num_nextn_predict_layers=0, compress_ratios=[0, 4, 128])
    source = random_source(config)
    expected = ModelRunner.from_source(config, source, **OPTIONS).score([[0, *range(20, 150)]])[0]
    vision = ("vision.norm.weight", "vision.blocks.0.norm1.weight", "aligner.w1.bias", "image_pad")
    biases = tuple(f"layers.{i}.ffn.gate.bias_vl" for i in range(3))
    for name in (*vision, *biases):
        source.put(name, "BF16", torch.zeros(4, dtype=torch.bfloat16))
    drafter = ("mtp.0.main_proj.weight", "mtp.1.ffn.gate.bias_vl", "mtp.2.markov_head.markov_w1.weight")
    for name in drafter:
        source.put(name, "BF16", torch.zeros(4, dtype=torch.bfloat16))
    write_checkpoint(source, config, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | VISION_KEYS))
    runner = ModelRunner.from_pretrained(tmp_path / "model", **OPTIONS)
    left_out = {rule: set(names) for rule, names in runner.report.ignored.items()}
    assert left_out == {VISION: {*vision, *biases}, DRAFTER: set(drafter)}
    assert torch.equal(runner.score([[0, *range(20, 150)]])[0], expected)
    assert not runner.has_mtp
