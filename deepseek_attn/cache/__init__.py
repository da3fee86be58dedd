"""Caches: byte layouts of one entry (``records``), paged storage and the state that compressors keep."""
