"""Measurements of the units of an experiment: bytes, times, recall and text loss."""
