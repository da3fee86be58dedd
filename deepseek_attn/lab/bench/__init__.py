"""Times of ops, attention layers and decode steps."""
