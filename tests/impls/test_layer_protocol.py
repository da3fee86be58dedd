"""What impls read of a layer is `AttentionLayer`, no more."""

import pytest

from deepseek_attn.impls import AttentionLayer, DeepseekV4ReferenceSparseImpl
from tests.support.one_layer import KINDS, Layer
from tests.support.tiers import tiered
from tests.support.typed import untyped

ATTRIBUTES = {name for name in (*AttentionLayer.__annotations__, *vars(AttentionLayer)) if not name.startswith("_")}


class OnlyTheProtocol:
    """A layer of which nothing but the attributes of `AttentionLayer` can be read, and nothing set."""

    def __init__(self, layer):
        vars(self)["layer"] = layer

    def __getattr__(self, name):
        assert name in ATTRIBUTES, f"{name} is not in AttentionLayer"
        return getattr(vars(self)["layer"], name)

    def __setattr__(self, name, value):
        raise AssertionError(f"an impl sets {name}: impls hold no state")


@pytest.mark.parametrize("kind", tiered(KINDS, ["SWA", "C4A"], quick_on_gpu=KINDS))
def test_an_impl_needs_no_more_of_a_layer_than_the_protocol(kind):
    layer, calls = Layer(kind), []

    class Watching(DeepseekV4ReferenceSparseImpl):
        @classmethod
        def forward_mqa(cls, attention, *args):
            calls.append(attention)
            return super().forward_mqa(untyped(OnlyTheProtocol(attention)), *args)

    layer.attn.impl = Watching
    requests = [layer.request(n) for n in (40, 150)]
    layer.run(requests, [30, 1, 1, 5])
    for request in requests:
        layer.check(request)
    layer.attn(requests[0].x[:3], requests[0].x.new_zeros(3).long(), None)
    assert len(calls) > 4


def test_every_attribute_of_the_protocol_is_on_the_layer():
    layer = Layer(next(iter(KINDS))).attn
    assert [name for name in ATTRIBUTES if not hasattr(layer, name)] == []
