"""Fixtures that all tests share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are taken by the other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from oasiskv.testing.backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def anyio_backend(request):
    """The event loops that coroutine tests run on; they are marked with `pytest.mark.anyio`."""
    return request.param


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
