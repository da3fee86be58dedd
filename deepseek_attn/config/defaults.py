"""Defaults that the Python interface and the command line share; importing them needs nothing."""

DEFAULT_MAX_MODEL_LEN = 32768  # upper bound; a model's own limit may be lower
DEFAULT_MAX_ROLLBACK = 16  # tokens that a sequence can roll back in place
DEFAULT_MAX_TOKENS = 256  # new tokens per request
DEFAULT_TOP_READS = 12  # recorded weights of a kind per query, layer and head of an inspection
MAX_SNAPSHOTS = 1 << 20  # prefixes that can be kept: a list has the free ones
MAX_COMPLETIONS = 1 << 14  # of a prompt: a request for each of them is made before the first step
REPETITION_PENALTIES = (0.001, 1000.0)  # least and greatest: products with float32 logits stay finite
