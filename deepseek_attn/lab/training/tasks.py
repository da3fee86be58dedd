"""Tasks by name, and the synthetic ones: facts to find in a long sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from deepseek_attn.lab.training.task import BOS, Batch, Task
from deepseek_attn.lab.training.text import TextTask

MARK = 2  # 1 is the end of a sentence, which no task needs
FIRST_SYMBOL = 3


class Draft(NamedTuple):
    """Sequences in the making: BOS and filler in ``tokens``, nothing marked, no sources; see `Batch`."""

    tokens: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    @property
    def total(self) -> int:
        """Tokens of a sequence, BOS included."""
        return self.tokens.shape[1]

    def ask(
        self, places: torch.Tensor, answers: torch.Tensor, sources: torch.Tensor | None = None, written: bool = True
    ) -> None:
        """Marks ``places [B, n]`` for the ``answers [B, n]``, which are also the sequence's next tokens if ``written``.

        Args:
            sources: where the answers can be read.
        """
        if written:
            self.tokens.scatter_(1, places, answers)
        self.targets.scatter_(1, places, answers)
        self.mask.scatter_(1, places, True)
        if sources is not None:
            self.sources.scatter_(1, places, sources)


class SyntheticTask(Task):
    """Facts among filler, then questions about them, ``gap`` tokens of filler or more later.

    Filler is random tokens; keys and values have token ranges of their own.

    Args:
        vocab_size: of the model.
        gap: least number of tokens between the facts and the first question.
        symbols: number of key tokens and of value tokens; all others are filler. Default: an eighth each. Fewer are
            learned sooner.
    """

    def __init__(self, vocab_size: int, gap: int = 0, symbols: int | None = None):
        symbols = vocab_size // 8 if symbols is None else symbols
        if symbols < 2 or vocab_size < FIRST_SYMBOL + 2 * symbols + 1 or gap < 0:
            raise ValueError(
                f"vocab_size {vocab_size}, symbols {symbols}, gap {gap}: a task needs a gap of at least 0, 2 symbols "
                f"or more, and {FIRST_SYMBOL + 1} tokens beside those for keys and values"
            )
        self.vocab_size, self.gap = vocab_size, gap
        self.keys = range(FIRST_SYMBOL, FIRST_SYMBOL + symbols)
        self.values = range(self.keys.stop, self.keys.stop + symbols)
        self.filler = range(self.values.stop, vocab_size)

    def batch(
        self, size: int, seq_len: int, generator: torch.Generator, split: str = "train", difficulty: float = 1.0
    ) -> Batch:
        tokens = self._draw(self.filler, (size, seq_len + 1), generator)
        tokens[:, 0] = BOS
        draft = Draft(
            tokens, torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens), torch.full_like(tokens, -1)
        )
        self.write(draft, generator, difficulty)
        return Batch(draft.tokens, draft.mask, torch.where(draft.mask, draft.targets, draft.tokens), draft.sources)

    @abstractmethod
    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        """Writes facts and questions."""

    def _draw(self, symbols: range, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(symbols.start, symbols.stop, shape, generator=generator, device="cpu")

    def _order(self, size: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """``[size, count]``: 0 to ``count - 1`` in random order, row by row."""
        return torch.rand(size, count, generator=generator, dtype=torch.float32, device="cpu").argsort(1)

    def _different(self, symbols: range, size: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """``[size, count]`` symbols, distinct within each row."""
        return self._order(size, len(symbols), generator)[:, :count] + symbols.start

    def _room(self, draft: Draft, facts: int, questions: int) -> int:
        """Tokens for facts, between BOS and the gap: all but those of the ``questions`` at the end.

        Raises:
            ValueError: fewer than the ``facts`` take.
        """
        free = draft.total - 1 - self.gap - questions
        if free < facts:
            raise ValueError(
                f"task {self.name}: {draft.total - 1} tokens do not hold facts of {facts} tokens, questions of "
                f"{questions} and a gap of {self.gap}; sequences of {facts + questions + self.gap} tokens are the "
                "shortest"
            )
        return free

    def _few(self, what: str, count: int, symbols: range) -> None:
        if not 1 <= count <= len(symbols):
            raise ValueError(f"task {self.name}: {what} is {count}: there are {len(symbols)} symbols")


class AssociativeRecall(SyntheticTask):
    """``pairs`` key-value pairs at the beginning; then some of the keys again, each to be answered by its value.

    The answer is not written into the sequence, so that an earlier question gives no hint about a later one. Questions
    are at places whose distance from the facts follows a power law: most are near, some as far as the sequence reaches.
    A curriculum begins with few pairs and near questions.

    Source: multi-query associative recall (Arora et al., "Zoology", 2023), which asks for each pair once.

    Args:
        questions: number of questions, each about a random pair; 0: as many as pairs, one about each.
    """

    name = "recall"
    POWER = 0.1  # exponent of the distances: density x ** (POWER - 1)

    def __init__(self, vocab_size: int, gap: int = 0, symbols: int | None = None, pairs: int = 8, questions: int = 0):
        super().__init__(vocab_size, gap, symbols)
        self.pairs, self.questions = pairs, questions
        self._few("pairs", pairs, self.keys)

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        size, pairs, asked = draft.size, max(1, round(self.pairs * difficulty)), self.questions or self.pairs
        self._room(draft, 2 * self.pairs, asked + 1)
        first = 1 + 2 * pairs + self.gap
        places = max(asked, round((draft.total - first - 1) * difficulty))
        keys = self._different(self.keys, size, pairs, generator)
        values = self._draw(self.values, (size, pairs), generator)
        draft.tokens[:, 1 : 1 + 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
        weights = (torch.arange(1, places + 1, dtype=torch.float32, device="cpu") / places) ** (self.POWER - 1)
        at = first + torch.multinomial(weights.expand(size, places), asked, generator=generator)
        if self.questions or pairs < self.pairs:
            which = torch.randint(pairs, (size, asked), generator=generator, device="cpu")
        else:
            which = self._order(size, pairs, generator)
        draft.tokens.scatter_(1, at, keys.gather(1, which))
        draft.ask(at + 1, values.gather(1, which), 2 + 2 * which, written=False)


class Needle(SyntheticTask):
    """One marked key with its value, anywhere in the filler; the key again at the end.

    A curriculum begins with facts near the end.
    """

    name = "needle"

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        size, room = draft.size, self._room(draft, 3, 3)
        depth = torch.rand(size, 1, generator=generator, dtype=torch.float32, device="cpu") * difficulty
        first = 1 + ((1.0 - depth) * (room - 3)).round().long()
        key, value = self._draw(self.keys, (size, 1), generator), self._draw(self.values, (size, 1), generator)
        fact = torch.cat([torch.full_like(key, MARK), key, value], 1)
        draft.tokens.scatter_(1, first + torch.arange(3, device="cpu"), fact)
        draft.tokens[:, -3:] = fact
        draft.ask(torch.full_like(first, draft.total - 1), value, first + 2)


class CopyAcross(SyntheticTask):
    """``length`` values at the beginning; at the end a mark and the same values in the same order.

    A curriculum begins with few values, close to their copy.
    """

    name = "copy"

    def __init__(self, vocab_size: int, gap: int = 0, symbols: int | None = None, length: int = 16):
        super().__init__(vocab_size, gap, symbols)
        self.length = length
        if length < 1:
            raise ValueError(f"task copy: length is {length}: at least 1 is needed")

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        room = self._room(draft, self.length + 1, self.length + 1)
        length = max(1, round(self.length * difficulty))
        first = 1 + round((room - self.length - 1) * (1.0 - difficulty))
        values = self._draw(self.values, (draft.size, length), generator)
        draft.tokens[:, first] = draft.tokens[:, -length - 1] = MARK
        place = torch.arange(length, device="cpu").expand(draft.size, length)
        draft.tokens.scatter_(1, first + 1 + place, values)
        draft.ask(draft.total - length + place, values, first + 1 + place)


class VariableTracking(SyntheticTask):
    """``chains`` of assignments ``[MARK, variable, value]``, ``[MARK, next variable, variable]``, ... in filler.

    The question ``[MARK, value]`` is answered by the variables of the chain that begins with this value, in order.
    A curriculum begins with one assignment of each chain.

    Source: variable tracking of RULER (Hsieh et al., 2024), with tokens for words.

    Args:
        hops: assignments of a chain after its first.
    """

    name = "variables"

    def __init__(self, vocab_size: int, gap: int = 0, symbols: int | None = None, chains: int = 2, hops: int = 3):
        super().__init__(vocab_size, gap, symbols)
        self.chains, self.hops = chains, hops
        self._few("chains x (hops + 1)", chains * (hops + 1), self.keys)

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        size, chains, longest = draft.size, self.chains, self.hops + 1
        room = self._room(draft, 3 * chains * longest, 2 + longest)
        steps = max(1, round(longest * difficulty))
        count = chains * steps
        names = self._different(self.keys, size, count, generator).view(size, chains, steps)
        values = self._different(self.values, size, chains, generator)
        read = torch.cat([values.unsqueeze(2), names[:, :, :-1]], 2)
        # which slots of three tokens, and which chain has which of them; within a chain they are in order
        slots = self._order(size, room // 3, generator)[:, :count].view(size, chains, steps).sort(2).values
        first = 1 + 3 * slots
        for place, part in enumerate((torch.full_like(names, MARK), names, read)):
            draft.tokens.scatter_(1, (first + place).flatten(1), part.flatten(1))
        asked = torch.randint(chains, (size, 1), generator=generator, device="cpu")
        chain = asked.unsqueeze(2).expand(size, 1, steps)
        at = draft.total - steps + torch.arange(steps, device="cpu").expand(size, steps)
        draft.tokens[:, -steps - 2] = MARK
        draft.tokens[:, -steps - 1] = values.gather(1, asked).squeeze(1)
        draft.ask(at, names.gather(1, chain).squeeze(1), first.gather(1, chain).squeeze(1) + 1)


class CommonWords(SyntheticTask):
    """Words of which ``common`` come ``often`` times each and the others ``seldom`` times; then the common ones.

    The answer is in ascending order of token ids, after a mark. Words are the values; filler takes the places that the
    list leaves.

    Source: common words extraction of RULER, with tokens for words.
    """

    name = "common_words"

    def __init__(
        self, vocab_size: int, gap: int = 0, symbols: int | None = None, common: int = 4, often: int = 8,
        seldom: int = 2,
    ):  # fmt: skip
        super().__init__(vocab_size, gap, symbols)
        self.common, self.often, self.seldom = common, often, seldom
        self._few("common", common, self.values[:-1])
        if not 0 <= seldom < often:
            raise ValueError(f"task common_words: often is {often} and seldom {seldom}: often must be the larger")

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        size, frequent = draft.size, self.common * self.often
        room = self._room(draft, frequent, self.common + 1)
        words = self._different(self.values, size, len(self.values), generator)
        common = words[:, : self.common].sort(1).values
        rare = words[:, self.common :].repeat_interleave(self.seldom, dim=1)[:, : room - frequent]
        listed = torch.cat([common.repeat_interleave(self.often, dim=1), rare], 1)
        places = 1 + self._order(size, room, generator)[:, : listed.shape[1]]
        draft.tokens.scatter_(1, places, listed)
        draft.tokens[:, -self.common - 1] = MARK
        at = draft.total - self.common + torch.arange(self.common, device="cpu").expand(size, self.common)
        draft.ask(at, common)


class FrequentWords(SyntheticTask):
    """Words drawn from a Zeta distribution, in filler; then the three most frequent ones, the most frequent first.

    Each sequence has its own order of words. Of words that are equally frequent the lower token id comes first.

    Source: frequent words extraction of RULER, with tokens for words.

    Args:
        words: length of the list.
    """

    name = "frequent_words"
    ALPHA, ASKED = 2.0, 3

    def __init__(self, vocab_size: int, gap: int = 0, symbols: int | None = None, words: int = 64):
        super().__init__(vocab_size, gap, symbols)
        self.words = words
        if len(self.values) < self.ASKED or words < self.ASKED:
            raise ValueError(f"task frequent_words: {len(self.values)} symbols, {words} words: at least 3 are needed")

    def write(self, draft: Draft, generator: torch.Generator, difficulty: float) -> None:
        size, count = draft.size, len(self.values)
        room = self._room(draft, self.words, self.ASKED + 1)
        weights = torch.arange(1, count + 1, dtype=torch.float32, device="cpu") ** -self.ALPHA
        ranks = torch.multinomial(weights.expand(size, count), self.words, True, generator=generator)
        words = self._order(size, count, generator).gather(1, ranks)
        places = 1 + self._order(size, room, generator)[:, : self.words]
        draft.tokens.scatter_(1, places, words + self.values.start)
        counts = torch.zeros(size, count, dtype=torch.int64, device="cpu").scatter_add_(
            1, words, torch.ones_like(words)
        )
        order = (counts * count - torch.arange(count, device="cpu")).argsort(1, descending=True)
        draft.tokens[:, -self.ASKED - 1] = MARK
        at = draft.total - self.ASKED + torch.arange(self.ASKED, device="cpu").expand(size, self.ASKED)
        draft.ask(at, order[:, : self.ASKED] + self.values.start)


SYNTHETIC = {
    task.name: task for task in (AssociativeRecall, Needle, CopyAcross, VariableTracking, CommonWords, FrequentWords)
}


def make_task(name: str, vocab_size: int, **options) -> Task:
    """A task by name, with the options of its class: ``recall``, ``needle``, ``copy``, ``variables``, ``common_words``,
    ``frequent_words``; or ``text`` (``text``; default: the sample text), read with a tokenizer of up to ``vocab_size``
    tokens.

    Raises:
        ValueError: no such task, or an option out of range.
    """
    if name == "text":
        return TextTask.from_text(vocab_size=vocab_size, **options)
    if name not in SYNTHETIC:
        raise ValueError(f"no task {name!r}: there are text, {', '.join(SYNTHETIC)}")
    return SYNTHETIC[name](vocab_size, **options)
