"""Utilities: atomic output files, JSON, downloads from the hub, devices, processes, tracing, the workspace."""
