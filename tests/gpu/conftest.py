"""Tests that need a GPU. No GPU has run them yet."""

import shutil

import pytest
import torch

from benchmarks.gpu import build

from .device import Device


@pytest.fixture(scope="session")
def device(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    return Device(build(tmp_path_factory.mktemp("cuda")))
