"""Plans of hyper-connections: which launches update the streams, multiply them with ``fn`` and collapse them.

For very few tokens the launch that multiplies the streams updates them as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    Choice,
    LaunchBlock,
    Row,
    RowsProblem,
    Table,
    channel_block,
    has,
    one_kernel,
    planner,
    up_to,
)

SPLIT = 256  # channels of the flattened streams per partial sum of a `float32_product`
MANY_TOKENS = 1024  # tokens from which the product and the collapse work on many at a time


@dataclass(frozen=True, kw_only=True)
class StreamsProblem(RowsProblem):
    """Streams of ``rows`` tokens between two sublayers; ``update``: an output updates them first."""

    update: bool


@dataclass(frozen=True)
class MixTiles:
    """Launch configuration of `hc_mix_kernel`: tokens of a program, and channels of each of their streams.

    Attributes:
        updates: the launch updates the streams as well; otherwise `hc_post_kernel` does so before.
    """

    tokens: int
    channels: int
    updates: bool = False


@dataclass(frozen=True)
class StreamsPlan:
    """Launches, in this order.

    Attributes:
        update: updates the streams; None: no update, or ``product`` updates them in the same launch.
        product: of the streams with ``fn``: `hc_mix_kernel`, or a `float32_product` with a plan of its own.
        collapse: of the streams to a sublayer's input, with post and comb beside it.
    """

    update: Choice | None
    product: Choice
    collapse: Choice


def _balanced_tokens(p: StreamsProblem, gpu: GPU) -> LaunchBlock:
    """Tokens of a program that computes post and comb; it holds all partial sums, which are few for many tokens."""
    return LaunchBlock(128 if p.rows >= MANY_TOKENS and not p.batch_invariant else 1)


LITTLE_OUTPUT = up_to("values", (1 << 18) - 1) & ~has("batch_invariant")
_GROUPS = "h200_narrow_products.json: rows_of_groups"

POSTS = one_kernel(
    "hyper_connection.post", "hc_post_kernel", (LITTLE_OUTPUT, channel_block(256, warps=2)), (ANY, channel_block(1024))
)
PRODUCTS = Table(
    "hyper_connection.product",
    {"hc_mix_kernel": ~has("batch_invariant"), "float32_product_kernel": ANY},
    [
        Row(up_to("rows", 8), "hc_mix_kernel", MixTiles(1, 64, updates=True), "h200_hyper_connections.json: rows"),
        Row(up_to("rows", 32), "hc_mix_kernel", MixTiles(4, 32)),
        Row(ANY, "float32_product_kernel", None, _GROUPS),
    ],
)
COLLAPSES = one_kernel("hyper_connection.collapse", "hc_collapse_kernel", (ANY, _balanced_tokens, _GROUPS))


@planner("hyper_connection.streams")
def plan(problem: StreamsProblem, gpu: GPU) -> StreamsPlan:
    """Launches between two sublayers: two for very few tokens, else three, or four where ``fn`` is split before."""
    update, product = None, PRODUCTS.choose(problem, gpu)
    if problem.update and not (product.kernel == "hc_mix_kernel" and product.config.updates):
        update = POSTS.choose(problem, gpu)
    return StreamsPlan(update, product, COLLAPSES.choose(problem, gpu))
