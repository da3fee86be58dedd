"""DeepSeek-V4's attention layer, its compressor and indexer, and the metadata of a step."""

from deepseek_attn.attention.layer import DeepseekV4MLAAttention

__all__ = ["DeepseekV4MLAAttention"]
