"""The schedule that FlashMLA's decoding keeps between calls. These kernels need none: it only records shapes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor


@dataclass
class FlashMLASchedMeta:
    """The shapes that decoding calls share, with the fields of FlashMLA's class of this name.

    Attributes:
        have_initialized, config: whether a call has used it, and that call's shapes.
        tile_scheduler_metadata, num_splits: always None; FlashMLA keeps its schedule there. Results here do not depend
            on earlier calls: lengths may change between them.
    """

    @dataclass(frozen=True)
    class Config:
        """Shapes and modes of a call; None where not applicable."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def check(self, config: Config) -> None:
        """Checks that a call has the shapes of the first one.

        Raises:
            ValueError: it has others, which FlashMLA refuses too.
        """
        if self.config is None:
            return
        before, now = asdict(self.config), asdict(config)
        changed = [f"{name} was {before[name]} and is {now[name]}" for name in now if before[name] != now[name]]
        if changed:
            raise ValueError(
                f"the schedule was made for other shapes ({'; '.join(changed)}): pass a new one, get_mla_metadata()[0]"
            )

    def note(self, config: Config) -> None:
        """Keeps a call's shapes."""
        self.have_initialized, self.config = True, config


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule for `flash_mla_with_kvcache`, and None for its ``num_splits``; arguments are ignored.

    FlashMLA before 2026 returned two tensors here, computed from its arguments.
    """
    return FlashMLASchedMeta(), None


def schedule_of(tile_scheduler_metadata: object, num_splits: object) -> FlashMLASchedMeta:
    """The schedule that a caller passed; a new one for the two tensors of FlashMLA before 2026.

    Raises:
        ValueError: neither.
    """
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None:
        return tile_scheduler_metadata
    if isinstance(tile_scheduler_metadata, Tensor) and isinstance(num_splits, Tensor):
        return FlashMLASchedMeta()
    got = f"{type(tile_scheduler_metadata).__qualname__} and {type(num_splits).__qualname__}"
    raise ValueError(
        "tile_scheduler_metadata and num_splits must be the result of deepseek_attn.flash_mla_api.get_mla_metadata(), "
        f"a FlashMLASchedMeta and None, or the two tensors that FlashMLA's returned before 2026; got {got}"
    )
