"""Linear layers over plain, FP8-block and packed-FP4 weights."""
