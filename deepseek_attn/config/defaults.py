"""Defaults that the Python interface and the command line share; importing them needs nothing."""

DEFAULT_MAX_MODEL_LEN = 32768  # upper bound; a model's own limit may be lower
DEFAULT_MAX_ROLLBACK = 16  # tokens that a sequence can roll back in place
DEFAULT_MAX_TOKENS = 256  # new tokens per request
DEFAULT_TOP_READS = 12  # recorded weights of a kind per query, layer and head of an inspection
