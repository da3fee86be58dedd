"""What each kind of layer does with positions, scale, sink and window, seen from outside the layer.

A layer is given hidden states at any position, a recording impl notes what attention gets and gives, and the caches
tell what was stored. Expectations are closed forms in float64.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from deepseek_attn.attention.builder import MetadataBuilder, StepInput
from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.impls import get_impl
from deepseek_attn.kernels.common import raw_queries
from deepseek_attn.kernels.common.dispatch import reference_ops
from deepseek_attn.kernels.common.norm_rope import rotate_
from deepseek_attn.kernels.insert import reference as insert_reference
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.small_models import assert_close, experts_by_token, prompt, small_config, small_runner
from tests.support.tiers import tiered
from tests.support.typed import required

FAR = 100_095  # the last token of a window of 4, 16 and 128; float32 angles are good to 0.004 there
FAR_TOLERANCE = 0.01
RATIOS = (0, 4, 16, 128)
PAGE = 1  # every logical page of the hand-made sequences is this one


class Recording(get_impl("reference", "cpu")):
    """The reference impl, which keeps what it is given and what it returns."""

    seen: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def forward_mqa(cls, layer, q, kv, positions, output=None):
        output = super().forward_mqa(layer, q, kv, positions, output)
        cls.seen = q.clone(), kv.clone(), output.clone()
        return output


class OwnKey(get_impl("reference", "cpu")):
    """Attention that gives every query its own key."""

    @classmethod
    def forward_mqa(cls, layer, q, kv, positions, output=None):
        return kv.unsqueeze(1).expand_as(q).clone()


class Stack:
    """One attention layer per ratio, with the rotary frequencies of the published models."""

    def __init__(self):
        scaling = ModelConfig.from_preset("v4_flash").rope_scaling
        options = {"rope_scaling": scaling, "max_position_embeddings": 131072, "hidden_size": 64}
        self.config = small_config(list(RATIOS), quantization_config=None, **options)
        self.runner = ModelRunner.from_source(
            self.config,
            RandomSource(self.config, 0),
            device="cpu",
            attention_only=True,
            progress=False,
            max_model_len=FAR + 1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        )
        self.x = torch.randn(1, self.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def layer(self, ratio: int):
        return self.runner.model.layers[str(RATIOS.index(ratio))].attn

    @torch.no_grad()
    def forward(self, ratio: int, position: int, impl=Recording) -> torch.Tensor:
        """The layer's output for one token, before which there were only zeros."""
        layer, layout = self.layer(ratio), self.runner.layout
        for pool in self.runner.pools:
            pool.tensor.zero_()
        tables = {group: torch.full((1, position // 32 + 1), PAGE, dtype=torch.int32) for group in layout.pages}
        step_input = StepInput(torch.tensor([1]), torch.tensor([position + 1]), tables)
        step = MetadataBuilder((layer.spec,), layout).build(step_input)
        layer.impl = impl
        return layer(self.x, step.positions, step)

    def entry(self, ratio: int, position: int, kind: str) -> torch.Tensor:
        """The compressed entry that ``position`` has closed."""
        pool = self.runner.pools.get(self.layer(ratio).prefix, kind)
        return required(pool).gather(
            torch.tensor([PAGE * required(pool).entries + position // ratio % required(pool).entries]), torch.float32
        )


@pytest.fixture(scope="module")
def stack() -> Stack:
    return Stack()


def angles(config: ModelConfig, ratio: int, position: int) -> torch.Tensor:
    """Phase of each pair: theta 10000 without a compressor, else theta 160000 and YaRN (pairs 15 to 25, factor 16)."""
    assert (config.rope_theta, config.compress_rope_theta, config.qk_rope_head_dim) == (10000, 160000, 64)
    phases = []
    for i in range(32):
        if ratio == 0:
            phases.append(position * 10000 ** (-i / 32))
        else:
            ramp = min(max((i - 15) / 10, 0), 1)
            phases.append(position * 160000 ** (-i / 32) * (1 - ramp + ramp / 16))
    return torch.tensor(phases, dtype=torch.float64)


def rotated(x: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
    y = x.double().clone()
    a, b = y[..., -64::2].clone(), y[..., -63::2].clone()
    y[..., -64::2] = a * phases.cos() - b * phases.sin()
    y[..., -63::2] = a * phases.sin() + b * phases.cos()
    return y


@pytest.mark.parametrize("position", [1, 1000, FAR])
@pytest.mark.parametrize("ratio", RATIOS)
def test_phase_of_queries_and_window_keys(stack, ratio, position):
    stack.forward(ratio, 0)
    plain_q, plain_kv, _ = Recording.seen
    stack.forward(ratio, position)
    q, kv, _ = Recording.seen
    phases = angles(stack.config, ratio, position)
    other = angles(stack.config, 4 if ratio == 0 else 0, position)
    tolerance = FAR_TOLERANCE if position == FAR else 2e-4
    for before, after in ((plain_q.flatten(0, 1), q.flatten(0, 1)), (plain_kv, kv)):
        assert_close(after, rotated(before, phases), tolerance)
        assert float((after - rotated(before, other)).abs().max()) > 20 * tolerance * float(before.abs().max())


@pytest.mark.parametrize(
    ("ratio", "kind"), [*((ratio, "compressed") for ratio in RATIOS[1:]), pytest.param(4, "index", id="4-index")]
)
def test_phase_of_compressed_entries(stack, ratio, kind, monkeypatch):
    """An entry is rotated at its window's first token, also when it pools the window before."""
    layer, plain = stack.layer(ratio), []

    def recorded(x, freqs_cis):
        plain.append(x.clone())
        return rotate_(x, freqs_cis)

    for module in (insert_reference, raw_queries):
        monkeypatch.setattr(module, "rotate_", recorded)
    with reference_ops():
        stack.forward(ratio, FAR)
    assert len(plain) == 2 + len(layer.compressors)  # the window key, entries, queries
    before = plain[1 if kind == "compressed" else 2]
    entry, first = stack.entry(ratio, FAR, kind), FAR + 1 - ratio
    assert_close(entry, rotated(before, angles(stack.config, ratio, first)), FAR_TOLERANCE)
    for wrong in (first // ratio, FAR, first - ratio):
        assert (entry - rotated(before, angles(stack.config, ratio, wrong))).abs().max() > 0.1


@pytest.mark.parametrize("position", [1, 127, FAR])
@pytest.mark.parametrize("ratio", RATIOS)
def test_output_is_rotated_back_at_the_query_position(stack, ratio, position):
    """A query that reads its own key only gets the unrotated value, wherever it is."""
    expected = stack.forward(ratio, 0, OwnKey)
    assert_close(stack.forward(ratio, position, OwnKey), expected, 1e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_scale_and_sink(stack, ratio):
    """The first token sees itself and the sink: weight = sigmoid(q . k / sqrt(head_dim) - sink)."""
    layer = stack.layer(ratio)
    assert layer.scale == stack.config.head_dim**-0.5
    stack.forward(ratio, 0)
    q, kv, output = Recording.seen
    logits = (q[0].double() @ kv[0].double()) / math.sqrt(stack.config.head_dim)
    expected = torch.sigmoid(logits - layer.attn_sink.double()).unsqueeze(1) * kv[0].double()
    assert_close(output[0, : len(expected)], expected, 1e-5)


@pytest.mark.parametrize(
    ("window", "chunk_size"), tiered(product([1, 16, 64, 128], [None, 1]), [(1, 1), (16, 1), (128, None)])
)
@experts_by_token()
def test_window_includes_the_query_itself(window, chunk_size):
    """A key at distance ``window`` has no weight at all, one at ``window - 1`` has."""
    config = small_config([0], sliding_window=window, hidden_size=64, quantization_config=None)
    runner = small_runner(config, max_model_len=window + 4)
    tokens = prompt(config, window + 4)
    last = len(tokens) - 1
    expected = runner.score([tokens], chunk_size)[0][last]
    for distance in (window + 1, window, window - 1):
        changed = list(tokens)
        changed[last - distance] = (changed[last - distance] + 1) % config.vocab_size
        same = torch.equal(runner.score([changed], chunk_size)[0][last], expected)
        assert same == (distance >= window), f"distance {distance}"


@pytest.mark.parametrize(
    ("ratio", "chunk_size"), tiered(product([4, 16, 128], [None, 1]), [(4, 1), (16, 1), (128, None)])
)
@experts_by_token()
def test_an_entry_is_visible_from_the_last_token_of_its_window(ratio, chunk_size):
    """Beyond the sliding window a token acts through its entry: from position ratio - 1 on, and not before."""
    config = small_config([ratio], sliding_window=1, hidden_size=64, quantization_config=None)
    runner = small_runner(config, max_model_len=2 * ratio)
    tokens = prompt(config, 2 * ratio)
    changed = [(tokens[0] + 1) % config.vocab_size] + tokens[1:]
    logits, others = (runner.score([prompt_], chunk_size)[0] for prompt_ in (tokens, changed))
    equal = [t for t in range(2 * ratio) if torch.equal(logits[t], others[t])]
    assert equal == list(range(1, ratio - 1))
