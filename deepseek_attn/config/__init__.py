"""Model configs of all families, compress-ratio schedules, numerics and run options."""

from deepseek_attn.config.common import RopeSpec
from deepseek_attn.config.model import AnyConfig, LayerSpec, ModelConfig, preset_names
from deepseek_attn.config.numerics import Numerics, get_numerics, numerics_for
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.config.v41 import DeepseekV41Config, V41LayerSpec

__all__ = [
    "AnyConfig",
    "DeepseekV32Config",
    "DeepseekV41Config",
    "LayerSpec",
    "ModelConfig",
    "Numerics",
    "RopeSpec",
    "V32LayerSpec",
    "V41LayerSpec",
    "get_numerics",
    "numerics_for",
    "preset_names",
]
