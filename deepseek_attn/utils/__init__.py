"""Files that appear whole or not at all, devices, tracing, and the workspace."""
