"""Tests of compress-ratio experiments."""
