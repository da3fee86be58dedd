"""Routing, routed experts and SwiGLU."""
