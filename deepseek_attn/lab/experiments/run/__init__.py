"""Runs the units of an experiment in worker processes and records their results."""
