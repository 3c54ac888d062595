"""Every method and property of transformers' caches and layers, with stock caches as the judge.

The names are read off the installed transformers: one that a new version adds fails here until it is in a table below.
"""

import operator

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.cache import OasisLayer
from oasiskv.errors import BatchIndexError, InputError, OasisError, UnsupportedModel

from .families import prompt, tiny
from .judge import WIDE, as_stock, continued, outcome, read, stock_cache

BATCH, LENGTH = 3, 40
SPECIAL = ("__iter__", "__len__", "__getitem__", "__contains__", "__call__", "__copy__", "__deepcopy__", "__reduce_ex__")

AS_STOCK = {
    "crop": [0, -1, -7, -LENGTH, np.int64(-3), torch.tensor(-3), False],
    "batch_select_indices": [
        torch.tensor([True, False, True]),
        torch.tensor([True, True, True]),
        torch.tensor([2, 0]),
        torch.tensor([1, 1, 1, 1]),
        torch.tensor([-1, 0, -3]),
        torch.tensor([2, 1, 0], dtype=torch.int32),
        [1, 0],
        [True, False, False],
        np.array([2, 2]),
        np.array([False, True, True]),
        slice(None, None, 2),
        slice(1, None),
        (0, 2),
    ],
    "reorder_cache": [
        torch.tensor([0, 0, 2]),
        torch.tensor([2, 1, 0]),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, 1, 2, 2, 2]),
    ],
    "batch_repeat_interleave": [1, 2, 4, np.int64(2), torch.tensor(2), torch.tensor([1, 3, 0])],
}
"""Arguments that stock caches take, and what they do is done."""

REFUSED_BEFORE = {
    "crop": [1, LENGTH, True, -LENGTH - 1, -1000, 1.5, None, "2", torch.tensor([1, 2])],
    "batch_select_indices": [
        torch.tensor([0, BATCH]),
        torch.tensor([-BATCH - 1]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([]),
        torch.tensor([False, False, False]),
        torch.tensor([True, True]),
        torch.tensor([True, True, True, False]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 1], [1, 0]]),
        torch.tensor(1),
        1,
        None,
        [],
        "0",
        slice(0, 0),
    ],
    "reorder_cache": [
        torch.tensor([0, BATCH, 1]),
        torch.tensor([-1, 0, 1]),
        torch.tensor([True, False, True]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([[0, 1, 2]]),
        None,
    ],
    "batch_repeat_interleave": [0, -1, 10**9, 10**30, -(10**30), 1.5, None, "2", torch.tensor([1, 2]), torch.tensor([0, 0, 0])],
}
"""Arguments that are refused, before anything changes; stock caches raise, or hold no batch of the whole text afterwards."""

QUERIES = {
    "get_seq_length": [(), (0,), (1,), (99,)],
    "get_max_length": [(), (0,), (99,)],
    "get_mask_sizes": [(3, 0), (3, 1), (1, 99)],
    "get_query_offset": [(), (1,)],
    "has_previous_state": [(), (0,), (99,)],
    "get_conv_state": [(0,)],
    "get_recurrent_state": [(0,)],
    "get_max_cache_shape": [()],
    "update_conv_state": [(torch.zeros(1), 0)],
    "update_recurrent_state": [(torch.zeros(1), 0)],
    "update_indexer": [(torch.zeros(1), 0)],
    "is_recording_past": [(0,)],
    "__len__": [()],
    "batch_size": None,
    "max_batch_size": None,
    "max_cache_len": None,
    "is_compileable": None,
    "is_croppable": None,
    "is_initialized": None,
    "is_sliding": None,
    "is_linear": None,
    "is_dummy": None,
}
"""What is only asked: the same answer as of a stock cache, or an exception where that raises one. `None` marks a property."""

REFUSED = {
    "early_initialization": (1, 2, 8, torch.float32, "cpu"),
    "offload": (0,),
    "prefetch": (0,),
    "__iter__": (),
    "__copy__": (),
    "__reduce_ex__": (4,),
}
"""Never done."""

ELSEWHERE = {
    "update": "inside of a forward only: test_rows_outside_of_a_forward",
    "reset": "test_reset",
    "activate_past_recording": "test_hybrid_changes.py; the answer of is_recording_past differs, as rows are drafts then",
    "__deepcopy__": "test_copies.py",
}

LAYER_QUERIES = {
    "get_seq_length": [()],
    "get_max_length": [()],
    "get_mask_sizes": [(3,)],
    "get_max_cache_shape": [()],
    "is_compileable": None,
    "is_croppable": None,
    "is_sliding": None,
    "supports_early_init": None,
}
LAYER_REFUSED = {
    "reset": (),
    "crop": (-1,),
    "reorder_cache": (torch.tensor([0]),),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (torch.tensor([0]),),
    "offload": (),
    "prefetch": (),
    "__reduce_ex__": (4,),
}
LAYER_ELSEWHERE = {
    "update": "inside of a forward only: test_rows_outside_of_a_forward",
    "lazy_initialization": "takes no memory, and changes nothing",
}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def names(*classes):
    """What the installed transformers offers."""
    found = {name for kind in classes for base in kind.__mro__ if base is not object for name in vars(base)}
    return {name for name in found if not name.startswith("_") or name in SPECIAL}


def test_every_name_of_a_cache_is_decided_on():
    decided = {*AS_STOCK, *QUERIES, *REFUSED, *ELSEWHERE}
    assert names(Cache, DynamicCache) <= decided
    assert names(OasisCache) - names(Cache, DynamicCache) <= decided | {
        *("for_model", "shape", "columns", "recording", "stats", "close", "history_recorded"),
        *("before_forward", "after_forward", "check_rows", "attend", "see"),
    }


def test_every_name_of_a_layer_is_decided_on():
    decided = {*LAYER_QUERIES, *LAYER_REFUSED, *LAYER_ELSEWHERE}
    assert names(CacheLayerMixin, DynamicLayer) <= decided
    assert names(OasisLayer) - names(CacheLayerMixin, DynamicLayer) <= decided | {
        "cache",
        "attend",
        "copied",
        "activate_past_recording",
    }


def cases(table):
    return [pytest.param(name, value, id=f"{name}-{number}") for name in table for number, value in enumerate(table[name])]


@pytest.mark.parametrize(("name", "argument"), cases(AS_STOCK))
def test_what_stock_does_is_done(model, name, argument):
    assert as_stock(model, prompt(BATCH, LENGTH), lambda cache: getattr(cache, name)(argument)) == "as stock"


@pytest.mark.parametrize(("name", "argument"), cases(REFUSED_BEFORE))
def test_what_is_refused_changes_nothing(model, name, argument):
    assert as_stock(model, prompt(BATCH, LENGTH), lambda cache: getattr(cache, name)(argument)) == "refused"


@pytest.mark.parametrize("name", sorted(AS_STOCK))
def test_an_empty_cache_has_no_batch_to_change(model, name):
    """Stock layers without tokens are left alone."""
    value = {"crop": 0, "batch_repeat_interleave": 3}.get(name, torch.tensor([5, 5]))
    with OasisCache.for_model(model, WIDE) as cache:
        getattr(cache, name)(value)
        wanted = continued(model, stock_cache(model), 2)
        torch.testing.assert_close(continued(model, cache, 2), wanted, atol=1e-3, rtol=0)


def test_indices_out_of_range_are_an_index_error_as_of_stock(model):
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, prompt(2, 10))
        with pytest.raises(IndexError, match=r"tensor\(\[0, 2\]\).*out of bounds.*pass indices") as caught:
            cache.batch_select_indices(torch.tensor([0, 2]))
        assert isinstance(caught.value, BatchIndexError)
        with pytest.raises(BatchIndexError, match=r"keeps none of 2 sequences; reset\(\)"):
            cache.batch_select_indices([False, False])
        with pytest.raises(BatchIndexError, match=r"makes a batch of 2000000000000, of which this machine holds at most"):
            cache.batch_repeat_interleave(10**12)


STATES = {
    "fresh": [],
    "prefilled": [lambda cache, model: read(model, cache, prompt(2, 30))],
    "cropped": [lambda cache, model: read(model, cache, prompt(2, 30)), lambda cache, _: cache.crop(-30)],
    "decoded": [lambda cache, model: continued(model, cache, 1)],
}


@pytest.mark.parametrize("state", sorted(STATES))
def test_questions_are_answered_as_by_stock(model, state):
    stock = stock_cache(model)
    with OasisCache.for_model(model, WIDE) as ours:
        for cache in (stock, ours):
            for do in STATES[state]:
                do(cache, model)
        for table, pair in ((QUERIES, (stock, ours)), (LAYER_QUERIES, (stock.layers[1], ours.layers[1]))):
            for name, calls in table.items():
                if not hasattr(type(pair[0]), name):  # of another version of transformers
                    continue
                if calls is None:
                    assert getattr(pair[1], name) == getattr(pair[0], name), name
                for arguments in calls or []:
                    answers = [outcome(getattr(cache, name), *arguments) for cache in pair]
                    same = type(answers[0]) is type(answers[1]) if isinstance(answers[0], Exception) else operator.eq(*answers)
                    assert same, (name, arguments, answers)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_never_of_a_cache(model, name):
    with OasisCache.for_model(model, WIDE) as cache, pytest.raises(UnsupportedModel, match="OasisCache"):
        getattr(cache, name)(*REFUSED[name])


@pytest.mark.parametrize("name", sorted(LAYER_REFUSED))
def test_never_of_a_layer_alone(model, name):
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, prompt(2, 10))
        with pytest.raises(UnsupportedModel, match="OasisCache"):
            getattr(cache.layers[1], name)(*LAYER_REFUSED[name])
        wanted = continued_after(model, prompt(2, 10))
        torch.testing.assert_close(continued(model, cache, 2), wanted, atol=1e-3, rtol=0)


def continued_after(model, ids):
    """What follows a text, by a stock cache."""
    stock = stock_cache(model)
    read(model, stock, ids)
    return continued(model, stock, len(ids))


def test_rows_outside_of_a_forward(model):
    rows = torch.zeros((1, 2, 1, 8))
    with OasisCache.for_model(model, WIDE) as cache:
        for call in (lambda: cache.update(rows, rows, 0), lambda: cache.layers[0].update(rows, rows)):
            with pytest.raises(InputError, match="call the model"):
                call()


def test_reset(model):
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, prompt(2, 30))
        cache.activate_past_recording()
        cache.reset()
        assert (cache.get_seq_length(), cache.is_initialized, cache.layers[0].record_past) == (0, False, False)
        assert cache.manager.sequences == []
        torch.testing.assert_close(continued(model, cache, 3), continued(model, stock_cache(model), 3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_the_wrong_shape(model, padded):
    ids, more = prompt(2, 20), prompt(2, 3, seed=5)
    mask = torch.ones((2, 23), dtype=torch.int64)
    mask[1, :6] = 0 if padded else 1
    answers = []
    for make in (stock_cache, lambda m: OasisCache.for_model(m, WIDE)):
        cache = make(model)
        model(ids, attention_mask=mask[:, :20], past_key_values=cache)
        if isinstance(cache, OasisCache):
            for wrong in (mask[:, -3:], mask[:, 1:], mask[:1], torch.ones((2, 1)), mask.repeat(2, 1)):
                with pytest.raises(
                    InputError, match=r"attention mask has shape .* needs \(2, 23\): 20 cached columns and 3 new"
                ):
                    model(more, attention_mask=wrong, past_key_values=cache)
            if padded:
                with pytest.raises(InputError, match="shows 23 tokens of a sequence that has 14"):
                    model(more, attention_mask=torch.ones_like(mask), past_key_values=cache)
        longer = torch.nn.functional.pad(mask, (0, 4), value=0)  # stock leaves out what lies behind the new tokens
        answers.append(model(more, attention_mask=longer, past_key_values=cache).logits[:, -1])
    cache.close()
    torch.testing.assert_close(answers[1], answers[0], atol=1e-3, rtol=0)


def test_a_mask_that_is_longer_than_the_text(model):
    """Stock caches leave out what lies behind the new tokens, also where a prompt is padded."""
    ids = prompt(2, 20)
    mask = torch.ones((2, 20), dtype=torch.int64)
    mask[1, :6] = 0
    longer = torch.nn.functional.pad(mask, (0, 4), value=1)
    answers = []
    for make in (stock_cache, lambda m: OasisCache.for_model(m, WIDE)):
        cache = make(model)
        answers.append(model(ids, attention_mask=longer, past_key_values=cache).logits[:, -1])
        assert cache.get_seq_length() == 20
    torch.testing.assert_close(answers[1], answers[0], atol=1e-3, rtol=0)
    assert [sequence.length for sequence in cache.manager.sequences] == [20, 14]
    cache.close()


def test_a_mask_that_is_refused_begins_no_batch(model):
    with OasisCache.for_model(model, WIDE) as cache:
        for wrong in (torch.ones((2, 9)), torch.tensor([[1] * 9 + [0]] * 2)):
            with pytest.raises(InputError, match="attention mask"):
                model(prompt(2, 10), attention_mask=wrong, past_key_values=cache)
        assert cache.manager.sequences == []
        torch.testing.assert_close(continued(model, cache, 3), continued(model, stock_cache(model), 3), atol=1e-3, rtol=0)


def test_crop_into_the_padding_of_a_batch(model):
    ids, more = prompt(2, 20), prompt(2, 5, seed=5)
    mask = torch.ones((2, 25), dtype=torch.int64)
    mask[1, :18] = 0
    answers = []
    for make in (stock_cache, lambda m: OasisCache.for_model(m, WIDE)):
        cache = make(model)
        model(ids, attention_mask=mask[:, :20], past_key_values=cache)
        cache.crop(-6)
        positions = (mask[:, :19].cumsum(1) - 1).clamp(min=0)[:, -5:]
        output = model(more, attention_mask=mask[:, :19], position_ids=positions, past_key_values=cache)
        assert cache.get_seq_length() == 19
        answers.append(output.logits[:, -1])
    torch.testing.assert_close(answers[1], answers[0], atol=1e-3, rtol=0)
    cache.manager.check_integrity()
    cache.close()


@pytest.mark.parametrize("call", ["crop", "batch_select_indices", "reset", "reorder_cache", "batch_repeat_interleave"])
def test_a_closed_cache_says_so(model, call):
    cache = OasisCache.for_model(model, WIDE)
    read(model, cache, prompt(2, 10))
    cache.close()
    arguments = {"crop": (-1,), "reset": (), "batch_repeat_interleave": (2,)}.get(call, (torch.tensor([0]),))
    with pytest.raises(OasisError, match="the OasisCache is closed"):
        getattr(cache, call)(*arguments)
