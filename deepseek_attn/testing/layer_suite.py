"""Tests of attention layers on the impl, or with the cache record, given to `testing.plugin`.

Every query is compared with float64 attention. Caches and scratch memory hold NaN where nothing was written. Index
tensors point to NaN past the length of each row. Unsupported numerics and kinds of layers are skipped with the impl's
reason.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepseek_attn.cache.record import own_record
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import Numerics, get_numerics, numerics_for
from deepseek_attn.impls import DEEPSEEK_V4_IMPLS, AttentionSpec, find_impl
from deepseek_attn.runner.build import pick_device
from deepseek_attn.testing.plugin import chosen
from deepseek_attn.testing.random_layer import RandomLayer

LAYERS = {"SWA": ("tiny", 0), "C4A": ("tiny", 1), "C128A": ("tiny", 2), "V3.2": ("tiny_v32", 0)}
GPU_PRESETS = {"tiny": "tiny_gpu"}
NUMERICS = [("exact", "float32"), ("exact", "bfloat16"), ("official", "bfloat16"), ("serving", "bfloat16")]
STEPS = {  # lengths of two requests, and the chunks they are computed in
    "prompts": ((141, 66), (141,)),
    "chunks": ((141, 66), (60, 5, 63)),
    "decodes": ((70, 3), (1,)),
    "decodes beside prompts": ((150, 21), (20, 1, 1, 1, 127)),
}


@pytest.fixture
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a `RandomLayer`: the impl and the device."""
    impl, record = chosen(request.config)
    if not impl and not record:
        pytest.skip("needs --deepseek-attn-impl or --deepseek-attn-record MODULE:CLASS")
    return {"backend": impl or "reference", "device": pick_device(None)}


def config_of(options: dict[str, Any], preset: str) -> AnyConfig:
    """The config of a preset; on a GPU, of sizes that the kernels support."""
    return ModelConfig.from_preset(GPU_PRESETS.get(preset, preset) if options["device"].type == "cuda" else preset)


def with_record(request: pytest.FixtureRequest, config: AnyConfig, name: str) -> Numerics:
    """Numerics of a model, with the cache record given to the plugin."""
    numerics, record = numerics_for(config, name), chosen(request.config)[1]
    return replace(numerics, name=f"{name} with {record}", kv_record=record) if record else numerics


def make_layer(
    request: pytest.FixtureRequest, options: dict[str, Any], kind: str, name: str, dtype: str, **more: Any
) -> RandomLayer:
    """A layer of the given kind; skips the test if the impl does not support it."""
    preset, index = LAYERS[kind]
    config = config_of(options, preset)
    numerics = with_record(request, config, name)
    spec = AttentionSpec.of(config, numerics, getattr(torch, dtype))
    usable, reason = find_impl(options["backend"], DEEPSEEK_V4_IMPLS).supported(options["device"], spec)
    if not usable and options["backend"] != "reference":
        pytest.skip(reason)
    return RandomLayer(config, index, dtype=dtype, numerics=numerics, **options, **more)


@pytest.fixture(autouse=True)
def seeded(request):
    """Seeds torch by the name of the test, so that hidden states are the same in every run."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def check_all(layer: RandomLayer, lengths: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    """Runs requests of these lengths and compares every query of each."""
    requests = [layer.request(length) for length in lengths]
    layer.run(requests, chunks)
    for request in requests:
        layer.check(request)


def test_it_serves_a_kind_of_layer(options):
    """The impl supports at least one model in at least one numerics preset."""
    impl, reasons = find_impl(options["backend"], DEEPSEEK_V4_IMPLS), []
    for preset in ("tiny", "tiny_v32"):
        config = config_of(options, preset)
        for name, dtype in NUMERICS:
            spec = AttentionSpec.of(config, numerics_for(config, name), getattr(torch, dtype))
            usable, reason = impl.supported(options["device"], spec)
            if usable:
                return
            reasons.append(f"{preset}, {name}, {dtype}: {reason}")
    pytest.fail(f"{options['backend']} supports none of these:\n" + "\n".join(reasons))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("name", "dtype"), NUMERICS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(request, options, kind, name, dtype, steps):
    check_all(make_layer(request, options, kind, name, dtype), *STEPS[steps])


@pytest.mark.parametrize("fp8_mode", ["mixed", "separate"])
@pytest.mark.parametrize("kind", LAYERS)
def test_prompts_over_pages_and_over_gathered_rows(request, options, kind, fp8_mode):
    layer = make_layer(request, options, kind, *NUMERICS[-1], fp8_mode=fp8_mode)
    check_all(layer, (90, 41), (50, 40))


@pytest.mark.parametrize("kind", LAYERS)
def test_decodes_of_several_tokens(request, options, kind):
    layer = make_layer(request, options, kind, *NUMERICS[0])
    layer.session.decode_query_len = 3
    check_all(layer, (40, 23), (7, 3, 2, 3))


@pytest.mark.parametrize("kind", LAYERS)
def test_prompts_that_share_the_workspace_in_turn(request, options, kind):
    """Three prompts share a workspace that holds the gathered rows of one: the impl is called once per prompt."""
    layer = make_layer(request, options, kind, *NUMERICS[0], max_model_len=150, max_num_batched_tokens=130)
    if layer.attention.prefill_workspace_rows:
        layer.attention.prefill_workspace_rows //= min(4, layer.runner.layout.max_num_seqs)
    requests = [layer.request(length) for length in (50, 41, 33)]
    layer.run(requests, (40,))
    for one in requests:
        layer.check(one)


@pytest.mark.parametrize("kind", LAYERS)
def test_forks_and_truncated_sequences(request, options, kind):
    layer = make_layer(request, options, kind, *NUMERICS[0])
    one = layer.request(60)
    layer.run([one], (50, 1, 9))
    other = layer.fork(one)
    other.x = torch.cat([other.x, layer.hidden_states(30)])
    layer.run([other], (1, 13))
    layer.check(one)
    layer.check(other)
    layer.truncate(other, 82)
    layer.run([other], (3, 1))
    layer.check(other)


def test_values_of_the_record(request, options):
    """Entries read from a page equal the written values within rounding; all other bytes of the cache are NaN."""
    name = chosen(request.config)[1]
    if not name:
        pytest.skip("needs --deepseek-attn-record MODULE:CLASS")
    for nope, rope, dtype in ((64, 64, torch.float32), (448, 64, torch.bfloat16), (128, 0, torch.bfloat16)):
        record = own_record(name, nope, rope, dtype, f"{name!r} is no record")
        pool, n = record.allocate(4, 7), 7
        pool.fill_(0xFF)
        rows = torch.randn(9, nope + rope, dtype=torch.float32, device="cpu")
        slots = torch.tensor([20, 3, -1, 8, 27, 0, 14, -1, 13], dtype=torch.int64, device="cpu")
        record.insert(pool, n, slots, rows)
        back = record.gather(pool, n, slots, torch.float32)
        kept = slots >= 0
        assert not back[~kept].any()
        error = (back[kept] - rows[kept]).norm(dim=1) / rows[kept].norm(dim=1)
        assert float(error.max()) < 0.1, f"stored values are off by {float(error.max()):.1e}"
        others = torch.tensor(
            [slot for slot in range(28) if slot not in slots.tolist()], dtype=torch.int64, device="cpu"
        )
        parts = record._views(pool, n)
        assert all(bool((part[others // n, others % n] == 0xFF).all()) for part in parts)


def test_the_numerics_that_name_it(request):
    """An unknown record is refused by name, before anything is built."""
    if not chosen(request.config)[1]:
        pytest.skip("needs --deepseek-attn-record MODULE:CLASS")
    numerics = replace(get_numerics("exact"), name="none", kv_record="no_such_record")
    with pytest.raises(ValueError, match="no_such_record"):
        RandomLayer("tiny", 0, numerics=numerics, backend="reference")
