"""A GPU for tests that need one, as the default device."""

import os

import pytest
import torch


@pytest.fixture
def gpu(device, needs_gpu):
    if device.type != "cuda" or not torch.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU; DEEPSEEK_ATTN_TEST_DEVICE is {os.environ.get('DEEPSEEK_ATTN_TEST_DEVICE')}")
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture
def hopper(gpu):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return gpu
