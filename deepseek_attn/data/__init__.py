"""Files that come with the library: a trained checkpoint and the text that it was trained on (docs/training.md)."""
