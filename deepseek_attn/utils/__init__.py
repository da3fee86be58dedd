"""Files that appear whole or not at all, JSON, downloads from the hub, devices, processes, tracing, the workspace."""
