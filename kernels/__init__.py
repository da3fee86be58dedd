"""Ops of the library: for each one a pure-torch reference in the family's ``reference.py``, of the same name.

This file imports nothing: transformers imports any package called ``kernels`` that it finds on ``sys.path``.
"""
