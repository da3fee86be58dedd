"""Sampling: distributions, exact support sets, independence of the batch, reproducibility."""

import math

import pytest
import torch

from deepseek_attn.engine.drawing import CounterGenerator, make_generator, sample
from deepseek_attn.engine.sampling import SamplingParams
from tests.support.tiers import tiered
from tests.support.typed import untyped

PROBABILITIES = torch.tensor([0.05, 0.4, 0.0, 0.2, 0.05, 0.3])
ORDER = [1, 5, 3, 0, 4]  # most likely first, the tie 0 / 4 by index


def draw(logits, params, count, first_request=0):
    """``count`` draws of one row of logits, one request each."""
    generators = [make_generator(params, first_request + i) for i in range(count)]
    return sample(logits.expand(count, -1).contiguous(), [params] * count, generators)


@pytest.mark.parametrize(
    ("temperature", "one_stream"),
    tiered([(0.5, False), (1.0, True), (2.0, False)], [(0.5, False), (1.0, True)], quick_on_gpu=[(2.0, False)]),
    ids=["many-0.5", "one-1.0", "many-2.0"],
)
def test_frequencies_follow_softmax(temperature, one_stream):
    count = 6000
    logits = PROBABILITIES.log()
    params = SamplingParams(temperature=temperature, seed=11)
    if one_stream:
        generator = make_generator(params)
        tokens = sample(logits.expand(count, -1).contiguous(), [params] * count, [generator] * count)
    else:
        tokens = draw(logits, params, count)
    expected = (logits.double() / temperature).softmax(0)
    got = torch.bincount(tokens, minlength=6).double() / count
    bound = 4.5 * (expected * (1 - expected) / count).sqrt()
    assert ((got - expected).abs() <= bound).all(), (got, expected)


def test_frequencies_over_a_filtered_set_are_renormalised():
    count = 6000
    params = SamplingParams(top_k=4, top_p=0.75, seed=3)  # top-k keeps .4 .3 .2 .05; .75 of .95 needs .4 .3 .2
    got = torch.bincount(draw(PROBABILITIES.log(), params, count), minlength=6).double() / count
    expected = torch.tensor([0, 0.4, 0, 0.2, 0, 0.3], dtype=torch.float64) / 0.9
    assert ((got - expected).abs() <= 4.5 * (expected * (1 - expected) / count).sqrt()).all(), got


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, 5),
        (1, 1.0, 1),
        (2, 1.0, 2),
        (4, 1.0, 4),  # cuts the tie 0 / 4: the lower index stays
        (99, 1.0, 5),
        (0, 1e-9, 1),
        (0, 0.39, 1),
        (0, 0.41, 2),
        (0, 0.69, 2),
        (0, 0.71, 3),
        (0, 0.93, 4),
        (0, 0.96, 5),
        (2, 0.5, 1),  # .4 of .7 is already .57
        (2, 0.6, 2),
        (3, 0.77, 2),  # top-p counts the mass that top-k left: .7 of .9
        (1, 0.01, 1),
    ],
)
def test_support_is_exact(top_k, top_p, kept):
    params = SamplingParams(top_k=top_k, top_p=top_p, seed=5)
    assert set(draw(PROBABILITIES.log(), params, 400).tolist()) == set(ORDER[:kept])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, 2), (math.nextafter(0.5, 1), 3), (0.25, 1), (0.51, 3), (0.75, 3), (1.0, 4)]
)
def test_top_p_boundary_and_ties(top_p, kept):
    """Equal tokens: the mass is exact, so reaching top_p exactly is enough, and the lower indices stay."""
    tokens = draw(torch.zeros(4), SamplingParams(top_p=top_p, seed=1), 500)
    assert set(tokens.tolist()) == set(range(kept))


def test_temperature_comes_before_top_p():
    hot = SamplingParams(temperature=100.0, top_p=0.5, seed=2)  # nearly uniform over five tokens: three reach half
    assert set(draw(PROBABILITIES.log(), hot, 1000).tolist()) == set(ORDER[:3])


def test_greedy_takes_the_lowest_index_of_a_tie():
    logits = torch.full((3, 1001), -1.0)
    logits[0, [7, 500, 1000]] = 2.0
    logits[1, 1000] = 2.0
    logits[2, :] = 0.25
    greedy = SamplingParams(temperature=0)
    assert sample(logits, [greedy] * 3, [None] * 3).tolist() == [7, 1000, 0]


def test_tiny_temperature_and_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 1e38]])
    for temperature in (5e-324, 1e-30, 1.0, 1e30):
        params = SamplingParams(temperature=temperature, seed=0)
        token = sample(logits, [params], [make_generator(params)])
        assert token.item() == 0 or temperature == 1e30


@pytest.mark.parametrize("vocab", [63, 1000, 4099])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=9),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=9),
        SamplingParams(temperature=0),
    ],
    ids=["plain", "filtered", "greedy"],
)
def test_a_row_does_not_depend_on_its_batch(vocab, params, monkeypatch):
    seeded = torch.Generator().manual_seed(vocab)
    logits = torch.randn(37, vocab, generator=seeded) * 0.3
    others = [SamplingParams(seed=1), SamplingParams(top_k=3, seed=2), SamplingParams(temperature=0)]
    mixed = [params if i % 3 == 0 else others[i % len(others)] for i in range(37)]
    alone = [sample(logits[i : i + 1], [p], [make_generator(p, i)]).item() for i, p in enumerate(mixed)]
    together = sample(logits, mixed, [make_generator(p, i) for i, p in enumerate(mixed)]).tolist()
    assert together == alone
    flipped = sample(logits.flip(0), mixed[::-1], [make_generator(p, i) for i, p in enumerate(mixed)][::-1]).tolist()
    assert flipped[::-1] == alone
    monkeypatch.setattr("deepseek_attn.engine.drawing.ELEMENTS_PER_BLOCK", 5 * vocab)
    assert sample(logits, mixed, [make_generator(p, i) for i, p in enumerate(mixed)]).tolist() == alone
    assert len(set(alone)) > 10, "rows that all agree would prove nothing"


def test_seeds():
    logits = torch.zeros(5000)

    def stream(params, request_index):
        generator = make_generator(params, request_index)
        return sample(logits.expand(8, -1).contiguous(), [params] * 8, [generator] * 8).tolist()

    seeded = SamplingParams(seed=123)
    assert stream(seeded, 0) == stream(seeded, 0)
    streams = [stream(seeded, 0), stream(seeded, 1), stream(SamplingParams(seed=124), 0), stream(SamplingParams(), 0)]
    streams.append(stream(SamplingParams(), 0))
    assert len({tuple(s) for s in streams}) == 5


def test_a_generator_resumes_from_its_position():
    generator = make_generator(SamplingParams(seed=4))
    numbers = [generator.uniform() for _ in range(10)]
    resumed = CounterGenerator(generator.key)
    resumed.position = 6
    assert [resumed.uniform() for _ in range(4)] == numbers[6:]


def test_only_sampled_rows_advance_their_generator():
    generators = [CounterGenerator(0) for _ in range(3)]
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)]
    sample(torch.zeros(3, 7), params, generators)
    assert [g.position for g in generators] == [0, 1, 1]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53], ids=["lowest", "highest"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3)], ids=["plain", "filtered"])
def test_extreme_random_numbers_never_reach_a_masked_token(params, uniform):
    class Constant:
        def uniform(self):
            return uniform

    logits = torch.full((1, 131072), -math.inf)
    logits[0, 1:-1] = 0.0
    token = sample(logits, [params], [untyped(Constant())]).item()
    highest = 3 if params.top_k else 131070
    assert token == (1 if uniform == 0 else highest)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [math.nan, math.inf]])
def test_broken_rows_are_named(bad, temperature):
    logits = torch.zeros(4, 2)
    logits[2] = torch.tensor(bad)
    params = SamplingParams(temperature=temperature)
    with pytest.raises(RuntimeError, match=r"rows \[2\]"):
        sample(logits, [params] * 4, [make_generator(params)] * 4)


def test_wrong_arguments():
    params = SamplingParams(seed=0)
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 4, dtype=torch.bfloat16), [params], [make_generator(params)])
    with pytest.raises(ValueError, match=r"float32 \[B, vocab\]"):
        sample(torch.zeros(4), [params], [make_generator(params)])
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 4), [params], [make_generator(params)])
    with pytest.raises(ValueError, match=r"rows \[1\] .*no generator"):
        sample(torch.zeros(2, 4), [SamplingParams(temperature=0), params], [None, None])


def test_no_rows():
    tokens = sample(torch.zeros(0, 4), [], [])
    assert tokens.shape == (0,)
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("ignore_eos", 1),
    ],
)
def test_invalid_parameters(field, value):
    with pytest.raises(ValueError, match=f"- {field}="):
        SamplingParams(**{field: value})


def test_invalid_parameters_are_listed_together():
    with pytest.raises(ValueError, match=r"(?s)temperature=-1.*top_p=2.*max_tokens=0"):
        SamplingParams(temperature=-1, top_p=2, max_tokens=0)


def test_sequences_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("END",), (1, 2))
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(1, 2)))
