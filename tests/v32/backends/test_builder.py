"""Every metadata field on decodes, prefills, both, draft tokens and padding; building never waits for the device."""

from dataclasses import fields

import pytest
import torch

from deepseek_attn.v32.backends import (
    AttentionCGSupport,
    FlashInferMLASparseMetadataBuilder,
    FlashMLASparseMetadata,
    FlashMLASparseMetadataBuilder,
    KVCacheSpec,
    SparseMLAConfig,
    StepInput,
)
from deepseek_attn.v32.backends.kernels import (
    FlashMLASchedMeta,
    compute_fp8_decode_padded_heads,
    compute_prefill_padded_heads,
    max_num_sm_parts,
)

TABLE = torch.arange(80, dtype=torch.int32).view(8, 10)


def config(heads=64, **changes):
    sizes = {"topk_tokens": 16, "max_model_len": 500, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SparseMLAConfig(heads, **(sizes | {"kv_cache_dtype": "fp8_ds_mla", "prefill_workspace_rows": 500} | changes))


def make_builder(*args, device="cpu", **changes):
    return FlashMLASparseMetadataBuilder(KVCacheSpec(64, 576), ["layers.0"], config(*args, **changes), device)


def make_step(query_lens, seq_lens, pad=0, device="cpu"):
    rows = sum(query_lens) + pad
    return StepInput.from_lens(query_lens, seq_lens, TABLE[: len(query_lens)], num_padded_tokens=rows, device=device)


def test_common_fields():
    builder = make_builder(kv_cache_dtype="auto")
    batch = make_step([1, 4, 0, 2], [70, 4, 3, 130], pad=3)
    builder.req_id_per_token_buffer.fill_(999)
    meta = builder.build(0, batch)
    assert (meta.num_reqs, meta.max_query_len, meta.max_seq_len, meta.num_actual_tokens) == (4, 4, 130, 7)
    assert (meta.block_size, meta.topk_tokens) == (64, 16)
    assert meta.req_id_per_token.tolist() == [0, 1, 1, 1, 1, 3, 3, 0, 0, 0]
    assert meta.req_id_per_token.dtype == torch.int32
    assert meta.req_id_per_token.data_ptr() == builder.req_id_per_token_buffer.data_ptr()
    assert not builder.req_id_per_token_buffer[7:].any()
    assert meta.query_start_loc is batch.query_start_loc
    assert meta.slot_mapping is batch.slot_mapping
    assert meta.block_table is batch.block_table
    assert (meta.fp8_extra_metadata, meta.fp8_use_mixed_batch) == (None, False)


def test_a_shorter_step_leaves_nothing_of_a_longer_one():
    builder = make_builder(kv_cache_dtype="auto")
    builder.build(0, make_step([1] * 8, [9] * 8))
    assert builder.build(0, make_step([1, 1], [9, 9], pad=6)).req_id_per_token.tolist() == [0, 1] + [0] * 6


def test_default_sizes_of_the_metadata():
    values = {f.name: f.default for f in fields(FlashMLASparseMetadata)}
    assert (values["block_size"], values["topk_tokens"], values["fp8_extra_metadata"]) == (64, 2048, None)


@pytest.mark.parametrize(
    ("heads", "mode", "mixed"),
    [(31, "auto", True), (32, "auto", False), (8, "separate", False), (128, "mixed", True)],
    ids=str,
)
def test_mode_by_heads_and_by_choice(heads, mode, mixed):
    builder = make_builder(heads, fp8_mode=mode)
    meta = builder.build(0, make_step([1, 5], [9, 5]))
    assert builder.fp8_use_mixed_batch is meta.fp8_use_mixed_batch is mixed
    kind = FlashMLASparseMetadata.FP8KernelMetadata if mixed else FlashMLASparseMetadata.FP8SeparatePrefillDecode
    assert type(meta.fp8_extra_metadata) is kind


def check_kernel_metadata(meta, builder, batch):
    assert isinstance(meta.scheduler_metadata, FlashMLASchedMeta)
    assert meta.scheduler_metadata.have_initialized is False
    assert meta.dummy_block_table.shape == (batch, 1)
    assert meta.cache_lens.tolist() == [500] * batch
    assert meta.dummy_block_table.dtype == meta.cache_lens.dtype == torch.int32
    assert meta.cache_lens.data_ptr() == builder.max_model_len_tensor.data_ptr()
    assert meta.dummy_block_table.data_ptr() == builder.dummy_block_table.data_ptr()


def test_mixed_batch_is_one_row_with_a_fresh_schedule():
    builder = make_builder(16)
    first = builder.build(0, make_step([1, 5], [9, 5])).fp8_extra_metadata
    second = builder.build(0, make_step([1, 5], [9, 5])).fp8_extra_metadata
    check_kernel_metadata(first, builder, 1)
    assert first.scheduler_metadata is not second.scheduler_metadata


def test_schedule_arguments():
    class Kernels:
        def get_mla_metadata(self, **kwargs):
            seen.append(kwargs)
            return object(), None

    seen = []
    mixed = FlashMLASparseMetadataBuilder(KVCacheSpec(), [], config(16), "cpu", kernels=Kernels())
    mixed.build(0, make_step([1, 5], [9, 5], pad=2))
    separate = FlashMLASparseMetadataBuilder(
        KVCacheSpec(), [], config(128, num_speculative_tokens=1), "cpu", kernels=Kernels()
    )
    separate.build(0, make_step([2, 2, 2, 9], [9, 5, 3, 9]))
    common = {"topk": 16, "num_heads_k": 1, "is_fp8_kvcache": True}
    for got, batch, tokens, heads in ((seen[0], 1, 8, 64), (seen[1], 3, 2, 128)):
        assert got.pop("cache_seqlens").tolist() == [16] * batch
        assert got == common | {"num_q_tokens_per_head_k": tokens * heads, "num_heads_q": heads}


def test_separate_batch_of_decodes_and_prefills():
    builder = make_builder()
    batch = make_step([1, 1, 3, 7, 2, 1], [40, 70, 300, 150, 200, 480], pad=2)
    meta = builder.build(0, batch).fp8_extra_metadata
    assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens, meta.num_prefill_tokens) == (2, 4, 2, 13)
    assert meta.decode.decode_query_len == 1
    check_kernel_metadata(meta.decode.kernel_metadata, builder, 2)
    prefill = meta.prefill
    assert prefill.seq_lens.tolist() == [300, 150, 200, 480]
    assert prefill.request_ids.tolist() == [-1] * 2 + [0] * 3 + [1] * 7 + [2] * 2 + [3] + [-1] * 2
    assert prefill.request_ids.dtype == prefill.workspace_starts.dtype == torch.int32
    assert prefill.workspace_starts.tolist() == [0, 300, 0, 0]
    expected = [(0, 2, slice(2, 12), 450), (2, 3, slice(12, 14), 200), (3, 4, slice(14, 15), 480)]
    assert len(prefill.chunks) == 3
    for chunk, (first, last, rows, total) in zip(prefill.chunks, expected, strict=True):
        assert (chunk.req_start_idx, chunk.tokens_slice, chunk.chunk_tot_seqlen) == (first, rows, total)
        assert type(chunk.chunk_tot_seqlen) is int
        assert chunk.seq_lens.tolist() == [300, 150, 200, 480][first:last]
        assert chunk.workspace_starts.tolist() == [0, 300, 0, 0][first:last]
        assert torch.equal(chunk.block_table, TABLE[2 + first : 2 + last])
        assert chunk.block_table.data_ptr() == batch.block_table[2 + first].data_ptr()
        assert chunk.workspace_starts.data_ptr() == prefill.workspace_starts[first:].data_ptr()


def test_worked_example_of_chunks():
    builder = make_builder(prefill_workspace_rows=30, max_model_len=30)
    prefill = builder.build(0, make_step([2, 2, 2, 2], [10, 15, 20, 5])).fp8_extra_metadata.prefill
    assert prefill.workspace_starts.tolist() == [0, 10, 0, 20]
    assert [(c.req_start_idx, c.chunk_tot_seqlen) for c in prefill.chunks] == [(0, 25), (2, 25)]


def test_decodes_alone():
    meta = make_builder().build(0, make_step([1, 1, 1], [9, 80, 3])).fp8_extra_metadata
    assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens, meta.num_prefill_tokens) == (3, 0, 3, 0)
    assert meta.prefill is None
    assert meta.decode.kernel_metadata.cache_lens.shape == (3,)


def test_prefills_alone():
    meta = make_builder().build(0, make_step([3, 9], [9, 80])).fp8_extra_metadata
    assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens, meta.num_prefill_tokens) == (0, 2, 0, 12)
    assert meta.decode is None
    assert meta.prefill.request_ids.tolist() == [0] * 3 + [1] * 9
    assert meta.prefill.chunks[0].tokens_slice == slice(0, 12)


def test_speculative_decodes_with_a_short_one_after_them():
    builder = make_builder(num_speculative_tokens=2)
    assert builder.reorder_batch_threshold == 3
    meta = builder.build(0, make_step([3, 3, 2, 8], [9, 80, 20, 8])).fp8_extra_metadata
    assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens, meta.num_prefill_tokens) == (2, 2, 6, 10)
    assert meta.decode.decode_query_len == 3
    assert meta.decode.kernel_metadata.cache_lens.shape == (2,)
    assert meta.prefill.request_ids.tolist() == [-1] * 6 + [0] * 2 + [1] * 8


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "pad"), [([3, 3, 0], [9, 80, 0], 3), ([3, 3], [9, 80], 3)], ids=["request", "rows"]
)
def test_graph_padding_is_decoded_along(query_lens, seq_lens, pad):
    meta = make_builder(num_speculative_tokens=2).build(0, make_step(query_lens, seq_lens, pad))
    fp8 = meta.fp8_extra_metadata
    assert (fp8.num_decode_tokens, fp8.num_prefills, fp8.decode.decode_query_len) == (6, 0, 3)
    assert fp8.decode.kernel_metadata.cache_lens.shape == (3,)
    assert meta.req_id_per_token.tolist() == [0] * 3 + [1] * 3 + [0] * 3
    assert meta.slot_mapping[6:].tolist() == [-1] * 3


def test_padding_that_does_not_fit_the_query_length():
    with pytest.raises(ValueError, match="8 rows for decodes of 3 new tokens each"):
        make_builder(num_speculative_tokens=2).build(0, make_step([3, 3], [9, 80], pad=2))


@pytest.mark.parametrize("heads", [16, 64], ids=["mixed", "separate"])
@pytest.mark.parametrize("query_lens", [[], [0], [0, 0]], ids=str)
def test_batches_without_tokens(query_lens, heads):
    meta = make_builder(heads).build(0, make_step(query_lens, query_lens))
    assert (meta.num_reqs, meta.num_actual_tokens, len(meta.req_id_per_token)) == (len(query_lens), 0, 0)
    if heads == 64:
        assert (meta.fp8_extra_metadata.decode, meta.fp8_extra_metadata.prefill) == (None, None)


def test_a_step_beyond_the_limits():
    with pytest.raises(ValueError, match="65 rows and max_num_batched_tokens is 64"):
        make_builder().build(0, make_step([1], [9], pad=64))
    with pytest.raises(ValueError, match="3 requests and max_num_seqs is 2"):
        make_builder(max_num_seqs=2).build(0, make_step([1, 1, 1], [9, 9, 9]))
    with pytest.raises(ValueError, match="request 1 has 501 tokens and the prefill workspace 500 rows"):
        make_builder().build(0, make_step([5, 5, 5], [9, 501, 9]))


def test_persistent_buffers():
    builder = make_builder()
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert builder.topk_tokens_tensor.tolist() == [16] * 8
    assert builder.max_model_len_tensor.tolist() == [500] * 8
    assert builder.dummy_block_table.shape == (8, 1)
    assert builder.tile_scheduler_metadata_buffer.shape == (1, 8)
    assert builder.num_splits_buffer.shape == (9,)
    assert builder.req_id_per_token_buffer.shape == (64,)
    for name, value in vars(builder).items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.int32, name
    assert (builder.num_heads, builder.fp8_decode_padded_heads, builder.sm_count) == (64, 64, 1)


@pytest.mark.parametrize("heads", [16, 64], ids=["mixed", "separate"])
def test_building_never_looks_at_the_device(heads):
    """Tensors of the meta device have no values: reading one raises."""
    builder = make_builder(heads, device="meta", num_speculative_tokens=1)
    meta = builder.build(0, make_step([2, 2, 9, 5], [90, 7, 300, 290], pad=4, device="meta"))
    assert meta.req_id_per_token.shape == (22,)
    if heads == 64:
        chunks = meta.fp8_extra_metadata.prefill.chunks
        assert [c.chunk_tot_seqlen for c in chunks] == [300, 290]
        assert chunks[0].workspace_starts.device.type == "meta"


def test_flashinfer_metadata():
    builder = FlashInferMLASparseMetadataBuilder(KVCacheSpec(32), [], config(kv_cache_dtype="auto"), "cpu")
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    batch = make_step([1, 3], [70, 4], pad=1)
    meta = builder.build(0, batch)
    assert (meta.num_reqs, meta.max_query_len, meta.max_seq_len, meta.num_actual_tokens) == (2, 3, 70, 4)
    assert (meta.block_size, meta.topk_tokens) == (32, 16)
    assert meta.req_id_per_token.tolist() == [0, 1, 1, 1, 0]
    assert meta.seq_lens is batch.seq_lens
    assert meta.slot_mapping is batch.slot_mapping
    assert meta.block_table is batch.block_table
    assert meta.query_start_loc is batch.query_start_loc


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (8, 64), (64, 64), (65, 128), (128, 128)])
def test_padded_heads(heads, padded):
    assert compute_fp8_decode_padded_heads(heads) == compute_prefill_padded_heads(heads, 64) == padded
    assert compute_prefill_padded_heads(heads, 128) == 128


@pytest.mark.parametrize(("heads", "major", "parts"), [(64, 9, 132), (128, 9, 66), (128, 10, 132)])
def test_schedule_parts_of_132_multiprocessors(heads, major, parts):
    assert max_num_sm_parts(132, heads, major) == parts


def test_config_lists_every_problem():
    with pytest.raises(ValueError, match=r"num_heads must be at least 1.*kv_cache_dtype must be.*fp8_mode must be"):
        SparseMLAConfig(0, kv_cache_dtype="fp8", fp8_mode="both")
