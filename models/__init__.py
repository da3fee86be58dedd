"""Models as diagrams. This file imports nothing, so that finding it on ``sys.path`` has no effect."""
