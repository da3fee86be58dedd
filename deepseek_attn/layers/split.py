"""Whether and where a model can be split over ranks, by the sizes of its config."""

from __future__ import annotations

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.layers.parallel import Parallel

EXPERT_CHANNELS = 512  # of a routed expert's inner width, of which a rank's part is a multiple


def shard_unit(config: AnyConfig, numerics: Numerics) -> int:
    """Rows or columns per FP8 block of a linear's weight; a rank holds a whole number of blocks."""
    if config.quantization_config is None:
        return 1
    return max(numerics.weight_block, numerics.fp8_group if numerics.quantized_weights else 1)


def splits_widths(config: AnyConfig, ranks: int) -> bool:
    """Whether ranks divide the inner width of each routed expert; otherwise each has some of the experts.

    With a part of each expert, all ranks read equally many bytes whatever experts a token chooses: of six experts, the
    busier one of two ranks would have 3.9 on average. The fast kernels need parts that are multiples of 512 channels.
    """
    return config.moe_intermediate_size % (EXPERT_CHANNELS * ranks) == 0


def check_split(config: AnyConfig, numerics: Numerics, parallel: Parallel) -> None:
    """Checks that a model can be split over the ranks.

    Raises:
        ValueError: everything that does not divide, with the numbers.
    """
    if parallel.world == 1:
        return
    whole, widths, experts = [], [], [("n_routed_experts", config.n_routed_experts)]
    if not parallel.dp_attention:
        unit = shard_unit(config, numerics)
        whole, widths = whole + _token_splits(config, unit), _mlp_widths(config, unit)
        if config.dspark is not None:
            experts.append(("dspark_n_routed_experts", config.draft_stages.n_routed_experts))
    if not splits_widths(config, parallel.world):
        whole = [(*each, 1) for each in experts] + whole
    whole += [width for width in widths if not _splits_unevenly(*width[1:], parallel.world)]
    problems = []
    for name, total, unit in whole:
        if total % parallel.world:
            problems.append(f"{name} = {total} is not a multiple of {parallel.world}")
        elif total // parallel.world % unit:
            problems.append(
                f"{name} = {total} would leave {total // parallel.world} per rank, which FP8 blocks of {unit} rows or "
                "columns do not divide"
            )
    if problems:
        raise ValueError(f"the model cannot be split over {parallel.world} ranks:\n  - " + "\n  - ".join(problems))


def _token_splits(config: AnyConfig, block: int) -> list[tuple[str, int, int]]:
    """(name, total, unit that divides a rank's part) of each dimension that ranks split evenly, besides experts."""
    heads = config.num_attention_heads
    found = [("num_attention_heads", heads, 1), ("vocab_size", config.vocab_size, 1)]
    if isinstance(config, DeepseekV32Config):
        found.append(("num_attention_heads * qk_head_dim", heads * config.qk_head_dim, block))
        found.append(("num_attention_heads * v_head_dim", heads * config.v_head_dim, block))
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        found.append(("num_attention_heads * (qk_nope_head_dim + v_head_dim)", rows, block))
        return found
    found.append(("o_groups", config.o_groups, 1))
    found.append(("num_attention_heads * head_dim", heads * config.head_dim, block))
    found.append(("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, block))
    return found


def _mlp_widths(config: AnyConfig, block: int) -> list[tuple[str, int, int]]:
    """(name, total, unit) of the inner widths of dense MLPs and shared experts; see `Parallel.shard`."""
    shared = config.moe_intermediate_size * config.n_shared_experts
    found = [("moe_intermediate_size * n_shared_experts", shared, block)]
    if isinstance(config, DeepseekV32Config) and any(layer.dense_ffn for layer in config.layers):
        found.append(("intermediate_size", config.intermediate_size, block))
    return found


def _splits_unevenly(total: int, block: int, world: int) -> bool:
    """Whether a width consists of FP8 blocks, and each rank gets some."""
    return block > 1 and total % block == 0 and total // block >= world
