"""Token numbers shared by the spellings of one word. DeepSeek-V4.1's Engram hashes them instead of token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer as Backend, normalizers

from deepseek_attn.text.tokenizer import REPLACEMENT, TOKENIZER_FILE, Tokenizer, panics_as_errors

ONE_SPACE = "\ue000"  # stands for a text of one space, which would be stripped


def number_tokens(backend: Backend) -> list[int]:
    """The number of each token id: new texts are counted from 0, in the order of token ids.

    Texts are compared without accents, letter case, compatibility forms and outer whitespace. A token whose bytes are
    no complete UTF-8 stands for itself.

    Source: DeepSeek-V4.1 ``inference/engram.py`` (``build_compressed_token_map``).
    """
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(ONE_SPACE, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    with panics_as_errors("the tokenizer fails on the texts of its tokens"):
        texts = backend.decode_batch([[i] for i in range(backend.get_vocab_size())], skip_special_tokens=False)
    found = []
    for token_id, text in enumerate(texts):
        key = backend.id_to_token(token_id) if REPLACEMENT in text else fold.normalize_str(text) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def read_token_numbers(directory: Path, count: int, vocab_size: int) -> list[int]:
    """Numbers of the tokens 0 to ``vocab_size - 1`` by a checkpoint's tokenizer, ``count`` different ones.

    Where each token of the vocabulary has a number of its own no tokenizer is needed. Ids past the tokenizer's, which
    no text has, get the number 0.

    Raises:
        ValueError: the tokenizer is missing or broken, or gives another count.
    """
    if count == vocab_size:
        return list(range(count))
    if not (directory / TOKENIZER_FILE).is_file():
        raise ValueError(
            f"no tokenizer.json in {directory}: Engram hashes the texts of tokens; download tokenizer.json and "
            "tokenizer_config.json of the checkpoint into this folder"
        )
    numbers = number_tokens(Tokenizer(directory).backend)
    found = max(numbers, default=-1) + 1
    if found != count:
        raise ValueError(
            f"the tokenizer in {directory} has {found} different texts, and engram_compressed_vocab_size is {count}: "
            "it is another model's tokenizer; download tokenizer.json and tokenizer_config.json of this checkpoint"
        )
    return numbers + [0] * (vocab_size - len(numbers))
