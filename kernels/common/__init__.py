"""Code that kernel families share: choice of implementation, device primitives, quantisation."""
