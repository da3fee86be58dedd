"""Model configs of all families, compress-ratio schedules, numerics and run options."""

from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig

__all__ = ["AnyConfig", "LayerSpec", "ModelConfig"]
