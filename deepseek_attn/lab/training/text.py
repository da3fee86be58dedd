"""Real text as a task, and the sample text that comes with the library."""

from __future__ import annotations

import lzma
from importlib import resources

import torch
from tokenizers import Tokenizer

from deepseek_attn.lab.training.task import BOS, Batch, Task
from deepseek_attn.text.tokenizer_files import train_tokenizer

TEST_SHARE = 0.02


def sample_text() -> str:
    """Jane Austen's six novels (public domain), 4.0 million characters, one line a paragraph; see docs/training.md."""
    packed = resources.files("deepseek_attn.data").joinpath("austen.txt.xz").read_bytes()
    return lzma.decompress(packed).decode("utf-8")


class TextTask(Task):
    """Random pieces of a text, each after a BOS token; the last 2 % of the text are held out as the test split.

    Args:
        token_ids: the whole text.
        vocab_size: of the model.
        tokenizer: the tokenizer of ``token_ids``, kept for decoding.

    Raises:
        ValueError: no ids, or an id that is not below ``vocab_size``.
    """

    name = "text"

    def __init__(self, token_ids: list[int], vocab_size: int, tokenizer: Tokenizer | None = None):
        self.ids, self.vocab_size, self.tokenizer = (
            torch.tensor(token_ids, dtype=torch.int64, device="cpu"),
            vocab_size,
            tokenizer,
        )
        if not token_ids:
            raise ValueError("the text is empty: there is nothing to train on")
        if int(self.ids.max()) >= vocab_size:
            raise ValueError(f"token id {int(self.ids.max())} is not below vocab_size {vocab_size}")
        held_out = int(len(token_ids) * TEST_SHARE)
        self.parts = {"train": self.ids[: len(token_ids) - held_out], "test": self.ids[len(token_ids) - held_out :]}

    @classmethod
    def from_text(
        cls, text: str | None = None, *, vocab_size: int, tokenizer: Tokenizer | None = None, characters: int = 0
    ) -> TextTask:
        """Tokenizes ``text`` (default: the sample) with ``tokenizer``, or with one trained on it.

        Args:
            characters: use the first ``characters`` characters of the text; 0 for all.
        """
        text = sample_text() if text is None else text
        text = text[:characters] if characters else text
        tokenizer = train_tokenizer(text, vocab_size) if tokenizer is None else tokenizer
        return cls(tokenizer.encode(text, add_special_tokens=False).ids, vocab_size, tokenizer)

    def batch(
        self, size: int, seq_len: int, generator: torch.Generator, split: str = "train", difficulty: float = 1.0
    ) -> Batch:
        part = self.parts[split]
        if len(part) <= seq_len:
            raise ValueError(
                f"the {split} split of the text has {len(part)} tokens, too few for sequences of {seq_len}: use a "
                "longer text or a smaller seq_len"
            )
        start = torch.randint(len(part) - seq_len + 1, (size, 1), generator=generator, device="cpu")
        pieces = part[start + torch.arange(seq_len, device="cpu")]
        tokens = torch.cat([torch.full((size, 1), BOS, dtype=torch.int64, device="cpu"), pieces], 1)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        return Batch(tokens, mask, tokens, torch.full_like(tokens, -1))

    def chance(self, seq_len: int) -> None:
        return None
