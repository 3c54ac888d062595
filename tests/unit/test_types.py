import dataclasses

import pytest
import torch

from oasiskv import ModelShape, Rotary
from oasiskv.errors import ConfigError, OasisError

GOOD = {"num_layers": 2, "query_heads": 6, "kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize("value", [0, -1, 2.0, None])
def test_a_dimension_that_is_no_positive_integer_is_refused(field, value):
    with pytest.raises(ConfigError, match=rf"ModelShape.{field} is {value!r}; it must be a positive integer"):
        ModelShape(**{**GOOD, field: value})


def test_query_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ConfigError, match=r"query_heads is 5, not a multiple of kv_heads 2.*tensor-parallel"):
        ModelShape(**{**GOOD, "query_heads": 5})


def test_a_dtype_that_is_not_supported_names_those_that_are():
    with pytest.raises(ConfigError, match=r"torch.float64; supported are .*torch.bfloat16"):
        ModelShape(**GOOD, dtype=torch.float64)


def test_sizes():
    shape = ModelShape(**GOOD, dtype=torch.bfloat16)
    assert shape.group_size == 3
    assert shape.slot_bytes(4) == 2 * 4 * 8 * 2
    assert shape.token_bytes() == 2 * 2 * 2 * 8 * 2


def test_a_device_may_be_given_by_name():
    assert ModelShape(**GOOD, device="cpu").device == torch.device("cpu")


def test_a_shape_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelShape(**GOOD).num_layers = 3


def test_planes_span_the_two_halves_of_the_turning_dimensions():
    turning = Rotary((0.5, 0.25)).turning(6)
    assert turning.tolist() == [0.5, 0.25, 0.5, 0.25, 0.0, 0.0]


def test_more_planes_than_dimensions_are_refused():
    with pytest.raises(ConfigError, match=r"holds 3 planes, but head_dim 4 has room for 2"):
        Rotary((0.1, 0.2, 0.3)).turning(4)


def test_config_errors_are_value_errors_too():
    with pytest.raises(ValueError, match="num_layers"):
        ModelShape(**{**GOOD, "num_layers": 0})
    assert issubclass(ConfigError, OasisError)
