"""Estimates of time: lower bounds of a model's parts, measured rates of machines, and steps of ranks."""
