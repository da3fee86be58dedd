"""DeepSeek-V4.1's attention layer (CSA2): layers that share compressed entries, index keys and a selection."""

from deepseek_attn.v41.attention import DeepseekV41MLAAttention

__all__ = ["DeepseekV41MLAAttention"]
