"""``--tensor-parallel``: one model on several GPUs, with one rank per GPU started by torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepseek_attn.layers.parallel import Parallel


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N GPUs; start with `torchrun --nproc-per-node N -m deepseek_attn`",
    )


@contextmanager
def joined_ranks(args: argparse.Namespace) -> Iterator[Parallel]:
    """Joins the ranks of ``--tensor-parallel``, and sets ``args.parallel`` and ``args.device`` for `runner_options`.

    Only rank 0 prints and writes files; the other ranks still report their errors.
    """
    from deepseek_attn.layers.parallel import launched

    with ExitStack() as stack:
        parallel, device = stack.enter_context(launched(args.tensor_parallel, args.device))
        args.parallel = parallel
        if parallel.world > 1:
            args.device = device
        if parallel.rank:
            args.profile = args.stats = None
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield parallel
