"""The n-gram memory (Engram) of DeepSeek-V4.1: config keys, and the numbers of its hash that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from deepseek_attn.config.fields import FieldReader

MAX_HASHES = 1024  # columns of all layers, each of which needs a prime; published: 48
_SIEVED = 2**15  # numbers per block of the search for primes
_SEED = 10007  # seed of a layer's multipliers, times the layer's number


@dataclass(frozen=True)
class EngramHash:
    """Numbers of the hash of one layer.

    Attributes:
        multipliers: one per look-back 0 to ``engram_max_ngram_size - 1``.
        primes: rows of the bucket of each (n, head): ``[engram_max_ngram_size - 1][engram_n_heads]``.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        """Rows of the layer's table."""
        return sum(map(sum, self.primes))


@dataclass(frozen=True)
class EngramConfig:
    """The ``engram_*`` keys of a published config.

    Attributes:
        engram_layer_ids: backbone layers with a table, ascending.
        engram_num_embeddings: rows of each table.
        engram_max_ngram_size: longest n-gram; n-grams of 2 tokens up to this length are looked up.
        engram_n_heads: rows per n-gram, each selected by a hash of its own.
        engram_head_dim: columns of a row.
        engram_vocab_size: lower bound of the rows of a bucket, which are prime numbers.
        engram_pad_token_id: token in place of tokens before the first one.
        engram_compressed_vocab_size: size of the compressed vocabulary, in which spellings of a word share an id.
    """

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    @property
    def rows_per_token(self) -> int:
        """Rows that each token looks up in each table."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def width(self) -> int:
        """Values that each token looks up in each table."""
        return self.rows_per_token * self.engram_head_dim

    def hash_of(self, layer: int) -> EngramHash:
        """The hash function of a layer of ``engram_layer_ids``."""
        return self.hashes()[self.engram_layer_ids.index(layer)]

    def hashes(self) -> tuple[EngramHash, ...]:
        """The hash of each layer, in the order of ``engram_layer_ids``."""
        primes = _primes(self.engram_vocab_size, len(self.engram_layer_ids) * self.rows_per_token)
        bound = max(1, (2**63 - 1) // self.engram_compressed_vocab_size // 2)
        found = []
        for place, layer in enumerate(self.engram_layer_ids):
            draws = np.random.default_rng(_SEED * layer).integers(0, bound, self.engram_max_ngram_size, np.int64)
            starts = range(place * self.rows_per_token, (place + 1) * self.rows_per_token, self.engram_n_heads)
            buckets = tuple(primes[start : start + self.engram_n_heads] for start in starts)
            found.append(EngramHash(tuple(int(draw) * 2 + 1 for draw in draws), buckets))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The keys as a published config has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


def read_engram(reader: FieldReader, num_hidden_layers: int | None, vocab_size: int | None) -> EngramConfig | None:
    """Reads the ``engram_*`` keys; None without ``engram_layer_ids``, or after reporting problems to ``reader``.

    Args:
        num_hidden_layers, vocab_size: values of the config; None where they were wrong.
    """
    layers = reader.as_integers("engram_layer_ids", reader.value("engram_layer_ids", None), 0)
    if not layers:
        return None
    before = len(reader.problems)
    rows = reader.as_integers("engram_num_embeddings", reader.value("engram_num_embeddings"), 1)
    sizes = {
        key: reader.integer(key, minimum=minimum)
        for key, minimum in {
            "engram_max_ngram_size": 2,
            "engram_n_heads": 1,
            "engram_head_dim": 1,
            "engram_vocab_size": 1,
            "engram_pad_token_id": 0,
            "engram_compressed_vocab_size": 1,
        }.items()
    }
    if list(layers) != sorted(set(layers)):
        reader.problem(f"engram_layer_ids is {list(layers)}: expected ascending numbers of layers")
    if num_hidden_layers is not None and layers[-1] >= num_hidden_layers:
        reader.problem(f"engram_layer_ids has layer {layers[-1]}, and num_hidden_layers is {num_hidden_layers}")
    for key in ("engram_pad_token_id", "engram_compressed_vocab_size"):
        limit = None if vocab_size is None else vocab_size - (key == "engram_pad_token_id")
        if (size := sizes[key]) is not None and limit is not None and size > limit:
            reader.problem(f"{key} is {size}: supported with vocab_size {vocab_size} is at most {limit}")
    if sizes["engram_head_dim"] is not None and sizes["engram_head_dim"] % 32:
        reader.problem(f"engram_head_dim is {sizes['engram_head_dim']}: expected a multiple of 32, which share a scale")
    known = {key: size for key, size in sizes.items() if size is not None}
    if len(reader.problems) > before or rows is None or len(known) < len(sizes):
        return None
    config = EngramConfig(layers, rows, **known)
    if len(layers) * config.rows_per_token > MAX_HASHES:
        reader.problem(
            f"engram_max_ngram_size {config.engram_max_ngram_size} with engram_n_heads {config.engram_n_heads} in "
            f"{len(layers)} layers: supported are {MAX_HASHES} hashes in all"
        )
        return None
    expected = tuple(found.num_rows for found in config.hashes())
    if rows != expected:
        reader.problem(
            f"engram_num_embeddings is {list(rows)}: the primes from engram_vocab_size {config.engram_vocab_size} on "
            f"add up to {list(expected)}"
        )
    return config


@cache
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes from ``start`` on."""
    found: list[int] = []
    begin = max(start, 2)
    while len(found) < count:
        is_prime = np.ones(_SIEVED, bool)  # whether each number from begin on is prime
        for factor in _factors(math.isqrt(begin + _SIEVED)):
            is_prime[max(factor * factor, -(-begin // factor) * factor) - begin :: factor] = False
        found += (np.flatnonzero(is_prime) + begin).tolist()
        begin += _SIEVED
    return tuple(found[:count])


def _factors(largest: int) -> list[int]:
    """The primes up to ``largest``."""
    numbers = np.arange(largest + 1)
    for factor in range(2, math.isqrt(largest) + 1):
        numbers[2 * factor :: factor] = 0
    return numbers[numbers > 1].tolist()
