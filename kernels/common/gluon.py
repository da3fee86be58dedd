"""Gluon functions whose names differ between Triton 3.6 and later versions."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_memory = gl.shared_memory_descriptor

arrive_alone = async_copy.mbarrier_arrive  # each thread for itself: `mbarrier.arrive` has a barrier of all before it
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # (memory, dtype, shape, layout)
