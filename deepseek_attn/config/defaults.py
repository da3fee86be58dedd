"""Defaults that the Python interface and the command line share; importing them needs nothing."""

DEFAULT_MAX_MODEL_LEN = 32768  # at most; a model's own limit may be lower
DEFAULT_MAX_ROLLBACK = 16  # tokens that a sequence goes back in place
DEFAULT_MAX_TOKENS = 256  # new tokens of a request
DEFAULT_TOP_READS = 12  # of a kind, per query, layer and head of an inspection
