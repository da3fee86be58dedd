"""A manager over pools of one channel, whose entries say which token wrote them."""

from dataclasses import replace

import torch

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    make_layout,
    ratio_group,
)
from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics

NAN = float("nan")
C4, C16 = ratio_group(4), ratio_group(16)


def make_manager(
    window=13,
    max_model_len=600,
    max_num_seqs=3,
    max_num_batched_tokens=150,
    max_rollback=5,
    ratios=(4,),
    max_snapshots=0,
):
    """A manager over pools whose entries are one float wide, filled with NaN."""
    config = ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=1 + len(ratios), num_hash_layers=0, compress_ratios=[0, *ratios], sliding_window=window,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    limits = (max_model_len, max_num_seqs, max_num_batched_tokens, max_rollback)
    layout = make_layout(config, get_numerics("exact"), torch.float32, *limits, max_snapshots=max_snapshots)
    slim = [
        replace(pool, record=PlainRecord(1, torch.float32)) if pool.record else replace(pool, width=1)
        for pool in layout.pools
    ]
    manager = CacheManager(CachePools(replace(layout, pools=tuple(slim))))
    for pool in manager.pools:
        floats(pool).fill_(NAN)
    return manager


def floats(pool):
    """Float32 ``[pages, entries]`` view of a one-channel pool."""
    return pool.tensor.view(torch.float32).view(len(pool.tensor), -1) if pool.spec.record else pool.tensor[..., 0]


def pool_of(manager, group):
    return next(pool for pool in manager.pools if pool.spec.group == group)


def write(manager, cache, group, index, value):
    pool = floats(pool_of(manager, group))
    page = cache.tables[group][index // pool.shape[1]]
    assert page != NULL_PAGE, f"{group} entry {index} has no page"
    pool[page, index % pool.shape[1]] = value


def read(manager, cache, group, index):
    pool = floats(pool_of(manager, group))
    return pool[cache.tables[group][index // pool.shape[1]], index % pool.shape[1]].item()


def ring(manager):
    return pool_of(manager, STATE).entries


def advance(manager, cache, values):
    """One step of one sequence: token ``t`` leaves its value in all of its caches."""
    manager.reserve([(cache, len(values))])
    compute(manager, cache, values)


def compute(manager, cache, values):
    start = cache.num_tokens
    for position, value in enumerate(values, start):
        write(manager, cache, WINDOW, position, value)
        if STATE in cache.tables:
            write(manager, cache, STATE, position % ring(manager), value)
        for ratio in manager.layout.ratios:
            if (position + 1) % ratio == 0:
                write(manager, cache, ratio_group(ratio), position // ratio, value)
    manager.commit(cache, len(values))


def used(manager):
    return {group: pages - 1 - manager.available_pages()[group] for group, pages in manager.layout.pages.items()}
