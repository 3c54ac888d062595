"""Fixtures that all tests share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_repeatable():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
