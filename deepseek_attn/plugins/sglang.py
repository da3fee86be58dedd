"""SGLang's sparse attention over this library's kernels: an entry point of ``sglang.srt.plugins``."""

from __future__ import annotations

from deepseek_attn.plugins.engine_plugin import FUNCTIONS, EnginePlugin

PLUGIN = EnginePlugin("SGLang", "sglang", "DEEPSEEK_ATTN_SGLANG", ("0.5.23",))
HOME = "sglang.kernels.ops.attention.flash_mla_interface"
"""The module from which SGLang's attention backends import FlashMLA's functions."""
REGISTRY = "sglang.srt.plugins.hook_registry"


def register() -> None:
    """Replaces SGLang's FlashMLA functions if ``DEEPSEEK_ATTN_SGLANG`` is 1; SGLang calls it in each of its processes.

    Raises:
        SystemExit: the variable is 1 and the plugin does not support this version of SGLang. SGLang only logs other
            exceptions of a plugin and continues without it.
    """
    try:
        if PLUGIN.asked_for():
            _replace()
    except RuntimeError as error:
        raise SystemExit(str(error)) from error


def _replace() -> None:
    """Registers hooks that SGLang applies when all plugins are loaded."""
    from deepseek_attn import flash_mla_api
    from deepseek_attn.plugins import sglang_functions

    version = PLUGIN.check_version()
    registry, replace = PLUGIN.find(REGISTRY, "HookRegistry"), PLUGIN.find(REGISTRY, "HookType").REPLACE
    for name in FUNCTIONS:
        PLUGIN.check_signature(HOME, name, getattr(flash_mla_api, name))
    for name in FUNCTIONS:
        registry.register(f"{HOME}.{name}", getattr(sglang_functions, name), replace)
    PLUGIN.announce(version)
