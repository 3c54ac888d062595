import dataclasses
import re

import pytest

from oasiskv import OasisConfig
from oasiskv.errors import ConfigError

TINY = {"budget_tokens": 40, "block_size": 4, "sink_tokens": 4, "window_tokens": 4}


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("budget_tokens", 0, "at least 1"),
        ("budget_tokens", -16, "at least 1"),
        ("budget_tokens", 2048.0, "integer"),
        ("budget_tokens", True, "integer"),
        ("budget_tokens", None, "integer"),
        ("block_size", 0, "at least 1"),
        ("block_size", 2, "between 4 and 64"),
        ("block_size", 7, "even"),
        ("block_size", 66, "between 4 and 64"),
        ("block_size", "16", "integer"),
        ("sink_tokens", -1, "at least 0"),
        ("window_tokens", 0, "at least 1"),
        ("window_tokens", 1.5, "integer"),
        ("max_new_blocks", -1, "at least 0"),
        ("correction_blocks", -1, "at least 0"),
        ("workers", -1, "at least 0"),
        ("workers", True, "integer"),
        ("pool_bytes", 0, "at least 1"),
        ("arena_bytes", -5, "at least 1"),
        ("dense_threshold", 0, "at least 1"),
        ("tier_patience_s", -0.1, "at least 0"),
        ("tier_patience_s", float("inf"), "at least 0"),
        ("tier_patience_s", None, "at least 0"),
        ("tier_patience_s", True, "at least 0"),
        ("swap_margin", -0.1, "at least 0"),
        ("swap_margin", float("inf"), "at least 0"),
        ("swap_margin", True, "at least 0"),
        ("correction_margin", -1, "at least 0"),
        ("correction_margin", "low", "at least 0"),
        ("swap_margin", float("nan"), "at least 0"),
        ("swap_margin", None, "at least 0"),
        ("swap_margin", "low", "at least 0"),
        ("summary", "", "name of a registered plug-in"),
        ("summary", None, "name of a registered plug-in"),
        ("predictor", "", "name of a registered plug-in"),
        ("predictor", 3, "name of a registered plug-in"),
        ("on_late", "drop", '"wait" or "skip"'),
        ("on_late", None, '"wait" or "skip"'),
    ],
)
def test_an_invalid_field_is_named_with_its_value_and_a_fix(field, value, fix):
    with pytest.raises(ConfigError) as caught:
        OasisConfig(**{field: value})
    message = str(caught.value)
    assert field in message
    assert repr(value).strip("'") in message
    assert fix in message


def test_a_budget_between_blocks_names_both_neighbours_and_they_work():
    with pytest.raises(ConfigError, match="budget_tokens is 42, not a multiple of block_size 4; use 40 or 44"):
        OasisConfig(**{**TINY, "budget_tokens": 42})
    for budget in (40, 44):
        assert OasisConfig(**{**TINY, "budget_tokens": budget}).budget_tokens == budget


@pytest.mark.parametrize("budget", [1, 3, 10, 30])
def test_no_budget_is_proposed_that_is_too_small(budget):
    with pytest.raises(ConfigError, match=f"budget_tokens is {budget}, not a multiple of block_size 4; use 32$"):
        OasisConfig(**{**TINY, "budget_tokens": budget})
    assert OasisConfig(**{**TINY, "budget_tokens": 32}).selected_blocks == 1


@pytest.mark.parametrize("changes", [{"budget_tokens": 28}, {"sink_tokens": 40}, {"window_tokens": 39}])
def test_a_budget_without_room_for_a_selected_block_names_the_least_that_works(changes):
    settings = {**TINY, **changes}
    with pytest.raises(ConfigError) as caught:
        OasisConfig(**settings)
    message = str(caught.value)
    for field in ("budget_tokens", "sink_tokens", "window_tokens"):
        assert field in message
    least = int(re.search(r"use at least (\d+)", message).group(1))
    assert OasisConfig(**{**settings, "budget_tokens": least}).selected_blocks == 1
    with pytest.raises(ConfigError):
        OasisConfig(**{**settings, "budget_tokens": least - settings["block_size"]})


def test_a_dense_threshold_below_the_budget_names_both():
    with pytest.raises(ConfigError, match=r"dense_threshold is 36, below budget_tokens 40.* use at least 40, or None"):
        OasisConfig(**TINY, dense_threshold=36)
    assert OasisConfig(**TINY, dense_threshold=40).dense_blocks == 10


def test_the_places_of_the_working_set_add_up():
    for block_size in (4, 8, 16, 64):
        for window in (1, 4, 17, 128):
            config = OasisConfig(budget_tokens=1024, block_size=block_size, sink_tokens=5, window_tokens=window)
            assert config.sink_blocks * block_size >= 5
            assert config.window_blocks * block_size >= window
            assert config.sink_blocks + config.ring_blocks + config.selected_blocks == config.budget_blocks


@pytest.mark.parametrize("block_size", [4, 6, 16, 64])
def test_a_step_of_sixteen_rows_never_overwrites_the_window_in_the_ring(block_size):
    config = OasisConfig(budget_tokens=50 * block_size, block_size=block_size, window_tokens=block_size + 1)
    for length in range(1000, 1000 + block_size):
        first = length // block_size - config.window_blocks
        last = (length + 15) // block_size
        assert len({block % config.ring_blocks for block in range(first, last + 1)}) == last - first + 1


def test_dense_blocks_follow_the_threshold_or_the_budget():
    assert OasisConfig(**TINY).dense_blocks == 10
    assert OasisConfig(**TINY, dense_threshold=80).dense_blocks == 20
    assert OasisConfig(**TINY, dense_threshold=83).dense_blocks == 20


def test_a_config_is_frozen_and_takes_names_only():
    config = OasisConfig(**TINY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget_tokens = 80
    with pytest.raises(TypeError):
        OasisConfig(2048)


def test_names_lists_every_setting():
    assert OasisConfig.names() == tuple(field.name for field in dataclasses.fields(OasisConfig))
    assert "budget_tokens" in OasisConfig.names()


def test_the_defaults_are_valid():
    assert OasisConfig().selected_blocks >= 1
