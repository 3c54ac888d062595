import mmap
import platform

import pytest

from oasiskv import numa


def test_there_is_at_least_one_node():
    assert numa.nodes() >= 1


@pytest.mark.parametrize("node", [0, 63])
def test_bind_says_whether_it_worked_and_the_memory_is_usable_either_way(node):
    region = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert isinstance(numa.bind(region, node), bool)
    region[:] = b"\x05" * len(region)
    assert region[:] == b"\x05" * len(region)
    region.close()


def test_a_machine_whose_system_call_is_unknown_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    region = mmap.mmap(-1, 4096)
    assert numa.bind(region, 0) is False
    region.close()
