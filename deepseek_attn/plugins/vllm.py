"""vLLM's sparse attention over this library's kernels: an entry point of ``vllm.general_plugins``."""

from __future__ import annotations

import sys

from deepseek_attn.plugins.engine_plugin import FUNCTIONS, EnginePlugin

PLUGIN = EnginePlugin("vLLM", "vllm", "DEEPSEEK_ATTN_VLLM", ("0.32", "0.33"))
HOME = "vllm.v1.attention.ops.flashmla"
"""The module from which vLLM's attention backends and models import FlashMLA's functions."""


def register() -> None:
    """Replaces vLLM's FlashMLA functions if ``DEEPSEEK_ATTN_VLLM`` is 1; vLLM calls it in each of its processes.

    Raises:
        RuntimeError: the variable is 1, and the plugin does not support this version of vLLM, or vLLM runs in its
            batch-invariant mode. vLLM does not start then.
    """
    if not PLUGIN.asked_for():
        return
    from deepseek_attn import flash_mla_api

    version = PLUGIN.check_version()
    if PLUGIN.find("vllm.envs", "VLLM_BATCH_INVARIANT"):
        raise PLUGIN.error("its results depend on the batch, and VLLM_BATCH_INVARIANT is set")
    ours = {name: getattr(flash_mla_api, name) for name in FUNCTIONS}
    theirs = {name: PLUGIN.find(HOME, name) for name in FUNCTIONS}
    for name in FUNCTIONS:
        PLUGIN.check_signature(HOME, name, ours[name])
    for module in list(sys.modules.values()):  # HOME, and modules that have imported from it
        for name in FUNCTIONS:
            if getattr(module, "__dict__", {}).get(name) is theirs[name]:
                setattr(module, name, ours[name])
    PLUGIN.announce(version)
