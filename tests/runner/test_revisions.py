"""Checkpoints of V4's revisions: those with a vision part and DSpark stages give the text model's logits."""

import json

import torch

from deepseek_attn.checkpoint import write_checkpoint
from deepseek_attn.checkpoint.selection import CONFIDENCE, VISION
from deepseek_attn.runner.model_runner import ModelRunner
from tests.checkpoint.fabricate import random_source, tiny

DSPARK_KEYS = {
    "num_nextn_predict_layers": 1,  # as 0731 and 0813 say, with three stages
    "compress_ratios": [0, 4, 128, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 16,
}
VISION_KEYS = {"vision_n_layers": 32, "vision_dim": 1024, "vision_max_n_token": 384, "vision_max_wh_ratio": 8}
OPTIONS = {"device": "cpu", "max_model_len": 200, "progress": False}


def test_text_of_a_vision_checkpoint(tmp_path):
    config = tiny(rms_norm_eps=1e-20, **DSPARK_KEYS)
    source, plain = random_source(config), config.replace(dspark_block_size=0)
    expected = ModelRunner.from_source(plain, random_source(plain), **OPTIONS).score([[0, *range(20, 150)]])[0]
    vision = (
        *("vision.norm.weight", "vision.blocks.0.norm1.weight", "aligner.w1.bias", "image_pad"),
        *(f"{layer.name}.ffn.gate.bias_vl" for layer in config.all_layers),
    )
    confidence = "mtp.2.confidence_head.proj.weight"
    for name in (*vision, confidence):
        source.put(name, "BF16", torch.zeros(4, dtype=torch.bfloat16))
    write_checkpoint(source, config, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | VISION_KEYS))
    runner = ModelRunner.from_pretrained(tmp_path / "model", **OPTIONS)
    left_out = {rule: set(names) for rule, names in runner.report.ignored.items()}
    assert left_out == {VISION: set(vision), CONFIDENCE: {confidence}}
    assert torch.equal(runner.score([[0, *range(20, 150)]])[0], expected)
    assert len(runner.mtp_layers) == 3
