"""Kernels compiled before they are launched: all that this package knows of Triton's launches and caches is here."""
