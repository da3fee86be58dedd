"""Loading: every tensor and every slot accounted for, nothing read before the headers are right."""

import weakref
from functools import partial

import pytest
import torch

import deepseek_attn.checkpoint.safetensors_source as source_module
from deepseek_attn.checkpoint import (
    RandomSource,
    SafetensorsSource,
    TensorInfo,
    hf_name,
    loader,
    read_weight,
    selection,
    write_checkpoint,
)
from deepseek_attn.checkpoint.loader import load_model, load_slots
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.impls import SparseMLAAttentionImpl
from deepseek_attn.kernels.common.quant import decode_e8m0
from deepseek_attn.layers.weights import RMSNorm, SlotKind, WeightSlot, checkpoint_slots
from deepseek_attn.models.block import BuildContext
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from tests.checkpoint.fabricate import MemorySource, hf_packed, random_source, recording_slots, same_bits, tiny
from tests.support.typed import required

WQ_A = "layers.1.attn.wq_a"
EXPERT = "layers.1.ffn.experts.2.w1"


def load(source, config=None, **kwargs):
    slots, filled = recording_slots(config or tiny())
    report = load_slots(slots, source, progress=False, **kwargs)
    return report, filled


def assert_equal_loads(filled, source):
    for name, (weight, scale) in filled.items():
        expected_weight, expected_scale = read_weight(source, name)
        assert same_bits(weight, expected_weight), name
        assert same_bits(scale, expected_scale), name


def refused(source, message, **kwargs):
    """The error of a load, after which no slot may be filled and no tensor read."""
    slots, filled = recording_slots(tiny())
    source.read = source.read_part = lambda *args: pytest.fail("a tensor was read before the headers were checked")
    with pytest.raises(ValueError, match=message) as raised:
        load_slots(slots, source, progress=False, **kwargs)
    assert not filled
    return str(raised.value)


def test_published_names():
    source = random_source()
    report, filled = load(source)
    assert_equal_loads(filled, source)
    assert set(filled) == set(recording_slots(tiny())[0])
    assert sorted(report.loaded) == sorted(source.entries())
    assert report.bytes == sum(info.nbytes for info in source.entries().values())
    assert report.ignored == {}
    assert report.mtp_loaded


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "bf16"])
@pytest.mark.parametrize("spelling", ["model_prefix", "tolerated", "transformers", "transformers_packed"])
def test_other_spellings_load_equally(tmp_path, spelling, expert_dtype):
    source = random_source(expert_dtype=expert_dtype)
    swaps = ((".attn.", ".self_attn."), (".ffn.", ".mlp."), (".gate.bias", ".gate.e_score_correction_bias"))

    def tolerated(name):
        for old, new in swaps:
            name = name.replace(old, new)
        return name[: -len("scale")] + "weight_scale_inv" if name.endswith(".scale") else name

    spelled = {
        "model_prefix": lambda: source.renamed(lambda name: f"model.{name}"),
        "tolerated": lambda: source.renamed(tolerated),
        "transformers": lambda: source.renamed(hf_name),
        "transformers_packed": lambda: hf_packed(source),
    }[spelling]()
    path = write_checkpoint(spelled, tiny(), tmp_path / "ckpt", num_shards=3)
    report, filled = load(SafetensorsSource(path))
    assert_equal_loads(filled, source)
    expected = set(recording_slots(tiny())[0])
    if spelling == "transformers_packed":
        expected = {name for name in expected if not name.startswith("mtp.")}
    assert set(filled) == expected
    assert report.mtp_loaded == (spelling != "transformers_packed")


def test_scale_without_which_a_weight_means_nothing():
    for name in (WQ_A, EXPERT, "layers.1.ffn.shared_experts.w3", "mtp.0.e_proj"):
        source = random_source()
        del source.tensors[f"{name}.scale"]
        refused(source, rf"missing scales \(1\): {name}.scale$")


def test_scale_beside_a_plain_weight():
    source = random_source()
    source.put(f"{WQ_A}.weight", "BF16", torch.zeros(128, 256, dtype=torch.bfloat16))
    refused(source, rf"scales beside weights that are not quantised \(1\): {WQ_A}.scale \(BF16 weight\)")


def test_scale_beside_a_norm():
    source = random_source()
    source.put("layers.1.attn_norm.scale", "F32", torch.zeros(1))
    refused(source, r"not quantised \(1\): layers.1.attn_norm.scale")


def test_missing_and_unknown_tensors():
    source = random_source()
    del source.tensors["layers.2.attn.attn_sink"]
    source.put("layers.2.attn.k_norm.weight", "F32", torch.zeros(1))
    source.put("layers.2.attn.k_norm.scale", "F32", torch.zeros(1))
    text = refused(source, r"missing tensors \(1\): layers.2.attn.attn_sink")
    assert "unknown tensors (2): layers.2.attn.k_norm.weight, layers.2.attn.k_norm.scale" in text


def test_unknown_tensors_alone_are_a_warning():
    source, unknown = random_source(), ("visionary.weight", "layers.2.attn.k_norm.weight", "extra")
    for name in unknown:
        source.put(name, "F32", torch.zeros(2))
    with pytest.warns(UserWarning, match=r"unknown tensors in the checkpoint \(3\): visionary.weight, .*, extra; the"):
        report, filled = load(source)
    assert set(filled) == set(recording_slots(tiny())[0])
    assert report.ignored == report.left_out == {selection.UNKNOWN: unknown}


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.ape", "layers.1.ffn.experts.99.w1.weight", "layers.1.ffn.experts.99.w1.scale",
        "layers.9.attn_norm.weight", "layers.0.attn.indexer.k_norm.weight",
    ],
)  # fmt: skip
def test_tensors_of_parts_that_the_config_lacks_are_an_error(name):
    """A model without them would compute something else than what was trained."""
    source = random_source()
    source.put(name, "F32", torch.zeros(2))
    refused(source, rf"tensors of layers or parts that the config does not have \(1\): {name}")


def test_long_lists_are_cut():
    source = random_source()
    for i in range(14):
        source.put(f"layers.{i + 3}.attn.attn_sink", "F32", torch.zeros(4))
    text = refused(source, r"parts that the config does not have \(14\): layers.3.attn.attn_sink, .* and 4 more")
    assert "layers.13." not in text


WRONG = {
    "norm in int": ("norm.weight", "I32", (256,), "wrong dtypes .*norm.weight is I32, supported are BF16, F16, F32"),
    "linear in fp8 e5m2": (f"{WQ_A}.weight", "F8_E5M2", (128, 256), r"wq_a.weight is F8_E5M2, supported .* F8_E4M3"),
    "linear in f64": (f"{WQ_A}.weight", "F64", (128, 256), "wq_a.weight is F64"),
    "norm in fp8": ("norm.weight", "F8_E4M3", (256,), "norm.weight is F8_E4M3, supported are BF16, F16, F32"),
    "table in float": ("layers.0.ffn.gate.tid2eid", "F32", (512, 2), "tid2eid is F32, supported are I64, I32"),
    "norm shape": ("norm.weight", "BF16", (255,), r"wrong shapes .*norm.weight is \[255\], expected \[256\] for BF16"),
    "fp8 shape": (f"{WQ_A}.weight", "F8_E4M3", (256, 128), r"wq_a.weight is \[256, 128\], expected \[128, 256\]"),
    "fp8 grid": (f"{WQ_A}.scale", "F8_E8M0", (2, 1), r"wq_a.scale is \[2, 1\], expected \[1, 2\]"),
    "fp8 scale dtype": (f"{WQ_A}.scale", "I32", (1, 2), "wq_a.scale is I32, supported are F8_E8M0, U8, F32, BF16"),
    "fp4 shape": (f"{EXPERT}.weight", "I8", (128, 256), r"w1.weight is \[128, 256\], expected \[128, 128\] for I8"),
    "f4 shape": (f"{EXPERT}.weight", "F4", (128, 128), r"w1.weight is \[128, 128\], expected \[128, 256\] for F4"),
    "fp4 scale shape": (f"{EXPERT}.scale", "F8_E8M0", (1, 2), r"w1.scale is \[1, 2\], expected \[128, 8\]"),
    "fp4 scale dtype": (f"{EXPERT}.scale", "BF16", (128, 8), "w1.scale is BF16, supported are F8_E8M0, U8, F32"),
}


@pytest.mark.parametrize(("name", "dtype", "shape", "message"), WRONG.values(), ids=WRONG)
def test_wrong_dtypes_and_shapes(name, dtype, shape, message):
    source = random_source()
    source.tensors[name] = (TensorInfo(dtype, shape, 0), None)
    refused(source, message)


def test_all_problems_in_one_error():
    source = random_source()
    del source.tensors["norm.weight"], source.tensors[f"{WQ_A}.scale"]
    source.put("extra", "F32", torch.zeros(1))
    source.put("head.weight", "F32", torch.zeros(2, 2))
    text = refused(source, "the checkpoint does not fit the model")
    for part in ("missing tensors (1): norm.weight", f"missing scales (1): {WQ_A}.scale", "unknown tensors (1): extra"):
        assert part in text
    assert "head.weight is [2, 2], expected [512, 256]" in text


def test_errors_give_the_stored_name_too():
    source = random_source().renamed(hf_name)
    source.tensors["lm_head.weight"] = (TensorInfo("BF16", (2, 2), 8), None)
    refused(source, r"head.weight \(stored as lm_head.weight\) is \[2, 2\]")


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_plain_weights_of_other_float_dtypes(dtype):
    source = random_source()
    weight = torch.ones(128, 256, dtype={"F16": torch.float16, "F32": torch.float32}[dtype])
    del source.tensors[f"{WQ_A}.scale"]
    source.put(f"{WQ_A}.weight", dtype, weight)
    _, filled = load(source)
    assert same_bits(filled[f"{WQ_A}.weight"][0], weight)
    assert filled[f"{WQ_A}.weight"][1] is None


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8", "F32", "BF16"])
def test_fp8_scales_reach_the_slot_as_numbers(dtype):
    source, expected = random_source(), read_weight(random_source(), f"{WQ_A}.weight")[1]
    byte = source.read(f"{WQ_A}.scale")
    number = {"F32": torch.float32, "BF16": torch.bfloat16}.get(dtype)
    source.put(f"{WQ_A}.scale", dtype, byte if number is None else required(expected).to(number))
    _, filled = load(source)
    assert same_bits(filled[f"{WQ_A}.weight"][1], expected)
    assert torch.equal(required(expected), 2.0 ** (byte.float() - 127))


@pytest.mark.parametrize("dtype", ["I8", "U8", "F4"])
def test_fp4_weights(dtype):
    source = random_source()
    packed = source.read(f"{EXPERT}.weight")
    shape = (128, 256) if dtype == "F4" else (128, 128)
    source.tensors[f"{EXPERT}.weight"] = (TensorInfo(dtype, shape, packed.numel()), packed)
    _, filled = load(source)
    assert same_bits(filled[f"{EXPERT}.weight"][0], packed)
    assert same_bits(filled[f"{EXPERT}.weight"][1], source.read(f"{EXPERT}.scale"))


def test_ignored_copies_and_buffers():
    source = random_source()
    copies = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight", "mtp.0.embed.weight", "mtp.0.shared_head.head.weight")
    buffers = ("model.rotary_emb.main_inv_freq", "rotary_emb.inv_freq", "layers.0.attn.rotary_emb.compress_inv_freq")
    for name in copies + buffers:
        source.put(name, "F32", torch.zeros(2))
    report, filled = load(source)
    assert len(filled) == len(recording_slots(tiny())[0])
    assert set(report.ignored[selection.MTP_COPIES]) == set(copies)
    assert len(report.ignored[selection.INV_FREQ]) == 3
    assert report.ignored.keys() == {selection.MTP_COPIES, selection.INV_FREQ}


def test_dspark_drafter_is_no_mtp_layer():
    source = random_source()
    for name in ("mtp.0.main_proj.weight", "mtp.1.attn.wq_a.weight", "mtp.2.markov_head.weight", "mtp.0.head.weight"):
        source.put(name, "F32", torch.zeros(2))
    report, filled = load(source)
    assert not report.mtp_loaded
    assert not any(name.startswith("mtp.") for name in filled)
    drafter = {name for name in source.entries() if name.startswith("mtp.")}
    assert {rule: set(names) for rule, names in report.ignored.items()} == {selection.DRAFTER: drafter}


def test_vision_tensors_are_left_out_by_name():
    source = random_source()
    vision = (
        *("vision.patch_embed.proj.weight", "vision.blocks.31.attn.wqkv.bias", "aligner.w1.weight"),
        *("image_start", "image_end", "image_newline", "image_pad", "layers.2.ffn.gate.bias_vl"),
    )
    for name in vision:
        source.put(name, "BF16", torch.zeros(2))
    report, filled = load(source)
    assert set(filled) == set(recording_slots(tiny())[0])
    assert {rule: set(names) for rule, names in report.ignored.items()} == {selection.VISION: set(vision)}


def test_vision_shards_need_not_be_there():
    needed = selection.needed_tensors(tiny(), None, False)
    assert needed("layers.0.ffn.gate.bias")
    assert not needed("vision.norm.weight")
    assert not needed("layers.0.ffn.gate.bias_vl")


def test_model_without_mtp_layers():
    config = tiny(num_nextn_predict_layers=0, compress_ratios=[0, 4, 128])
    report, filled = load(random_source(), config)
    assert not report.mtp_loaded
    assert report.ignored.keys() == {selection.MTP_UNUSED}
    assert set(filled) == set(recording_slots(config)[0])


def test_half_an_mtp_layer_is_an_error():
    source = random_source()
    for name in [name for name in source.tensors if name.startswith("mtp.0.attn")]:
        del source.tensors[name]
    refused(source, r"missing tensors .*mtp.0.attn.wq_a.weight")


def test_some_layers():
    source = random_source()
    report, filled = load(source, layers=[0, 2])
    assert_equal_loads(filled, source)
    expected = {name for name in recording_slots(tiny())[0] if not name.startswith(("mtp.", "layers.1."))}
    assert set(filled) == expected
    assert report.ignored.keys() == {selection.OTHER_LAYERS}
    assert set(report.loaded) | set(report.ignored[selection.OTHER_LAYERS]) == set(source.entries())
    assert not report.mtp_loaded


def test_some_layers_still_need_all_their_tensors():
    source = random_source()
    del source.tensors["layers.2.attn_norm.weight"], source.tensors["layers.1.attn_norm.weight"]
    refused(source, r"missing tensors \(1\): layers.2.attn_norm.weight", layers=[0, 2])


def test_layers_that_the_model_lacks():
    refused(random_source(), r"layers \[3, 7\] are not in the model: it has \[0, 1, 2\]", layers=[0, 3, 7])


@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "one"])
def test_attention_only(layers):
    source = random_source()
    report, filled = load(source, layers=layers, attention_only=True)
    assert_equal_loads(filled, source)
    wanted = range(3) if layers is None else layers
    parts = tuple(f"layers.{i}.{part}" for i in wanted for part in ("attn.", "attn_norm."))
    assert set(filled) == {name for name in recording_slots(tiny())[0] if name.startswith(parts)}
    assert report.ignored.keys() == {selection.ATTENTION_ONLY} | ({selection.OTHER_LAYERS} if layers else set())
    assert set(report.loaded).union(*report.ignored.values()) == set(source.entries())


def test_one_tensor_in_memory_at_a_time():
    class Watched(RandomSource):
        alive = None

        def read(self, name):
            if not name.endswith(".scale"):
                assert self.alive is None or self.alive() is None, f"still held while {name} is read"
            self._last = None
            tensor = super().read(name).clone()
            self._last = None
            self.alive = weakref.ref(tensor)
            return tensor

    slots, _ = recording_slots(tiny())
    slots = {name: WeightSlot(slot.shape, slot.kind, lambda weight, scale: None) for name, slot in slots.items()}
    assert load_slots(slots, Watched(tiny()), progress=False).mtp_loaded


def test_each_shard_is_opened_once_and_in_order(tmp_path, monkeypatch):
    source = random_source()
    path = write_checkpoint(source, tiny(), tmp_path / "ckpt", num_shards=4)
    files = SafetensorsSource(path)
    opened = []

    class Counting(source_module.ShardFile):
        def __init__(self, path, found):
            opened.append(path.name)
            super().__init__(path, found)

    monkeypatch.setattr(source_module, "ShardFile", Counting)
    load(files)
    assert opened == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]


def test_progress_counts_bytes(monkeypatch):
    bars = []

    class Bar(loader.tqdm):
        def __init__(self, *args, **kwargs):
            bars.append(self)
            super().__init__(*args, **{**kwargs, "disable": bool(kwargs["disable"])})

    monkeypatch.setattr(loader, "tqdm", Bar)
    slots, _ = recording_slots(tiny())
    report = load_slots(slots, random_source())
    assert bars[0].n == bars[0].total == report.bytes
    load_slots(recording_slots(tiny())[0], random_source(), progress=False)
    assert bars[1].disable


def test_value_that_a_slot_refuses_is_named():
    source = MemorySource({})
    source.put("norm.weight", "F32", torch.zeros(4))

    def refuse(weight, scale):
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"cannot load norm\.weight: no"):
        load_slots({"norm.weight": WeightSlot((4,), SlotKind.FLOAT, refuse)}, source)


def test_a_module_is_filled():
    norm, source = RMSNorm(4, 1e-6), MemorySource({})
    source.put("weight", "BF16", torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16))
    report = load_model(norm, source, progress=False)
    assert report.loaded == ("weight",)
    assert norm.weight.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert norm.weight.dtype == torch.float32


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_the_model_is_filled_from_a_random_checkpoint(numerics):
    config = tiny()
    build = partial(BuildContext, config, get_numerics(numerics), torch.float32, torch.device("cpu"))
    model = DeepseekV4(build(SparseMLAAttentionImpl, 64))
    slots = checkpoint_slots(model)
    expected = recording_slots(config)[0]
    assert {name: slot.shape for name, slot in slots.items()} == {name: slot.shape for name, slot in expected.items()}
    quantizable = [name for name, slot in expected.items() if slot.quantizable]
    assert quantizable
    assert all(slots[name].quantizable for name in quantizable)
    source = RandomSource(config)
    report = load_model(model, source, progress=False)
    assert len(report.loaded) == len(source.entries())
    assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def with_value(tensor, value):
    """A copy whose last place holds ``value``: a number, or a byte of its bits."""
    tensor = tensor.clone()
    target = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    target.view(-1)[-1] = value
    return tensor


NAN_WEIGHTS = {
    "fp8 0x7f": (f"{WQ_A}.weight", 0x7F),
    "fp8 0xff": (f"{WQ_A}.weight", 0xFF),
    "bf16": ("layers.2.attn_norm.weight", float("nan")),
    "f32": ("layers.2.attn.attn_sink", float("nan")),
}


@pytest.mark.parametrize(("name", "value"), NAN_WEIGHTS.values(), ids=NAN_WEIGHTS)
def test_nan_is_loaded_with_a_warning(name, value):
    source = random_source()
    source.put(name, source.tensors[name][0].dtype, with_value(source.read(name), value))
    source.put("norm.weight", "BF16", with_value(source.read("norm.weight"), float("nan")))
    with pytest.warns(UserWarning, match="NaN") as caught:
        _, filled = load(source)
    assert [str(warning.message).split(";")[0] for warning in caught] == [
        f"NaN in the checkpoint (2): {name}, norm.weight"
    ]
    assert same_bits(filled[name][0], source.read(name))


@pytest.mark.filterwarnings("error")
def test_no_warning_of_infinities_and_large_values():
    source = random_source()
    norm = source.read("norm.weight")
    norm[0], norm[1] = float("inf"), float("-inf")
    source.put(f"{WQ_A}.weight", "F8_E4M3", with_value(source.read(f"{WQ_A}.weight"), 0xFE))
    load(source)


BAD_SCALES = {
    "fp8 e8m0": (f"{WQ_A}.scale", "F8_E8M0", 255),
    "fp8 u8": (f"{WQ_A}.scale", "U8", 255),
    "fp8 f32": (f"{WQ_A}.scale", "F32", float("nan")),
    "fp8 bf16": (f"{WQ_A}.scale", "BF16", float("inf")),
    "fp4 e8m0": (f"{EXPERT}.scale", "F8_E8M0", 255),
    "fp4 f32": (f"{EXPERT}.scale", "F32", float("nan")),
}


@pytest.mark.parametrize(("name", "dtype", "value"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_scales_that_are_not_finite(name, dtype, value):
    source = random_source()
    numbers = {"F32": torch.float32, "BF16": torch.bfloat16}
    stored = source.read(name)
    if dtype in numbers:
        stored = decode_e8m0(stored).to(numbers[dtype])
    source.put(name, dtype, with_value(stored, value))
    with pytest.raises(ValueError, match=rf"cannot load {name.removesuffix('scale')}weight: {name}: .*(finite|NaN)"):
        load(source)


def test_less_memory_than_weights():
    source = random_source()
    total = sum(info.nbytes for info in source.entries().values())
    load(source, memory=total)
    refused(source, f"the weights have {total:,} bytes, and there is memory for {total - 1:,}", memory=total - 1)
