"""Files that come with the library: a trained checkpoint and the text that it was trained on (docs/training.md)."""

from pathlib import Path

SMALL_CHECKPOINT = Path(__file__).parent / "small"  # a 6-layer DeepSeek-V4 in the published format
