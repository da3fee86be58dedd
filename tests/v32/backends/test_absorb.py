"""Absorbed projections equal the naive form for every format of kv_b_proj."""

import pytest
import torch
from torch import nn

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.kernels.common.quant import dequantize_fp8_block, quantize_fp8_block
from deepseek_attn.layers.linear import Linear
from deepseek_attn.v32.backends import dynamic_per_batched_tensor_quant
from deepseek_attn.v32.backends.absorb import MLAAbsorption

N, P, V, L = 3, 64, 48, 128


class Layer(MLAAbsorption):
    def __init__(self, kv_b_proj):
        self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim = N, L, P, V
        self.kv_b_proj = kv_b_proj


class Packed(nn.Module):
    """A linear whose weight is in a format of its own."""

    def __init__(self, name, weight, answer_is_tuple=False):
        super().__init__()
        setattr(self, name, torch.zeros(3, dtype=torch.int32))
        self.real, self.answer_is_tuple = weight, answer_is_tuple

    def forward(self, x):
        y = x @ self.real.t()
        return (y, None) if self.answer_is_tuple else y


def stored(kind, weight):
    """A layer that holds ``weight`` in the format ``kind``, and the values that it then holds."""
    if kind in ("qweight", "weight_packed"):
        return Packed(kind, weight, kind == "qweight"), weight
    if kind == "nn.Linear":
        layer = nn.Linear(L, len(weight), bias=False)
        layer.weight.data.copy_(weight)
        return layer, weight
    numerics = get_numerics("official" if kind == "fp8" else "exact")
    layer = Linear(L, len(weight), numerics, torch.float32)
    if kind == "fp8":
        q, scale = quantize_fp8_block(weight)
        layer.load(q, scale)
        assert layer.weight.dtype == torch.float8_e4m3fn
        return layer, dequantize_fp8_block(q, scale)
    layer.load(weight)
    return layer, weight


KINDS = ["nn.Linear", "plain", "fp8", "qweight", "weight_packed"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_split_per_head(kind):
    layer, weight = stored(kind, torch.randn(N * (P + V), L))
    absorbed = Layer(layer)
    absorbed.process_weights_after_loading(torch.float32)
    assert absorbed.W_UK.shape == (L, N, P)
    assert absorbed.W_UV.shape == (L, N, V)
    for n in range(N):
        head = weight[n * (P + V) : (n + 1) * (P + V)]
        assert torch.equal(absorbed.W_UK[:, n], head[:P].t())
        assert torch.equal(absorbed.W_UV[:, n], head[P:].t())
    absorbed.process_weights_after_loading(torch.bfloat16)
    assert absorbed.W_UK.dtype == absorbed.W_UV.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_absorbed_equals_naive(kind):
    layer, weight = stored(kind, torch.randn(N * (P + V), L) * L**-0.5)
    absorbed = Layer(layer)
    absorbed.process_weights_after_loading(torch.float32)
    q, latent = torch.randn(5, N, P), torch.randn(9, L)
    keys_values = (latent.double() @ weight.double().t()).view(9, N, P + V)
    logits = torch.einsum("tnp,snp->tns", q.double(), keys_values[..., :P])
    naive = torch.einsum("tns,snv->tnv", logits.softmax(2), keys_values[..., P:])
    attended = (absorbed._k_up_proj(q) @ latent.t()).softmax(2) @ latent
    torch.testing.assert_close(absorbed._v_up_proj(attended).double(), naive, rtol=1e-5, atol=1e-5)


def test_zero_rows():
    layer, _ = stored("plain", torch.randn(N * (P + V), L))
    absorbed = Layer(layer)
    absorbed.process_weights_after_loading(torch.float32)
    assert absorbed._k_up_proj(torch.zeros(0, N, P)).shape == (0, N, L)
    assert absorbed._v_up_proj(torch.zeros(0, N, L)).shape == (0, N, V)


def test_errors_name_what_is_wrong():
    with pytest.raises(AttributeError, match="Identity has none of the weight attributes weight, qweight"):
        Layer(nn.Identity()).process_weights_after_loading(torch.float32)
    with pytest.raises(ValueError, match=r"kv_b_proj must be \[336, 128\] for 3 heads of 64 \+ 48, got \[336, 64\]"):
        Layer(nn.Linear(64, N * (P + V))).process_weights_after_loading(torch.float32)
    with pytest.raises(ValueError, match="without kv_b_proj"):
        Layer(None).process_weights_after_loading(torch.float32)
    with pytest.raises(RuntimeError, match="call process_weights_after_loading first"):
        Layer(None)._k_up_proj(torch.zeros(1, N, P))
    layer = Layer(stored("plain", torch.randn(N * (P + V), L))[0])
    layer.process_weights_after_loading(torch.float32)
    with pytest.raises(ValueError, match=r"expected \[B, 3, 128\], got \[2, 3, 64\]"):
        layer._v_up_proj(torch.zeros(2, N, P))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dynamic_quantisation_of_a_batch(dtype):
    x = (torch.randn(3, 5, 7) * 20).bfloat16().transpose(0, 1)
    q, scale = dynamic_per_batched_tensor_quant(x, dtype)
    limit = torch.finfo(dtype).max
    assert (q.dtype, q.shape, q.is_contiguous()) == (dtype, x.shape, True)
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert q.float().abs().max() == limit
    torch.testing.assert_close(scale, x.float().abs().max() / limit)
    expected = (x.float() * (limit / x.float().abs().max())).clamp(-limit, limit).to(dtype)
    assert torch.equal(q.float(), expected.float())


def test_dynamic_quantisation_of_zeros():
    q, scale = dynamic_per_batched_tensor_quant(torch.zeros(2, 3))
    assert not q.float().any()
    torch.testing.assert_close(scale, torch.tensor(1e-10 / 448), rtol=1e-6, atol=0)
