"""Engram tables: rows read from a checkpoint's files, whatever the chunks; random ones made by row."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from deepseek_attn.checkpoint.loader import load_slots
from deepseek_attn.checkpoint.random import RandomSource
from deepseek_attn.checkpoint.recipes import ROWS, Recipe
from deepseek_attn.checkpoint.safetensors_source import SINGLE_FILE, SafetensorsSource
from deepseek_attn.config.engram import EngramConfig
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.kernels.common.quant import dequantize_fp8
from deepseek_attn.kernels.engram import TableRows
from deepseek_attn.layers.engram import Chunk, Engram, EngramTables
from deepseek_attn.layers.weights import checkpoint_slots
from tests.config.engram_cases import TINY

CONFIG = EngramConfig(**TINY)
HIDDEN, STREAMS = 48, 2
NUMBERS = [i * 7 % 300 for i in range(300)]
TOKENS = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    """A checkpoint of the two Engram layers alone."""
    found = {}
    for layer in CONFIG.engram_layer_ids:
        prefix, rows = f"layers.{layer}.engram", CONFIG.hash_of(layer).num_rows
        found[f"{prefix}.embed.weight"] = torch.randn(rows, 32).to(torch.float8_e4m3fn)
        found[f"{prefix}.embed.scale"] = torch.randint(120, 130, (rows, 1), dtype=torch.uint8)
        found[f"{prefix}.wkv.weight"] = torch.randn((STREAMS + 1) * HIDDEN, CONFIG.width)
        for name in ("q_weight", "k_weight"):
            found[f"{prefix}.{name}"] = torch.randn(STREAMS, HIDDEN)
    return found


def modules() -> dict[int, Engram]:
    numerics = get_numerics("exact")
    sizes = HIDDEN, STREAMS, 1e-20, numerics, torch.float32
    return {layer: Engram(CONFIG, layer, *sizes) for layer in CONFIG.engram_layer_ids}


def load(folder, stored) -> EngramTables:
    save_file(stored, folder / SINGLE_FILE)
    layers = modules()
    slots = {
        f"layers.{layer}.engram.{name}": slot
        for layer in layers
        for name, slot in checkpoint_slots(layers[layer]).items()
    }
    with SafetensorsSource(folder) as source:
        report = load_slots(slots, source, progress=False)
    assert len(report.by_row) == 4
    assert report.bytes == sum(t.nbytes for name, t in stored.items() if ".embed." not in name)
    return EngramTables(CONFIG, layers, NUMBERS, CPU)


def test_rows_are_those_of_the_ngrams(tmp_path):
    stored = tensors()
    tables = load(tmp_path, stored)
    lookups = tables.look_up([Chunk(TOKENS, 0, len(TOKENS))])
    assert list(lookups) == [0, 2]
    for layer, lookup in lookups.items():
        rows = lookup.wait()
        values = dequantize_fp8(rows.values, rows.scales, 32)
        prefix, numbers = f"layers.{layer}.engram.embed", CONFIG.hash_of(layer)
        table = dequantize_fp8(stored[f"{prefix}.weight"], stored[f"{prefix}.scale"], 32)
        for t in range(len(TOKENS)):
            c = [NUMBERS[TOKENS[t - k]] if t >= k else NUMBERS[2] for k in range(3)]
            mixed = [c[k] * numbers.multipliers[k] for k in range(3)]
            hashes = (mixed[0] ^ mixed[1], mixed[0] ^ mixed[1] ^ mixed[2])
            flat, start = [], 0
            for hashed, primes in zip(hashes, numbers.primes, strict=True):
                for prime in primes:
                    flat.append(start + hashed % prime)
                    start += prime
            assert torch.equal(values[t], table[flat])


@pytest.mark.parametrize("lengths", [[1] * 40, [3, 1, 2, 34], [39, 1]], ids=str)
def test_chunks_of_a_sequence_look_up_what_the_whole_does(tmp_path, lengths):
    tables = load(tmp_path, tensors())
    streams = torch.randn(len(TOKENS), STREAMS, HIDDEN)
    other = TOKENS[::-1]
    whole = tables.look_up([Chunk(TOKENS, 0, len(TOKENS))])
    assert tables.layers
    for layer, module in tables.layers.items():
        expected, start = module(streams, whole[layer].wait()), 0
        for n in lengths:
            # a second sequence before it in the step
            rows = tables.look_up([Chunk(other, 5, 2), Chunk(TOKENS, start, n)])[layer].wait()
            mine = type(rows)(rows.values[2:], rows.scales[2:])
            assert torch.allclose(module(streams[start : start + n], mine), expected[start : start + n], atol=1e-5)
            start += n


def test_a_missing_table_says_what_to_download(tmp_path):
    stored = tensors()
    del stored["layers.2.engram.embed.weight"], stored["layers.2.engram.embed.scale"]
    with pytest.raises(
        ValueError, match=r"missing Engram tables: download the shards .*layers\.2\.engram\.embed\.weight"
    ):
        load(tmp_path, stored)


@pytest.mark.parametrize(("name", "tensor"), [("weight", torch.zeros(17, 32)), ("scale", torch.zeros(17, 1))])
def test_a_table_in_another_format_is_refused(tmp_path, name, tensor):
    with pytest.raises(ValueError, match=rf"layers\.0\.engram\.embed\.{name} is F32"):
        load(tmp_path, tensors() | {f"layers.0.engram.embed.{name}": tensor})


def test_rows_are_read_while_the_caller_goes_on(tmp_path):
    tables, go_on = load(tmp_path, tensors()), threading.Event()
    read = tables.layers[0].read_rows

    def slow(rows: torch.Tensor) -> TableRows:
        assert go_on.wait(60)
        return read(rows)

    tables.layers[0].read_rows = slow
    lookup = tables.look_up([Chunk(TOKENS, 0, 3)])[0]
    assert not lookup.future.done()
    go_on.set()
    assert lookup.wait().values.shape == (3, 4, 32)


def test_an_error_of_the_reading_thread_is_raised_where_rows_are_needed(tmp_path):
    stored = tensors()
    stored["layers.0.engram.embed.scale"].fill_(255)
    lookups = load(tmp_path, stored).look_up([Chunk(TOKENS, 3, 2)])
    with pytest.raises(ValueError, match=r"layers\.0\.engram\.embed\.scale: it holds the e8m0 byte 255"):
        lookups[0].wait()
    assert lookups[2].wait().values.shape == (2, 4, 32)


def test_random_rows_do_not_depend_on_the_others():
    source = RandomSource(ModelConfig.from_preset("tiny"), 3)
    source._recipes["t.weight"] = Recipe(ROWS, (1000, 64))
    source._entries |= dict(source._infos("t.weight", source._recipes["t.weight"]))
    whole, scales = source.read("t.weight"), source.read("t.scale")
    assert (whole.shape, scales.shape) == ((1000, 64), (1000, 2))
    rows = torch.tensor([999, 0, 17, 17])
    assert torch.equal(source.read_rows("t.weight", rows).view(torch.uint8), whole.view(torch.uint8)[rows])
    assert torch.equal(source.read_rows("t.scale", rows), scales[rows])
    values = dequantize_fp8(whole, scales, 32)
    assert abs(float(values.std()) - 1) < 0.01
    assert abs(float(values.mean())) < 0.01
    assert len(values.unique(dim=0)) == 1000
