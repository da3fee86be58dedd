"""Numbers of tokens: spellings of one word share a number."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from deepseek_attn.text.token_numbers import number_tokens, read_token_numbers
from deepseek_attn.text.tokenizer_files import make_tokenizer, write_tokenizer

# In the symbols of a byte-level tokenizer: G with a dot is a space, C with a dot a line feed.
SPELLINGS = {
    "The": 0, "Ġthe": 0, "ĠTHE": 0, "Ã©": 1, "e": 1, "Ġ": 2, "ĠĠ": 2, "Ċ": 2, "Ã": 3, "Â": 4, "x": 5, "ï¬ģ": 6, "fi": 6,
}  # fmt: skip


def test_letter_case_accents_spaces_and_forms_do_not_matter():
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPELLINGS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert number_tokens(backend) == list(SPELLINGS.values())


def test_the_tokenizer_of_a_folder_must_be_the_models(tmp_path):
    write_tokenizer(tmp_path, 300, 64, None)
    expected = number_tokens(make_tokenizer(300))
    count = max(expected) + 1
    assert count < len(expected) < 300
    assert read_token_numbers(tmp_path, count, 300) == expected + [0] * (300 - len(expected))
    with pytest.raises(ValueError, match=f"has {count} different texts, and engram_compressed_vocab_size is 99"):
        read_token_numbers(tmp_path, 99, 300)
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    assert read_token_numbers(tmp_path, 300, 300) == list(range(300))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"download tokenizer\.json"):
        read_token_numbers(tmp_path, 99, 300)
