"""The router: its plain-torch version against loops, and the Triton one against that."""

import math
from itertools import product

import pytest
import torch

from deepseek_attn.kernels.moe import reference
from deepseek_attn.kernels.moe.types import UNGROUPED, ExpertGroups, ExpertRange, HashRouting, Router

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.moe import launch as moe_router
from tests.kernels.compiled_launches import CAPABILITIES, ONE, compiled_ops, on_gpus
from tests.support.tiers import tiered

NAN = float("nan")
SCORES = {
    "sqrtsoftplus": lambda row: [math.sqrt(math.log1p(math.exp(v))) for v in row],
    "sigmoid": lambda row: [1 / (1 + math.exp(-v)) for v in row],
    "softmax": lambda row: [math.exp(v) / sum(math.exp(u) for u in row) for v in row],
}


def slowly(x, weight, topk, score, factor, normalize, bias=None, groups=UNGROUPED, hashed=None):
    """The choice written out, in float64: sets of experts with their weights."""
    n, kept = groups
    rows = []
    for t, logits in enumerate((x.double() @ weight.double().T).tolist()):
        scores = SCORES[score](logits)
        biased = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        size = len(scores) // n
        two_best = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n)]
        best = sorted(range(n), key=lambda g: -two_best[g])[:kept]
        allowed = [e for e in range(len(scores)) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:topk]
        if hashed is not None:
            chosen = hashed.table[hashed.token_ids[t]].tolist()
        total = sum(scores[e] for e in chosen) if normalize else 1
        rows.append({e: scores[e] / total * factor for e in chosen})
    return rows


def check(got, expected, topk):
    experts, weights = got
    assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32)
    for ids, values, row in zip(experts.tolist(), weights.tolist(), expected, strict=True):
        assert len(set(ids)) == topk
        assert set(ids) == set(row)
        for e, value in zip(ids, values, strict=True):
            assert value == pytest.approx(row[e], rel=2e-5)


def routed(op):
    """`moe_route` of an implementation, with the fields of `Router` among its arguments."""

    def route(x, weight, *fields, hashed=None, own=None, **options):
        return op(x, Router(weight, *fields, **options), hashed, own)

    return route


def route_op(where):
    return {"torch": routed(reference.moe_route), "triton": moe_route}[where]


moe_route = routed(moe_router.moe_route)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def route(request):
    if request.param == "triton":
        request.getfixturevalue("gpu")
    return route_op(request.param)


SHAPES = {
    "V4": (256, 6, UNGROUPED),
    "V3": (64, 8, ExpertGroups(8, 4)),
    "odd": (7, 3, UNGROUPED),
    "two groups": (12, 3, ExpertGroups(2, 1)),
}


F32, BF16 = torch.float32, torch.bfloat16
SIGMOID, SQRT = "sigmoid", "sqrtsoftplus"
QUICK = [(name, score, BF16, F32) for name, score in zip(SHAPES, [*SCORES, *SCORES], strict=False)]
QUICK += [("odd", SIGMOID, F32, BF16), ("V3", SQRT, BF16, BF16), ("V4", SQRT, F32, F32)]


@pytest.mark.parametrize(
    ("shape", "score", "dtype", "weight_dtype"),
    tiered(product(SHAPES, SCORES, [BF16, F32], [F32, BF16]), QUICK),
)
def test_against_loops(route, shape, score, dtype, weight_dtype):
    E, topk, groups = SHAPES[shape]
    weight, bias = (torch.randn(E, 96) * 0.2).to(weight_dtype), torch.randn(E) * 0.1
    x = torch.randn(21, 96).to(dtype)
    for normalize in (True, False):
        options = {"bias": bias, "groups": groups}
        got = route(x, weight, topk, score, 2.5, normalize, **options)
        check(got, slowly(x, weight, topk, score, 2.5, normalize, **options), topk)
    table, ids = torch.rand(50, E).topk(topk).indices.contiguous(), torch.randint(50, (21,))
    got = route(x, weight, topk, score, 1.5, True, hashed=HashRouting(table, ids))
    assert torch.equal(got[0], table[ids])
    check(got, slowly(x, weight, topk, score, 1.5, True, hashed=HashRouting(table, ids)), topk)


@pytest.mark.parametrize("own", [ExpertRange(0, 32), ExpertRange(8, 8), ExpertRange(31, 1)])
@pytest.mark.parametrize("hashed", [False, True])
def test_ids_of_a_rank_count_from_its_first_expert(route, own, hashed):
    x, weight = torch.randn(7, 64), torch.randn(32, 64)
    table = HashRouting(torch.stack([torch.randperm(32)[:6] for _ in range(9)]), torch.randint(9, (7,)))
    options = {"hashed": table if hashed else None}
    ids, weights = route(x, weight, 6, "sigmoid", 1.0, True, **options)
    found, same = route(x, weight, 6, "sigmoid", 1.0, True, own=own, **options)
    assert found.tolist() == [
        [i - own.first if 0 <= i - own.first < own.count else -1 for i in row] for row in ids.tolist()
    ]
    assert torch.equal(same, weights)


def test_the_lower_id_wins_a_tie(route):
    x, weight = torch.zeros(3, 64), torch.randn(32, 64)
    bias = torch.zeros(32)
    bias[[20, 3, 9]] = 1.0
    bias[5] = -0.0
    assert route(x, weight, 6, "sigmoid", 1.0, True, bias)[0].tolist() == [[3, 9, 20, 0, 1, 2]] * 3
    bias[:] = 0
    assert route(x, weight, 5, "sigmoid", 1.0, True, bias, ExpertGroups(8, 2))[0].tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("T", [1, 17, 511, 512, 2000])
def test_many_tokens(gpu, T):
    """A token's experts and weights have the same bits in every batch, on both sides of the split."""
    for E, D, groups in ((256, 4096, UNGROUPED), (384, 1000, UNGROUPED), (256, 520, ExpertGroups(8, 4))):
        weight, bias = torch.randn(E, D) * D**-0.5, torch.randn(E) * 0.1
        x = torch.randn(T, D).bfloat16()
        experts, weights = moe_route(x, weight, 6, "sqrtsoftplus", 1.5, True, bias, groups)
        expected = slowly(x, weight, 6, "sqrtsoftplus", 1.5, True, bias, groups)
        got = [dict(zip(*row, strict=True)) for row in zip(experts.tolist(), weights.tolist(), strict=True)]
        same = [row for row in zip(got, expected, strict=True) if row[0].keys() == row[1].keys()]
        assert len(same) > 0.995 * T
        for row, wanted in same:
            assert row == pytest.approx(wanted, rel=2e-5)
        few = moe_route(x[:3], weight, 6, "sqrtsoftplus", 1.5, True, bias, groups)
        assert torch.equal(few[0], experts[:3])
        torch.testing.assert_close(few[1], weights[:3], rtol=1e-5, atol=0)
        rounded = weight.bfloat16()
        one, three = (moe_route(x, w, 6, "sqrtsoftplus", 1.5, True, bias, groups) for w in (rounded, rounded.float()))
        same = (one[0] == three[0]).all(1)
        assert same.float().mean() > 0.995
        torch.testing.assert_close(one[1][same], three[1][same], rtol=2e-5, atol=0)
        for _ in range(5):
            again = moe_route(x, weight, 6, "sqrtsoftplus", 1.5, True, bias, groups)
            assert torch.equal(again[0], experts)
            assert torch.equal(again[1], weights)


def test_a_nan_gives_experts_that_exist(gpu):
    x, weight = torch.randn(4, 128), torch.randn(256, 128)
    x[1] = NAN
    x[2, 5] = float("inf")
    experts, weights = moe_route(x, weight, 8, "sqrtsoftplus", 1.0, True, torch.zeros(256), ExpertGroups(8, 4))
    assert experts.ge(0).all()
    assert experts.lt(256).all()
    assert all(len(set(row)) == 8 for row in experts.tolist())
    assert weights[1].isnan().all()
    assert weights[0].isfinite().all()


def test_no_tokens_and_strides(gpu):
    weight, wide = torch.randn(16, 64), torch.randn(5, 128)
    experts, weights = moe_route(wide[:0, :64], weight, 3, "sigmoid", 1.0, True)
    assert (experts.shape, weights.shape) == ((0, 3), (0, 3))
    for x in (wide[:, ::2], wide[:, 64:]):
        got = moe_route(x, weight, 3, "sigmoid", 1.0, True)
        assert torch.equal(got[0], moe_route(x.contiguous(), weight, 3, "sigmoid", 1.0, True)[0])


def test_bad_arguments_are_named():
    x, weight = torch.randn(4, 64), torch.randn(16, 64)
    for call, message in (
        ((x.int(), weight, 3, "sigmoid"), r"x must be float32, bfloat16 or float16 \[T, D\]"),
        ((x, weight[:, ::2], 3, "sigmoid"), r"contiguous float32 or bfloat16 \[E, 64\]"),
        ((x, weight, 3, "relu"), "unknown score 'relu': supported are sqrtsoftplus, sigmoid, softmax"),
        ((x, weight, 17, "sigmoid"), "17 of 16 experts in the best 1 of 1 groups"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_route(*call, 1.0, True)
    with pytest.raises(ValueError, match="3 of 16 experts in the best 1 of 3 groups"):
        moe_route(x, weight, 3, "sigmoid", 1.0, True, groups=ExpertGroups(3, 1))
    with pytest.raises(ValueError, match=r"the bias must be contiguous float32 \[16\]"):
        moe_route(x, weight, 3, "sigmoid", 1.0, True, torch.zeros(15))
    with pytest.raises(ValueError, match=r"the table of hash routing must be contiguous \[V, 3\]"):
        moe_route(x, weight, 3, "sigmoid", 1.0, True, hashed=HashRouting(torch.zeros(9, 2), torch.zeros(4)))


TOKENS = {1: torch.bfloat16, 4096: torch.bfloat16, 40: torch.float32}
# tokens, dtype of the weight
ROUTES = [*((T, torch.float32) for T in TOKENS), (1, torch.bfloat16), (40, torch.bfloat16)]
FEW_PRODUCTS = ("sm90", (4096, torch.bfloat16))
LITTLE_MEMORY = [("sm120", (40, torch.float32)), ("sm120", (1, torch.bfloat16))]  # where tiles are smaller
CASES = on_gpus(ROUTES, [(4096, torch.float32)], ONE) + tiered([FEW_PRODUCTS, *LITTLE_MEMORY], [FEW_PRODUCTS])


@pytest.mark.parametrize(("arch", "route"), CASES, ids=str)
def test_it_compiles(arch, route):
    T, weight_dtype = route
    dtype = TOKENS[T]
    x, weight = (torch.empty(n, 512, dtype=of, device="meta") for n, of in ((T, dtype), (64, weight_dtype)))
    options = {"groups": ExpertGroups(8, 4), "bias": torch.empty(64, device="meta")} if T == 40 else {}
    found = compiled_ops(arch, lambda: moe_route(x, weight, 6, "sqrtsoftplus", 1.5, True, **options))
    assert set(found) == {"float32_product_kernel", "moe_select_kernel"} | (
        {"split_float32_weight_kernel"} if T == 4096 and weight_dtype == torch.float32 else set()
    )
    if T != 40:  # bfloat16 products: three of a float32 weight, one of a bfloat16 one
        products = found["float32_product_kernel"][0].asm["ttir"].count("tt.dot ")
        assert products == (3 if weight_dtype == torch.float32 else 1)
    assert ("griddepcontrol" in found["moe_select_kernel"][0].asm["ptx"]) == (CAPABILITIES[arch][0] >= 9)
