"""Tasks by name, and the synthetic ones: facts to remember over a long range."""

from __future__ import annotations

from abc import abstractmethod

import torch

from deepseek_attn.lab.training.task import BOS, Batch, Task
from deepseek_attn.lab.training.text import TextTask

MARK = 2  # 1 is the end of a sentence, which no task needs
FIRST_SYMBOL = 3


class SyntheticTask(Task):
    """Facts, then at least ``gap`` tokens of filler, then questions about the facts.

    Filler is random tokens; keys and values have token ranges of their own. A sliding window shorter than the gap holds
    no answer, which then has to come from compressed entries.

    Args:
        vocab_size: of the model.
        gap: minimal number of tokens between the facts and the question.
        symbols: number of key tokens and of value tokens; all others are filler. Default: an eighth each. Fewer are
            learned sooner.
    """

    def __init__(self, vocab_size: int, gap: int = 64, symbols: int | None = None):
        symbols = vocab_size // 8 if symbols is None else symbols
        if symbols < 2 or vocab_size < FIRST_SYMBOL + 2 * symbols + 1 or gap < 1:
            raise ValueError(
                f"vocab_size {vocab_size}, symbols {symbols}, gap {gap}: a task needs a gap of at least 1, 2 symbols "
                f"or more, and {FIRST_SYMBOL + 1} tokens beside those for keys and values"
            )
        self.vocab_size, self.gap = vocab_size, gap
        self.keys = range(FIRST_SYMBOL, FIRST_SYMBOL + symbols)
        self.values = range(self.keys.stop, self.keys.stop + symbols)
        self.filler = range(self.values.stop, vocab_size)

    def batch(self, size: int, seq_len: int, generator: torch.Generator, split: str = "train") -> Batch:
        tokens = self._draw(self.filler, (size, seq_len + 1), generator)
        tokens[:, 0] = BOS
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        self.write(tokens, mask, generator)
        return Batch(tokens, mask)

    @abstractmethod
    def write(self, tokens: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> None:
        """Writes facts and questions into ``tokens``, which holds BOS and filler, and marks the answers in ``mask``."""

    def _draw(self, symbols: range, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(symbols.start, symbols.stop, shape, generator=generator, device="cpu")

    def _different(self, symbols: range, size: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """``[size, count]`` symbols, distinct within each row."""
        order = torch.rand(size, len(symbols), generator=generator, dtype=torch.float32, device="cpu").argsort(1)[
            :, :count
        ]
        return order + symbols.start

    def _fact_tokens(self, seq_len: int, needed: int) -> int:
        """Number of tokens between BOS and the gap before the question, ``needed`` of which the facts take."""
        free = seq_len - needed - self.gap
        if free < needed:
            raise ValueError(
                f"task {self.name}: {seq_len} tokens do not hold facts and questions of {needed} tokens each and a gap "
                f"of {self.gap}; sequences of {2 * needed + self.gap} tokens are the shortest"
            )
        return free


class AssociativeRecall(SyntheticTask):
    """``pairs`` key-value pairs at the beginning; after the gap, the keys in another order, each to be answered.

    Source: multi-query associative recall (Arora et al., "Zoology", 2023).
    """

    name = "recall"

    def __init__(self, vocab_size: int, gap: int = 64, symbols: int | None = None, pairs: int = 8):
        super().__init__(vocab_size, gap, symbols)
        self.pairs = pairs
        if pairs > len(self.keys):
            raise ValueError(f"{pairs} pairs need as many keys, and there are {len(self.keys)}")

    def write(self, tokens: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> None:
        size, total = tokens.shape
        self._fact_tokens(total - 1, 2 * self.pairs)
        keys = self._different(self.keys, size, self.pairs, generator)
        values = self._draw(self.values, (size, self.pairs), generator)
        tokens[:, 1 : 1 + 2 * self.pairs] = torch.stack([keys, values], 2).flatten(1)
        order = torch.rand(size, self.pairs, generator=generator, dtype=torch.float32, device="cpu").argsort(1)
        questions = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
        tokens[:, total - 2 * self.pairs :] = questions
        mask[:, total - 2 * self.pairs + 1 :: 2] = True


class Needle(SyntheticTask):
    """One marked key with its value, anywhere in the filler; the key again at the end, at least a gap later."""

    name = "needle"

    def write(self, tokens: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> None:
        size, total = tokens.shape
        place = torch.randint(
            1, self._fact_tokens(total - 1, 3) - 1, (size, 1), generator=generator, device="cpu"
        ) + torch.arange(3, device="cpu")
        key, value = self._draw(self.keys, (size, 1), generator), self._draw(self.values, (size, 1), generator)
        fact = torch.cat([torch.full_like(key, MARK), key, value], 1)
        tokens.scatter_(1, place, fact)
        tokens[:, -3:] = fact
        mask[:, -1] = True


class CopyAcross(SyntheticTask):
    """``length`` values at the beginning; after the gap, a mark and the same values in the same order."""

    name = "copy"

    def __init__(self, vocab_size: int, gap: int = 64, symbols: int | None = None, length: int = 16):
        super().__init__(vocab_size, gap, symbols)
        self.length = length

    def write(self, tokens: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> None:
        size, total = tokens.shape
        self._fact_tokens(total - 1, self.length + 1)
        values = self._draw(self.values, (size, self.length), generator)
        tokens[:, 1] = tokens[:, -self.length - 1] = MARK
        tokens[:, 2 : 2 + self.length] = tokens[:, -self.length :] = values
        mask[:, -self.length :] = True


SYNTHETIC = {task.name: task for task in (AssociativeRecall, Needle, CopyAcross)}


def make_task(name: str, vocab_size: int, **options) -> Task:
    """A task by name: ``recall`` (option ``pairs``), ``needle``, ``copy`` (``length``), each with ``gap`` and
    ``symbols``; or ``text`` (``text``; default: the sample text), read with a tokenizer of up to ``vocab_size`` tokens.

    Raises:
        ValueError: no such task, or an option out of range.
    """
    if name == "text":
        return TextTask.from_text(vocab_size=vocab_size, **options)
    if name not in SYNTHETIC:
        raise ValueError(f"no task {name!r}: there are text, {', '.join(SYNTHETIC)}")
    return SYNTHETIC[name](vocab_size, **options)
