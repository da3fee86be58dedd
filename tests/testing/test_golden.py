"""Golden fixtures: judged by transformers and by formulas written out, and what they say of wrong results."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from deepseek_attn import ModelRunner
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.crop import crop_checkpoint
from deepseek_attn.cli import main
from deepseek_attn.testing import golden
from deepseek_attn.testing.golden_source import GoldenSource, golden_config, uniform
from deepseek_attn.testing.reference import layer_reference
from deepseek_attn.testing.transformers_layer import TransformersLayer
from tests.support.oracle_dense import DenseOracle
from tests.support.oracle_transformers import TransformersOracle
from tests.support.oracle_v32 import TransformersV32Oracle
from tests.support.small_models import small_config
from tests.support.typed import required, untyped
from tests.support.v41_cases import oracle_of

V4_LAYERS = {"v4_swa_layer": 0, "v4_c4a_layer": 1, "v4_c128a_layer": 2}


def model_of(family) -> Any:
    config = golden_config(family)
    return config, GoldenSource(config)


def transformers_ops(name):
    """The ops of transformers' own V4 layer, as the tests of another engine would collect theirs."""
    fixture, (config, source) = golden.load(name), model_of("v4")
    layer = TransformersLayer(config, source, V4_LAYERS[name])
    ops = {}

    def capture(module, query, key, value, mask, **options):
        result = modeling_deepseek_v4.eager_attention_forward(module, query, key, value, mask, **options)
        tokens = query.shape[2]
        ops["query"], ops["key"] = query[0].transpose(0, 1), key[0, 0, :tokens]
        if key.shape[2] > tokens:
            ops["entries"] = key[0, 0, tokens:]
        ops["attended"] = result[0][0]
        return result

    layer.attention.q_a_norm.register_forward_hook(lambda module, args, result: ops.update(q_latent=result[0]))
    if name == "v4_c4a_layer":
        indexer = layer.attention.compressor.indexer
        indexer.register_forward_hook(lambda module, args, result: ops.update(selected=result[0]))
        scorer = indexer.scorer
        scorer.register_forward_hook(lambda module, args, result: ops.update(index_scores=result[0]))
    ALL_ATTENTION_FUNCTIONS.register("capture", capture)
    layer.attention.config._attn_implementation = "capture"
    ops["output"] = layer(fixture.inputs["x"])
    return fixture, ops


@pytest.mark.parametrize("name", V4_LAYERS)
def test_layers_of_v4_equal_transformers(name):
    fixture, ops = transformers_ops(name)
    if "index_scores" in ops:  # transformers scores entries that a query does not see
        visible = (torch.arange(45)[:, None] + 1) // 4
        ops["index_scores"] = ops["index_scores"].masked_fill(torch.arange(11) >= visible, 0)
    assert {"query", "key", "attended", "output", "q_latent"} <= ops.keys()
    assert ("selected" in ops) == (name == "v4_c4a_layer")
    results = golden.compare(fixture, ops)
    assert [result.op for result in results] == [op for op in fixture.ops if op in ops]


def test_the_example_of_the_page_on_ports():
    text = (Path(__file__).parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert set(names["ops"]) == {"q_latent", "output"}
    assert all(f"`{name}`" in text for name in golden.names())


def test_the_first_op_that_differs_is_named():
    fixture, ops = transformers_ops("v4_c4a_layer")
    del ops["index_scores"]
    ops["entries"] = ops["entries"].clone()
    ops["entries"][7, 501] += 0.5
    ops["output"] = ops["output"] * 1.01
    with pytest.raises(golden.GoldenMismatch, match=r"v4_c4a_layer: entries differs by .* at \[7, 501\]") as error:
        golden.compare("v4_c4a_layer", ops)
    assert error.value.first.op == "entries"
    assert error.value.first.got - error.value.first.expected == pytest.approx(0.5, abs=1e-5)
    assert "ops before it are right (q_latent, key); 2 of 7 ops differ" in str(error.value)
    ops["selected"][30] = -1
    assert [result.op for result in golden.differences(fixture, ops) if not result.passed] == [
        *("entries", "selected", "output")
    ]


def test_layer_of_v32_equals_transformers():
    fixture, (config, source) = golden.load("v32_layer"), model_of("v32")
    reference: Any = layer_reference(config, source, 0)
    assert required(config.index_topk) < 40
    golden.compare(fixture, {"output": TransformersLayer(config, source, 0)(fixture.inputs["x"])})
    x = fixture.inputs["x"].double()
    scores = reference.index_scores(x)
    hidden = torch.arange(len(x)) > torch.arange(len(x))[:, None]
    golden.compare(fixture, {"index_scores": scores.masked_fill(hidden, 0), "q_latent": reference.latent(x)})


@pytest.mark.parametrize(("name", "layer"), [("v4_hash_moe", 0), ("v4_moe", 1)])
@torch.no_grad()
def test_experts_of_v4_equal_transformers(name, layer):
    fixture, (config, source) = golden.load(name), model_of("v4")
    mlp: Any
    mlp, ops = TransformersOracle(config, source).model.model.layers[layer].mlp, {}

    def route(module, args, result):
        order = result[2].argsort(1)
        ops.update(experts=result[2].gather(1, order), expert_weights=result[1].gather(1, order))

    mlp.gate.register_forward_hook(route)
    mlp.shared_experts.register_forward_hook(lambda module, args, result: ops.update(shared=result.view(24, -1)))
    x = fixture.inputs["x"].float()[None]
    ops["output"] = mlp(x, input_ids=fixture.inputs["token_ids"][None])[0]
    ops["routed"] = ops["output"] - ops["shared"]
    golden.compare(fixture, ops)


@torch.no_grad()
def test_experts_of_v32_equal_transformers():
    fixture, (config, source) = golden.load("v32_moe"), model_of("v32")
    mlp: Any
    mlp, ops = TransformersV32Oracle(config, source).model.model.layers[1].mlp, {}
    mlp.shared_experts.register_forward_hook(lambda module, args, result: ops.update(shared=result.view(24, -1)))
    ops["output"] = mlp(fixture.inputs["x"].float()[None])[0]
    golden.compare(fixture, ops)


@torch.no_grad()
def test_hyper_connections_equal_transformers():
    fixture, (config, source) = golden.load("v4_hyper_connection"), model_of("v4")
    layer: Any = TransformersOracle(config, source).model.model.layers[1]
    streams, y = fixture.inputs["streams"].float(), fixture.inputs["y"].float()
    post, comb, collapsed = (part[0] for part in layer.attn_hc(streams[None]))
    after = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    ops = {"post": post, "comb": comb, "collapsed": collapsed, "input": layer.input_layernorm(collapsed)}
    golden.compare(fixture, ops | {"streams": after})


@pytest.mark.exhaustive
@torch.no_grad()
def test_the_model_of_v4_equals_transformers():
    """Each sublayer's input and output, streams and logits; drafts by brute force, as transformers has no MTP layer."""
    fixture, (config, source) = golden.load("v4_model"), model_of("v4")
    model: Any
    model, ops = TransformersOracle(config, source).model, {}

    def keep(name, choose):
        return lambda module, args, result: ops.update({name: choose(args, result)})

    for i, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(keep(f"layers.{i}.attn_input", lambda args, result: result[0]))
        layer.self_attn.register_forward_hook(keep(f"layers.{i}.attn_output", lambda args, result: result[0][0]))
        layer.post_attention_layernorm.register_forward_hook(
            keep(f"layers.{i}.ffn_input", lambda args, result: result[0])
        )
        layer.mlp.gate.register_forward_hook(keep(f"layers.{i}.experts", lambda args, result: result[2]))
        layer.mlp.register_forward_hook(keep(f"layers.{i}.ffn_output", lambda args, result: result[0]))
        layer.register_forward_hook(keep(f"layers.{i}.output", lambda args, result: result[0]))
    indexer = model.model.layers[1].self_attn.compressor.indexer
    indexer.register_forward_hook(keep("layers.1.selected", lambda args, result: result[0]))
    tokens = fixture.inputs["token_ids"]
    ops["logits"] = model(tokens[None], use_cache=False).logits[0]
    ops["mtp_logits"] = DenseOracle(config, source)(tokens.tolist()).mtp_logits
    assert {op for op in fixture.ops if not op.startswith("mtp.")} == ops.keys()
    golden.compare(fixture, ops)


def test_the_model_of_v32_equals_transformers():
    fixture, (config, source) = golden.load("v32_model"), model_of("v32")
    ops: dict[str, Any] = {}
    oracle = TransformersV32Oracle(config, source)
    assert len(oracle.model.model.layers) == 2
    for i, layer in enumerate(untyped(oracle.model.model.layers)):
        name = f"layers.{i}.output"
        layer.register_forward_hook(
            lambda module, args, result, name=name: ops.update({name: result[0] if result.dim() == 3 else result})
        )
    ops["logits"] = oracle(fixture.inputs["token_ids"].tolist())
    golden.compare(fixture, ops)


@pytest.mark.exhaustive
def test_the_model_of_v41_equals_formulas_written_out():
    fixture, (config, source) = golden.load("v41_model"), model_of("v41")
    golden.compare(fixture, {"logits": oracle_of(config, source)(fixture.inputs["token_ids"].tolist())})


def test_layers_that_share_selections_equal_formulas_written_out():
    fixture, (config, source) = golden.load("v41_shared_selections"), model_of("v41")
    oracle, ops = oracle_of(config, source), {}
    oracle.tokens = list(range(40))
    oracle.entries, oracle.index_keys, oracle.selection, oracle.kept_blocks = {}, {}, [], []
    for layer, x in zip(fixture.layers, fixture.inputs["x"].double(), strict=True):
        ops[f"layers.{layer}.output"] = oracle.attention(layer, x)
        if config.layers[layer].owns_entries:
            ops[f"layers.{layer}.entries"] = oracle.entries[layer]
    assert len(ops) == 7
    golden.compare(fixture, ops)


@pytest.mark.parametrize("name", [name for name in golden.names() if "model" not in name])
def test_official_numerics_are_near_float32(name):
    """Rounding, and nothing but rounding, is between them; near ties may choose otherwise."""
    fixture = golden.load(name)
    exact, official = fixture.results["float32"], fixture.results["official"]
    first = next(iter(official))
    golden.compare(fixture, {op: exact[op] for op in (first, list(official)[1]) if op in exact}, "official",
                   {"experts": 0.2} if first == "experts" else None)  # fmt: skip
    for op in [op for op in official if op.endswith("output") and not op.startswith("layers")]:
        error = (official[op].double() - exact[op].double()).norm() / exact[op].double().norm()
        assert error < 0.4


# bytes of caches, decoded from their description


def e8m0(byte):
    return 2.0 ** (byte.double() - 127)


def fp8(values):
    return values.view(torch.float8_e4m3fn).double()


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def fp4(packed):
    """Two values in a byte, the even channel in the low nibble."""
    return torch.stack([FP4[packed.long() & 15], FP4[packed.long() >> 4]], -1).flatten(1)


def decode_584(rows):
    """448 e4m3 values, 64 rotated ones in bfloat16, 7 scales of 64 values and a byte of 0."""
    assert rows.shape[1] == 584
    assert not rows[:, 583].any()
    values = fp8(rows[:, :448]).unflatten(1, (7, 64)) * e8m0(rows[:, 576:583])[:, :, None]
    return torch.cat([values.flatten(1), rows[:, 448:576].contiguous().view(torch.bfloat16).double()], 1)


def decode_656(rows):
    """512 e4m3 values, four float32 scales of 128 values, 64 rotated ones in bfloat16."""
    assert rows.shape[1] == 656
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    values = fp8(rows[:, :512]).unflatten(1, (4, 128)) * scales[:, :, None]
    return torch.cat([values.flatten(1), rows[:, 528:].contiguous().view(torch.bfloat16).double()], 1)


def decode_288(rows):
    """512 e2m1 values, then 32 e4m3 scales of 16."""
    assert rows.shape[1] == 288
    return (fp4(rows[:, :256]).unflatten(1, (32, 16)) * fp8(rows[:, 256:])[:, :, None]).flatten(1)


def decode_132(rows):
    """128 e4m3 values and one float32 scale."""
    assert rows.shape[1] == 132
    return fp8(rows[:, :128]) * rows[:, 128:].contiguous().view(torch.float32).double()


def decode_68(rows):
    """128 e2m1 values, then a scale byte of each 32."""
    assert rows.shape[1] == 68
    return (fp4(rows[:, :64]).unflatten(1, (4, 32)) * e8m0(rows[:, 64:])[:, :, None]).flatten(1)


@pytest.mark.parametrize(
    ("name", "op", "cache", "decode"),
    [
        ("v4_c4a_layer", "entries", "cache.compressed", decode_584),
        ("v4_c128a_layer", "entries", "cache.compressed", decode_584),
        ("v4_c4a_layer", "index_keys", "cache.index", decode_68),
        ("v32_layer", "latents", "cache.latent", decode_656),
        ("v32_layer", "index_keys", "cache.index", decode_132),  # rotated by a Hadamard matrix, as V4's
        ("v41_shared_selections", "layers.1.entries", "layers.1.cache.compressed", decode_288),
    ],
)
def test_bytes_of_caches(name, op, cache, decode):
    """Decoded as the formats are specified, they are the entries, which are near those of float32."""
    fixture = golden.load(name)
    official, exact = fixture.results["official"], fixture.results["float32"][op].double()
    values = decode(official[cache][-len(official[op]) :])
    assert torch.equal(values.float(), official[op])
    if op != "index_keys":
        assert (values - exact).norm() / exact.norm() < (0.3 if "288" in decode.__name__ else 0.15)


def test_bytes_of_the_window():
    """Keys of the last window, whose values before rounding are known: each scale is the smallest that holds them."""
    fixture = golden.load("v4_swa_layer")
    rows, keys = fixture.results["official"]["cache.window"], fixture.results["official"]["key"][-16:].double()
    largest = keys[:, :448].unflatten(1, (7, 64)).abs().amax(2).clamp(min=1e-4)
    assert torch.equal(rows[:, 576:583].double(), (largest / 448).log2().ceil() + 127)
    decoded = decode_584(rows)
    assert torch.equal(decoded[:, 448:], keys[:, 448:])
    assert ((decoded - keys).abs() <= keys.abs() / 16 + e8m0(rows[:, 576:583]).max() / 512).all()


# weights, files, the command


def test_weights_are_the_same_everywhere():
    """Integers and two float32 operations: no generator of torch, and no product whose order a machine chooses."""
    drawn = uniform("x", (100_000,))
    assert drawn[:2].tolist() == [scalar("x", 0), scalar("x", 1)]
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.var()) - 1) < 0.02
    digests = {}
    for family in ("v4", "v32", "v41"):
        _, source = model_of(family)
        digest = hashlib.sha256()
        for name in source.entries():
            digest.update(source.read(name).contiguous().view(torch.uint8).numpy().tobytes())
        digests[family] = digest.hexdigest()[:16]
    assert digests == DIGESTS


DIGESTS = {"v4": "7c532d627718e417", "v32": "5d5c80b54ce399d3", "v41": "b7636493a7221b8e"}


def scalar(name, i):
    """`uniform`'s value i, in plain integers."""
    mask = 2**64 - 1
    z = (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") + i) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    step, shift = torch.tensor(2**-23 * math.sqrt(3)), torch.tensor(math.sqrt(3))
    return float((z >> 40) * step.float() - shift.float())


def test_written_fixtures_appear_together(tmp_path, monkeypatch):
    """After an interruption the same command can be run again."""

    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    command = ["port-check", "--write", str(tmp_path / "g"), "v4_swa_layer"]
    with monkeypatch.context() as patch:
        patch.setattr(golden, "load", interrupted)
        assert main(command) == 130
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["v4", "v4_swa_layer.safetensors"]
    assert main(command) == 2


@pytest.mark.exhaustive
def test_files_and_checkpoints(tmp_path, capsys):
    """What `--write` leaves: fixtures that load equally, and checkpoints that give the golden logits."""
    assert main(["port-check", "--write", str(tmp_path / "g"), "v4_c4a_layer", "v4_model", "v41_model"]) == 0
    assert "v4_model.safetensors" in capsys.readouterr().out
    for name in ("v4_c4a_layer", "v4_model"):
        fixture, stored = golden.load(name), golden.load(tmp_path / "g" / f"{name}.safetensors")
        assert (stored.ops, stored.version, stored.layers) == (fixture.ops, fixture.version, fixture.layers)
        for numerics, ops in fixture.results.items():
            assert all(torch.equal(stored.results[numerics][op], ops[op]) for op in ops)
            golden.compare(stored, ops, numerics, dict.fromkeys(ops, 0.0))
    runner = ModelRunner.from_pretrained(tmp_path / "g" / "v4", device="cpu", progress=False)
    tokens = golden.load("v4_model").inputs["token_ids"].tolist()
    golden.compare("v4_model", {"logits": runner.score([tokens])[0]})
    weights = golden.load("v4_c4a_layer").weights()
    assert "layers.0.attn.wq_a.weight" not in weights
    stored = golden.load("v4_c4a_layer").weights(dequantized=False)
    assert stored["layers.1.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    x = golden.load("v4_c4a_layer").inputs["x"].float() @ weights["layers.1.attn.wq_a.weight"].T
    latent = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights["layers.1.attn.q_norm.weight"]
    golden.compare("v4_c4a_layer", {"q_latent": latent})


def test_the_command_compares(tmp_path, capsys):
    ops = dict(golden.load("v4_swa_layer").results["official"])
    ops["key"] = ops["key"].clone()
    ops["key"][3, 7] = 50
    del ops["query"]
    save_file(ops, tmp_path / "ours.safetensors")
    command = ["port-check", "v4_swa_layer", "--outputs", str(tmp_path / "ours.safetensors"), "--numerics", "official"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "not given: query" in out
    assert "first op that differs: key differs by" in out
    assert "at [3, 7]: expected" in out
    assert main([*command[:-2], "--numerics", "float32"]) == 2
    assert "has no op cache.window in float32" in capsys.readouterr().err
    assert main(["port-check", "--list"]) == 0
    assert main(["port-check", "--list", "v41_shared_selections"]) == 0
    assert "layers.6.selected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("none --outputs {0}/x.safetensors", "'none' is neither a file nor a fixture: there are v4_swa_layer"),
        ("v4_moe --outputs {0}/x.safetensors", "is not a readable safetensors file"),
        ("--write {0}/g none", "no fixture none"),
        ("--list --model x --layers 0", "--model goes with --layers and --write DIR"),
        ("v4_moe v32_moe --outputs x", "compared with one fixture"),
    ],
)
def test_refusals(tmp_path, capsys, command, message):
    assert main(["port-check", *command.format(tmp_path).split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_wrong_shapes_and_no_outputs():
    with pytest.raises(ValueError, match=r"q_latent is \[3, 128\]: expected \[24, 128\]"):
        golden.compare("v4_swa_layer", {"q_latent": torch.zeros(3, 128)})
    with pytest.raises(ValueError, match="no outputs to compare"):
        golden.compare("v4_swa_layer", {})


def test_layers_of_a_crop(tmp_path, capsys):
    """A fixture of a layer of any checkpoint, which transformers' layer with its weights equals."""
    config = small_config([0, 4, 128], vocab_size=280)
    model = write_checkpoint(RandomSource(config, 0), config, tmp_path / "model")
    crop_checkpoint(model, tmp_path / "crop", layers=[1, 2], experts=2)
    command = ["port-check", "--model", str(tmp_path / "crop"), "--layers", "0", "--write", str(tmp_path / "g")]
    assert main(command) == 0
    fixture = golden.load(tmp_path / "g" / "layer_0.safetensors")
    theirs = TransformersLayer(config, RandomSource(config, 0), 1)
    golden.compare(fixture, {"output": theirs(fixture.inputs["x"])})
    with pytest.raises(ValueError, match="was made from another checkpoint"):
        fixture.weights()


def test_results_of_numpy_and_of_other_types():
    fixture = golden.load("v4_c4a_layer")
    output = fixture.results["float32"]["output"]
    assert golden.compare(fixture, untyped({"output": output.numpy()}))[0].difference == 0
    for outputs, message in (
        ({"output": output.tolist()}, "output is of type list: pass a tensor or an array"),
        ({"output": output.to("meta")}, "output is a tensor on the meta device"),
        (None, "outputs is of type NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            golden.compare(fixture, untyped(outputs))
    with pytest.raises(ValueError, match="a fixture is named by its name or its file, got None"):
        golden.load(untyped(None))
