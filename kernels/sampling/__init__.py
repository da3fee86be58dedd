"""Greedy tokens from logits."""
