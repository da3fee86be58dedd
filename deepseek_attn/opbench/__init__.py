"""Benchmark rows of the ops: what to run, on which data, and how many bytes and operations it takes at least."""
