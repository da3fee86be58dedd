"""The public names of the laboratory's `inspect`: ``from deepseek_attn.inspect import inspect_attention``."""

from deepseek_attn.lab.inspect import *  # noqa: F403
from deepseek_attn.lab.inspect import __all__ as __all__
