"""Norm, RoPE and cache writes of new tokens, and the compressor."""
