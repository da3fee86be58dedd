"""DeepSeek-V3.2: its attention layer and indexer, and the FlashMLA and FlashInfer sparse backends."""

from deepseek_attn.v32.backends import *  # noqa: F403
from deepseek_attn.v32.backends import __all__ as __all__
