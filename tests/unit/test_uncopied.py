import copy
import pickle

import pytest
import torch

from oasiskv import KVManager, ModelShape, OasisConfig
from oasiskv.errors import UnsupportedModel

SHAPE = ModelShape(num_layers=1, query_heads=2, kv_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", ["arena", "pool"])
def test_memory_is_not_copied(act, part):
    with KVManager(SHAPE, OasisConfig(workers=0)) as manager:
        sequence = manager.create()
        with pytest.raises(UnsupportedModel, match=r"cannot be copied or pickled: .*KVManager.fork"):
            act(getattr(manager.rooms, part))
        assert manager.sequences == [sequence]


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", ["manager", "sequence", "step"])
def test_what_stands_for_memory_is_not_copied(act, thing):
    with KVManager(SHAPE, OasisConfig(workers=0)) as manager:
        sequence = manager.create()
        things = {"manager": manager, "sequence": sequence, "step": manager.begin_step([sequence], [3])}
        with pytest.raises(UnsupportedModel, match=r"cannot be copied or pickled: .*KVManager.fork"):
            act(things[thing])


def test_a_manager_with_an_arena_of_the_size_of_the_machine_is_not_copied():
    with KVManager(SHAPE, OasisConfig(workers=0)) as manager, pytest.raises(UnsupportedModel, match="cannot be copied"):
        copy.deepcopy(manager)
