"""Computes the keys of kernels when imported: once for the processes that are forked by `compile_all`."""

from deepseek_attn.runner.ahead.recording import prepare_keys

prepare_keys().join()
