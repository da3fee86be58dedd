"""Index tensors of a step: slots, window indices, compressed entries."""
