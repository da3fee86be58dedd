"""Engram keys: the published numbers, and every problem at once."""

import pytest

from deepseek_attn.config.engram import EngramConfig, read_engram
from deepseek_attn.config.fields import FieldReader
from tests.config.engram_cases import PUBLISHED, TINY
from tests.support.typed import required


def read(raw, layers=40, vocab=129280):
    reader = FieldReader(raw)
    config = read_engram(reader, layers, vocab)
    reader.raise_if_problems("test")
    return config


def test_published_numbers():
    config = read({key: list(value) if isinstance(value, tuple) else value for key, value in PUBLISHED.items()})
    assert config == EngramConfig(**PUBLISHED)
    assert read(required(config).to_dict()) == config
    first, second = required(config).hashes()
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    primes = [[prime for row in found.primes for prime in row] for found in (first, second)]
    assert primes[0][:3] == [16000057, 16000079, 16000081]
    assert (primes[0][-1], primes[1][0], primes[1][-1]) == (16000463, 16000477, 16000889)
    assert (required(config).rows_per_token, required(config).width) == (24, 6144)


def test_small_tables_and_none():
    config = read(TINY, 3, 300)
    assert required(config).hash_of(2).primes == ((11, 13), (17, 19))
    assert read({}) is None
    assert read({"engram_layer_ids": []}) is None


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"engram_layer_ids": [14, 1], "engram_head_dim": 100, "engram_pad_token_id": "x"},
            ("expected ascending numbers", "engram_head_dim is 100", "engram_pad_token_id is 'x'"),
        ),
        ({"engram_layer_ids": [1, 40]}, ("has layer 40, and num_hidden_layers is 40",)),
        ({"engram_num_embeddings": [5, 384016682]}, (r"add up to \[384006168, 384016682\]",)),
        ({"engram_num_embeddings": None, "engram_n_heads": None}, ("missing .*engram_num_embeddings, engram_n_heads",)),
        ({"engram_compressed_vocab_size": 129281}, ("supported with vocab_size 129280 is at most 129280",)),
        ({"engram_pad_token_id": 129280}, ("supported with vocab_size 129280 is at most 129279",)),
        ({"engram_n_heads": 10**6}, ("supported are 1024 hashes",)),
    ],
)
def test_problems(changes, problems):
    with pytest.raises(ValueError, match=problems[0]) as error:
        read(PUBLISHED | changes)
    assert all(problem in str(error.value) for problem in problems[1:])
