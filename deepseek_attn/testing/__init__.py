"""Tools to test attention layers: random layers over poisoned caches, a readable reference, errors and tolerances.

    from deepseek_attn.testing import RandomLayer
    layer = RandomLayer("tiny", 1)
    request = layer.request(150)  # random hidden states of 150 tokens
    layer.run([request], [100, 1, 7])  # in steps of 100, 1, 7, 7, ... tokens
    layer.check(request)  # every query against float64, without any cache

`fixtures` has pytest fixtures for the same, and `transformers_layer` the layers of transformers. ``python -m
deepseek_attn.testing`` compares the library with transformers on this machine.
"""

from deepseek_attn.testing.errors import relative_error, tolerance
from deepseek_attn.testing.random_layer import LayerRequest, RandomLayer, poison_caches, poison_scratch
from deepseek_attn.testing.reference import LayerReference, layer_reference

__all__ = [
    "LayerReference",
    "LayerRequest",
    "RandomLayer",
    "layer_reference",
    "poison_caches",
    "poison_scratch",
    "relative_error",
    "tolerance",
]
