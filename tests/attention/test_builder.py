"""A step's metadata against plain loops over requests and tokens, and of one builder against the other."""

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch

from deepseek_attn.attention import builder as metadata_builder
from deepseek_attn.attention.builder import MetadataBuilder, StepInput, active_width, count_decodes, upload_vectors
from deepseek_attn.attention.decode_builder import build_decode_metadata
from deepseek_attn.cache.layout import STATE, WINDOW, entries_per_page, make_layout, ratio_group, state_rows
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.impls.metadata import DeepseekSparseSWAMetadata, FlashMLASparseMetadata, StepMetadata
from deepseek_attn.kernels.insert import CompressBatch
from deepseek_attn.kernels.insert.reference import closing_windows
from tests.support.decode_batches import decode_batch
from tests.support.typed import required

GARBAGE = 2**31 - 1  # page id of table entries that nothing may look at


def make_builder(ratios=(0, 4, 128, 16, 4), window=13, rollback=5, max_model_len=2000, device="cpu"):
    """Layers of every kind: window only, indexer, all entries, overlap without indexer."""
    config = ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=len(ratios), num_hash_layers=0, num_nextn_predict_layers=0, compress_ratios=list(ratios),
        compress_overlap={"16": True} if 16 in ratios else None, sliding_window=window,
    )  # fmt: skip
    layout = make_layout(config, get_numerics("exact"), torch.float32, max_model_len, 8, 500, rollback)
    return MetadataBuilder(config.layers, layout, device)


@dataclass
class Batch:
    """Requests as (tokens computed before, new tokens), with block tables of random pages."""

    requests: list
    threshold: int = 1
    invalid: tuple = ()
    first_page: int = 1

    def __post_init__(self):
        self.rng = random.Random(repr(self.requests))
        self.tables, self.tokens = {}, []
        for r, (prefix, query) in enumerate(self.requests):
            self.tokens += [(r, position) for position in range(prefix, prefix + query)]
        self.valid = [i not in self.invalid for i in range(len(self.tokens))]

    def table(self, group, span):
        """A table that covers each request exactly; what lies behind is garbage."""
        if group not in self.tables:
            needed = [1 if span is None else -(-(p + q) // span) for p, q in self.requests]
            width = max(needed) + 1
            pages = list(range(self.first_page, self.first_page + sum(needed)))
            self.rng.shuffle(pages)
            self.tables[group] = [[pages.pop() for _ in range(n)] + [GARBAGE] * (width - n) for n in needed]
        return self.tables[group]

    def step(self, builder):
        groups = {WINDOW: 64, **{ratio_group(r): r * entries_per_page(r) for r in builder.layout.ratios}}
        if builder.layout.ratios:
            groups[STATE] = None
        tables = {g: torch.tensor(self.table(g, span), dtype=torch.int32) for g, span in groups.items()}
        query_lens = torch.tensor([q for _, q in self.requests])
        seq_lens = torch.tensor([p + q for p, q in self.requests])
        valid = torch.tensor(self.valid) if self.invalid else None
        return StepInput(query_lens, seq_lens, tables, valid, self.threshold)


MIXED = [(40, 1), (0, 1), (130, 1), (255, 1), (0, 70), (63, 200), (0, 3), (126, 2)]
BATCHES = {
    "mixed": Batch(MIXED),
    "decodes_only": Batch([(5, 1), (127, 1), (1000, 1)]),
    "prefills_only": Batch([(0, 5), (3, 129), (0, 4), (12, 2)]),
    "one_token": Batch([(0, 1)]),
    "threshold_3": Batch([(125, 3), (7, 1), (15, 2), (0, 3), (64, 5), (0, 130)], threshold=3),
    "empty_requests": Batch([(9, 0), (127, 1), (0, 0), (14, 6)]),
    "padding_in_decode_and_prefill": Batch([(127, 1), (3, 1), (31, 1), (120, 12)], invalid=(1, 2, 8, 14)),
    "only_padding": Batch([(0, 1), (3, 1), (0, 4)], invalid=tuple(range(6))),
}


@pytest.fixture(params=BATCHES.values(), ids=[*BATCHES])
def batch(request):
    return request.param


@pytest.fixture
def builder(device):
    return make_builder(device=device)


def decode_requests(batch):
    count = 0
    while count < len(batch.requests) and batch.requests[count][1] <= batch.threshold:
        count += 1
    return count


def decode_tokens(batch):
    return sum(q for _, q in batch.requests[: decode_requests(batch)])


def slot(table, index, entries):
    return table[index // entries] * entries + index % entries


def padded(row, width):
    return row + [-1] * (width - len(row))


def test_token_fields(builder, batch):
    meta = builder.build(batch.step(builder))
    assert meta.positions.tolist() == [position for _, position in batch.tokens]
    swa, table = meta.swa, batch.table(WINDOW, 64)
    slots = [slot(table[r], p, 64) if ok else -1 for (r, p), ok in zip(batch.tokens, batch.valid, strict=True)]
    assert swa.slot_mapping.tolist() == slots
    assert meta.is_valid_token.tolist() == batch.valid
    assert meta.token_to_req_indices.tolist() == [r for r, _ in batch.tokens]
    assert swa.block_table.tolist() == table
    assert swa.block_size == 64
    assert (meta.positions.dtype, swa.slot_mapping.dtype) == (torch.int64, torch.int64)
    assert meta.token_to_req_indices.dtype == swa.block_table.dtype == torch.int32


def test_request_fields(builder, batch):
    meta = builder.build(batch.step(builder))
    starts = [sum(q for _, q in batch.requests[:r]) for r in range(len(batch.requests) + 1)]
    assert meta.query_start_loc.tolist() == meta.query_start_loc_cpu.tolist() == starts
    lens = [p + q for p, q in batch.requests]
    assert meta.seq_lens.tolist() == lens
    decodes, tokens = decode_requests(batch), decode_tokens(batch)
    assert (meta.num_decodes, meta.num_prefills) == (decodes, len(lens) - decodes)
    assert (meta.num_decode_tokens, meta.num_prefill_tokens) == (tokens, len(batch.tokens) - tokens)
    decode_lens = {q for _, q in batch.requests[:decodes]}
    assert meta.decode_query_len == (decode_lens.pop() if len(decode_lens) == 1 else 0)
    assert meta.prefix_lens.tolist() == [p for p, _ in batch.requests]
    assert meta.seq_lens_cpu.tolist() == lens
    gathered = [q + min(p, 12) for p, q in batch.requests[decodes:]]
    assert meta.prefill_seq_lens.tolist() == meta.prefill_seq_lens_cpu.tolist() == lens[decodes:]
    assert meta.prefill_gather_lens.tolist() == meta.prefill_gather_lens_cpu.tolist() == gathered
    assert meta.seq_lens.dtype == meta.query_start_loc.dtype == meta.prefill_gather_lens.dtype == torch.int32
    assert meta.query_start_loc_cpu.device.type == meta.prefill_seq_lens_cpu.device.type == "cpu"


def test_decode_window(builder, batch):
    swa, table = builder.build(batch.step(builder)).swa, batch.table(WINDOW, 64)
    rows = []
    for (r, p), ok in list(zip(batch.tokens, batch.valid, strict=True))[: decode_tokens(batch)]:
        rows.append([slot(table[r], i, 64) for i in range(max(p - 12, 0), p + 1)] if ok else [])
    assert swa.decode_swa_indices.shape == (len(rows), 1, 13)
    assert swa.decode_swa_indices.squeeze(1).tolist() == [padded(row, 13) for row in rows]
    assert swa.decode_swa_lens.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("ratio", [4, 16, 128])
def test_compressed_slots(builder, batch, ratio):
    meta = builder.build(batch.step(builder)).sparse[ratio]
    entries = entries_per_page(ratio)
    table = batch.table(ratio_group(ratio), ratio * entries)
    expected = [
        slot(table[r], p // ratio, entries) if ok and p % ratio == ratio - 1 else -1
        for (r, p), ok in zip(batch.tokens, batch.valid, strict=True)
    ]
    assert meta.slot_mapping.tolist() == expected
    assert meta.slot_mapping.dtype == torch.int64
    assert (meta.ratio, meta.block_size) == (ratio, entries)
    assert meta.block_table.tolist() == table


@pytest.mark.parametrize("ratio", [16, 128])
def test_indices_of_layers_that_read_every_entry(builder, batch, ratio):
    meta = builder.build(batch.step(builder)).sparse[ratio]
    entries, tokens = entries_per_page(ratio), decode_tokens(batch)
    table = batch.table(ratio_group(ratio), ratio * entries)
    visible = [(p + 1) // ratio if ok else 0 for (_, p), ok in zip(batch.tokens, batch.valid, strict=True)]
    decode, prefill = meta.c128a_global_decode_topk_indices, meta.c128a_prefill_topk_indices
    width = decode.shape[2]
    assert decode.shape == (tokens, 1, width)
    assert (prefill is None) == (decode_requests(batch) == len(batch.requests))
    assert width % 128 == 0
    for t, (r, _) in enumerate(batch.tokens):
        own = range(visible[t])
        if t < tokens:
            assert decode[t, 0].tolist() == padded([slot(table[r], e, entries) for e in own], width)
        else:
            assert prefill[t - tokens].tolist() == padded(list(own), width)
    assert meta.c128a_decode_topk_lens.tolist() == visible[:tokens]
    assert decode.dtype == meta.c128a_decode_topk_lens.dtype == torch.int32
    if prefill is not None:
        assert prefill.shape == (len(batch.tokens) - tokens, width)
        assert prefill.dtype == torch.int32


@pytest.mark.parametrize("ratio", [4, 16, 128])
def test_entries_of_prefill_requests(builder, batch, ratio):
    meta, decodes = builder.build(batch.step(builder)), decode_requests(batch)
    lens = [(p + q) // ratio for p, q in batch.requests[decodes:]]
    assert (ratio in meta.prefill_entry_lens) == bool(lens)
    if lens:
        assert meta.prefill_entry_lens[ratio].tolist() == lens
        assert meta.prefill_entry_lens[ratio].dtype == torch.int32


def test_layers_with_an_indexer_need_no_precomputed_entries(builder):
    meta = builder.build(BATCHES["mixed"].step(builder)).sparse[4]
    assert meta.c128a_global_decode_topk_indices is None
    assert meta.c128a_decode_topk_lens is None
    assert meta.c128a_prefill_topk_indices is None


@pytest.mark.parametrize("kind", [(4, True), (16, True), (128, False)], ids=["C4A", "C16A_overlap", "C128A"])
def test_compressor_windows(builder, batch, kind):
    """Each slot of a closing window comes from this step, from the state, or from before the first token."""
    ratio, overlap = kind
    meta = closing_windows(builder.build(batch.step(builder)).compressor[kind])
    size, entries = ratio * (2 if overlap else 1), entries_per_page(ratio)
    rows = size + 5
    table = batch.table(ratio_group(ratio), ratio * entries)
    rings = [row[0] * rows for row in batch.table(STATE, None)]
    starts = [sum(q for _, q in batch.requests[:r]) for r in range(len(batch.requests))]

    closing = [
        t for t, ((_, p), ok) in enumerate(zip(batch.tokens, batch.valid, strict=True)) if ok and (p + 1) % ratio == 0
    ]
    assert meta.phase.tolist() == [p % ratio for _, p in batch.tokens]
    assert meta.entry_slots.tolist() == [
        slot(table[r], p // ratio, entries) for r, p in (batch.tokens[t] for t in closing)
    ]
    assert meta.entry_positions.tolist() == [batch.tokens[t][1] - ratio + 1 for t in closing]
    assert meta.flight.shape == meta.absent.shape == (len(closing), size)
    flight, absent, from_state = meta.flight.tolist(), meta.absent.tolist(), {}
    for (window, place), row in zip(meta.from_state.tolist(), meta.state_source.tolist(), strict=True):
        from_state[window, place] = row
    for window, t in enumerate(closing):
        r, p = batch.tokens[t]
        prefix = batch.requests[r][0]
        for place, wanted in enumerate(range(p - size + 1, p + 1)):
            assert absent[window][place] == (wanted < 0)
            if wanted >= prefix:
                assert flight[window][place] == starts[r] + wanted - prefix
            elif wanted >= 0:
                assert from_state.pop((window, place)) == rings[r] + wanted % rows
    assert not from_state


@pytest.mark.parametrize("kind", [(4, True), (16, True), (128, False)], ids=["C4A", "C16A_overlap", "C128A"])
def test_compressor_keeps_the_last_rows_of_each_request(builder, batch, kind):
    ratio, overlap = kind
    meta = closing_windows(builder.build(batch.step(builder)).compressor[kind])
    rows = ratio * (2 if overlap else 1) + 5
    rings = [row[0] * rows for row in batch.table(STATE, None)]
    keep = [
        (t, rings[r] + p % rows)
        for t, ((r, p), ok) in enumerate(zip(batch.tokens, batch.valid, strict=True))
        if ok and p >= sum(batch.requests[r]) - rows
    ]
    assert list(zip(meta.keep.tolist(), meta.keep_rows.tolist(), strict=True)) == keep
    assert len(set(meta.keep_rows.tolist())) == len(keep)


def test_state_rows_match_the_layout(builder):
    states = [pool for pool in builder.layout.pools if pool.kind == "state"]
    assert {pool.layer for pool in states} == {spec.name for spec in builder.layers if spec.ratio}
    for pool in states:
        spec = next(s for s in builder.layers if s.name == pool.layer)
        assert pool.entries == state_rows(spec, 5) == spec.coff * spec.ratio + 5


# worked examples


def test_worked_example_gather_length():
    """Window 4: the tokens at 7, 8, 9 read back to position 4."""
    builder = make_builder(window=4)
    assert builder.build(Batch([(7, 3)]).step(builder)).prefill_gather_lens.tolist() == [6]


def test_worked_example_window():
    builder = make_builder(window=4)
    step = Batch([(65, 1), (1, 1)]).step(builder)
    step.block_tables[WINDOW] = torch.tensor([[5, 8], [2, 0]], dtype=torch.int32)
    swa = builder.build(step).swa
    assert required(swa).decode_swa_indices.tolist() == [
        [[5 * 64 + 62, 5 * 64 + 63, 8 * 64, 8 * 64 + 1]],
        [[128, 129, -1, -1]],
    ]
    assert required(swa).decode_swa_lens.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("position", "expected"), [(126, []), (300, [192, 193]), (511, [192, 193, 194, 195])], ids=lambda v: str(v)[:3]
)
def test_worked_example_all_entries(position, expected):
    builder = make_builder()
    step = Batch([(position, 1)]).step(builder)
    step.block_tables[ratio_group(128)] = torch.tensor([[6]], dtype=torch.int32)
    meta = builder.build(step).sparse[128]
    assert required(meta.c128a_global_decode_topk_indices).tolist() == [[padded(expected, 128)]]
    assert required(meta.c128a_decode_topk_lens).tolist() == [len(expected)]


@pytest.mark.parametrize(("position", "expected"), [(2, -1), (3, 192), (255, 255), (259, 576)])
def test_worked_example_compressed_slot(position, expected):
    builder = make_builder()
    step = Batch([(position, 1)]).step(builder)
    step.block_tables[ratio_group(4)] = torch.tensor([[3, 9]], dtype=torch.int32)
    assert builder.build(step).sparse[4].slot_mapping.tolist() == [expected]


def test_worked_example_compressor():
    """Ratio 4, new tokens 5, 6, 7: only 7 closes a window, from tokens 0..7. Token 3 closes one from 0..3."""
    builder = make_builder()
    meta = closing_windows(builder.build(Batch([(5, 3)]).step(builder)).compressor[4, True])
    assert meta.entry_positions.tolist() == [4]
    assert meta.from_state.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4]]
    assert meta.flight[0, 5:].tolist() == [0, 1, 2]
    meta = closing_windows(builder.build(Batch([(0, 4)]).step(builder)).compressor[4, True])
    assert meta.absent.tolist() == [[True] * 4 + [False] * 4]
    assert meta.flight[0, 4:].tolist() == [0, 1, 2, 3]


# the rest


def test_slots_are_computed_in_64_bits():
    """Page ids times entries exceed 2**31 long before page ids do."""
    builder = make_builder()
    meta = builder.build(Batch([(130, 1), (0, 140)], first_page=2**27).step(builder))
    assert required(meta.swa).slot_mapping.min() >= 2**27 * 64
    assert meta.sparse[4].slot_mapping.max() >= 2**27 * 64
    for kind, rows in (((4, True), 13), ((128, False), 133)):
        compressor = closing_windows(meta.compressor[kind])
        assert compressor.keep_rows.min() >= 2**27 * rows
        assert compressor.state_source.numel() == 0 or compressor.state_source.min() >= 2**27 * rows
        assert compressor.entry_slots.min() >= 2**27 * 32


def test_positions_beyond_2_to_the_31():
    builder = make_builder(ratios=(0,))
    builder.layout = replace(builder.layout, max_model_len=2**32)
    start = 2**31 + 60
    table = torch.zeros(1, start // 64 + 2, dtype=torch.uint8)  # a table of bytes: int32 would take 134 MB
    table[0, start // 64], table[0, start // 64 + 1] = 7, 9
    step = StepInput(torch.tensor([6]), torch.tensor([start + 6]), {WINDOW: table}, decode_threshold=6)
    meta = builder.build(step)
    assert meta.positions.tolist() == list(range(start, start + 6))
    assert required(meta.swa).slot_mapping.tolist() == [7 * 64 + 60 + i for i in range(4)] + [9 * 64, 9 * 64 + 1]


def test_a_sequence_beyond_max_model_len_is_refused():
    """A layer driven by hand ends here, not in an index error of the rotary table."""
    builder = make_builder(max_model_len=2000)
    assert builder.build(Batch([(1999, 1)]).step(builder)).positions.tolist() == [1999]
    with pytest.raises(ValueError, match=r"2001 tokens exceeds max_model_len=2000, .*raise"):
        builder.build(Batch([(5, 1), (1990, 11)]).step(builder))


@pytest.mark.parametrize(
    ("query_lens", "threshold", "expected"),
    [([1, 1, 1], 1, 3), ([2, 5], 1, 0), ([1, 2, 3], 1, 1), ([3, 1, 2, 4, 9], 3, 3), ([0, 1, 2], 1, 2), ([2, 3], 4, 2)],
    ids=str,
)
def test_count_decodes(query_lens, threshold, expected):
    assert count_decodes(torch.tensor(query_lens), threshold) == expected


@pytest.mark.parametrize(("query_lens", "threshold"), [([5, 1], 1), ([1, 2, 0], 1), ([3, 4, 3], 3)], ids=str)
def test_a_decode_after_a_prefill_is_refused(query_lens, threshold):
    builder = make_builder()
    with pytest.raises(ValueError, match="must come first") as error:
        builder.build(Batch([(4, q) for q in query_lens], threshold=threshold).step(builder))
    assert str(query_lens) in str(error.value)


@pytest.mark.parametrize(
    ("entries", "limit", "width"),
    [(0, 0, 128), (0, 5000, 128), (128, 5000, 128), (129, 5000, 256), (256, 5000, 256), (257, 5000, 512),
     (1025, 1100, 1152), (1100, 1100, 1152), (4096, 8192, 4096), (100, 100, 128), (129, 129, 256)],
)  # fmt: skip
def test_active_width(entries, limit, width):
    assert active_width(entries, limit) == width


@pytest.mark.parametrize("limit", [1, 127, 128, 129, 700, 8192])
def test_active_width_holds_every_entry_and_is_aligned(limit):
    widths = [active_width(entries, limit) for entries in range(limit + 1)]
    assert all(width >= entries and width % 128 == 0 for entries, width in enumerate(widths))
    assert widths == sorted(widths)
    assert len(set(widths)) <= 8


def test_indices_are_built_once_for_all_layers_of_a_kind(monkeypatch):
    builder = make_builder(ratios=[0, *[4, 128] * 20])
    calls = []
    original = metadata_builder.step_indices
    monkeypatch.setattr(metadata_builder, "step_indices", lambda *args: calls.append(args) or original(*args))
    meta = builder.build(BATCHES["mixed"].step(builder))
    assert len(calls) == 1
    assert set(meta.sparse) == {4, 128}
    assert set(meta.compressor) == {(4, True), (128, False)}


# the builder of decode steps on the device

FIELDS = {
    StepMetadata: {
        "positions", "token_to_req_indices", "is_valid_token", "query_start_loc", "query_start_loc_cpu", "prefix_lens",
        "seq_lens", "seq_lens_cpu", "num_decodes", "num_decode_tokens", "max_query_len", "decode_query_len",
        "prefill_seq_lens", "prefill_seq_lens_cpu", "prefill_gather_lens", "prefill_gather_lens_cpu",
        "prefill_entry_lens", "block_tables", "swa", "sparse", "compressor", "engram", "batch", "observer",
        "on_selection", "window_starts", "trailing", "results",
    },
    DeepseekSparseSWAMetadata: {
        "block_table", "slot_mapping", "block_size", "decode_swa_indices", "decode_swa_lens",
    },
    FlashMLASparseMetadata: {
        "ratio", "block_table", "block_size", "slot_mapping", "c128a_global_decode_topk_indices",
        "c128a_decode_topk_lens", "c128a_prefill_topk_indices",
    },
    CompressBatch: {
        "ratio", "overlap", "rows", "positions", "token_to_req", "query_start_loc", "prefix_lens", "ring_pages",
        "slots", "valid", "max_query_len",
    },
}  # fmt: skip

DECODES = {
    "one_row_each": Batch([(0, 1), (127, 1), (1000, 1), (12, 1)]),
    "one_request": Batch([(255, 1)]),
    "three_rows_each": Batch([(125, 3), (0, 3), (253, 3), (62, 3)], threshold=3),
    "padding_rows": Batch([(125, 3), (0, 3), (6, 3)], threshold=3, invalid=(2, 4, 5)),
    "padding_requests": Batch([(130, 2), (0, 2), (0, 2)], threshold=2, invalid=(2, 3, 4, 5)),
    "only_padding": Batch([(0, 1), (0, 1)], invalid=(0, 1)),
}


def same(name, got, expected):
    """Equal in type, dtype, device, shape and value, down to the fields of dataclasses and the items of dicts."""
    assert type(got) is type(expected), name
    if type(got) in FIELDS:
        assert {f.name for f in fields(got)} == FIELDS[type(got)], name
        for field in FIELDS[type(got)]:
            same(f"{name}.{field}", getattr(got, field), getattr(expected, field))
    elif isinstance(got, dict):
        assert got.keys() == expected.keys(), name
        for key in got:
            same(f"{name}[{key}]", got[key], expected[key])
    elif isinstance(got, torch.Tensor):
        assert (got.dtype, got.device, got.shape) == (expected.dtype, expected.device, expected.shape), name
        assert torch.equal(got, expected), name
    else:
        assert got == expected, name


@pytest.mark.parametrize("ratios", [(0, 4, 128, 16, 4), (0,), (4, 4), (128, 0)], ids=str)
@pytest.mark.parametrize("batch", DECODES.values(), ids=DECODES)
def test_both_builders_agree_in_every_field(device, batch, ratios):
    builder = make_builder(ratios, device=device)
    step = batch.step(builder)
    expected = builder.build(step)
    tables = {group: table.to(device) for group, table in step.block_tables.items()}
    positions = torch.tensor([position for _, position in batch.tokens], device=device)
    valid, longest = torch.tensor(batch.valid, device=device), int(step.seq_lens.max())
    got = build_decode_metadata(builder.layers, builder.layout, decode_batch(positions, valid, tables, longest))
    same("step", got, expected)
    assert set(got.sparse) == {ratio for ratio in ratios if ratio}


def test_the_device_builder_makes_rows_as_wide_as_the_longest_request_may_get():
    builder, batch = make_builder(max_model_len=8000), Batch([(5, 1), (30, 1)])
    tables = {group: torch.tensor(batch.table(group, 64 if group == WINDOW else None)) for group in ("window", STATE)}
    tables |= {ratio_group(r): torch.ones(2, 16, dtype=torch.int32) for r in builder.layout.ratios}
    step = decode_batch(torch.tensor([5, 30]), torch.ones(2, dtype=torch.bool), tables, 4000)
    meta = build_decode_metadata(builder.layers, builder.layout, step).sparse[16]
    assert required(meta.c128a_global_decode_topk_indices).shape == (2, 1, 256)  # 250 entries
    assert required(meta.c128a_decode_topk_lens).tolist() == [0, 1]


def test_vectors_are_uploaded_together():
    """The first keeps 64 bits; each of the others starts at a multiple of 16 bytes."""
    wide = torch.tensor([2**40 + 3, -5, 7])
    vectors = [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([2**31 - 1])]
    first, others = upload_vectors(wide, vectors, torch.device("cpu"))
    assert first.dtype == torch.int64
    assert first.tolist() == wide.tolist()
    assert [other.tolist() for other in others] == [vector.tolist() for vector in vectors]
    assert all(other.dtype == torch.int32 for other in others)
    start = first.data_ptr()
    assert all((other.data_ptr() - start) % 16 == 0 for other in others if len(other))


def test_forgotten_results_are_computed_anew(builder, batch):
    step = builder.build(batch.step(builder))
    counts = step.entry_counts(4, 3)
    expected = [count.clone() for count in counts]
    for count in counts:
        count.fill_(-1)
    assert step.entry_counts(4, 3) is counts
    step.results.computed.add(2)
    step.forget_results()
    assert step.results.computed == set()
    assert all(torch.equal(*pair) for pair in zip(step.entry_counts(4, 3), expected, strict=True))
