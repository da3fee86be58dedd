"""Sparse attention over pages and over gathered rows, and the gather itself."""
