"""The public names of the laboratory's `training`: ``from deepseek_attn.training import train``."""

from deepseek_attn.lab.training import *  # noqa: F403
from deepseek_attn.lab.training import __all__ as __all__
