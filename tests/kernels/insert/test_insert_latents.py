"""Everything that the tokens of a step add to a V3.2 layer: latent rows, query latents and index keys."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.cache.records import IndexFp4Record, IndexFp8Record, PlainRecord
from deepseek_attn.cache.records_v32 import Fp8DsMlaV32Record
from deepseek_attn.kernels.common.quant import QuantizedRows, quantize_fp8
from deepseek_attn.kernels.insert import CacheRows, TokenRows, reference
from deepseek_attn.kernels.insert.types import IndexKeyRows
from tests.support.typed import required

LayerRows = namedtuple("LayerRows", [*TokenRows._fields, "index"])  # arguments of a call
NAN, INF = float("nan"), float("inf")
EPS, INDEX_EPS, POSITIONS, PAGE = 1e-6, 1e-3, 90, 4
LIMIT = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
# latent, rotated, index and query channels; records of rows and keys
LAYERS = {
    "V3.2": (512, 64, 128, 1536, Fp8DsMlaV32Record(512, 64), IndexFp8Record(128), True),
    "pow2": (256, 32, 64, 96, Fp8DsMlaV32Record(256, 32, "pow2"), IndexFp8Record(64), False),
    "official": (384, 64, 128, 128, Fp8DsMlaV32Record(384, 64, "official"), IndexFp4Record(128), True),
    "plain": (24, 8, 16, 40, PlainRecord(32, torch.float32), PlainRecord(16, torch.float32), True),
    "odd": (40, 6, 20, 36, PlainRecord(46, torch.bfloat16), PlainRecord(20, torch.bfloat16), False),
    "dense": (512, 64, None, 256, Fp8DsMlaV32Record(512, 64), None, False),
}
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def insert(request, device):
    if request.param == "torch":
        return lambda rows: called(reference.insert_latents, rows)
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.insert.launch import insert_latents

    return lambda rows: called(insert_latents, rows)


def called(op, rows):
    return op(TokenRows(*rows[:-1]), rows.index)


def empty_pool(record, T, device):
    """Pages with gaps behind each and one before the first."""
    pages, size = -(-3 * T // PAGE) + 1, record.page_bytes(PAGE)
    return torch.full((pages + 1, 2 * size + 64), 0xAB, dtype=torch.uint8, device=device)[1:, :size]


def make(layer, dtype, device, T=9):
    """Rows over many binades, as columns of one product."""
    rank, rope, key, lora, record, key_record, hadamard = LAYERS[layer]
    scale = torch.logspace(-4, 4, T)[:, None]
    joined = torch.randn(T, lora + rank + rope + (key or 0) + 3) * scale
    joined = joined.clamp(-6e4, 6e4).to(device, dtype)
    qr, kv, k, _ = joined.split([lora, rank + rope, key or 0, 3], dim=1)
    kv[0, :rank] = 0
    angles = torch.rand(POSITIONS, rope // 2, device=device) * 6
    slots = torch.randperm(3 * T)[:T].to(device)
    slots[2::4] = -1
    q_norm, kv_norm = (torch.randn(n).mul(torch.logspace(-4, 2, n)).to(device) for n in (lora, rank))
    cache = CacheRows(record, empty_pool(record, T, device), PAGE, slots)
    index = None
    if key:
        places = CacheRows(key_record, empty_pool(key_record, T, device), PAGE, slots.flip(0))
        index = IndexKeyRows(
            k, torch.randn(key, device=device), torch.randn(key, device=device), INDEX_EPS, hadamard, places
        )
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(POSITIONS, (T,), device=device)
    return LayerRows(qr, kv, q_norm, kv_norm, EPS, table, positions, cache, None, index)


def rotated(y, pairs, table, position, dtype):
    """``y`` float64 with the channels ``(a, b)`` of each of ``pairs`` rotated, rounded."""
    for i, (a, b) in enumerate(pairs):
        cos, sin = float(table[position, i]), float(table[position, len(pairs) + i])
        y[a], y[b] = y[a] * cos - y[b] * sin, y[a] * sin + y[b] * cos
    return y.to(dtype)


def expected_rows(tokens, t):
    """The normed query latent, the cached row and the index key of token ``t``: in float64, pair by pair."""
    tokens = SimpleNamespace(**{k: v.cpu() if torch.is_tensor(v) else v for k, v in tokens._asdict().items()})
    dtype, rank, rope, position = tokens.kv.dtype, len(tokens.kv_weight), tokens.cos_sin.shape[1], tokens.positions[t]

    def norm(x, weight):
        return (x.double() * (x.double().square().mean() + EPS).rsqrt() * weight.double()).to(dtype)

    pairs = [(2 * i, 2 * i + 1) for i in range(rope // 2)]
    pe = rotated(tokens.kv[t, rank:].double(), pairs, tokens.cos_sin, position, dtype)
    row = torch.cat([norm(tokens.kv[t, :rank], tokens.kv_weight), pe])
    key = None
    if tokens.index is not None:
        x = tokens.index.k[t].double().cpu()
        x = (x - x.mean()) / ((x - x.mean()).square().mean() + INDEX_EPS).sqrt()
        x = (x * tokens.index.weight.double().cpu() + tokens.index.bias.double().cpu()).to(dtype).double()
        pairs = [(i, i + rope // 2) for i in range(rope // 2)]
        key = rotated(x, pairs, tokens.cos_sin, position, dtype)
        if tokens.index.hadamard:
            matrix = torch.ones(1, 1, dtype=torch.float64)
            while len(matrix) < len(key):
                matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
            key = (key.double() @ matrix / len(key) ** 0.5).to(dtype)
    return norm(tokens.qr[t], tokens.q_weight), row, key


def close(got, expected, dtype):
    """Within the last place, which the order of sums may change, of the largest value near."""
    got, expected = got.cpu().double(), expected.double()
    assert ((got - expected).abs() <= LIMIT[dtype] * expected.abs().amax()).all()


def code_step(record, expected):
    """Half the largest distance of two neighbouring codes of the record's values."""
    size = expected.double().abs().amax()
    return {"plain": 0.0, "fp8_v32": 32 / 448, "index_fp8": 32 / 448, "index_fp4": 2 / 6}[record.name] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_and_what_is_read_back(insert, device, layer, dtype):
    tokens = make(layer, dtype, device)
    qr = insert(tokens)
    assert (qr.shape, qr.dtype) == (tokens.qr.shape, dtype)
    for t in range(len(qr)):
        query, row, key = expected_rows(tokens, t)
        close(qr[t], query, dtype)
        for cache, wanted in ((tokens.cache, row), (tokens.index and tokens.index.cache, key)):
            if cache is None or cache.slots[t] < 0:
                continue
            found = cache.record.gather(cache.pool, PAGE, cache.slots[t : t + 1], torch.float32)[0].cpu().double()
            coarse = LIMIT[dtype] + (LIMIT[torch.bfloat16] if cache.record.dtype != torch.float32 else 0)
            allowed = coarse * required(wanted).double().abs().amax() + code_step(cache.record, wanted)
            assert ((found - required(wanted).double()).abs() <= allowed).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_stored_bytes_are_the_record_of_the_rows(insert, device, layer):
    """Rows stored in a plain float32 pool, encoded by the record, are the bytes that the record's pool holds."""
    tokens = make(layer, torch.bfloat16, device, T=13)
    caches = [tokens.cache] + ([tokens.index.cache] if tokens.index else [])
    plain = [cache._replace(record=PlainRecord(cache.record.dim, torch.float32)) for cache in caches]
    plain = [cache._replace(pool=empty_pool(cache.record, 13, device)) for cache in plain]
    exact = tokens._replace(cache=plain[0], index=tokens.index and tokens.index._replace(cache=plain[1]))
    before = [cache.pool.clone() for cache in caches]
    insert(exact)
    insert(tokens)
    for cache, rows, expected in zip(caches, plain, before, strict=True):
        values = rows.record.gather(rows.pool, PAGE, rows.slots, torch.float32)
        cache.record.insert(expected, PAGE, cache.slots, values)
        assert torch.equal(cache.pool, expected)
        assert required(cache.pool._base)[:, cache.pool.shape[1] :].eq(0xAB).all(), "between pages"
        assert required(cache.pool._base)[0].eq(0xAB).all(), "before the first page"


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("layer", ["V3.2", "pow2", "official", "plain"])
def test_values_that_are_not_finite_stay_visible(insert, device, layer, bad):
    tokens = make(layer, torch.bfloat16, device)
    tokens.kv[3, 5], tokens.kv[4, -1], required(tokens.index).k[5, 7], tokens.qr[7, 0] = bad, bad, bad, bad
    qr = insert(tokens)
    assert not qr[7].isfinite().all()
    assert qr[torch.arange(9, device=device) != 7].isfinite().all()
    for cache, hurt in ((tokens.cache, (3, 4)), (required(tokens.index).cache, (5,))):
        stored = cache.record.gather(cache.pool, PAGE, cache.slots, torch.float32)
        for t in range(9):
            if cache.slots[t] >= 0:
                assert stored[t].isfinite().all() == (t not in hurt)


@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "raw"])
def test_the_query_latent_is_also_quantised(insert, device, pow2):
    tokens = make("V3.2", torch.bfloat16, device, T=13)
    tokens.qr[3], tokens.qr[5, 7] = 0, NAN
    values = torch.full((13, 1536 + 16), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.full((12, 16), NAN, device=device)
    buffers = QuantizedRows(values[:, :1536], scales[:, :13].t(), pow2)
    got = insert(tokens._replace(qr_fp8=buffers))
    expected, expected_scale = quantize_fp8(got, 128, pow2=pow2)
    finite = got.isfinite().all(1)
    assert finite.sum() == 12
    assert torch.equal(values[:, :1536].view(torch.uint8)[finite], expected.view(torch.uint8)[finite])
    assert torch.equal(scales[:, :13].t()[finite], expected_scale[finite])
    assert (values[:, 1536:].view(torch.uint8) == 0x7F).all()
    assert scales[:, 13:].isnan().all()


def test_rows_do_not_depend_on_the_batch(insert, device, request):
    if request.node.callspec.params["insert"] == "torch" and device.type == "cuda":
        pytest.skip("torch chooses how it sums by the number of rows there")
    tokens = make("V3.2", torch.bfloat16, device, T=300 if device.type == "cuda" else 20)
    whole = insert(tokens)
    pools = tokens.cache.pool.clone(), required(tokens.index).cache.pool.clone()
    tokens.cache.pool.fill_(0xAB)
    required(tokens.index).cache.pool.fill_(0xAB)
    for t in range(len(whole)):
        row = slice(t, t + 1)
        index = required(tokens.index)._replace(
            k=required(tokens.index).k[row],
            cache=required(tokens.index).cache._replace(slots=required(tokens.index).cache.slots[row]),
        )
        alone = tokens._replace(
            qr=tokens.qr[row], kv=tokens.kv[row], positions=tokens.positions[row], index=index,
            cache=tokens.cache._replace(slots=tokens.cache.slots[row]),
        )  # fmt: skip
        assert torch.equal(insert(alone), whole[row])
    assert torch.equal(tokens.cache.pool, pools[0])
    assert torch.equal(required(tokens.index).cache.pool, pools[1])


def test_no_tokens(insert, device):
    tokens = make("V3.2", torch.bfloat16, device)
    index = required(tokens.index)._replace(
        k=required(tokens.index).k[:0], cache=required(tokens.index).cache._replace(slots=tokens.cache.slots[:0])
    )
    none = tokens._replace(
        qr=tokens.qr[:0], kv=tokens.kv[:0], positions=tokens.positions[:0], index=index,
        cache=tokens.cache._replace(slots=tokens.cache.slots[:0]),
    )  # fmt: skip
    assert insert(none).shape == (0, 1536)
    assert tokens.cache.pool.eq(0xAB).all()
    assert required(tokens.index).cache.pool.eq(0xAB).all()


def test_refuses():
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.insert.launch import insert_latents

    good = make("V3.2", torch.bfloat16, torch.device("cpu"))
    slots = torch.zeros(8, dtype=torch.int64)
    wrong = {
        "the weight of qr must be .1536.": good._replace(q_weight=torch.ones(1535)),
        "kv must be .*float32, bfloat16 or float16": good._replace(kv=torch.zeros(9, 576, dtype=torch.int32)),
        "kv must be .9, 576.": good._replace(kv=torch.zeros(9, 512)),
        "slots of kv must be .9.": good._replace(cache=good.cache._replace(slots=slots)),
        "slots of index keys must be .9.": good._replace(
            index=required(good.index)._replace(cache=required(good.index).cache._replace(slots=slots))
        ),
        "plain or fp8_v32 records, got 'index_fp8'": good._replace(
            cache=good.cache._replace(record=IndexFp8Record(576))
        ),
        "64 entries per page needs": good._replace(cache=good.cache._replace(page_entries=64)),
        "bias of index keys must be .128.": good._replace(index=required(good.index)._replace(bias=torch.ones(127))),
    }
    for message, tokens in wrong.items():
        with pytest.raises(ValueError, match=message):
            called(insert_latents, tokens)
    odd = make("odd", torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match="a power of two of channels, got 20"):
        called(insert_latents, odd._replace(index=required(odd.index)._replace(hadamard=True)))
