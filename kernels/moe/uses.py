"""Counts of use of experts, which decide what the device keeps: integers, so that they are the same on every device."""

DECAY = 8  # each call takes count >> DECAY off a count: it halves in 177 calls
USE = 4096  # added for each token that chose the expert
MAX_TOKENS = 255  # tokens of a call that count: a count stays below 2**29
