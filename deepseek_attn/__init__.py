"""A standalone DeepSeek model runner with layer-driven sparse attention.

    from deepseek_attn import LLM, SamplingParams
    llm = LLM("path/to/checkpoint")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32))[0].text)

Names are imported when they are first used, so that importing the package needs neither a GPU nor its libraries.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from deepseek_attn.utils.garbage import without_collections
from deepseek_attn.utils.version import __version__

if TYPE_CHECKING:
    from deepseek_attn.config.model import LayerSpec, ModelConfig
    from deepseek_attn.engine.engine import Engine
    from deepseek_attn.engine.llm import LLM
    from deepseek_attn.engine.sampling import SamplingParams
    from deepseek_attn.lab.inspect.inspection import inspect_attention
    from deepseek_attn.runner.model_runner import ModelRunner
    from deepseek_attn.runner.session import LayerSession

_HOMES = {
    "ModelConfig": "deepseek_attn.config.model",
    "LayerSpec": "deepseek_attn.config.model",
    "ModelRunner": "deepseek_attn.runner.model_runner",
    "LayerSession": "deepseek_attn.runner.session",
    "LLM": "deepseek_attn.engine.llm",
    "Engine": "deepseek_attn.engine.engine",
    "SamplingParams": "deepseek_attn.engine.sampling",
    "inspect_attention": "deepseek_attn.lab.inspect.inspection",
}
__all__ = [
    "LLM",
    "Engine",
    "LayerSession",
    "LayerSpec",
    "ModelConfig",
    "ModelRunner",
    "SamplingParams",
    "__version__",
    "inspect_attention",
]
logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is shown is the application's choice


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_collections():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
