"""LayerSession: attention layers alone, driven by hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.config.options import as_list, is_integer
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.step_batch import check_hidden_states
from deepseek_attn.models.block import attention_layers
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import check_decode_query_len, check_query_lens
from deepseek_attn.utils.turns import in_turn


class LayerSession:
    """Attention layers of a runner, with sequences that grow by hidden states: no tokens, no experts, no head.

        runner = ModelRunner.from_config("tiny", layers=[1], attention_only=True)
        session = LayerSession(runner)
        a, b = session.sequence(), session.sequence()
        y = session.run(x, {a: 200, b: 31})  # x [231, hidden_size]
        y = session.run(x, {b: 40, a: 1})  # prompts and decodes in any order

    `run` reserves pages, builds metadata and counts tokens. A refused call changes nothing; a call that fails within a
    layer rolls its tokens back. If more than ``max_rollback`` tokens (DeepSeek-V4) have overwritten entries that
    earlier tokens need, later calls report the sequence as lost.

    Args:
        runner: with ``attention_only`` or whole; several sessions can share it, also in several threads.
        layers: numbers of the layers to drive; default: all that the runner holds.
        decode_query_len: a sequence of at most this many new tokens is a decode, which reads pages in place; 0: all
            prefill. Default: the runner's, which is 1 unless drafts are expected.

    Attributes:
        layers: their numbers; attention: the layers themselves, by number.
        step: metadata of the last step, whose rows have decodes first; None before.
        selected: by layer with an indexer, the entries of its sequence that each row of the last step read: int32
            ``[T, index_topk]`` in the order of ``x``, -1 for none.

    Raises:
        ValueError: layers that the runner does not hold, or a wrong ``decode_query_len``.
    """

    def __init__(self, runner: ModelRunner, layers: Iterable[int] | None = None, decode_query_len: int | None = None):
        if not isinstance(runner, ModelRunner):
            raise ValueError(f"a session drives layers of a ModelRunner, not of a {type(runner).__name__}")
        attention = {layer.spec.index: layer for layer in attention_layers(runner.model.layers)}
        loaded = list(attention)
        self.layers = loaded if layers is None else as_list(layers, "layers: numbers of layers")
        missing = [layer for layer in self.layers if layer not in loaded]
        if missing or not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"layers={self.layers!s:.80}: this runner holds layers {loaded}; name at least one, each once"
            )
        check_decode_query_len(decode_query_len)
        self.runner, self.turns = runner, runner.turns
        self.decode_query_len = runner.decode_query_len if decode_query_len is None else decode_query_len
        self.attention = {layer: attention[layer] for layer in self.layers}
        self.step: StepMetadata | None = None
        self.selected: dict[int, Tensor] = {}

    def sequence(self) -> LayerSequence:
        """A new sequence, without tokens. It takes pages as it grows."""
        return LayerSequence(self, self.runner.manager.create())

    @in_turn
    def run(self, x: Tensor, lengths: Mapping[LayerSequence, int]) -> Tensor:
        """Computes the next tokens of sequences in every layer; they attend to all earlier tokens of their sequence.

        Args:
            x: ``[T, hidden_size]``, normed hidden states of the new tokens, concatenated by sequence; for several
                layers ``[layers, T, hidden_size]``. In the runner's dtype and on its device.
            lengths: new tokens of each sequence, in the order of ``x``, ``T`` in all.

        Returns:
            The layers' outputs, in the shape of ``x``.

        Raises:
            ValueError: sequences, lengths or hidden states that do not form a step of this session.
            OutOfPages: too few free pages. Either way nothing was changed.
        """
        if not isinstance(lengths, Mapping):
            raise ValueError(
                f"lengths is of type {type(lengths).__name__}: pass new tokens by sequence, {{sequence: 5}}"
            )
        for sequence in lengths:
            if not isinstance(sequence, LayerSequence) or sequence.session is not self:
                raise ValueError(f"{sequence!r} is not a sequence of this session: make one with session.sequence()")
            sequence.check_alive()
        runner, sequences, query_lens = self.runner, list(lengths), list(lengths.values())
        check_query_lens([sequence.cache for sequence in sequences], query_lens, runner.layout)
        shape = (sum(query_lens), runner.config.hidden_size)
        shape = shape if len(self.layers) == 1 else (len(self.layers), *shape)
        device = next(iter(runner.pools)).tensor.device
        check_hidden_states(x, shape, runner.dtype, device)
        order = sorted(range(len(sequences)), key=lambda i: query_lens[i] > self.decode_query_len)  # stable
        if order == list(range(len(order))):
            return self._run(x, sequences, query_lens)
        chunks = torch.arange(sum(query_lens), device=device).split(query_lens)
        rows = torch.cat([chunks[i] for i in order])
        y = self._run(x.index_select(-2, rows), [sequences[i] for i in order], [query_lens[i] for i in order])
        back = rows.argsort()
        self.selected = {layer: selected[back] for layer, selected in self.selected.items()}
        return y.index_select(-2, back)

    @torch.no_grad()
    def _run(self, x: Tensor, sequences: list[LayerSequence], query_lens: list[int]) -> Tensor:
        """`run`, decodes first."""
        runner, caches = self.runner, [sequence.cache for sequence in sequences]
        starts, outputs, chosen = [cache.num_tokens for cache in caches], [], {}
        batch = list(zip(caches, query_lens, strict=True))
        runner.manager.reserve(batch)
        try:
            with runner.manager.all_or_nothing(batch), runner.op_settings(sum(query_lens)):
                step = runner.step_metadata(caches, query_lens, decode_query_len=self.decode_query_len)
                inputs = [x] if len(self.layers) == 1 else x
                for (number, layer), rows in zip(self.attention.items(), inputs, strict=True):
                    outputs.append(layer(rows, step.positions, step))
                    if layer.topk_indices_buffer is not None:
                        chosen[number] = layer.topk_indices_buffer[: len(rows)].clone()
                for cache, n in batch:
                    runner.manager.commit(cache, n)
        except BaseException:
            for sequence, start in zip(sequences, starts, strict=True):
                if sequence.num_tokens != start:
                    sequence.lost = "was lost when a step of more than max_rollback tokens failed over its caches"
            raise
        self.step, self.selected = step, chosen
        return outputs[0] if len(self.layers) == 1 else torch.stack(outputs)


@dataclass(eq=False)
class LayerSequence:
    """One sequence of a `LayerSession`, and its pages.

    Attributes:
        cache: the pages.
        lost: why the sequence cannot grow; empty while it can.
    """

    session: LayerSession = field(repr=False)
    cache: SequenceCache = field(repr=False)
    lost: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return self.cache.num_tokens

    def run(self, x: Tensor) -> Tensor:
        """Computes the next tokens of this sequence alone; see `LayerSession.run`."""
        dense = isinstance(x, Tensor) and not x.is_nested and x.dim() > 1
        tokens = x.shape[-2] if dense else 1  # any other x is refused there
        return self.session.run(x, {self: tokens})

    def fork(self) -> LayerSequence:
        """A second sequence with the same tokens; pages are shared until one of the two writes to them."""
        self.check_alive()
        return LayerSequence(self.session, self.session.runner.manager.fork(self.cache))

    def truncate(self, n: int) -> None:
        """Forgets all tokens from ``n`` on, exactly as if they had never been.

        Raises:
            ValueError: more tokens than there are, or further back than the caches go; nothing was changed.
        """
        self.check_alive()
        oldest = self.cache.low_water
        if not is_integer(n) or not (n == 0 or oldest <= n <= self.num_tokens):
            raise ValueError(
                f"truncate({n!r}) of a sequence of {self.num_tokens} tokens: its caches go back to {oldest}, or to 0; "
                "for more, raise max_rollback"
            )
        self.session.runner.manager.truncate(self.cache, n)

    def free(self) -> None:
        """Returns all pages; the sequence cannot be used any more."""
        self.session.runner.manager.free(self.cache)
        self.lost = self.lost or "was freed"

    def check_alive(self) -> None:
        """ValueError if the sequence cannot be used any more."""
        if self.lost:
            raise ValueError(f"this sequence {self.lost}: start a new one with session.sequence()")
