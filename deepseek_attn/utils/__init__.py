"""Files that appear whole or not at all, devices, processes, tracing, and the workspace."""
