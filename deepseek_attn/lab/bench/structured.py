"""Timing structured output: cost per token on the host (llguidance's mask) and on the device (applying the mask)."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tokenizers import models, pre_tokenizers

from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.structured import KINDS, GrammarState, compiled_grammar
from deepseek_attn.lab.bench.timing import Timing, time_until_done
from deepseek_attn.lab.training.text import sample_text
from deepseek_attn.runner.allowed_tokens import restrict
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.text.tokenizer_files import make_tokenizer, write_tokenizer
from deepseek_attn.utils.clock import seconds_since

RECORDS = json.dumps({
    "type": "array",
    "minItems": 1000,
    "x-guidance": {"whitespace_flexible": False},
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["first", "second", None]},
            "numbers": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        },
        "required": ["name", "kind", "numbers"],
        "additionalProperties": False,
    },
})  # fmt: skip
"""A JSON schema whose texts have more tokens than are timed."""

STRUCTURES = {
    "json_schema": RECORDS,
    "regex": r"([A-Z][a-z]{2,9}( [a-z]{2,9}){3,12}\. ){1000}",
    "choices": tuple(f"a long name of choice number {i}, and of nothing else: " * 20 for i in range(100)),
    "grammar": 'start: (item "\\n")+\nitem: NAME "(" [value ("," value)*] ")"\nvalue: NAME | /[0-9]+/ | item\n'
    "NAME: /[a-z_]{1,20}/",
}
LONGEST_PIECE = 12  # characters


@dataclass(frozen=True, kw_only=True)
class MaskTiming(Timing):
    """Time to compute the mask of one token, and to apply it to a row of logits.

    Attributes:
        microseconds, low, high: time of llguidance on the host to consume the last token and compute the next mask.
        structure: its kind, a name in `KINDS`.
        compile_ms: time to compile the grammar, once per grammar text and process.
        tokens: number of timed masks.
        allowed: mean share of the vocabulary that a mask allows.
        apply_us: median time to apply one mask on ``device``: copy it, expand it and set logits to -inf.
    """

    structure: str
    compile_ms: float
    tokens: int
    allowed: float
    apply_us: float


def time_masks(tokenizer: Tokenizer, vocab_size: int, tokens: int, device: torch.device) -> Iterator[MaskTiming]:
    """Times the masks along random texts, whose tokens are drawn uniformly from the allowed ones, for `STRUCTURES`."""
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
    for kind in KINDS:
        params = SamplingParams(**{kind: STRUCTURES[kind]})
        start = time.perf_counter()
        compiled = compiled_grammar(params, tokenizer, vocab_size, (tokenizer.eos_token_id or 0,))
        compile_ms, rng = seconds_since(start) * 1e3, random.Random(0)
        state, output, times, shares, applied = GrammarState(compiled, None), [], [], [], []
        while len(times) < tokens:
            start = time.perf_counter()
            found = state.allowed(output)
            times.append(seconds_since(start) * 1e6)
            if found is None or found.ended:
                break
            applied.append(time_until_done(lambda mask=found.mask: restrict(logits, [mask]), device))
            bits = np.unpackbits(np.frombuffer(found.mask, dtype=np.uint8), bitorder="little")[:vocab_size]
            shares.append(bits.mean())
            choices = np.flatnonzero(bits)
            output.append(int(choices[rng.randrange(len(choices))]))
        yield MaskTiming.of(
            times, structure=kind, compile_ms=compile_ms, tokens=len(times), allowed=float(np.mean(shares)),
            apply_us=float(np.median(applied)),
        )  # fmt: skip


@contextmanager
def wide_tokenizer(vocab_size: int) -> Iterator[Tokenizer]:
    """A byte-level tokenizer of ``vocab_size`` pieces of the sample text, for models without a tokenizer.

    The vocabulary has the published size, but texts are split differently.
    """
    tokenizer, bytes_of = make_tokenizer(vocab_size), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = tokenizer.get_vocab()
    for piece in _pieces(sample_text()):
        if len(vocabulary) == vocab_size:
            break
        token = "".join(part for part, _ in bytes_of.pre_tokenize_str(piece))
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[])
    with TemporaryDirectory() as folder:
        write_tokenizer(folder, vocab_size, model_max_length=1 << 20, tokenizer=tokenizer)
        yield Tokenizer(Path(folder))


def _pieces(text: str) -> Iterator[str]:
    """Pieces of the text, short pieces first; then strings of letters, in case the text has too few pieces."""
    for length in range(2, LONGEST_PIECE + 1):
        yield from (text[start : start + length] for start in range(0, len(text) - length, 7))
    for length in range(2, LONGEST_PIECE + 1):
        yield from map("".join, product(ascii_lowercase, repeat=length))
