"""Importing this lets kernels use Gluon's names of Triton 3.6 with later versions, which renamed some."""

from triton.experimental.gluon import language as gl

if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
    gl.shared_memory_descriptor._reinterpret = gl.shared_memory_descriptor.reinterpret
