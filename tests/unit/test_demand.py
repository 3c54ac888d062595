import math

import pytest
import torch

from oasiskv import ModelShape, OasisConfig
from oasiskv.demand import Demand
from oasiskv.errors import InputError

LLAMA = ModelShape(num_layers=32, query_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
CONFIG = OasisConfig(budget_tokens=2048, block_size=16)


def demand(**changes):
    values = {"context_tokens": 32768, "batch": 64, "steps_per_s": 50.0, "new_blocks": 4.0}
    return Demand(LLAMA, CONFIG, **{**values, **changes})


def test_by_hand():
    """16 tokens x 128 x 2 bytes, twice, are 8 KiB; 4 x 8 x 32 = 1,024 of them are 8 MiB a token."""
    wanted = demand()
    assert wanted.slot_bytes == 8192
    assert wanted.step_bytes == 8388608
    assert wanted.bytes_per_s == 8388608 * 3200 == 26843545600
    assert wanted.reads_per_call == 2048
    assert wanted.fed_tokens_per_s(50e9) == pytest.approx(5960.46, abs=0.01)
    assert wanted.arithmetic() == (
        "4 new blocks per head and step x 8 heads x 32 layers x 8,192 bytes x batch of 64 x 50 steps/s = 26.8 GB/s"
    )


def test_measured_figures_need_not_be_whole():
    assert demand(new_blocks=0.5, batch=1).step_bytes == 1048576
    assert demand(new_blocks=0.01, batch=1).reads_per_call == 1


@pytest.mark.parametrize(("context", "blocks"), [(100, 0), (2048, 0), (2049, 1), (2048 + 33, 3), (2048 + 64, 4), (1 << 20, 4)])
def test_no_more_is_loaded_than_lies_outside_of_the_budget(context, blocks):
    assert demand(context_tokens=context).loaded_blocks == blocks


def test_no_more_is_loaded_than_there_are_places_for():
    assert demand(new_blocks=1000).loaded_blocks == CONFIG.selected_blocks


def test_what_loads_nothing_is_fed_by_anything():
    idle = demand(context_tokens=2048)
    assert idle.bytes_per_s == 0
    assert idle.fed_tokens_per_s(1.0) == math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("context_tokens", 0), ("steps_per_s", 0.0), ("new_blocks", -1.0), ("steps_per_s", math.nan)],
)
def test_figures_that_cannot_be(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}"):
        demand(**{name: value})
