"""The fixtures of `deepseek_attn.testing`, as anyone imports them."""

from deepseek_attn.testing.fixtures import random_layer

__all__ = ["random_layer"]
