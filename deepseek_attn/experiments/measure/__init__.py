"""What a unit of an experiment measures: bytes, times, recall and text loss."""
