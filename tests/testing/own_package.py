"""The source of a package of someone else's: an impl, a record and a family, and what is wrong with some others."""

SOURCE = '''
from dataclasses import dataclass

import torch

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.cache.record import Record, register_record
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.impls import DeepseekV4SparseMLABackend, SplitAttentionImpl, register_impl
from deepseek_attn.kernels.attention import sparse_attention, sparse_attention_paged
from deepseek_attn.models.block import Block
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.models.families import DeepseekV4Family, register_family


class Backend(DeepseekV4SparseMLABackend):
    supported_kv_records = ("plain", "int16")


@register_impl
class Impl(SplitAttentionImpl):
    name = "own_impl"
    backend_cls = Backend
    batch_dependence = ""

    @classmethod
    def kernels_supported(cls, device, spec):
        return True, "anywhere"

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return sparse_attention_paged(q, keys, layer.scale, layer.attn_sink, layer.value_dim, output)[0]

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output):
        return sparse_attention(q, kv, indices, layer.scale, layer.attn_sink, lens, layer.value_dim, output)[0]


class Rounding(Impl):
    """Rounds its result to a half's precision."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return super().attend_pages(layer, q, keys, output).half().to(q.dtype)


@register_record
@dataclass(frozen=True)
class Int16(Record):
    nope_dim: int
    rope_dim: int
    dtype: torch.dtype
    name = "int16"

    @property
    def dim(self):
        return self.nope_dim + self.rope_dim

    @property
    def row_bytes(self):
        return (2 * self.dim, 4)

    def encode(self, rows):
        scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-20) / 32767
        return (rows.float() / scale).round().short().view(torch.uint8), scale.view(torch.uint8)

    def decode(self, parts, dtype):
        return (parts[0].contiguous().view(torch.int16) * parts[1].contiguous().view(torch.float32)).to(dtype)


@dataclass(frozen=True)
class Config(ModelConfig):
    @classmethod
    def from_dict(cls, raw, origin="dict"):
        config = ModelConfig.from_dict({**raw, "model_type": "deepseek_v4"}, origin)
        return cls(**vars(config) | {"model_type": "own_family"})


class Attention(DeepseekV4MLAAttention):
    """Twice the softmax scale."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale *= 2


class OwnBlock(Block):
    attention_class = Attention


class Model(DeepseekV4):
    block_class = OwnBlock


class Family(DeepseekV4Family):
    model_class = Model


register_family("own_family", Config, Family)
'''
WRONG = """
from dataclasses import dataclass

import torch

from deepseek_attn.cache.record import Record
from deepseek_attn.impls import DeepseekV4SparseMLABackend, SplitAttentionImpl

number = 3


class Nothing:
    pass


class NoMethods(SplitAttentionImpl):
    name = "no_methods"
    backend_cls = DeepseekV4SparseMLABackend


class Methods(SplitAttentionImpl):
    def kernels_supported(self, device, spec): ...
    def attend_pages(self, layer, q, keys, output): ...
    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output): ...


class Arguments(NoMethods):
    @classmethod
    def kernels_supported(cls, device, spec): ...
    @classmethod
    def attend_pages(cls, layer, q, keys): ...
    @classmethod
    def attend_rows(cls, layer, q, kv, indices, output): ...


class Taken(SplitAttentionImpl):
    name = "triton"
    backend_cls = DeepseekV4SparseMLABackend

    @classmethod
    def kernels_supported(cls, device, spec): ...
    @classmethod
    def attend_pages(cls, layer, q, keys, output): ...
    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output): ...


class Nowhere(Taken):
    name = "nowhere"

    @classmethod
    def kernels_supported(cls, device, spec):
        return False, "it needs a toaster"


class HalfARecord(Record):
    name = "half"
    row_bytes = (4,)


@dataclass(frozen=True)
class Floats(Record):
    nope_dim: int
    rope_dim: int
    dtype: torch.dtype
    name = "floats"

    @property
    def dim(self):
        return self.nope_dim + self.rope_dim

    @property
    def row_bytes(self):
        return (4 * self.dim,)

    def encode(self, rows):
        return (rows.float(),)

    def decode(self, parts, dtype):
        return parts[0].view(torch.float32).to(dtype)


class NoArguments(Floats):
    def __init__(self): ...
"""
