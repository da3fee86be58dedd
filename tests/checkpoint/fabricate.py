"""Small checkpoints for tests: sources in memory that can be renamed, edited and written."""

import re
from functools import cache

import torch

from deepseek_attn.checkpoint import CheckpointSource, RandomSource, TensorInfo, hf_name
from deepseek_attn.checkpoint.published import published_tensors
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.layers.weights import SlotKind, WeightSlot

EXPERT = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.(weight|scale)")


def tiny(**changes):
    """SWA + hash, C4A, C128A and an MTP layer, three experts."""
    small = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "n_routed_experts": 3}
    return ModelConfig.from_preset("tiny").replace(**{**small, **changes})


class MemorySource(CheckpointSource):
    """Tensors of a dict ``name -> (TensorInfo, tensor)``, which tests edit."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    @classmethod
    def of(cls, source):
        return cls({name: (info, source.read(name).clone()) for name, info in source.entries().items()})

    def entries(self):
        return {name: info for name, (info, _) in self.tensors.items()}

    def read(self, name):
        return self.tensors[name][1]

    def put(self, name, dtype, tensor):
        self.tensors[name] = (TensorInfo(dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size()), tensor)

    def renamed(self, rename):
        return MemorySource({rename(name): value for name, value in self.tensors.items()})


def random_source(config=None, **kwargs):
    if config is None:
        return MemorySource.of(random_tiny(**kwargs))
    return MemorySource.of(RandomSource(config, seed=3, **kwargs))


@cache
def random_tiny(**kwargs):
    """Most tests start from it; `MemorySource.of` copies what they edit."""
    return MemorySource.of(RandomSource(tiny(), seed=3, **kwargs))


def hf_packed(source):
    """The same tensors as transformers saves them: its names, experts packed, no MTP."""
    packed = MemorySource({})
    groups = {}
    for name, (info, tensor) in source.tensors.items():
        expert = EXPERT.fullmatch(name)
        if expert:
            prefix, index, projection, leaf = expert.groups()
            groups.setdefault((prefix, leaf, info.dtype), {})[projection, int(index)] = tensor
        elif not name.startswith("mtp."):
            packed.tensors[hf_name(name)] = (info, tensor)
    for (prefix, leaf, dtype), parts in groups.items():
        count = max(index for _, index in parts) + 1
        suffix = "_scale_inv" if leaf == "scale" else ""
        rows = [torch.cat([parts["w1", e], parts["w3", e]]) for e in range(count)]
        packed.put(f"{hf_name(prefix)}.gate_up_proj{suffix}", dtype, torch.stack(rows))
        down = torch.stack([parts["w2", e] for e in range(count)])
        packed.put(f"{hf_name(prefix)}.down_proj{suffix}", dtype, down)
    return packed


def recording_slots(config):
    """(slots for every published tensor of ``config``, dict that they fill with (weight, scale))."""
    filled = {}
    kinds = {"quantized": SlotKind.LINEAR, "expert": SlotKind.LINEAR, "table": SlotKind.INT}

    def slot(name, recipe):
        def load(weight, scale):
            assert name not in filled, f"{name} was loaded twice"
            filled[name] = (weight, scale)

        return WeightSlot(recipe.shape, kinds.get(recipe.kind, SlotKind.FLOAT), load)

    return {name: slot(name, recipe) for name, recipe in published_tensors(config)}, filled


def same_bits(a, b):
    """Bit equality of two tensors (or Nones), dtype and shape included."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))
