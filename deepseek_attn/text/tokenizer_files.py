"""A byte-level tokenizer with DeepSeek's special strings, for checkpoints that have no tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
CONTROL_TOKENS = (
    BOS,
    EOS,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
# Part of a reply's text: decoding keeps them also where it skips special tokens.
TEXT_TOKENS = ("<think>", "</think>", "｜DSML｜")
V41_TOKEN = "<｜System｜>"  # behind the others, where there is room: of V4.1's chat encoding alone
MIN_VOCAB = len(CONTROL_TOKENS) + len(TEXT_TOKENS) + 256


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per special string (BOS 0, EOS 1) and one per byte, then V4.1's; every UTF-8 text round-trips.

    Args:
        vocab_size: size of the model's vocabulary; ids past the tokenizer's own decode to nothing.

    Raises:
        ValueError: ``vocab_size`` cannot hold the special strings and 256 bytes.
    """
    _check_vocab(vocab_size)
    tokens = (*CONTROL_TOKENS, *TEXT_TOKENS, *_byte_symbols())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _with_special_tokens(tokenizer)
    if vocab_size > MIN_VOCAB:
        tokenizer.add_special_tokens([AddedToken(V41_TOKEN, normalized=False, special=True)])
    return tokenizer


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of `make_tokenizer` with merges learned from ``text``: words are split as GPT-2 splits them.

    Args:
        vocab_size: at most this many tokens, special ones and bytes included.

    Raises:
        ValueError: ``vocab_size`` cannot hold the special strings and 256 bytes.
    """
    _check_vocab(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS + TEXT_TOKENS],
        initial_alphabet=_byte_symbols(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    tokenizer.model = models.BPE(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]])
    return _with_special_tokens(tokenizer)


def write_tokenizer(
    directory: str | Path, vocab_size: int, model_max_length: int, tokenizer: Tokenizer | None = None
) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        model_max_length: longest input in tokens.
        tokenizer: None for `make_tokenizer`'s.

    Raises:
        ValueError: the tokenizer has more tokens than the model, or BOS and EOS are not 0 and 1.
    """
    directory = Path(directory)
    tokenizer = make_tokenizer(vocab_size) if tokenizer is None else tokenizer
    size = tokenizer.get_vocab_size()
    if size > vocab_size or (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) != (0, 1):
        raise ValueError(
            f"the tokenizer has {size} tokens for vocab_size {vocab_size}, BOS {tokenizer.token_to_id(BOS)} and EOS "
            f"{tokenizer.token_to_id(EOS)}: at most vocab_size tokens, {BOS!r} as 0 and {EOS!r} as 1 are needed"
        )
    # not its own `save`, whose errors are plain exceptions
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": model_max_length,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_symbols() -> list[str]:
    """The character that stands for each byte 0..255: itself if it is visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TEXT_TOKENS])
    return tokenizer


def _check_vocab(vocab_size: int) -> None:
    if vocab_size < MIN_VOCAB:
        raise ValueError(
            f"vocab_size is {vocab_size}: the byte-level tokenizer needs at least {MIN_VOCAB} "
            f"({MIN_VOCAB - 256} special tokens and 256 bytes)"
        )
