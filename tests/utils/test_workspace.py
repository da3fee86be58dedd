"""The shared scratch arena."""

import pytest
import torch

from deepseek_attn.utils.workspace import ALIGNMENT, Workspace, aligned_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((1,), torch.uint8, 256), ((64,), torch.float32, 256), ((65,), torch.float32, 512), ((3, 0), torch.bfloat16, 0),
     ((), torch.int64, 256), ((4, 1000, 512), torch.bfloat16, 4_096_000)],
    ids=str,
)  # fmt: skip
def test_aligned_bytes(shape, dtype, expected):
    assert aligned_bytes(shape, dtype) == expected


def test_views_have_shape_dtype_and_device_and_do_not_overlap(device):
    requests = [((3, 5), torch.float32), ((0, 7), torch.int32), ((129,), torch.bfloat16), ((2, 1, 3), torch.int64)]
    workspace = Workspace(device)
    views = workspace.get(*requests)
    base = views[0].data_ptr()
    for (shape, dtype), view in zip(requests, views, strict=True):
        assert (view.shape, view.dtype, view.device.type) == (torch.Size(shape), dtype, device.type)
        assert view.is_contiguous()
        assert not view.numel() or (view.data_ptr() - base) % ALIGNMENT == 0
    for i, view in enumerate(views):
        view.fill_(i)
    for i, view in enumerate(views):
        assert view.eq(i).all()


def test_grows_to_the_largest_request_and_never_shrinks():
    workspace = Workspace()
    assert workspace.nbytes() == 0
    workspace.get(((300,), torch.uint8))
    assert workspace.nbytes() == 512
    workspace.get(((10,), torch.uint8), ((10,), torch.uint8), ((10,), torch.uint8))
    assert workspace.nbytes() == 768
    workspace.get(((1,), torch.uint8))
    assert workspace.nbytes() == 768


def test_calls_share_memory():
    workspace = Workspace()
    workspace.get(((64,), torch.int32))
    (first,) = workspace.get(((64,), torch.int32))
    first.fill_(7)
    (second,) = workspace.get(((4, 8), torch.int32))
    assert second.data_ptr() == first.data_ptr()
    assert second.eq(7).all()


def test_a_view_survives_growth():
    workspace = Workspace()
    (old,) = workspace.get(((4,), torch.int32))
    old.fill_(3)
    workspace.get(((1000,), torch.int32))[0].fill_(9)
    assert old.eq(3).all()


def test_locked_serves_what_fits_and_refuses_what_does_not():
    workspace = Workspace()
    workspace.get(((2, 128), torch.uint8))
    workspace.lock()
    (view,) = workspace.get(((256,), torch.uint8))
    address = view.data_ptr()
    with pytest.raises(RuntimeError, match=r"locked at 256 bytes and 768 are needed for \[\(2, 65\)\].*warm-up"):
        workspace.get(((2, 65), torch.int32))
    assert workspace.nbytes() == 256
    assert workspace.get(((1,), torch.uint8))[0].data_ptr() == address


def test_nothing_asked_gives_nothing():
    workspace = Workspace()
    workspace.lock()
    assert workspace.get() == []
    assert workspace.get(((0, 512), torch.bfloat16))[0].shape == (0, 512)
