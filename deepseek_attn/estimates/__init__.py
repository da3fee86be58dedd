"""Estimates of time: the least a part of a model takes, what was measured of machines, and steps of ranks."""
