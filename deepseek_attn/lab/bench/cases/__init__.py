"""Rows of ``deepseek-attn bench op``: one module per kernel family."""
