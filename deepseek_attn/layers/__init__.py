"""Modules that own weights, and the ranks that share them."""
