"""Counts of use of experts, which decide what the device keeps: integers, so that they are the same on every device.

The decay trades routings that stay against routings that change. Simulated with 99 of 256 experts cached, one token a
step and Zipf's law, counts that halve in 11, 44, 177 and 709 calls hit 0.77, 0.78, 0.81 and 0.81 of the uses;
with a new order of the experts every 100 steps 0.74, 0.70, 0.67 and 0.67, every 30 steps 0.65, 0.64, 0.57 and 0.56.
"""

DECAY = 6  # each call takes count >> DECAY off a count: it halves in 44 calls
USE = 4096  # added for each token that chose the expert
MAX_TOKENS = 255  # tokens of a call that count: a count stays below 2**27
