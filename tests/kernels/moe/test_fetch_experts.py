"""Experts that the device fetches from host memory: rules against brute force, kernels against plain torch."""

from __future__ import annotations

import os

import pytest
import torch

from deepseek_attn.kernels.common.plans import ANY, LaunchBlock, Row, forced_row
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.moe import ExpertSlots, HostExperts, plan, reference
from deepseek_attn.kernels.moe.types import (
    COPY_BYTES,
    COPY_PROGRAMS,
    ExpertsCall,
    ExpertStack,
    copied_parts,
    expert_parts,
)
from tests.kernels.moe.moe_cases import FORMATS, make_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]


def of_parts(change, stack: ExpertStack) -> ExpertStack:
    """``change`` of each tensor of a stack."""
    return ExpertStack(change(stack.weight), *(None if part is None else change(part) for part in stack[1:]))


def empty_rows(host: Stacks, rows, device=None) -> Stacks:
    """Stacks of ``rows`` rows of the formats of ``host``, full of NaN bytes."""

    def empty(part):
        made = torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=device)
        made.view(torch.uint8).fill_(0xFF)
        return made

    first, gate, second = (of_parts(empty, stack) for stack in host)
    return first, gate, second


def make_cache(host: Stacks, num_rows, others=3, filled=True, device=None, copies=2):
    """A cache of ``num_rows`` experts behind ``others`` rows of another layer; the first experts are in it."""
    E = len(host[0].weight)
    if device == "cuda":
        first, gate, second = (of_parts(lambda part: part.cpu().pin_memory(), stack) for stack in host)
        host = first, gate, second
    stacks = empty_rows(host, others + num_rows + (E - num_rows), device)
    ints = {"dtype": torch.int32, "device": device}
    row, owner = torch.full((E,), -1, **ints), torch.full((num_rows,), -1, **ints)
    if filled:
        row[:num_rows] = torch.arange(others, others + num_rows, **ints)
        owner.copy_(torch.arange(num_rows, **ints))
        for source, target in zip(expert_parts(host), expert_parts(stacks), strict=True):
            target[others : others + num_rows].copy_(source[:num_rows])
    return HostExperts(
        host, stacks, row, owner, torch.zeros(E, **ints), others, others + num_rows,
        torch.full((E,), -7, **ints), torch.full((2, E), -7, **ints), torch.zeros(1, **ints),
        torch.full((2, 1 + copies), -7, **ints), torch.full((COPY_PROGRAMS,), -7, **ints),
        torch.zeros(4, dtype=torch.int64, device=device),
        copied_parts(host[:2], stacks[:2]), copied_parts(host[2:], stacks[2:]), copied_parts(host, stacks),
    )  # fmt: skip


class Expected:
    """The rules of `fetch_experts` and `prefetch_experts` in Python: experts in their rows, and counts of use."""

    def __init__(self, E, num_rows, first, filled):
        self.first, self.rows = first, [e if filled else None for e in range(num_rows)]
        self.uses, self.totals = [0] * E, [0] * 4

    def choose(self, may_stay):
        """Places that may be taken, in order: empty ones, then the least used experts, of equal ones the lower."""
        places = [
            ((0, i) if old is None else (1 + self.uses[old], old), i)
            for i, old in enumerate(self.rows)
            if old not in may_stay
        ]
        return [i for _, i in sorted(places)]

    def prefetch(self, ids, copies, early=False, at_most=None):
        """``at_most``: experts of an early call; ``early``: there was one, whose expert stays if it is predicted."""
        by_rank = [e for rank in zip(*ids, strict=True) for e in rank if e >= 0]
        first = self.ahead[0] if early else -1
        if first >= 0 and first not in by_rank:
            self.totals[3] += 1
            self.rows = [None if e == first else e for e in self.rows]
            first = -1
        missing = [e for e in dict.fromkeys(by_rank) if e not in self.rows]
        places = self.choose(set(by_rank))
        pairs = list(zip(missing[: copies if at_most is None else at_most], places, strict=False))
        for e, i in pairs:
            self.rows[i] = e
        found = [e for e, _ in pairs] if at_most is not None and pairs else [first, *(e for e, _ in pairs)]
        self.ahead = found + [-1] * (1 + copies - len(found))

    def fetch(self, ids, prefetched=False):
        for e, count in enumerate(self.uses):
            self.uses[e] = count - count // 64 + 4096 * min(ids.count(e), 255)
        needed = {e for e in ids if e >= 0}
        guesses = [e for e in self.ahead if e >= 0] if prefetched else []
        wrong = [e for e in guesses if e not in needed]
        self.rows = [None if e in wrong else e for e in self.rows]
        missing, rest = sorted(needed - set(self.rows)), []
        counts = len(needed), len(missing), len(guesses) - len(wrong), len(wrong)
        self.totals = [total + count for total, count in zip(self.totals, counts, strict=True)]
        for e in missing:
            if places := self.choose(needed):
                self.rows[places[0]] = e
            else:
                rest.append(e)
        return needed, rest


def check_found(cache, expected, needed, rest):
    found, staged = cache.found.tolist(), cache.staged
    places = {e: cache.first + i for i, e in enumerate(expected.rows) if e is not None}
    assert cache.row.tolist() == [places.get(e, -1) for e in range(len(found))]
    assert cache.owner.tolist() == [-1 if e is None else e for e in expected.rows]
    assert (cache.uses.tolist(), cache.totals.tolist()) == (expected.uses, expected.totals)
    places |= {e: staged + i for i, e in enumerate(rest)}
    for e in needed:
        assert found[e] == places[e]
        for source, target in zip(expert_parts(cache.host), expert_parts(cache.device), strict=True):
            held = target[found[e]].cpu().view(torch.uint8)
            assert torch.equal(held, source[e].cpu().view(torch.uint8))


STEPS = [(1, 2), (3, 3), (1, 2), (7, 1), (2, 4), (40, 2), (1, 1), (2, 2), (5, 2)]  # tokens, experts of each


def routings(E):
    """Ids of a few calls: some of other ranks, one expert twice, more experts than rows."""
    for T, k in STEPS:
        ids = torch.randint(-1, E, (T, k), device="cpu")
        ids[0, 0] = ids[-1, -1]
        yield ids
    yield torch.full((2, 2), -1, device="cpu")


def predictions(E):
    """(predicted ids, ids) of a few calls: right, wrong, partly right, resident, one expert for many tokens, none."""
    sizes = [(1, 2), (3, 3), (2, 4), (1, 1), (5, 2), (2, 2), (1, 4), (3, 1), (1, 2)]
    for T, k in sizes + [(16, 6)] * (E > 100):  # a full block of the kernel that chooses
        ids = torch.stack([torch.randperm(E, device="cpu")[:k] for _ in range(T)])
        other = torch.stack([torch.randperm(E, device="cpu")[:k] for _ in range(T)])
        for predicted in (ids, (ids + 1) % E, other, ids[:1].expand(T, k), torch.where(other < E // 2, -1, ids)):
            yield predicted.contiguous(), ids
    yield torch.full((2, 2), -1, device="cpu"), ids
    yield ids[:0], ids


def early_predictions(E):
    """(early prediction, experts copied ahead for the layer before, prediction, ids) of a few calls."""
    before = [[-1, -1, -1], [-1, 3, -1], [2, -1, -1], [-1, -1, -1]]
    for number, (predicted, ids) in enumerate(predictions(E)):
        early = (predicted, (predicted + 1) % E, predicted[:, :1].contiguous())[number % 3]
        yield early, before[number // 3 % len(before)], predicted, ids


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("E", "num_rows", "filled", "copies"), [(9, 4, True, 2), (8, 5, False, 1), (7, 7, True, 2), (9, 1, True, 2)]
)
def test_the_rules_of_copies_ahead(E, num_rows, filled, copies, fmt):
    """Wrong guesses lose their rows; no expert that the routing needs is lost, whatever a guess evicted."""
    case = make_case(1, 64, 32, E, 2, fmt, device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device="cpu", copies=copies)
    expected = Expected(E, num_rows, cache.first, filled)
    for predicted, ids in predictions(E):
        expected.prefetch(predicted.tolist(), copies)
        reference.prefetch_experts(cache, predicted)
        assert cache.ahead[0].tolist() == expected.ahead
        needed, rest = expected.fetch(ids.flatten().tolist(), True)
        reference.fetch_experts(cache, ids, prefetched=True)
        check_found(cache, expected, needed, rest)
    # without a prediction the last one's experts stay
    needed, rest = expected.fetch([0, 1, 0])
    reference.fetch_experts(cache, torch.tensor([[0, 1, 0]]))
    check_found(cache, expected, needed, rest)
    assert num_rows == E or min(expected.totals[2:]) > 0


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("E", "num_rows", "filled"), [(9, 4, True), (8, 5, False), (7, 7, True), (5, 1, True)])
def test_the_rules(E, num_rows, filled, fmt):
    case = make_case(1, 64, 32, E, 2, fmt, device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device="cpu")
    expected = Expected(E, num_rows, cache.first, filled)
    before = [part[: cache.first].clone() for part in expert_parts(cache.device)]
    for ids in routings(E):
        needed, rest = expected.fetch(ids.flatten().tolist())
        assert reference.fetch_experts(cache, ids).rows is cache.found
        check_found(cache, expected, needed, rest)
    # rows of other layers stay as they are
    for part, old in zip(expert_parts(cache.device), before, strict=True):
        assert torch.equal(part[: cache.first].view(torch.uint8), old.view(torch.uint8))


def test_counts_decay_and_are_bounded():
    case = make_case(1, 64, 32, 3, 2, "plain", device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), 2, device="cpu")
    many = torch.zeros(300, 1, dtype=torch.int64)
    for _ in range(900):
        reference.count_expert_uses(cache, many)
    assert 0 < int(cache.uses[0]) < 2**27
    for _ in range(44):
        reference.count_expert_uses(cache, many + 1)
    assert 0.49 < int(cache.uses[0]) / (4096 * 255 * 64) < 0.51


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_reference_reads_rows(fmt, T):
    """Equal to the bit with all experts in order, and with those that a call needs in any rows."""
    case = make_case(T, 256, 128, 9, 3, fmt, torch.float32, "cpu")
    case.experts[0, 0] = -1
    expected = reference.moe_experts(ExpertsCall(*case, 4.0, input_format=InputFormat(True)))
    cache = make_cache((case.w1, case.w3, case.w2), 4, device="cpu")
    found = reference.fetch_experts(cache, case.experts)
    got = reference.moe_experts(ExpertsCall(*case[:3], *cache.device, 4.0, input_format=InputFormat(True), slots=found))
    assert torch.equal(got, expected)


def test_stacks_that_do_not_fit_are_named():
    case = make_case(1, 64, 32, 4, 2, "fp4", device="cpu")
    host = case.w1, case.w3, case.w2
    with pytest.raises(ValueError, match=r"dtypes and all sizes but the first must be equal"):
        copied_parts(host, empty_rows((case.w2, case.w3, case.w1), 3, "cpu"))
    turned = case.w1._replace(weight=case.w1.weight.transpose(1, 2))
    with pytest.raises(ValueError, match=r"must be contiguous"):
        copied_parts((turned, *host[1:]), (turned, *host[1:]))


# --- kernels ---


triton = pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.moe import launch as moe  # noqa: E402
from tests.kernels.compiled_launches import compiled_ops, on_gpus  # noqa: E402


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("E", "num_rows", "filled"), [(9, 4, True), (8, 5, False), (7, 7, True), (5, 1, True), (300, 100, True)]
)
def test_kernels_follow_the_rules(triton_device, E, num_rows, filled, fmt):
    where = triton_device.type
    case = make_case(1, 64, 32, E, 2, fmt, device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device=where)
    expected = Expected(E, num_rows, cache.first, filled)
    for ids in routings(E):
        needed, rest = expected.fetch(ids.flatten().tolist())
        moe.fetch_experts(cache, ids.to(where))
        check_found(cache, expected, needed, rest)
    moe.count_expert_uses(cache, ids.to(where) * 0)
    expected.fetch([0, 0, 0, 0])
    assert cache.uses.tolist() == expected.uses


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("E", "num_rows", "filled", "copies"),
    [(9, 4, True, 2), (8, 5, False, 1), (7, 7, True, 2), (9, 1, True, 2), (300, 100, True, 2)],
)
def test_kernels_follow_the_rules_of_copies_ahead(triton_device, E, num_rows, filled, copies, fmt):
    where = triton_device.type
    case = make_case(1, 64, 32, E, 2, fmt, device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device=where, copies=copies)
    expected = Expected(E, num_rows, cache.first, filled)
    for predicted, ids in predictions(E):
        expected.prefetch(predicted.tolist(), copies)
        moe.prefetch_experts(cache, predicted.to(where))
        assert cache.ahead[0].tolist() == expected.ahead
        needed, rest = expected.fetch(ids.flatten().tolist(), True)
        moe.fetch_experts(cache, ids.to(where), prefetched=True)
        check_found(cache, expected, needed, rest)


def check_early_calls(cache, expected, before, prefetch, fetch, copies):
    """Early calls, calls that resume and routings, by rule; a copy of an early call is complete behind the second."""
    where = cache.row.device
    for number, (early, others, predicted, ids) in enumerate(early_predictions(len(cache.row))):
        before.ahead[0] = torch.tensor(others)[: len(before.ahead[0])]
        before.num_moves.fill_(number % 2)  # copies pause at once, or never
        at_most = int(bool((before.ahead[0] < 0).all()))
        expected.prefetch(early.tolist(), copies, at_most=at_most)
        prefetch(cache, early.to(where), before=before)
        assert cache.ahead[0].tolist() == expected.ahead
        assert int(cache.num_moves) == -1
        expected.prefetch(predicted.tolist(), copies, early=True)
        prefetch(cache, predicted.to(where))
        assert cache.ahead[0].tolist() == expected.ahead
        needed, rest = expected.fetch(ids.flatten().tolist(), True)
        fetch(cache, ids.to(where), prefetched=True)
        check_found(cache, expected, needed, rest)


EARLY = [(9, 4, True, 2), (8, 5, False, 1), (9, 1, True, 2)]  # experts, rows, whether they are filled, copies


@pytest.mark.parametrize(("E", "num_rows", "filled", "copies"), EARLY)
def test_the_rules_of_early_copies(E, num_rows, filled, copies):
    """One expert at most, if nothing is copied for the layer before; it stays if it is predicted again."""
    case = make_case(1, 64, 32, E, 2, "fp4", device="cpu")
    cache, before = (
        make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device="cpu", copies=copies) for _ in range(2)
    )
    expected = Expected(E, num_rows, cache.first, filled)
    check_early_calls(cache, expected, before, reference.prefetch_experts, reference.fetch_experts, copies)
    assert min(expected.totals[2:]) > 0


@pytest.mark.parametrize(("E", "num_rows", "filled", "copies"), [*EARLY, (300, 100, True, 2)])
def test_kernels_follow_the_rules_of_early_copies(triton_device, E, num_rows, filled, copies):
    """Whether the copies pause at once or never; with fewer programs than jobs of an expert."""
    where = triton_device.type
    case = make_case(1, 64, 32, E, 2, "fp4", device="cpu")
    cache, before = (
        make_cache((case.w1, case.w3, case.w2), num_rows, filled=filled, device=where, copies=copies) for _ in range(2)
    )
    expected = Expected(E, num_rows, cache.first, filled)
    with forced_row(plan.COPIES, Row(ANY, "copy_experts_kernel", LaunchBlock(3))):
        check_early_calls(cache, expected, before, moe.prefetch_experts, moe.fetch_experts, copies)


@pytest.mark.parametrize("kept", [True, False])
def test_copies_that_pause_go_on(triton_device, kept):
    """Each program stops after its first job if the routing of the layer before is known, and copies the rest later."""
    where = triton_device.type
    case = make_case(1, 512, 256, 6, 2, "fp4", device="cpu")
    cache, before = (make_cache((case.w1, case.w3, case.w2), 3, filled=False, device=where) for _ in range(2))
    before.ahead.fill_(-1)
    before.num_moves.fill_(1)
    ids = torch.tensor([[4, 5], [5, 4]])
    with forced_row(plan.COPIES, Row(ANY, "copy_experts_kernel", LaunchBlock(3))):
        moe.prefetch_experts(cache, ids[:1].to(where), before=before)
        row, parts = int(cache.row[4]), list(zip(expert_parts(cache.host), expert_parts(cache.device), strict=True))
        assert cache.resume[:4].tolist() == [3, 4, 5, -7]  # of 3 programs
        done = 3 * COPY_BYTES
        w1, copied = (tensor.view(torch.uint8).flatten() for tensor in (parts[0][0][4], parts[0][1][row]))
        assert torch.equal(copied[:done].cpu(), w1[:done].cpu())
        assert (copied[done:] == 255).all()
        old = w1[:done].clone()
        w1.add_(1)  # jobs that are done are not copied again
        moe.prefetch_experts(cache, (ids if kept else ids[:1, 1:]).to(where))
        assert cache.ahead[0].tolist() == ([4, 5, -1] if kept else [-1, 5, -1])
    assert torch.equal(copied[:done].cpu(), old.cpu()) == kept
    w1[:done] = old
    for e in (4, 5) if kept else (5,):
        for part, rows in parts:
            assert torch.equal(rows[int(cache.row[e])].view(torch.uint8).cpu(), part[e].view(torch.uint8).cpu())
    assert kept or (int(cache.row[4]), int(cache.totals[3])) == (-1, 1)


def test_dropped_experts_are_copied_no_further(triton_device):
    """The copying programs leave out entries of -1; they copy all parts of the others."""
    where = triton_device.type
    case = make_case(1, 512, 256, 5, 2, "fp4", device="cpu")
    cache = make_cache((case.w1, case.w3, case.w2), 3, device=where)
    cache.ahead.copy_(torch.tensor([[-1, 4, -1], [cache.first + 1, cache.first + 2, 0]]))
    cache.resume.copy_(torch.arange(COPY_PROGRAMS))
    before = [part.clone() for part in expert_parts(cache.device)]
    moe._copy_parts(cache, cache.whole, None, True)
    for source, target, old in zip(expert_parts(cache.host), expert_parts(cache.device), before, strict=True):
        old[cache.first + 2] = source[4]
        assert torch.equal(target.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize(
    ("fmt", "hidden", "inner"), [("fp4", 1024, 512), ("fp4", 512, 256), ("fp8", 512, 256), ("plain", 384, 128)]
)
@pytest.mark.parametrize("beside", [False, True])
def test_the_same_bits_as_all_experts_resident(gpu, fmt, hidden, inner, beside):
    """Eagerly and in a graph whose routing changes; up to more experts than rows; copies in order or beside."""
    E, k = 37, 6
    stream = torch.cuda.Stream() if beside else None
    for T in (1, 2, 11, 40, 300):
        case = make_case(T, hidden, inner, E, k, fmt)
        cache = make_cache((case.w1, case.w3, case.w2), 13, device="cuda")
        options = {"limit": 4.0, "input_format": InputFormat(True)}

        def fetched(x, experts, weights, cache=cache, options=options):
            slots = moe.fetch_experts(cache, experts, stream)
            assert (slots.outputs_ready is None) == (stream is None)
            return moe.moe_experts(ExpertsCall(x, experts, weights, *cache.device, **options, slots=slots))

        x, experts, weights = inputs = [t.clone() for t in case[:3]]
        assert torch.equal(fetched(x, experts, weights), moe.moe_experts(ExpertsCall(*case, **options)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fetched(x, experts, weights)
        for _ in range(5):
            other = make_case(T, hidden, inner, E, k, fmt)
            other.experts[0, 0] = -1
            for mine, new in zip(inputs, other[:3], strict=True):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(out, moe.moe_experts(ExpertsCall(*other[:3], *case[3:], **options)))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("E", "num_rows", "T"), [(37, 13, 3), (256, 108, 16)])
def test_the_same_bits_with_copies_ahead(gpu, E, num_rows, T, share, early):
    """In a graph that copies beside other products: whichever part of the prediction is right, and in repetition.

    With ``early``, copies that pause for the routing of the layer before.
    """
    k = 6
    stream, early_stream, side = (torch.cuda.Stream() for _ in range(3))
    case = make_case(T, 1024, 512, E, k, "fp4")
    cache, before = (make_cache((case.w1, case.w3, case.w2), num_rows, device="cuda") for _ in range(2))
    options = {"limit": 4.0, "input_format": InputFormat(True)}
    x, experts, weights = inputs = [t.clone() for t in case[:3]]
    predicted, guessed, of_before = experts.clone(), experts.clone(), experts.clone()

    def beside(call):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()

    def fetched(held, ids):
        torch.cuda.current_stream().wait_stream(side)
        slots = moe.fetch_experts(held, ids, stream, prefetched=True)
        return moe.moe_experts(ExpertsCall(x, ids, weights, *held.device, **options, slots=slots))

    def compute():
        last = None
        if early:
            beside(lambda: moe.prefetch_experts(before, before.row.argmax().view(1, 1), stream))  # one that is there
            early_stream.wait_stream(stream)
            beside(lambda: moe.prefetch_experts(cache, guessed, early_stream, before))
            moe.moe_experts(ExpertsCall(*case, **options))
            last = fetched(before, of_before)
            stream.wait_stream(early_stream)
        beside(lambda: moe.prefetch_experts(cache, predicted, stream))
        moe.moe_experts(ExpertsCall(*case, **options))  # the computation of another layer
        return last, fetched(cache, experts)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    for number in range(20):
        other = make_case(T, 1024, 512, E, k, "fp4")
        other.experts[0, 0] = -1
        for mine, new in zip(inputs, other[:3], strict=True):
            mine.copy_(new)
        for ids in (guessed, predicted):
            is_right = torch.rand(experts.shape, device="cuda") < share
            ids.copy_(torch.where(is_right, experts, torch.randint(E, experts.shape, device="cuda")))
        if number % 2 == 0:
            of_before.copy_(torch.randint(E, experts.shape, device="cuda"))
        expected = [moe.moe_experts(ExpertsCall(x, ids, weights, *case[3:], **options)) for ids in (of_before, experts)]
        graph.replay()
        assert all(torch.equal(out, right) for out, right in zip(outputs, expected, strict=True) if out is not None)
        assert torch.equal(compute()[1], expected[1])
    assert cache.totals[2] > 0 or share == 0
    assert cache.totals[3] > 0 or share == 1


@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
@pytest.mark.parametrize("arch", on_gpus())
def test_fetching_compiles(arch):
    case = make_case(3, 512, 256, 32, 6, "fp4", device="meta")
    cache = make_cache((case.w1, case.w3, case.w2), 8, device="meta")

    def call():
        moe.fetch_experts(cache, case.experts)
        moe.count_expert_uses(cache, case.experts)
        moe.prefetch_experts(cache, case.experts)
        moe.prefetch_experts(cache, case.experts, before=cache)
        moe.prefetch_experts(cache, case.experts)
        moe.fetch_experts(cache, case.experts, prefetched=True)

    found = compiled_ops(arch, call)
    assert {name: len(kernels) for name, kernels in found.items()} == {
        "choose_rows_kernel": 3,
        "copy_experts_kernel": 7,
        "choose_ahead_kernel": 3,
    }
    for kernel in found["copy_experts_kernel"]:
        ptx = kernel.asm["ptx"]
        assert ptx.count("ld.global.cg.v4") == 8  # 16 bytes of each of 128 threads, all in flight
        assert ptx.count("st.global.v4") == 8
        assert "acq_rel" not in ptx  # a barrier in memory between jobs


@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
@pytest.mark.parametrize("T", [1, 40, 300])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_rows_compile(fmt, T):
    case = make_case(T, 512, 512, 32, 6, fmt, device="meta")
    slots = torch.empty(32, dtype=torch.int32, device="meta")
    options = {"limit": 4.0, "input_format": InputFormat(True), "slots": ExpertSlots(slots)}
    assert compiled_ops("sm90", lambda: moe.moe_experts(ExpertsCall(*case, **options)))
