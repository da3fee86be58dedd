"""Compares attention layers with transformers': the example of README."""

import torch

from deepseek_attn import LayerSession, ModelConfig, ModelRunner
from deepseek_attn.checkpoint import RandomSource  # or SafetensorsSource("/path/to/checkpoint")
from deepseek_attn.testing.transformers_layer import TransformersLayer

torch.manual_seed(0)
config = ModelConfig.from_preset("tiny")
source = RandomSource(config, seed=0)
for layer in (0, 1, 2):  # SWA, C4A, C128A
    options = {"layers": [layer], "attention_only": True, "device": "cpu", "numerics": "exact"}
    session = LayerSession(ModelRunner.from_source(config, source, **options))
    x, other = torch.randn(2, 300, config.hidden_size)  # normed hidden states of two sequences
    a, b = session.sequence(), session.sequence()
    outputs = [a.run(x[:260])]  # a prompt
    for row, chunk in zip(x[260:].split(1), other.split(7), strict=False):
        y = session.run(torch.cat([chunk, row]), {b: len(chunk), a: 1})  # a decode beside another prompt's chunk
        outputs.append(y[-1:])
    error = (torch.cat(outputs) - TransformersLayer(config, source, layer)(x)).abs().max()
    print(f"{config.layers[layer].kind}: largest difference to transformers {error:.1e}")
